"""The example of torchtitan comes back bit for bit, with torchtitan's own loader and beside its own checkpoints."""

import subprocess
from pathlib import Path
from typing import Any

import torch

from tests.launch.jobs import Launched
from tests.stacks.environment import stack_python

ROOT = Path(__file__).parents[2]
# torchtitan imports triton, which torch for the CPU does not bring; of its versions that do, this is the smallest.
REQUIREMENTS = "torchtitan==0.3.0", "triton==3.3.1"


def trained(folder: Path, *options: str) -> tuple[list[str], list[Any]]:
    """What `cpsr run` has printed, and what each rank has at the end."""
    folder.mkdir()
    cpsr = [str(stack_python(*REQUIREMENTS)), "-m", "cpsr"]
    example = [str(ROOT / "examples" / "torchtitan_train.py"), "--folder", str(folder), *options]
    with Launched(folder, [*cpsr, "run", "--nproc-per-node=2", *example], {"PYTHONPATH": str(ROOT)}) as launched:
        assert launched.wait() == 0, launched.output[-4000:]
        subprocess.run([*cpsr, "status", folder / "cpsr"], cwd=ROOT, check=True)
        return launched.lines(), [torch.load(folder / f"final-{rank}.pt") for rank in range(2)]


def test_a_killed_run_ends_as_the_undisturbed_one(tmp_path: Path) -> None:
    _, whole = trained(tmp_path / "whole")
    lines, again = trained(tmp_path / "again", "--kill-at", "14")
    assert "Rank 1 was killed (SIGKILL) after iteration 14. All ranks start again" in lines
    assert any(line.startswith("Exact, checked over ") for line in lines), lines
    for expected, found in zip(whole, again, strict=True):
        assert len(expected["losses"]) == 24
        assert found["losses"] == expected["losses"]
        torch.testing.assert_close(found["weights"], expected["weights"], rtol=0, atol=0)
