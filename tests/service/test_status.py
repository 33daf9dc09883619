import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cpsr.checkpoint.memory_owners import mark_owner
from cpsr.cli.main import app
from cpsr.journal import CheckpointRow, EventRow, Journal, LifeRow, PlanOverride, StepRow, override_plan
from cpsr.service.status import effective_time_ratio
from tests.service.journals import (
    flushed,
    measured_plan,
    plan_row,
    record_steps,
    recovery_row,
)


def status(*arguments: object, **environment: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["status", *map(str, arguments)], env={"COLUMNS": "200", **environment})
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture(autouse=True)
def memory(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What stands for the machine's, in which other runs may have left something."""
    directory = tmp_path_factory.mktemp("memory")
    monkeypatch.setattr("cpsr.service.status.SHARED_MEMORY", directory)
    return directory


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "run.json").write_text('{"run_id": "gpt", "mode": "auto", "world_size": 1}')
    journal = Journal.open(tmp_path / "journal.db")
    journal.start_life("auto")
    journal.record(plan_row(measured_plan()))
    record_steps(journal)
    journal.record(CheckpointRow(life=0, iteration=50, status="committed", bytes=2_500_000))
    journal.record(recovery_row(life=1, origin="predicted"))
    flushed(journal)
    journal.close()
    override = PlanOverride(interval_iterations=25, reason="[repairs]", expires_unix_seconds=time.time() + 7200)
    override_plan(tmp_path, override)
    return tmp_path


def test_a_few_lines_say_how_the_run_is(run_dir: Path) -> None:
    code, output, errors = status(run_dir)
    assert (code, errors) == (0, "")
    assert output.count("\n") < 13
    interval = measured_plan().interval_iterations
    for words in (
        "run gpt: ok, iteration 7\n",
        "effective training time: ",
        f"a checkpoint every {interval} iterations ({interval * 1.5 / 60:.1f} min), by cpsr",
        "after a failure: predicted state; expected cost ",
        "override: 25 iterations for 2.0 h, not applied yet ([repairs])",
        "newest checkpoint: iteration 50, 2.5 MB",
        "last recovery: line from a failure at 92, continued at 92, kept",
        "the state descends from a predicted one, or from one that was restored in part",
    ):
        assert words in output, words


def test_programs_get_everything(run_dir: Path) -> None:
    code, output, _ = status(run_dir, "--json")
    found = json.loads(output, parse_constant=pytest.fail)
    assert (code, found["health"]["status"], found["memory"]["bytes"]) == (0, "ok", 0)
    assert found["plan"]["override"]["reason"] == "[repairs]"
    assert 0 < found["ettr"] <= 1


def test_ettr_is_useful_time_over_wall_time_without_pauses(tmp_path: Path) -> None:
    """Ten steps of a second; the first life ends in good order, the second is killed and repeats two of them."""
    assert open_run(tmp_path, ())[1] is None
    began = time.time() - 1000.0
    lives = [
        LifeRow(life=0, mode="auto", pid=1, host="a", ending="clean", ended_unix_seconds=began + 20.0),
        LifeRow(life=1, mode="auto", pid=1, host="a"),
        LifeRow(life=2, mode="auto", pid=1, host="a", ending="clean", ended_unix_seconds=began + 550.0),
    ]
    starts = [began, began + 500.0, began + 530.0]
    rows: list[Any] = [replace(life, started_unix_seconds=at) for life, at in zip(lives, starts, strict=True)]
    steps = [(0, range(1, 5)), (1, range(5, 9)), (2, range(7, 11))]
    rows += [step(life, iteration) for life, iterations in steps for iteration in iterations]
    path, found = open_run(tmp_path / "run", rows)
    assert found == pytest.approx(10.0 / (20.0 + 50.0))
    open_run(
        path, [replace(rows[2], life=3, ending="running", ended_unix_seconds=None, started_unix_seconds=began + 560)]
    )
    assert effective_time_ratio(path) == pytest.approx(10.0 / (20.0 + 50.0 + 1000.0 - 560.0), rel=0.05)


def open_run(path: Path, rows: Sequence[Any]) -> tuple[Path, float | None]:
    journal = Journal.open(path / "journal.db")
    journal.record(*rows)
    flushed(journal)
    journal.close()
    return path, effective_time_ratio(path)


def step(life: int, iteration: int) -> StepRow:
    return StepRow(life=life, iteration=iteration, loss=1.0, learning_rate=None, seconds=1.0)


def test_what_it_holds_of_this_machines_memory_is_shown_and_what_others_left(run_dir: Path, memory: Path) -> None:
    assert "memory" not in status(run_dir)[1]
    for run_id, size in (("gpt", 3_000_000), ("gone", 4_000_000)):
        (memory / f"cpsr-{run_id}-rank-00000-0").write_bytes(bytes(size))
    mark_owner("gpt", run_dir, "node-1", memory)
    *_, own, others = status(run_dir)[1].splitlines()
    assert own == "host memory of this machine: 3.0 MB"
    assert others == "1 run whose directory is gone, or not in sight, left 4.0 MB of it as well: cpsr release --orphans"
    usage = json.loads(status(run_dir, "--json")[1])["memory"]
    assert (usage["bytes"] // 1_000_000, usage["orphaned_bytes"] // 1_000_000, usage["orphaned_runs"]) == (3, 4, 1)


def test_a_loop_that_is_not_restored_is_named_and_changes_the_exit_status(run_dir: Path) -> None:
    journal = Journal.open(run_dir / "journal.db")
    found = {
        "checked": "exact, checked over 3 repeated steps",
        "not restored": "rank 1: this loop is not restored: in step 53, which the restart repeats, the loss differs",
    }
    for rank, (kind, message) in enumerate(found.items()):
        journal.record(EventRow(life=1, rank=rank, kind=kind, message=message, iteration=53))
    flushed(journal)
    code, text, _ = status(run_dir)
    assert code == 1
    assert f"repeated steps of rank 0: {found['checked']}" in text
    assert found["not restored"] in text
    journal.record(EventRow(life=2, rank=0, kind="checked", message=found["checked"], iteration=60))
    flushed(journal)
    journal.close()
    code, text, _ = status(run_dir, "--json")
    assert code == 0
    assert [one["life"] for one in json.loads(text)["plan"]["repeated_steps"]] == [2]
