"""The passes of a `Trainer` of transformers over its data, begun at the restored step.

The Trainer fixes where it begins before it has an engine to restore, so two of its methods are replaced on the instance
while CPSR follows it: `_run_epoch`, which skips what was trained, and `get_batch_samples`, called before each step.
"""

from collections.abc import Callable
from inspect import isgeneratorfunction
from typing import Any

from cpsr.errors import UnsupportedEngineError
from cpsr.integrations.passes import Passes, order_of_the_pass
from cpsr.integrations.trainer_state import TrainerProgress
from cpsr.life.events import Event, RolledBack
from cpsr.recovery import CPSRRecovery

__all__ = ["REPLACED", "TrainerPasses"]

REPLACED = ("_run_epoch", "get_batch_samples")


class _Moved(Exception):  # noqa: N818 - no error: the way out of a pass whose state was rolled back
    pass


class TrainerPasses:
    """Runs the Trainer's passes from the step that CPSR has restored.

    Args:
        trainer: inside `train()`, from `on_train_begin` on.
        recovery: its open run.
        progress: the Trainer's own state.
        batches: of one step, as the engine counts them.
        end: called when the last pass has ended, or with the error that ended training.
    """

    def __init__(
        self,
        trainer: Any,
        recovery: CPSRRecovery,
        progress: TrainerProgress,
        batches: int,
        end: Callable[[BaseException | None], None],
    ) -> None:
        self._trainer, self._recovery, self._progress = trainer, recovery, progress
        self._batches, self._end = batches, end
        self._restored = progress.state_dict() if recovery.iteration else None
        self._stream: Any = None
        self._rolled_back = self._drawn = self._continued = False
        self._run_epoch, self._fetch = trainer._run_epoch, trainer.get_batch_samples
        trainer._run_epoch, trainer.get_batch_samples = self.run_epoch, self.get_batch_samples

    def detach(self) -> None:
        """Put the Trainer's own methods back."""
        self._trainer._run_epoch, self._trainer.get_batch_samples = self._run_epoch, self._fetch

    def on_event(self, event: Event) -> None:
        """Of the run: a roll-back ends the pass."""
        self._rolled_back |= isinstance(event, RolledBack)

    def run_epoch(self, *, epoch: int, **given: Any) -> None:
        """In place of the Trainer's: what is left of all passes up to this one; nothing of those trained before."""
        trainer = self._trainer
        try:
            self._run_passes(epoch, given)
        except BaseException as error:
            self._end(error)
            raise
        if trainer.control.should_training_stop or epoch + 1 >= trainer.state.num_train_epochs:
            self._end(None)  # before the Trainer loads its best model

    def _run_passes(self, epoch: int, given: dict[str, Any]) -> None:
        trainer, recovery, updates = self._trainer, self._recovery, given["num_update_steps_per_epoch"]
        while (current := recovery.iteration // updates) <= epoch:
            if recovery.iteration >= trainer.state.max_steps:
                trainer.control.should_training_stop = True
                return
            if self._restored is not None:  # once more: callbacks have heard of passes that were trained before
                self._progress.load_state_dict(self._restored)
                self._restored = None
            if current < epoch:
                trainer.control = trainer.callback_handler.on_epoch_begin(trainer.args, trainer.state, trainer.control)
            done = recovery.iteration % updates * trainer.args.gradient_accumulation_steps
            self._continued = done > 0
            if not self._drawn and (self._stream is None or not done):
                self._stream = self._resumed(given["train_dataloader"], updates)
            given |= {"epochs_trained": current, "steps_trained_in_current_epoch": done}
            given["resume_from_checkpoint"] = str(recovery.config.run_dir) if done else None  # nothing to load there
            try:
                self._run_epoch(epoch=current, **given)
            except _Moved:
                continue
            if trainer.state.global_step != recovery.iteration:
                trainer.control.should_training_stop = False  # the last step was rolled back
            elif trainer.control.should_training_stop:
                return
            elif trainer.control.should_epoch_stop:
                raise UnsupportedEngineError(
                    f"a callback ended pass {current} early, after which a restart would go on at the wrong batch: "
                    "end the training instead (should_training_stop)"
                )

    def _resumed(self, loader: Any, updates: int) -> Any:
        if not isgeneratorfunction(type(loader).__iter__):
            raise UnsupportedEngineError(
                f"the training loader is a {type(loader).__name__} that Accelerate has not prepared, whose order "
                "cannot be drawn again: return trainer.accelerator.prepare(loader) from get_train_dataloader"
            )
        accumulated = self._trainer.args.gradient_accumulation_steps
        passes = Passes(updates * self._batches, loader, accumulated // self._batches)
        return self._recovery.resume(passes)

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        """In place of the Trainer's: the batches of one step. CPSR hears before that the last step is over."""
        if not self._drawn:
            for _ in range(self._batches):
                next(self._stream)
        self._drawn = self._rolled_back
        if self._rolled_back:
            self._rolled_back = False
            raise _Moved
        continued, self._continued = self._continued, False
        with order_of_the_pass(self._stream, continued=continued):
            fetched = self._fetch(epoch_iterator, num_batches, device)
        if not fetched[0]:
            raise UnsupportedEngineError(
                f"the training data ended before step {self._recovery.iteration + 1}, and the dataset has no length: "
                "CPSR cannot place a second pass over it. Repeat the data in the dataset itself"
            )
        return fetched
