"""What does not fit is refused with the numbers."""

from pathlib import Path

import psutil
import pytest

from cpsr.checkpoint import resources
from cpsr.checkpoint.resources import available_host_bytes, check_disk, check_host_memory
from cpsr.errors import ResourceError


def test_what_does_not_fit_is_refused_with_the_bytes(tmp_path: Path) -> None:
    too_much = psutil.virtual_memory().total
    with pytest.raises(ResourceError, match=rf"need {2 * too_much} bytes of host memory \({too_much} for each of 2"):
        check_host_memory(too_much, 2)
    with pytest.raises(ResourceError, match=rf"need {1 << 60} bytes on the disk of .*, \d+ are free"):
        check_disk(tmp_path / "run", 1 << 60)


def test_what_is_left_beside_the_buffers_is_reported_for_each_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources, "available_host_bytes", lambda: 1000)
    assert check_host_memory(100, 2) == 400
    assert check_host_memory(100, 2, reusable_bytes=300) == 500
    assert check_host_memory(500, 2) == 0


def write_group(path: Path, files: dict[str, str]) -> None:
    path.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (path / name).write_text(text)


def test_version_1_control_groups_bound_the_memory_inside_a_container(tmp_path: Path) -> None:
    (tmp_path / "own").write_text("5:cpu,cpuacct:/x\n4:memory:/docker/abc\n")
    mount = tmp_path / "v1" / "memory"
    write_group(mount, {"memory.limit_in_bytes": "500000\n", "memory.usage_in_bytes": "600000\n"})
    assert available_host_bytes(tmp_path / "v1", tmp_path / "own") == 0
    (mount / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert available_host_bytes(tmp_path / "v1", tmp_path / "own") > 1 << 20
