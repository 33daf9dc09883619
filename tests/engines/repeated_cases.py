"""Repeated steps of DeepSpeed engines that leave out weight gradients: bit for bit the steps of the first time."""

import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import deepspeed
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from cpsr.engines.adapter import EngineAdapter
from cpsr.engines.deepspeed_repeated import DeepSpeedRepeatedSteps
from cpsr.qualify.conformance import AFTER, BEFORE, inject, run, seed, take_snapshot
from cpsr.qualify.deepspeed_jobs import DeepSpeedJob, PipelineJob, TinyMoE, configuration, initialize, pipeline_engine
from cpsr.qualify.torch_jobs import TinyLM
from cpsr.state.codec import SmallState
from cpsr.state.shard import bytes_of
from tests.engines.deepspeed_cases import Case
from tests.engines.kernel_cases import with_kernels_in_torch

Job = DeepSpeedJob | PipelineJob


class Checkpointed(TinyLM):
    """Its linear layers are computed again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.dropout, self.down = _Again(self.up), _Again(self.dropout), _Again(self.down)  # type: ignore[assignment] # called alike


class _Again(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, values: torch.Tensor) -> Any:
        return checkpoint(self.layer, values, use_reentrant=False)


def repeats(build: Callable[[], Job], *, factor: float = 1.0) -> int:
    """Train, go back, and repeat with operators whose turn comes later rounded and without moments.

    Args:
        build: the job.
        factor: on the norms of the first time; another one than 1 is a control, and a difference is expected.

    Returns:
        The elements that differ after the last step.
    """
    seed(1)
    job = build()
    adapter = job.adapter
    steps = steps_of(job)
    assert steps is not None
    run(job, 0, BEFORE)
    snapshots, outcomes = [take_snapshot(adapter)], []
    for step in range(BEFORE, BEFORE + AFTER):
        job.train_step(step)
        snapshots.append(take_snapshot(adapter))
        small = SmallState(steps.outcome())
        small.wait()
        outcomes.append({name: _times(factor, name, value) for name, value in small.tree().items()})
    # Ranks differ in the turns, also in those of the slices of one parameter.
    turns = {name: turn_of(name) + adapter.rank for name in adapter.shard().operators}
    agreed = earliest(turns)
    inject(adapter, snapshots[0])
    fill(adapter, turns, snapshots[0], 0)
    for index, outcome in enumerate(outcomes, 1):
        steps.repeat(outcome, [name for name, turn in agreed.items() if turn >= index])
        job.train_step(BEFORE + index - 1)
        fill(adapter, turns, snapshots[index], index)
        now = take_snapshot(adapter)
        active = [f"/{name}" for name, turn in turns.items() if turn <= index]
        keys = [key for key in now["tensors"] if key.startswith("other/") or key.endswith(tuple(active))]
        differ = sum(count(now["tensors"][key], snapshots[index]["tensors"][key]) for key in keys)
        if factor == 1.0:
            assert differ == 0, [key for key in keys if count(now["tensors"][key], snapshots[index]["tensors"][key])]
            assert (now["json"], now["extra"].keys()) == (snapshots[index]["json"], snapshots[index]["extra"].keys())
            assert {name: str(one) for name, one in steps.outcome().items()} == {
                name: str(one) for name, one in outcome.items()
            }
    assert steps.left_out > 0
    steps.close()
    assert not [layer for layer in job.module.modules() if "forward" in vars(layer)]
    return differ


def steps_of(job: Job) -> DeepSpeedRepeatedSteps | None:
    steps: DeepSpeedRepeatedSteps | None = job.adapter.repeated_steps()
    return steps


def turn_of(operator: str) -> int:
    """The same for the weight and the bias of a layer; from 0 to 2."""
    return sum(operator.rpartition(".")[0].encode()) % (AFTER - 1)


def _times(factor: float, name: str, value: Any) -> Any:
    return value * factor if name != "skipped" and isinstance(value, float | torch.Tensor) else value


def count(one: torch.Tensor, other: torch.Tensor) -> int:
    return int((bytes_of(one) != bytes_of(other)).sum())


def earliest(turns: Mapping[str, int]) -> dict[str, int]:
    """Over all ranks, as `Conversion` agrees on them."""
    every: list[Any] = [None] * deepspeed.comm.get_world_size()
    torch.distributed.all_gather_object(every, dict(turns))
    return {name: min(one[name] for one in every if name in one) for one in every for name in one}


def fill(adapter: EngineAdapter, turns: Mapping[str, int], snapshot: Mapping[str, Any], index: int) -> None:
    """As `Conversion` does."""
    compute = adapter.compute_dtypes()
    with torch.no_grad():
        for name, operator in adapter.shard().operators.items():
            if turns[name] < index:
                continue
            values = snapshot["tensors"][f"param/{name}"]
            whole = turns[name] == index
            operator.parameter.values.copy_(values if whole else values.to(compute.get(name, values.dtype)))
            for moment, target in operator.moments.items():
                target.copy_(snapshot["tensors"][f"moment/{moment}/{name}"] if whole else torch.zeros_like(target))
    adapter.push_down()


def job_of(
    stage: int,
    precision: str,
    optimizer: str = "adamw",
    model: Callable[[], nn.Module] = TinyLM,
    **more: Any,
) -> DeepSpeedJob:
    return DeepSpeedJob(initialize(model(), configuration(stage, precision), optimizer), **more)


def same(*args: Any, **more: Any) -> None:
    assert repeats(partial(job_of, *args, **more)) == 0


def pipeline(stage: int, precision: str) -> None:
    assert repeats(lambda: PipelineJob(pipeline_engine(stage, precision))) == 0


def another_norm(*args: Any, **more: Any) -> None:
    """A control: what the first time noted is what the gradients are clipped by."""
    assert repeats(partial(job_of, *args, **more), factor=4.0) > 0


def every_gradient_elsewhere() -> None:
    """Where it was not shown that nothing changes, a replay computes all of them."""
    offloaded = configuration(2, "bf16", offload="offload_optimizer")
    others = (configuration(0, "fp32"), configuration(0, "fp16"), configuration(1, "bf16-fp32grad"))
    for config in (offloaded, configuration(3, "bf16"), *others):
        assert steps_of(DeepSpeedJob(initialize(TinyLM(), config))) is None, json.dumps(config)
    compiled = initialize(TinyLM(), configuration(1, "fp32"))
    compiled.compile(backend="eager")
    assert steps_of(DeepSpeedJob(compiled)) is None
    assert steps_of(DeepSpeedJob(initialize(TinyLM(), configuration(1, "fp32"), "rmsprop"))) is None


REPEATED: dict[str, Case] = {
    "repeated-zero1-fp32": partial(same, 1, "fp32"),
    "repeated-zero1-sgd": partial(same, 1, "fp32", "sgd"),
    "repeated-zero2-fp16": partial(same, 2, "fp16"),
    "repeated-zero1-fused": with_kernels_in_torch(partial(same, 1, "bf16", "fused")),
    "repeated-zero1-direct-backward": partial(same, 1, "fp32", direct_backward=True),
    "repeated-zero1-checkpointed": partial(same, 1, "bf16", model=Checkpointed),
    "repeated-ep1-zero2-fp16": partial(same, 2, "fp16", model=partial(TinyMoE, 1)),
    "repeated-ep2-zero1-bf16": partial(same, 1, "bf16", model=partial(TinyMoE, 2)),
    "repeated-every-gradient-elsewhere": every_gradient_elsewhere,
    "repeated-another-norm": partial(another_norm, 2, "fp16"),
    "pipeline-repeated-zero1-fp16": partial(pipeline, 1, "fp16"),
}
