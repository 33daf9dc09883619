"""A few batches whose loss can be evaluated at a restart, before anything is trained: what the guard's veto needs."""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from cpsr.engines.adapter import EngineAdapter
from cpsr.errors import UnsupportedEngineError
from cpsr.state import codec

__all__ = ["LossFunction", "Probes"]

LossFunction = Callable[[Any], torch.Tensor]

logger = logging.getLogger(__name__)


class Probes:
    """The last few inputs of training, or the user's batches.

    Args:
        adapter: the engine.
        keep: number of recent inputs to keep; 0 turns probes off.
        loss_fn: the user's loss of one batch, without backward; where None, the module itself must return a loss.
        batches: held-out batches of the user's, used instead of recent inputs.
    """

    def __init__(
        self,
        adapter: EngineAdapter,
        keep: int,
        loss_fn: LossFunction | None = None,
        batches: Sequence[Any] | None = None,
    ) -> None:
        self._adapter = adapter
        self._loss_fn = loss_fn
        self._fixed = None if batches is None else [self._as_probe(batch) for batch in batches]
        self._recent: deque[dict[str, Any]] = deque(maxlen=keep)
        self._checked = False
        self.off: str | None = "restart.probe_batches is 0" if keep == 0 and batches is None else None

    def on_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Remember (not copy) the inputs of a training forward."""
        if self._loss_fn is None and self._fixed is None and self.off is None:
            self._recent.append({"args": args, "kwargs": kwargs})

    def on_batch(self, batch: Any) -> None:
        """Remember (not copy) a batch of the data loader."""
        if self._loss_fn is not None and self._fixed is None and self.off is None:
            self._recent.append({"batch": batch})

    def saved(self) -> list[Any]:
        """The recent inputs, for a checkpoint; empty where no loss could be evaluated from them."""
        if self._loss_fn is None and not self._adapter.can_evaluate:
            return []
        if not self._checked and self._recent:
            self._checked = True  # inputs of one kind come from one loop
            try:
                codec.encode(list(self._recent))
            except UnsupportedEngineError as error:
                self._turn_off(f"recent inputs are not plain data ({error})")
                self._recent.clear()
        return list(self._recent)

    def count(self, saved: list[Any]) -> int:
        """Probes that this rank can evaluate."""
        return len(saved if self._fixed is None else self._fixed)

    def losses(self, saved: list[Any], count: int) -> list[float]:
        """This rank's loss of the first `count` probes with the present weights, in nats.

        Args:
            saved: what `saved` returned when the checkpoint was taken; not used where the user gave batches.
            count: the same on every rank: an evaluation may be a collective.

        Returns:
            Nothing where the module gives no loss; `off` then says why.
        """
        probes = saved if self._fixed is None else self._fixed
        try:
            return [self._loss(_to_device(probe, self._adapter.device)) for probe in probes[:count]]
        except Exception as error:  # noqa: BLE001 - no error of a user's loss may prevent a restart
            self._turn_off(f"{type(error).__name__}: {error}")
            return []

    def _turn_off(self, why: str) -> None:
        self.off = why
        logger.warning("the guard's loss veto is off: %s; give loss_fn together with probe_batches to turn it on", why)

    def _loss(self, probe: dict[str, Any]) -> float:
        with self._adapter.evaluation():
            if self._loss_fn is None:
                return float(self._adapter.evaluate(tuple(probe["args"]), probe["kwargs"]))
            return float(self._loss_fn(probe["batch"]))

    def _as_probe(self, batch: Any) -> dict[str, Any]:
        if self._loss_fn is not None:
            return {"batch": batch}
        if isinstance(batch, dict):
            return {"args": (), "kwargs": batch}
        return {"args": tuple(batch) if isinstance(batch, list | tuple) else (batch,), "kwargs": {}}


def _to_device(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: _to_device(item, device) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)([_to_device(item, device) for item in value])
    return value
