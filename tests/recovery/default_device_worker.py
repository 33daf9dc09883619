"""One rank of a plain torch loop whose tensors are on the CPU, while its default device is another one.

The default device `meta` has no values: whatever takes one from a tensor that was made without a device fails, or is
wrong. On a machine without a GPU it stands for `cuda`.
"""

import hashlib
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from cpsr import CPSRRecovery, TorchAdapter
from tests.recovery.options import LifeOptions

ITEMS, BATCH, FEATURES, WIDTH = 40, 4, 5, 8


@dataclass(frozen=True)
class Options(LifeOptions):
    """What one life of the job does.

    Attributes:
        fault: the iteration after which rank 1 is killed, if any.
        committed: a commit record that must exist before.
        default_device: from before CPSR opens to its end.
    """

    fault: str = ""
    committed: Path | None = None
    default_device: str = "cpu"


def main(options: Options, rank: int, ranks: int) -> None:
    meeting = options.meeting
    torch.distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=ranks)
    torch.manual_seed(7)
    module = nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
    # Fused: without that torch makes the optimizer's own counters on the default device.
    optimizer = torch.optim.AdamW(module.parameters(), lr=2e-2, fused=True)
    x = torch.randn(ITEMS, FEATURES)
    y = x.sum(1, keepdim=True)
    mine = [index for index in range(0, ITEMS, BATCH) if index // BATCH % ranks == rank]
    batches = [(x[index : index + BATCH], y[index : index + BATCH]) for index in mine]

    def loss_of(batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return nn.functional.mse_loss(module(batch[0]), batch[1])

    torch.set_default_device(options.default_device)
    with CPSRRecovery(TorchAdapter(module, optimizer), options.config, loss_fn=loss_of) as recovery:
        started = {"iteration": recovery.iteration, "method": recovery.restored.method}
        for batch in recovery.resume(batches, repeat=True):
            if options.fault and rank == 1 and recovery.iteration == int(options.fault):
                die(options)
            loss_of(batch).backward()  # type: ignore[no-untyped-call]
            for parameter in module.parameters():
                torch.distributed.all_reduce(parameter.grad)
            optimizer.step()
            optimizer.zero_grad()
            if recovery.life.saver.is_due(recovery.iteration + 1):
                recovery.life.saver.drain(1.0)
            if recovery.iteration >= options.iterations:
                break
    torch.set_default_device("cpu")
    ended = {"started": started, "state": digest(module), "iteration": recovery.iteration}
    options.leave(rank, ended)
    torch.distributed.destroy_process_group()


def die(options: Options) -> None:
    deadline = time.monotonic() + 30
    while options.committed is not None and not options.committed.exists() and time.monotonic() < deadline:
        time.sleep(0.005)
    os.kill(os.getpid(), signal.SIGKILL)


def digest(module: nn.Module) -> str:
    found = hashlib.sha256()
    for values in module.state_dict().values():
        found.update(values.contiguous().numpy().tobytes())
    return found.hexdigest()
