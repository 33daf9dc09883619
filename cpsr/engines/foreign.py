"""What people pass in place of a training engine or its parts: refused by name, with what to pass instead.

Nothing of other packages is imported: a class is known by its name and its module, also where it was derived from.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cpsr.errors import UnsupportedEngineError
from cpsr.state.loader_parts import is_a

__all__ = ["FSDP1", "require_engine", "require_loader", "require_no_engine", "require_parts"]

OPTIMIZER = "pass a torch.optim.Optimizer over the model's parameters, or a list of them"
BOTH_WAYS = "pass the engine that deepspeed.initialize returns first, or TorchAdapter(model, optimizer)"


@dataclass(frozen=True)
class _Kind:
    """Classes of one package, and the reason for which their objects are refused."""

    packages: tuple[str, ...]
    classes: tuple[str, ...]
    reason: str

    def made(self, given: Any) -> bool:
        return any(is_a(given, package, name) for package in self.packages for name in self.classes)


LIGHTNING = ("lightning", "pytorch_lightning", "lightning_fabric")
FABRIC = (
    "is Lightning Fabric's, which CPSR cannot use yet: pass the objects that were not set up by Fabric, in a plain loop"
)
FSDP1 = (
    "is sharded by FSDP1, which torch has replaced and whose flat parameters CPSR does not read: call "
    "torch.distributed.fsdp.fully_shard (FSDP2) on the model in its place, build the optimizer after that, and pass "
    "TorchAdapter(model, optimizer); under accelerate and the Trainer of transformers choose FSDP version 2"
)
ENGINES = (
    _Kind(
        ("accelerate",),
        ("Accelerator",),
        "is accelerate's, which has no optimizer: pass engine_of(accelerator, model, optimizer, scheduler) of "
        "cpsr.integrations.accelerate, with what prepare() returned",
    ),
    _Kind(
        ("accelerate.utils.deepspeed",),
        ("DeepSpeedEngineWrapper",),
        "is accelerate's wrapper: pass the DeepSpeed engine itself, which is its attribute engine",
    ),
    _Kind(
        ("transformers",),
        ("Trainer",),
        "is a Hugging Face Trainer, which runs its own loop: trainer.add_callback(CPSRCallback(trainer, config)) with "
        "CPSRCallback of cpsr.integrations.transformers",
    ),
    _Kind(
        LIGHTNING,
        ("Trainer", "LightningModule"),
        "belongs to Lightning, whose Trainer runs its own loop: Trainer(callbacks=[CPSRCallback(config)]) with "
        "CPSRCallback of cpsr.integrations.lightning",
    ),
    _Kind(LIGHTNING, ("Fabric", "_FabricModule"), FABRIC),
    _Kind(("torch",), ("FullyShardedDataParallel",), FSDP1),
    _Kind(
        ("torch",),
        ("DistributedDataParallel", "Module"),
        "is a model without its optimizer: pass TorchAdapter(model, optimizer) with this model",
    ),
    _Kind(
        ("torch",),
        ("Optimizer",),
        "is an optimizer without its model: pass TorchAdapter(model, optimizer) with this optimizer",
    ),
)
SECOND_ENGINES = (
    _Kind(("deepspeed",), ("DeepSpeedEngine",), ""),
    _Kind(("cpsr",), ("TorchAdapter", "DeepSpeedAdapter", "CPSRRecovery"), ""),
    *ENGINES[:3],
)
MODULES = (
    _Kind(
        ("deepspeed",),
        ("DeepSpeedEngine",),
        "is a DeepSpeed engine, which needs no TorchAdapter: pass it to CPSRRecovery itself",
    ),
    _Kind(LIGHTNING, ("_FabricModule",), FABRIC),
    _Kind(("torch",), ("FullyShardedDataParallel",), FSDP1),
)
OPTIMIZERS = (
    _Kind(
        ("accelerate",),
        ("AcceleratedOptimizer",),
        "is accelerate's wrapper: pass engine_of(accelerator, model, optimizer, scheduler) of "
        "cpsr.integrations.accelerate to CPSRRecovery, which takes the optimizer inside",
    ),
    _Kind(LIGHTNING, ("_FabricOptimizer", "FabricOptimizer", "LightningOptimizer"), FABRIC),
    _Kind(
        ("deepspeed.runtime",),
        ("ZeROOptimizer", "DeepSpeedOptimizer", "BF16_Optimizer", "FP16_Optimizer", "FP16_UnfusedOptimizer"),
        "belongs to a DeepSpeed engine, which needs no TorchAdapter: pass the engine to CPSRRecovery itself",
    ),
)
LOADERS = (
    _Kind(
        ("accelerate",),
        ("DataLoaderShard", "DataLoaderDispatcher", "SkipDataLoader"),
        "is a loader that accelerate prepared, whose batches recovery.resume cannot deal again after a restart: "
        "iterate over resume(recovery, loader) of cpsr.integrations.accelerate",
    ),
    _Kind(
        LIGHTNING,
        ("_FabricDataLoader",),
        "is a loader that Fabric set up, whose batches recovery.resume cannot deal again after a restart: pass a "
        "DataLoader that Fabric did not set up",
    ),
    _Kind(
        ("torch", "torchdata"),
        ("_BaseDataLoaderIter",),
        "is an iterator, which has drawn the order of its pass already: a restart could not draw it again. Pass the "
        "DataLoader itself",
    ),
)


def require_engine(given: Any) -> None:
    """Refuse what is known to be no training engine.

    Raises:
        UnsupportedEngineError: the message names what was given and what to pass instead.
    """
    if isinstance(given, tuple | list):
        if any(base.__name__ == "DeepSpeedEngine" for one in given for base in type(one).__mro__):
            raise UnsupportedEngineError(
                "this is the tuple that deepspeed.initialize returns, not an engine: pass its first element, as in "
                "`engine, *_ = deepspeed.initialize(...)`"
            )
        kinds = ", ".join(type(one).__name__ for one in given)
        raise UnsupportedEngineError(
            f"a {type(given).__name__} ({kinds}) is no training engine, and CPSR follows one engine: {BOTH_WAYS}"
        )
    _require_instance(given, "engine", BOTH_WAYS)
    _refuse(given, ENGINES)


def require_parts(module: Any, optimizers: Sequence[Any], schedulers: Sequence[Any], scaler: Any) -> None:
    """Refuse what cannot be the parts of a plain torch loop, each by what it is.

    Raises:
        UnsupportedEngineError: the message names what was given and what to pass instead.
    """
    _require_instance(module, "model", "pass the torch.nn.Module that the loop calls")
    _refuse(module, MODULES)
    if not isinstance(module, torch.nn.Module):
        raise UnsupportedEngineError(
            f"TorchAdapter takes the model first, and this is {_named(module)}: pass the torch.nn.Module that the loop "
            "calls"
        )
    if not optimizers:
        raise UnsupportedEngineError(f"an empty list is given as the optimizers: {OPTIMIZER}")
    for optimizer in optimizers:
        _require_instance(optimizer, "optimizer", OPTIMIZER)
        _refuse(optimizer, OPTIMIZERS)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise UnsupportedEngineError(f"{_named(optimizer)} is no torch optimizer: {OPTIMIZER}")
    for name, given in (("optimizers", optimizers), ("schedulers", schedulers)):
        if len({id(one) for one in given}) < len(given):
            raise UnsupportedEngineError(f"one object is given twice among the {name}: give each once")
    for name, part in (*(("scheduler", one) for one in schedulers), ("grad_scaler", scaler)):
        if isinstance(part, type | bool):
            raise UnsupportedEngineError(f"{name} is {_named(part)}: pass the {name} object that the loop uses")


def require_no_engine(name: str, given: Any) -> None:
    """Refuse a further engine among the objects that are registered.

    Args:
        name: under which it is registered.
        given: an object of the user.

    Raises:
        UnsupportedEngineError: it is a training engine, or holds modules or optimizers in a tuple or a list.
    """
    parts = given if isinstance(given, tuple | list) else ()
    pair = any(isinstance(part, torch.nn.Module | torch.optim.Optimizer) for part in parts)
    if not pair and not any(kind.made(given) for kind in SECOND_ENGINES):
        return
    what = f"this {' and '.join(type(one).__name__ for one in parts)}" if pair else f"this {type(given).__name__}"
    raise UnsupportedEngineError(
        f"register('{name}', ...): {what} would be a second engine, and CPSR follows one engine in a process. Register "
        f"module and optimizer each by itself, as in register('{name}.model', module) and register('{name}.optimizer', "
        "optimizer): both are saved and restored. Or let one engine train everything: TorchAdapter(model, [optimizer, "
        "optimizer]) takes several optimizers"
    )


def require_loader(loader: Any) -> None:
    """Refuse a loader of another package that would not deal the same batches again.

    Raises:
        UnsupportedEngineError: the message names what was given and what to pass instead.
    """
    _refuse(loader, LOADERS)


def _require_instance(given: Any, what: str, instead: str) -> None:
    if given is None:
        raise UnsupportedEngineError(f"None is given as the {what}: {instead}")
    if isinstance(given, type):
        raise UnsupportedEngineError(f"{given.__name__} is a class, given as the {what}: pass an instance; {instead}")


def _refuse(given: Any, kinds: tuple[_Kind, ...]) -> None:
    kind = next((kind for kind in kinds if kind.made(given)), None)
    if kind is not None:
        raise UnsupportedEngineError(f"this {type(given).__name__} {kind.reason}")


def _named(given: Any) -> str:
    return f"the class {given.__name__}" if isinstance(given, type) else f"an object of {type(given).__name__}"
