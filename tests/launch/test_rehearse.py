"""`cpsr rehearse` as a user calls it, under the real launcher."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.launch.jobs import SCRIPT, Launched


def rehearsed(directory: Path, script: str, ranks: int, status: int) -> dict[str, Any]:
    """The verdict that the command leaves, which ends with that status."""
    (directory / "train.py").write_text(script)
    own = ["--steps=12", "--json=verdict.json", f"--workdir={directory / 'jobs'}"]
    arguments = [f"--nproc-per-node={ranks}", "train.py", "run", "100", "0"]
    with Launched(directory, ["cpsr", "rehearse", *own, *arguments]) as launched:
        assert launched.wait() == status, launched.output
    verdict: dict[str, Any] = json.loads((directory / "verdict.json").read_text())
    return verdict


def test_a_script_without_a_seed_does_not_reproduce_itself(tmp_path: Path) -> None:
    """Two starts of the job; tests/situations cuts its like short."""
    verdict = rehearsed(tmp_path, SCRIPT.replace("torch.manual_seed(0)", ""), 1, 1)
    assert "two undisturbed runs differ at step" in verdict["sentence"]
    assert "sets no seed" in verdict["causes"][0]
    (kept,) = (tmp_path / "jobs").iterdir()
    assert "iteration 12" in (kept / "undisturbed" / "output").read_text()


@pytest.mark.slow  # eight starts
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_script_comes_back(ranks: int, tmp_path: Path) -> None:
    verdict = rehearsed(tmp_path, SCRIPT, ranks, 0)
    assert verdict["sentence"].startswith("Your script comes back bit for bit: 3 restarts, ")
    assert any("The loss is unknown" in one for one in verdict["unprotected"])
    assert not (tmp_path / "run").exists()
    assert not list((tmp_path / "jobs").iterdir())


def test_a_script_with_an_error_cannot_be_rehearsed(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("raise ValueError('no data')\n")
    with Launched(tmp_path, ["cpsr", "rehearse", "--nproc-per-node=1", "--max-restarts=0", "train.py"]) as launched:
        assert launched.wait() == 2
    assert "ValueError: no data" in launched.output
    assert "The script failed (exit status 1)" in launched.output
