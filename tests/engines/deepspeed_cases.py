"""The conformance cases of `DeepSpeedAdapter`; run by `worker.py` on two ranks."""

import json
import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from torch import nn

from cpsr.engines import TorchAdapter, adapt
from cpsr.engines.deepspeed_loop import RECEIVES, watch_receives
from cpsr.engines.evaluation import capture_random_states, restore_random_states
from cpsr.engines.hooks import Hooks
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
from cpsr.qualify.deepspeed_jobs import DeepSpeedJob, PipelineJob, configuration, initialize, pipeline_engine
from cpsr.qualify.torch_jobs import TinyLM, token_batch
from tests.engines.optimizer_cases import Nested
from tests.engines.torch_cases import ddp_job


def resume(stage: int, precision: str, skip: int = 0, zero: Any = None, **options: Any) -> dict[str, Any]:
    config = configuration(stage, precision)
    config["zero_optimization"] |= zero or {}
    return check_resume(lambda: DeepSpeedJob(initialize(TinyLM(), config, **options)), skip)


def straddling(stage: int) -> None:
    """Partitions cut tensors, both ranks together own every element once, and no padding is shown."""
    shards: list[Any] = [None, None]
    described = resume(stage, "fp32")["description"]["tensors"]
    torch.distributed.all_gather_object(shards, described)
    for name in shards[0].keys() & shards[1].keys():  # a run directory refuses ranks that differ in a shape
        assert shards[0][name]["shape"] == shards[1][name]["shape"], name
    names = {name for shard in shards for name in shard if shard[name]["dtype"] != "int64"}
    split = 0
    whole = {"drift", *(() if stage == 3 else ("frozen.weight", "frozen.bias"))}
    for name in names - whole:
        pieces = sorted((s[name]["offset"], s[name]["numel"]) for s in shards if name in s)
        shape = next(s[name]["shape"] for s in shards if name in s)
        assert pieces[0][0] == 0
        assert sum(numel for _, numel in pieces) == torch.Size(shape).numel()
        if len(pieces) == 2:
            split += 1
            assert pieces[1][0] == pieces[0][1]
    assert split > 0
    assert "head.weight" not in names
    assert "embed.weight" in names


def overflow_steps_are_counted() -> None:
    seed(1)
    job, recorder = DeepSpeedJob(initialize(TinyLM(), configuration(2, "fp16"))), Recorder()
    job.adapter.attach(recorder)
    run(job, 0, BEFORE)
    assert recorder.steps() == [(1, True), (2, False), (3, True)]
    assert job.engine.skipped_steps == 1
    assert [event[0] for event in recorder.events] == ["before_update", "after_step"] * BEFORE


def hooks_are_settled_and_removed() -> None:
    """One completion a step, with every counter final; afterwards nothing of ours is left on the instance."""
    seed(1)
    engine = initialize(TinyLM(), configuration(1, "fp32"))
    assert engine.optimizer.reduce_bucket_size <= 10**6, "each engine allocates it whole"
    before = dict(vars(engine)), len(engine.module._forward_hooks), len(engine.module._forward_pre_hooks)
    job, recorder, seen = DeepSpeedJob(engine), Recorder(), list[tuple[int, ...]]()
    job.adapter.attach(recorder)
    recorder.at_step_end = lambda i: seen.append((i, engine.micro_steps, engine.global_steps, engine.global_samples))
    run(job, 0, 2)
    assert seen == [(1, 2, 1, 8), (2, 4, 2, 16)]
    assert len(recorder.losses) == 4
    job.adapter.detach()
    after = dict(vars(engine)), len(engine.module._forward_hooks), len(engine.module._forward_pre_hooks)
    assert before[0].keys() == after[0].keys()
    assert before[1:] == after[1:]
    assert engine.step.__func__ is type(engine).step

    def leave(iteration: int) -> None:
        raise SystemExit(7)

    recorder.at_step_end = leave
    job.adapter.attach(recorder)
    with pytest.raises(SystemExit, match="7"):
        run(job, 2, 1)


def losses_without_engine_backward() -> None:
    seed(1)
    job, recorder = DeepSpeedJob(initialize(TinyLM(), configuration(1, "fp32")), direct_backward=True), Recorder()
    job.adapter.attach(recorder)
    run(job, 0, 2)
    assert len(recorder.losses) == 4
    seed(1)
    usual, usual_recorder = DeepSpeedJob(initialize(TinyLM(), configuration(1, "fp32"))), Recorder()
    usual.adapter.attach(usual_recorder)
    run(usual, 0, 2)
    for ours, theirs in zip(recorder.losses, usual_recorder.losses, strict=True):
        assert torch.equal(ours, theirs)


