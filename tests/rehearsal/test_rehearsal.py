"""Rehearsals in real jobs of two ranks: what they measure, what they leave behind (nothing), and how they end."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from cpsr.checkpoint.catalogue import scan
from cpsr.journal import EventRow, JournalReader, RehearsalRow
from tests.device import NO_STAGES, cpu_only
from tests.recovery.job import OF_THE_START, RANKS, Ended, Job

INTERVAL, REHEARSED = 16, 12
JOB_SECONDS = 800.0  # for what takes one or two minutes; the machine may be busy
ITERATIONS = 124  # a rehearsal needs 100 losses before it; this leaves room for one, at most two
SETTINGS: dict[str, Any] = {
    "checkpoint": {"interval_iterations": INTERVAL, "exit_grace_seconds": 2.0, "fsync": False},
    "journal": {"flush_iterations": 4},
    "predictor": {"window_iterations": 100},
    "learning": {"budget_fraction": 0.0},
    "rehearsal": {"budget_fraction": 0.9, "iterations": REHEARSED, "min_interval_iterations": 0},
}
NONE = {**SETTINGS, "rehearsal": {"budget_fraction": 0.0}}
# One rehearsal in a life: what follows it is another matter.
ONE = {**SETTINGS, "rehearsal": {**SETTINGS["rehearsal"], "min_interval_iterations": 10_000}}
ENGINES: dict[str, dict[str, Any]] = {
    "zero 0": {"zero": 0},
    "zero 1 bf16": {"zero": 1, "precision": "bf16"},
    "zero 1 fp16": {"zero": 1, "precision": "fp16"},
    "zero 2 accumulating": {"zero": 2, "micro_batches": 2},
    "zero 3 bf16 accumulating": {"zero": 3, "precision": "bf16", "micro_batches": 2},
    "experts shared by ranks": {"zero": 1, "expert_parallel": 2},
    "loss_fn": {"zero": 1, "probes": "of a batch"},
}
# Of these the stages and precisions are met above, in other pairs.
MORE_ENGINES: dict[str, dict[str, Any]] = {
    "zero 0 bf16": {"zero": 0, "precision": "bf16"},
    "zero 2 bf16": {"zero": 2, "precision": "bf16"},
    "zero 3": {"zero": 3},
    "loss_fn at zero 3": {"zero": 3, "precision": "bf16", "micro_batches": 2, "probes": "of a batch"},
}
# Without rehearsals they train as "loss_fn" does.
WRONG_LOSSES: dict[str, dict[str, Any]] = {
    "loss_fn of another loss": {"zero": 1, "probes": "of another"},
    "loss_fn that raises": {"zero": 1, "probes": "raising"},
}


def rehearsals(run_dir: Path) -> list[RehearsalRow]:
    with JournalReader(run_dir / "journal.db") as journal:
        return journal.rehearsals()


def losses(run_dir: Path) -> list[tuple[int, float | None]]:
    with JournalReader(run_dir / "journal.db") as journal:
        return [(step.iteration, step.loss) for step in journal.losses()]


def events(run_dir: Path, kind: str) -> list[EventRow]:
    with JournalReader(run_dir / "journal.db") as journal:
        return [event for event in journal.events() if event.kind == kind]


Case = tuple[str, dict[str, Any], str, str, str]  # fault, settings, engine, outcome and a part of the reason
UNDONE: dict[str, Case] = {
    "on one rank": ("rehearsal-raise:1:5", SETTINGS, "zero 1 bf16", "failed", "the module is tired"),
    "at zero 3": ("rehearsal-raise:all:4", SETTINGS, "zero 3 bf16 accumulating", "failed", "the module is tired"),
    "restoring raises": (
        "rehearsal-restore:all:1",
        SETTINGS,
        "zero 0",
        "failed",
        "restoring raised ValueError: no history",
    ),
    "no finite loss": ("rehearsal-nan:1:3", ONE, "zero 0", "diverged", "not finite"),
    "a damaged checkpoint": ("rehearsal-damage:1:1", ONE, "zero 0", "refused", "rank 1: "),
    # Four probes before, four at the checkpoint, and from the ninth on those of the predicted state.
    "vetoed": ("rehearsal-veto:all:9", ONE, "zero 1 bf16", "refused", "vetoed"),
    "not feasible": (
        "",
        {**ONE, "predictor": {**SETTINGS["predictor"], "window_iterations": 2}},
        "zero 0",
        "refused",
        "a prediction needs 3 usable checkpoints within 2 iterations, and there are 1",
    ),
    "no memory": (
        "",
        {**SETTINGS, "rehearsal": {**SETTINGS["rehearsal"], "batches_limit_bytes": 400}},
        "zero 0",
        "refused",
        "more than rehearsal.batches_limit_bytes = 400",
    ),
    "a strange input on one rank": (
        "rehearsal-strange:1:2",
        SETTINGS,
        "zero 0",
        "refused",
        "builtins.object, which is",
    ),
    "loss_fn raises": ("", SETTINGS, "loss_fn that raises", "refused", "loss_fn raised TypeError: "),
    "another loss": ("", SETTINGS, "loss_fn of another loss", "refused", "for a batch whose training loss is "),
}
# Why there are no more rehearsals, in the message of the event.
OFF = {
    "failed": "training went on from its exact state",
    "no memory": "more than rehearsal.batches_limit_bytes = 400",
    "a strange input on one rank": "builtins.object, which is not plain data",
    "another loss": "loss_fn gives ",
    "loss_fn raises": "loss_fn raised TypeError: ",
}


Trained = tuple[Path, Ended]


def train(directory: Path, engines: Mapping[str, dict[str, Any]], undone: Mapping[str, Case]) -> Trained:
    """Every engine's run without rehearsals and with them, and what goes wrong in one, all in one job."""
    runs: dict[str, dict[str, Any]] = {}
    for name, engine in engines.items():
        runs[f"{name} without"] = {"engine": engine, "settings": NONE}
        runs[f"{name} with"] = {"engine": engine, "settings": SETTINGS}
    for case, (fault, settings, name, _, _) in undone.items():
        runs[case] = {"engine": {**ENGINES, **WRONG_LOSSES}[name], "settings": settings, "fault": fault}
    job = Job(directory)
    ended = job.launch(
        "predict", iterations=ITERATIONS, seconds=JOB_SECONDS, worker="tests.rehearsal.worker", runs=runs
    )
    assert ended.statuses == [0] * RANKS, ended.output[0][-3000:] + ended.output[1][-3000:]
    return job.run_dir, ended


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return train(tmp_path_factory.mktemp("trained"), ENGINES, UNDONE)


