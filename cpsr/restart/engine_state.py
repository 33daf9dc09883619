"""Exact restore of a whole snapshot into the engine."""

import copy
import logging
import time
from typing import Any

import torch

from cpsr.checkpoint.frozen_files import FrozenFiles
from cpsr.checkpoint.snapshot import Snapshot
from cpsr.checkpoint.tiers import Source
from cpsr.engines.adapter import EngineAdapter
from cpsr.journal import Beginning
from cpsr.predictor.protocol import StatePredictor
from cpsr.restart.restored import Restored
from cpsr.state.scalars import Scalars

__all__ = ["EngineState"]

logger = logging.getLogger(__name__)


class EngineState:
    """The engine's tensors and scalars, and the predictor's learned state of the same iteration."""

    def __init__(self, adapter: EngineAdapter, predictor: StatePredictor, frozen: FrozenFiles | None = None) -> None:
        self._adapter = adapter
        self._predictor = predictor
        self._frozen = frozen

    def load_frozen(self, scalars: dict[str, Any]) -> None:
        """Give the engine the parameters outside the optimizer that go with a snapshot, or with an emergency dump.

        Those that had moved are in a dump. Of the others it has a hash, by which they are looked for in checkpoints.

        Raises:
            CheckpointError: neither it nor a checkpoint has them; the engine's are as they were.
        """
        if self._frozen is not None:
            self._frozen.bring(scalars.get("frozen", {}))

    def inject(self, snapshot: Snapshot) -> None:
        """Put a snapshot's tensors and the engine's scalars back, exactly.

        Raises:
            CheckpointError: as `load_frozen`; nothing was changed.
        """
        self.load_frozen(snapshot.scalars)
        live = dict(self._adapter.shard(to_fill=True).tensors())
        with torch.no_grad():
            for key, values in snapshot.shard.tensors():
                live[key].copy_(values)
        # A copy: schedulers keep their argument and change it in place.
        self._adapter.load_scalars(copy.deepcopy(snapshot.scalars["engine"]))
        self._adapter.push_down()

    def restore(
        self,
        snapshot: Snapshot,
        sources: tuple[Source, ...],
        checkpoint_iteration: int | None,
        failure_iteration: int | None,
        load_seconds: float,
    ) -> Restored:
        """Continue exactly at a snapshot.

        Args:
            snapshot: of this rank.
            sources: where each rank's snapshot comes from.
            checkpoint_iteration: c, the newest checkpoint on the disk; None without one.
            failure_iteration: f.
            load_seconds: wall time that loading has taken.

        Returns:
            How the life begins, without the reason, which the caller sets.
        """
        started = time.perf_counter()
        scalars = Scalars.from_tree(snapshot.scalars)
        self.inject(snapshot)
        self._load_learned(scalars.learned)
        return Restored(
            beginning=Beginning.EXACT,
            restored_iteration=snapshot.iteration,
            checkpoint_iteration=checkpoint_iteration,
            failure_iteration=failure_iteration,
            reason="",
            scalars=scalars,
            data=scalars.data,
            sources=sources,
            cumulative_learning_rate=scalars.cumulative_learning_rate,
            load_seconds=load_seconds,
            inject_seconds=time.perf_counter() - started,
        )

    def _load_learned(self, learned: dict[str, Any]) -> None:
        """Load the predictor's learned state; if another kind or version wrote it, log that and start without."""
        if not learned:
            return
        try:
            self._predictor.load_state_dict(learned)
        except ValueError as error:
            logger.warning("what the predictor had learned cannot be taken over (%s): it begins anew", error)
