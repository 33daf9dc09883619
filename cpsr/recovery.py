"""`CPSRRecovery`: the context manager that users put around their training loop."""

import logging
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import torch

from cpsr.config import CPSRConfig
from cpsr.engines import adapt, refuse_known
from cpsr.errors import ConfigError
from cpsr.journal import log_to_terminal
from cpsr.life.events import EventCallback
from cpsr.life.life import Life
from cpsr.life.loop import Loop
from cpsr.life.process_slot import ProcessSlot, ScriptEnd
from cpsr.life.rehearsed_life import rehearsed_config
from cpsr.planner.plan import Plan
from cpsr.ranks.garbage import no_collections
from cpsr.restart.prediction import LossFunction
from cpsr.restart.restore import Restored
from cpsr.state.loader import ResumableLoader
from cpsr.state.loader_kinds import iterable_of

__all__ = ["CPSRRecovery"]


class CPSRRecovery:
    """Snapshots a training run, and brings it back near the point of failure.

    Args:
        engine: the engine from `deepspeed.initialize`, or a `cpsr.engines.torch.TorchAdapter`.
        config: a `CPSRConfig`, a mapping, or the path of a YAML or JSON file; None reads the `"cpsr"` block of the
            DeepSpeed configuration.
        loss_fn: loss of one batch of your loader, without backward; the guard's loss veto needs it if the module does
            not return its loss. On pipelines, give it together with `probe_batches`.
        probe_batches: held-out batches for the loss veto; by default the last few inputs before each checkpoint.
        mode: overrides the configured mode.

    Raises:
        ConfigError: on entering, as all of these: the configuration is not usable, or a run is open in this process.
        UnsupportedEngineError: the engine keeps state that CPSR cannot see.
        RunMismatchError: the run directory belongs to another model or world size.
        ResourceError: not enough host memory or disk space.
        RecoveryError: checkpoints exist, but none can be read.

    Example::

        with CPSRRecovery(engine, "cpsr.yaml") as recovery:
            for batch in recovery.resume(loader):
                loss = engine(batch)
                engine.backward(loss)
                engine.step()

    A script that is not to be indented calls `recovery = CPSRRecovery(engine, "cpsr.yaml").open()` before its loop, and
    `recovery.close()` after it.

    Only the optimizer may change the weights between two steps: a snapshot is copied while the next forward and
    backward run, and is complete before the next update.
    """

    def __init__(
        self,
        engine: Any,
        config: CPSRConfig | Mapping[str, Any] | str | Path | None = None,
        *,
        loss_fn: LossFunction | None = None,
        probe_batches: Sequence[Any] | None = None,
        mode: Literal["auto", "predict", "exact"] | None = None,
    ) -> None:
        adapter = adapt(engine)  # first: what is no engine has no configuration either
        self._config = rehearsed_config(_configuration(engine, config, mode))
        self._loop = Loop(adapter, self._config, loss_fn, probe_batches)
        self._life: Life | None = None
        self._is_open = False
        self._script_end: ScriptEnd | None = None  # None inside a `with` block
        self._slot = ProcessSlot(str(self._config.run_dir), self._disown)

    def open(self) -> "CPSRRecovery":
        """Open the run without a `with` block, for a script whose loop is not to be indented; end it with `close`.

        If the script ends first, the run ends as after an error inside a `with` block: the state of the last step goes
        to host memory, where the next start finds it. That holds for an uncaught exception, for `sys.exit`, and for a
        script that forgot `close`.

        Returns:
            This object.

        Raises:
            ConfigError: and all others that entering the `with` block raises; see the class.
        """
        self.__enter__()
        self._script_end = ScriptEnd(self.__exit__)
        return self

    def close(self) -> None:
        """End an open run as leaving the `with` block does: wait for the other ranks, and commit the last state.

        In a `finally` or `except` clause, while an exception is handled, it ends the run with that exception instead.
        Without an open run nothing happens.
        """
        self.__exit__(*sys.exc_info())

    def __enter__(self) -> "CPSRRecovery":
        self._slot.claim()
        try:
            log_to_terminal(self._loop.adapter.rank)
            # What another package saves beside the engine: see `cpsr.integrations.accelerate`.
            for name, companion in getattr(self._loop.adapter, "companions", dict)().items():
                self.register(name, companion)
            with no_collections():
                self._life = Life(self._loop, self._config)
            self._loop.events.opened(self._life.restored, self._life.job.run)
        except BaseException:
            self._slot.release()
            raise
        self._is_open = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self._is_open:
            return
        self._is_open = False
        if self._script_end is not None:
            self._script_end.cancel()
        try:
            self.life.close(kind, error)
        finally:
            self._slot.release()

    def _disown(self) -> None:
        if self._life is not None:
            self._life.disown()

    @property
    def life(self) -> Life:
        """The open life inside the `with` block, for tests and tools: its parts may change with any version.

        Raises:
            ConfigError: no run is open.
        """
        if self._life is None:
            raise ConfigError("no run is open: this belongs inside the `with CPSRRecovery(...)` block, or after open()")
        return self._life

    @property
    def config(self) -> CPSRConfig:
        """The configuration; inside the `with` block, adjusted to what the job can follow."""
        return self._config if self._life is None else self._life.job.config

    @property
    def iteration(self) -> int:
        """Optimizer steps taken over all lives of the run; skipped ones (fp16) count. A roll-back sets it back."""
        return self._loop.adapter.iteration

    @property
    def epoch(self) -> int:
        """Complete passes over the data in the whole run: begin your own loop over passes here."""
        return self._loop.state.taken.epoch

    @property
    def batch(self) -> int:
        """Batches of the current pass that the loop has taken: `enumerate(stream, start=recovery.batch)` numbers them.

        After a restart inside a pass the stream gives the rest of it; `enumerate` alone would begin at 0 there.
        """
        return self._loop.state.batch

    @property
    def restored(self) -> Restored:
        """How this life began, with all details for tools: its parts may change with any version.

        The event `Restored` of `cpsr` has what a loop needs.

        Raises:
            ConfigError: outside the `with` block.
        """
        return self.life.restored

    @property
    def plan(self) -> Plan:
        """The current plan: `interval_iterations`, `memory_interval_iterations`, `origin`, `explanation`.

        The explanation is plain data with units in its keys, as in `GET /plan` (docs/service.md).

        Raises:
            ConfigError: outside the `with` block.
        """
        return self.life.saver.plan

    def resume(
        self, loader: Iterable[Any] | Callable[[], Any], *, epochs: int | None = None, repeat: bool = False
    ) -> ResumableLoader:
        """Iterate over the loader, from the batch after the restored step.

        Args:
            loader: a `DataLoader`, or any iterable that yields the same batches after a restart, such as a generator.
                If it has `state_dict` and `load_state_dict`, as torchdata's `StatefulDataLoader`, a restart continues
                from its state at once. Or a function that draws and returns one batch from random states alone.
            epochs: passes over the data of the whole run, those before a restart included. By default the iteration
                ends with the current pass, for a loop of your own: `for epoch in range(recovery.epoch, epochs)`.
            repeat: never end (use it instead of DeepSpeed's `RepeatingLoader`).

        The result is an iterator, also usable as a pipeline's `data_iter`. After a roll-back it rewinds automatically.

        Raises:
            ConfigError: outside the `with` block, where nothing is restored yet; or both `epochs` and `repeat`.
            UnsupportedEngineError: a loader of another package that would not yield the same batches again.
        """
        if self._life is None:
            raise ConfigError(
                "resume() belongs inside the `with CPSRRecovery(...)` block, or after open(), which restore the state"
            )
        if repeat and epochs is not None:
            raise ConfigError(f"resume(epochs={epochs}, repeat=True): give one of the two")
        refuse_known(loader)
        loader = iterable_of(loader)
        stream = self._loop.state.stream(loader, epochs, repeat)
        if self._life.on_probation and not stream.can_seek:
            self._life.job.journal.event(
                "watch",
                "the data iterator is one-shot: if the predicted state diverges, it cannot be rolled back in this "
                "process; give resume() the DataLoader itself",
                level=logging.WARNING,
            )
        return stream

    def log_loss(self, loss: torch.Tensor | float) -> None:
        """Report the loss of a micro-batch, if the model does not return it; never waits for the device.

        Call it before `optimizer.step()`. Right after the step it still counts for that step, but too late for the
        probation of a predicted state. With several calls the loss of a step is their mean. It replaces the loss that
        the engine reports.

        Args:
            loss: of this rank, in nats; a tensor of one element on any device, or a number.

        Raises:
            ConfigError: outside the `with` block; or a tensor of several elements.
        """
        value = loss if isinstance(loss, torch.Tensor) else torch.tensor(float(loss), device="cpu")
        if value.numel() != 1:
            raise ConfigError(f"log_loss() takes one number, not a tensor of shape {tuple(value.shape)}: use its mean")
        self.life.log_loss(value)

    def register(self, name: str, stateful: Any) -> None:
        """Save and restore an object of yours with every checkpoint; before the loop.

        Args:
            name: unique in the run and the same after a restart.
            stateful: has `state_dict` and `load_state_dict`; or a generator of torch, NumPy or Python; or a dictionary,
                whose content is the state. Its state must be plain data and tensors. A further module is saved so, and
                its optimizer under another name; a restart near the failure takes both from the checkpoint.

        Raises:
            ConfigError: the name is taken, or the object is none of these.
            UnsupportedEngineError: a training engine, or a pair of module and optimizer: CPSR follows one engine.
        """
        self._loop.state.register(name, stateful)

    def on_event(self, callback: EventCallback) -> None:
        """Call this with every event of the run: `Restored`, `RolledBack`, `Committed`, `Leaving` of `cpsr`.

        The first is the `Restored` of this life: when the `with` block is entered, or at once where it has been.

        Args:
            callback: takes one event, on the training thread of its rank; what it raises is logged and recorded.
        """
        self._loop.events.add(callback)


def _configuration(
    engine: Any, config: CPSRConfig | Mapping[str, Any] | str | Path | None, mode: str | None
) -> CPSRConfig:
    if config is None:
        block = getattr(engine, "config", None)  # as DeepSpeed parsed it, also from a file
        if not isinstance(block, Mapping) or "cpsr" not in block:
            raise ConfigError(
                'no configuration: pass one to CPSRRecovery, or add a "cpsr" block with at least "run_dir" to the '
                "DeepSpeed configuration"
            )
        config = {"cpsr": block["cpsr"]}
    loaded = CPSRConfig.load(config)
    return loaded if mode is None else CPSRConfig.load({**loaded.model_dump(), "mode": mode})
