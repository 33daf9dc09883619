"""The demo end to end at its shortest, the parts of a restart, and how its ranks join on GPUs and without."""

import json
import textwrap
from pathlib import Path

import pytest

from cpsr.demo.device import rank_environment
from cpsr.demo.main import run_demo
from cpsr.demo.timeline import restart_parts
from cpsr.journal import RecoveryRow
from tests.two_ranks import run

RECOVERY = RecoveryRow(
    id="a",
    life=1,
    failure_iteration=442,
    checkpoint_iteration=400,
    restored_iteration=442,
    method="line",
    requested_mode="predict",
    load_seconds=0.03,
    predict_seconds=0.25,
    inject_seconds=0.12,
)
REACHED = {
    "started": 101.5,
    "frameworks": 104.0,
    "cpsr": 104.5,
    "job": 106.0,
    "opened": 107.0,
    "evaluated": 107.25,
    "stepped": 107.75,
}
# The GPU is a stand-in where there is none: what is asked is how the ranks join, and the groups that they make then.
JOIN = textwrap.dedent(
    """
    import json, os, sys
    import deepspeed, torch
    import torch.distributed as dist
    from cpsr.demo.device import join_ranks
    gpus = {gpus}
    if gpus:
        deepspeed.accelerator.get_accelerator().device_name = lambda index=None: "cuda"
        torch.cuda.device_count = lambda: gpus
    os.environ["LOCAL_RANK"] = os.environ["RANK"]
    join_ranks()
    ones = torch.ones(1)
    dist.all_reduce(ones)
    for rank in range(2):
        deepspeed.comm.new_group([rank])  # as DeepSpeed makes them; in a group that is bound to a GPU gloo fails here
    found = [dist.get_backend(), os.environ["LOCAL_RANK"], ones.item(), deepspeed.comm.get_world_size()]
    json.dump(found, open(sys.argv[1] + f".{{dist.get_rank()}}", "w"))
    dist.destroy_process_group()
    """
)


@pytest.mark.slow
def test_the_way_from_the_kill_to_the_first_step_is_timed_part_by_part(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_demo(tmp_path, iterations=400)
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["recovery"]["failure_iteration"] == 192
    parts = result["restart_parts"]
    assert result["restart_seconds"] == pytest.approx(sum(part["seconds"] for part in parts))
    assert result["restart_ours_seconds"] == pytest.approx(sum(part["seconds"] for part in parts if part["ours"]))
    assert 0 < result["restart_ours_seconds"] < result["restart_seconds"]
    assert all(part["seconds"] >= 0 for part in parts)
    assert len(parts) == 11  # rank 0 noted the end of its life: rank 1 was killed
    assert (tmp_path / "loss.png").stat().st_size > 0
    assert "from the kill to the first new step" in capsys.readouterr().out


def test_the_parts_follow_each_other_from_the_kill_to_the_first_step() -> None:
    found = restart_parts(100.0, 100.25, REACHED, RECOVERY)
    assert sum(part.seconds for part in found) == pytest.approx(7.75)
    assert sum(part.seconds for part in found if part.ours) == pytest.approx(0.25 + 0.5 + 1.0)
    unnoted = restart_parts(100.0, None, REACHED, RECOVERY)
    assert sum(part.seconds for part in unnoted) == pytest.approx(7.75)
    assert len(unnoted) == len(found) - 1


def test_ranks_on_the_cpu_see_no_gpu() -> None:
    assert rank_environment("cpu") == {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    assert rank_environment("cuda") == {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cuda"}


@pytest.mark.parametrize(("gpus", "numbers"), [(0, ["0", "1"]), (1, ["0", "0"])])
def test_two_ranks_join_on_the_cpu_and_where_they_share_a_gpu(tmp_path: Path, gpus: int, numbers: list[str]) -> None:
    found = run(JOIN.format(gpus=gpus), tmp_path)
    assert list(found) == [["gloo", number, 2.0, 2] for number in numbers]
