"""The arithmetic of DeepSpeed's Adam kernels for processors (`csrc/adam/cpu_adam_impl.cpp`) in torch.

Building the real ones takes minutes; the slow group `real-kernels` runs the same cases with them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import numpy
import torch

__all__ = ["AdamOptimizer", "CPUAdamKernel", "FusedAdamKernel", "in_torch"]

float32 = numpy.float32


class AdamOptimizer:
    """Of the same name in `csrc/includes/cpu_adam.h`, with its running powers."""

    def __init__(self, beta1: float, beta2: float, decoupled: bool) -> None:
        self.betas, self.decoupled = (float32(beta1), float32(beta2)), decoupled
        self.powers, self.last = (float32(1), float32(1)), 0

    def increment(self, step: int, beta1: float, beta2: float) -> None:
        betas = float32(beta1), float32(beta2)
        if betas == self.betas and step == self.last:
            return
        if betas == self.betas and step == self.last + 1:
            self.powers = self.powers[0] * betas[0], self.powers[1] * betas[1]
        else:
            self.powers = float32(float(betas[0]) ** step), float32(float(betas[1]) ** step)
        self.betas, self.last = betas, step

    def update(self, rate: float, eps: float, decay: float, correct: bool, *tensors: torch.Tensor) -> None:
        one = float32(1)
        first_correction = one - self.powers[0] if correct else one
        second_correction = one / numpy.sqrt(one - self.powers[1]) if correct else one
        step_size = float(-float32(rate) / first_correction)
        values, gradient, first, second = tensors
        p, g = values.float(), gradient.float()
        if decay > 0 and not self.decoupled:
            g = g + p * float(float32(decay))
        m = first.float() * float(self.betas[0]) + g * float(one - self.betas[0])
        v = second.float() * float(self.betas[1]) + g * g * float(one - self.betas[1])
        if decay > 0 and self.decoupled:
            p = p + p * float(-float32(rate) * float32(decay))
        p = p + m / (v.sqrt() * float(second_correction) + float(float32(eps))) * step_size
        for tensor, new in ((values, p), (first, m), (second, v)):
            tensor.data.copy_(new)  # past autograd, as the kernel writes


class CPUAdamKernel:
    """The module that `CPUAdamBuilder` loads."""

    def __init__(self) -> None:
        self._optimizers: dict[int, AdamOptimizer] = {}

    def create_adam(
        self, number: int, rate: float, beta1: float, beta2: float, eps: float, decay: float, decoupled: bool, log: bool
    ) -> None:
        self._optimizers[number] = AdamOptimizer(beta1, beta2, decoupled)

    def destroy_adam(self, number: int) -> None:
        self._optimizers.pop(number, None)

    def adam_update(
        self,
        number: int,
        step: int,
        rate: float,
        beta1: float,
        beta2: float,
        eps: float,
        decay: float,
        correct: bool,
        *tensors: torch.Tensor,
    ) -> None:
        assert step >= 0
        optimizer = self._optimizers[number]
        optimizer.increment(step, beta1, beta2)
        optimizer.update(rate, eps, decay, correct, *tensors)


class FusedAdamKernel:
    """The module that `FusedAdamBuilder` loads on a processor: one optimizer for each kind of weight decay."""

    def __init__(self) -> None:
        self._optimizers = {mode: AdamOptimizer(0.0, 0.0, mode == 1) for mode in (0, 1)}

    def multi_tensor_adam(
        self,
        chunk_size: int,
        noop_flag: torch.Tensor,
        lists: list[list[torch.Tensor]],
        rate: float,
        beta1: float,
        beta2: float,
        eps: float,
        step: int,
        mode: int,
        correct: int,
        decay: float,
    ) -> None:
        for gradient, *rest in zip(*lists, strict=True):
            self._optimizers[mode].increment(step, beta1, beta2)
            self._optimizers[mode].update(rate, eps, decay, bool(correct), rest[0], gradient, *rest[1:])


@contextmanager
def in_torch() -> Iterator[None]:
    """Inside, optimizers get these kernels, anew in each process as the real ones are."""
    from deepspeed.ops.adam import cpu_adam, fused_adam

    cpu, fused = CPUAdamKernel(), FusedAdamKernel()
    with (
        mock.patch.object(cpu_adam.CPUAdamBuilder, "load", return_value=cpu),
        mock.patch.object(fused_adam.FusedAdamBuilder, "load", return_value=fused),
        mock.patch("cpuinfo.get_cpu_info", dict),  # a second for each DeepSpeedCPUAdam
    ):
        yield
