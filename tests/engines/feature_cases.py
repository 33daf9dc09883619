"""The conformance cases of what DeepSpeed's configuration can add to an engine; run by `worker.py` on two ranks."""

import json
from functools import partial
from typing import Any
from unittest import mock

import deepspeed
import pytest
import torch
from deepspeed.runtime.torch_autocast import is_autocast_initialized

from cpsr.engines import adapt, offload
from cpsr.engines.offload import ActivationOffload
from cpsr.errors import UnsupportedEngineError
from cpsr.qualify.conformance import (
    AFTER,
    BEFORE,
    Recorder,
    assert_bitwise,
    check_resume,
    final_state,
    run,
    seed,
)
from cpsr.qualify.deepspeed_jobs import DeepSpeedJob, configuration, initialize
from cpsr.qualify.ranks import own_process_globals
from cpsr.qualify.torch_jobs import TinyLM, token_batch
from tests.engines.deepspeed_cases import Case

__all__ = ["FEATURES"]

BF16_MASTERS = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}


def resume(stage: int, precision: str, skip: int = 0, optimizer: str = "adamw", **extra: Any) -> dict[str, Any]:
    config = configuration(stage, precision, **extra)
    if stage == 3 and "torch_autocast" in extra:
        config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    return check_resume(lambda: DeepSpeedJob(initialize(TinyLM(), config, optimizer)), skip)


def autocast(dtype: str, **more: Any) -> dict[str, Any]:
    return {"enabled": True, "dtype": dtype, **more}


def casts(stage: int, skip: int = 0, **more: Any) -> None:
    result = resume(stage, "fp32", skip, torch_autocast=autocast("bfloat16", **more))
    assert len(result["evaluations"]) == AFTER


def kept_whole_in_another_precision() -> None:
    engine = initialize(TinyLM(), configuration(3, "fp32", torch_autocast=autocast("bfloat16")))
    with pytest.raises(UnsupportedEngineError, match='"stage3_param_persistence_threshold": 0 to zero_optimization'):
        adapt(engine)


def low_precision_masters(stage: int, skip: int = 0) -> None:
    result = resume(stage, "bf16", skip, bf16=BF16_MASTERS)
    tensors = result["snapshot"]["tensors"]
    dtypes = {str(tensor.dtype) for key, tensor in tensors.items() if key.startswith(("param/", "moment/"))}
    assert dtypes == {"torch.bfloat16"}, {key: tensor.dtype for key, tensor in tensors.items()}


class BoundaryJob(DeepSpeedJob):
    """Tells the engine which micro-batch is the last, of a number that changes, and calls its step once."""

    def train_step(self, step: int) -> None:
        count = 1 + step % 3
        for micro in range(count):
            self.engine.set_gradient_accumulation_boundary(micro == count - 1)
            tokens, targets = (one.to(self.engine.device) for one in token_batch(step, micro, self.adapter.rank))
            self.engine.backward(self.engine(tokens, targets=targets))
        self.engine.step()


def told_boundaries(stage: int) -> None:
    config = configuration(stage, "fp32")
    result = check_resume(lambda: BoundaryJob(initialize(TinyLM(), config)))
    counters = json.loads(result["snapshot"]["json"])["scalars"]["counters"]
    assert counters["micro_steps"] == counters["global_steps"] == BEFORE, "no multiple of the configured number"


def compiled(stage: int, precision: str, backend: str, skip: int = 0, **extra: Any) -> None:
    """Inputs and losses are seen outside of what is compiled, and names are those of the module."""

    def build() -> DeepSpeedJob:
        engine = initialize(TinyLM(), configuration(stage, precision, **extra))
        engine.compile(backend=backend)
        return DeepSpeedJob(engine)

    result = check_resume(build, skip)
    assert len(result["evaluations"]) == AFTER
    assert "up.weight" in result["description"]["tensors"]


def wrapped_by_torch_compile(stage: int) -> None:
    """The module given to DeepSpeed is compiled already: a run goes on with it or without."""

    def build() -> DeepSpeedJob:
        module: Any = torch.compile(TinyLM(), backend="eager")
        return DeepSpeedJob(initialize(module, configuration(stage, "fp32")))

    result = check_resume(build)
    plain = DeepSpeedJob(initialize(TinyLM(), configuration(stage, "fp32")))
    assert plain.adapter.describe()["tensors"] == result["description"]["tensors"]


