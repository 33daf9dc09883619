"""The CPSR paper's predictor, value by value, beside the line: `python -m cpsr.benchmarks.recovery.published`.

Every scalar's series over the newest checkpoints is one sample. FDD splits it into bands over the cumulative learning
rate: the line is the baseline, the lowest 40% of the bins go to the network, the rest is dropped. VITP is a transformer
over the checkpoints. It starts from the checkpoint's weights: untrained, it predicts a stale restart. It is trained on
the run's own past, within a share of the job's computation.

Source: CPSR, section III-A.
"""

import itertools
import math
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal, cast

import numpy
import torch
from torch import nn
from torch.nn import functional

from cpsr.benchmarks.harness.files import open_tensors, read_json, write_json
from cpsr.benchmarks.harness.processes import Workers
from cpsr.benchmarks.recovery import ending
from cpsr.benchmarks.recovery import trajectory as trajectories
from cpsr.benchmarks.recovery.failure import Failure
from cpsr.benchmarks.recovery.grid import Point, points
from cpsr.benchmarks.recovery.methods import target_of
from cpsr.benchmarks.recovery.tasks import BATCH_WINDOWS, FINAL_CHUNKS, TextTask
from cpsr.benchmarks.recovery.trainer import State, Tensors
from cpsr.benchmarks.recovery.trajectory import Run, Trajectory
from cpsr.benchmarks.recovery.workload import WORKLOADS, Workload
from cpsr.demo.model import GPT, GPTConfig
from cpsr.predictor.denoise import bands
from cpsr.predictor.guard import Guard, measure, shorten
from cpsr.predictor.line import LinePredictor
from cpsr.predictor.vitp import VITPPredictor

__all__ = ["main"]

Kind = Literal["weights", "exp_avg", "exp_avg_sq"]
# `raw`: the displacement until the next checkpoint. `later`: at the pace of the motion from 1 to 4 checkpoints later
# (fewer in a short run), without the noise of the newest checkpoint.
MOMENTS: tuple[Kind, ...] = ("exp_avg", "exp_avg_sq")
Aim = Literal["raw", "later"]
LATER = 4
MOST, FEWEST = 8, 4  # checkpoints that a network sees; the former, too, windows that it is trained on
DIMENSION, HEADS, HIDDEN = 16, 2, 32
FREQUENCIES = tuple(0.25 * 2.0**octave for octave in range(5))
KNOWN, TIMES = 4, 2 + 2 * len(FREQUENCIES)  # facts of a series beside its mid band, and of a time
BATCH, BLOCK = 512, 1 << 11  # series in an update, and in a piece of a prediction
RATE, SEED = 3e-3, 20_261_129
FURTHEST = 8.0  # a target counts up to so many of its series' own steps
TINY = 1e-12


class Series:
    """All scalars of one kind at a run's checkpoints, up to one of them: `values` are `(checkpoints, scalars)`."""

    def __init__(self, trajectory: Trajectory, point: Point, kind: Kind) -> None:
        iterations = range(point.interval, point.checkpoint + 1, point.interval)
        self.times = [trajectory.workload.times[at] for at in iterations]
        with open_tensors(trajectory.path) as file:
            prefix = f"weights/{iterations[-1]}/"
            self.names = sorted(key.removeprefix(prefix) for key in file.keys() if key.startswith(prefix))  # noqa: SIM118
            rows = [[file.get_tensor(f"{kind}/{at}/{name}") for name in self.names] for at in iterations]
        sizes = numpy.cumsum([0, *(len(values) for values in rows[0])]).tolist()
        self.spans = list(itertools.pairwise(sizes))
        self.values = torch.stack([torch.cat(row) for row in rows])

    @cache  # noqa: B019 - lives as long as the measurement of one failure
    def straightness(self, end: int) -> torch.Tensor:
        """Cosine between the two halves of each operator's path up to checkpoint `end`, by scalar."""
        seen = self.values[max(0, end + 1 - MOST) : end + 1]
        half = len(seen) // 2
        first, second = seen[half] - seen[0], seen[-1] - seen[half]
        found = torch.empty(self.values.shape[1])
        for begin, stop in self.spans:
            found[begin:stop] = functional.cosine_similarity(first[begin:stop], second[begin:stop], dim=0)
        return found

    def by_operator(self, vector: torch.Tensor) -> Tensors:
        """One value a scalar, by operator."""
        return {name: vector[begin:end] for name, (begin, end) in zip(self.names, self.spans, strict=True)}


