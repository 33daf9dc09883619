"""`checkpoint.target` in one life after another: what a restart fetches, and the thread that copies meanwhile."""

import hashlib
import logging
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cpsr.benchmarks.harness.checkpoint_files import (
    commit_file,
    edit_commit,
    edit_part,
    is_slab,
    remove_checkpoint,
    weights_file,
)
from cpsr.checkpoint.catalogue import Retention
from cpsr.checkpoint.files import hash_file
from cpsr.checkpoint.host_snapshot import Contents
from cpsr.checkpoint.manifest import COMMIT, FileRecord, Manifest
from cpsr.checkpoint.remote import target as module
from cpsr.checkpoint.remote.copies import read_copy, scan, upload
from cpsr.checkpoint.remote.place import CopyDamagedError, Place, open_place
from cpsr.checkpoint.store import CheckpointStore, verify_run
from cpsr.cli.main import app
from cpsr.errors import CheckpointError, RecoveryError
from cpsr.state.shard import Shard
from tests import two_ranks
from tests.checkpoint.conftest import assert_same_bits, make_shard, make_snapshot, save
from tests.checkpoint.remote.conftest import (
    RUN,
    Faults,
    assert_whole,
    commit,
    committed_at,
    copied_run,
    copy_newest,
    damage,
    fetched,
    folder_of,
    new_run,
    overwrite,
    target_at,
)

PATIENCE_SECONDS = 10.0
RETENTION = Retention(history_span_iterations=0, history_min_checkpoints=2)


# At a restart


def test_a_newer_copy_is_fetched_beside_what_is_left(tmp_path: Path, memory: Place) -> None:
    store = copied_run(tmp_path / "run", memory, (10, 20, 30))
    for iteration in (20, 30):
        remove_checkpoint(store.directory / f"step-{iteration:010d}")
    assert target_at(memory, tmp_path / "run").fetch(store, ()) == 30
    assert [info.iteration for info in store.catalogue()] == [10, 30]
    assert_whole(store, 30)


def test_a_damaged_checkpoint_is_replaced_by_its_copy_and_each_copy_is_tried_once(
    tmp_path: Path, memory: Place
) -> None:
    store = copied_run(tmp_path / "run", memory)
    weights_file(store.directory / "step-0000000020").write_bytes(b"damaged")
    target = target_at(memory, tmp_path / "run")
    assert target.fetch(store, ()) is None  # the restart has yet to find out
    assert target.fetch(store, (20,)) == 20
    assert_whole(store, 20)
    assert target.fetch(store, (20,)) is None  # also damaged: this disk is
    assert target.fetch(store, (10, 20)) == 10


def test_a_damaged_copy_goes_once_the_state_in_its_place_is_copied(tmp_path: Path, memory: Place) -> None:
    copied_run(tmp_path / "run", memory, (10, 20, 30))
    damage(memory, folder_of(memory, 30), "rest")
    shutil.rmtree(tmp_path / "run")
    target = target_at(memory, tmp_path / "run")
    target.adopt_run()
    store = CheckpointStore(tmp_path / "run", 0, 1, RUN, 2)
    store.prepare()
    assert target.fetch(store, ()) == 20
    assert [one.kind for one in target.reports()] == ["target adopted", "target copy damaged", "target fetched"]
    assert committed_at(memory) == [10, 20, 30]
    target.start(store)
    target.notify(20)
    wait_until(lambda: committed_at(memory) == [10, 20])
    commit([store], 30)
    target.notify(30)
    target.close(PATIENCE_SECONDS)
    assert committed_at(memory) == [20, 30]
    assert fetched(memory, tmp_path / "new") == 30


