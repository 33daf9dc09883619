"""The conformance cases of DeepSpeed's FusedAdam, whose kernel is a stand-in; run by `worker.py` on two ranks."""

import functools
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import deepspeed
import torch
from deepspeed.ops.adam import FusedAdam, fused_adam
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from torch import nn
from torch.nn import functional

from cpsr.engines import adam_kernels
from cpsr.qualify.conformance import AFTER, BEFORE, check_early_state, check_resume, run, seed
from cpsr.qualify.deepspeed_jobs import DeepSpeedJob, TinyMoE, configuration, initialize
from cpsr.qualify.torch_jobs import VOCABULARY, WIDTH, TinyLM, TorchJob
from tests.engines.adam_kernels import FusedAdamKernel
from tests.engines.deepspeed_cases import (
    Case,
    early_state,
    own_checkpoints,
    pipeline,
    resume,
    roll_back_from_after_step,
    skipped_steps,
)


def with_kernel(case: Case) -> Case:
    """As on a GPU, where FusedAdam keeps nothing in its kernel: that is so of the stand-in, too."""

    @functools.wraps(case)
    def run_case() -> None:
        with (
            mock.patch.object(fused_adam.FusedAdamBuilder, "load", return_value=FusedAdamKernel(keeps=False)),
            mock.patch.object(adam_kernels, "keeps_powers", return_value=False),
        ):
            case()

    return run_case


def fused_job(stage: int, precision: str, model: Callable[[], nn.Module] = TinyLM, **zero: Any) -> DeepSpeedJob:
    config = configuration(stage, precision)
    config["zero_optimization"] |= zero
    return DeepSpeedJob(initialize(model(), config, "fused"))


def evaluated(stage: int, precision: str, skip: int, **options: Any) -> None:
    result = resume(stage, precision, skip, optimizer="fused", **options)
    assert len(result["evaluations"]) == AFTER
    assert skipped_steps(result) == (1 if precision == "fp16" else 0)


def built_by_deepspeed(stage: int, precision: str) -> None:
    """From its JSON, which on a GPU gives FusedAdam."""
    settings = {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}}

    def build() -> DeepSpeedJob:
        module = TinyLM()
        config = configuration(stage, precision, optimizer=settings)
        parameters = [p for p in module.parameters() if p.requires_grad]
        engine, *_ = deepspeed.initialize(model=module, model_parameters=parameters, config=config)
        return DeepSpeedJob(engine)

    assert check_resume(build)["description"]["optimizer"] == "FusedAdam"


def wrappers_are_those_of_a_gpu() -> None:
    kinds = {
        (0, "fp32"): FusedAdam,
        (0, "fp16"): FP16_Optimizer,
        (0, "bf16"): FP16_Optimizer,
        (1, "bf16-fp32grad"): BF16_Optimizer,
    }
    for (stage, precision), kind in kinds.items():
        job = fused_job(stage, precision)
        assert type(job.engine.optimizer) is kind
        assert type(job.adapter.optimizers[-1]) is FusedAdam


class Halves(nn.Module):
    """Two dtypes in one parameter group; `late` has gradients for some batches only, `idle` for none."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.head.bias = nn.Parameter(self.head.bias.detach().bfloat16())
        self.late = nn.Parameter(torch.zeros(VOCABULARY))
        self.idle = nn.Parameter(torch.zeros(3))

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = functional.linear(self.embed(tokens), self.head.weight) + self.head.bias.float()
        if int(tokens.sum()) % 2 == 0:
            logits = logits + self.late
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def plain_loop(varying: bool) -> TorchJob:
    """A loop without DeepSpeed's engine; its second group has one parameter."""
    module = Halves()
    module.late.requires_grad_(varying)
    rest = [module.head.weight, module.head.bias, module.idle, *([module.late] if varying else [])]
    groups = [{"params": rest}, {"params": [module.embed.weight]}]
    return TorchJob(module, FusedAdam(groups, lr=0.01, weight_decay=0.1, adam_w_mode=varying))


def plain_loops_resume() -> None:
    check_resume(partial(plain_loop, True))
    check_resume(partial(plain_loop, False), skip=3)
    check_early_state(partial(plain_loop, True))


def step_counts(job: TorchJob) -> list[int]:
    return [state.get("step", 0) for state in job.adapter.scalars()["optimizer_steps"]]


def the_count_that_rises_is_the_groups_own() -> None:
    """FusedAdam counts in the last parameter with a gradient, once for each dtype of the group."""
    seed(1)
    job = plain_loop(False)
    run(job, 0, BEFORE)
    job.adapter.skip_ahead(2)
    assert step_counts(job) == [0, 2 * (BEFORE + 2), 0, BEFORE + 2]  # weight, bias, idle, embed
    job = plain_loop(False)  # before its first step it counts nothing
    job.adapter.skip_ahead(2)
    assert job.adapter.scalars()["optimizer_steps"] == [{}, {}, {}, {}]


FUSED: dict[str, Case] = {
    # An overflow in the second step after the snapshot: only the first can be skipped as if it were trained.
    f"fused-zero{stage}-{precision}": partial(evaluated, stage, precision, 1 if precision == "fp16" else 3)
    for stage in range(4)
    for precision in ("fp32", "bf16", "fp16")
}
FUSED |= {
    "fused-zero1-bf16-fp32grad": partial(evaluated, 1, "bf16-fp32grad", 3),
    "fused-zero3-sub-groups": partial(evaluated, 3, "bf16", 3, zero={"sub_group_size": 50}),
    "fused-wrappers": wrappers_are_those_of_a_gpu,
    "fused-json-zero0-fp16": partial(built_by_deepspeed, 0, "fp16"),
    "fused-json-zero2-bf16": partial(built_by_deepspeed, 2, "bf16"),
    "fused-early-state-zero0": partial(early_state, 0, "fp32", "fused"),
    "fused-early-state-zero0-fp16": partial(early_state, 0, "fp16", "fused"),
    "fused-early-state-zero1": partial(early_state, 1, "bf16", "fused"),
    "fused-early-state-zero3": partial(early_state, 3, "fp16", "fused"),
}
MIXTURE = partial(TinyMoE, 2)
FUSED |= {
    "fused-ep2-zero0-fp16": lambda: check_resume(lambda: fused_job(0, "fp16", MIXTURE)),
    "fused-ep2-zero1-bf16": lambda: check_resume(lambda: fused_job(1, "bf16", MIXTURE), 3),
    "fused-roll-back-zero0-fp16": partial(roll_back_from_after_step, 0, "fp16", "fused"),
    "fused-roll-back-zero0-fp32": partial(roll_back_from_after_step, 0, "fp32", "fused"),
    "fused-own-checkpoints-zero0": partial(own_checkpoints, 0, optimizer="fused"),
    "fused-own-checkpoints-zero1": partial(own_checkpoints, 1, optimizer="fused"),
    "fused-plain-loops": plain_loops_resume,
    "fused-step-counts": the_count_that_rises_is_the_groups_own,
}
PIPELINES: dict[str, Case] = {  # last: no other engine is made in their process
    "fused-pipeline-zero0-fp16": partial(pipeline, 0, "fp16", "fused"),
    "fused-pipeline-zero0-bf16": partial(pipeline, 0, "bf16", "fused"),
}
FUSED = {
    **{name: with_kernel(case) for name, case in FUSED.items()},
    **{name: with_kernel(case) for name, case in PIPELINES.items()},
}
