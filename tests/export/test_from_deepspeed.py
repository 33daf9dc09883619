"""What is no whole checkpoint of DeepSpeed, or holds what cannot be imported, is refused by name."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from cpsr.errors import CheckpointError, UnsupportedEngineError
from cpsr.export.from_deepspeed import read_deepspeed
from cpsr.export.from_universal import read_universal

COUNTERS = {"global_steps": 4, "global_samples": 8, "skipped_steps": 0}
OPTIMIZER = "zero_pp_rank_{}_mp_rank_00_optim_states.pt"
MODEL = "mp_rank_00_model_states.pt"


def change(path: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    content = torch.load(path, weights_only=False)
    edit(content)
    torch.save(content, path)


def native(folder: Path) -> Path:
    """One parameter of five elements, of which two ranks have three and two; a buffer."""
    from deepspeed.utils.tensor_fragment import fragment_address

    folder.mkdir()
    whole = torch.arange(5.0)
    shapes = [{"w": torch.Size([5])}]
    common = {"module": {"w": whole, "seen": torch.ones(())}, "buffer_names": ["seen"], "param_shapes": shapes}
    torch.save({**common, **COUNTERS, "dp_world_size": 2, "lr_scheduler": None}, folder / MODEL)
    for rank, flat in enumerate((whole[:3], whole[3:])):
        state = {"step": torch.tensor(4.0), "exp_avg": flat + 1, "exp_avg_sq": flat + 2}
        optimizer = {
            "base_optimizer_state": {"state": {0: state}, "param_groups": [{"lr": 0.1, "params": [0]}]},
            "single_partition_of_fp32_groups": [flat],
            "param_slice_mappings": [{"w": fragment_address(numel=flat.numel(), start=0)}],
        }
        torch.save({"optimizer_state_dict": optimizer}, folder / OPTIMIZER.format(rank))
    return folder


def universal(folder: Path) -> Path:
    (folder / "tag" / "zero" / "w").mkdir(parents=True)
    (folder / "latest_universal").write_text("tag")
    torch.save({**COUNTERS, "param_shapes": [{"w": torch.Size([5])}]}, folder / "tag" / MODEL)
    torch.save({"param_groups": [{"lr": 0.1, "params": [0]}]}, folder / "tag" / "zero" / "optimizer_state.pt")
    for name in ("fp32", "exp_avg", "exp_avg_sq"):
        torch.save(torch.arange(5.0), folder / "tag" / "zero" / "w" / f"{name}.pt")  # as at ZeRO-3
    torch.save(torch.tensor(4.0), folder / "tag" / "zero" / "w" / "step.pt")
    return folder


def test_parts_are_put_together(tmp_path: Path) -> None:
    for found in (read_deepspeed(native(tmp_path / "native")), read_universal(universal(tmp_path / "universal"))):
        assert found.parameters["w"].weights.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
        assert found.parameters["w"].numbers == {"step": 4.0}
        assert (found.iteration, found.groups, found.group_of) == (4, [{"lr": 0.1}], {"w": 0})
    assert read_deepspeed(tmp_path / "native").parameters["w"].moments["exp_avg_sq"].tolist() == [2, 3, 4, 5, 6]
    assert list(read_deepspeed(tmp_path / "native").outside) == ["seen"]


def without_mappings(content: dict[str, Any]) -> None:
    del content["optimizer_state_dict"]["param_slice_mappings"]


def shorter(content: dict[str, Any]) -> None:
    content["optimizer_state_dict"]["single_partition_of_fp32_groups"][0] = torch.zeros(1)


def later(content: dict[str, Any]) -> None:
    content["optimizer_state_dict"]["base_optimizer_state"]["state"][0]["step"] = torch.tensor(5.0)


@pytest.mark.parametrize(
    ("file", "edit", "message"),
    [
        (OPTIMIZER.format(1), without_mappings, "does not tell where parameters lie"),
        (OPTIMIZER.format(1), shorter, "hold 4 elements of fp32 of w"),
        (OPTIMIZER.format(1), later, "keep different state for w"),
        (OPTIMIZER.format(0), dict.clear, "holds no optimizer_state_dict"),
        (MODEL, lambda content: content.update(dp_world_size=3), "saved by 3 ranks and holds the files of ranks"),
        (MODEL, lambda content: content.update(param_shapes=None), "save at ZeRO 1"),
        (MODEL, lambda content: content.pop("global_steps"), "is no file of DeepSpeed's engine"),
    ],
)
def test_what_is_not_whole_is_refused(
    tmp_path: Path, file: str, edit: Callable[[dict[str, Any]], Any], message: str
) -> None:
    source = native(tmp_path / "native")
    change(source / file, edit)
    with pytest.raises((CheckpointError, UnsupportedEngineError), match=message):
        read_deepspeed(source)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("layer_00-model_states.pt", "pipeline or a mixture of experts"),
        ("mp_rank_01_model_states.pt", "tensor parallelism"),
        ("zero_pp_rank_x_mp_rank_00_optim_states.pt", "has no rank in its name"),
    ],
)
def test_files_of_other_layouts_are_refused(tmp_path: Path, name: str, message: str) -> None:
    source = native(tmp_path / "native")
    (source / name).touch()
    with pytest.raises((CheckpointError, UnsupportedEngineError), match=message):
        read_deepspeed(source)


def test_a_universal_checkpoint_that_is_not_whole_is_refused(tmp_path: Path) -> None:
    source = universal(tmp_path / "universal")
    torch.save(torch.ones(3), source / "tag" / "zero" / "w" / "exp_avg.pt")
    with pytest.raises(CheckpointError, match=r"exp_avg.pt has 3 elements"):
        read_universal(source)
    for path in (source / "tag" / "zero" / "w").glob("exp*"):
        path.unlink()
    with pytest.raises(UnsupportedEngineError, match="holds no optimizer state for w"):
        read_universal(source)
    (source / "latest_universal").write_text("../elsewhere")
    with pytest.raises(CheckpointError, match="which is no folder in"):
        read_universal(source)
