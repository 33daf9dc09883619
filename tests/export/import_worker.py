"""One rank of small jobs, one after the other, that come to CPSR with a checkpoint of others, or leave with an export.

The same batches on every rank: then jobs of other numbers of ranks compute the same, but for rounding.
"""

import argparse
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.checkpoint import ds_to_universal
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from cpsr import CPSRRecovery, TorchAdapter
from tests.device import DEVICE
from tests.export.model import Model
from tests.recovery import worker
from tests.recovery.engines import configuration, dataset, initialize, loader

SAVED = 3  # iterations until the checkpoint
LATER = 2  # iterations after it


@dataclass(frozen=True)
class Options(worker.Options):
    """Of `tests.recovery.worker`, and more.

    Attributes:
        jobs: name -> ZeRO stage (or `fsdp2`), precision, and what is done: `save`, with the engine's own means;
            `load`, likewise; `cpsr`: a life of a run.
        files: the folder of all checkpoints and runs.
    """

    jobs: dict[str, tuple[int | str, str, str]] = field(default_factory=dict)
    files: Path = Path()


def main(options: Options, rank: int, ranks: int) -> None:
    worker.initialize_ranks(options.result)
    found = {name: follow(options, name, rank, ranks) for name in options.jobs}
    options.result.with_suffix(f".{rank}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()  # or gloo's threads may abort the exit


def follow(options: Options, name: str, rank: int, ranks: int) -> dict[str, Any]:
    kind, precision, what = options.jobs[name]
    worker.seed()
    loop: Loop = TorchLoop(ranks) if isinstance(kind, str) else DeepSpeedLoop(kind, precision)
    batches = list(loader(dataset(), 1, 0))
    folder = options.files / name
    if what == "cpsr":
        with CPSRRecovery(loop.given, options.config | {"run_dir": str(folder)}) as recovery:
            began = recovery.iteration
            losses = [loop.step(batches[at]) for at in range(began, began + (LATER if began else SAVED))]
        after = [] if began else [loop.step(batches[SAVED + later]) for later in range(LATER)]
        return {"began": began, "losses": after or losses, "rates": loop.rates(), "seen": float(loop.model.seen)}
    if what == "save":
        for at in range(SAVED):
            loop.step(batches[at])
        loop.save(folder, rank)
        worker.seed()
        loop = TorchLoop(ranks) if isinstance(kind, str) else DeepSpeedLoop(kind, precision)
    loop.load(folder)
    losses = [loop.step(batches[SAVED + later]) for later in range(LATER)]
    return {"began": SAVED, "losses": losses, "rates": loop.rates(), "seen": float(loop.model.seen)}


class Loop:
    given: Any
    model: Any

    def step(self, batch: Any) -> float:
        raise NotImplementedError

    def save(self, folder: Path, rank: int) -> None:
        raise NotImplementedError

    def load(self, folder: Path) -> None:
        raise NotImplementedError

    def rates(self) -> list[float]:
        raise NotImplementedError


def in_two_groups(model: torch.nn.Module) -> list[dict[str, Any]]:
    named = {name: one for name, one in model.named_parameters() if one.requires_grad}
    return [
        {"params": [one for name, one in named.items() if name.endswith("weight")], "weight_decay": 0.1},
        {"params": [one for name, one in named.items() if not name.endswith("weight")], "weight_decay": 0.0},
    ]


class DeepSpeedLoop(Loop):
    def __init__(self, zero: int, precision: str) -> None:
        self.model = Model()
        self.model.scale.requires_grad_(zero == 3)  # what ZeRO-3 splits of frozen parameters is not put together
        config: Any = configuration(zero, precision, 1)
        if (zero, precision) != (2, "fp32"):
            self.given = initialize(self.model, config)
            return
        groups = in_two_groups(self.model)
        optimizer = torch.optim.AdamW(groups, lr=2e-2)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1.0 + 0.01 * step))
        self.given, *_ = deepspeed.initialize(
            model=self.model, optimizer=optimizer, lr_scheduler=schedule, config=config
        )

    def step(self, batch: Any) -> float:
        torch.manual_seed(self.given.global_steps)  # of the dropout: random states are in no checkpoint of DeepSpeed
        loss = self.given(*worker.on_device(self.given, *batch[:2]))
        self.given.backward(loss)
        self.given.step()
        return float(loss.detach())

    def save(self, folder: Path, rank: int) -> None:
        self.given.save_checkpoint(str(folder))
        torch.distributed.barrier()
        if rank == 0:
            tag = (folder / "latest").read_text()
            given = argparse.Namespace(
                input_folder=str(folder / tag),
                output_folder=str(folder.with_name(f"{folder.name} universal")),
                num_extract_workers=1,
                num_merge_workers=1,
                keep_temp_folder=False,
                strict=True,
                inject_missing_state=True,
            )
            ds_to_universal.main(given)
        torch.distributed.barrier()

    def load(self, folder: Path) -> None:
        self.given.load_checkpoint(str(folder))

    def rates(self) -> list[float]:
        """Of each group; and the loss scale."""
        scale = float(getattr(self.given.optimizer, "loss_scale", 0.0))
        return [*(float(group["lr"]) for group in self.given.optimizer.param_groups), scale]


class TorchLoop(Loop):
    """FSDP2 with two parameter groups; on one rank plain torch."""

    def __init__(self, ranks: int) -> None:
        self.model = Model().to(DEVICE)
        self.model.scale.requires_grad_(True)
        if ranks > 1:
            fully_shard(self.model, mesh=init_device_mesh(DEVICE, (ranks,)))
        self.optimizer = torch.optim.AdamW(in_two_groups(self.model), lr=2e-2)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1.0 / (1.0 + 0.01 * step))
        self.given = TorchAdapter(self.model, self.optimizer, self.schedule)

    def step(self, batch: Any) -> float:
        torch.manual_seed(self.schedule.last_epoch)
        x, y = batch[0].to(DEVICE), batch[1].to(DEVICE)
        loss = self.model(x, y)
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        return float(loss.detach())

    def save(self, folder: Path, rank: int) -> None:
        model, optim = get_state_dict(self.model, self.optimizer)
        flat = StateDictOptions(flatten_optimizer_state_dict=True)
        _, flattened = get_state_dict(self.model, self.optimizer, options=flat)
        schedule = self.schedule.state_dict()
        save({"model": model, "optim": optim, "lr_scheduler": schedule}, checkpoint_id=folder)
        other = folder.with_name(f"{folder.name} flat")
        save({"model": model, "optimizer": flattened, "lr_scheduler": schedule}, checkpoint_id=other)

    def load(self, folder: Path) -> None:
        """The usual way; the schedule under the export's key where it is one of CPSR's."""
        options = StateDictOptions(flatten_optimizer_state_dict="flat" in folder.name)
        model, optim = get_state_dict(self.model, self.optimizer, options=options)
        small: dict[str, Any] = {"lr_scheduler": self.schedule.state_dict()}
        if "export" in folder.name:
            small = {"cpsr": {"schedule": self.schedule.state_dict()}}
        content = {"model": model, "optim": optim, **small}
        load(content, checkpoint_id=folder)
        set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optim, options=options)
        self.schedule.load_state_dict(content.get("lr_scheduler") or content["cpsr"]["schedule"])

    def rates(self) -> list[float]:
        return [float(group["lr"]) for group in self.optimizer.param_groups]
