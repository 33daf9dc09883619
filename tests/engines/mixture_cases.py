"""The conformance cases of `DeepSpeedAdapter` with MoE layers; run by `worker.py` on two ranks."""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch

from cpsr.engines import adapt
from cpsr.engines.moe.deepspeed import expert_names
from cpsr.engines.moe.operators import DEEPSPEED, ExpertParallel, operators_of
from cpsr.engines.moe.token_counts import HookedTokenCounts
from cpsr.engines.naming import parameter_names
from cpsr.errors import UnsupportedEngineError
from cpsr.qualify.conformance import AFTER, Recorder, check_resume, run, seed
from cpsr.qualify.deepspeed_jobs import EXPERTS, DeepSpeedJob, TinyMoE, configuration, initialize
from cpsr.qualify.torch_jobs import BATCH, LENGTH
from tests.engines.deepspeed_cases import early_state, evaluation_leaves_no_trace, own_checkpoints, skipped_steps

LAYERS = ("first", "second")
PREFIX = "deepspeed_moe.experts.deepspeed_experts"


def resume(expert_parallel: int, stage: int, precision: str = "fp32", skip: int = 0, **options: Any) -> None:
    """Bitwise as without a stop, evaluations in between included; every element of every expert is someone's."""
    config = configuration(stage, precision)
    result = check_resume(lambda: DeepSpeedJob(initialize(TinyMoE(expert_parallel, **options), config)), skip)
    assert len(result["evaluations"]) == AFTER
    assert skipped_steps(result) == (1 if precision == "fp16" else 0)
    shards: list[Any] = [None, None]
    torch.distributed.all_gather_object(shards, result["description"])
    check_names(shards, expert_parallel, stage)


def check_names(shards: list[Any], expert_parallel: int, stage: int) -> None:
    tensors = [shard["tensors"] for shard in shards]
    for layer in LAYERS:
        for index in range(EXPERTS):
            owner = index * expert_parallel // EXPERTS  # where experts are shared out, one rank has each
            holders = [owner] if expert_parallel == 2 else [0, 1]
            prefix = f"{layer}.{PREFIX}.{index}."
            for name in ("up.weight", "up.bias", "down.weight", "down.bias", "scale", "seen"):
                pieces = {
                    rank: (found[prefix + name]["offset"], found[prefix + name]["numel"])
                    for rank, found in enumerate(tensors)
                    if prefix + name in found
                }
                whole = torch.Size(next(tensors[rank][prefix + name]["shape"] for rank in pieces)).numel()
                if stage == 0 or expert_parallel == 2 or name in ("scale", "seen"):
                    assert pieces == dict.fromkeys(holders, (0, whole))
                else:
                    assert sum(numel for _, numel in pieces.values()) == whole
            for rank, shard in enumerate(shards):
                assert (prefix + "scale" in shard["module"]["frozen"]) == (rank in holders)


def names_are_those_of_the_experts_that_tokens_go_to() -> None:
    """A token sent to expert 2 is rank 1's expert 0: that is the one that moves, and the one called 2."""
    seed(1)
    engine = initialize(TinyMoE(2), configuration(0, "fp32", 1))
    rank = torch.distributed.get_rank()
    with torch.no_grad():
        for layer in (engine.module.first, engine.module.second):
            layer.deepspeed_moe.gate.wg.weight.zero_()
    wanted = 2
    job = DeepSpeedJob(engine)
    before = {name: one.parameter.values.clone() for name, one in job.adapter.shard().operators.items()}
    gate = engine.module.first.deepspeed_moe.gate
    forward = gate.forward

    def to_the_wanted(*args: Any, **kwargs: Any) -> Any:
        balance, capacity, experts, indices, locations, weights, counts = forward(*args, **kwargs)
        return balance, capacity, experts, torch.full_like(indices, wanted), locations, weights, counts

    gate.forward = to_the_wanted
    for parameter_group in engine.optimizer.param_groups:
        parameter_group["weight_decay"] = 0.0
    job.train_step(0)
    moved = {
        name
        for name, one in job.adapter.shard().operators.items()
        if name.startswith(f"first.{PREFIX}") and not torch.equal(one.parameter.values, before[name])
    }
    compiled: Any = torch.compile(engine.module)  # lazily: nothing is compiled here
    names = set(parameter_names(engine.module, expert_names(engine.module)).values())
    assert set(parameter_names(compiled, expert_names(compiled)).values()) == names >= moved
    own = engine.module.first.deepspeed_moe.experts.deepspeed_experts[0]
    assert {name.split(".")[4] for name in moved} == ({str(wanted)} if rank == 1 else set())
    if rank == 1:
        values = job.adapter.shard().operators[f"first.{PREFIX}.{wanted}.up.weight"].parameter.values
        assert values.data_ptr() == own.up.weight.data_ptr()


class Counting(Recorder):
    """Passes what it observes on to the counts, as the observer of a run does."""

    def __init__(self, counts: HookedTokenCounts) -> None:
        super().__init__()
        self._counts = counts

    def on_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().on_forward(args, kwargs)
        self._counts.begin_forward()

    def after_step(self, iteration: int, applied: bool) -> None:
        self._counts.end_iteration(iteration, applied)
        super().after_step(iteration, applied)


