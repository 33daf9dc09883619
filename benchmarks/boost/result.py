"""What each way saves, in iterations of the tuned baseline, and whether the declared rule is met."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cpsr.benchmarks.boost.selection import Chosen
from cpsr.benchmarks.recovery.statistics import Mean, Sample, grid_mean
from cpsr.benchmarks.recovery.worth import worth_of
from cpsr.benchmarks.tune.sweep import Sweep
from cpsr.errors import CPSRError
from cpsr.fitter.end_cost import Ending, IterationWorth, end_cost_iterations

__all__ = ["MOVE", "NEEDED_PERCENT", "OUTER", "RANDOM", "CorpusResult", "Saved", "corpus_result", "is_worth_an_option"]

MOVE = "move"
OUTER = "outer optimizer"
RANDOM = "move, random direction"
NEEDED_PERCENT = 5.0


@dataclass(frozen=True)
class Saved:
    """Iterations that one way saves, in percent of the baseline's.

    Attributes:
        way: what it is.
        setting: that was chosen.
        percent: by seed; None where the training diverged.
        mean: over seeds; None where one of them diverged.
    """

    way: str
    setting: str
    percent: tuple[float | None, ...]
    mean: Mean | None


@dataclass(frozen=True)
class CorpusResult:
    """Every way on one corpus.

    Attributes:
        sweep: of the baseline's peak rate.
        chosen: settings, by other seeds.
        worth: of an iteration.
        losses: way -> final loss by seed, in nats; None where it diverged.
        saved: by way.
        beside_outer: iterations that the move saves more than the outer optimizer, paired, in percent; None where
            either diverged.
    """

    sweep: Sweep
    chosen: Chosen
    worth: IterationWorth
    losses: dict[str, tuple[float | None, ...]]
    saved: dict[str, Saved]
    beside_outer: Mean | None

    @property
    def is_enough(self) -> bool:
        """Whether the declared rule is met here."""
        move = self.saved[MOVE].mean
        if move is None or move.low is None or self.beside_outer is None or self.beside_outer.high is None:
            return False
        return move.value >= NEEDED_PERCENT and move.low > 0.0 and self.beside_outer.high >= 0.0


def is_worth_an_option(results: Sequence[CorpusResult]) -> bool:
    """The declared rule: enough on every corpus."""
    return all(one.is_enough for one in results)


def corpus_result(
    sweep: Sweep,
    chosen: Chosen,
    baseline: Sequence[float | None],
    others: Sequence[Ending],
    losses: Mapping[str, tuple[float | None, ...]],
) -> CorpusResult:
    """Compare with the baseline seed by seed.

    Args:
        sweep: of the baseline's peak rate.
        chosen: settings of the ways.
        baseline: final losses by seed, in nats.
        others: baselines of other lengths.
        losses: way -> final losses of the same seeds; MOVE, OUTER and RANDOM among them.

    Raises:
        CPSRError: a baseline diverged, or longer ones do not end lower.
    """
    setting = sweep.setting
    known = [loss for loss in baseline if loss is not None]
    if len(known) < len(baseline):
        raise CPSRError(f"{setting.name}: a baseline diverged at the best rate of its sweep; trainings are kept")
    same = [Ending(seed, setting.iterations, loss) for seed, loss in enumerate(known)]
    worth = worth_of(setting.name, [*same, *others], setting.iterations)
    saved = {
        way: Saved(way, _setting(way, chosen), percent := _percent(known, found, worth), _mean(percent))
        for way, found in losses.items()
    }
    return CorpusResult(
        sweep, chosen, worth, {"baseline": tuple(known), **losses}, saved, _difference(saved[MOVE], saved[OUTER])
    )


def _setting(way: str, chosen: Chosen) -> str:
    candidates = {MOVE: chosen.move, OUTER: chosen.outer, RANDOM: chosen.random}
    return candidates[way].name if way in candidates else way


def _percent(
    baseline: Sequence[float], losses: Sequence[float | None], worth: IterationWorth
) -> tuple[float | None, ...]:
    return tuple(
        None if loss is None else -100.0 * end_cost_iterations(loss - before, worth) / worth.iterations
        for before, loss in zip(baseline, losses, strict=True)
    )


def _difference(one: Saved, other: Saved) -> Mean | None:
    pairs = zip(one.percent, other.percent, strict=True)
    return _mean([None if a is None or b is None else a - b for a, b in pairs])


def _mean(values: Sequence[float | None]) -> Mean | None:
    known = [Sample("", seed, value) for seed, value in enumerate(values) if value is not None]
    return grid_mean([known]) if len(known) == len(values) else None