@pytest.fixture(scope="module")
def more_trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return train(tmp_path_factory.mktemp("more"), MORE_ENGINES, {})


@pytest.mark.parametrize("engine", ENGINES)
def test_training_is_bitwise_what_it_would_have_been(trained: Trained, engine: str) -> None:
    require_undisturbed(trained, engine)


@pytest.mark.slow
@pytest.mark.parametrize("engine", MORE_ENGINES)
def test_with_more_engines_too(more_trained: Trained, engine: str) -> None:
    require_undisturbed(more_trained, engine)


def require_undisturbed(trained: Trained, engine: str) -> None:
    """Rehearsals have measured what they can, and changed nothing."""
    run_dir, ended = trained
    for rank in range(RANKS):
        found = ended.result(rank)
        assert found[f"{engine} with"] == found[f"{engine} without"]
    assert losses(run_dir / f"{engine} with") == losses(run_dir / f"{engine} without")
    rows = rehearsals(run_dir / f"{engine} with")
    assert rehearsals(run_dir / f"{engine} without") == []
    assert rows
    for row in rows:
        assert row.outcome == "measured", row.reason
        assert row.iteration - row.failure_iteration == REHEARSED
        assert row.checkpoint_iteration < row.failure_iteration
        assert row.checkpoint_iteration % INTERVAL == 0
        assert row.settings["horizon_iterations"] == row.failure_iteration - row.checkpoint_iteration
        assert row.settings["base_iteration"] == row.checkpoint_iteration
        assert len(row.measured["gaps_nats"]) == REHEARSED
        # The same weights on the same batches would have no gap at all: something was predicted, and near.
        assert 0 < abs(row.measured["first_gap_nats"]) < 0.5
        assert row.gap_standard_error_nats is not None
        assert 0 < row.gap_standard_error_nats < 0.5
        assert row.measured["probe_gap_nats"] is not None
        assert row.lag_iterations is None or row.lag_standard_error_iterations is not None
        assert row.guard["loss"]["accepted"] is True
        parts = row.load_seconds, row.predict_seconds, row.inject_seconds, row.train_seconds
        assert all(part is not None and part > 0 for part in parts)
        assert row.cost_seconds > sum(part or 0.0 for part in parts)


