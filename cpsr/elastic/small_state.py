"""The small state of a rank, made of what the ranks of another number saved."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from cpsr.elastic.random_states import random_states_of
from cpsr.engines.optimizer_restore import shared_scalars
from cpsr.errors import CheckpointError, RunMismatchError
from cpsr.predictor.vitp import without_slices
from cpsr.state.codec import same
from cpsr.state.scalars import Scalars

__all__ = ["differing", "require_alike", "small_state_at_dump", "small_state_of"]


def small_state_of(
    rank: int, saved_by: int, saved: Mapping[str, Any], engine: Callable[[dict[str, Any]], dict[str, Any]]
) -> dict[str, Any]:
    """The small state (`Scalars.to_tree`) that a rank continues with.

    What belongs to the old ranks' slices is left out: the predictor's products of these, which it takes anew from the
    same checkpoints, and the costs that the planner measured.

    Args:
        rank: that is to take it.
        saved_by: whose `saved` is; see `random_states_of`.
        saved: the tree of that rank.
        engine: `EngineAdapter.resharded`.
    """
    scalars = Scalars.from_tree(dict(saved))
    return replace(
        scalars,
        engine=engine(scalars.engine),
        rng=random_states_of(rank, saved_by, scalars.rng),
        data=replace(scalars.data, resized=True),
        probes=[],
        learned=without_slices(scalars.learned),
        planning=_replanned(scalars.planning),
    ).to_tree()


def small_state_at_dump(
    saved: Mapping[str, Any], left: Mapping[str, Any], iteration: int, batches: Mapping[int, int]
) -> dict[str, Any]:
    """The small state of a rank at its emergency dump; random states and registered objects are the checkpoint's.

    Args:
        saved: the tree of that rank at the checkpoint.
        left: what the dump has of it.
        iteration: of the dump.
        batches: iteration -> batches used until then, where the rank had published that.

    Raises:
        CheckpointError: it is not known how many batches the rank had used.
    """
    scalars = Scalars.from_tree(dict(saved))
    used = batches.get(iteration)
    if used is None:
        whole, rest = divmod(scalars.data.batches * iteration, max(scalars.iteration, 1))
        if rest or not scalars.iteration:
            raise CheckpointError(f"it is not known how many batches a rank had used at iteration {iteration}")
        used = whole
    rates = [float(group["lr"]) for group in left["engine"]["param_groups"] if "lr" in group]
    return replace(
        scalars,
        iteration=iteration,
        cumulative_learning_rate=left["cumulative_learning_rate"],
        learning_rate=sum(rates) / len(rates) if rates else scalars.learning_rate,
        peak_learning_rate=left["peak_learning_rate"],
        origin="predicted" if left["lineage"] else "trained",
        lineage=left["lineage"],
        engine=left["engine"],
        data=scalars.data.advanced(max(used - scalars.data.batches, 0)),
        frozen=left.get("frozen", {}),
    ).to_tree()


def _replanned(planning: dict[str, Any]) -> dict[str, Any]:
    """The planner's state with the phases and intervals of the run, which stay, and without costs."""
    unknown = {key: None for key in ("costs", "memory", "second_moment_share") if key in planning}
    return planning | unknown


def require_alike(trees: Sequence[Mapping[str, Any]]) -> None:
    """Check that the ranks that saved a checkpoint had trained together.

    Args:
        trees: the small state of every one of them.

    Raises:
        RunMismatchError: their counters, schedules or hyperparameters differ; the message names the first difference.
    """
    first = shared_scalars(trees[0]["engine"])
    for rank, tree in enumerate(trees):
        other = shared_scalars(tree["engine"])
        for key in sorted({*first, *other}):
            if not same(first.get(key), other.get(key)):
                raise RunMismatchError(
                    f"rank {rank} saved another {key} than rank 0, so that it is not known what a rank of another "
                    "number of ranks would have. Nothing was changed; start with as many ranks as the run had"
                )


def differing(trees: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names of registered objects whose state was not the same on all ranks."""
    names = sorted({name for tree in trees for name in tree["registered"]})
    first = trees[0]["registered"]
    return [name for name in names if not all(same(first.get(name), tree["registered"].get(name)) for tree in trees)]
