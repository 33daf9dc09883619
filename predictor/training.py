"""Training of VITP's head: questions with known later motion, and a bounded number of small steps a checkpoint."""

import math
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch.optim.adamw import adamw

from cpsr.predictor.checkpoint_series import distinct_times
from cpsr.predictor.network import (
    MIN_SNAPSHOTS,
    PARAMETERS,
    Geometry,
    coefficients,
    cosines,
    initial_parameters,
    named,
    pretrained_parameters,
    undisturbed,
)
from cpsr.predictor.protocol import HistoryEntry
from cpsr.predictor.statistics import OperatorMotion, merged, square, triangle

__all__ = [
    "MIN_LATER",
    "STEPS_PER_CHECKPOINT",
    "Examples",
    "Head",
    "Question",
    "Windows",
    "windows",
]

# The direction of later motion takes two checkpoints after the newest one that is seen.
MIN_LATER = 2
# Noise of single checkpoints lasts for 20 to 50 iterations. A line over these many later ones shows the slow motion:
# with less, at short intervals, the head learns to follow noise that lasts from one checkpoint to the next.
LATER_ITERATIONS = (100, 200)
# Those operators that move farthest; 360 examples of 20 snapshots are 0.27 MB in every checkpoint.
OPERATORS_PER_CHECKPOINT = 40
MAX_EXAMPLES = 360
OPERATORS_AT_ONCE = 64  # between two yields: about a millisecond
# Every second window is thinned: gaps of other lengths, and horizons that are short against them, are seen too.
THINNED_SHARE = 0.5
DROPPED_SHARE = 1.0 / 3.0


