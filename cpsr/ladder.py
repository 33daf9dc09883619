"""What is left of the run's state outside its committed checkpoints, and how each rank comes by it."""

import logging
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
import xxhash

from cpsr.checkpoint.memory import SHARED_MEMORY, HeldState, held_state, held_states, load_held, verify_held
from cpsr.checkpoint.tiers import Decision, Entry, Source, decide
from cpsr.config import PeersConfig
from cpsr.errors import CheckpointError
from cpsr.group import Group
from cpsr.peers.fetch import fetch
from cpsr.peers.replicator import this_node
from cpsr.state import Shard

__all__ = ["Ladder", "told"]

logger = logging.getLogger(__name__)


class Ladder:
    """Every rank's catalogue, and the one decision over them; `decide` and `load` are collectives.

    Args:
        run_id: identity of the run.
        group: the ranks.
        shard: the engine's views; only names and slices are looked at.
        first_life: states of earlier lives do not count: the run has gone on from elsewhere since.
        config: how states of other machines are fetched.
    """

    def __init__(self, run_id: str, group: Group, shard: Shard, first_life: int, config: PeersConfig) -> None:
        self._run_id = run_id
        self._group = group
        self._first_life = first_life
        self._config = config
        self._node = this_node()
        self._whole = _whole(shard)
        self._fetched: HeldState | None = None

    def decide(
        self, checkpoint_iteration: int | None, failure_iteration: int | None, checkpoint: Shard | None
    ) -> Decision:
        """The sources of all ranks, from what they can reach now; see `cpsr.checkpoint.tiers.decide`.

        Args:
            checkpoint_iteration: c, the newest checkpoint that all ranks have loaded; None without one.
            failure_iteration: f, the last step that every rank had finished; None where nothing was lost.
            checkpoint: what this rank has loaded: whether all ranks hold the same shows in it.
        """
        nodes = self._nodes = self._group.gather(self._node)
        newest = -1 if checkpoint_iteration is None else checkpoint_iteration
        reported = self._group.gather([vars(entry) for entry in self._catalogue(nodes, newest)])
        wholes = self._group.gather(None if checkpoint is None or not self._whole else _fingerprint(checkpoint))
        return decide(
            nodes,
            [Entry(**entry) for part in reported for entry in part],
            checkpoint_iteration,
            failure_iteration,
            alike=wholes[0] is not None and wholes.count(wholes[0]) == len(wholes),
            remote=True,
        )

    def bring(self, sources: Sequence[Source]) -> None:
        """Bring what lies on other machines to those that take it; a collective.

        Raises:
            CheckpointError: something did not arrive; on every rank.
        """
        self._fetched = fetch(self._run_id, self._group, self._nodes, sources, self._config)

    def load(self, source: Source, into: Shard) -> Any:
        """Copy this rank's state out of memory and return its scalars; every rank raises where one cannot.

        Raises:
            CheckpointError: a state is not whole any more; what `into` holds on other ranks is not defined.
        """
        problem, scalars = None, None
        try:
            if source.entry is not None:
                fetched, self._fetched = self._fetched, None
                scalars = load_held(fetched or self._held_at(source.entry), into)
                if fetched is not None:
                    fetched.path.unlink()
        except CheckpointError as error:
            problem = f"rank {self._group.rank}: {error}"
        problems = [part for part in self._group.gather(problem) if part is not None]
        if problems:
            raise CheckpointError("; ".join(problems))
        return scalars

    def _catalogue(self, nodes: list[str], after: int) -> list[Entry]:
        """This rank's share of what its machine holds: its own states, and some of those of ranks elsewhere."""
        local = [rank for rank, node in enumerate(nodes) if node == self._node]
        entries = []
        for state in held_states(self._run_id):
            verifier = state.rank if state.rank in local else local[state.rank % len(local)]
            if verifier != self._group.rank or state.life < self._first_life or state.iteration <= after:
                continue
            problem = verify_held(state)
            if problem is not None:
                logger.warning("a state in shared memory is not used: %s", problem)
                continue
            entries.append(Entry(state.rank, state.iteration, state.kind, self._node, state.path.name))
        return entries

    def _held_at(self, entry: Entry) -> HeldState:
        state = held_state(SHARED_MEMORY / entry.name)
        if state is None or state.iteration != entry.iteration:
            raise CheckpointError(f"{entry.name} does not hold iteration {entry.iteration} any more")
        return state


def told(sources: tuple[Source, ...]) -> str:
    """Which ranks take what, for people: `memory (0-3), predicted (4)`."""
    tiers = Counter(source.tier for source in sources)
    return ", ".join(
        f"{tier} ({_ranges([source.rank for source in sources if source.tier == tier])})" for tier in sorted(tiers)
    )


def _ranges(ranks: list[int]) -> str:
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and rank == parts[-1][1] + 1:
            parts[-1][1] = rank
        else:
            parts.append([rank, rank])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


def _whole(shard: Shard) -> bool:
    """Whether the rank holds whole parameters: slices are never another rank's."""
    operators = shard.operators.values()
    return all(operator.parameter.numel == math.prod(operator.parameter.global_shape) for operator in operators)


def _fingerprint(shard: Shard) -> str:
    """Of names, shapes and weights: ranks that each train a model of their own have the same shapes, too."""
    state = xxhash.xxh3_128()
    for name, operator in sorted(shard.operators.items()):
        values = operator.parameter.values
        state.update(repr((name, operator.parameter.global_shape, values.dtype, sorted(operator.moments))).encode())
        state.update(values.contiguous().view(torch.uint8).numpy().data)
    return state.hexdigest()
