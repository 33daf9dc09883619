"""`cpsr rehearse` as a user calls it, under the real launcher: eight starts of a job."""

import json
from pathlib import Path

import pytest

from tests.launch.jobs import SCRIPT, Launched


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_script_comes_back(ranks: int, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    own = ["--steps=12", "--json=verdict.json", f"--workdir={tmp_path / 'jobs'}"]
    script = [f"--nproc-per-node={ranks}", "train.py", "run", "100", "0"]
    with Launched(tmp_path, ["cpsr", "rehearse", *own, *script]) as launched:
        assert launched.wait() == 0, launched.output
    verdict = json.loads((tmp_path / "verdict.json").read_text())
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