def roll_back_from_after_step(stage: int, precision: str, optimizer: str = "adamw") -> None:
    """A roll-back inside `after_step` stays: nothing of the finished step is written after it returns."""
    seed(1)
    job, recorder = DeepSpeedJob(initialize(TinyLM(), configuration(stage, precision), optimizer)), Recorder()
    job.adapter.attach(recorder)
    run(job, 0, 2)
    snapshot = take_snapshot(job.adapter)
    wanted = {key: value.clone() for key, value in snapshot["tensors"].items()}
    recorder.losses.clear()
    run(job, 2, 1)
    uninterrupted = final_state(job, recorder)
    recorder.at_step_end = lambda iteration: inject(job.adapter, snapshot)
    run(job, 3, 1)
    recorder.at_step_end = lambda iteration: None
    assert job.adapter.iteration == 2
    assert_bitwise(dict(job.adapter.shard().all_tensors()), wanted)
    recorder.losses.clear()
    recorder.events.clear()
    run(job, 2, 1)
    again = final_state(job, recorder)
    uninterrupted["steps"] = again["steps"]
    assert_bitwise(again, uninterrupted)


def evaluation_leaves_no_trace(stage: int, model: Callable[[], nn.Module] = TinyLM) -> None:
    """Also between the micro-batches of a step: same training, same counters."""
    finals = []
    for evaluating in (False, True):
        seed(1)
        config = configuration(stage, "bf16", 2)
        job, recorder = DeepSpeedJob(initialize(model(), config)), Recorder()
        job.adapter.attach(recorder)

        def evaluate(job: DeepSpeedJob = job, recorder: Recorder = recorder) -> None:
            engine = job.engine
            assert recorder.inputs is not None
            micro_steps = engine.micro_steps
            available = [p.numel() for p in engine.module.parameters()]
            with job.adapter.evaluation():
                first = job.adapter.evaluate(*recorder.inputs)
            with job.adapter.evaluation():  # gates draw random numbers in evaluation, too: the same ones again
                second = job.adapter.evaluate(*recorder.inputs)
            assert torch.equal(first, second)
            assert engine.micro_steps == micro_steps
            if stage < 3:
                assert available == [p.numel() for p in engine.module.parameters()]

        if evaluating:
            job.after_micro_batch = evaluate
        run(job, 0, 3)
        finals.append(final_state(job, recorder))
    assert_bitwise(finals[1], finals[0])


def own_checkpoints(stage: int, model: Callable[[], nn.Module] = TinyLM, optimizer: str = "adamw") -> None:
    """The user's save_checkpoint and load_checkpoint work beside the hooks, and loads are announced."""
    paths: list[Any] = [tempfile.mkdtemp(prefix="cpsr-own-") if torch.distributed.get_rank() == 0 else None]
    torch.distributed.broadcast_object_list(paths)
    seed(1)
    job, recorder = DeepSpeedJob(initialize(model(), configuration(stage, "bf16", 1), optimizer)), Recorder()
    job.adapter.attach(recorder)
    run(job, 0, 2)
    torch.distributed.broadcast(job.module.drift, 0)  # DeepSpeed itself saves only rank 0's buffers
    job.engine.save_checkpoint(paths[0])
    state = capture_random_states(job.adapter)
    run(job, 2, 2)
    expected = {key: value.clone() for key, value in job.adapter.shard().all_tensors()}
    seed(2)
    job, recorder = DeepSpeedJob(initialize(model(), configuration(stage, "bf16", 1), optimizer)), Recorder()
    job.adapter.attach(recorder)
    job.adapter.shard()
    assert job.engine.load_checkpoint(f"{paths[0]}/nothing")[0] is None
    assert recorder.events == [("before_external_load",), ("after_external_load", None)]
    recorder.events.clear()
    path, _ = job.engine.load_checkpoint(paths[0])
    assert path is not None
    assert Path(path).exists()
    assert recorder.events == [("before_external_load",), ("after_external_load", 2)]
    assert restore_random_states(job.adapter, state) is None
    run(job, 2, 2)
    assert_bitwise(dict(job.adapter.shard().all_tensors()), expected)
    torch.distributed.barrier()
    shutil.rmtree(paths[0], ignore_errors=True)


