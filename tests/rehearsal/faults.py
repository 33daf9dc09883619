"""What can happen to one rank in a rehearsal: each function arms one fault, for the given forward or call of it."""

import itertools
import os
import signal
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

from cpsr.checkpoint.manifest import step_name
from cpsr.checkpoint.snapshot import Snapshot
from cpsr.checkpoint.store import CheckpointStore
from cpsr.engines.deepspeed import DeepSpeedAdapter
from cpsr.rehearsal.batches import TrainedBatches
from cpsr.restart.prediction import StatePrediction
from cpsr.restart.restore import Restorer

__all__ = ["FAULTS"]

Instead = Callable[..., Any]


def replaced(owner: Any, name: str, instead: Callable[[Instead], Instead]) -> None:
    """Let `instead(original)` take the place of a method, for the rest of this process."""
    mock.patch.object(owner, name, instead(getattr(owner, name))).start()


def at_call(number: int, act: Instead) -> Callable[[Instead], Instead]:
    """The method as it is, but for one call: that is `act(original, *arguments)`."""

    def around(original: Instead) -> Instead:
        counted = itertools.count(1)

        def method(*arguments: Any, **named: Any) -> Any:
            return act(original, *arguments) if next(counted) == number else original(*arguments, **named)

        return method

    return around


def send(number: int) -> Instead:
    """A signal to this process, before the method runs."""

    def act(original: Instead, *arguments: Any) -> Any:
        os.kill(os.getpid(), number)
        return original(*arguments)

    return act


def tired(original: Instead, *arguments: Any) -> Any:
    """Deep inside the forward, where ZeRO-3 has gathered parameters."""
    with mock.patch.object(torch.nn.Tanh, "forward", side_effect=ValueError("the module is tired")):
        return original(*arguments)


def not_finite(original: Instead, *arguments: Any) -> Any:
    return original(*arguments) * torch.nan


def damaged(original: Instead, store: CheckpointStore, iteration: int, into: Any) -> Any:
    """One bit of this rank's moments."""
    (file,) = (store.directory / step_name(iteration)).glob(f"rank-{store.rank:05d}.moments.*")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    return original(store, iteration, into)


def no_history(original: Instead, *arguments: Any) -> Any:
    raise ValueError("no history")


def spoiled(original: Instead, restorer: Any, exact: Snapshot) -> None:
    """A weight is another one than that which was set aside."""
    original(restorer, exact)
    with torch.no_grad():
        next(iter(exact.shard.operators.values())).parameter.values[0] += 1.0


def strange(original: Instead, batches: Any, *arguments: Any) -> Any:
    """An input that is not plain data."""
    return original(batches, (object(),), {})


def worse_from(number: int) -> Callable[[Instead], Instead]:
    """Every evaluation from that one on is 10 nats up."""

    def around(original: Instead) -> Instead:
        counted = itertools.count(1)
        return lambda *arguments: original(*arguments) + (10.0 if next(counted) >= number else 0.0)

    return around


FAULTS: dict[str, Callable[[int], None]] = {
    "kill": lambda at: replaced(DeepSpeedAdapter, "train_on", at_call(at, send(signal.SIGKILL))),
    "sigterm": lambda at: replaced(DeepSpeedAdapter, "train_on", at_call(at, send(signal.SIGTERM))),
    "raise": lambda at: replaced(DeepSpeedAdapter, "training_loss", at_call(at, tired)),
    "nan": lambda at: replaced(DeepSpeedAdapter, "training_loss", at_call(at, not_finite)),
    "veto": lambda at: replaced(DeepSpeedAdapter, "evaluate", worse_from(at)),
    "restore": lambda at: replaced(StatePrediction, "attempt", at_call(at, no_history)),
    "strange": lambda at: replaced(TrainedBatches, "add", at_call(at, strange)),
    "damage": lambda at: replaced(CheckpointStore, "load", at_call(at, damaged)),
    "spoil": lambda at: replaced(Restorer, "inject", at_call(at, spoiled)),
}
