"""One rank of a plain torch job: with CPSR it trains and saves, without it goes on from a DCP export of that run."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from cpsr import CPSRRecovery, TorchAdapter
from tests.device import DEVICE
from tests.export.model import Model
from tests.recovery import worker
from tests.recovery.engines import dataset, loader

SAVED = 3  # iterations until the checkpoint
LATER = 2  # iterations after it


@dataclass(frozen=True)
class Options(worker.Options):
    """Of `tests.recovery.worker`, and the export to go on from; empty: a run of CPSR.

    Attributes:
        exported: the DCP directory.
        flat: it is loaded with `flatten_optimizer_state_dict`.
    """

    exported: str = ""
    flat: bool = False


def main(options: Options, rank: int, ranks: int) -> None:
    worker.initialize_ranks(options.result)
    worker.seed()
    loop = Loop(ranks)
    batches = list(loader(dataset(), 1, 0))  # the same on every rank: any number of ranks computes the same
    if options.exported:
        loop.load(options.exported, StateDictOptions(flatten_optimizer_state_dict=options.flat))
    else:
        with CPSRRecovery(TorchAdapter(loop.model, loop.optimizer, loop.schedule), options.config):
            for batch in batches[:SAVED]:
                loop.step(batch)
    found = {"losses": [loop.step(batch) for batch in batches[SAVED : SAVED + LATER]], "rates": loop.rates()}
    options.result.with_suffix(f".{rank}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()  # or gloo's threads may abort the exit


class Loop:
    """FSDP2 with two parameter groups; on one rank plain torch."""

    def __init__(self, ranks: int) -> None:
        self.model = Model().to(DEVICE)
        self.model.scale.requires_grad_(True)
        if ranks > 1:
            fully_shard(self.model, mesh=init_device_mesh(DEVICE, (ranks,)))
        named = dict(self.model.named_parameters())
        groups = [
            {"params": [one for name, one in named.items() if name.endswith("weight")], "weight_decay": 0.1},
            {"params": [one for name, one in named.items() if not name.endswith("weight")], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=2e-2)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1.0 / (1.0 + 0.01 * step))

    def step(self, batch: Any) -> float:
        torch.manual_seed(self.schedule.last_epoch)  # of the dropout: random states are no part of an export
        loss = self.model(batch[0].to(DEVICE), batch[1].to(DEVICE))
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        return float(loss.detach())

    def load(self, exported: str, options: StateDictOptions) -> None:
        """As docs/interchange.md says."""
        model, optim = get_state_dict(self.model, self.optimizer, options=options)
        content: dict[str, Any] = {"model": model, "optim": optim, "cpsr": {"schedule": self.schedule.state_dict()}}
        load(content, checkpoint_id=Path(exported))
        set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optim, options=options)
        self.schedule.load_state_dict(content["cpsr"]["schedule"])

    def rates(self) -> list[float]:
        return [float(group["lr"]) for group in self.optimizer.param_groups]
