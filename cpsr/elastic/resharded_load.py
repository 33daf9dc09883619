"""Loads a checkpoint that another number of ranks saved.

Rank r takes the random states of rank r. Where the run had no rank r, it takes states that are drawn from those of rank
r modulo the old number and from r itself. So no two ranks have the same ones, and a restart from the same checkpoint
with the same number of ranks always gets the same.
"""

import logging
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Any

import numpy
import torch
import xxhash

from cpsr.checkpoint.assemble import Slab, assemble, wanted_of
from cpsr.checkpoint.frozen_files import FrozenFiles
from cpsr.checkpoint.saved import SavedCheckpoint
from cpsr.engines.adapter import EngineAdapter
from cpsr.engines.optimizer_restore import shared_scalars
from cpsr.errors import CheckpointError, RunMismatchError
from cpsr.state.codec import same
from cpsr.state.frozen_parameters import word_of
from cpsr.state.shard import Shard
from cpsr.state.small_state import Scalars

__all__ = ["Resharding", "load_frozen", "load_tensors", "random_states_of", "small_state_at_dump"]

_OFFSET = 0  # of a fresh generator of a GPU

logger = logging.getLogger(__name__)


class Resharding:
    """One rank's way to load a checkpoint of another number of ranks; each rank reads what it needs by itself.

    Rank r takes the small state and the buffers of rank r modulo the old number. Buffers of layers and experts that
    this one did not have come from another. Stages in the middle of a pipeline are dealt no batches: there all ranks
    take the position of the one that was dealt most. Rank 0 also compares the small states of all old ranks.
    """

    def __init__(self, adapter: EngineAdapter, frozen: FrozenFiles | None) -> None:
        self._adapter = adapter
        self._frozen = frozen

    def load(self, saved: SavedCheckpoint, into: Shard) -> dict[str, Any]:
        """Fill the views of `into` and return the small state; see `CheckpointStore.load` for what it raises."""
        rank, ranks = self._adapter.rank, saved.manifest.world_size
        saved_by = rank % ranks
        small = saved.small_state(saved_by)
        if rank == 0 or self._adapter.pipeline is not None:
            others = (other for other in range(ranks) if other != saved_by)
            trees = [small, *(saved.small_state(other) for other in others)]
            small = {**small, "data": max((tree["data"] for tree in trees), key=itemgetter("batches"))}
            if rank == 0:
                self._compare(trees, ranks)
        found = _small_state_of(rank, saved_by, small, self._adapter.resharded)
        load_tensors(saved, saved_by, into)
        if self._frozen is not None:
            found = {**found, "frozen": load_frozen(saved, saved_by, self._frozen, found["frozen"])}
        return found

    def _compare(self, trees: Sequence[Mapping[str, Any]], ranks: int) -> None:
        """Refuse what ranks that train together have alike, and warn of what they may have by themselves."""
        _require_alike(trees)
        for name in _differing(trees):
            logger.warning(
                "the registered object %r was not the same on the run's %d ranks: rank r of %d takes the state of "
                "rank r modulo %d, and states of further ranks are lost",
                name,
                ranks,
                self._adapter.world_size,
                ranks,
            )


def load_tensors(saved: SavedCheckpoint, saved_by: int, into: Shard) -> int:
    """Copy this rank's weights, moments and buffers out of the files of all ranks that saved the checkpoint.

    Args:
        saved: the checkpoint.
        saved_by: the rank whose buffers are taken; those that it did not have come from the first that had them.
        into: views to be written.

    Returns:
        The bytes that were read.

    Raises:
        RunMismatchError: the ranks have not all that this one needs, or what cannot be dealt to other ranks.
        CheckpointCorruptError, UnreadableFileError: see `cpsr.checkpoint.assemble.assemble`.
    """
    wanted, ranks = wanted_of(into), range(saved.manifest.world_size)
    buffers = {key: wanted.pop(key) for key in list(wanted) if key.startswith("other/")}
    read = assemble(saved.slabs(saved.beginning_with(saved_by)), buffers, saved.directory, _ADVICE)
    # From the lowest rank that has them: where ranks differ, all take the same.
    return read + assemble(_dealt(saved, ranks, into), wanted, saved.directory, _ADVICE)


_ADVICE = "start with as many ranks as the run had, or use another run_dir"


def _dealt(saved: SavedCheckpoint, ranks: Iterable[int], into: Shard) -> Iterator[Slab]:
    """The slabs of these ranks, as far as they are asked for; RunMismatchError where they cannot be dealt."""
    for rank in ranks:
        record = saved.record(rank)
        if record.sparse:
            raise RunMismatchError(
                f"{saved.directory} was saved with experts.policy: experts of different iterations are not dealt to "
                f"another number of ranks. Nothing was changed; {_ADVICE}"
            )
        for name, one in into.operators.items():
            then = record.operators.get(name)
            if then is not None and then.moments.keys() != one.moments.keys():
                raise RunMismatchError(
                    f"{saved.directory}: rank {rank} saved {name} with the moments {sorted(then.moments)}, this rank "
                    f"has {sorted(one.moments)}. Nothing was changed; use the optimizer that it was saved from"
                )
        yield from saved.slabs([rank])


def load_frozen(
    saved: SavedCheckpoint, saved_by: int, files: FrozenFiles, state: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Give the engine its parameters outside the optimizer; return what a snapshot of this rank would have of them.

    Where the rank `saved_by` had the same part of a parameter, that is taken by its hash. Of others each rank reads the
    ranges that it needs, from whichever ranks had them.

    Args:
        saved: the checkpoint.
        saved_by: the rank whose small state is taken.
        files: of this rank.
        state: what that small state has of them, as `FrozenWeights.state`.

    Raises:
        RunMismatchError: a parameter was split in a way that cannot be dealt; nothing was changed.
        CheckpointCorruptError, UnreadableFileError: the engine's parameters hold anything.
    """
    weights, record = files.weights, saved.record(saved_by)
    weights.present(())  # takes the engine's views anew
    own = {name: files.described(name) for name in weights.tensors}
    alike = {name for name, one in own.items() if name in record.frozen and record.frozen[name].described == one}
    dealt = own.keys() - alike
    if dealt:
        weights.forget(dealt)
        assemble(saved.slabs(saved.beginning_with(saved_by)), files.wanted(dealt), saved.directory, _ADVICE)
    files.load(saved, saved_by, only=alike)
    if alike == own.keys() == record.frozen.keys():
        return state
    frozen = [saved.record(rank).frozen for rank in range(saved.manifest.world_size)]
    moved = {name: one for name, one in state.get("moved", {}).items() if name in alike}
    for name in dealt:
        if any(name in part and part[name].file is None for part in frozen):
            moved[name] = weights.tensors[name].detach().to("cpu", copy=True)
    settled = [name for name in own if name not in moved]
    return {"word": word_of(weights.present(settled)), "moved": moved}


def _small_state_of(
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
    return {**planning, "costs": None} if planning else {}


def _require_alike(trees: Sequence[Mapping[str, Any]]) -> None:
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


def _differing(trees: Sequence[Mapping[str, Any]]) -> list[str]:
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
