"""Ranks in the loops of other packages: a killed job continues bit for bit, also on another number of ranks."""

import math
from collections import Counter
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.integrations.ranks_worker import BATCH, GLOBAL_BATCH, RESIZED_ITEMS
from tests.recovery.job import Ended, Job

STEPS, FAILURE, CHECKPOINT = 18, 10, 8
WORKER = "tests.integrations.ranks_worker"


@pytest.fixture(scope="module", autouse=True)
def _imported_once() -> Iterator[None]:
    """Ranks are forked from a server of their own, which has imported what their loops need."""
    server = forkserver.ForkServer()
    server.set_forkserver_preload(["tests.integrations.preloaded"])
    with (
        mock.patch.object(forkserver, "ensure_running", server.ensure_running),
        mock.patch.object(forkserver, "connect_to_new_process", server.connect_to_new_process),
    ):
        yield


@pytest.mark.parametrize(
    ("loop", "package"),
    [
        ("Trainer", "transformers"),
        ("Trainer with DeepSpeed", "transformers"),
        pytest.param("Trainer with FSDP", "transformers", marks=pytest.mark.slow),
        ("accelerate", "accelerate"),
        pytest.param("Lightning", "lightning", marks=pytest.mark.slow),
        ("Fabric", "lightning"),
    ],
)
def test_a_killed_job_continues_bit_for_bit(tmp_path: Path, loop: str, package: str) -> None:
    pytest.importorskip(package)
    options: dict[str, Any] = {"worker": WORKER, "loop": loop, "iterations": STEPS}
    whole = Job(tmp_path / "whole").launch(**options)
    assert whole.statuses == [0, 0], whole.output[0][-3000:]
    job = Job(tmp_path / "killed")
    killed = job.launch(fault=str(FAILURE), committed=CHECKPOINT, **options)
    assert killed.statuses[1] == -9, killed.output[1][-3000:]
    back = job.launch(**options)
    assert back.statuses == [0, 0], back.output[0][-3000:]
    assert f"continue at iteration {CHECKPOINT}" in back.output[0]
    for rank in range(2):
        assert back.result(rank) == whole.result(rank)
        assert back.result(rank)["steps"] == STEPS


def trained(life: Ended, since: int) -> dict[int, tuple[list[float], float]]:
    """What all ranks together trained on in each step, and the mean of their losses."""
    steps: dict[int, tuple[list[float], float]] = {}
    accumulated = GLOBAL_BATCH // BATCH // len(life.results)
    for rank in range(len(life.results)):
        for number, (inputs, loss) in enumerate(life.result(rank)["trained"]):
            seen, total = steps.get(at := since + number // accumulated + 1, ([], 0.0))
            steps[at] = [*seen, *inputs], total + loss * BATCH / GLOBAL_BATCH
    return steps


WITHIN, GROWING = ((2, 2), (1, 4), (2, 8)), ((2, 2), (4, 4), (2, 8))  # ranks, last step


@pytest.mark.parametrize(
    ("loop", "package", "lives"),
    [
        ("Trainer", "transformers", WITHIN),
        ("accelerate", "accelerate", WITHIN),
        pytest.param("Trainer with FSDP", "transformers", WITHIN, marks=pytest.mark.slow),
        pytest.param("accelerate unseeded", "accelerate", GROWING, marks=pytest.mark.slow),
        pytest.param("accelerate with DeepSpeed", "accelerate", WITHIN, marks=pytest.mark.slow),
        pytest.param("Lightning", "lightning", WITHIN, marks=pytest.mark.slow),
    ],
)
def test_another_number_of_ranks_goes_on_in_the_middle_of_a_pass(
    tmp_path: Path, loop: str, package: str, lives: tuple[tuple[int, int], ...]
) -> None:
    """Each item of a pass is trained once, in the order and with the losses of a run of one size."""
    pytest.importorskip(package)
    job, steps = Job(tmp_path / "resized"), dict[int, tuple[list[float], float]]()
    options: dict[str, Any] = {
        "worker": WORKER,
        "loop": loop,
        "resized": True,
        "settings": {"elastic": {"min_ranks": 1}},
    }
    for ranks, until in lives:
        life = job.launch(ranks=ranks, iterations=until, **options)
        assert life.statuses == [0] * ranks, life.output[0][-3000:]
        assert [life.result(rank)["steps"] for rank in range(ranks)] == [until] * ranks
        new = trained(life, len(steps))
        assert list(new) == list(range(len(steps) + 1, until + 1))
        steps |= new
    whole = Job(tmp_path / "whole").launch(iterations=8, **options)
    expected = trained(whole, 0)
    in_a_pass = RESIZED_ITEMS // GLOBAL_BATCH
    items = Counter(one for at in range(1, in_a_pass + 1) for one in steps[at][0])
    assert set(items.values()) == {1}
    assert len(items) == RESIZED_ITEMS
    for at, (seen, loss) in expected.items():
        assert sorted(steps[at][0]) == sorted(seen)
        assert math.isclose(steps[at][1], loss, rel_tol=1e-5)


@pytest.mark.slow
def test_checkpoints_of_the_trainer_go_on_working_under_fsdp(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    options: dict[str, Any] = {"worker": WORKER, "loop": "Trainer with FSDP", "iterations": STEPS, "save_steps": 12}
    job = Job(tmp_path)
    with_cpsr = job.launch(**options)
    assert with_cpsr.statuses == [0, 0], with_cpsr.output[0][-3000:]
    own = str(tmp_path / "life-1.trainer" / "checkpoint-12")
    resumed = job.launch(own_checkpoint=own, **options)
    assert resumed.statuses == [0, 0], resumed.output[0][-3000:]
    for name in ("steps", "state"):  # the Trainer's checkpoint lacks the losses since the last line of its log
        assert resumed.result()[name] == with_cpsr.result()[name]
