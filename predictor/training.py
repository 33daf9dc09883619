"""Training of VITP's network: windows with known later motion, and a bounded number of small steps a checkpoint."""

import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass

import numpy
import torch
from torch.optim.adamw import adamw

from cpsr.predictor.checkpoint_series import distinct_times
from cpsr.predictor.network import MIN_SNAPSHOTS, Geometry, corrections, cosines, undisturbed
from cpsr.predictor.protocol import HistoryEntry
from cpsr.predictor.statistics import OperatorMotion, merged

__all__ = ["MIN_LATER", "STEPS_PER_CHECKPOINT", "Head", "Windows", "windows"]

# The direction of later motion takes two checkpoints after the newest one that is seen.
MIN_LATER = 2
# Noise of single checkpoints lasts for 20 to 50 iterations. A line over these many later ones shows the slow motion:
# with less, at short intervals, the network learns to follow noise that lasts from one checkpoint to the next.
LATER_ITERATIONS = (100, 200)
# Those operators that move farthest.
OPERATORS_PER_CHECKPOINT = 40
# Every second window is thinned: gaps of other lengths, and horizons that are short against them, are seen too.
THINNED_SHARE = 0.5
DROPPED_SHARE = 1.0 / 3.0
# Some 0.03 s of one core for each checkpoint, at 4 ms a step. 32 were no better on other runs.
STEPS_PER_CHECKPOINT = 8
# Of 1e-3 and 3e-4 the latter found slow directions better on a byte-level GPT at intervals of 20 and 50 iterations,
# where 1e-3 was behind the line at 20.
LEARNING_RATE = 3e-4
WEIGHT_DECAY = 1e-2  # AdamW's usual one
BETA1, BETA2, EPSILON = 0.9, 0.999, 1e-8  # likewise


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

    def draw(self, generator: torch.Generator) -> tuple[list[int], list[int]]:
        """Random places that are seen, at least `MIN_SNAPSHOTS`, and those of later motion, at least `MIN_LATER`."""
        newest = _integer(generator, MIN_SNAPSHOTS - 1, _newest_seen(self.points) + 1)
        oldest = _integer(generator, 0, newest - MIN_SNAPSHOTS + 2)
        reach = self.points[newest].iteration + _integer(generator, LATER_ITERATIONS[0], LATER_ITERATIONS[1] + 1)
        within = [place for place, point in enumerate(self.points) if place > newest and point.iteration <= reach]
        kept = torch.rand(newest + 2, generator=generator, dtype=torch.float32, device="cpu").tolist()
        thinned = kept[-1] < THINNED_SHARE
        seen = [
            place
            for place in range(oldest, newest + 1)
            if place in (oldest, newest) or not thinned or kept[place] >= DROPPED_SHARE
        ]
        if len(seen) < MIN_SNAPSHOTS:
            seen = list(range(oldest, newest + 1))
        return seen, list(range(newest + 1, newest + 1 + max(MIN_LATER, len(within))))

    def agreement(self, parameters: torch.Tensor | None, seen: Sequence[int], later: Sequence[int]) -> torch.Tensor:
        """Mean cosine of the directions from `seen` snapshots with the line through `later` ones, by weight.

        Args:
            parameters: of the network; None: the line's directions.
            seen: places, ascending.
            later: places, ascending, after those.
        """
        # Only later checkpoints show the later motion. A displacement from the newest seen one, however it is
        # denoised, would share its noise with the input, and teach the network to undo that noise.
        times = numpy.array([self.points[place].time for place in later])
        motion = torch.zeros(len(self.points), dtype=torch.float32, device="cpu")
        motion[list(later)] = torch.from_numpy((times - times.mean()) / numpy.abs(times - times.mean()).max()).float()
        geometry = Geometry.of([self.points[place] for place in seen], float(times.mean()))
        rows = geometry.line.expand(len(self), -1)
        if parameters is not None:
            rows = rows + corrections(parameters, geometry, merged(self.products, seen))
        full = torch.zeros(len(self), len(self.points), dtype=torch.float32, device="cpu")
        full = full.index_copy(1, torch.tensor(list(seen), device="cpu"), rows)
        return (cosines(full, motion, self.products) * self.weights).sum() / self.weights.sum()


