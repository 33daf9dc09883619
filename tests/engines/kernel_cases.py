"""The conformance cases of DeepSpeed's Adam with a kernel for processors, and of offload; run by `worker.py`.

Each runs twice: with the kernels in torch, and, in the slow group, with the real ones.
"""

import functools
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import deepspeed
import pytest
import torch
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from torch import nn
from torch.nn import functional

from cpsr.engines import adapt
from cpsr.errors import UnsupportedEngineError
from cpsr.qualify.conformance import (
    AFTER,
    BEFORE,
    Recorder,
    assert_bitwise,
    check_early_state,
    check_resume,
    final_state,
    inject,
    run,
    seed,
    take_snapshot,
)
from cpsr.qualify.deepspeed_jobs import DeepSpeedJob, PipelineJob, TinyMoE, configuration, initialize, pipeline_engine
from cpsr.qualify.torch_jobs import VOCABULARY, WIDTH, TinyLM, TorchJob
from tests.engines.adam_kernels import in_torch
from tests.engines.deepspeed_cases import Case, roll_back_from_after_step, skipped_steps

OPTIMIZER: dict[str, Any] = {"offload_optimizer": {"device": "cpu", "pin_memory": True}}
PARAMETERS: dict[str, Any] = OPTIMIZER | {"offload_param": {"device": "cpu"}}


def job(
    stage: int,
    precision: str,
    optimizer: str = "json",
    micro_batches: int = 2,
    *,
    model: Any = TinyLM,
    masters: tuple[str, ...] = (),
    **zero: Any,
) -> DeepSpeedJob:
    """`masters`: options of the precision that keep masters, or also moments, in it."""
    config = configuration(stage, precision, micro_batches, zero_force_ds_cpu_optimizer=False)
    config["zero_optimization"] |= zero
    config.get(precision, {}).update({f"{precision}_{option}": True for option in masters})
    return DeepSpeedJob(initialize(model(), config, optimizer))


def resumed(stage: int, precision: str, skip: int, kind: str, **options: Any) -> None:
    result = check_resume(partial(job, stage, precision, **options), skip)
    assert result["description"]["optimizer"] == kind
    assert len(result["evaluations"]) == AFTER
    assert skipped_steps(result) == (1 if precision == "fp16" else 0)


def lives(build: Callable[[], Any], lengths: list[int], jumps: dict[int, int]) -> dict[str, Any]:
    """Train in lives of so many steps each, in another engine every time.

    Args:
        build: the engine.
        lengths: steps of each life; the state goes from one to the next as a snapshot.
        jumps: by life, how many steps it skips when it begins.
    """
    first, snapshot, losses = 0, None, []
    for life, steps in enumerate(lengths):
        seed(1 if snapshot is None else 7 + life)
        here, recorder = build(), Recorder()
        here.adapter.attach(recorder)
        if snapshot is not None:
            inject(here.adapter, snapshot)
        here.adapter.skip_ahead(jumps.get(life, 0))
        run(here, first, steps)
        first, snapshot = first + steps, take_snapshot(here.adapter)
        losses += recorder.losses
        recorder.losses[:] = losses
        recorder.events.clear()
        state = final_state(here, recorder)
        here.adapter.detach()
    return state


def many_lives(build: Callable[[], Any]) -> None:
    """Any number of restarts gives what one life gives, also after a jump that the kernel answers with `pow`."""
    assert_bitwise(lives(build, [2, 1, 3, 2], {}), lives(build, [8], {}))
    jumped = lives(build, [2, 2, 2, 2], {1: 5})
    assert_bitwise(jumped, lives(build, [2, 6], {1: 5}))


def jumps_unseen(build: Callable[[], Any]) -> None:
    """A count that the user sets."""
    finals = []
    for restarting in (False, True):
        seed(1)
        here, recorder = build(), Recorder()
        run(here, 0, 2)
        for entry in here.adapter.optimizer.state.values():
            entry["step"] += 40
        run(here, 2, 3)
        if restarting:
            snapshot = take_snapshot(here.adapter)
            seed(2)
            here = build()
            inject(here.adapter, snapshot)
        here.adapter.attach(recorder)
        run(here, 5, 3)
        finals.append(final_state(here, recorder))
    assert_bitwise(finals[1], finals[0])


def plain_loop(kind: str) -> TorchJob:
    """Without DeepSpeed's engine; groups with betas of their own, or the same."""
    module = TinyLM()
    parameters = [p for p in module.parameters() if p.requires_grad]
    groups = [{"params": parameters[:2]}, {"params": parameters[2:]}]
    if kind == "other betas":
        groups[1]["betas"] = (0.8, 0.99)  # type: ignore[assignment]
    made = deepspeed.ops.adam.FusedAdam if kind == "fused" else deepspeed.ops.adam.DeepSpeedCPUAdam
    return TorchJob(module, made(groups, lr=0.01, weight_decay=0.1))


def plain_loops_resume() -> None:
    for kind in ("same betas", "other betas", "fused"):
        many_lives(partial(plain_loop, kind))
        check_resume(partial(plain_loop, kind), skip=3)
        check_early_state(partial(plain_loop, kind))


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


def fused_loop(varying: bool) -> TorchJob:
    """A loop without DeepSpeed's engine; its second group has one parameter."""
    module = Halves()
    module.late.requires_grad_(varying)
    rest = [module.head.weight, module.head.bias, module.idle, *([module.late] if varying else [])]
    groups = [{"params": rest}, {"params": [module.embed.weight]}]
    return TorchJob(module, deepspeed.ops.adam.FusedAdam(groups, lr=0.01, weight_decay=0.1, adam_w_mode=varying))


