"""A run goes on with fewer ranks, and with more, in the middle of a pass over its data."""

import itertools
import math
import shutil
from collections import Counter
from typing import Any

import pytest

from cpsr.benchmarks.harness.checkpoint_files import weights_file
from cpsr.checkpoint.manifest import step_name
from cpsr.checkpoint.store import verify_run
from cpsr.journal import JournalReader
from tests.recovery.elastic_worker import GLOBAL_BATCH
from tests.recovery.engines import EXPERTS, ITEMS
from tests.recovery.job import Ended, Job

ELASTIC = {"elastic": {"min_ranks": 1}}
WORKER = "tests.recovery.elastic_worker"
ENGINES: dict[str, dict[str, Any]] = {
    "ddp": {"kind": "ddp"},
    "fsdp2": {"kind": "fsdp2"},
    "zero 2 bf16": {"zero": 2, "precision": "bf16"},
    "zero 3": {"zero": 3},
}


# Frozen weights, some of which are written to in each step. A later start loads others.
FROZEN: dict[str, Any] = {"base": 1, "moving": True}
OTHER = {"base": 2}


def launch(job: Job, ranks: int, iterations: int, **options: Any) -> Ended:
    """A life that ends by itself, and is saved, after this many iterations."""
    ended = job.launch(
        ranks=ranks, iterations=iterations, settings=ELASTIC, worker=WORKER, survivor_seconds=60.0, **options
    )
    assert set(ended.statuses) == {0}, ended.output[0][-3000:]
    return ended


def samples(ended: Ended, iterations: range) -> list[int]:
    """What the ranks saw in these iterations."""
    dealt = [batch for found in ended.results if found for batch in found["batches"]]
    return [index for at, *indices in dealt if at in iterations for index in indices]


def losses(ended: Ended) -> dict[int, float]:
    """The mean over the global batch by iteration."""
    found: dict[int, float] = {}
    for result in ended.results:
        assert result is not None
        for at, loss in result["losses"].items():
            found[int(at)] = found.get(int(at), 0.0) + loss
    return found


# Those that split frozen weights have some; ZeRO 1 and 2 cut their tensors as in tests below.
@pytest.mark.parametrize(("engine", "frozen"), [("ddp", False), ("fsdp2", True), ("zero 3", True)])
def test_every_rank_takes_its_part_of_what_another_number_left(job: Job, engine: str, frozen: bool) -> None:
    base: dict[str, Any] = FROZEN if frozen else {}
    other = OTHER if frozen else {}
    first = launch(job, 2, 2, **ENGINES[engine], **base)
    second = launch(job, 3, 3, **ENGINES[engine], **base | other)
    third = launch(job, 1, 4, **ENGINES[engine], **base | other)
    for before, after, at in ((first, second, 2), (second, third, 3)):
        ended, started = before.result()["ended"], after.result()["started"]
        assert started["iteration"] == at
        assert started["whole"] == ended["whole"]
        assert started["scalars"] == ended["scalars"]
        assert len(started["whole"]) == 3 * 4 + 2 * frozen
    one_pass = [*samples(first, range(1, 3)), *samples(second, range(3, 4)), *samples(third, range(4, 5))]
    assert sorted(one_pass) == list(range(ITEMS))


def test_experts_are_dealt_by_their_number_over_all_ranks(job: Job) -> None:
    """Two ranks share four experts, then one has all, then each of four has one."""
    lives = [launch(job, ranks, until, kind="mixture", zero=1) for ranks, until in ((2, 2), (1, 3), (4, 4))]
    for before, after in itertools.pairwise(lives):
        ended, started = before.result()["ended"], after.result()["started"]
        assert started["whole"] == ended["whole"]
        assert started["scalars"] == ended["scalars"]
        assert sum(".deepspeed_experts." in name for name in started["whole"]) == 3 * 4 * EXPERTS


