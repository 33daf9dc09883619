"""DeepSpeed's Adam kernels for processors: every step computes the powers of the betas anew.

A kernel keeps one pair of powers between steps, whatever it updates. In the step after the last one it multiplies them
by the betas; after any other step, or with other betas, it computes them with `pow` (`IncrementStep` in
`csrc/includes/cpu_adam.h`). The two differ in their last bits, so a fresh kernel would not go on bit for bit. Here each
step begins with a call for other betas on tensors without elements, and the powers depend on the step count alone.
"""

from typing import Any

import torch

__all__ = ["is_fused_adam", "renew_powers"]

# By name, since importing them may build their kernels, for minutes.
CPU_ADAM = ("deepspeed.ops.adam.cpu_adam", "DeepSpeedCPUAdam")
FUSED_ADAM = ("deepspeed.ops.adam.fused_adam", "FusedAdam")
_RENEWED = "_cpsr_renews_powers"  # attribute of an optimizer with the hook


def renew_powers(optimizer: torch.optim.Optimizer) -> None:
    """Let every step of the optimizer compute the powers of its betas anew; nothing where its kernel keeps none.

    All FusedAdams of a process share a kernel. So each step begins with its own call, whoever stepped before.
    """
    if not _keeps_powers(optimizer) or hasattr(optimizer, _RENEWED):
        return
    setattr(optimizer, _RENEWED, True)
    values, gradient, first, second = (torch.zeros(0, device="cpu") for _ in range(4))

    def before_step(*_: Any) -> None:
        kept: Any = optimizer
        if _kind(optimizer) == CPU_ADAM:
            kernel, number = kept.ds_opt_adam, kept.opt_id
            kernel.adam_update(number, 0, 0.0, 0.0, 0.0, 1.0, 0.0, False, values, gradient, first, second)
        else:
            lists = [[gradient], [values], [first], [second]]
            kept.multi_tensor_adam(1, kept._dummy_overflow_buf, lists, 0.0, 0.0, 0.0, 1.0, 0, kept.adam_w_mode, 0, 0.0)

    optimizer.register_step_pre_hook(before_step)


def is_fused_adam(optimizer: torch.optim.Optimizer) -> bool:
    """Whether this is DeepSpeed's FusedAdam, on any device."""
    return _kind(optimizer) == FUSED_ADAM


def _keeps_powers(optimizer: torch.optim.Optimizer) -> bool:
    """Whether this has a kernel for processors; FusedAdam has others for GPUs."""
    kind = _kind(optimizer)
    # By the buffer that FusedAdam makes on its device: ZeRO may have emptied its groups.
    return kind == CPU_ADAM or (kind == FUSED_ADAM and optimizer._dummy_overflow_buf.device.type == "cpu")  # type: ignore[attr-defined]


def _kind(optimizer: torch.optim.Optimizer) -> tuple[str, str]:
    """Which of the two it is, or a subclass of; else its own names."""
    names = [(kind.__module__, kind.__name__) for kind in type(optimizer).__mro__]
    return next((name for name in names if name in (CPU_ADAM, FUSED_ADAM)), names[0])