def fused_loops_resume() -> None:
    check_resume(partial(fused_loop, True))
    check_resume(partial(fused_loop, False), skip=3)
    check_early_state(partial(fused_loop, True))


def step_counts(job: TorchJob) -> list[int]:
    return [state.get("step", 0) for state in job.adapter.scalars()["optimizer_steps"]]


def the_count_that_rises_is_the_groups_own() -> None:
    """FusedAdam counts in the last parameter with a gradient, once for each dtype of the group."""
    seed(1)
    job = fused_loop(False)
    run(job, 0, BEFORE)
    job.adapter.skip_ahead(2)
    assert step_counts(job) == [0, 2 * (BEFORE + 2), 0, BEFORE + 2]  # weight, bias, idle, embed
    job = fused_loop(False)  # before its first step it counts nothing
    job.adapter.skip_ahead(2)
    assert job.adapter.scalars()["optimizer_steps"] == [{}, {}, {}, {}]


def other_offload_is_refused() -> None:
    seed(1)
    engine = job(3, "bf16", "json", **OPTIMIZER).engine
    zero = vars(engine)["_config"].zero_config
    for owner, option, value, instead in (
        ("offload_optimizer", "ratio", 0.5, 'offload_optimizer.ratio below 1.*use "ratio": 1'),
        ("offload_optimizer", "super_offload", True, "super_offload: its optimizer runs in processes"),
        (
            "offload_optimizer",
            "device",
            "nvme",
            'device=nvme.*use "offload_optimizer": {"device": "cpu"}',
        ),
        ("", "zero_quantized_weights", True, "zero_quantized_weights: .*set it to false"),
    ):
        place = vars(getattr(zero, owner) if owner else zero)
        with mock.patch.dict(place, {option: value}), pytest.raises(UnsupportedEngineError, match=instead):
            adapt(engine)
    with (
        mock.patch.object(engine, "zenflow", True),
        pytest.raises(UnsupportedEngineError, match=r"zenflow: .*use ZeRO 2"),
    ):
        adapt(engine)


def wrappers_are_those_of_a_gpu() -> None:
    for stage, precision, kind in ((0, "fp16", FP16_Optimizer), (0, "bf16", FP16_Optimizer)):
        assert type(job(stage, precision).engine.optimizer) is kind


def pipelines_and_experts() -> None:
    offload = "offload_optimizer"
    check_resume(lambda: DeepSpeedJob(initialize(TinyMoE(2), configuration(2, "bf16", offload=offload))))
    check_resume(lambda: PipelineJob(pipeline_engine(1, "bf16", offload=offload)))


MASTERS = ("master_weights_and_grads",)
MASTERS_AND_STATES = (*MASTERS, "optimizer_states")
FUSED, CPU = "FusedAdam", "DeepSpeedCPUAdam"
CASES: dict[str, Case] = {
    # An overflow in the second step after the snapshot: only the first can be skipped as if it were trained.
    "json-zero0-fp16": partial(resumed, 0, "fp16", 1, FUSED),
    "json-zero1-fp32": partial(resumed, 1, "fp32", 3, FUSED),
    "json-zero3-sub-groups": partial(resumed, 3, "bf16", 3, FUSED, sub_group_size=50),
    "offload-json-zero2-bf16": partial(resumed, 2, "bf16", 3, CPU, **OPTIMIZER),
    "offload-json-zero3-sub-groups": partial(resumed, 3, "fp16", 1, CPU, sub_group_size=50, **OPTIMIZER),
    "offload-param-json-zero3-bf16": partial(resumed, 3, "bf16", 3, CPU, **PARAMETERS),
    "offload-json-zero2-bf16-masters": partial(resumed, 2, "bf16", 3, CPU, masters=MASTERS, **OPTIMIZER),
    "offload-json-zero3-bf16-masters": partial(resumed, 3, "bf16", 3, CPU, masters=MASTERS, **OPTIMIZER),
    "offload-json-zero1-bf16-states": partial(resumed, 1, "bf16", 3, CPU, masters=MASTERS_AND_STATES, **OPTIMIZER),
    "offload-json-zero2-fp16-masters": partial(resumed, 2, "fp16", 1, CPU, masters=MASTERS, **OPTIMIZER),
    "many-lives-offload-zero2": partial(many_lives, partial(job, 2, "bf16", **OPTIMIZER)),
    "jumps-json-zero1": partial(jumps_unseen, partial(job, 1, "fp32")),
    "wrappers": wrappers_are_those_of_a_gpu,
    "roll-back-json-zero0-fp16": partial(roll_back_from_after_step, 0, "fp16", "json"),
    "early-state-offload-zero2": partial(check_early_state, partial(job, 2, "bf16", **OPTIMIZER)),
    "plain-loops": plain_loops_resume,
    "fused-loops": fused_loops_resume,
    "fused-step-counts": the_count_that_rises_is_the_groups_own,
    "other-offload-refused": other_offload_is_refused,
}
# These use torch's AdamW: no kernel.
OFFLOAD: dict[str, Case] = {
    "offload-zero2-bf16": partial(resumed, 2, "bf16", 3, "AdamW", optimizer="adamw", **OPTIMIZER),
    "offload-param-zero3-bf16": partial(resumed, 3, "bf16", 3, "AdamW", optimizer="adamw", **PARAMETERS),
}


def with_kernels_in_torch(case: Case) -> Case:
    @functools.wraps(case)
    def run_case() -> None:
        with in_torch():
            case()

    return run_case


KERNELS = OFFLOAD | {name: with_kernels_in_torch(case) for name, case in CASES.items()}
KERNELS |= {"offload-pipelines-and-experts": pipelines_and_experts}  # last: a pipeline changes DeepSpeed's groups
REAL_KERNELS = CASES
