"""No whole checkpoint is left: the run continues from the newest one that keeps the weights, and reports it."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from cpsr.checkpoint.catalogue import scan
from cpsr.checkpoint.manifest import THINNED, step_name
from cpsr.cli.inspect import run_json
from cpsr.journal import JournalReader
from cpsr.ranks.exits import BEGAN
from cpsr.service.plan import plan_of
from tests.recovery.job import RANKS, Ended, Job

WORKER = "tests.recovery.weights_worker"
WHOLE, WEIGHTS, FAILURE, END = [16, 20], 12, 22, 30


def checkpoint(job: Job, iteration: int) -> Path:
    return job.run_dir / "checkpoints" / step_name(iteration)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def failed(job: Job, engine: str = "torch", damaged: Sequence[int] = WHOLE) -> dict[int, dict[str, torch.Tensor]]:
    """A life that is killed, and whose whole checkpoints are damaged on one rank; the weights of each rank's files."""
    life = job.launch(worker=WORKER, engine=engine, fault=str(FAILURE), thinned=checkpoint(job, WEIGHTS) / THINNED)
    known = {info.iteration: info.full for info in scan(job.run_dir / "checkpoints").checkpoints}
    assert known == {4: False, 8: False, 12: False, 16: True, 20: True}, life.output[0][-3000:]
    for iteration in damaged:
        flip(checkpoint(job, iteration) / "rank-00001.moments.safetensors")
    files = {rank: checkpoint(job, WEIGHTS) / f"rank-{rank:05d}.params.safetensors" for rank in range(RANKS)}
    return {rank: load_file(file) for rank, file in files.items()}


def began_with(job: Job, saved: dict[int, dict[str, torch.Tensor]], engine: str) -> None:
    """Every rank began with these weights, bit for bit."""
    for rank in range(RANKS):
        # Without ZeRO each rank writes a part of what all of them hold.
        mine = (
            saved[rank] if engine == "deepspeed" else {key: one for part in saved.values() for key, one in part.items()}
        )
        live = load_file(job.directory / f"life-{job.lives}.{rank}.safetensors")
        assert live.keys() == {key.removeprefix("param/") for key in mine}
        assert all(torch.equal(values, mine[f"param/{name}"]) for name, values in live.items())


def batches(job: Job, life: int, rank: int) -> list[Any]:
    lines = (job.directory / f"life-{life}.{rank}.batches").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("engine", ["torch", "deepspeed"])
def test_training_continues_from_the_newest_weights_and_says_what_is_lost(job: Job, engine: str) -> None:
    saved = failed(job, engine)
    back = job.launch("auto", worker=WORKER, engine=engine)
    assert back.statuses == [0] * RANKS, back.output[0][-3000:]
    began_with(job, saved, engine)
    for rank in range(RANKS):
        found = back.result(rank)
        assert (found["iteration"], found["method"]) == (WEIGHTS, "weights")
        assert (found["moments"], found["steps"]) == (0.0, [0.0])
        assert found["learning_rate"] == pytest.approx(2e-2 / (1 + 0.01 * WEIGHTS)), "the schedule is not reset"
        earlier = batches(job, 1, rank)
        assert batches(job, 2, rank)[: FAILURE - WEIGHTS] == earlier[WEIGHTS:], "no data is repeated or left out"
    names = [f"damaged-{step_name(iteration)}-0" for iteration in WHOLE]
    labelled(job, names)


def labelled(job: Job, damaged: list[str]) -> None:
    """The run says everywhere what it continued from."""
    with JournalReader(job.run_dir / "journal.db") as journal:
        (row,) = journal.recoveries()
        (message,) = [event.message for event in journal.events() if event.kind == BEGAN and event.life == 1]
    assert (row.method, row.checkpoint_iteration, row.restored_iteration) == ("weights", WEIGHTS, WEIGHTS)
    assert (row.failure_iteration, row.labelled, row.feasible) == (FAILURE, True, ("weights",))
    for part in (
        f"continue at iteration {WEIGHTS}, from the weights of checkpoint {WEIGHTS} alone",
        f"no complete checkpoint is left (damaged and set aside: {', '.join(damaged)})",
        "the optimizer's moments start at zero",
        f"{FAILURE - WEIGHTS} iterations are recomputed",
    ):
        assert part.lower() in message.lower()
    plan = plan_of(job.run_dir)
    assert plan is not None
    assert plan.last_recovery is not None
    assert (plan.last_recovery.method, plan.last_recovery.labelled) == ("weights", True)
    assert plan.descends_from_predicted
    assert json.loads(run_json(job.run_dir))["recoveries"][0]["method"] == "weights"
    newest = scan(job.run_dir / "checkpoints").checkpoints[-1]
    assert (newest.iteration, newest.full, newest.label) == (END, True, "predicted")


def test_what_one_rank_cannot_verify_is_taken_by_none(job: Job) -> None:
    failed(job)
    flip(checkpoint(job, WEIGHTS) / "rank-00001.params.safetensors")
    back = job.launch("auto", worker=WORKER, iterations=WEIGHTS)
    assert back.statuses == [0] * RANKS, back.output[0][-3000:]
    assert [back.result(rank)["iteration"] for rank in range(RANKS)] == [8] * RANKS
    asides = sorted(path.name for path in (job.run_dir / "checkpoints").glob("damaged-*"))
    assert asides == [f"damaged-{step_name(iteration)}-0" for iteration in (12, 16, 20)]


def test_mode_exact_says_what_mode_auto_would_do(job: Job) -> None:
    failed(job)
    before = sorted((job.run_dir / "checkpoints").rglob("*"))
    refused = job.launch("exact", worker=WORKER)
    assert 0 not in refused.statuses
    assert f"Mode 'auto' would go on from weights alone, those of checkpoint {WEIGHTS}" in told(refused)
    assert sorted((job.run_dir / "checkpoints").rglob("*")) == before, "nothing was changed"


def test_checkpoints_that_are_gone_are_no_dead_end_either(job: Job) -> None:
    failed(job, damaged=())
    for iteration in WHOLE:
        shutil.rmtree(checkpoint(job, iteration))
    back = job.launch("predict", worker=WORKER, iterations=WEIGHTS + 1)
    assert back.statuses == [0] * RANKS, back.output[0][-3000:]
    assert back.result()["method"] == "weights"


def told(ended: Ended) -> str:
    return "\n".join(ended.output)
