from pathlib import Path
from typing import Any

import pytest
import torch

from cpsr.errors import UnsupportedEngineError
from cpsr.export.universal import write_universal
from cpsr.export.whole_checkpoint import open_whole
from tests.export import made
from tests.export.made import operator, shard, write_checkpoint, write_identity


def write(run_dir: Path, out: Path) -> list[str]:
    out.mkdir()
    return write_universal(open_whole(run_dir, None), out)


def test_deepspeeds_adams_keep_their_steps_as_a_number(tmp_path: Path) -> None:
    for optimizer, kind in (("AdamW", torch.Tensor), ("FusedAdam", int), ("DeepSpeedCPUAdam", int)):
        run_dir, out = tmp_path / optimizer, tmp_path / f"{optimizer}-universal"
        write_identity(run_dir, optimizer=optimizer, precision="fp16")
        write_checkpoint(run_dir, shard(operator("w", torch.ones(4), (2, 2)), seen=torch.ones(())))
        lines = write(run_dir, out)
        found = torch.load(out / "global_step50_universal" / "zero" / "w" / "step.pt", weights_only=True)
        assert isinstance(found, kind)
        assert float(found) == 50
        assert (out / "latest_universal").read_text() == "global_step50_universal"
        assert any("loss scale" in line for line in lines)
        assert any("outside_optimizer" in line for line in lines)


def test_what_the_format_cannot_hold_is_refused(tmp_path: Path) -> None:
    write_identity(tmp_path / "torch", engine="torch")
    write_checkpoint(tmp_path / "torch", shard(operator("w", torch.ones(4), (4,))))
    with pytest.raises(UnsupportedEngineError, match="plain torch run"):
        write(tmp_path / "torch", tmp_path / "out")
    for moments in (["momentum_buffer"], ["exp_avg", "exp_avg_sq", "max_exp_avg_sq"]):
        run_dir = tmp_path / moments[0]
        write_identity(run_dir, optimizer="SGD")
        write_checkpoint(run_dir, shard(operator("w", torch.ones(4), (4,), moments=moments)))
        with pytest.raises(UnsupportedEngineError, match=f"{moments[-1]}.*safetensors is possible"):
            write(run_dir, tmp_path / f"out-{moments[0]}")


def test_one_step_count_for_all_that_was_updated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_identity(tmp_path)
    for number, (steps, accepted) in enumerate({(50.0, 0.0): True, (50.0, 49.0): False}.items()):
        engine: dict[str, Any] = {**made.SCALARS["engine"], "optimizer_steps": [{"step": step} for step in steps]}
        monkeypatch.setitem(made.SCALARS, "engine", engine)
        write_checkpoint(tmp_path, shard(operator("w", torch.ones(4), (4,))), iteration=number)
        if accepted:
            write(tmp_path, tmp_path / "out")
        else:
            with pytest.raises(UnsupportedEngineError, match=r"different numbers of steps \(\['49.0', '50.0'\]\)"):
                write(tmp_path, tmp_path / "refused")


def test_several_parameter_groups_are_kept_from_zero_3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed 0.19.8 would train all of them with the settings of the first."""
    write_identity(tmp_path)
    for groups in (1, 2):
        engine = {**made.SCALARS["engine"], "param_groups": [{"lr": 0.1}] * groups}
        monkeypatch.setitem(made.SCALARS, "engine", engine)
        write_checkpoint(tmp_path, shard(operator("w", torch.ones(4), (4,))), iteration=groups)
        lines = write(tmp_path, tmp_path / f"out-{groups}")
        folder = tmp_path / f"out-{groups}" / f"global_step{groups}_universal"
        stage_3 = folder / "zero_pp_rank_0_mp_rank_00_model_states.pt"
        assert stage_3.exists() == (groups == 1)
        assert any("not at ZeRO-3" in line for line in lines) == (groups > 1)