def test_a_target_that_does_not_answer(tmp_path: Path, memory: Place) -> None:
    """With something to go on from it is reported; with nothing it is an error, and never a start from scratch."""
    store = copied_run(tmp_path / "run", memory)
    remove_checkpoint(store.directory / "step-0000000020")
    target = target_at(memory, tmp_path / "run")
    Faults(memory).arm(1)
    assert target.fetch(store, ()) is None
    assert [(one.kind, one.level) for one in target.reports()] == [("target not reachable", logging.WARNING)]
    with pytest.raises(RecoveryError, match="holds no checkpoint to restart at, and the target cannot be read"):
        target.fetch(store, (10,))
    with pytest.raises(RecoveryError, match="does not answer"):
        fetched(memory, tmp_path / "new")
    assert not (tmp_path / "new" / "run.json").exists()


def test_a_target_that_hangs_holds_up_no_restart_that_has_a_checkpoint(
    tmp_path: Path, memory: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = copied_run(tmp_path / "run", memory)
    target = target_at(memory, tmp_path / "run")
    monkeypatch.setattr(module, "ANSWER_SECONDS", 0.2)
    faults = Faults(memory)
    faults.arm(before={3: faults.answers.clear})
    started = time.monotonic()
    assert target.fetch(store, ()) is None
    assert time.monotonic() - started < 5.0
    assert [one.kind for one in target.reports()] == ["target not reachable"]
    # With nothing to go on from, it is waited for.
    threading.Timer(0.6, faults.answers.set).start()
    assert target.fetch(store, (10, 20)) == 20


def test_a_target_that_goes_away_while_fetching(tmp_path: Path, memory: Place) -> None:
    """What is newer is not given up: the start ends, and the next one goes on with what is there."""
    store, faults = copied_run(tmp_path / "run", memory), Faults(memory)
    remove_checkpoint(store.directory / "step-0000000020")
    for call in range(1, 100):
        faults.arm(call)
        try:
            assert target_at(memory, tmp_path / "run").fetch(store, ()) in (20, None)
        except RecoveryError as error:
            assert "could not be fetched" in str(error)  # noqa: PT017 - not every call raises
        else:
            if [info.iteration for info in store.catalogue()] == [10, 20]:
                break
        assert [info.iteration for info in store.catalogue()] == [10]
    assert call > 20
    assert_whole(store, 20)


def test_all_copies_damaged_is_not_a_new_start(tmp_path: Path, memory: Place) -> None:
    copied_run(tmp_path / "run", memory)
    for folder in scan(memory).usable:
        name = damage(memory, folder, "weights")
    with pytest.raises(RecoveryError, match=f"nothing that is committed at .* can be used .*{name}"):
        fetched(memory, tmp_path / "new")
    assert committed_at(memory) == [10, 20]  # nothing was removed
    for folder in scan(memory).usable:
        overwrite(memory, folder, COMMIT, b"damaged")
    with pytest.raises(RecoveryError, match="nothing that is committed"):
        fetched(memory, tmp_path / "newer")


def test_a_sparse_checkpoint_comes_back_with_experts_of_their_ages(tmp_path: Path, memory: Place) -> None:
    (store,) = new_run(tmp_path / "run")
    experts = frozenset(list(make_shard().operators)[1:])
    for iteration, saved in ((10, experts), (20, frozenset[str]())):
        save(store, iteration, Contents.sparse(experts, saved))
    upload(memory, store.directory / "step-0000000020")
    (back,) = new_run(tmp_path / "new", life=5)
    assert target_at(memory, tmp_path / "new").fetch(back, ()) == 20
    assert verify_run(tmp_path / "new") == []
    shard = make_shard(999)
    back.load(20, shard)
    assert {name: one.iteration for name, one in shard.operators.items()} == {
        name: 10 if name in experts else 20 for name in shard.operators
    }
    expected = {name: make_shard(one.iteration).operators[name] for name, one in shard.operators.items()}
    assert_same_bits(shard, Shard(expected, make_shard(20).others))


def test_only_slabs_that_are_not_whole_are_fetched(
    tmp_path: Path, memory: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = copied_run(tmp_path / "run", memory)
    damaged = weights_file(store.directory / "step-0000000020")
    damaged.write_bytes(b"damaged")
    opened, read = list[str](), memory.open

    def counted(folder: str, file: str, record: FileRecord | None = None) -> Iterator[bytes]:
        opened.append(file)
        return read(folder, file, record)

    monkeypatch.setattr(memory, "open", counted)
    assert target_at(memory, tmp_path / "run").fetch(store, (20,)) == 20
    assert [name for name in opened if is_slab(Path(name))] == [damaged.name]
    assert verify_run(tmp_path / "run") == []
    assert_whole(store, 20)


def test_a_copy_never_takes_the_place_of_slabs_that_a_checkpoint_here_lists(tmp_path: Path, memory: Place) -> None:
    """Two directories of one run have counted their lives alike: names are the same, bytes are not."""
    experts = frozenset(list(make_shard().operators)[1:])
    (there,) = new_run(tmp_path / "there")
    for iteration, saved in ((10, experts), (20, experts), (30, frozenset[str]())):
        save(there, iteration, Contents.sparse(experts, saved))
    upload(memory, there.directory / "step-0000000010")
    upload(memory, there.directory / "step-0000000030")
    newest = folder_of(memory, 30)
    hidden = memory.read(newest, COMMIT)
    overwrite(memory, newest, COMMIT, b"damaged for now")
    (here,) = new_run(tmp_path / "here")
    assert target_at(memory, tmp_path / "here").fetch(here, ()) == 10
    other = make_snapshot(20, seed=777)
    other.contents = Contents.sparse(experts, experts)
    here.write(other)
    assert here.commit(20, 5.0, threading.Event()).committed
    overwrite(memory, newest, COMMIT, hidden)
    target = target_at(memory, tmp_path / "here")
    assert target.fetch(here, ()) is None
    assert "is not fetched: its rank-00000." in target.reports()[-1].message
    assert verify_run(tmp_path / "here") == []


def test_a_checkpoint_of_weights_alone_is_neither_copied_nor_fetched(tmp_path: Path, memory: Place) -> None:
    store = copied_run(tmp_path / "run", memory, (10,))
    directory = commit([store], 20)
    whole = commit_file(directory).read_bytes()
    edit_commit(directory, partial(dict.update, weights_only=True))
    with pytest.raises(CheckpointError, match="was thinned to its weights meanwhile"):
        upload(memory, directory)
    commit_file(directory).write_bytes(whole)
    upload(memory, directory)
    newest = folder_of(memory, 20)
    thinned = Manifest.parse(whole).model_copy(update={"weights_only": True}).to_bytes()
    name = f"step-0000000020.{RUN}.{hashlib.sha256(thinned + memory.read(newest, 'run.json')).hexdigest()[:32]}"
    memory.make(name)
    for file in memory.list(newest):
        memory.write(name, file, thinned if file == COMMIT else memory.read(newest, file))
    memory.drop(newest)
    assert fetched(memory, tmp_path / "new") == 10


def test_links_where_a_fetch_writes_lead_nowhere(tmp_path: Path, memory: Place) -> None:
    upload(memory, commit(new_run(tmp_path / "run"), 10))
    outside = tmp_path / "outside"
    outside.mkdir()
    there = outside / "rank-00000-1.0.json"
    there.write_text("of somebody else")
    for link in ("fetching-step-0000000010", "slabs"):
        checkpoints = tmp_path / link / "checkpoints"
        checkpoints.mkdir(parents=True)
        (checkpoints / link).symlink_to(outside)
        if link == "slabs":
            with pytest.raises(RecoveryError, match="slabs is a symbolic link"):
                fetched(memory, checkpoints.parent)
        else:
            assert fetched(memory, checkpoints.parent) == 10
    assert list(outside.iterdir()) == [there]
    assert there.read_text() == "of somebody else"


def test_manifests_cannot_name_files_outside(tmp_path: Path, local: Place) -> None:
    """With hashes that fit: somebody may write at the target, but not into the run directory's surroundings."""
    upload(local, commit(new_run(tmp_path / "run"), 10))
    folder = tmp_path / "target" / "checkpoints" / local.list()[0]
    (tmp_path / "target" / "evil").write_bytes(b"evil")
    digest = hash_file(tmp_path / "target" / "evil")
    for name in ("../../evil", "/etc/cpsr-evil", "rank-00000-1.0.json/../x", "run.json"):
        forged = tmp_path / "target" / "checkpoints" / "forged"
        shutil.rmtree(forged, ignore_errors=True)
        shutil.copytree(folder, forged)
        listed = {name: {"bytes": digest.bytes, "xxh3_128": digest.xxh3_128}}
        edit_part(forged, partial(dict.update, files=listed))
        with pytest.raises(CopyDamagedError, match="is refused"):
            read_copy(local, forged.name)


TWO_RANKS = """
import sys, json, os
from pathlib import Path
import torch.distributed as dist
from cpsr.checkpoint.store import CheckpointStore
from cpsr.errors import CPSRError
from cpsr.ranks.group import Group
from cpsr.checkpoint.remote.target import CheckpointTarget
from cpsr.config import CheckpointConfig
from tests.checkpoint.remote.conftest import RUN, assert_whole

dist.init_process_group("gloo")
group, base = Group(), Path(sys.argv[1]).parent
found, kinds = [], []
for name in ("whole", "hurt"):
    run = base / f"new-{name}"
    target = CheckpointTarget(CheckpointConfig(target=f"file://{base}/{name}"), run, group)
    target.adopt_run()
    store = CheckpointStore(run, group.rank, group.size, RUN, 7)
    if group.rank == 0:
        store.prepare()
    found.append(target.fetch(store, ()))
    kinds += [one.kind for one in target.reports()]
    assert_whole(store, found[-1], group.rank)
try:
    target = CheckpointTarget(CheckpointConfig(target=f"file://{base}/lost"), base / "new-lost", group)
    target.adopt_run()
    store = CheckpointStore(base / "new-lost", group.rank, group.size, RUN, 7)
    if group.rank == 0:
        store.prepare()
    target.fetch(store, ())
except CPSRError as error:
    found.append(str(error))
kinds += [one.kind for one in target.reports()]
Path(f"{sys.argv[1]}.{group.rank}").write_text(json.dumps([found, kinds]))
dist.destroy_process_group()
"""


def test_two_ranks_fetch_the_same(tmp_path: Path) -> None:
    """Damage that rank 1 alone meets takes both to the older copy; where there is none, both hear why."""
    stores = new_run(tmp_path / "run", world_size=2)
    directories = [commit(stores, iteration) for iteration in (10, 20)]
    for name in ("whole", "hurt", "lost"):
        place = open_place(f"file://{tmp_path}/{name}")
        for directory in directories[1:] if name == "lost" else directories:
            upload(place, directory)
        if name != "whole":
            hurt = damage(place, folder_of(place, 20), "weights", 1)
    (first, kinds), (second, other_kinds) = two_ranks.run(TWO_RANKS, tmp_path)
    damaged = ["target adopted", "target copy damaged"]
    assert kinds == ["target adopted", "target fetched", *damaged, "target fetched", *damaged]
    assert other_kinds == [], "what all ranks do is reported once"
    assert first == second
    assert first[:2] == [20, 10]
    assert "rank 1" in first[2]
    assert hurt in first[2]


# During training


class Copied:
    """A run of one rank whose checkpoints are copied, and what was reported of it."""

    def __init__(self, run_dir: Path, place: Place, keep: int = 2, timeout_seconds: float = 600.0) -> None:
        self.store, self.place = new_run(run_dir)[0], place
        self.faults = Faults(place)
        self.target = target_at(place, run_dir, keep, timeout_seconds)
        self.target.start(self.store)
        self.events: list[tuple[str, str, int]] = []

    def commit(self, iteration: int) -> None:
        commit([self.store], iteration)
        self.target.notify(iteration)

    def wait_for(self, kind: str, count: int = 1) -> None:
        def is_there() -> bool:
            self.events += [(one.kind, one.message, one.level) for one in self.target.reports()]
            return sum(event[0] == kind for event in self.events) >= count

        wait_until(is_there)

    def close(self) -> None:
        self.target.close(PATIENCE_SECONDS)
        self.wait_for("", 0)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_every_checkpoint_is_copied_and_the_newest_stay(tmp_path: Path, memory: Place) -> None:
    run = Copied(tmp_path / "run", memory)
    for number, iteration in enumerate((10, 20, 30), start=1):
        run.commit(iteration)
        run.wait_for("target copied", number)
    run.close()
    assert committed_at(memory) == [20, 30]
    assert {level for _, _, level in run.events} == {logging.DEBUG}  # nothing that people must read
    assert fetched(memory, tmp_path / "new") == 30


def test_a_slow_target_holds_nothing_up_and_the_newest_is_next(tmp_path: Path, memory: Place) -> None:
    run = Copied(tmp_path / "run", memory, keep=9)
    run.commit(10)
    run.wait_for("target copied")
    run.faults.arm(before={20: run.faults.answers.clear})
    run.commit(20)
    wait_until(lambda: not run.faults.answers.is_set())  # in the middle of the copy
    for iteration in (30, 40, 50, 60):
        commit([run.store], iteration)
        run.store.retain(RETENTION)
        started = time.monotonic()
        run.target.notify(iteration)
        assert time.monotonic() - started < 0.1
    assert [info.iteration for info in run.store.catalogue() if info.full] == [20, 50, 60]  # 20 stays while it is read
    run.faults.answers.set()
    run.wait_for("target copied", 3)
    run.close()
    assert committed_at(memory) == [10, 20, 60]
    run.store.retain(RETENTION)
    assert [info.iteration for info in run.store.catalogue() if info.full] == [50, 60]


def test_a_target_that_hangs_is_reported_with_the_next_checkpoint(tmp_path: Path, memory: Place) -> None:
    run = Copied(tmp_path / "run", memory, timeout_seconds=0.2)
    run.commit(10)
    run.wait_for("target copied")
    run.faults.arm(before={9: run.faults.answers.clear})
    run.commit(20)
    wait_until(lambda: not run.faults.answers.is_set())
    run.commit(30)
    time.sleep(0.3)
    run.commit(40)
    run.commit(50)
    run.wait_for("target hangs", 2)
    assert [level for kind, _, level in run.events if kind == "target hangs"] == [logging.WARNING, logging.DEBUG]
    run.faults.arm()
    run.wait_for("target copied", 3)
    run.close()
    assert committed_at(memory) == [20, 50]


def test_a_target_that_hangs_at_the_end_is_reported_and_not_waited_for(tmp_path: Path, memory: Place) -> None:
    run = Copied(tmp_path / "run", memory)
    run.faults.arm(before={9: run.faults.answers.clear})
    run.commit(10)
    wait_until(lambda: not run.faults.answers.is_set())
    started = time.monotonic()
    run.target.close(0.0)
    assert time.monotonic() - started < 5.0
    run.wait_for("target copy stopped")
    assert run.events[-1][2] == logging.WARNING
    run.faults.arm()
    wait_until(lambda: run.store.copied_iteration is None)


def test_an_unreachable_target_is_logged_once_and_tried_again(tmp_path: Path, memory: Place) -> None:
    run = Copied(tmp_path / "run", memory)
    run.faults.arm(1)
    for number, iteration in enumerate((10, 20, 30), start=1):
        run.commit(iteration)
        run.wait_for("target copy failed", number)
    run.faults.arm()
    run.commit(40)
    run.wait_for("target copied")
    run.close()
    failed, copied = run.events[:3], run.events[3]
    assert [(kind, level) for kind, _, level in failed] == [
        ("target copy failed", level) for level in (logging.WARNING, logging.DEBUG, logging.DEBUG)
    ]
    assert all("does not answer" in message for _, message, _ in failed)
    assert (copied[0], copied[2]) == ("target copied", logging.INFO)
    assert fetched(memory, tmp_path / "new") == 40


def test_another_job_of_the_run_that_is_ahead_is_reported(tmp_path: Path, memory: Place) -> None:
    """Two disks adopted the same run, and both go on: the one that is behind hears why nothing of it is copied."""
    copied_run(tmp_path / "other", memory, (10, 20))
    (store,) = new_run(tmp_path / "run", life=2)
    commit([store], 15)
    (report,) = copy_newest(memory, store)
    assert (report.kind, report.iteration, report.level) == ("target ahead", 15, logging.WARNING)
    assert committed_at(memory) == [10, 20]
    commit([store], 25)
    assert [one.kind for one in copy_newest(memory, store)] == ["target ahead"]
    commit([store], 35)
    assert [one.kind for one in copy_newest(memory, store)] == ["target copied"]
    assert committed_at(memory) == [20, 35]


def test_a_roll_back_is_followed_at_once(tmp_path: Path, memory: Place) -> None:
    run = Copied(tmp_path / "run", memory)
    for number, iteration in enumerate((10, 20), start=1):
        run.commit(iteration)
        run.wait_for("target copied", number)
    run.store.abandon_after(10, "the predicted state diverged")
    run.target.notify(10)  # as the first step after a roll-back does
    wait_until(lambda: committed_at(memory) == [10])
    assert fetched(memory, tmp_path / "new") == 10
    run.commit(20)  # the same iteration again
    run.wait_for("target copied", 3)
    run.close()
    assert committed_at(memory) == [10, 20]
    assert [one.sequence for one in scan(memory).usable.values()] == [1, 3]


def test_a_checkpoint_that_no_life_had_time_to_copy_is_copied_by_the_next(tmp_path: Path, memory: Place) -> None:
    commit(new_run(tmp_path / "run"), 10)
    target = target_at(memory, tmp_path / "run")
    target.adopt_run()
    store = CheckpointStore(tmp_path / "run", 0, 1, RUN, 2)
    assert target.fetch(store, ()) is None
    target.start(store)
    target.notify(10)
    target.close(PATIENCE_SECONDS)
    assert committed_at(memory) == [10]


def test_a_target_that_has_lost_its_copies_is_reported(tmp_path: Path, local: Place) -> None:
    """The disk is not mounted, and its directory can be written."""
    store = copied_run(tmp_path / "run", local)
    shutil.rmtree(tmp_path / "target" / "checkpoints")
    target = target_at(local, tmp_path / "run")
    assert target.fetch(store, ()) is None
    (report,) = target.reports()
    assert (report.kind, report.iteration, report.level) == ("target empty", 20, logging.WARNING)
    assert "mounted" in report.message
    copy_newest(local, store)
    target = target_at(local, tmp_path / "run")
    assert target.fetch(store, ()) is None
    assert target.reports() == []


def test_verify_passes_whole_copies_and_names_damage(tmp_path: Path, local: Place) -> None:
    assert CliRunner().invoke(app, ["verify", local.shown]).exit_code == 2, "nothing is committed there"
    copied_run(tmp_path / "run", local)
    assert CliRunner().invoke(app, ["verify", local.shown]).exit_code == 0
    hurt, whole = (folder_of(local, iteration) for iteration in (10, 20))
    file = damage(local, hurt, "rest")
    done = CliRunner().invoke(app, ["verify", local.shown])
    assert done.exit_code == 1
    assert local.name(hurt, file) in done.stdout
    assert whole not in done.stdout
