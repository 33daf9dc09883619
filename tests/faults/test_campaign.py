"""The fault campaign: killed, refused or damaged anywhere, a job finds its newest checkpoint, bit for bit."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.ranks  # it starts jobs of its own

STRACE_ABSENT = "apt-get install strace"


def run_campaign(directory: Path, path: Path, *options: str) -> dict[str, Any]:
    """What `cpsr bench faults` leaves where every fault was survived."""
    command = [sys.executable, "-m", "cpsr", "bench", "faults", *options, "--json", str(path), "--workdir"]
    ended = subprocess.run([*command, str(directory)], capture_output=True, text=True, check=False)
    if STRACE_ABSENT in ended.stderr:
        pytest.skip(" ".join(ended.stderr.split()))
    assert ended.returncode == 0, (ended.stdout + ended.stderr)[-6000:]
    found: dict[str, Any] = json.loads(path.read_text())
    assert found["not_survived"] == []
    return found


@pytest.mark.timeout(900)
def test_a_sample_of_all_faults_and_live_jobs(fast_directory: Path, tmp_path: Path) -> None:
    found = run_campaign(fast_directory, tmp_path / "faults.json", "--sample")
    # An environment that this machine does not allow is reported, and nothing else is left out.
    assert all(outcome["scenario"].endswith("disk") for outcome in found["not_injected"]), found["not_injected"]
    assert {"power cut", "network file system"} <= found["never_injected"].keys()
    for row in found["scenarios"]:
        assert row["injected"] == row["survived"] == row["state_equal"], row
    assert len(found["live"]) == 2
    assert all(one["injected"] and one["survived"] and one["state_equal"] for one in found["live"])


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_the_whole_campaign(fast_directory: Path, tmp_path: Path) -> None:
    run_campaign(fast_directory, tmp_path / "faults.json")
