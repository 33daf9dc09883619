"""CPSR in the `Trainer` of Lightning: one optimizer, automatic optimization, on one device or with DDP."""

import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    BatchSizeFinder,
    LearningRateFinder,
    ModelPruning,
    StochasticWeightAveraging,
    WeightAveraging,
)
from torch.utils.data import DataLoader

from cpsr.config import CPSRConfig
from cpsr.engines import TorchAdapter
from cpsr.errors import ConfigError, UnsupportedEngineError
from cpsr.integrations.lightning_state import TrainerCheckpoint
from cpsr.life.events import EventCallback
from cpsr.recovery import CPSRRecovery
from cpsr.state.codec import same
from cpsr.state.host_random import capture_host_rng, restore_host_rng
from cpsr.state.loader import ResumableLoader
from cpsr.state.loader_generators import order_generators
from cpsr.state.loader_kinds import length_of
from cpsr.state.user_objects import Stateful

__all__ = ["CPSRCallback"]

STRATEGIES = ("SingleDeviceStrategy", "DDPStrategy")
_SEARCH = "would search again at each restart: search in a Trainer without CPSR, and set what it finds"
NOT_FOLLOWED = {
    BatchSizeFinder: _SEARCH,
    LearningRateFinder: _SEARCH,
    StochasticWeightAveraging: "does not save which schedule it has set, and a restart would go on with another rate: "
    "use WeightAveraging or EMAWeightAveraging, whose averages continue",
    ModelPruning: "adds buffers to the module within a run, which it lacks at a restart: prune in a run of its own",
    BaseFinetuning: "adds trained tensors within a run: begin a run of its own for each phase",
}
REPLACED = ("setup_data", "_load_combined_loader_states")


class TrainingData:
    """The training data of a `Trainer`: which loader it iterates over, and where in it.

    Two methods of the fit loop are replaced on the instance. `setup_data` requests a loader from the module, at the
    beginning and with `reload_dataloaders_every_n_epochs` again. It calls `_load_combined_loader_states` when the
    loader is known and its iteration has not begun: there CPSR's stream takes its place.

    Args:
        trainer: before its strategy is set up. Where `configure_optimizers` asks for `estimated_stepping_batches`, the
            loader is requested by then.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer, self._loop = trainer, trainer.fit_loop
        self.detach()  # of a call of `fit` that failed before the run was open
        self._setup_data = self._loop.setup_data
        self._loop.setup_data, self._loop._load_combined_loader_states = self.setup_data, self._place
        self._resume: Callable[[Any], ResumableLoader] | None = None
        self._ordered: tuple[Any, dict[str, Stateful]] | None = None
        self._early: list[Any] = []  # random states before and after an iteration that began before the run was open
        self._requested: dict[str, Any] | None = None  # random states when this pass's loader was requested
        self._restored: dict[str, Any] | None = None
        self._trained: dict[str, Any] | None = None
        self.passes: _Passes | None = None

    def detach(self) -> None:
        """Put the loop's own methods back."""
        for name in REPLACED:
            vars(self._loop).pop(name, None)

    def state_dict(self) -> dict[str, Any]:
        """Of which pass the loader is, and the random states that the module may have made its data from."""
        reloads = self._trainer.reload_dataloaders_every_n_epochs > 0
        last = self._loop._last_train_dl_reload_epoch
        if not reloads or last < 0:  # then nobody requests the loader again
            return {"requested": None, "pass": None}
        return {"requested": self._requested, "pass": last}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The next request is that of the pass to continue."""
        self._restored = state

    def open(self, resume: Callable[[Any], ResumableLoader], trained: dict[str, Any]) -> None:
        """The run is open: from here on CPSR has the place in the data.

        Args:
            resume: gives the rest of the current pass over a loader.
            trained: random states of the restored step, or of now.
        """
        self._resume, self._trained = resume, trained
        loop, restored = self._loop, self._restored
        requested = loop._combined_loader is not None
        if restored is not None and restored["pass"] is not None and not (requested and self._is_of_now(restored, 0)):
            loop._last_train_dl_reload_epoch = float("-inf")  # request the loader of that pass
        elif requested:
            self._place()
            iter(loop._data_fetcher)

    def setup_data(self) -> None:
        """In place of the loop's."""
        loop = self._loop
        if self._resume is None:
            self._setup_data()
            if self._early:
                self._early.append(self._random_states())
        elif loop._combined_loader is not None and not loop._should_reload_train_dl:
            return
        elif self._restored is not None and self._restored["pass"] is not None:
            self._request_again(self._restored)
        else:
            if self._trainer.current_epoch > 0:
                self._requested = capture_host_rng()
            self._setup_data()

    def _is_of_now(self, state: dict[str, Any], first: int) -> bool:
        """Whether the loader that was requested in this pass, `first`, is still in use."""
        every = self._trainer.reload_dataloaders_every_n_epochs
        return bool(state["pass"] == first and self._loop.epoch_progress.current.completed - first < every)

    def _request_again(self, state: dict[str, Any]) -> None:
        """Request the loader of the pass to continue, as when it began; or a new one where that pass is over."""
        progress, now = self._loop.epoch_progress.current, self._loop.epoch_progress.current.completed
        self._requested = state["requested"]
        if self._is_of_now(state, state["pass"]):
            progress.completed = state["pass"]  # which the module asks for as `trainer.current_epoch`
        else:
            self._requested = self._trained
        if self._requested is not None:
            restore_host_rng(self._requested)
        try:
            self._setup_data()
        finally:
            progress.completed = now

    def _place(self) -> None:
        """In place of the loop's: CPSR's stream in the place of the loader."""
        combined = self._loop._combined_loader
        if self._resume is None:
            self._early = [self._random_states()]
            return
        loader = combined.flattened[0]
        length = length_of(loader) if isinstance(loader, DataLoader) and len(combined.flattened) == 1 else None
        if length is None or combined.limits != [length]:
            raise UnsupportedEngineError(
                f"the training data is {len(combined.flattened)} x {type(loader).__name__}, of which "
                f"{combined.limits} batches are taken: CPSR follows one DataLoader with a length, and all of it (no "
                "limit_train_batches)"
            )
        if len(self._early) == 2 and self._restored is None and same(self._early[1], self._random_states()):
            self._put_back(self._early[0])  # the iteration that had begun begins once more
        self._early = []
        combined.flattened = [self._pass_of(loader)]

    def _pass_of(self, loader: Any) -> "_Passes":
        assert self._resume is not None
        continued, self._restored = self._restored is not None, None
        self.passes = _Passes(loader, self._resume, continued)
        return self.passes

    def _random_states(self) -> list[Any]:
        return [capture_host_rng(), [one.state_dict() for one in self._order().values()]]

    def _put_back(self, states: list[Any]) -> None:
        restore_host_rng(states[0])
        for generator, state in zip(self._order().values(), states[1], strict=True):
            generator.load_state_dict(state)

    def _order(self) -> dict[str, Stateful]:
        """What a pass draws its order from; found once for a loader, since counts go by how they were then."""
        loader = self._loop._combined_loader.flattened[0]
        if self._ordered is None or self._ordered[0] is not loader:
            self._ordered = loader, order_generators(loader)
        return self._ordered[1]


