"""VITP as the paper has it: a network that predicts values of the weights, token by token."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from cpsr.benchmarks.recovery.methods.elementwise_network import MAX_SNAPSHOTS, Network, new_network, timing
from cpsr.predictor import prior
from cpsr.predictor.combine import read_piece
from cpsr.predictor.denoise import bands
from cpsr.predictor.obstacles import too_far, too_few, window_start
from cpsr.predictor.protocol import Forecast, History, HistoryEntry, Target
from cpsr.predictor.series import Series, distinct_times, operator_series
from cpsr.predictor.series_predictor import CHUNK_ELEMENTS, Fit, SeriesPredictor
from cpsr.predictor.vitp_network import undisturbed

__all__ = ["ElementwisePredictor"]

STATE_VERSION = 1
# The history is kept for this long by default.
WINDOW_ITERATIONS = 400
# Three snapshots have no mid band.
MIN_SNAPSHOTS = 4
TOKEN_ELEMENTS = 1024
# Values that pass the network together: 16 snapshots of them are 4 MiB. Fixed, so that a result does not depend on how
# predicted values are streamed.
BLOCK_ELEMENTS = 1 << 16
# A step on 8192 values at 16 snapshots takes a few milliseconds on one core.
STEP_ELEMENTS = 1 << 13
STEPS_PER_CHECKPOINT = 32
# Past checkpoints that are asked for: the run of long ago, seen through shorter windows, is not what comes next.
RECENT_SNAPSHOTS = 8
# Later checkpoints that a past one is denoised with.
LATER_SNAPSHOTS = 4
# Falls to zero over each checkpoint's steps, so that their noise does not stay in the weights.
LEARNING_RATE = 1e-3
WEIGHT_DECAY = 1e-2
# Any number: what matters is that it is the same in every life of every run.
SEED = 20_261_122
# Below this size of the mid band in float32 a ratio to it says nothing.
TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class _Example:
    """Tokens of one operator at an earlier time, and what became of them.

    Attributes:
        mid: as the network takes it, `(B, K, T)`.
        times: likewise.
        later: the denoised weights at the later time less the extrapolated baseline, in the same units, `(B, T)`.
    """

    mid: torch.Tensor
    times: torch.Tensor
    later: torch.Tensor


class ElementwisePredictor(SeriesPredictor):
    """FDD's baseline extrapolated, and a mid band that a network predicts value by value (a `StatePredictor`).

    It is here to be compared with: the paper's own form beside coefficients per operator. `CPSRRecovery` does not
    offer it. A `Forecast` holds rows of the baseline alone, so its coefficients do not say what `predict` streams. The
    guard's `shorten` reaches the baseline only. Ranks that hold slices of one tensor train networks of their own.

    The weights of each operator over the last 400 iterations (at least 3, at most 16 snapshots) are split by FDD. The
    low band is extrapolated to the failure, the high band is dropped. The mid band is the kept bins of the Fourier
    transform back at the time of each snapshot. It is cut into tokens of values in a row. The network takes one token
    at all snapshots, with the embeddings of their times, and gives it at the failure. It starts by giving zero. It is
    trained on the run's own past as checkpoints arrive (`learn`), on random tokens at an earlier snapshot. Its target
    is the denoised weights of a later one less the extrapolated baseline.

    Source: CPSR, sections III-A and VI-C4, Eq. 9; trained on denoised targets, since noise shrinks it to nothing.

    Args:
        chunk_elements: as in `SeriesPredictor`, rounded up to whole blocks of 65536 values; the network's work on one
            block takes up to 20 MiB beside them.
        agree: as in `SeriesPredictor`.
        name: as in `SeriesPredictor`.
        token_elements: values in a token; a power of 2, at most 8192.

    Raises:
        ValueError: fewer than 1 element a piece, or another number of values in a token.
    """

    name = "vitp-elementwise"

    def __init__(
        self,
        chunk_elements: int = CHUNK_ELEMENTS,
        agree: Callable[[Sequence[int]], Sequence[int]] | None = None,
        name: str | None = None,
        *,
        token_elements: int = TOKEN_ELEMENTS,
    ) -> None:
        super().__init__(chunk_elements, agree, name)
        if not 1 <= token_elements <= STEP_ELEMENTS or STEP_ELEMENTS % token_elements:
            raise ValueError(f"token_elements = {token_elements}: expected a power of 2, at most {STEP_ELEMENTS}")
        self._chunk_elements = -(-chunk_elements // BLOCK_ELEMENTS) * BLOCK_ELEMENTS
        self._token_elements = token_elements
        self._network = new_network(token_elements, SEED)
        self._seen_iteration = -1
        self._steps = 0

    def predict(self, history: History, forecast: Forecast) -> Iterator[tuple[str, int, torch.Tensor]]:
        """Stream the predicted weights as `(operator, start, values)` pieces, `values` 1-D float32, fresh memory.

        Raises:
            ValueError: the forecast is not feasible, or does not belong to this history.
        """
        return self._with_mid_band(history, forecast, super().predict(history, forecast))

    def learn(self, history: History) -> Iterator[None]:
        """Train on the history with its newest checkpoint: 32 steps, in slices of reading and of one step each."""
        if not history.entries or history.entries[-1].iteration <= self._seen_iteration:
            return
        newest = history.entries[-1].iteration
        with _undisturbed():
            network = copy.deepcopy(self._network)
            # A new one each time: so that a run goes on after a failure exactly as it would have, its moments are
            # never kept beyond the checkpoint.
            optimizer = torch.optim.AdamW(
                network.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, foreach=False
            )
        generator = torch.Generator().manual_seed(SEED + newest)
        steps = 0
        for _ in range(STEPS_PER_CHECKPOINT):
            with _undisturbed():
                example = self._example(history, generator)
            yield
            if example is not None:
                with _undisturbed():
                    _step(network, optimizer, LEARNING_RATE * (1.0 - steps / STEPS_PER_CHECKPOINT), example)
                steps += 1
                yield
        self._network, self._seen_iteration, self._steps = network, newest, self._steps + steps

    def state_dict(self) -> dict[str, Any]:
        """Past recoveries and the network: `elementwise` holds its weights in one float32 vector, a third of a MiB.

        With tokens of 4096 values it is 1.1 MiB.
        """
        learned = {
            "version": STATE_VERSION,
            "token_elements": self._token_elements,
            "seen_iteration": self._seen_iteration,
            "steps": self._steps,
            "parameters": nn.utils.parameters_to_vector(self._network.parameters()).detach().clone(),
        }
        return {**super().state_dict(), "elementwise": learned}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict()` returned.

        Raises:
            ValueError: the state was written by another predictor, another version or for other tokens; nothing has
                changed.
        """
        learned = state.get("elementwise", {})
        found = learned.get("version"), learned.get("token_elements")
        if state.get("predictor") == self.name and found != (STATE_VERSION, self._token_elements):
            raise ValueError(
                f"learned state of elementwise VITP, version {found[0]!r} with tokens of {found[1]!r} values; this is "
                f"version {STATE_VERSION} with {self._token_elements}"
            )
        super().load_state_dict(state)
        with torch.no_grad():
            # A copy: the parameters become views of the vector.
            nn.utils.vector_to_parameters(learned["parameters"].clone(), self._network.parameters())
        self._seen_iteration, self._steps = learned["seen_iteration"], learned["steps"]

    def _obstacle(self, points: Sequence[HistoryEntry], target: Target) -> str | None:
        few = too_few(points, prior.MIN_CHECKPOINTS)
        return few or too_far(target, points[_start(points) :])

    def _fit(self, points: Sequence[HistoryEntry], target: Target) -> Fit:
        places = _window(points)
        row = [0.0] * len(points)
        baseline = bands([points[place].time for place in places]).baseline_at(target.time)
        for place, value in zip(places, baseline.tolist(), strict=True):
            row[place] = value
        return Fit(tuple(row), tuple(places), settings={"window_iterations": WINDOW_ITERATIONS, "steps": self._steps})

    def _with_mid_band(
        self, history: History, forecast: Forecast, pieces: Iterator[tuple[str, int, torch.Tensor]]
    ) -> Iterator[tuple[str, int, torch.Tensor]]:
        left_out = set(forecast.settings["left_out_not_finite"])
        usable = [place for place, entry in enumerate(history.entries) if entry.iteration not in left_out]
        time = history.entries[usable[-1]].time + forecast.settings["horizon_time"]
        for operator, start, values in pieces:
            series = operator_series(history, operator, usable)
            # A row of one coefficient takes a snapshot as it is: there is nothing to predict, or too little to go by.
            kept = sum(value != 0.0 for value in forecast.coefficients[operator]) == 1
            if not kept and len(_window(series.points)) >= MIN_SNAPSHOTS:
                self._add_mid_band(history, operator, series, time, start, values)
            yield operator, start, values

    def _add_mid_band(
        self, history: History, operator: str, series: Series, time: float, start: int, values: torch.Tensor
    ) -> None:
        """Add the network's mid band at `time` to the baseline's `values`, which begin at a whole token."""
        places = _window(series.points)
        split = bands([series.points[place].time for place in places])
        entries = [series.indices[place] for place in places]
        with _undisturbed(), torch.no_grad():
            mid_rows = torch.from_numpy(split.mid).float()
            times = timing(torch.from_numpy(split.times), time)
            for offset in range(0, len(values), BLOCK_ELEMENTS):
                block = values[offset : offset + BLOCK_ELEMENTS]
                first = start + offset
                differences = _differences(history, operator, entries, entries[-1], first, first + len(block))
                mid, size = self._tokens(mid_rows @ differences)
                block += (self._network(mid, times) * size).flatten()[: len(block)]

    def _tokens(self, mid: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A mid band `(K, n)` as the network takes it, `(B, K, T)`, and the size that it is divided by, `(B, 1)`."""
        tokens = self._cut(mid)
        values = len(mid) * min(self._token_elements, mid.shape[1])
        size = torch.linalg.vector_norm(tokens, dim=(1, 2)) / values**0.5
        return tokens / size.clamp_min(TINY)[:, None, None], size[:, None]

    def _cut(self, values: torch.Tensor) -> torch.Tensor:
        """Rows `(K, n)` cut into tokens, `(B, K, T)`; the last is filled up with zeros."""
        missing = -values.shape[1] % self._token_elements
        return nn.functional.pad(values, (0, missing)).view(len(values), -1, self._token_elements).transpose(0, 1)

    def _example(self, history: History, generator: torch.Generator) -> _Example | None:
        """Tokens at a random place; None where they show nothing: too few snapshots, damaged, or never moved."""
        numels = torch.tensor([history.numel(operator) for operator in history.operators], dtype=torch.float64)
        if not bool(numels.sum() > 0):
            return None
        operator = history.operators[int(torch.multinomial(numels, 1, generator=generator))]
        series = operator_series(history, operator, range(len(history.entries)))
        question = _question(series.points, generator)
        if question is None:
            return None
        start = _random(-(-history.numel(operator) // STEP_ELEMENTS), generator) * STEP_ELEMENTS
        stop = min(start + STEP_ELEMENTS, history.numel(operator))
        entries = [series.indices[place] for place in question.places]
        newest_seen = entries[question.seen - 1]
        differences = _differences(history, operator, entries, newest_seen, start, stop)
        return self._answered(question, [series.points[place].time for place in question.places], differences)

    def _answered(self, question: "_Question", times: Sequence[float], differences: torch.Tensor) -> _Example | None:
        before = bands(times[: question.seen])
        differences_before, asked_time = differences[: question.seen], times[question.seen]
        mid, size = self._tokens(torch.from_numpy(before.mid).float() @ differences_before)
        denoised = torch.from_numpy(bands(times).denoised[question.seen]).float() @ differences
        baseline = torch.from_numpy(before.baseline_at(asked_time)).float() @ differences_before
        later = self._cut((denoised - baseline)[None])[:, 0]
        known = torch.isfinite(size[:, 0]) & (size[:, 0] > TINY) & torch.isfinite(later).all(dim=1)
        if not bool(known.any()):
            return None
        timed = timing(torch.from_numpy(before.times), asked_time)
        return _Example(mid[known], timed, later[known] / size[known])


@dataclass(frozen=True)
class _Question:
    """What is asked of a past window.

    Attributes:
        places: of the snapshots, ascending: those that are seen, the one that is asked for, and later ones.
        seen: how many are seen.
    """

    places: tuple[int, ...]
    seen: int


def _question(points: Sequence[HistoryEntry], generator: torch.Generator) -> _Question | None:
    """A random snapshot, asked for from those before it; later ones help to denoise it. None: there are too few."""
    places = distinct_times(points, range(len(points)))
    candidates = len(places) - MIN_SNAPSHOTS
    if candidates < 1:
        return None
    asked = len(places) - 1 - _random(min(candidates, RECENT_SNAPSHOTS), generator)
    seen = _window([points[place] for place in places[:asked]])
    last = min(asked + LATER_SNAPSHOTS, len(places) - 1)
    return _Question(tuple(places[seen[0] : last + 1]), seen=len(seen))


def _step(network: Network, optimizer: torch.optim.Optimizer, learning_rate: float, example: _Example) -> None:
    """One update by the mean squared error (Eq. 9)."""
    optimizer.param_groups[0]["lr"] = learning_rate
    loss = nn.functional.mse_loss(network(example.mid, example.times), example.later)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    optimizer.step()


def _window(points: Sequence[HistoryEntry]) -> list[int]:
    """Places of the snapshots that are split into bands, strictly ascending in time; of at least three `points`."""
    return distinct_times(points, range(_start(points), len(points)))[-MAX_SNAPSHOTS:]


def _start(points: Sequence[HistoryEntry]) -> int:
    return min(window_start(points, WINDOW_ITERATIONS), len(points) - prior.MIN_CHECKPOINTS)


def _differences(
    history: History, operator: str, entries: Sequence[int], pivot: int, start: int, stop: int
) -> torch.Tensor:
    """Weights `[start, stop)` in the entries less those in `pivot`, `(K, stop - start)` float32.

    Rows of bands sum to 0 or are applied as a displacement, so that a constant leaves the result alone. What is
    common to all snapshots would only cost precision.
    """
    base = read_piece(history, operator, pivot, start, stop)
    return torch.stack([read_piece(history, operator, entry, start, stop) - base for entry in entries])


def _random(count: int, generator: torch.Generator) -> int:
    return int(torch.randint(count, (1,), generator=generator))


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Also on the CPU, where the training loop's default device is another."""
    with undisturbed(), torch.device("cpu"):
        yield