def without(engine: str) -> str:
    """The run of the same training without rehearsals."""
    return f"{'loss_fn' if engine in WRONG_LOSSES else engine} without"


@pytest.mark.parametrize("case", UNDONE)
def test_what_goes_wrong_in_a_rehearsal_is_undone_and_reported(trained: Trained, case: str) -> None:
    _, _, engine, outcome, reason = UNDONE[case]
    run_dir, ended = trained[0] / case, trained[1]
    for rank in range(RANKS):
        assert ended.result(rank)[case] == ended.result(rank)[without(engine)]
    assert losses(run_dir) == losses(trained[0] / without(engine))
    (row,) = rehearsals(run_dir)
    assert row.outcome == outcome
    assert reason in row.reason
    expected = OFF.get(outcome, OFF.get(case))
    off = events(run_dir, "rehearsals off")
    assert len(off) == (0 if expected is None else 1)
    assert all(expected is not None and expected in event.message for event in off)


def test_a_rank_killed_in_a_rehearsal_is_a_failure_like_any_other(tmp_path: Path, trained: Trained) -> None:
    job = Job(tmp_path)
    killed = job.launch("auto", "rehearsal-kill:1:5", iterations=ITERATIONS, settings=SETTINGS, **ENGINES["zero 0"])
    assert killed.statuses[1] == -9, killed.output[1][-3000:]
    assert killed.statuses[0] != 0
    (row,) = rehearsals(job.run_dir)
    assert row.outcome == "running"
    assert row.cost_seconds > 0
    newest = scan(job.run_dir / "checkpoints").checkpoints[-1].iteration

    back = job.launch("exact", iterations=ITERATIONS, settings=SETTINGS, **ENGINES["zero 0"])
    assert back.statuses == [0] * RANKS, back.output[0][-3000:]
    with JournalReader(job.run_dir / "journal.db") as journal:
        (failure,) = journal.failures()
        (recovery,) = journal.recoveries()
    assert (failure.iteration, failure.checkpoint_iteration) == (row.iteration, newest)
    assert recovery.restored_iteration == newest
    for rank in range(RANKS):
        mine, exact = back.result(rank), trained[1].result(rank)[without("zero 0")]
        assert mine["batches"] == exact["batches"][newest:]
        assert {**mine, **OF_THE_START} == {**exact, **OF_THE_START}


def test_sigterm_ends_a_rehearsal_at_the_next_micro_batch(tmp_path: Path, trained: Trained) -> None:
    job = Job(tmp_path)
    left = job.launch("auto", "rehearsal-sigterm:1:3", iterations=ITERATIONS, settings=ONE, **ENGINES["zero 0"])
    assert left.statuses == [128 + 15] * RANKS, left.output[0][-3000:]
    (row,) = rehearsals(job.run_dir)
    assert row.outcome == "refused"
    assert "asked to leave" in row.reason
    assert events(job.run_dir, "rehearsals off") == []
    ended = json.loads((job.run_dir / "ended.json").read_text())
    assert ended == {"ending": "sigterm", "iteration": row.iteration + 1}  # sent in one vote, agreed in the next
    back = job.launch("auto", iterations=ITERATIONS, settings=ONE, **ENGINES["zero 0"])
    for rank in range(RANKS):
        mine, exact = back.result(rank), trained[1].result(rank)[without("zero 0")]
        assert {**mine, **OF_THE_START} == {**exact, **OF_THE_START}


def test_training_never_goes_on_from_a_state_that_is_not_the_exact_one(tmp_path: Path) -> None:
    job = Job(tmp_path)
    spoiled = job.launch("auto", "rehearsal-spoil:1:1", iterations=ITERATIONS, settings=ONE, **ENGINES["zero 0"])
    assert all(status == 1 for status in spoiled.statuses), spoiled.output
    for output in spoiled.output:
        assert "differs from what was set aside" in output
        assert "Restart the job" in output


@cpu_only(NO_STAGES)
def test_a_pipeline_says_why_nothing_is_rehearsed(tmp_path: Path) -> None:
    job = Job(tmp_path)
    options: dict[str, Any] = {"zero": 0, "micro_batches": 2, "stages": 2}
    ended = job.launch("auto", iterations=ITERATIONS, settings=SETTINGS, **options)
    assert ended.statuses == [0] * RANKS, ended.output[0][-3000:]
    assert rehearsals(job.run_dir) == []
    (off,) = events(job.run_dir, "rehearsals off")
    assert "a pipeline takes its batches from the user's iterator" in off.message