def test_stages_are_dealt_by_their_layers(job: Job) -> None:
    """Two stages, one, three, and two replicas of two; a stage in the middle is dealt no batches."""
    sizes = ((2, 2, 1), (1, 1, 2), (3, 3, 3), (4, 2, 5))  # ranks, stages, iterations
    lives = [launch(job, ranks, until, kind="pipeline", stages=stages, zero=1) for ranks, stages, until in sizes]
    for before, after in itertools.pairwise(lives):
        ended, started = before.result()["ended"], after.result()["started"]
        assert started["whole"] == ended["whole"]
        assert started["scalars"] == ended["scalars"]
        assert len(started["whole"]) == 3 * 6
    first_stages = [[0], [0], [0], [0, 1]]
    seen = [
        (at, index)
        for life, ranks in zip(lives, first_stages, strict=True)
        for rank in ranks
        for at, *indices in life.result(rank)["batches"]
        for index in indices
    ]
    one_pass = [index for at, index in seen if at <= ITEMS // GLOBAL_BATCH]
    assert sorted(one_pass) == list(range(ITEMS))
    assert len(seen) == 5 * GLOBAL_BATCH


def test_over_many_sizes_the_losses_are_those_of_one_size_but_for_rounding(job: Job, tmp_path: Any) -> None:
    fixed = launch(Job(tmp_path / "fixed"), 4, 12, zero=1)
    lives = [launch(job, ranks, until, zero=1) for ranks, until in ((4, 3), (3, 6), (2, 9), (4, 12))]
    resized = {at: loss for life in lives for at, loss in losses(life).items()}
    expected = losses(fixed)
    assert resized.keys() == expected.keys()
    assert all(math.isclose(resized[at], loss, rel_tol=1e-5) for at, loss in expected.items())
    assert all(resized[at] == expected[at] for at in range(1, 4))
    seen = Counter(itertools.chain.from_iterable(samples(life, range(1, 13)) for life in lives))
    assert seen == dict.fromkeys(range(ITEMS), 12 * GLOBAL_BATCH // ITEMS)
    assert [life.result(1)["started"]["ranks"] for life in lives] == [[4, 4], [4, 3], [3, 2], [2, 4]]
    with JournalReader(job.run_dir / "journal.db") as journal:
        restored = journal.restored_iterations()
        held = [(life.ranks, restored.get(life.life, 0)) for life in journal.lives()]
        assert held == [(4, 0), (3, 3), (2, 6), (4, 9)]
        said = [one.message for one in journal.events() if one.kind == "ranks"]
    taken = "each takes its part of checkpoint"
    assert said == [
        f"the run goes on with 3 ranks, before with 4: {taken} 3 and trains on 4 micro-batches an iteration",
        f"the run goes on with 2 ranks, before with 3: {taken} 6 and trains on 6 micro-batches an iteration",
        f"the run goes on with 4 ranks, before with 2: {taken} 9 and trains on 3 micro-batches an iteration",
    ]


def test_after_a_kill_the_last_checkpoint_goes_on_with_the_ranks_that_are_left(job: Job) -> None:
    options: dict[str, Any] = {"worker": WORKER, "settings": ELASTIC, "dropout": 0.1}
    killed = job.launch(ranks=3, iterations=9, fault="step:2:6", committed=4, **options)
    assert killed.statuses[2] == -9, killed.output
    back = launch(job, 2, 8, dropout=0.1)
    started = back.result()["started"]
    assert (started["iteration"], started["method"], started["failure_iteration"]) == (4, "exact", 6)
    again = launch(job, 2, 9, dropout=0.1)
    seen = [*samples(back, range(5, 9)), *samples(again, range(9, 10))]
    assert len(seen) == 5 * GLOBAL_BATCH
    assert sorted(samples(back, range(5, 9))) == list(range(ITEMS))


def test_a_forbidden_number_of_ranks_is_refused(job: Job) -> None:
    launch(job, 2, 2)
    for ranks, limits, message in (
        (3, {}, "elastic.min_ranks (not set) does not allow"),
        (1, {"min_ranks": 2}, "elastic.min_ranks (2) does not allow"),
    ):
        refused = job.launch(ranks=ranks, iterations=4, worker=WORKER, settings={"elastic": limits})
        assert 0 not in refused.statuses
        assert message in refused.output[0]
    assert launch(job, 2, 3).result()["started"]["iteration"] == 2


def test_another_global_batch_is_refused_with_one_that_fits(job: Job) -> None:
    launch(job, 2, 2)
    refused = job.launch(ranks=4, iterations=4, worker=WORKER, settings=ELASTIC, batch_size=2)
    assert 0 not in refused.statuses
    assert "8 samples (4 ranks x batches of 2 x 1 accumulated), the run trains on 12" in refused.output[0]
    assert "take batches of 1 and 3 accumulation steps" in refused.output[0]


IN_MEMORY: dict[str, Any] = {
    **ELASTIC,
    "checkpoint": {"interval_iterations": 20, "shared_memory": True},
    "memory": {"interval_iterations": 1},
}


def test_what_is_left_in_host_memory_is_rescued(job: Job) -> None:
    options: dict[str, Any] = {"worker": WORKER, "settings": IN_MEMORY, **ENGINES["zero 2 bf16"]}
    killed = job.launch(ranks=2, iterations=9, fault="step:1:6", in_memory=5, **options)
    assert killed.statuses[1] == -9, killed.output
    back = job.launch(ranks=3, iterations=8, survivor_seconds=60.0, **options)
    assert set(back.statuses) == {0}, back.output[0][-3000:]
    started = back.result()["started"]
    assert started["iteration"] in (5, 6)
    assert (started["method"], started["failure_iteration"]) == ("exact", 6 if started["iteration"] == 5 else None)
    again = Job(job.directory / "again")
    expected = again.launch(ranks=2, iterations=started["iteration"], **options)
    assert started["whole"] == expected.result()["ended"]["whole"]


def test_a_rescued_state_has_the_frozen_weights_of_a_checkpoint(job: Job) -> None:
    settings = {**IN_MEMORY, "checkpoint": {"interval_iterations": 4, "shared_memory": True}}
    options: dict[str, Any] = {"worker": WORKER, "settings": settings, **ENGINES["ddp"], **FROZEN}
    killed = job.launch(ranks=2, iterations=9, fault="step:1:7", committed=4, in_memory=6, **options)
    assert killed.statuses[1] == -9, killed.output
    back = job.launch(ranks=1, iterations=8, survivor_seconds=60.0, **options | OTHER)
    assert set(back.statuses) == {0}, back.output[0][-3000:]
    started = back.result()["started"]
    assert started["iteration"] in (6, 7)
    again = Job(job.directory / "again")
    expected = again.launch(ranks=2, iterations=started["iteration"], **options)
    assert started["whole"] == expected.result()["ended"]["whole"]
    assert verify_run(job.run_dir) == []


def test_blocks_are_rescued(job: Job) -> None:
    """Two ranks share the tensors by columns, and two others hold the same: one pair goes on."""
    options: dict[str, Any] = {"worker": WORKER, "settings": IN_MEMORY, "kind": "tp", "batch_size": 12}
    killed = job.launch(ranks=4, iterations=9, fault="step:1:6", in_memory=3, **options)
    assert killed.statuses[1] == -9, killed.output
    back = job.launch(ranks=2, iterations=8, survivor_seconds=60.0, **options)
    assert set(back.statuses) == {0}, back.output[0][-3000:]
    at = back.result()["started"]["iteration"]
    assert at in range(3, 7)  # of four ranks on a busy machine some skip snapshots, each others
    expected = Job(job.directory / "again").launch(ranks=4, iterations=at, **options)
    for rank in range(2):
        assert back.result(rank)["started"]["state"] == expected.result(rank)["ended"]["state"]


def test_where_all_ranks_hold_the_same_one_survivor_is_enough(job: Job) -> None:
    options: dict[str, Any] = {"worker": WORKER, "settings": IN_MEMORY, **ENGINES["ddp"]}
    killed = job.launch(ranks=2, iterations=9, fault="step:1:6", nodes=["here", "gone"], **options)
    assert killed.statuses[1] == -9, killed.output
    shutil.rmtree(job.directory / "memory" / "gone")
    back = job.launch(ranks=1, iterations=8, nodes=["here"], **options)
    assert back.statuses == [0], back.output[0][-3000:]
    assert back.result()["started"]["iteration"] in (5, 6)


def test_the_dump_of_a_survivor_is_rescued(job: Job) -> None:
    settings = {**ELASTIC, "checkpoint": {"interval_iterations": 4, "shared_memory": True}}
    options: dict[str, Any] = {"worker": WORKER, **ENGINES["ddp"], **FROZEN}
    killed = job.launch(ranks=3, iterations=9, fault="step:1:7", committed=4, settings=settings, **options)
    assert killed.statuses[1] == -9, killed.output
    back = job.launch(ranks=2, iterations=8, settings=settings, survivor_seconds=60.0, **options | OTHER)
    assert set(back.statuses) == {0}, back.output[0][-3000:]
    started = back.result()["started"]
    assert started["iteration"] in (6, 7)
    with JournalReader(job.run_dir / "journal.db") as journal:
        said = [one.message for one in journal.events() if one.kind == "state rescued"]
    assert len(said) == 1
    assert "random states and registered objects are those of checkpoint 4" in said[0]
    expected = launch(Job(job.directory / "again"), 3, started["iteration"], **ENGINES["ddp"], **FROZEN)
    assert started["whole"] == expected.result()["ended"]["whole"]
    assert started["scalars"] == expected.result()["ended"]["scalars"]
    dealt = samples(expected, range(5, 9)), samples(back, range(5, 9))
    assert sorted([*dealt[0], *dealt[1]]) == list(range(ITEMS))


def test_a_damaged_checkpoint_is_fetched_from_its_target(job: Job) -> None:
    settings: dict[str, Any] = {**ELASTIC, "checkpoint": {"target": f"file://{job.directory}/target"}}
    options: dict[str, Any] = {"worker": WORKER, "settings": settings, "zero": 1, "survivor_seconds": 60.0}
    first = job.launch(ranks=3, iterations=4, **options)
    path = weights_file(job.run_dir / "checkpoints" / step_name(4), 1)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    back = job.launch(ranks=2, iterations=5, **options)
    assert back.statuses == [0, 0], back.output[0][-3000:]
    assert back.result()["started"]["iteration"] == 4
    assert back.result()["started"]["whole"] == first.result()["ended"]["whole"]
    assert any(path.name in text for text in back.output)


def test_a_later_failure_is_predicted_from_what_another_number_of_ranks_saved(job: Job) -> None:
    launch(job, 2, 15, zero=1)
    killed = job.launch(
        ranks=3, iterations=30, fault="step:1:23", committed=19, settings=ELASTIC, worker=WORKER, zero=1
    )
    assert killed.statuses[1] == -9, killed.output
    back = launch(job, 3, 26, mode="predict", zero=1)
    started = back.result()["started"]
    assert (started["iteration"], started["method"]) == (23, "line")
    with JournalReader(job.run_dir / "journal.db") as journal:
        recovery = journal.latest_recovery()
    assert recovery is not None
    assert recovery.settings["used_iterations"] == [12, 15, 19]  # of 2 ranks, and the last of 3
    assert recovery.guard["loss"]["accepted"]


def test_what_ranks_of_a_machine_have_copied_between_them_is_rescued(job: Job) -> None:
    options: dict[str, Any] = {"worker": WORKER, "settings": IN_MEMORY, **ENGINES["ddp"]}
    killed = job.launch(ranks=4, iterations=9, fault="step:all:6", in_memory=3, **options)
    assert set(killed.statuses) == {-9}, killed.output
    back = job.launch(ranks=3, iterations=8, survivor_seconds=60.0, **options)
    assert set(back.statuses) == {0}, back.output[0][-3000:]
    started = back.result()["started"]
    assert started["iteration"] in range(3, 7)
    expected = Job(job.directory / "again").launch(ranks=4, iterations=started["iteration"], **options)
    assert started["whole"] == expected.result()["ended"]["whole"]
    assert verify_run(job.run_dir) == []