@dataclass(frozen=True)
class Window:
    """What a network sees of B series at K checkpoints, in each series' own steps."""

    mid: torch.Tensor  # the mid band, `(K, B)`
    known: torch.Tensor  # the baseline's displacement and other facts, `(KNOWN, B)`
    timing: torch.Tensor  # of the checkpoints and the asked time, `(K + 1, TIMES)`
    step: torch.Tensor  # root mean square of the steps from checkpoint to checkpoint, `(B,)`
    ahead: float  # the asked time after the newest checkpoint, in mean gaps

    @classmethod
    def of(cls, values: torch.Tensor, straight: torch.Tensor, times: Sequence[float], asked: float) -> "Window":
        """The window of `values` `(K, B)` at these times."""
        split, away, ahead = bands(times), values - values[-1], asked - times[-1]
        steps = away.diff(dim=0)
        step = steps.square().mean(dim=0).sqrt().clamp_min(TINY)
        row = torch.from_numpy((split.low[-1] - split.low[0]) / (times[-1] - times[0])).float()
        mid = (torch.from_numpy(split.mid).float() @ away) / step
        gaps = ahead * (len(times) - 1) / (times[-1] - times[0])
        known = torch.stack([(row @ away) * ahead / step, straight, steps[-1] / step, torch.full_like(step, gaps)])
        return cls(mid, known, _timing(times, asked), step, gaps)


def _timing(times: Sequence[float], asked: float) -> torch.Tensor:
    """What the continuous-time embedding is formed from: time after the newest checkpoint, gap, waves of the time."""
    known = torch.tensor([*times, asked], dtype=torch.float64)
    span = times[-1] - times[0]
    after, gaps = (known - times[-1]) / span, known.diff(prepend=known[:1]) * (len(times) - 1) / span
    phases = 2.0 * math.pi * torch.outer(after, torch.tensor(FREQUENCIES, dtype=torch.float64))
    return torch.cat([after[:, None], gaps[:, None], phases.cos(), phases.sin()], dim=1).float()


