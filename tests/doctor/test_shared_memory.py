"""Shared memory of any size and kind, really mounted."""

import os
from pathlib import Path
from typing import Any

import pytest

from cpsr.checkpoint.resources import available_host_bytes
from cpsr.config import CPSRConfig
from cpsr.doctor.needs import Launched, Needs
from cpsr.doctor.shared_memory import check_host_memory, check_lifetime, check_memory_kind, check_shared_memory
from cpsr.journal.database import filesystem_of
from tests.doctor.mounts import mounted

IMPORT = "from cpsr.doctor.shared_memory import *\n"


def needs(state_bytes: int | None = None, launched: Launched | None = None, **settings: Any) -> Needs:
    return Needs(CPSRConfig.load({"run_dir": "run", **settings}), launched or Launched(), state_bytes)


def test_too_little_is_a_warning_with_the_bytes(tmp_path: Path) -> None:
    script = IMPORT + "show(*[check_shared_memory(needs(size, 2, 2), place) for size in (None, 5_000_000, 20_000_000)])"
    unknown, fits, lacks = mounted(tmp_path, "size=64m", script)
    assert unknown["level"] == "ok"
    assert "not compared" in unknown["measured"]
    assert fits["level"] == "ok"
    assert lacks["level"] == "warning"
    assert "the buffers of 2 ranks take 120 MB" in lacks["measured"]
    assert "--shm-size" in lacks["advice"]
    assert "emptyDir of medium Memory" in lacks["advice"]
    assert lacks["figures"]["total_bytes"] == 64 << 20


def test_what_replicas_lack_and_what_runs_hold_is_told(tmp_path: Path) -> None:
    script = IMPORT + ("show(check_shared_memory(needs(5_000_000, 4, 2), place))\n")
    held = f"head -c 8000000 /dev/zero > {tmp_path}/cpsr-0123-rank-00000-0"
    (found,) = mounted(tmp_path, "size=64m", script, held)
    assert found["level"] == "warning"
    assert "replicas of other machines up to 20 MB" in found["measured"]
    assert "runs of CPSR hold 8 MB of it, 0 B this one" in found["measured"]


def test_memory_that_cannot_be_written_in_is_a_warning(tmp_path: Path) -> None:
    script = IMPORT + "show(check_shared_memory(needs(), place), check_shared_memory(needs(), place / 'absent'))"
    for found in mounted(tmp_path, "size=1m,ro", script):
        assert found["level"] == "warning"
        assert "cannot be used" in found["measured"]


def test_turned_off_it_is_not_looked_at() -> None:
    found = check_shared_memory(needs(1 << 60, checkpoint={"shared_memory": False}))
    assert found.level == "ok"
    assert "turned off" in found.measured


def test_a_disk_in_the_place_of_memory_is_told(tmp_path: Path) -> None:
    (found,) = mounted(tmp_path, "size=1m", IMPORT + "show(check_memory_kind(place))")
    assert (found["level"], found["figures"]["kind"]) == ("ok", "tmpfs")
    if filesystem_of(tmp_path) != "tmpfs":
        assert check_memory_kind(tmp_path).level == "warning"


def test_the_machine_or_its_container_must_hold_the_buffers() -> None:
    assert check_host_memory(needs(1000)).level == "ok"
    found = check_host_memory(needs(1 << 50, Launched(2, 2)))
    assert found.level == "error"
    assert "refuses to start" in found.advice


def test_too_little_for_windows_is_a_warning_since_the_job_starts_without_them(tmp_path: Path) -> None:
    size = available_host_bytes() // 4  # three buffers fit, and three windows more do not
    assert check_host_memory(needs(size)).level == "ok"
    found = check_host_memory(needs(size, replay={"enabled": True}))
    assert found.level == "warning"
    assert "no windows" in found.advice
    script = IMPORT + (
        "show(*[check_shared_memory(needs(size, replay={'enabled': True}), place) for size in (5_000_000, 12_000_000)])"
    )
    fits, lacks = mounted(tmp_path, "size=64m", script)
    assert fits["level"] == "ok"
    assert "and of their windows 15 MB" in fits["measured"]
    assert lacks["level"] == "warning"
    assert "no windows" in lacks["advice"]
    assert "snapshots do not outlive" not in lacks["advice"]


@pytest.mark.parametrize(
    ("setting", "drop_in", "lingers", "level"),
    [
        ("", "", False, "warning"),
        ("RemoveIPC=no", "", False, "ok"),
        ("#RemoveIPC=no", "", False, "warning"),
        ("RemoveIPC=no", "RemoveIPC=yes", False, "warning"),
        ("", "", True, "ok"),
    ],
)
def test_systemd_may_remove_it_at_a_logout(
    tmp_path: Path, setting: str, drop_in: str, lingers: bool, level: str
) -> None:
    main, more, linger = tmp_path / "logind.conf", tmp_path / "conf.d", tmp_path / "linger"
    main.write_text(f"[Login]\n{setting}\n")
    for directory in (more, linger):
        directory.mkdir()
    (more / "10-site.conf").write_text(f"[Login]\n{drop_in}\n")
    user = 54321  # without a name
    if lingers:
        (linger / str(user)).touch()
    files = [str(main), str(more / "*.conf")]
    assert check_lifetime(user, tmp_path, linger, files).level == level
    assert check_lifetime(0, tmp_path, linger, files).level == "ok"
    assert check_lifetime(user, tmp_path / "no-systemd", linger, files).level == "ok"


def test_what_a_user_may_not_read_of_systemd_is_not_taken_for_granted(tmp_path: Path) -> None:
    script = """
from cpsr.doctor.shared_memory import check_lifetime
conf, linger = place / "logind.conf", place / "linger"
show(check_lifetime(54321, place, linger, [str(conf)]))
"""
    # Root without the right to read what others own, as users are.
    linger, conf = tmp_path / "linger", tmp_path / "logind.conf"
    make = f"mkdir -m 700 {linger} && echo RemoveIPC=no > {conf} && chmod 600 {conf} && chown 54321 {linger} {conf}"
    drop = "setpriv --bounding-set -dac_override,-dac_read_search"
    (found,) = mounted(tmp_path, "size=1m", script, make, drop)
    assert (found["subject"], found["level"]) == ("memory lifetime", "warning")


def test_nothing_is_left_in_shared_memory() -> None:
    check_shared_memory(needs())
    assert not list(Path("/dev/shm").glob(f"cpsr-doctor-{os.getpid()}*"))
