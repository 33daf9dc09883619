"""Low precision: weights and moments in bfloat16, moments in float8, and what keeps its state otherwise."""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from cpsr import CPSRRecovery, TorchAdapter
from tests.committed import wait_until_committed
from tests.situations.lives import Life, alone_and_cut, backward, digest, live

FP8_LARGEST = 448.0
WINDOWS = {"replay": {"enabled": True, "window_iterations": 3}, "checkpoint": {"interval_iterations": 100}}


class Float8Adam(torch.optim.Optimizer):
    """First moments in float8_e4m3fn, with one scale a tensor, and second ones in bfloat16."""

    def __init__(self, parameters: Any, scale_shape: tuple[int, ...]) -> None:
        super().__init__(parameters, {"lr": 1e-3})
        self.scale_shape = scale_shape

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weights in group["params"]:
                state, gradient = self.state[weights], weights.grad.float()
                if not state:
                    state["scale"] = torch.ones(self.scale_shape)
                    state["exp_avg"] = torch.zeros_like(weights, dtype=torch.float8_e4m3fn)
                    state["exp_avg_sq"] = torch.zeros_like(weights, dtype=torch.bfloat16)
                first = 0.9 * state["scale"] * state["exp_avg"].float() + 0.1 * gradient
                second = 0.99 * state["exp_avg_sq"].float() + 0.01 * gradient.square()
                state["scale"].fill_(float(first.abs().max()) / FP8_LARGEST + 1e-12)
                state["exp_avg"].copy_((first / state["scale"]).to(torch.float8_e4m3fn))
                state["exp_avg_sq"].copy_(second)
                weights.sub_((group["lr"] * first / (second.sqrt() + 1e-8)).to(weights.dtype))


class Coded(torch.Tensor):
    """A tensor subclass, as torchao keeps moments of eight bits in."""


class CodedAdam(torch.optim.AdamW):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for state in self.state.values():
            state["exp_avg"] = state["exp_avg"].as_subclass(Coded)


def trained(life: Life) -> list[str]:
    """Forty steps in bfloat16; digests of the weights and of the optimizer's state."""
    kind = life.options["kind"]
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(16, 256), nn.GELU(), nn.Linear(256, 8)).bfloat16()
    optimizers: dict[str, Callable[[], torch.optim.Optimizer]] = {
        "bf16": lambda: torch.optim.AdamW(module.parameters(), lr=1e-2),
        "fp8": lambda: Float8Adam(module.parameters(), (1,)),
        "fp8 and a number": lambda: Float8Adam(module.parameters(), ()),
        "coded": lambda: CodedAdam(module.parameters()),
        "torchao": lambda: _torchao(module),
    }
    optimizer = optimizers[kind]()
    loop: Any = module
    if life.ranks > 1:
        torch.distributed.init_process_group("gloo")
        loop = nn.parallel.DistributedDataParallel(module)
    generator = torch.Generator().manual_seed(life.rank)

    def draw() -> torch.Tensor:
        return torch.randn(8, 16, generator=generator)

    more = WINDOWS if life.options.get("replay") else {}
    with CPSRRecovery(TorchAdapter(loop, optimizer), life.config(**more)) as recovery:
        recovery.register("draws", generator)
        for inputs in recovery.resume(draw):
            optimizer.zero_grad()
            outputs = loop(inputs.bfloat16()).float()
            backward(functional.mse_loss(outputs, inputs[:, :8].sin()))
            optimizer.step()
            life.step(recovery.iteration)
            if recovery.iteration == 40:
                break
    state = [one for entry in optimizer.state_dict()["state"].values() for _, one in sorted(entry.items())]
    flat = [torch.as_tensor(one).reshape(-1).contiguous().view(torch.uint8) for one in state]
    dtypes = {str(one.dtype) for one in state if one.dim()}
    return [digest(module), digest(torch.nn.ParameterList([nn.Parameter(one, False) for one in flat])), *sorted(dtypes)]


