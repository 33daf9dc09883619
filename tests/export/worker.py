"""One rank of small jobs, one after the other, that save a checkpoint or go on from an export without CPSR."""

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

from cpsr import CPSRRecovery
from tests.export.model import Model
from tests.recovery import worker
from tests.recovery.engines import configuration, dataset, initialize, loader

SAVED = 4  # iterations until the one checkpoint
LATER = 2  # iterations after it, whose losses show whether the state is the same


@dataclass(frozen=True)
class Options(worker.Options):
    """Of `tests.recovery.worker`, and more.

    Attributes:
        engines: name -> ZeRO stage and precision; each has a run of its own, in the run directory.
        universal: holds a universal checkpoint of each to load, with DeepSpeed alone.
    """

    engines: dict[str, tuple[int, str]] = field(default_factory=dict)
    universal: Path | None = None


def main(options: Options, rank: int, ranks: int) -> None:
    worker.initialize_ranks(options.result)
    found = {name: follow(options, name) for name in options.engines}
    options.result.with_suffix(f".{rank}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()  # or gloo's threads may abort the exit


def follow(options: Options, name: str) -> dict[str, Any]:
    """One engine: trained and saved, or loaded; then a little further."""
    worker.seed()
    ds_config = configuration(*options.engines[name], 1)
    if options.universal is not None:
        ds_config["checkpoint"] = {"load_universal": True}
    engine = initialize(Model(), ds_config)
    # The same batches on every rank: then a job of any number of ranks computes the same, bit for bit.
    batches = list(loader(dataset(), 1, 0))
    if options.universal is None:
        found = train(options.config | {"run_dir": f"{options.config['run_dir']}/{name}"}, engine, batches)
    else:
        found = load(options.universal / name, engine)
    found["losses"] = [step(engine, batches[SAVED + later]) for later in range(LATER)]
    found["rate"] = engine.get_lr()
    return found


def train(config: dict[str, Any], engine: Any, batches: Any) -> dict[str, Any]:
    with CPSRRecovery(engine, config) as recovery:
        while recovery.iteration < SAVED:
            step(engine, batches[recovery.iteration])
        return {"state": state(engine), "module": module(engine), "seen": float(engine.module.seen)}


def load(folder: Path, engine: Any) -> dict[str, Any]:
    _, client = engine.load_checkpoint(str(folder))
    buffers = {name: value for name, value in client["outside_optimizer"].items() if name != "scale"}
    engine.module.load_state_dict(buffers, strict=False)
    return {"state": state(engine), "steps": engine.global_steps, "seen": float(engine.module.seen)}


def step(engine: Any, batch: Any) -> float:
    torch.manual_seed(engine.global_steps)  # of the dropout: random states are no part of an export
    loss = engine(*worker.on_device(engine, *batch[:2]))
    engine.backward(loss)
    engine.step()
    return float(loss.detach())


def state(engine: Any) -> dict[str, str]:
    """Digests of the whole fp32 weights and moments, by DeepSpeed's own means."""
    found: dict[str, str] = {}
    for name, parameter in engine.module.named_parameters():
        if not parameter.requires_grad:
            continue
        if engine.zero_optimization_stage() == 0:
            kept = engine.optimizer.state[parameter]
            whole = {"fp32": parameter, "exp_avg": kept["exp_avg"], "exp_avg_sq": kept["exp_avg_sq"]}
        else:
            whole = {key: safe_get_full_optimizer_state(parameter, key) for key in ("exp_avg", "exp_avg_sq")}
            whole["fp32"] = safe_get_full_fp32_param(parameter)
        found |= {f"{key} {name}": digest(tensor) for key, tensor in whole.items()}
    return found


def module(engine: Any) -> dict[str, str]:
    """Digests of the module's own state dict, gathered where ZeRO-3 has split it."""
    split = engine.zero_optimization_stage() == 3
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters()), enabled=split):
        return {name: digest(tensor) for name, tensor in engine.module.state_dict().items()}


def digest(tensor: torch.Tensor) -> str:
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return f"{tensor.dtype} {tuple(tensor.shape)} {hashlib.sha256(flat.numpy().tobytes()).hexdigest()}"
