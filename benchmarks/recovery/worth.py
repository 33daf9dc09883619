"""What one more iteration of a workload's schedule is worth, from trainings of other lengths."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from cpsr.benchmarks.harness.processes import Workers
from cpsr.benchmarks.recovery.ending import Training, ended
from cpsr.benchmarks.recovery.workload import Workload
from cpsr.errors import CPSRError
from cpsr.fitter.end_cost import Ending, IterationWorth, WorthUnknownError, iteration_worth

__all__ = ["LENGTH_SHARES", "trainings_for", "worth_of", "worths"]

LENGTH_SHARES = (0.8, 0.9, 1.1, 1.2)


def trainings_for(workload: Workload, seed: int, cache: Path, device: str) -> list[Training]:
    """The trainings of one seed, of other lengths, that show a workload's worth."""
    lengths = [round(share * workload.iterations) for share in LENGTH_SHARES]
    return [Training(workload.of_length(length), seed, cache / "endings", device) for length in lengths]


def worths(
    trainings: Mapping[Workload, Sequence[Training]],
    own: Mapping[Workload, Sequence[Ending]],
    workers: Workers,
    tick: Callable[[int], None],
) -> dict[str, IterationWorth]:
    """Train what is missing; the worth by the workload's name.

    Args:
        trainings: of each workload, of other lengths.
        own: how those of the workload's own length ended, by seed.
        workers: processes that train.
        tick: called with the number of trainings done.

    Raises:
        CPSRError: a workload's trainings do not show that a longer one ends lower, or one of them diverged.
    """
    every = [training for of in trainings.values() for training in of]
    losses = dict(zip(every, workers.each(ended, every, tick), strict=True))
    found = {}
    for workload, of in trainings.items():
        endings = list(own[workload])
        for training in of:
            loss = losses[training].loss
            if loss is None:
                raise CPSRError(
                    f"{training.workload.name}, seed {training.seed}: the training without a failure diverged"
                )
            endings.append(Ending(training.seed, training.workload.iterations, loss))
        endings.sort(key=lambda ending: (repr(ending.group), ending.iterations))  # the last bits depend on the order
        found[workload.name] = worth_of(workload.name, endings, workload.iterations)
    return found


def worth_of(name: str, endings: Sequence[Ending], iterations: int) -> IterationWorth:
    """What an iteration is worth at a length, from how trainings of it and of others ended.

    Raises:
        CPSRError: longer ones do not end lower; it begins with the name.
    """
    try:
        return iteration_worth(endings, iterations)
    except WorthUnknownError as error:
        raise CPSRError(f"{name}: {error}") from error