def windows(operators: Mapping[str, OperatorMotion]) -> Generator[None, None, Windows | None]:
    """The windows of the operators that moved farthest; None where their snapshots are too few.

    Yields once, between two pieces of a millisecond or so.

    Args:
        operators: with the same snapshots.
    """
    motions = list(operators.values())
    points = motions[0].points if motions else ()
    places = distinct_times(points)
    # Too few may show the motion after any of them.
    if _newest_seen([points[place] for place in places]) < MIN_SNAPSHOTS - 1:
        return None
    squared = [float(motion.products[places[0] :, places[0] :].sum()) for motion in motions]
    moved = [(math.sqrt(one), motion) for one, motion in zip(squared, motions, strict=True) if 0.0 < one < math.inf]
    moved = sorted(moved, key=lambda item: -item[0])[:OPERATORS_PER_CHECKPOINT]
    if not moved:
        return None
    yield
    with undisturbed():
        products = merged(torch.stack([motion.products for _, motion in moved]), places)
        distances = torch.tensor([distance for distance, _ in moved], dtype=torch.float64, device="cpu")
        return Windows(
            tuple(points[place] for place in places),
            (products / products.diagonal(dim1=1, dim2=2).sum(dim=1)[:, None, None]).float(),
            (distances / distances.sum()).float(),
        )


def _newest_seen(points: Sequence[HistoryEntry]) -> int:
    """Place of the newest snapshot with enough later ones to show its motion; -1 where there is none."""
    usable = [
        place
        for place, point in enumerate(points[:-MIN_LATER])
        if points[-1].iteration - point.iteration >= LATER_ITERATIONS[0]
    ]
    return max(usable, default=-1)


def _integer(generator: torch.Generator, low: int, high: int) -> int:
    """A uniform integer in `[low, high)`."""
    return int(torch.randint(low, high, (1,), generator=generator, device="cpu"))


@dataclass(frozen=True)
class Head:
    """The network's weights and what their training goes on from; float32 on the CPU, `(PARAMETERS,)` each.

    Attributes:
        parameters: all weights.
        exp_avg: AdamW's first moment.
        exp_avg_sq: its second.
        steps: how often the weights were updated.
    """

    parameters: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    steps: int = 0

    @classmethod
    def of(cls, parameters: torch.Tensor) -> "Head":
        """Weights to start from."""
        with undisturbed():
            return cls(parameters, torch.zeros_like(parameters), torch.zeros_like(parameters))

    def trained(self, taken: Windows, generator: torch.Generator) -> "Head":
        """After one step of AdamW towards the later motion in these windows.

        By its function: the class asks on each step for the accelerator's current stream. On the learner's thread that
        is one of device 0, whatever device this rank has, and would open a context there.
        """
        with undisturbed():
            parameters = self.parameters.clone().requires_grad_()
            loss = -taken.agreement(parameters, *taken.draw(generator))
            (gradient,) = torch.autograd.grad(loss, [parameters])
            after = Head(parameters.detach(), self.exp_avg.clone(), self.exp_avg_sq.clone(), self.steps + 1)
            adamw(
                [after.parameters],
                [gradient],
                [after.exp_avg],
                [after.exp_avg_sq],
                [],
                [torch.tensor(float(self.steps), dtype=torch.float32, device="cpu")],
                fused=True,
                amsgrad=False,
                beta1=BETA1,
                beta2=BETA2,
                lr=LEARNING_RATE,
                weight_decay=WEIGHT_DECAY,
                eps=EPSILON,
                maximize=False,
            )
            return after
