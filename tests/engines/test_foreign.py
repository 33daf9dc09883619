"""What is passed in place of an engine, or of its parts, is refused by what it is, with what to pass instead."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from cpsr import CPSRRecovery, TorchAdapter
from cpsr.engines import adapt
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
    "None": (lambda: None, "None is no training engine that CPSR knows: pass the engine that deepspeed.initialize"),
    "Accelerator": (
        lambda: named("accelerate.accelerator", "Accelerator"),
        r"pass engine_of\(accelerator, model, optimizer, scheduler\) of cpsr\.integrations\.accelerate",
    ),
    "Trainer": (
        lambda: named("mine", "MyTrainer", type(named("transformers.trainer", "Trainer"))),
        r"this MyTrainer runs its own loop: add CPSRCallback of cpsr\.integrations\.transformers",
    ),
    "Lightning": (
        lambda: named("lightning.pytorch.trainer.trainer", "Trainer"),
        r"add CPSRCallback of cpsr\.integrations\.lightning",
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
    with pytest.raises(UnsupportedEngineError, match="an object of DistributedDataParallel is no training engine"):
        adapt(DistributedDataParallel(model()))
    flat = FullyShardedDataParallel(model(), device_id=torch.device("cpu"))
    for refused in (
        adapt,
        lambda one: TorchAdapter(one, adam(one)),
        lambda one: TorchAdapter(nn.Sequential(one), adam(one)),
    ):
        with pytest.raises(UnsupportedEngineError, match=r"FSDP1.*call torch\.distributed\.fsdp\.fully_shard .*FSDP2"):
            refused(flat)
    sharded = model()
    fully_shard(sharded, mesh=init_device_mesh("cpu", (1,)))  # changes its class
    with pytest.raises(UnsupportedEngineError, match="an object of FSDPLinear is no training engine"):
        adapt(sharded)
    assert len(TorchAdapter(sharded, adam(sharded)).shard().operators) == 2


def other(package: str, name: str) -> Any:
    return lambda module, optimizer: named(package, name)


PARTS: dict[str, tuple[dict[str, Any], str]] = {
    "an optimizer twice": (
        {"optimizer": lambda module, optimizer: [optimizer, optimizer]},
        "one object is given twice among the optimizers",
    ),
    "optimizers of the same parameters": (
        {"optimizer": lambda module, optimizer: [optimizer, adam(module)]},
        "is in two optimizers, Adam and Adam; give each parameter to one of them",
    ),
    "of a DeepSpeed engine": (
        {"optimizer": other("deepspeed.runtime.base_optimizer", "DeepSpeedOptimizer")},
        "pass the engine to CPSRRecovery itself",
    ),
    "the other way round": (
        {"module": lambda module, optimizer: optimizer, "optimizer": lambda module, optimizer: module},
        "TorchAdapter takes the model first, and this is an object of Adam",
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


LOADERS: dict[str, tuple[Callable[[], Any], str]] = {
    "accelerate": (
        lambda: named("accelerate.data_loader", "DataLoaderShard"),
        r"iterate over resume\(recovery, loader\)",
    ),
    "Fabric": (lambda: named("lightning.fabric.wrappers", "_FabricDataLoader"), "take engine_of and Passes of"),
    "iterator": (lambda: iter(DataLoader([1, 2])), "has drawn the order of its pass already"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("kind", LOADERS)
def test_loaders_that_do_not_deal_the_same_batches_again(kind: str, tmp_path: Path) -> None:
    make, message = LOADERS[kind]
    module = model()
    with (
        CPSRRecovery(TorchAdapter(module, adam(module)), {"run_dir": str(tmp_path / "run")}) as recovery,
        pytest.raises(UnsupportedEngineError, match=message),
    ):
        recovery.resume(make())
