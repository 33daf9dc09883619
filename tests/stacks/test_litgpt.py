"""LitGPT's own pretraining under CPSR: killed, it ends with the checkpoint and the log of a run without a failure."""

import csv
import zipfile
from pathlib import Path

from tests.stacks.environment import stack_python
from tests.stacks.lives import killed_and_back

# litgpt pins a huggingface-hub that is too old for the transformers of the tests, which lightning imports.
STACK = ("litgpt==0.5.13", "transformers<4.57")
OF_A_STEP = ("loss", "val_loss", "learning_rate", "epoch", "total_tokens")


def test_a_killed_run_ends_bit_for_bit(tmp_path: Path) -> None:
    # Compiling takes a minute, and is not what is tested here.
    killed_and_back(stack_python(*STACK), "litgpt_pretrain.py", tmp_path, TORCH_COMPILE_DISABLE="1")
    whole, killed = tmp_path / "whole" / "litgpt", tmp_path / "killed" / "litgpt"
    for checkpoint in ("step-00000010", "step-00000020", "final"):
        assert tensors_of(killed / checkpoint) == tensors_of(whole / checkpoint)
    (log,), lives = logs_of(whole), logs_of(killed)
    assert len(lives) == 2
    assert lives[0].items() <= log.items()
    assert lives[1].items() <= log.items()
    assert lives[0].keys() | lives[1].keys() == log.keys()


def tensors_of(checkpoint: Path) -> dict[str, bytes]:
    """Of weights and moments, in the order in which LitGPT has saved them."""
    with zipfile.ZipFile(checkpoint / "lit_model.pth") as file:
        return {name: file.read(name) for name in file.namelist() if "/data/" in name}


def logs_of(out: Path) -> list[dict[tuple[int, str], str]]:
    """What each life has logged of each step."""
    lives = []
    for path in sorted(out.glob("logs/csv/version_*/metrics.csv")):
        with path.open() as file:
            rows = list(csv.DictReader(file))
        lives.append({(int(row["step"]), name): row[name] for row in rows for name in OF_A_STEP if row.get(name)})
    return lives
