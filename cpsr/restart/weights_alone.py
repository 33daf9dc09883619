"""The newest checkpoint that keeps the weights alone, as a state to continue from when no whole one is left."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from cpsr.checkpoint.snapshot import Snapshot, SnapshotPool
from cpsr.checkpoint.store import CheckpointStore
from cpsr.engines.adapter import EngineAdapter
from cpsr.engines.optimizer_state import as_new
from cpsr.engines.random_states import capture_random_states
from cpsr.errors import RecoveryError
from cpsr.ranks.group import Group
from cpsr.restart.agreement import load_together
from cpsr.restart.older_experts import older_operators
from cpsr.state.codec import lacks_tensors
from cpsr.state.scalars import DataPosition

__all__ = ["NewestWeights", "WeightsAlone"]

logger = logging.getLogger(__name__)

# Parts of the small state that begin anew where their tensors are gone.
_BEGIN_ANEW: dict[str, Any] = {"probes": [], "learned": {}, "planning": {}, "experts": {}}


@dataclass(frozen=True)
class WeightsAlone:
    """This rank's part of such a checkpoint, made a whole state.

    Attributes:
        snapshot: the weights; moments of zero; buffers as the module has them; the small state without what is lost.
        damaged: names of the damaged checkpoints that were set aside.
    """

    snapshot: Snapshot
    damaged: tuple[str, ...] = ()


class NewestWeights:
    """Finds the newest checkpoint of weights that every rank verifies; every method is a collective.

    Args:
        adapter: the engine, as the script has built it.
        group: the ranks.
        store: the run's checkpoints.
        pool: the host buffers.

    Attributes:
        damaged: iteration -> what is wrong with a checkpoint of weights that was skipped.
        obstacles: iteration -> why training cannot continue from weights that are whole.
    """

    def __init__(self, adapter: EngineAdapter, group: Group, store: CheckpointStore, pool: SnapshotPool) -> None:
        self._adapter = adapter
        self._group = group
        self._store = store
        self._pool = pool
        self._lost: list[str] = []  # of the checkpoint that was loaded last: frozen parameters
        self.damaged: dict[int, str] = {}
        self.obstacles: dict[int, str] = {}

    def load(self) -> Snapshot | None:
        """Load the newest checkpoint that can be used, into a host buffer that the caller releases.

        Returns:
            This rank's part as a whole state; None where there is none.

        Raises:
            RunMismatchError: it is of another model or of other slices of it.
            RecoveryError: the file system cannot read a file now.
        """
        kept = [info.iteration for info in self._store.catalogue() if not info.full and not info.partial]
        for iteration in reversed(self._group.broadcast(kept)):
            snapshot = self._pool.acquire(iteration)
            if snapshot is None:
                raise RecoveryError("no host buffer is free to restore into; this is a defect, please report it")
            problem = load_together(self._group, iteration, partial(self._load_into, snapshot))
            if problem is not None:
                self.damaged[iteration] = problem
                logger.error("the weights of checkpoint %d cannot be used. %s", iteration, problem)
            elif (obstacle := self._obstacle(snapshot)) is not None:
                self.obstacles[iteration] = obstacle
            else:
                self._complete(snapshot)
                return snapshot
            self._pool.release(snapshot)
        return None

    def _load_into(self, snapshot: Snapshot) -> None:
        snapshot.scalars = self._store.load_weights(snapshot.iteration, snapshot.shard)
        self._lost = [] if self._store.frozen is None else self._store.frozen.lost(snapshot.iteration)

    def _obstacle(self, snapshot: Snapshot) -> str | None:
        """What no rank can replace: state that only a whole checkpoint holds, and that no restart can begin anew."""
        small: Mapping[str, Any] = snapshot.scalars
        transient = set(self._adapter.describe()["module"]["transient"])
        kept = sorted(snapshot.shard.others.keys() - transient)
        registered = sorted(name for name, state in small.get("registered", {}).items() if lacks_tensors(state))
        found = [
            f"the module's buffer {kept[0]!r}" if kept else None,
            f"the frozen parameter {self._lost[0]!r}" if self._lost else None,
            f"the tensors of the registered object {registered[0]!r}" if registered else None,
            "numbers of the engine" if lacks_tensors(as_new(small["engine"])) else None,
            "experts of its own iteration" if older_operators(snapshot) else None,
        ]
        own = " and ".join(one for one in found if one is not None)
        lacking = [part for part in self._group.gather(own) if part]
        return f"training cannot go on without {lacking[0]}" if lacking else None

    def _complete(self, snapshot: Snapshot) -> None:
        """Fill in what a script has that loads weights into a new engine with a new optimizer."""
        small = snapshot.scalars
        live = self._adapter.shard().others
        with torch.no_grad():
            for operator in snapshot.shard.operators.values():
                for values in operator.moments.values():
                    values.zero_()
            for name, values in snapshot.shard.others.items():
                values.copy_(live[name])
        data = DataPosition(**small["data"]).without_random_states()
        anew = {name: empty for name, empty in _BEGIN_ANEW.items() if lacks_tensors(small.get(name))}
        rng = capture_random_states(self._adapter)
        # The engine has the frozen parameters already.
        anew |= {"engine": as_new(small["engine"]), "rng": rng, "data": vars(data), "frozen": {}}
        snapshot.scalars = {**small, **anew}
