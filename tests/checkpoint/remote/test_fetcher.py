"""What a restart gets from a target: the newest whole copy that is newer than what is left, or a clear refusal."""

import logging
import shutil
import threading
import time
from pathlib import Path

import pytest

from cpsr.checkpoint.remote import target as module
from cpsr.checkpoint.remote.copies import scan, set_aside, verify
from cpsr.checkpoint.remote.place import open_place
from cpsr.checkpoint.store import CheckpointStore
from cpsr.errors import RecoveryError, RunMismatchError
from tests import two_ranks
from tests.checkpoint.remote.conftest import (
    FaultySystem,
    assert_whole,
    commit,
    committed_at,
    fetched,
    new_run,
    send,
    target_at,
)

REGIONS = 12  # of a large file


def copied_run(run_dir: Path, url: str, iterations: tuple[int, ...] = (10, 20)) -> CheckpointStore:
    """A run whose checkpoints are all at the target."""
    stores = new_run(run_dir)
    for iteration in iterations:
        send(open_place(url), commit(stores, iteration))
    return stores[0]


def fetch(url: str, run_dir: Path, store: CheckpointStore, damaged: tuple[int, ...] = ()) -> int | None:
    return target_at(open_place(url), run_dir).fetch(store, damaged)


def test_an_empty_target_and_a_new_disk_are_a_new_run(tmp_path: Path, url: str) -> None:
    assert fetched(open_place(url), tmp_path / "run") is None
    assert not (tmp_path / "run" / "run.json").exists()


def test_a_newer_copy_is_fetched_beside_what_is_left(tmp_path: Path, url: str) -> None:
    store = copied_run(tmp_path / "run", url, (10, 20, 30))
    shutil.rmtree(store.directory / "step-0000000020")
    shutil.rmtree(store.directory / "step-0000000030")
    assert fetch(url, tmp_path / "run", store) == 30
    assert [info.iteration for info in store.catalogue()] == [10, 30]
    assert_whole(store, 30)


def test_a_damaged_checkpoint_is_replaced_by_its_copy_and_each_copy_is_tried_once(tmp_path: Path, url: str) -> None:
    store = copied_run(tmp_path / "run", url)
    (store.directory / "step-0000000020" / "rank-00000.params.safetensors").write_bytes(b"damaged")
    target = target_at(open_place(url), tmp_path / "run")
    assert target.fetch(store, ()) is None  # the restart has yet to find out
    assert target.fetch(store, (20,)) == 20
    assert_whole(store, 20)
    assert target.fetch(store, (20,)) is None  # also damaged: this disk is
    assert target.fetch(store, (10, 20)) == 10


def test_states_that_the_run_has_given_up_do_not_come_back(tmp_path: Path, url: str) -> None:
    store = copied_run(tmp_path / "run", url)
    store.abandon_after(10, "the predicted state diverged")
    assert fetch(url, tmp_path / "run", store) is None
    commit([store], 20)  # the same iteration again, of the state that holds
    shutil.rmtree(store.directory / "step-0000000020")
    assert fetch(url, tmp_path / "run", store) is None
    set_aside(open_place(url), "step-0000000020", "a test")
    assert fetched(open_place(url), tmp_path / "new") == 10


def test_another_runs_target_is_refused(tmp_path: Path, url: str) -> None:
    copied_run(tmp_path / "run", url)
    store = new_run(tmp_path / "other", run_id="ab" * 16)[0]
    with pytest.raises(RunMismatchError, match="holds copies of another run"):
        target_at(open_place(url), tmp_path / "other").fetch(store, ())
    assert list(store.directory.iterdir()) == []


def test_a_target_that_does_not_answer(tmp_path: Path, faulty: type[FaultySystem]) -> None:
    """With something to go on from it is reported; with nothing it is an error, and never a start from scratch."""
    url = "faulty://bucket/target"
    store = copied_run(tmp_path / "run", url)
    shutil.rmtree(store.directory / "step-0000000020")
    target = target_at(open_place(url), tmp_path / "run")
    faulty.arm(1)
    assert target.fetch(store, ()) is None
    assert [(one.kind, one.level) for one in target.reports()] == [("target not reachable", logging.WARNING)]
    with pytest.raises(RecoveryError, match="holds no checkpoint to restart at, and the target cannot be read"):
        target.fetch(store, (10,))
    with pytest.raises(RecoveryError, match="does not answer"):
        fetched(open_place(url), tmp_path / "new")
    assert not (tmp_path / "new" / "run.json").exists()


def test_a_target_that_hangs_holds_up_no_restart_that_has_a_checkpoint(
    tmp_path: Path, faulty: type[FaultySystem], monkeypatch: pytest.MonkeyPatch
) -> None:
    url = "faulty://bucket/target"
    store = copied_run(tmp_path / "run", url)
    target = target_at(open_place(url), tmp_path / "run")
    monkeypatch.setattr(module, "ANSWER_SECONDS", 0.2)
    faulty.arm(None, hangs_at=3)
    started = time.monotonic()
    assert target.fetch(store, ()) is None
    assert time.monotonic() - started < 5.0
    assert [one.kind for one in target.reports()] == ["target not reachable"]
    # With nothing to go on from, it is waited for.
    threading.Timer(0.6, faulty.answers.set).start()
    faulty.answers.clear()
    assert target.fetch(store, (10, 20)) == 20


