"""Which of a job's ranks share a machine, and whether a run is of the same model."""

import json
from pathlib import Path
from typing import Any

import pytest

from cpsr.checkpoint.run_directory import IDENTITY, open_run
from cpsr.checkpoint.store import CheckpointStore
from cpsr.errors import ConfigError, RunMismatchError
from cpsr.ranks.group import Group
from tests.checkpoint.conftest import save
from tests.peers.ranks import run

OPENED = """
from cpsr.checkpoint.run_directory import open_run
description = {"engine": "", "zero_stage": 0, "precision": "fp32", "optimizer": "", "module": {}, "tensors": {}}
found["local"] = open_run(root / "run", group, "exact", description).local_ranks
leave()
"""


def test_where_host_names_do_not_distinguish_machines_the_variable_does(tmp_path: Path) -> None:
    ranks = run(OPENED, tmp_path, ["one", "another", "one"])
    assert [found["local"] for found in ranks] == [[0, 2], [1], [0, 2]]


def description(*shape: int) -> dict[str, Any]:
    """Of a model with one frozen parameter, under ZeRO-3."""
    known = {"engine": "DeepSpeedEngine", "zero_stage": 3, "precision": "fp32", "optimizer": "AdamW"}
    base = {"shape": list(shape), "dtype": "float32", "offset": 0, "numel": 8}
    return known | {"tensors": {"base": base}, "module": {"frozen": {"base": list(shape)}}}


def test_a_frozen_parameter_is_compared_by_its_whole_shape(tmp_path: Path) -> None:
    group = Group()
    run = open_run(tmp_path, group, "exact", description(5, 3))
    assert open_run(tmp_path, group, "exact", description(5, 3)).run_id == run.run_id
    with pytest.raises(RunMismatchError, match="differs is 'base', shape \\(5, 3\\) there"):
        open_run(tmp_path, group, "exact", description(5, 4))
    group.close()


def test_an_identity_that_is_gone_is_told_by_the_checkpoints(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Else the directory would be of a new run, to which none of its checkpoints belongs."""
    group = Group()
    run = open_run(tmp_path, group, "exact", description(5, 3))
    store = CheckpointStore(tmp_path, 0, 1, run.run_id, 1)
    store.prepare()
    save(store, 10)
    (tmp_path / IDENTITY).unlink()
    assert open_run(tmp_path, group, "exact", description(5, 3)).run_id == run.run_id
    assert f"holds checkpoints of the run {run.run_id} and no run.json" in caplog.text
    assert json.loads((tmp_path / IDENTITY).read_text())["tensors"] == {"base": [5, 3]}
    group.close()


@pytest.mark.parametrize(
    "content", ["{}", '{"run_id": "a"}', '{"run_id": "a", "tensors": 3}', '{"imported": {}}', "[]", "{"]
)
def test_an_identity_that_is_none_is_refused_on_every_rank(tmp_path: Path, content: str) -> None:
    group = Group()
    (tmp_path / IDENTITY).write_text(content)
    with pytest.raises(ConfigError, match=r"run\.json is damaged .*put it back from a copy"):
        open_run(tmp_path, group, "exact", description(5, 3))
    assert (tmp_path / IDENTITY).read_text() == content
    group.close()
