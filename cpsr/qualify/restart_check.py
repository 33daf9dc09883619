"""Exact restart within a process: snapshot, another engine, inject, continue; and optimizer state created early."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from cpsr.qualify.cells import Cell
from cpsr.qualify.conformance import Job, check_early_state, check_resume
from cpsr.qualify.scene import Scene
from cpsr.qualify.torch_cases import small_job

__all__ = ["check_restart"]

MICRO_BATCHES = 2  # where torch splits parameters: gradients are summed over the ranks at the last


def check_restart(cell: Cell, scene: Scene) -> Mapping[str, Any]:
    """Bitwise equality of what restarted and what never stopped; returns the size of the snapshot."""
    build, linear = builder_of(cell, scene), torch.nn.functional.linear
    try:
        result = check_resume(build)
        check_early_state(build)
    finally:
        # ZeRO-3 puts one in its place that rounds differently, for good. Later checks compare with other processes.
        torch.nn.functional.linear = linear
    tensors: Mapping[str, torch.Tensor] = result["snapshot"]["tensors"]
    return {"snapshot_bytes": sum(tensor.nbytes for tensor in tensors.values())}


def builder_of(cell: Cell, scene: Scene) -> Callable[[], Job]:
    """What makes a new job of the cell."""
    if cell.is_split:
        from cpsr.qualify.sharded_jobs import split_job

        return partial(split_job, cell, scene.device, scene.ranks, MICRO_BATCHES, "cosine")
    if cell.zero is None:
        ranks = 1 if cell.alone else scene.ranks
        return partial(small_job, cell.precision, cell.optimizer, scene.device, ranks)
    from cpsr.qualify import deepspeed_jobs as jobs

    if cell.engine == "pipeline":
        stage, precision, optimizer = cell.zero, cell.precision, cell.optimizer
        return lambda: jobs.PipelineJob(jobs.pipeline_engine(stage, precision, optimizer))
    config = jobs.configuration(cell.zero, cell.precision, offload=cell.offload)
    return lambda: jobs.DeepSpeedJob(jobs.initialize(_module(cell, scene), config, cell.optimizer))


def _module(cell: Cell, scene: Scene) -> torch.nn.Module:
    from cpsr.qualify.mixture import EXPERTS, TinyMoE
    from cpsr.qualify.models import TinyLM

    if cell.engine != "mixture":
        return TinyLM()
    return TinyMoE(2 if scene.ranks % 2 == 0 and EXPERTS % 2 == 0 else 1)