@dataclass(frozen=True)
class Question:
    """A query for the direction of B operators with the same snapshots, and their later motion.

    Attributes:
        geometry: of the K snapshots that are seen.
        seen_products: Gram matrices of the differences between them, `(B, K - 1, K - 1)`.
        seen: their places in the window, `(K,)` int64.
        later: displacement of the line through later snapshots, a row over the window's m snapshots, `(m,)`.
        products: Gram matrices of the window, `(B, m - 1, m - 1)`.
        weights: of the operators, `(B,)`.
    """

    geometry: Geometry
    seen_products: torch.Tensor
    seen: torch.Tensor
    later: torch.Tensor
    products: torch.Tensor
    weights: torch.Tensor

    def over_window(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows over the snapshots that are seen, `(B, K)`, as rows over the window, `(B, m)`."""
        full = torch.zeros(len(rows), len(self.later), dtype=rows.dtype, device="cpu")
        return full.index_copy(1, self.seen, rows)


@dataclass(frozen=True)
class Windows:
    """Windows of B operators that were taken at the same times.

    Attributes:
        points: when the m snapshots were taken, strictly ascending in time.
        products: Gram matrices of the differences between them, each of trace 1, `(B, m - 1, m - 1)` float32.
        weights: how far each operator moved over the window, as a share of all that were taken, `(B,)` float32. An
            error in direction costs in proportion to that. Squares would leave all to the largest embedding.
    """

    points: tuple[HistoryEntry, ...]
    products: torch.Tensor
    weights: torch.Tensor

    def __len__(self) -> int:
        return len(self.weights)

    def draw(self, generator: torch.Generator) -> Question:
        """A random newest snapshot, window before it, and span of later checkpoints."""
        newest = _integer(generator, MIN_SNAPSHOTS - 1, _newest_seen(self.points) + 1)
        oldest = _integer(generator, 0, newest - MIN_SNAPSHOTS + 2)
        reach = self.points[newest].iteration + _integer(generator, LATER_ITERATIONS[0], LATER_ITERATIONS[1] + 1)
        within = [place for place, point in enumerate(self.points) if place > newest and point.iteration <= reach]
        kept = _uniform(generator, newest + 1)
        thinned = _uniform(generator, 1)[0] < THINNED_SHARE
        seen = [
            place
            for place in range(oldest, newest + 1)
            if place in (oldest, newest) or not thinned or kept[place] >= DROPPED_SHARE
        ]
        if len(seen) < MIN_SNAPSHOTS:
            seen = list(range(oldest, newest + 1))
        return self.question(seen, list(range(newest + 1, newest + 1 + max(MIN_LATER, len(within)))))

    def question(self, seen: Sequence[int], later: Sequence[int]) -> Question:
        """A query for the direction of the line through `later` snapshots, given those that are seen.

        Args:
            seen: places of at least `MIN_SNAPSHOTS` and at most `MAX_SNAPSHOTS`, ascending.
            later: places of at least `MIN_LATER`, ascending, after those.
        """
        # Only later checkpoints show the later motion. A displacement from the newest seen one, however it is
        # denoised, would share its noise with the input, and teach the head to undo that noise.
        times = numpy.array([self.points[place].time for place in later])
        row = torch.zeros(len(self.points), dtype=torch.float32, device="cpu")
        row[list(later)] = torch.from_numpy(times - times.mean()).float() / float(numpy.abs(times - times.mean()).max())
        points = [self.points[place] for place in seen]
        return Question(
            Geometry.of(points, float(times.mean())),
            merged(self.products, seen),
            torch.tensor(list(seen), device="cpu"),
            row,
            self.products,
            self.weights,
        )


def windows(operators: Mapping[str, OperatorMotion]) -> Generator[None, None, Windows | None]:
    """The windows of the operators that moved farthest; None where their snapshots are too few.

    Yields after every 64 operators.

    Args:
        operators: with the same snapshots.
    """
    motions = list(operators.values())
    points = motions[0].points if motions else ()
    places = distinct_times(points)
    # Too few may show the motion after any of them.
    if _newest_seen([points[place] for place in places]) < MIN_SNAPSHOTS - 1:
        return None
    moved: list[tuple[float, OperatorMotion]] = []
    for count, motion in enumerate(motions, start=1):
        squared = float(motion.products[places[0] :, places[0] :].sum())
        if 0.0 < squared < math.inf:
            moved.append((math.sqrt(squared), motion))
        if count % OPERATORS_AT_ONCE == 0:
            yield
    moved = sorted(moved, key=lambda item: -item[0])[:OPERATORS_PER_CHECKPOINT]
    if not moved:
        return None
    with undisturbed():
        products = merged(torch.stack([motion.products for _, motion in moved]), places)
        distances = torch.tensor([distance for distance, _ in moved], dtype=torch.float64, device="cpu")
        return Windows(
            tuple(points[place] for place in places),
            (products / products.diagonal(dim1=1, dim2=2).sum(dim=1)[:, None, None]).float(),
            (distances / distances.sum()).float(),
        )


class Examples:
    """The newest windows of the run, at most 360 of single operators; they outlive the history's weights."""

    def __init__(self) -> None:
        self._windows: deque[Windows] = deque()

    def __len__(self) -> int:
        return sum(map(len, self._windows))

    def copy(self) -> "Examples":
        """Another collection of the same windows."""
        other = Examples()
        other._windows = self._windows.copy()
        return other

    def add(self, taken: Windows) -> None:
        """Add windows; drop the oldest above the limit."""
        self._windows.append(taken)
        while len(self) > MAX_EXAMPLES:
            self._windows.popleft()

    def draw(self, generator: torch.Generator) -> Question:
        """A random query of random windows, weighted by their number of operators."""
        sizes = torch.tensor([len(taken) for taken in self._windows], dtype=torch.float32, device="cpu")
        return self._windows[int(torch.multinomial(sizes, 1, generator=generator))].draw(generator)

    def state_dict(self) -> dict[str, Any]:
        """The windows, as plain data and tensors."""
        kept = []
        for taken in self._windows:
            points = [[point.iteration, point.time, point.learning_rate] for point in taken.points]
            kept.append({"points": points, "weights": taken.weights, "products": triangle(taken.products)})
        return {"windows": kept}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict()` returned."""
        loaded = deque[Windows]()
        for taken in state["windows"]:
            size = len(taken["points"]) - 1
            products = square(taken["products"], size)
            loaded.append(Windows(tuple(HistoryEntry(*point) for point in taken["points"]), products, taken["weights"]))
        self._windows = loaded


def _newest_seen(points: Sequence[HistoryEntry]) -> int:
    """Place of the newest snapshot with enough later ones to show its motion; -1 where there is none."""
    usable = [
        place
        for place, point in enumerate(points[:-MIN_LATER])
        if points[-1].iteration - point.iteration >= LATER_ITERATIONS[0]
    ]
    return max(usable, default=-1)


def _uniform(generator: torch.Generator, count: int) -> list[float]:
    numbers: list[float] = torch.rand(count, generator=generator, dtype=torch.float32, device="cpu").tolist()
    return numbers


def _integer(generator: torch.Generator, low: int, high: int) -> int:
    """A uniform integer in `[low, high)`."""
    return int(torch.randint(low, high, (1,), generator=generator, device="cpu"))


# Some 0.03 s of one core for each checkpoint, at 4 ms a step, in two slices. 32 were no better on other runs.
STEPS_PER_CHECKPOINT = 8
# Of 1e-3 and 3e-4 the latter found slow directions better on a byte-level GPT at intervals of 20 and 50 iterations,
# where 1e-3 was behind the line at 20.
LEARNING_RATE = 3e-4
WEIGHT_DECAY = 1e-2  # AdamW's usual one
BETA1, BETA2, EPSILON = 0.9, 0.999, 1e-8  # likewise
# Any number: what matters is that it is the same in every life of every run.
SEED = 20_261_121


class Head:
    """The network's weights and what their training goes on from.

    Args:
        parameters: to start from, `(PARAMETERS,)` float32; None: those that were pretrained on other runs.

    Attributes:
        parameters: all weights, `(PARAMETERS,)` float32 on the CPU.
        steps: how often they were updated since that start.
    """

    parameters: torch.Tensor
    steps: int

    def __init__(self, parameters: torch.Tensor | None = None) -> None:
        start = pretrained_parameters() if parameters is None else parameters
        with undisturbed():
            nothing = torch.zeros(PARAMETERS, dtype=torch.float32, device="cpu")
        self._stand(start, nothing, nothing, steps=0)

    @classmethod
    def untrained(cls) -> "Head":
        """A head whose directions are exactly the line's."""
        return cls(initial_parameters(torch.Generator(device="cpu").manual_seed(SEED)))

    def copy(self) -> "Head":
        """Another head that goes on from here."""
        other = Head(self.parameters.detach())
        other.load_state_dict(self.state_dict())
        return other

    def step(self, question: Question) -> Iterator[None]:
        """One update towards the later motion of a question's operators; yields once within it.

        Abandoned in between, `steps` shows no update.
        """
        with undisturbed():
            answers = coefficients(self._weights, question.geometry, question.seen_products)
        yield
        with undisturbed():
            geometry = question.geometry
            rows = geometry.line + (answers - answers.mean(dim=1, keepdim=True)) @ geometry.denoised
            loss = -_weighted(question.over_window(rows), question) / question.weights.sum()
            gradients = torch.autograd.grad(loss, list(self._weights.values()))
        self._update(gradients)
        self.steps += 1

    def state_dict(self) -> dict[str, Any]:
        """Weights and the optimizer's moments, as tensors."""
        return {
            "steps": self.steps,
            "parameters": self.parameters.detach().clone(),
            "exp_avg": self._exp_avg.clone(),
            "exp_avg_sq": self._exp_avg_sq.clone(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict()` returned."""
        self._stand(state["parameters"], state["exp_avg"], state["exp_avg_sq"], state["steps"])

    def _stand(self, parameters: torch.Tensor, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor, steps: int) -> None:
        with undisturbed():
            self.parameters = parameters.detach().clone()
            # Leaves of the gradients, in the same memory: no update has to split it.
            self._weights = {name: one.requires_grad_() for name, one in named(self.parameters).items()}
            self._exp_avg, self._exp_avg_sq = exp_avg.clone(), exp_avg_sq.clone()
            self._step = torch.tensor(float(steps), dtype=torch.float32, device="cpu")
        self.steps = steps

    def _update(self, gradients: Sequence[torch.Tensor]) -> None:
        """A step of AdamW, from the gradients of `_weights`.

        By its function: the class asks on each step for the accelerator's current stream. On the learner's thread that
        is one of device 0, whatever device this rank has, and would open a context there.
        """
        with undisturbed(), torch.no_grad():
            adamw(
                [self.parameters],
                [torch.cat([gradient.flatten() for gradient in gradients])],
                [self._exp_avg],
                [self._exp_avg_sq],
                [],
                [self._step],
                foreach=False,
                fused=True,
                amsgrad=False,
                beta1=BETA1,
                beta2=BETA2,
                lr=LEARNING_RATE,
                weight_decay=WEIGHT_DECAY,
                eps=EPSILON,
                maximize=False,
            )


def _weighted(rows: torch.Tensor, question: Question) -> torch.Tensor:
    """Sum of the cosines with the target directions, weighted by operator."""
    return (cosines(rows, question.later, question.products) * question.weights).sum()
