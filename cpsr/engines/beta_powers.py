"""The powers of the betas that DeepSpeed's Adam kernels for processors keep between steps.

A kernel has one pair of them, whatever it updates. In the step after the last one it multiplies them by the betas.
After any other step, or with other betas, it computes them with `pow` (`IncrementStep` in `csrc/includes/cpu_adam.h`).
The two differ in their last bits. So a kernel is brought back by the same calls: `pow` where the run computed it last,
and one call for each step since, on tensors without elements. No power is ever written.
"""

import ctypes
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

__all__ = ["BetaPowers", "Running", "advance_powers", "is_fused_adam", "keeps_powers", "restore_powers"]
__all__ += ["saved_powers", "watch", "without_kernel"]

# By name, since importing them may build their kernels, for minutes.
CPU_ADAM = ("deepspeed.ops.adam.cpu_adam", "DeepSpeedCPUAdam")
FUSED_ADAM = ("deepspeed.ops.adam.fused_adam", "FusedAdam")
HANDLES = {CPU_ADAM: "ds_opt_adam", FUSED_ADAM: "multi_tensor_adam"}  # the attribute by which each calls its kernel
# Bias corrections are 1 minus a power in float32: from 2**-25 on they are 1, whatever the last bits of the power.
UNFELT = 2.0**-30

Betas = tuple[float, float]


@dataclass(frozen=True)
class Running:
    """How the powers of a kernel came to be what they are.

    Attributes:
        since: the step whose powers were computed with `pow`; each later one multiplied them.
        step: the last one.
        betas: of it, as float32.
    """

    since: int = 0
    step: int = 0
    betas: Betas = (0.0, 0.0)

    def after(self, step: int, betas: Betas) -> "Running":
        """After another call of the kernel."""
        if betas != self.betas:
            return Running(step, step, betas)
        if step == self.step:
            return self
        return Running(self.since if step == self.step + 1 else step, step, betas)

    @property
    def unfelt(self) -> bool:
        """Whether both are so small that corrections no longer depend on them, nor do those of any later step."""
        return all(abs(beta) ** self.step < UNFELT for beta in self.betas)


class BetaPowers:
    """The powers of one kernel, watched and brought back.

    Args:
        call: one step of the kernel on tensors without elements, with this step count and these betas.

    Attributes:
        running: as of the last call that the kernel got.
    """

    def __init__(self, call: Callable[[int, float, float], None]) -> None:
        self._call = call
        self.running = Running()

    def saved(self) -> dict[str, Any]:
        """As plain data, for `restore`."""
        return asdict(self.running)

    def restore(self, saved: dict[str, Any] | None) -> None:
        """Give the kernel the powers that were saved; None for those of a kernel that has taken no step.

        Takes one call of the kernel for each step since `pow`, while the powers can be felt: with a beta of 0.999 about
        20,000 calls at most.
        """
        self._bring_to(Running() if saved is None else Running(saved["since"], saved["step"], tuple(saved["betas"])))

    def seen(self, step: int, betas: tuple[Any, ...]) -> None:
        """The kernel was called."""
        self.running = self.running.after(step, _as_float32(betas))

    def advance(self, calls: Iterable[tuple[int, tuple[Any, ...]]]) -> None:
        """As if the kernel had been called with these step counts and betas, one after the other."""
        running = self.running
        for step, betas in calls:
            running = running.after(step, _as_float32(betas))
        self._bring_to(running)

    def _bring_to(self, wanted: Running) -> None:
        if not wanted.unfelt:
            self._call(0, 0.0, 0.0)  # no betas of a job: `pow` follows, also where the kernel stands at this step
            for step in range(wanted.since, wanted.step + 1):
                self._call(step, *wanted.betas)
        self.running = wanted


def keeps_powers(optimizer: torch.optim.Optimizer) -> bool:
    """Whether this is one of DeepSpeed's optimizers with a kernel for processors; FusedAdam has others for GPUs."""
    kind = _kind(optimizer)
    return kind == CPU_ADAM or (kind == FUSED_ADAM and _on_processor(optimizer))


def is_fused_adam(optimizer: torch.optim.Optimizer) -> bool:
    """Whether this is DeepSpeed's FusedAdam, on any device."""
    return _kind(optimizer) == FUSED_ADAM


def watch(optimizer: torch.optim.Optimizer) -> BetaPowers | None:
    """Watch the powers of the optimizer's kernel from now on; None where it keeps none.

    All FusedAdams of a process share one kernel for each kind of weight decay, and so its powers. Steps that the
    optimizer has taken unwatched count as one run from the first step on, and the kernel is brought to its powers.
    """
    if not keeps_powers(optimizer):
        return None
    attribute = HANDLES[_kind(optimizer)]
    handle = getattr(optimizer, attribute)
    if isinstance(handle, _Watched | _WatchedFused):
        return handle.powers
    taken = [entry["step"] for entry in optimizer.state.values() if isinstance(entry, dict) and "step" in entry]
    watched: _Watched | _WatchedFused = (
        _Watched(handle, optimizer) if _kind(optimizer) == CPU_ADAM else _WatchedFused(handle, optimizer)
    )
    setattr(optimizer, attribute, watched)
    if any(taken):
        betas = _as_float32(optimizer.param_groups[-1]["betas"])
        watched.powers.restore(asdict(Running(0, int(taken[-1]), betas)))
    return watched.powers


