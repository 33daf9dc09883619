"""Objects that cannot be an engine or a part of one: refused by name, with what to pass instead.

Classes of other packages are known by name, also where a class of the user's is derived from them. Nothing is imported.
"""

from collections.abc import Sequence
from typing import Any

import torch

from cpsr.errors import UnsupportedEngineError
from cpsr.state.loader_parts import is_a

__all__ = ["FSDP1", "named", "refuse_known", "require_parts"]

ACCELERATE = (
    "is accelerate's: pass engine_of(accelerator, model, optimizer, scheduler) of cpsr.integrations.accelerate to "
    "CPSRRecovery, and iterate over resume(recovery, loader) of that module"
)
FABRIC = "is Lightning Fabric's, which CPSR does not support: pass the objects that Fabric did not set up"
ENGINE = "is a DeepSpeed engine: pass it to CPSRRecovery itself, and neither wrap nor register it"
DEEPSPEED = "belongs to a DeepSpeed engine: pass the engine to CPSRRecovery itself, and neither wrap nor register it"
FSDP1 = (
    "is sharded by FSDP1, which torch has replaced and whose flat parameters CPSR does not read: call "
    "torch.distributed.fsdp.fully_shard (FSDP2) on the model in its place, build the optimizer after that, and pass "
    "TorchAdapter(model, optimizer); under accelerate and the Trainer of transformers choose FSDP version 2"
)
# Package, class, and the reason to refuse it.
KNOWN = (
    ("accelerate", "Accelerator", ACCELERATE),
    ("accelerate", "AcceleratedOptimizer", ACCELERATE),
    ("accelerate", "DataLoaderShard", ACCELERATE),
    ("accelerate", "DataLoaderDispatcher", ACCELERATE),
    ("accelerate", "SkipDataLoader", ACCELERATE),
    ("accelerate", "DeepSpeedEngineWrapper", "is accelerate's: pass its attribute engine"),
    ("deepspeed", "DeepSpeedEngine", ENGINE),
    ("deepspeed", "DeepSpeedOptimizer", DEEPSPEED),
    ("transformers", "Trainer", "runs its own loop: add CPSRCallback of cpsr.integrations.transformers to it"),
    ("lightning.pytorch", "Trainer", "runs its own loop: add CPSRCallback of cpsr.integrations.lightning to it"),
    ("pytorch_lightning", "Trainer", "runs its own loop: add CPSRCallback of cpsr.integrations.lightning to it"),
    *(
        (package, name, FABRIC)
        for package in ("lightning", "lightning_fabric")
        for name in ("Fabric", "_FabricModule", "_FabricOptimizer", "_FabricDataLoader")
    ),
    ("torch", "FullyShardedDataParallel", FSDP1),
    (
        "torch",
        "_BaseDataLoaderIter",
        "is an iterator, which has drawn the order of its pass already, and a restart could not draw it again: pass "
        "the DataLoader itself",
    ),
)


def refuse_known(given: Any, of: str | None = None) -> None:
    """Refuse objects of other packages, whatever they are given as.

    Args:
        given: by the user.
        of: the only package that is meant; None: all.

    Raises:
        UnsupportedEngineError: the message names what was given and what to pass instead.
    """
    for package, name, reason in KNOWN:
        if of in (None, package) and is_a(given, package, name):
            raise UnsupportedEngineError(f"this {type(given).__name__} {reason}")


def require_parts(module: Any, optimizers: Sequence[Any], schedulers: Sequence[Any], scaler: Any) -> None:
    """Refuse what cannot be the parts of a plain torch loop.

    Raises:
        UnsupportedEngineError: the message names what was given and what to pass instead.
    """
    for part in (module, *optimizers):
        refuse_known(part)
    if not isinstance(module, torch.nn.Module):
        raise UnsupportedEngineError(
            f"TorchAdapter takes the model first, and this is {named(module)}: pass the torch.nn.Module that the loop "
            "calls"
        )
    wrong = [one for one in optimizers if not isinstance(one, torch.optim.Optimizer)]
    if wrong or not optimizers:
        raise UnsupportedEngineError(
            f"{named(wrong[0]) if wrong else 'an empty list'} is no torch optimizer: pass a torch.optim.Optimizer "
            "over the model's parameters, or a list of them"
        )
    for name, given in (("optimizers", optimizers), ("schedulers", schedulers)):
        if len({id(one) for one in given}) < len(given):
            raise UnsupportedEngineError(f"one object is given twice among the {name}: give each once")
    for name, part in (*(("scheduler", one) for one in schedulers), ("grad_scaler", scaler)):
        if isinstance(part, type | bool):
            raise UnsupportedEngineError(f"{name} is {named(part)}: pass the {name} object that the loop uses")


def named(given: Any) -> str:
    """What it is, for messages."""
    if isinstance(given, type):
        return f"the class {given.__name__}"
    return "None" if given is None else f"an object of {type(given).__name__}"
