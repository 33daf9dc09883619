"""TRL's SFTTrainer under CPSR: killed, it ends with the weights and the log of a run without a failure."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.stacks.environment import stack_python
from tests.stacks.lives import killed_and_back

VARYING = ("_runtime", "_per_second")


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_killed_run_ends_bit_for_bit(tmp_path: Path, ranks: int) -> None:
    killed_and_back(stack_python("trl==1.16.0"), "trl_sft.py", tmp_path, ranks)
    whole, killed = (tmp_path / run / "final" for run in ("whole", "killed"))
    name = "adapter_model.safetensors"
    assert (killed / name).read_bytes() == (whole / name).read_bytes()
    log = log_of(whole)
    assert log_of(killed) == log
    assert {"loss", "entropy", "mean_token_accuracy", "num_tokens"} <= log[0].keys()


def log_of(final: Path) -> list[dict[str, Any]]:
    entries = json.loads((final / "trainer_state.json").read_text())["log_history"]
    return [{name: value for name, value in entry.items() if not name.endswith(VARYING)} for entry in entries]
