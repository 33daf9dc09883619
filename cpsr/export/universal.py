"""A DeepSpeed universal checkpoint: one folder a parameter, loaded by any number of ranks at ZeRO 1, 2 or 3.

The layout is that of DeepSpeed 0.19.8 (`deepspeed/checkpoint/ds_to_universal.py`, and the engine's loading)::

    <out>/latest_universal                          the tag
    <out>/<tag>/mp_rank_00_model_states.pt          counters, schedule, the module in the trained dtype
    <out>/<tag>/zero_pp_rank_0_mp_rank_00_...       the same for engines at ZeRO-3, without the weights
    <out>/<tag>/zero/optimizer_state.pt             parameter groups
    <out>/<tag>/zero/<parameter>/fp32.pt            {"param": whole tensor, "cat_dim": 0}; also of exp_avg, exp_avg_sq
    <out>/<tag>/zero/<parameter>/step.pt            the optimizer's step count

The files are pickles, because DeepSpeed reads no other; they hold tensors and plain data alone, and none is read here.

What DeepSpeed 0.19.8 makes of it is measured in `tests/export`: at ZeRO 1 and 2 the training goes on bit for bit. At
ZeRO-3 it gives every parameter group the first one's settings. All of a rank's sub-groups get the same tensor to count
their steps in, which each then increments. So nothing for ZeRO-3 is written where there are several groups, and
`sub_group_size` has to hold all parameters of a rank.
"""

from pathlib import Path
from typing import Any

import torch

from cpsr.checkpoint.files import sync_directory, sync_file
from cpsr.checkpoint.verify import DamagedFileError
from cpsr.errors import UnsupportedEngineError
from cpsr.export.whole_checkpoint import WholeState, state_dict

__all__ = ["MOMENTS", "require_universal", "write_universal"]

MOMENTS = {"exp_avg", "exp_avg_sq"}

_LAYOUT_OF = "0.19.8"  # the loader asks for the version that wrote a checkpoint
_NUMBER_STEPS = ("DeepSpeedCPUAdam", "FusedAdam")  # these keep their step count as a number, torch's own as a tensor


def require_universal(state: WholeState) -> None:
    """Refuse what the format cannot hold.

    Raises:
        UnsupportedEngineError: a run without DeepSpeed, or an optimizer that is not Adam; the message names it.
    """
    instead = "Nothing was exported; a state dict in safetensors is possible"
    if state.identity.engine == "torch":
        raise UnsupportedEngineError(
            f"a plain torch run has no DeepSpeed engine that could load its counters. {instead}"
        )
    for name in state.parameters:
        if state.moments(name).keys() != MOMENTS:
            raise UnsupportedEngineError(
                f"a universal checkpoint holds Adam's exp_avg and exp_avg_sq; {state.identity.optimizer} keeps "
                f"{sorted(state.moments(name)) or 'nothing'} for {name}. {instead}"
            )


def write_universal(state: WholeState, directory: Path) -> list[str]:
    """Write the checkpoint into an empty directory, forced to the disk.

    Args:
        state: the checkpoint, opened with its moments.
        directory: where; exists and is empty. Put in place by the caller.

    Returns:
        What was written and what was not, one line each.

    Raises:
        UnsupportedEngineError: see `require_universal`; also parameters with different step counts.
        CheckpointCorruptError: see `WholeState`.
        OSError: the file system refused.
    """
    require_universal(state)
    scalars = _engine_scalars(state)
    step = _step(state, scalars)
    tag = f"global_step{state.saved.iteration}_universal"
    folder = directory / tag
    (folder / "zero").mkdir(parents=True)
    for name in state.parameters:
        _write_parameter(state, name, step, folder / "zero" / name)
    _save(_optimizer_state(scalars, step), folder / "zero" / "optimizer_state.pt")
    sync_directory(folder / "zero")
    outside = state.outside()
    common = _model_states(state, scalars, outside)
    _save(common | {"module": state_dict(state, "trained")}, folder / "mp_rank_00_model_states.pt")
    if _fits_stage_3(scalars):
        _save(common, folder / "zero_pp_rank_0_mp_rank_00_model_states.pt")
    latest = directory / "latest_universal"
    latest.write_text(tag, encoding="ascii")
    sync_file(latest)
    for written in (folder, directory):
        sync_directory(written)
    return _said(state, scalars, outside)