REFUSED: dict[str, tuple[int, dict[str, Any], dict[str, Any], str]] = {
    "autocast-fp16": (1, {}, {"torch_autocast": autocast("float16")}, "torch_autocast.dtype: float16: .*bfloat16"),
    "unmanaged": (
        1,
        {},
        {"managed_gradient_accumulation": False},
        "managed_gradient_accumulation: false: .*set_gradient_accumulation_boundary",
    ),
    "hpz": (3, {"zero_hpz_partition_size": 2}, {}, r"zero_hpz_partition_size: .*second copy.*set it to 1"),
    "quantised-gradients": (2, {"zero_quantized_gradients": True}, {}, "zero_quantized_gradients: .*set it to false"),
    "deepcompile": (
        1,
        {},
        {"compile": {"deepcompile": True}},
        r"compile\.deepcompile: it runs on CUDA.*engine\.compile",
    ),
}


def refused_by_name(name: str) -> None:
    stage, zero, extra, message = REFUSED[name]
    config = configuration(stage, "fp32", **extra)
    config["zero_optimization"] |= zero
    engine = initialize(TinyLM(), config)
    with pytest.raises(UnsupportedEngineError, match=message):
        adapt(engine)
    if name == "hpz":  # DeepSpeed keeps its group for every later engine
        later = initialize(TinyLM(), configuration(3, "fp32"))
        with pytest.raises(UnsupportedEngineError, match=message):
            adapt(later)


def muon_of_deepspeed() -> None:
    params = {"muon_lr": 0.02, "adam_lr": 0.01, "weight_decay": 0.01, "torch_adam": True}
    config = configuration(1, "bf16", optimizer={"type": "Muon", "params": params})
    engine, *_ = deepspeed.initialize(model=TinyLM(), config=config)
    with pytest.raises(UnsupportedEngineError, match=r"optimizer: Muon: .*use AdamW"):
        adapt(engine)


def globals_are_put_back() -> None:
    """After autocast and ZeRO-3 an engine is as if there had been none."""
    linear = torch.nn.functional.linear
    with own_process_globals():
        config = configuration(3, "fp32", torch_autocast=autocast("bfloat16"))
        config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
        DeepSpeedJob(initialize(TinyLM(), config)).train_step(0)
        assert is_autocast_initialized()
        assert torch.nn.functional.linear is not linear
    assert torch.nn.functional.linear is linear
    assert not is_autocast_initialized()


def activations_in_host_memory(stage: int, precision: str) -> None:
    """The same training, with accumulated batches."""
    finals = []
    for limit_bytes in (0, 1 << 20):
        seed(1)
        job, recorder = DeepSpeedJob(initialize(TinyLM(), configuration(stage, precision, 2))), Recorder()
        job.adapter.attach(recorder)
        with mock.patch.object(offload, "MIN_BYTES", 1), ActivationOffload(job.engine.module, limit_bytes) as moved:
            run(job, 0, 3)
        assert (moved.moved_bytes > 0) == (limit_bytes > 0)
        finals.append(final_state(job, recorder))
    assert_bitwise(finals[1], finals[0])


INDUCTOR: dict[str, Case] = {
    "zero0-inductor": partial(compiled, 0, "fp32", "inductor"),
    "zero2-inductor": partial(compiled, 2, "bf16", "inductor", 2),
    "zero3-inductor": partial(compiled, 3, "fp32", "inductor"),
    "zero3-compiled": partial(compiled, 3, "bf16", "eager"),
}
FEATURES: dict[str, Case] = {
    **{f"zero{stage}-autocast-bf16": partial(casts, stage) for stage in range(4)},
    "zero1-autocast-modules": partial(casts, 1, lower_precision_safe_modules=["torch.nn.Linear", "torch.nn.Embedding"]),
    "zero2-autocast-skip-ahead": partial(casts, 2, 1),
    "zero3-autocast-refused": kept_whole_in_another_precision,
    **{f"zero{stage}-bf16-states": partial(low_precision_masters, stage) for stage in (1, 2, 3)},
    "zero1-bf16-states-skip-ahead": partial(low_precision_masters, 1, 3),
    **{f"refused-{name}": partial(refused_by_name, name) for name in REFUSED},
    **{f"zero{stage}-activations": partial(activations_in_host_memory, stage, "bf16") for stage in range(3)},
    "globals": globals_are_put_back,
    "zero1-told-boundaries": partial(told_boundaries, 1),
    "zero0-compiled": partial(compiled, 0, "fp32", "aot_eager"),
    "zero1-compiled": partial(compiled, 1, "bf16", "eager", 2),
    "zero2-compiled": partial(compiled, 2, "fp32", "aot_eager"),
    "zero1-wrapped-by-torch-compile": partial(wrapped_by_torch_compile, 1),
    "refused-muon": muon_of_deepspeed,
}
