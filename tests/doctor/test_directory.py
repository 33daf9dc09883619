"""What is known of a run directory without writing."""

from pathlib import Path
from typing import Any

import pytest

from cpsr.config import CPSRConfig
from cpsr.doctor.directory import check_file_system, check_files_left, check_space
from cpsr.doctor.needs import Launched, Needs
from tests.doctor.mounts import mounted

IMPORT = "from cpsr.doctor.directory import *\n"


def needs(run_dir: Path, state_bytes: int | None = None, ranks: int = 1, **settings: Any) -> Needs:
    return Needs(CPSRConfig.load({"run_dir": run_dir, **settings}), Launched(ranks, ranks), state_bytes)


@pytest.mark.parametrize(
    ("kind", "level", "says"),
    [
        ("ext4", "ok", "uses WAL"),
        ("xfs", "ok", "uses WAL"),
        ("nfs4", "ok", "does without WAL"),
        ("lustre", "ok", "does without WAL"),
        ("fuse.s3fs", "warning", "checkpoint.target"),
        ("overlay", "warning", "container"),
        ("tmpfs", "warning", "loses every checkpoint"),
    ],
)
def test_the_kind_implies_what_becomes_of_checkpoints_and_journal(kind: str, level: str, says: str) -> None:
    found = check_file_system(Path("runs/a"), kind)
    assert found.level == level
    assert says in found.sentence


def test_memory_in_the_place_of_a_disk_is_seen_where_nothing_is_made_yet(tmp_path: Path) -> None:
    (found,) = mounted(tmp_path, "size=1m", IMPORT + "show(check_file_system(place / 'runs' / 'new'))")
    assert (found["level"], found["figures"]["kind"]) == ("warning", "tmpfs")


def test_space_is_compared_with_the_checkpoints(tmp_path: Path) -> None:
    run_dir = tmp_path / "not" / "made"
    assert "not compared" in check_space(needs(run_dir)).measured
    assert check_space(needs(run_dir, 1000)).level == "ok"
    found = check_space(needs(run_dir, 1 << 50))
    assert found.level == "error"
    assert "checkpoint.disk_limit_bytes" in found.advice


def test_where_it_depends_on_what_ranks_hold_it_is_a_warning(tmp_path: Path) -> None:
    script = IMPORT + "show(check_space(needs(1_000_000, 32, 8)), check_space(needs(1_000_000, 2, 2)))"
    depends, fits = mounted(tmp_path, "size=32m", script)
    assert depends["level"] == "warning"
    assert "too little for the latter" in depends["advice"]
    assert fits["level"] == "ok"


def test_checkpoints_of_an_earlier_life_count_as_room(tmp_path: Path) -> None:
    script = IMPORT + (
        "(place / 'checkpoints').mkdir()\n"
        "(place / 'checkpoints' / 'old').write_bytes(bytes(20_000_000))\n"
        "show(check_space(needs(3_000_000)))"
    )
    (found,) = mounted(tmp_path, "size=32m", script)
    assert found["level"] == "ok"
    assert "20 MB hold the run's checkpoints" in found["measured"]


def test_inodes_are_compared_with_the_files(tmp_path: Path) -> None:
    script = IMPORT + "show(check_files_left(needs()), check_files_left(needs(None, 64, 8)))"
    few, many = mounted(tmp_path, "size=32m,nr_inodes=300", script)
    assert few["level"] == "ok"
    assert many["level"] == "warning"
    assert "want of inodes" in many["advice"]
    assert check_files_left(needs(tmp_path)).level == "ok"
