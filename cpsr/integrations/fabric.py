"""CPSR in a loop over objects that Lightning Fabric has set up, as the scripts of LitGPT have one."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.fabric.utilities.data import _set_sampler_epoch
from lightning.fabric.wrappers import is_wrapped
from torch.utils.data import DataLoader

from cpsr.engines import EngineAdapter, TorchAdapter
from cpsr.errors import UnsupportedEngineError
from cpsr.recovery import CPSRRecovery

__all__ = ["FabricState", "Passes", "engine_of"]

_APART = (torch.nn.Module, torch.optim.Optimizer, DataLoader)


def engine_of(
    model: Any, optimizer: Any, scheduler: Any = None, *, state: dict[str, Any] | None = None, **adapter: Any
) -> EngineAdapter:
    """The engine for `CPSRRecovery`, of what `fabric.setup` returned. The loop calls `optimizer.step()` itself.

    Args:
        model: that the loop calls, compiled or not.
        optimizer: that the loop steps.
        scheduler: that the loop steps after every optimizer step.
        state: the dictionary of `fabric.save(path, state)`: counters and other objects in it come back.
        adapter: more arguments of `TorchAdapter`.

    Raises:
        UnsupportedEngineError: see `TorchAdapter`; or a part that Fabric has not set up.
    """
    called = getattr(model, "_orig_mod", model)
    for part in (called, optimizer):
        _require_set_up(part)
    # Fabric's precision around a module has no parameters: CPSR follows the module, or DDP, that it calls.
    scaler = getattr(optimizer._strategy.precision, "scaler", None)
    engine = TorchAdapter(called._forward_module, optimizer.optimizer, scheduler, scaler, **adapter)
    companions = {} if state is None else {"fabric state": FabricState(state)}
    setattr(engine, "companions", lambda: companions)  # noqa: B010 - engines of other packages have none
    return engine


class FabricState:
    """Of the dictionary that `fabric.save(path, state)` takes, all but models, optimizers and loaders.

    Args:
        content: changed in place by a restart, as by `fabric.load(path, state)`.
    """

    def __init__(self, content: dict[str, Any]) -> None:
        self._content = content

    def state_dict(self) -> dict[str, Any]:
        """Plain data, and the states of objects that have one."""
        kept = {name: one for name, one in self._content.items() if not (isinstance(one, _APART) or is_wrapped(one))}
        return {name: one.state_dict() if hasattr(one, "state_dict") else one for name, one in kept.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put it back."""
        for name, value in state.items():
            one: Any = self._content.get(name)
            if hasattr(one, "load_state_dict"):
                one.load_state_dict(value)
            else:
                self._content[name] = value


class Passes(Iterable[Any]):
    """A loader that `fabric.setup_dataloaders` returned; to iterate over it gives the rest of the current pass.

    Args:
        recovery: open.
        loader: as Fabric has it; its samplers are told the pass of the whole run.

    Raises:
        UnsupportedEngineError: a loader that Fabric has not set up.
    """

    def __init__(self, recovery: CPSRRecovery, loader: Any) -> None:
        _require_set_up(loader)
        self._recovery, self._loader = recovery, loader

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __iter__(self) -> Iterator[Any]:
        loader = self._loader._dataloader
        _set_sampler_epoch(loader, self._recovery.epoch)
        for batch in self._recovery.resume(loader):
            yield batch if self._loader.device is None else move_data_to_device(batch, self._loader.device)


def _require_set_up(part: Any) -> None:
    if not is_wrapped(part):
        raise UnsupportedEngineError(
            f"this {type(part).__name__} is not set up by Fabric: pass what fabric.setup and fabric.setup_dataloaders "
            "returned, or take TorchAdapter and recovery.resume(loader)"
        )