class _Passes:
    """The loader, of which each iteration is what is left of the current pass.

    Args:
        loader: of Lightning.
        resume: gives the rest of a pass.
        continued: the first iteration restores random states at its first batch: hooks that Lightning calls before it
            draw from others.
    """

    def __init__(self, loader: Any, resume: Callable[[Any], ResumableLoader], continued: bool) -> None:
        self._loader, self._resume, self._continued = loader, resume, continued
        self.batch = 0  # of the pass, that came next when the iteration began

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name in ("state_dict", "load_state_dict"):  # Lightning would save its place, too
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        stream = self._resume(self._loader)
        self.batch = stream.position.batch
        if not self._continued:
            stream.open()  # as a DataLoader draws the order of a pass when its iteration begins
        self._continued = False
        return islice(stream, len(self) - self.batch)  # Lightning asks for no batch after the last one


def run_closure_first(optimizer: Any) -> None:
    """Lightning hands forward and backward to `optimizer.step`, which runs them before it updates: so here, too."""
    step = optimizer.step

    @wraps(step)
    def after_closure(closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        step()
        return loss

    # In place of the method, as torch's schedulers do it themselves.
    optimizer.step = after_closure


def require_followed(trainer: Any) -> None:
    """Refuse a Trainer whose loop or callbacks CPSR cannot follow, by name, before anything is set up.

    Raises:
        UnsupportedEngineError: a callback of `NOT_FOLLOWED`; a fit loop without the methods that CPSR replaces.
    """
    missing = [name for name in REPLACED if not hasattr(trainer.fit_loop, name)]
    if missing:
        raise UnsupportedEngineError(f"the fit loop of this Lightning has no {missing[0]}: CPSR follows 2.6 and later")
    for one in trainer.callbacks:
        for kind, why in NOT_FOLLOWED.items():
            if isinstance(one, kind):
                raise UnsupportedEngineError(f"{type(one).__name__} {why}. Nothing was trained")


def require_supported(trainer: Any, module: Any) -> None:
    """Refuse what CPSR cannot follow, by name.

    Raises:
        UnsupportedEngineError: another strategy, manual optimization, several optimizers.
        ConfigError: `ckpt_path` would replace what CPSR restores.
    """
    strategy = type(trainer.strategy).__name__
    if strategy not in STRATEGIES:
        raise UnsupportedEngineError(
            f"the strategy is {strategy}, and CPSR follows Lightning on one device and with strategy='ddp'. With "
            "DeepSpeed or FSDP write the loop yourself, or use the Trainer of transformers"
        )
    if not module.automatic_optimization or len(trainer.optimizers) != 1:
        raise UnsupportedEngineError(
            f"{type(module).__name__} has {len(trainer.optimizers)} optimizers and automatic_optimization="
            f"{module.automatic_optimization}: CPSR follows automatic optimization with one optimizer"
        )
    if trainer.ckpt_path is not None:
        raise ConfigError(
            f"fit(ckpt_path={str(trainer.ckpt_path)!r}) would replace the state that CPSR restores: leave it out. To "
            "begin from it, load its weights into the module and take a new run_dir"
        )


class CPSRCallback(Callback):  # type: ignore[misc]  # untyped here
    """Restores a run when `trainer.fit` begins, and follows it to its end: `Trainer(callbacks=[CPSRCallback(...)])`.

    What Lightning's own checkpoints contain comes back, with random states and the place in the data; see
    docs/integrations.md. The mode is `exact`.

    Args:
        config: as in `CPSRRecovery`.
        on_event: callbacks for `CPSRRecovery.on_event`.

    Attributes:
        recovery: the run, from `on_fit_start` on; None before.
    """

    def __init__(
        self, config: CPSRConfig | Mapping[str, Any] | str | Path, *, on_event: tuple[EventCallback, ...] = ()
    ) -> None:
        self.recovery: CPSRRecovery | None = None
        self._config, self._on_event = config, on_event
        self._open = False
        self._data: TrainingData | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Before the strategy is set up: follow the training data, and come before all other callbacks.

        They find the run restored in their `on_fit_start`, as after a restart of Lightning itself.

        Raises:
            UnsupportedEngineError: a callback that CPSR cannot follow, by name.
        """
        if stage != "fit":
            return
        require_followed(trainer)
        trainer.callbacks = [self, *(one for one in trainer.callbacks if one is not self)]
        self._data = TrainingData(trainer)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Open the run and restore it: the strategy has set up the model and the optimizer.

        Raises:
            UnsupportedEngineError: a strategy or a loop that CPSR cannot follow, by name.
            ConfigError: `ckpt_path` would replace what CPSR restores.
            CPSRError: see `CPSRRecovery`.
        """
        assert self._data is not None
        require_supported(trainer, pl_module)
        (optimizer,) = trainer.optimizers
        self._loss_is_seen = trainer.strategy.model is not pl_module  # by the hooks on the module that is called
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        engine = TorchAdapter(
            trainer.strategy.model, optimizer, None, scaler, micro_batches_per_iteration=trainer.accumulate_grad_batches
        )
        run_closure_first(optimizer)
        recovery = CPSRRecovery(engine, self._config, mode="exact")
        self._checkpoint = TrainerCheckpoint(trainer)
        recovery.register("lightning", self._checkpoint)
        recovery.register("lightning data", self._data)
        for callback in self._on_event:
            recovery.on_event(callback)
        before = signal.getsignal(signal.SIGTERM)
        begun = capture_host_rng()
        self.recovery, self._open = recovery.__enter__(), True
        self._sigterm = signal.getsignal(signal.SIGTERM)
        _handle_sigterm(before)  # Lightning puts back at its end what it finds now
        trained = capture_host_rng()
        restore_host_rng(begun)  # what is set up before the first batch draws as it did in the first life
        self._data.open(self.recovery.resume, trained)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Put the loop to its place in the data, and SIGTERM under CPSR: Lightning has set up its handlers."""
        assert self._data is not None
        assert self._data.passes is not None
        _handle_sigterm(self._sigterm)
        self._checkpoint.place(self._data.passes.batch, len(self._data.passes))

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """The first after a restart: see `TrainerCheckpoint.settle`."""
        if self._checkpoint.restored:
            self._checkpoint.settle()

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor) -> None:
        """The loss goes to the journal, where the module itself was not called."""
        if self.recovery is not None and self._open and not self._loss_is_seen:
            self.recovery.life.on_loss(loss.detach() * trainer.accumulate_grad_batches)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The run ends here, and its last state is saved."""
        self._close(None)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """A run that was finished before has trained nothing: its averages are put into the module here."""
        if self._open:
            self._close(None)
            for one in trainer.callbacks:
                if isinstance(one, WeightAveraging):
                    one.on_train_end(trainer, pl_module)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """The run ends with this error, also with the exit after SIGTERM."""
        self._close(exception)

    def _close(self, error: BaseException | None) -> None:
        if self._open and self.recovery is not None:
            self._open = False
            if self._data is not None:
                self._data.detach()
            self.recovery.__exit__(type(error) if error else None, error, error.__traceback__ if error else None)


def _handle_sigterm(handler: Any) -> None:
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)