def trained_by_deepspeed(life: Life) -> list[str]:
    """Thirty steps with masters, gradients and moments in bfloat16; digests of the weights and of the moments."""
    deepspeed = import_module("deepspeed")
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(16, 256), nn.GELU(), nn.Linear(256, 8))
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "zero_optimization": {"stage": life.options["stage"]},
        "bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True},
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    engine: Any = deepspeed.initialize(model=module, optimizer=optimizer, config=config)[0]
    generator = torch.Generator().manual_seed(life.rank)

    def draw() -> torch.Tensor:
        return torch.randn(8, 16, generator=generator)

    with CPSRRecovery(engine, life.config(**life.options["more"])) as recovery:
        recovery.register("draws", generator)
        for inputs in recovery.resume(draw):
            engine.backward(functional.mse_loss(engine(inputs.bfloat16()).float(), inputs[:, :8].sin()))
            engine.step()
            if life.options["on_disk"] and recovery.iteration == life.at:
                wait_until_committed(life.directory / "run", 15)
            life.step(recovery.iteration)
            if recovery.iteration == 30:
                break
        tensors = dict(recovery.life.job.adapter.shard().tensors())
    state = [tensors[key].reshape(-1).view(torch.uint8) for key in sorted(tensors)]
    bits = nn.ParameterList([nn.Parameter(one, requires_grad=False) for one in state])
    return [digest(bits), *sorted({str(one.dtype) for one in tensors.values()})]


def _torchao(module: nn.Module) -> torch.optim.Optimizer:
    optimizer: torch.optim.Optimizer = import_module("torchao.optim").AdamWFp8(module.parameters(), block_size=16)
    return optimizer


@pytest.mark.parametrize("replay", [False, True], ids=["snapshots", "windows"])
@pytest.mark.parametrize(
    ("kind", "ranks", "dtypes"),
    [
        ("bf16", 1, ["torch.bfloat16"]),
        ("bf16", 2, ["torch.bfloat16"]),
        ("fp8", 1, ["torch.bfloat16", "torch.float32", "torch.float8_e4m3fn"]),
    ],
)
def test_low_precision_comes_back_bit_for_bit(
    kind: str, ranks: int, dtypes: list[str], replay: bool, tmp_path: Path
) -> None:
    alone, cut = alone_and_cut(trained, tmp_path, at=23, ranks=ranks, kind=kind, replay=replay)
    assert cut.result == alone.result
    assert alone.result[2:] == dtypes
    assert "all ranks continue at iteration" in cut.output.lower() or "continues at iteration" in cut.output.lower()


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize(
    ("more", "source"),
    [
        ({"checkpoint": {"interval_iterations": 50}, "memory": {"interval_iterations": 5}}, "exact from memory"),
        ({"checkpoint": {"interval_iterations": 5, "shared_memory": False}}, "exact from checkpoint 15"),
        (WINDOWS, "exact from memory"),
    ],
    ids=["memory", "disk", "windows"],
)
def test_masters_and_moments_of_deepspeed_in_bfloat16(
    more: dict[str, Any], source: str, stage: int, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"stage": stage, "more": more, "on_disk": "checkpoint 15" in source}
    alone, cut = alone_and_cut(trained_by_deepspeed, tmp_path, at=17, ranks=2, **options)
    assert cut.result == alone.result
    assert alone.result[1:] == ["torch.bfloat16"]
    assert source in cut.output


def test_a_number_that_follows_from_gradients_is_saved_but_refused_by_windows(tmp_path: Path) -> None:
    alone, cut = alone_and_cut(trained, tmp_path / "snapshots", at=23, kind="fp8 and a number")
    assert cut.result == alone.result
    refused = live(trained, Life(tmp_path / "windows", options={"kind": "fp8 and a number", "replay": True}))
    assert refused.statuses == [1]
    assert "replay.enabled: Float8Adam keeps scale for each tensor, a number that follows from" in refused.output
    assert "set replay.enabled to false" in refused.output


@pytest.mark.parametrize("kind", ["coded", "torchao"])
def test_state_in_a_tensor_subclass_is_refused_at_the_start(kind: str, tmp_path: Path) -> None:
    if kind == "torchao":
        pytest.importorskip("torchao")
    refused = live(trained, Life(tmp_path, options={"kind": kind}))
    assert refused.statuses == [1]
    assert "keeps exp_avg in a tensor subclass" in refused.output
    assert not any((tmp_path / "run" / "checkpoints").glob("step-*"))