def _engine_scalars(state: WholeState) -> dict[str, Any]:
    engine = state.scalars().get("engine")
    wanted = ("counters", "param_groups", "optimizer_steps", "schedule", "loss_scale")
    absent = [key for key in wanted if key not in engine] if isinstance(engine, dict) else list(wanted)
    if absent or not isinstance(engine, dict):
        raise DamagedFileError(state.saved.directory, f"its scalars lack the engine's {', '.join(absent)}")
    return engine


def _step(state: WholeState, scalars: dict[str, Any]) -> Any:
    """The step count of all parameters, as the optimizer keeps it.

    What was never updated (a frozen parameter in the optimizer's groups) has no count, and zeros for moments.
    """
    counts = {numbers.get("step") if numbers else 0 for numbers in scalars["optimizer_steps"]}
    steps = counts - {0} or counts
    if len(steps) != 1 or None in steps:
        raise UnsupportedEngineError(
            f"{state.saved.directory}: parameters have taken different numbers of steps ({sorted(map(str, steps))}), a "
            "universal checkpoint has one number for all. Nothing was exported; a state dict in safetensors is possible"
        )
    number = steps.pop()
    return int(number) if state.identity.optimizer in _NUMBER_STEPS else torch.tensor(float(number), device="cpu")


def _write_parameter(state: WholeState, name: str, step: Any, folder: Path) -> None:
    folder.mkdir()
    _save({"param": state.weights(name).float(), "cat_dim": 0}, folder / "fp32.pt")
    for moment in sorted(MOMENTS):
        _save({"param": state.moment(name, moment).float(), "cat_dim": 0}, folder / f"{moment}.pt")
    _save(step, folder / "step.pt")
    sync_directory(folder)


def _optimizer_state(scalars: dict[str, Any], step: Any) -> dict[str, Any]:
    # Clipping and loss scaling are left to the configuration that loads it.
    groups = scalars["param_groups"]
    found = {"ds_version": _LAYOUT_OF, "param_groups": groups}
    if _fits_stage_3(scalars):
        found["optimizer_state_dict"] = {"state": {0: {"step": step}}, "param_groups": groups}
    return found


def _fits_stage_3(scalars: dict[str, Any]) -> bool:
    return len(scalars["param_groups"]) == 1


def _model_states(state: WholeState, scalars: dict[str, Any], outside: dict[str, torch.Tensor]) -> dict[str, Any]:
    """What an engine reads beside the weights; unknown keys come back to the user as the client state."""
    counters = scalars["counters"]
    return {
        "module": {},
        "global_steps": counters["global_steps"],
        "global_samples": counters["global_samples"],
        "skipped_steps": counters["skipped_steps"],
        "lr_scheduler": next(iter(scalars["schedule"]), None),
        "dp_world_size": state.saved.manifest.world_size,
        "mp_world_size": 1,
        "ds_version": _LAYOUT_OF,
        "outside_optimizer": outside,
        "loss_scale": scalars["loss_scale"],
    }


def _said(state: WholeState, scalars: dict[str, Any], outside: dict[str, torch.Tensor]) -> list[str]:
    stage_3 = (
        "; at ZeRO-3 with a sub_group_size that holds all parameters of a rank"
        if _fits_stage_3(scalars)
        else ": not at ZeRO-3, where DeepSpeed would give all parameter groups the settings of the first"
    )
    lines = [
        f"{len(state.parameters)} parameters in fp32 with {', '.join(sorted(MOMENTS))} and their step count; the "
        "schedule and the counters",
        f'load it with "checkpoint": {{"load_universal": true}} in the configuration, at ZeRO 1 or 2{stage_3}',
    ]
    if outside:
        lines.append(
            f"DeepSpeed does not restore buffers and frozen parameters from this format: {len(outside)} are in the "
            'client state as "outside_optimizer"'
        )
    if state.identity.precision == "fp16":
        lines.append(
            'DeepSpeed starts with the configured loss scale; the run\'s is in the client state as "loss_scale"'
        )
    return lines


def _save(value: Any, path: Path) -> None:
    try:
        torch.save(value, path)
    except RuntimeError as error:  # what torch makes of a full disk
        raise OSError(f"{path}: {error}") from error
    sync_file(path)
