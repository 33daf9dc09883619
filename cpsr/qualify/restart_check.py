"""Exact restart within a process: snapshot, another engine, inject, continue; and optimizer state created early."""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from cpsr.qualify.cells import ADAPTER, EMA, LOADER, ROUTED, STAGES, TORCHDATA, Cell
from cpsr.qualify.conformance import Job, check_early_state, check_resume
from cpsr.qualify.lives_check import check_lives
from cpsr.qualify.scene import Scene
from cpsr.qualify.torch_cases import adapted_job, small_job, two_optimizers

__all__ = ["check_restart"]

MICRO_BATCHES = 2  # where torch splits parameters: gradients are summed over the ranks at the last

CONFIGURED: dict[str, dict[str, Any]] = {
    "torch_autocast": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
    "bf16_optimizer_states": {
        "bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    },
    "unmanaged": {"managed_gradient_accumulation": False},
}


def check_restart(cell: Cell, scene: Scene) -> Mapping[str, Any]:
    """Bitwise equality of what restarted and what never stopped; returns the size of the snapshot."""
    if cell.feature in (EMA, LOADER, TORCHDATA):
        return check_lives(cell.feature, scene)
    build = builder_of(cell, scene)
    result = check_resume(build)
    check_early_state(build)
    tensors: Mapping[str, torch.Tensor] = result["snapshot"]["tensors"]
    return {"snapshot_bytes": sum(tensor.nbytes for tensor in tensors.values())}


def builder_of(cell: Cell, scene: Scene) -> Callable[[], Job]:
    """What makes a new job of the cell."""
    if cell.is_split:
        from cpsr.qualify.sharded_jobs import split_job

        return partial(split_job, cell, scene.device, scene.ranks, MICRO_BATCHES, "cosine")
    if cell.optimizer == "muon+adamw":
        return partial(two_optimizers, scene.device)
    if cell.feature == ADAPTER:
        return partial(adapted_job, scene.device, scene.ranks)
    if cell.zero is None:
        ranks = 1 if cell.alone else scene.ranks
        return partial(small_job, cell.precision, cell.optimizer, scene.device, ranks)
    from cpsr.qualify import deepspeed_jobs as jobs

    if cell.engine == "pipeline":
        stage, precision, optimizer, more = cell.zero, cell.precision, cell.optimizer, dict[str, Any]()
        if cell.feature == ROUTED:
            more = _stages_with_experts(scene.ranks // STAGES)
        return lambda: jobs.PipelineJob(jobs.pipeline_engine(stage, precision, optimizer, **more))
    config = jobs.configuration(cell.zero, cell.precision, offload=cell.offload, **CONFIGURED.get(cell.feature, {}))

    def build() -> Job:
        engine = jobs.initialize(_module(cell, scene), config, cell.optimizer)
        if cell.feature == "compiled":
            engine.compile(backend="aot_eager")  # without kernels, which take a compiler and minutes
        return jobs.DeepSpeedJob(engine)

    return build


def _stages_with_experts(ranks: int) -> dict[str, Any]:
    """Layers and loss of a pipeline that has so many ranks in each stage."""
    from cpsr.qualify.mixture import EXPERTS, MixtureLoss, mixture_layers

    return {"layers": mixture_layers(math.gcd(ranks, EXPERTS)), "loss": MixtureLoss()}


def _module(cell: Cell, scene: Scene) -> torch.nn.Module:
    from cpsr.qualify.mixture import EXPERTS, TinyMoE
    from cpsr.qualify.models import TinyLM

    if cell.engine != "mixture":
        return TinyLM()
    return TinyMoE(2 if scene.ranks % 2 == 0 and EXPERTS % 2 == 0 else 1)
