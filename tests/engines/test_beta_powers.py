"""The powers of the betas that DeepSpeed's Adam kernels keep, brought back bit for bit."""

import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch

from cpsr.engines.beta_powers import BetaPowers
from tests.engines.adam_kernels import AdamOptimizer, CPUAdamKernel, FusedAdamKernel

USUAL = (0.9, 0.999)
Call = tuple[int, tuple[float, float]]


class Kernel:
    """One kernel with its watch, as a process has it."""

    def __init__(self) -> None:
        self.adam, self.replayed = AdamOptimizer(*USUAL, True), 0
        self.watched = BetaPowers(self._replay)
        self.watched.seen(0, USUAL)

    def _replay(self, *call: Any) -> None:
        self.replayed += 1
        self.adam.increment(*call)

    def train(self, *calls: Call) -> None:
        for step, betas in calls:
            self.adam.increment(step, *betas)
            self.watched.seen(step, betas)

    def powers(self) -> bytes:
        return numpy.array(self.adam.powers).tobytes()

    def corrections(self) -> bytes:
        return (numpy.float32(1) - numpy.array(self.adam.powers)).tobytes()


def history(seed: int) -> list[Call]:
    """Steps one after the other, with jumps, repeated ones, and betas that change."""
    drawn, step, betas, calls = random.Random(seed), 0, USUAL, []
    for _ in range(drawn.randrange(1, 60)):
        step = max(1, step + drawn.choices((1, 0, 7, -3), (20, 5, 1, 1))[0])
        betas = drawn.choices((USUAL, (0.9, 0.95), (0.8, 0.99)), (30, 1, 1))[0] if drawn.random() < 0.2 else betas
        calls.append((step, betas))
    return calls


@pytest.mark.parametrize("seed", range(20))
def test_any_history_is_brought_back(seed: int) -> None:
    """In a kernel of a new process, and in one that has trained something else; then both go on alike."""
    first, fresh, used = Kernel(), Kernel(), Kernel()
    first.train(*history(seed))
    used.train(*history(seed + 100))
    last = first.watched.running
    for other in (fresh, used):
        other.watched.restore(first.watched.saved())
        assert other.powers() == first.powers()
        assert other.watched.running == last
    following = [(last.step + ahead, last.betas) for ahead in (1, 2, 2, 3)]
    for one in (first, fresh, used):
        one.train(*following)
    assert first.powers() == fresh.powers() == used.powers()


@pytest.mark.parametrize("seed", range(5))
def test_advancing_is_training(seed: int) -> None:
    trained, advanced = Kernel(), Kernel()
    for one in (trained, advanced):
        one.train(*history(seed))
    last = trained.watched.running.step
    ahead = [(last + 1 + index // 2, USUAL if index % 4 < 2 else (0.8, 0.99)) for index in range(12)]
    trained.train(*ahead)
    advanced.watched.advance(ahead)
    assert advanced.powers() == trained.powers()
    assert advanced.watched.running == trained.watched.running


def test_what_is_restored_from_nothing_begins_at_the_next_step() -> None:
    trained = Kernel()
    trained.train(*[(step, USUAL) for step in range(1, 30)])
    trained.watched.restore(None)
    trained.train((1, USUAL))
    assert trained.watched.running.step == 1
    assert trained.powers() == numpy.array(USUAL, numpy.float32).tobytes()


def test_long_runs_are_replayed_only_while_it_matters() -> None:
    """At 0.999 no bias correction depends on a power after 20,795 steps, and a longer run takes no call."""
    trained, restored = Kernel(), Kernel()
    for length, calls in ((20_000, 20_002), (40_000, 0)):
        first = trained.watched.running.step + 1
        trained.train(*[(step, USUAL) for step in range(first, length + 1)])
        restored.replayed = 0
        restored.watched.restore(trained.watched.saved())
        assert restored.replayed == calls
        assert restored.corrections() == trained.corrections()
        following = (length + 1, USUAL)
        trained.train(following)
        restored.train(following)
        assert restored.corrections() == trained.corrections()


@pytest.mark.parametrize("beta", [0.8, 0.9, 0.95, 0.99, 0.999, 0.9999])
def test_what_a_kernel_computes_anew_is_close(beta: float) -> None:
    """The relative bound of docs/offload.md on bias corrections, for runs whose history nobody watched."""
    steps = 40_000  # then no power can be felt, but for the last beta, with which they are 0.02
    single = numpy.float32(beta)
    multiplied = numpy.multiply.accumulate(numpy.full(steps, single)).astype(float)
    anew = (float(single) ** numpy.arange(1, steps + 1)).astype(numpy.float32).astype(float)
    assert numpy.abs((1 - multiplied) / (1 - anew) - 1).max() < 2**-24 / (1 - beta)


def revealed(update: Callable[[int, tuple[float, float], list[torch.Tensor]], None], call: Call) -> bytes:
    """What one update makes of values that show the powers: no rounding depends on how products are joined."""
    tensors = [torch.zeros(8), torch.zeros(8), torch.full((8,), 3.0), torch.full((8,), 7.0)]
    update(*call, tensors)
    return b"".join(one.numpy().tobytes() for one in (tensors[0], *tensors[2:]))


def updates(cpu: Any, fused: Any) -> list[Callable[[int, tuple[float, float], list[torch.Tensor]], None]]:
    cpu.create_adam(10**6, 1e-3, *USUAL, 1e-8, 0.0, True, False)
    unused = torch.zeros(1, dtype=torch.int)

    def step_cpu(step: int, betas: tuple[float, float], tensors: list[torch.Tensor]) -> None:
        cpu.adam_update(10**6, step, 1.0, *betas, 0.0, 0.0, True, *tensors)

    def step_fused(step: int, betas: tuple[float, float], tensors: list[torch.Tensor]) -> None:
        values, gradient, first, second = tensors
        lists = [[gradient], [values], [first], [second]]
        fused.multi_tensor_adam(1, unused, lists, 1.0, *betas, 0.0, step, 1, 1, 0.0)

    return [step_cpu, step_fused]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [0, 1], ids=["DeepSpeedCPUAdam", "FusedAdam"])
def test_the_kernels_in_torch_compute_what_the_real_ones_do(kind: int) -> None:
    """Powers bit for bit, over any history; weights and moments but for the rounding of joined products."""
    from deepspeed.ops.op_builder import CPUAdamBuilder, FusedAdamBuilder

    real = updates(CPUAdamBuilder().load(), FusedAdamBuilder().load())[kind]
    ours = updates(CPUAdamKernel(), FusedAdamKernel())[kind]
    for one in range(20):
        for call in history(one):
            assert revealed(real, call) == revealed(ours, call)
            real(*call, [torch.zeros(0)] * 4)  # as they are brought back: without elements
