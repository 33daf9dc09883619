"""The small state of a rank, made of what the ranks of another number saved.

Rank r takes the random states of rank r. Where the run had no rank r, it takes states that are drawn from those of rank
r modulo the old number and from r itself. So no two ranks have the same ones, and a restart from the same checkpoint
with the same number of ranks always gets the same.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy
import torch
import xxhash

from cpsr.engines.optimizer_restore import shared_scalars
from cpsr.errors import CheckpointError, RunMismatchError
from cpsr.state.codec import same
from cpsr.state.scalars import Scalars

__all__ = ["differing", "random_states_of", "require_alike", "small_state_at_dump", "small_state_of"]

_OFFSET = 0  # of a fresh generator of a GPU


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
    from cpsr.predictor.vitp import without_slices

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


def random_states_of(rank: int, saved_by: int, states: dict[str, Any]) -> dict[str, Any]:
    """The random states of a rank, as `cpsr.engines.evaluation` captures them.

    Args:
        rank: that is to take them.
        saved_by: the rank that saved `states`: the same one, or `rank` modulo the number of ranks then.
        states: of that rank.
    """
    if rank == saved_by:
        return states
    drawn = xxhash.xxh3_64_intdigest(states["host"]["torch"].numpy().tobytes(), seed=rank)
    host = {
        "python": random.Random(drawn).getstate(),  # noqa: S311 - of a training, not of a secret
        "numpy": numpy.random.RandomState(drawn & 0xFFFFFFFF).get_state(),
        "torch": torch.Generator().manual_seed(drawn).get_state(),
    }
    # A CUDA generator's state is its seed and its offset.
    signed = drawn - (1 << 64) if drawn >= 1 << 63 else drawn
    cuda = [torch.tensor([signed, _OFFSET], dtype=torch.int64, device="cpu").view(torch.uint8) for _ in states["cuda"]]
    return {**states, "host": host, "cuda": cuda}