def other_accumulation(stage: int) -> None:
    """A restart with more micro-batches in a step takes them in its first step, too."""
    seed(1)
    job = DeepSpeedJob(initialize(TinyLM(), configuration(stage, "fp32", 2)))
    job.adapter.attach(Recorder())
    run(job, 0, 2)
    scalars = job.adapter.scalars()
    seed(2)
    job, recorder = DeepSpeedJob(initialize(TinyLM(), configuration(stage, "fp32", 3))), Recorder()
    job.adapter.shard(to_fill=True)
    job.adapter.load_scalars(scalars)
    assert (job.engine.global_steps, job.engine.micro_steps) == (2, 6)
    job.adapter.attach(recorder)
    run(job, 2, 1)
    assert recorder.steps() == [(3, True)]
    assert (job.engine.global_steps, job.engine.micro_steps) == (3, 9)


def refused(config: dict[str, Any], culprit: str, **options: Any) -> None:
    engine = initialize(TinyLM(), config, **options)
    with pytest.raises(UnsupportedEngineError, match=culprit):
        adapt(engine).shard()


def refusals() -> None:
    engine = initialize(TinyLM(), configuration(1, "fp32"))
    engine.lr_scheduler.extra = object()
    with pytest.raises(UnsupportedEngineError, match=r"lr_scheduler\(CosineAnnealingLR\)\.extra"):
        adapt(engine).scalars()
    with pytest.raises(
        UnsupportedEngineError, match=r"object of tuple is no training engine.*that deepspeed\.initialize returns first"
    ):
        adapt((engine, engine.optimizer, None, None))
    with pytest.raises(UnsupportedEngineError, match="is a DeepSpeed engine: pass it to CPSRRecovery itself"):
        TorchAdapter(engine, engine.optimizer)
    with pytest.raises(UnsupportedEngineError, match="belongs to a DeepSpeed engine"):
        TorchAdapter(engine.module, engine.optimizer)


def pipeline(stage: int, precision: str, optimizer: str = "adamw") -> None:
    result = check_resume(lambda: PipelineJob(pipeline_engine(stage, precision, optimizer)))
    assert result["evaluations"] == []
    assert skipped_steps(result) == (1 if precision == "fp16" else 0)
    assert any("embed" in name for name in result["description"]["tensors"])


def receives_are_waits() -> None:
    """Each receive of a training batch is reported, in the order that the schedule is taken to have."""
    job, recorder = PipelineJob(pipeline_engine(0, "fp32")), Recorder()
    pipeline = job.adapter.pipeline
    assert pipeline is not None
    assert (pipeline.stage, pipeline.stages) == (torch.distributed.get_rank(), 2)
    micro_batches = job.adapter.micro_batches_per_iteration
    job.adapter.attach(recorder)
    job.train_step(0)
    receives = {
        "forward": "RecvActivation" if pipeline.stage > 0 else None,
        "backward": "RecvGrad" if pipeline.stage + 1 < pipeline.stages else None,
    }
    slots = [(2 * batch + pipeline.stage, "forward") for batch in range(micro_batches)]
    slots += [(2 * (batch + pipeline.stages) - pipeline.stage - 1, "backward") for batch in range(micro_batches)]
    order = [receives[kind] for _, kind in sorted(slots)]  # one forward, one backward in turn
    expected = [name for place in order if place is not None for name in (place, "")]
    assert recorder.waits == expected
    job.engine.eval_batch(iter([token_batch(1, micro, 0) for micro in range(micro_batches)]))
    assert recorder.waits == expected  # an evaluation's receives come in another order
    job.adapter.detach()
    assert "_INSTRUCTION_MAP" not in vars(job.engine)
    job.train_step(1)
    assert recorder.waits == expected


def a_receive_that_fails_ends_the_wait() -> None:
    def fails(engine: Any, buffer_id: int) -> None:
        raise RuntimeError("the other stage is gone")

    engine, hooks, recorder = pipeline_engine(0, "fp32"), Hooks(), Recorder()
    engine._INSTRUCTION_MAP = dict.fromkeys(RECEIVES, fails)
    watch_receives(engine, hooks, recorder)
    for receive in RECEIVES:
        with pytest.raises(RuntimeError, match="the other stage is gone"):
            engine._INSTRUCTION_MAP[receive](engine, buffer_id=0)
    assert recorder.waits == ["RecvActivation", "", "RecvGrad", ""]
    hooks.remove()
    assert engine._INSTRUCTION_MAP[RECEIVES[0]] is fails


