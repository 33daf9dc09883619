"""What is passed in place of an engine, or of its parts, is refused by what it is, with what to pass instead."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from cpsr import CPSRRecovery, TorchAdapter
from cpsr.engines import adapt, require_loader
from cpsr.errors import UnsupportedEngineError


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def named(package: str, name: str, *bases: type) -> Any:
    """An object of a class with this name in a package that need not be installed."""
    return object.__new__(type(name, bases, {"__module__": package}))


def model() -> nn.Module:
    return nn.Linear(2, 2)


def adam(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(module.parameters())


ENGINES: dict[str, tuple[Any, str]] = {
    "None": (lambda: None, "None is given as the engine"),
    "a class": (lambda: nn.Linear, "Linear is a class"),
    "a module": (model, r"this Linear is a model without its optimizer: pass TorchAdapter\(model, optimizer\)"),
    "an optimizer": (lambda: adam(model()), "this Adam is an optimizer without its model"),
    "a list": (lambda: [model(), adam(model())], r"a list \(Linear, Adam\) is no training engine"),
    "Accelerator": (
        lambda: named("accelerate.accelerator", "Accelerator"),
        r"pass engine_of\(accelerator, model, optimizer, scheduler\) of cpsr\.integrations\.accelerate",
    ),
    "accelerate with DeepSpeed": (
        lambda: named("accelerate.utils.deepspeed", "DeepSpeedEngineWrapper"),
        "pass the DeepSpeed engine itself",
    ),
    "Trainer": (
        lambda: named("mine", "MyTrainer", type(named("transformers.trainer", "Trainer"))),
        r"this MyTrainer is a Hugging Face Trainer.*trainer\.add_callback\(CPSRCallback\(trainer, config\)\)",
    ),
    "Lightning": (
        lambda: named("lightning.pytorch.trainer.trainer", "Trainer"),
        r"Trainer\(callbacks=\[CPSRCallback\(config\)\]\)",
    ),
    "LightningModule": (
        lambda: named("mine", "Net", type(named("pytorch_lightning.core.module", "LightningModule", nn.Module))),
        "this Net belongs to Lightning",
    ),
    "Fabric": (lambda: named("lightning.fabric.fabric", "Fabric"), "this Fabric is Lightning Fabric's"),
}


@pytest.mark.parametrize("kind", ENGINES)
def test_an_engine_that_is_none(kind: str, tmp_path: Path) -> None:
    make, message = ENGINES[kind]
    with pytest.raises(UnsupportedEngineError, match=message):
        CPSRRecovery(make(), {"run_dir": str(tmp_path / "run")})
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("group")
def test_models_that_torch_wraps_over_ranks() -> None:
    with pytest.raises(UnsupportedEngineError, match="this DistributedDataParallel is a model without its optimizer"):
        adapt(DistributedDataParallel(model()))
    first, second = FullyShardedDataParallel(model(), device_id=torch.device("cpu")), model()
    fully_shard(second, mesh=init_device_mesh("cpu", (1,)))  # changes its class
    for sharded in (first, second):
        with pytest.raises(UnsupportedEngineError, match=r"is sharded by FSDP.*DistributedDataParallel, or .*ZeRO-3"):
            adapt(sharded)
        with pytest.raises(UnsupportedEngineError, match=r"DistributedDataParallel,? or .*ZeRO-3"):
            TorchAdapter(sharded, adam(sharded))


def other(package: str, name: str) -> Any:
    return lambda module, optimizer: named(package, name)


PARTS: dict[str, tuple[dict[str, Any], str]] = {
    "several optimizers": (
        {"optimizer": lambda module, optimizer: [optimizer, optimizer]},
        "a list of 2 objects is given as the optimizer.*put all parameters into one optimizer",
    ),
    "optimizer None": ({"optimizer": lambda module, optimizer: None}, "None is given as the optimizer"),
    "an optimizer's class": ({"optimizer": lambda module, optimizer: torch.optim.Adam}, "Adam is a class"),
    "parameters": (
        {"optimizer": lambda module, optimizer: module.parameters()},
        "an object of generator is no torch optimizer",
    ),
    "of accelerate": (
        {"optimizer": other("accelerate.optimizer", "AcceleratedOptimizer")},
        r"pass engine_of\(accelerator, model, optimizer, scheduler\)",
    ),
    "of Fabric": ({"optimizer": other("lightning.fabric.wrappers", "_FabricOptimizer")}, "not set up by Fabric"),
    "of a DeepSpeed engine": (
        {"optimizer": other("deepspeed.runtime.base_optimizer", "ZeROOptimizer")},
        "pass the engine to CPSRRecovery itself",
    ),
    "the other way round": (
        {"module": lambda module, optimizer: optimizer, "optimizer": lambda module, optimizer: module},
        "TorchAdapter takes the model first, and this is an object of Adam",
    ),
    "several schedulers": ({"scheduler": lambda module, optimizer: [1, 2]}, "ChainedScheduler"),
    "a scheduler's class": (
        {"scheduler": lambda module, optimizer: torch.optim.lr_scheduler.StepLR},
        "scheduler is the class StepLR",
    ),
    "a scaler's switch": (
        {"grad_scaler": lambda module, optimizer: True},
        "grad_scaler is an object of bool",
    ),
}


@pytest.mark.parametrize("kind", PARTS)
def test_parts_of_a_loop_that_are_none(kind: str) -> None:
    changes, message = PARTS[kind]
    module = model()
    optimizer = adam(module)
    given: dict[str, Any] = {"module": module, "optimizer": optimizer}
    with pytest.raises(UnsupportedEngineError, match=message):
        TorchAdapter(**(given | {name: make(module, optimizer) for name, make in changes.items()}))


def test_what_the_advice_says_is_taken() -> None:
    first, second = model(), model()
    both = nn.Sequential(first, second)
    groups: Any = [{"params": first.parameters()}, {"params": second.parameters(), "lr": 1e-4}]
    optimizer = torch.optim.AdamW(groups)
    chained = torch.optim.lr_scheduler.ChainedScheduler([torch.optim.lr_scheduler.StepLR(optimizer, 3)])
    assert len(TorchAdapter(both, optimizer, chained).shard().operators) == 4


@pytest.mark.parametrize(
    ("package", "name"),
    [("accelerate.data_loader", "DataLoaderShard"), ("lightning.fabric.wrappers", "_FabricDataLoader")],
)
def test_loaders_that_do_not_deal_the_same_batches_again(package: str, name: str) -> None:
    with pytest.raises(UnsupportedEngineError, match="cannot deal again after a restart"):
        require_loader(named(package, name))
    require_loader([1, 2])