class Network(nn.Module):
    """VITP: one token a checkpoint, and one for the asked time; a new one displaces nothing.

    The series come last in every tensor, `(DIMENSION, tokens, B)`: sequences are so short that all else is slow.
    """

    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.randn(DIMENSION, 1))
        self.known = nn.Parameter(torch.randn(DIMENSION, KNOWN) / KNOWN**0.5)
        self.time = nn.Parameter(torch.randn(TIMES, DIMENSION) / TIMES**0.5)
        self.position = nn.Parameter(0.02 * torch.randn(MOST + 1, DIMENSION))
        self.mixed = nn.Parameter(torch.randn(2, 3 * DIMENSION, DIMENSION) / DIMENSION**0.5)
        self.back = nn.Parameter(torch.randn(2, DIMENSION, DIMENSION) / DIMENSION**0.5)
        self.hidden = nn.Parameter(torch.randn(HIDDEN, DIMENSION) / DIMENSION**0.5)
        self.narrow = nn.Parameter(torch.randn(DIMENSION, HIDDEN) / HIDDEN**0.5)
        self.head = nn.Parameter(torch.zeros(2, DIMENSION))
        self.bias = nn.Parameter(torch.zeros(2, 1))

    def forward(self, window: Window) -> torch.Tensor:
        """Displacement of each series, in its own steps, `(B,)`: so much of the baseline's, and of the mid band's."""
        values, query = self.value[..., None] * window.mid, (self.known @ window.known)[:, None]
        places = window.timing @ self.time + self.position[-len(window.timing) :]
        tokens = torch.cat([values, query], dim=1) + places.T[..., None]
        tokens = tokens + self._attended(0, tokens, range(tokens.shape[1]))
        asked = tokens[:, -1:] + self._attended(1, tokens, [-1])
        asked = asked[:, 0] + self.narrow @ functional.gelu(self.hidden @ _normed(asked[:, 0]))
        gain, mid = (self.head @ _normed(asked) + self.bias).unbind()
        return gain * window.known[0] + mid * window.ahead

    def _attended(self, layer: int, tokens: torch.Tensor, asking: Iterable[int]) -> torch.Tensor:
        mixed = (self.mixed[layer] @ _normed(tokens).flatten(1)).view(3, HEADS, DIMENSION // HEADS, *tokens.shape[1:])
        queries, keys, values = mixed
        found = []
        for place in asking:
            scores = (queries[:, :, place, None] * keys).sum(dim=1) / (DIMENSION // HEADS) ** 0.5
            found.append((scores.softmax(dim=1)[:, None] * values).sum(dim=2).flatten(0, 1))
        return (self.back[layer] @ torch.stack(found, dim=1).flatten(1)).view(DIMENSION, len(found), -1)


def _normed(tokens: torch.Tensor) -> torch.Tensor:
    centred = tokens - tokens.mean(dim=0, keepdim=True)
    return centred * (centred.square().mean(dim=0, keepdim=True) + 1e-5).rsqrt()


def _furthest(series: Series, aim: Aim) -> int:
    """How many checkpoints ahead a target reaches."""
    return min(LATER, (len(series.times) - FEWEST + 1) // 2) if aim == "later" else 1


def trained(series: Series, aim: Aim, updates: int) -> Network:
    """A network that was trained on windows which end at earlier checkpoints, the same each time."""
    torch.manual_seed(SEED)
    network = Network()
    optimizer = torch.optim.AdamW(network.parameters(), lr=RATE, weight_decay=0.0)
    last = len(series.times) - 1 - _furthest(series, aim)
    ends = range(max(FEWEST - 1, last - MOST + 1), last + 1)
    for update in range(updates):
        optimizer.param_groups[0]["lr"] = RATE * (1.0 - update / updates)
        window, wanted = _example(series, aim, ends[int(torch.randint(len(ends), (1,)))])
        loss = (network(window) - wanted).square().mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
    return network


def _example(series: Series, aim: Aim, end: int) -> tuple[Window, torch.Tensor]:
    """Series from everywhere in the model, up to checkpoint `end`, and where they went, in their own steps.

    Half of them are drawn by scalars and half by operators: neither the large operators nor the far-moving ones drown
    the rest, and each counts in its own steps.
    """
    places = torch.randint(series.values.shape[1], (BATCH,))
    spans = torch.tensor(series.spans)[torch.randint(len(series.spans), (BATCH // 2,))]
    places[: BATCH // 2] = spans[:, 0] + (torch.rand(BATCH // 2) * (spans[:, 1] - spans[:, 0])).long()
    first = max(0, end + 1 - MOST)
    taken = series.values[first:, places]
    seen, times = taken[: end + 1 - first], series.times[first : end + 1]
    window = Window.of(seen, series.straightness(end)[places], times, series.times[end + 1])
    far = end + _furthest(series, aim)
    near = end + 1 if aim == "later" else end
    pace = (taken[far - first] - taken[near - first]) / (series.times[far] - series.times[near])
    wanted = pace * (series.times[end + 1] - series.times[end]) / window.step
    return window, torch.where(window.step > TINY, wanted, 0.0).clamp(-FURTHEST, FURTHEST)


def displacement(network: Network, series: Series, aim: Aim, asked: float) -> torch.Tensor:
    """What the network adds to the newest checkpoint until the asked time, one value a scalar."""
    count = min(MOST, len(series.times) - _furthest(series, aim))  # no more than it was trained on
    newest, times = series.values[-count:], series.times[-count:]
    straightness = series.straightness(len(series.times) - 1)
    found = torch.empty(series.values.shape[1])
    with torch.no_grad():
        for begin in range(0, len(found), BLOCK):
            part = slice(begin, begin + BLOCK)
            window = Window.of(newest[:, part], straightness[part], times, asked)
            found[part] = network(window) * window.step
    return found


class HalfBatches(TextTask):
    """Four windows a batch, and an end that is judged on 128 windows: a step of 10 million weights takes 0.25 s."""

    def batch(self, seed: int, iteration: int) -> torch.Tensor:
        """The first half of the windows."""
        return super().batch(seed, iteration)[: BATCH_WINDOWS // 2]

    def final_losses(self, model: nn.Module) -> torch.Tensor:
        """Mean loss of each chunk of two held-out windows."""
        starts = torch.linspace(0, self._held_out.numel() - self._context - 1, 2 * FINAL_CHUNKS).long()
        windows = self._windows(self._held_out, starts)
        assert isinstance(model, GPT)
        return torch.cat([model.losses(some) for some in torch.split(windows, 8)]).view(FINAL_CHUNKS, 2).mean(dim=1)


# Of 10.8 million weights. At this rate a training ends at 2.887 nats, at 1e-3 at 2.902, at 2e-3 at 3.009 (one seed).
_MODEL = partial(GPT, GPTConfig(layers=6, heads=6, width=384, context=64))
LARGE = Workload("gpt-10M-perl-cosine10-7.00e-04", partial(HalfBatches, _MODEL, "perl"), "cosine10", 7e-4, 400, 40)
# CPU seconds of an iteration, by the size in a workload's name, and of an update of the network: what a budget buys.
STEP_SECONDS = {"0.1M": 0.011, "0.4M": 0.025, "10M": 0.235}
UPDATE_SECONDS = 0.008
# Window and reach of the line and of the coefficient form, in iterations, by the share of the training that is done:
# what the product's table chooses where it does not decline. The large model's runs are shorter.
SETTINGS = {0.5: (150, 127.5), 0.75: (200, 170.0)}
LARGE_SETTING = (120, 80.0)


@dataclass(frozen=True)
class Failed(Failure):
    """A run at a failure, and what the arms that are compared make of it."""

    @cache  # noqa: B019 - lives as long as the measurement of one failure
    def followed(self, direction: str) -> Tensors:
        """Displacement by the line, or by the coefficient form, within the guard's limits."""
        window, reach = SETTINGS[self.point.fraction] if self.trajectory.workload != LARGE else LARGE_SETTING
        gain = reach / self.point.horizon
        predictor: LinePredictor = LinePredictor(window, gain)
        if direction == "vitp":
            predictor = VITPPredictor(window, gain, direction="vitp")
            for newest in range(self.point.interval, self.point.checkpoint + 1, self.point.interval):
                for _ in predictor.learn(self.trajectory.history(newest, self.point.interval)):
                    pass
        history = self.trajectory.history(self.point.checkpoint, self.point.interval)
        forecast = predictor.forecast(history, target_of(self.trajectory, self.point.failure))
        moved = measure(history, forecast, predictor.predict(history, forecast))
        limits = dict(zip(moved.operators, Guard().limit(moved).tolist(), strict=True))
        found = {name: -values for name, values in self.checkpoint.weights.items()}
        for name, start, values in predictor.predict(history, shorten(forecast, limits)):
            found[name][start : start + values.numel()] += values
        return found

    @cache  # noqa: B019
    def published(self, kind: Kind, aim: Aim, share: float) -> tuple[Tensors, dict[str, float]]:
        """Displacement value by value, and what that took; `share` of the job's computation up to the checkpoint."""
        size = self.trajectory.workload.name.split("-")[1]
        updates = max(1, round(share * self.point.checkpoint * STEP_SECONDS[size] / UPDATE_SECONDS))
        series, began = Series(self.trajectory, self.point, kind), time.process_time()
        network, trained_at = trained(series, aim, updates), time.process_time()
        asked = self.trajectory.workload.times[self.point.failure]
        found = series.by_operator(displacement(network, series, aim, asked))
        spent = {"updates": updates, "training_s": trained_at - began, "prediction_s": time.process_time() - trained_at}
        return found, spent

    def form(self, arm: str) -> tuple[Tensors, dict[str, Tensors], dict[str, float]]:
        """An arm's displacement of the weights, the moments that it goes on with, and what it took.

        `stale`, `line`, `vitp`, `published-AIM-SHARE[-long][-moments]`: long goes as far as the line in each operator.
        """
        moments, weights = self.checkpoint.moments, self.checkpoint.weights
        if arm in ("stale", "line", "vitp"):
            still = {name: torch.zeros_like(values) for name, values in weights.items()}
            return still if arm == "stale" else self.followed(arm), moments, {}
        _, aim, share, *how = arm.split("-")
        moved, spent = self.published("weights", cast(Aim, aim), float(share))
        if "long" in how:
            lengths = {name: values.norm() for name, values in self.followed("line").items()}
            moved = {name: values * (lengths[name] / values.norm().clamp_min(TINY)) for name, values in moved.items()}
        if "moments" in how:
            added = {kind: self.published(kind, "raw", float(share))[0] for kind in MOMENTS}
            moments = {kind: {name: moments[kind][name] + added[kind][name] for name in weights} for kind in MOMENTS}
            moments["exp_avg_sq"] = {name: values.clamp_min(0.0) for name, values in moments["exp_avg_sq"].items()}
        return moved, moments, spent

    def outcome(self, arm: str) -> dict[str, float]:
        """Gaps in the final loss over the run that never failed: of the arm, and of its move with nothing lost."""
        displaced, moments, spent = self.form(arm)
        lost = replace(_added(self.checkpoint, displaced), moments=moments, iteration=self.point.failure)
        found = {"lost_nats": self._gap(lost), **spent}
        controlled = arm != "stale" and not arm.endswith("moments")  # whose move is that of the arm without
        return found | ({"moved_nats": self._gap(_added(self.exact, displaced))} if controlled else {})

    def _gap(self, state: State) -> float:
        trainer = self.trajectory.trainer()
        trainer.load(state)
        trainer.train_to(self.trajectory.workload.iterations)
        return float(numpy.mean(trainer.final_losses() - self.trajectory.final_losses()))


def _added(state: State, displaced: Tensors) -> State:
    return replace(state, weights={name: values + displaced[name] for name, values in state.weights.items()})


def main(cache_path: str, name: str, seeds: str, fractions: str, arms: str, json_path: str) -> None:
    """Measure what is missing, one failure after the other, and write all of it in `u`; lists have commas."""
    torch.set_num_threads(1)
    workload, interval, rows = WORKLOADS.get(name, LARGE), 50, list[dict[str, Any]]()
    if workload == LARGE:
        trajectories.STATE_ITERATIONS = interval = 40  # moments at every checkpoint
        ending.LENGTH_SHARES = (0.8, 0.8, 1.2, 1.2)  # each once, by its file
    runs = [Run(workload, int(seed), Path(cache_path)) for seed in seeds.split(",")]
    for run, fraction in itertools.product(runs, map(float, fractions.split(","))):
        failed = Failed(run.trajectory(), points(workload.iterations, interval, fraction, 1)[0])
        for arm in arms.split(","):
            path = failed.trajectory.directory / "published" / f"{fraction}-{arm}.json"
            found = read_json(path)
            if found is None:
                found = failed.outcome(arm)
                write_json(path, found)
            rows.append({"seed": run.seed, "fraction": fraction, "arm": arm, "horizon": failed.point.horizon, **found})
    own = {run: float(run.trajectory().final_losses().mean()) for run in runs}
    with Workers(1) as pool:
        worth = ending.worths(own, runs[0].cache / "endings", pool, lambda _, __: None)[workload.name]
    for row in rows:
        u = row["horizon"] * worth.nats
        row |= {gap.replace("_nats", "_u"): row[gap] / u for gap in ("lost_nats", "moved_nats") if gap in row}
    write_json(Path(json_path), {"workload": workload.name, "worth": asdict(worth), "rows": rows})


if __name__ == "__main__":
    main(*sys.argv[1:])