def evaluated(stage: int, precision: str, skip: int = 0, **options: Any) -> None:
    result = resume(stage, precision, skip, **options)
    assert len(result["evaluations"]) == AFTER
    assert skipped_steps(result) == (1 if precision == "fp16" else 0)


def skipped_steps(result: dict[str, Any]) -> int:
    return int(json.loads(result["snapshot"]["json"])["scalars"]["counters"]["skipped_steps"])


def early_state(stage: int, precision: str, optimizer: str, model: Callable[[], nn.Module] = TinyLM) -> None:
    check_early_state(lambda: DeepSpeedJob(initialize(model(), configuration(stage, precision), optimizer)))


def any_optimizer(stage: int, precision: str, make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> None:
    """State that is not per element, and state of no parameter, is saved beside the flat tensors of ZeRO."""

    def build() -> DeepSpeedJob:
        module = TinyLM()
        tuned = make([p for p in module.parameters() if p.requires_grad])
        engine, *_ = deepspeed.initialize(model=module, optimizer=tuned, config=configuration(stage, precision))
        return DeepSpeedJob(engine)

    check_resume(build)


Case = Callable[[], Any]
ZERO: dict[str, Case] = {
    f"zero{stage}-{precision}": partial(evaluated, stage, precision)
    for stage in range(4)
    for precision in ("fp32", "bf16", "fp16")
}
OTHER: dict[str, Case] = {
    "zero1-bf16-fp32grad": partial(evaluated, 1, "bf16-fp32grad"),
    "zero2-sgd-warmup": partial(evaluated, 2, "fp32", optimizer="sgd", schedule="warmup"),
    "zero1-skip-ahead-warmup": partial(evaluated, 1, "fp32", skip=2, schedule="warmup"),
    "zero2-round-robin": partial(evaluated, 2, "bf16", zero={"round_robin_gradients": True}),
    "zero3-sub-groups": partial(evaluated, 3, "bf16", zero={"sub_group_size": 50}),
    "zero3-none-persistent": partial(evaluated, 3, "bf16", zero={"stage3_param_persistence_threshold": 0}),
    "zero3-all-persistent": partial(evaluated, 3, "fp32", zero={"stage3_param_persistence_threshold": 10**6}),
    "evaluation-zero2": partial(evaluation_leaves_no_trace, 2),
    "evaluation-zero3": partial(evaluation_leaves_no_trace, 3),
    "early-state-zero1": partial(early_state, 1, "bf16", "sgd"),
    "early-state-zero3": partial(early_state, 3, "fp16", "adamw"),
    "zero2-straddling": partial(straddling, 2),
    "zero3-straddling": partial(straddling, 3),
    "overflow-counts": overflow_steps_are_counted,
    "hooks": hooks_are_settled_and_removed,
    "direct-backward": losses_without_engine_backward,
    "roll-back": partial(roll_back_from_after_step, 3, "bf16"),
    "own-checkpoints-zero3": partial(own_checkpoints, 3),
    "other-accumulation-zero1": partial(other_accumulation, 1),
    "ddp": lambda: check_resume(ddp_job, skip=2),
    "zero3-rmsprop": partial(evaluated, 3, "bf16", optimizer="rmsprop"),
    **{f"zero{stage}-nested": partial(any_optimizer, stage, "fp32", Nested) for stage in range(3)},
    "zero0-adafactor": partial(any_optimizer, 0, "fp32", partial(torch.optim.Adafactor, lr=0.01)),
    "zero2-adafactor": partial(any_optimizer, 2, "bf16", partial(torch.optim.Adafactor, lr=0.01)),
    "refusals": refusals,
    "receives-are-waits": receives_are_waits,
    "a-receive-fails": a_receive_that_fails_ends_the_wait,
    "pipeline-zero0-fp32": partial(pipeline, 0, "fp32"),
    "pipeline-zero0-bf16": partial(pipeline, 0, "bf16"),
    "pipeline-zero1-bf16": partial(pipeline, 1, "bf16"),
}