def tokens_are_counted_over_all_ranks(expert_parallel: int, precision: str) -> None:
    """Of applied steps alone; evaluations in between are not seen."""
    seed(1)
    engine = initialize(TinyMoE(expert_parallel), configuration(1, precision))
    job = DeepSpeedJob(engine)
    assert job.adapter.mixture is not None
    counts = job.adapter.mixture.token_counts()
    recorder = Counting(counts)
    job.adapter.attach(recorder)
    routed: list[list[int]] = []  # what the gates routed in the iteration that is under way, layer after layer
    for layer in (engine.module.first, engine.module.second):
        layer.deepspeed_moe.register_forward_hook(lambda one, *_: routed.append(one.exp_counts.tolist()))
    taken, expected, kept = [], [], []

    def elsewhere(iteration: int) -> None:
        kept.append(list(routed))
        assert recorder.inputs is not None
        with job.adapter.evaluation():
            job.adapter.evaluate(*recorder.inputs)
        routed.clear()

    recorder.at_step_end = elsewhere
    for step in range(4):
        run(job, step, 1)
        both: list[Any] = [None, None]
        torch.distributed.all_gather_object(both, kept.pop())
        if recorder.steps()[-1][1]:
            expected.append(
                (step + 1, numpy.sum([numpy.reshape(one, (-1, len(LAYERS), EXPERTS)) for one in both], (0, 1)))
            )
        if step == 1:
            taken += counts.take()
    taken += counts.take()
    assert [one.iteration for one in taken] == [iteration for iteration, _ in expected]
    tokens = 2 * engine.gradient_accumulation_steps() * BATCH * LENGTH
    for one, (_, sums) in zip(taken, expected, strict=True):
        assert numpy.array_equal(numpy.stack(one.tokens), sums)
        assert sums.sum(1).tolist() == [tokens, 2 * tokens]  # top-1 and top-2
    assert len(taken) == (3 if precision == "fp16" else 4)

    names = parameter_names(engine.module, expert_names(engine.module)).values()
    ranks = ExpertParallel(expert_parallel, job.adapter.rank % expert_parallel)
    operators = operators_of(names, DEEPSPEED, ranks)
    assert operators.layer_names == counts.layer_names == LAYERS
    assert [layer.experts for layer in operators.layers()] == [EXPERTS] * len(LAYERS)
    counts.remove()


def refused(engine: Any, culprit: str) -> None:
    with pytest.raises(UnsupportedEngineError, match=culprit):
        adapt(engine)


def refusals() -> None:
    refused(initialize(TinyMoE(1, enable_expert_tensor_parallelism=True), configuration(0, "fp32")), "expert_tensor")
    tutel = initialize(TinyMoE(1), configuration(0, "fp32"))
    tutel.module.first.deepspeed_moe.use_tutel = True  # as where that package is installed
    refused(tutel, "use_tutel")
    stray = initialize(TinyMoE(1), configuration(0, "fp32"))
    stray.module.embed.weight.allreduce = False
    refused(stray, r"allreduce=False\) outside")
    automatic = initialize(TinyMoE(1), configuration(0, "fp32"))
    automatic._config.expert_parallel_config = SimpleNamespace(enabled=True)
    refused(automatic, "AutoEP")
    parallel = initialize(TinyMoE(1), configuration(0, "fp32"))
    parallel.mp_world_size = 2
    refused(parallel, "MoE layers with tensor parallelism")
    with pytest.raises(AssertionError, match="not supported with ZeRO Stage 3"):
        initialize(TinyMoE(1), configuration(3, "fp32"))


Case = Callable[[], Any]
MIXTURES: dict[str, Case] = {
    f"ep{expert_parallel}-zero{stage}": partial(resume, expert_parallel, stage)
    for expert_parallel in (1, 2)
    for stage in range(3)
}
MIXTURES |= {
    "ep2-zero0-fp16": partial(resume, 2, 0, "fp16"),
    "ep1-zero1-fp16": partial(resume, 1, 1, "fp16"),
    "ep2-zero1-bf16": partial(resume, 2, 1, "bf16"),
    "ep2-zero2-fp16": partial(resume, 2, 2, "fp16"),
    "ep2-zero1-residual": partial(resume, 2, 1, use_residual=True),
    "ep2-zero0-keeping-tokens": partial(resume, 2, 0, drop_tokens=False),
    "ep2-zero1-skip-ahead": partial(resume, 2, 1, skip=3),
    "early-state-ep2-zero1": partial(early_state, 1, "bf16", "adamw", partial(TinyMoE, 2)),
    "evaluation-ep2-zero0": partial(evaluation_leaves_no_trace, 0, partial(TinyMoE, 2)),
    "own-checkpoints-ep2-zero1": partial(own_checkpoints, 1, partial(TinyMoE, 2)),
    "tokens-ep2-fp16": partial(tokens_are_counted_over_all_ranks, 2, "fp16"),
    "names": names_are_those_of_the_experts_that_tokens_go_to,
    "refusals": refusals,
}
