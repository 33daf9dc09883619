from pathlib import Path

import torch

from cpsr.export.command import write_state_dict
from cpsr.export.whole_checkpoint import open_whole, state_dict
from tests.export.made import operator, shard, write_checkpoint, write_identity


def test_names_are_the_modules_own(tmp_path: Path) -> None:
    write_identity(
        tmp_path, aliases={"head.w": "w", "old.seen": "seen"}, transient=["scratch"], extra=["q._extra_state"]
    )
    others = {"seen": torch.tensor(3), "scratch": torch.ones(2)}
    write_checkpoint(tmp_path, shard(operator("w", torch.arange(4.0), (2, 2)), **others))
    state = open_whole(tmp_path, None, moments=False)
    found = state_dict(state, "fp32")
    assert set(found) == {"w", "head.w", "seen", "old.seen"}
    assert torch.equal(found["head.w"], torch.arange(4.0).view(2, 2))
    assert found["seen"].dtype == torch.int64
    assert "q._extra_state" in write_state_dict(state, tmp_path / "model.safetensors", "fp32")[1]


def test_fp32_widens_and_never_narrows(tmp_path: Path) -> None:
    write_identity(tmp_path, precision="bf16", frozen={"frozen": [2]})
    others = {"frozen": torch.ones(2, dtype=torch.bfloat16), "mean": torch.ones(2, dtype=torch.float64)}
    write_checkpoint(tmp_path, shard(operator("w", torch.full((2,), 1 / 3), (2,)), **others))
    state = open_whole(tmp_path, None, moments=False)
    wide, trained = state_dict(state, "fp32"), state_dict(state, "trained")
    assert [wide[name].dtype for name in ("w", "frozen", "mean")] == [torch.float32, torch.float32, torch.float64]
    assert [trained[name].dtype for name in ("w", "frozen", "mean")] == [torch.bfloat16, torch.bfloat16, torch.float64]
    assert torch.equal(wide["w"], torch.full((2,), 1 / 3))
    assert torch.equal(trained["w"], wide["w"].bfloat16())


def test_plain_torch_is_in_its_own_dtype_already(tmp_path: Path) -> None:
    write_identity(tmp_path, engine="torch", precision="bf16")
    write_checkpoint(tmp_path, shard(operator("w", torch.full((2,), 1 / 3), (2,))))
    trained = state_dict(open_whole(tmp_path, None, moments=False), "trained")
    assert trained["w"].dtype == torch.float32  # one of several dtypes in a module whose first is bf16