def saved_powers(optimizers: Sequence[torch.optim.Optimizer]) -> list[dict[str, Any] | None] | None:
    """Of each optimizer, as plain data; None where none of them keeps any."""
    found = [watch(one) for one in optimizers]
    return [None if one is None else one.saved() for one in found] if any(found) else None


def restore_powers(optimizers: Sequence[torch.optim.Optimizer], saved: Sequence[dict[str, Any] | None] | None) -> None:
    """Put `saved_powers` back. Kernels of which nothing was saved compute theirs anew in the next step."""
    for optimizer, one in zip(optimizers, saved or [None] * len(optimizers), strict=True):
        if (powers := watch(optimizer)) is not None:
            powers.restore(one)


def advance_powers(counted: Sequence[tuple[torch.optim.Optimizer, Any, float, int]], iterations: int) -> None:
    """As if the optimizers had taken more steps.

    Args:
        counted: in the order of a step, of each tensor with a step count: its optimizer, its betas, the count before,
            and by how much a step raises it.
        iterations: how many steps.
    """
    watched = [(powers, *rest) for optimizer, *rest in counted if (powers := watch(optimizer)) is not None]
    for kernel in {id(powers): powers for powers, *_ in watched}.values():
        own = [rest for powers, *rest in watched if powers is kernel]
        kernel.advance(
            (int(count) + iteration * rise + 1 + of_step, betas)
            for iteration in range(iterations)
            for betas, count, rise in own
            for of_step in range(rise)
        )


def without_kernel(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Attributes for a copy of the optimizer, with which its steps leave the kernel and its powers alone."""
    if not keeps_powers(optimizer):
        return {}
    return {HANDLES[_kind(optimizer)]: _NoKernel()}


class _Watched:
    """The kernel of one DeepSpeedCPUAdam, which has powers of its own."""

    def __init__(self, kernel: Any, optimizer: Any) -> None:
        self._kernel = kernel
        number, (values, gradient, first, second) = optimizer.opt_id, _nothing()

        def call(step: int, beta1: float, beta2: float) -> None:
            kernel.adam_update(number, step, 0.0, beta1, beta2, 1.0, 0.0, False, values, gradient, first, second)

        self.powers = BetaPowers(call)
        self.powers.seen(0, optimizer.defaults["betas"])

    def adam_update(self, number: int, step: int, rate: float, beta1: float, beta2: float, *rest: Any) -> Any:
        result = self._kernel.adam_update(number, step, rate, beta1, beta2, *rest)
        self.powers.seen(step, (beta1, beta2))
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernel, name)


_SHARED: dict[tuple[Any, int], BetaPowers] = {}  # by kernel and kind of weight decay


class _WatchedFused:
    """The kernel of all FusedAdams with one kind of weight decay."""

    def __init__(self, kernel: Any, optimizer: Any) -> None:
        self._kernel = kernel
        unused, mode, (values, gradient, first, second) = (
            optimizer._dummy_overflow_buf,
            optimizer.adam_w_mode,
            _nothing(),
        )

        def call(step: int, beta1: float, beta2: float) -> None:
            lists = [[gradient], [values], [first], [second]]
            kernel(1, unused, lists, 0.0, beta1, beta2, 1.0, step, mode, 0, 0.0)

        self.powers = _SHARED.setdefault((kernel, mode), BetaPowers(call))

    def __call__(
        self,
        chunk: int,
        unused: Any,
        lists: Any,
        rate: float,
        beta1: float,
        beta2: float,
        eps: float,
        step: int,
        *rest: Any,
    ) -> Any:
        result = self._kernel(chunk, unused, lists, rate, beta1, beta2, eps, step, *rest)
        self.powers.seen(step, (beta1, beta2))
        return result


class _NoKernel:
    """Stands in for either kernel, and computes nothing."""

    def __call__(self, *_: Any) -> None:
        pass

    def adam_update(self, *_: Any) -> None:
        pass


def _kind(optimizer: torch.optim.Optimizer) -> tuple[str, str]:
    """Which of the two it is, or a subclass of; else its own names."""
    names = [(kind.__module__, kind.__name__) for kind in type(optimizer).__mro__]
    return next((name for name in names if name in HANDLES), names[0])


def _on_processor(optimizer: torch.optim.Optimizer) -> bool:
    """By the buffer that FusedAdam makes on its device: ZeRO may have emptied its groups."""
    unused: torch.Tensor = optimizer._dummy_overflow_buf  # type: ignore[attr-defined]
    return unused.device.type == "cpu"


def _nothing() -> tuple[torch.Tensor, ...]:
    """Of weights, gradient and moments: with one element each the kernel would start its threads."""
    return tuple(torch.zeros(0, device="cpu") for _ in range(4))


def _as_float32(betas: tuple[Any, ...]) -> Betas:
    """As the kernel takes them."""
    return ctypes.c_float(float(betas[0])).value, ctypes.c_float(float(betas[1])).value
