"""The per-tensor state of a torch optimizer: found, created before the first step, and its scalars."""

import math
from typing import Any

import torch

from cpsr.engines.sharded import local
from cpsr.errors import UnsupportedEngineError
from cpsr.state.codec import encode
from cpsr.state.device_values import DeviceValues, number

__all__ = [
    "advance_steps",
    "as_new",
    "create_absent",
    "flat_view",
    "hyperparameters",
    "keeps_state_in_kernel",
    "learning_rate",
    "load_hyperparameters",
    "load_step_scalars",
    "moments",
    "second_moment_decay",
    "step_scalars",
]

# Optimizers whose lazily created state is known here: they start from zeros, so that creating them early changes
# nothing. Exact classes: a subclass may keep more.
_ADAM = (torch.optim.Adam, torch.optim.AdamW)
_SGD = torch.optim.SGD
# DeepSpeed's own, by name, since importing them would build their kernels. The CPU kernels of both keep running
# powers of the betas between steps and recompute them after a jump: close, but not bit for bit.
_FUSED_ADAM = ("deepspeed.ops.adam.fused_adam", "FusedAdam")
_CPU_ADAM = ("deepspeed.ops.adam.cpu_adam", "DeepSpeedCPUAdam")


def flat_view(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """1-D view of a dense tensor in the order of its memory (so also of `channels_last` tensors).

    Of a distributed tensor it is a view of this rank's part.

    Raises:
        UnsupportedEngineError: the tensor's elements do not fill one block of memory (an expanded or strided view).
    """
    tensor = local(tensor)
    if tensor.is_contiguous():
        return tensor.view(-1)
    if not torch.ops.aten.is_non_overlapping_and_dense(tensor):
        raise UnsupportedEngineError(
            f"{name} of shape {tuple(tensor.shape)} has strides {tensor.stride()}: not one block of memory, so it has "
            "no zero-copy view; make it contiguous before building the optimizer"
        )
    return tensor.as_strided((tensor.numel(),), (1,))


def moments(optimizer: torch.optim.Optimizer, group: dict[str, Any], master: torch.Tensor) -> dict[str, torch.Tensor]:
    """The optimizer's tensors for `master`, created where they are still absent.

    Args:
        optimizer: the torch optimizer that updates `master`.
        group: the parameter group of `master`.
        master: the tensor the optimizer updates.

    Returns:
        Tensors of the shape and memory order of `master`, by the optimizer's own key.

    Raises:
        UnsupportedEngineError: an optimizer that is not known here, or state that is not per element.
    """
    create_absent(optimizer, group, master)
    state = optimizer.state[master]
    found = {}
    for key, value in state.items():
        if not isinstance(value, torch.Tensor) or value.dim() == 0:
            continue
        if value.shape != master.shape or local(value).shape != local(master).shape:
            raise UnsupportedEngineError(
                f"optimizer {type(optimizer).__name__} keeps {key} of shape {tuple(value.shape)} for a tensor of shape "
                f"{tuple(master.shape)}; only per-element state can be snapshotted. Use Adam, AdamW or SGD"
            )
        if _memory_order(local(value)) != _memory_order(local(master)):
            # Same values in the parameter's own order: a flat copy of one must fit the other's fresh counterpart.
            value = torch.empty_like(master, dtype=value.dtype).copy_(value).detach()
            state[key] = value
        found[key] = value
    return found


def create_absent(optimizer: torch.optim.Optimizer, group: dict[str, Any], master: torch.Tensor) -> None:
    """Create the optimizer's state for `master` where it has none yet, as its first step would.

    Raises:
        UnsupportedEngineError: an optimizer that is not known here.
    """
    kind, state = type(optimizer), optimizer.state[master]
    if kind in _ADAM:
        if "step" not in state:
            on_device = group.get("capturable") or group.get("fused")
            double = torch.get_default_dtype() == torch.float64 and not group.get("fused")
            dtype = torch.float64 if double else torch.float32
            state["step"] = torch.zeros((), dtype=dtype, device=master.device if on_device else "cpu")
        keys = ["exp_avg", "exp_avg_sq"] + (["max_exp_avg_sq"] if group.get("amsgrad") else [])
    elif kind is _SGD:
        if group["momentum"] and group["dampening"]:
            raise UnsupportedEngineError(
                "SGD with dampening treats its first step apart and does not record whether it has been taken; "
                "use dampening=0"
            )
        keys = ["momentum_buffer"] if group["momentum"] else []
    elif keeps_state_in_kernel(optimizer, master.device):
        raise UnsupportedEngineError(
            f"the CPU kernel of {kind.__name__} keeps state of its own that cannot be restored; pass a "
            "torch.optim.AdamW to deepspeed.initialize as its optimizer"
        )
    elif _name(kind) == _FUSED_ADAM:
        state.setdefault("step", group.get("step", 0))
        keys = ["exp_avg", "exp_avg_sq"]
    else:
        raise UnsupportedEngineError(
            f"CPSR does not know how optimizer {kind.__module__}.{kind.__name__} creates its state, so it could not "
            "restore it into a fresh one; use torch.optim.Adam, AdamW or SGD itself, not a subclass"
        )
    for key in keys:
        if state.get(key) is None:
            state[key] = torch.zeros_like(master, memory_format=torch.preserve_format).detach()


def keeps_state_in_kernel(optimizer: torch.optim.Optimizer, device: torch.device) -> bool:
    """Whether this is one of DeepSpeed's optimizers whose kernel for processors keeps state of its own."""
    name = _name(type(optimizer))
    return name == _CPU_ADAM or (name == _FUSED_ADAM and device.type == "cpu")


def _name(kind: type) -> tuple[str, str]:
    return kind.__module__, kind.__name__


def _memory_order(tensor: torch.Tensor) -> tuple[int, ...]:
    """Strides of the dimensions that matter for the order of the elements."""
    return tuple(stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1)


def step_scalars(
    optimizer: torch.optim.Optimizer, masters: list[torch.Tensor], *, on_device: bool = False
) -> list[dict[str, Any]]:
    """The numbers the optimizer keeps beside its tensors (`step`), for each master in order.

    Args:
        optimizer: fused and capturable ones keep them on the device.
        masters: the tensors it updates.
        on_device: leave those of a CUDA device there, as `DeviceNumber`s.

    Raises:
        UnsupportedEngineError: something that is neither a number nor a tensor.
    """
    scalars: list[dict[str, Any]] = []
    for master in masters:
        numbers: dict[str, Any] = {}
        for key, value in optimizer.state[master].items():
            if isinstance(value, torch.Tensor):  # first: this runs at every step of a GPU
                if value.dim() == 0:
                    numbers[key] = number(value, on_device=on_device)
            elif isinstance(value, (int, float)):
                numbers[key] = value
            elif value is not None:
                raise UnsupportedEngineError(
                    f"optimizer {type(optimizer).__name__} keeps {key}: {type(value).__name__}, which is neither a "
                    "number nor a tensor"
                )
        # One object for what is alike, as step counts are: it is then encoded once.
        scalars.append(scalars[-1] if scalars and numbers == scalars[-1] else numbers)
    return scalars


def load_step_scalars(
    optimizer: torch.optim.Optimizer, masters: list[torch.Tensor], scalars: list[dict[str, Any]]
) -> None:
    """Put `step_scalars()` back into state that exists already (see `moments`).

    Raises:
        UnsupportedEngineError: another number of tensors than were saved.
    """
    if len(scalars) != len(masters):
        raise UnsupportedEngineError(
            f"the saved optimizer state covers {len(scalars)} tensors and this optimizer updates {len(masters)}; "
            "build the engine as it was"
        )
    for master, numbers in zip(masters, scalars, strict=True):
        for key, saved in numbers.items():
            _set_number(optimizer.state[master], key, saved)


def as_new(scalars: dict[str, Any]) -> dict[str, Any]:
    """An engine's `scalars()` with the counts of an optimizer that has taken no step; the rest is as given."""
    counts = [{key: type(value)(0) for key, value in one.items()} for one in scalars["optimizer_steps"]]
    groups = [{**group, "step": 0} if "step" in group else group for group in scalars["param_groups"]]
    return {**scalars, "optimizer_steps": counts, "param_groups": groups}


def advance_steps(optimizer: torch.optim.Optimizer, masters: list[torch.Tensor], iterations: int) -> None:
    """Add to every step count what `iterations` steps add.

    A tensor that has never been updated stays at zero while others moved.
    """
    counts = [float(optimizer.state[master].get("step", 0)) for master in masters]
    moved = any(counts)
    rises = _fused_rises(optimizer) if _name(type(optimizer)) == _FUSED_ADAM else {}
    for master, count in zip(masters, counts, strict=True):
        state = optimizer.state[master]
        if "step" in state and (count or not moved):
            _set_number(state, "step", state["step"] + iterations * rises.get(id(master), 1))


def _fused_rises(optimizer: torch.optim.Optimizer) -> dict[int, int]:
    """By how much a step of FusedAdam raises the count of each parameter, by the parameter's id.

    It keeps one count for a group, in the last parameter that has a gradient, and raises it once for every dtype in the
    group. Which parameters have gradients is seen from the counts so far: the largest one is the group's.
    """
    rises: dict[int, int] = {}
    for group in optimizer.param_groups:
        parameters = group["params"]  # none under ZeRO-3, which steps its masters one by one
        rises |= {id(parameter): 0 for parameter in parameters}
        if parameters:
            counting = max(reversed(parameters), key=lambda parameter: optimizer.state[parameter].get("step", 0))
            rises[id(counting)] = len({parameter.dtype for parameter in parameters})
    return rises


def _set_number(state: dict[str, Any], key: str, value: Any) -> None:
    current = state.get(key)
    if isinstance(current, torch.Tensor):
        current.fill_(value.item() if isinstance(value, torch.Tensor) else value)
    else:
        state[key] = value


def hyperparameters(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Everything in the parameter groups but the parameters: learning rates, betas, what schedulers put there.

    Raises:
        UnsupportedEngineError: a value that is not plain data; the message names it.
    """
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    encode(groups, f"optimizer({type(optimizer).__name__}).param_groups", DeviceValues())  # waits for no device
    return [
        {key: value.detach().clone() if isinstance(value, torch.Tensor) else value for key, value in group.items()}
        for group in groups
    ]


def load_hyperparameters(optimizer: torch.optim.Optimizer, saved: list[dict[str, Any]]) -> None:
    """Put `hyperparameters()` back.

    Raises:
        UnsupportedEngineError: another number of groups than were saved.
    """
    if len(saved) != len(optimizer.param_groups):
        raise UnsupportedEngineError(
            f"the saved optimizer has {len(saved)} parameter groups and this one {len(optimizer.param_groups)}; "
            "build the optimizer as it was"
        )
    for group, values in zip(optimizer.param_groups, saved, strict=True):
        for key, value in values.items():
            current = group.get(key)
            if isinstance(current, torch.Tensor) and isinstance(value, torch.Tensor):
                current.copy_(value)
            else:
                group[key] = value


def second_moment_decay(optimizer: torch.optim.Optimizer) -> float:
    """The second of the first group's `betas`; 0 where it has none."""
    betas = optimizer.param_groups[0].get("betas", ())
    return float(betas[1]) if len(betas) > 1 else 0.0


def learning_rate(optimizer: torch.optim.Optimizer) -> float:
    """Mean learning rate over the parameter groups."""
    if len(optimizer.param_groups) == 1:
        return float(optimizer.param_groups[0]["lr"])
    return math.fsum(float(group["lr"]) for group in optimizer.param_groups) / len(optimizer.param_groups)