def test_a_target_that_goes_away_while_fetching(tmp_path: Path, faulty: type[FaultySystem]) -> None:
    """What is newer is not given up: the start ends, and the next one goes on with what is there."""
    url = "faulty://bucket/target"
    store = copied_run(tmp_path / "run", url)
    shutil.rmtree(store.directory / "step-0000000020")
    for call in range(1, 100):
        faulty.arm(call)
        try:
            assert fetch(url, tmp_path / "run", store) in (20, None)
        except RecoveryError as error:
            assert "could not be fetched" in str(error)  # noqa: PT017 - not every call raises
        else:
            if [info.iteration for info in store.catalogue()] == [10, 20]:
                break
        assert [info.iteration for info in store.catalogue()] == [10]
        faulty.arm(None)
    assert call > 10
    assert_whole(store, 20)


def test_all_copies_damaged_is_not_a_new_start(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/target"
    copied_run(tmp_path / "run", url)
    for file in (tmp_path / "target").rglob("*.params.safetensors"):
        file.write_bytes(b"damaged")
    with pytest.raises(RecoveryError, match=r"nothing that is committed at .* can be used .*params"):
        fetched(open_place(url), tmp_path / "new")
    assert committed_at(open_place(url)) == [10, 20]  # nothing was set aside
    for file in (tmp_path / "target").rglob("COMMIT"):
        file.write_bytes(b"damaged")
    with pytest.raises(RecoveryError, match="nothing that is committed"):
        fetched(open_place(url), tmp_path / "newer")


def altered(data: bytes) -> dict[str, bytes]:
    """A file with one byte changed, in small files each and in large ones one in every region; cut off; longer."""
    step = 5 if len(data) <= 65 else max(len(data) // REGIONS, 1)
    found = {f"byte {at}": data[:at] + bytes([data[at] ^ 0x40]) + data[at + 1 :] for at in range(0, len(data), step)}
    found |= {f"cut at {at}": data[:at] for at in (0, len(data) // 2, len(data) - 1)}
    return found | {"longer": data + b"\0"}


def test_every_byte_region_of_the_newest_copy(tmp_path: Path) -> None:
    """Whatever is damaged there, it is found and named, the older copy is used, and nothing of it stays behind."""
    url = f"file://{tmp_path}/target"
    copied_run(tmp_path / "run", url)
    folder = tmp_path / "target" / "checkpoints" / "step-0000000020"
    tried = 0
    for file in list(folder.iterdir()):
        data = file.read_bytes()
        for how, content in altered(data).items():
            file.write_bytes(content)
            problems = verify(open_place(url))
            assert problems, (file, how)
            assert all("step-0000000020" in problem for problem in problems), (file, how)
            assert_older_is_used(url, tmp_path, f"{file} {how}")
            tried += 1
        file.unlink()
        assert_older_is_used(url, tmp_path, f"{file} is gone")
        file.write_bytes(data)
    assert fetched(open_place(url), tmp_path / "new") == 20
    assert tried > 100


def assert_older_is_used(url: str, base: Path, what: str) -> None:
    assert fetched(open_place(url), base / "new") == 10, what
    shutil.rmtree(base / "new")
    (base / "target" / "checkpoints" / "step-0000000020" / "SET_ASIDE").unlink(missing_ok=True)


def test_a_damaged_copy_is_set_aside_once_another_is_used(tmp_path: Path, url: str) -> None:
    copied_run(tmp_path / "run", url, (10, 20, 30))
    place = open_place(url)
    place.remove("step-0000000030", first="rank-00000.params.safetensors")
    send(place, tmp_path / "run" / "checkpoints" / "step-0000000030")
    place.write("step-0000000030", "rank-00000.moments.safetensors", b"damaged")
    assert committed_at(place) == [10, 20, 30]
    assert fetched(place, tmp_path / "new") == 20
    assert scan(place).set_aside == ["step-0000000030"]
    assert committed_at(place) == [10, 20]


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
            send(place, directory)
        if name != "whole":
            place.write("step-0000000020", "rank-00001.params.safetensors", b"damaged")
    (first, kinds), (second, other_kinds) = two_ranks.run(TWO_RANKS, tmp_path)
    once = ["target adopted", "target fetched"]
    damaged = ["target adopted", "target copy damaged", "target set aside", "target fetched"]
    assert kinds == [*once, *damaged, "target adopted", "target copy damaged"]
    assert other_kinds == [], "what all ranks do is reported once"
    assert first == second
    assert first[:2] == [20, 10]
    assert "rank 1" in first[2]
    assert "rank-00001.params" in first[2]
