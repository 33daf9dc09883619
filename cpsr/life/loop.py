"""The user's training loop as the library sees it, before a run is opened."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from cpsr.config import CPSRConfig
from cpsr.elastic.global_batch import GlobalBatch
from cpsr.engines.adapter import EngineAdapter
from cpsr.learning.learning import Learning
from cpsr.life.events import EventCallbacks
from cpsr.restart.probes import LossFunction, Probes
from cpsr.saving.run_state import RunState
from cpsr.state.losses import LossRecorder

__all__ = ["Loop"]


class Loop:
    """The training without its run: the engine, its losses, the user's registered objects and callbacks.

    Args:
        adapter: the engine.
        config: the run's configuration.
        loss_fn: the user's loss of a batch; None if the module returns it.
        probe_batches: the user's held-out batches; None keeps recent inputs.
    """

    def __init__(
        self,
        adapter: EngineAdapter,
        config: CPSRConfig,
        loss_fn: LossFunction | None,
        probe_batches: Sequence[Any] | None,
    ) -> None:
        self.adapter = adapter
        self.loss_fn = loss_fn
        self.events = EventCallbacks()
        self.losses = LossRecorder(config.journal.flush_iterations)
        self.probes = Probes(self.adapter, config.restart.probe_batches, loss_fn, probe_batches)
        self.learning = Learning(self.adapter, config)
        waiting = partial(self.learning.bubbles.waiting, "data")
        batch = GlobalBatch(self.adapter, config.elastic.global_batch_size)
        self.state = RunState(
            self.adapter,
            self.losses,
            self.probes,
            self.learning.learner,
            waiting,
            batch,
            config.restart.hyperparameters,
            exact=config.mode == "exact",
        )
