"""Which of a job's ranks share a machine."""

from pathlib import Path

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
