"""A copy fetched into a run directory: verified, committed there like any save, or not there."""

import hashlib
import itertools
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from cpsr.checkpoint.contents import Contents
from cpsr.checkpoint.files import hash_file
from cpsr.checkpoint.manifest import commit_record
from cpsr.checkpoint.remote.catalogue import CopyDamagedError, read_copy
from cpsr.checkpoint.remote.download import fetch_ranks, prepare_fetch, put_in_place
from cpsr.checkpoint.remote.place import open_place
from cpsr.checkpoint.store import CheckpointStore, verify_run
from cpsr.errors import TargetError
from cpsr.state.shard import Shard
from tests.checkpoint.conftest import assert_same_bits, make_shard, save
from tests.checkpoint.remote.conftest import RUN, FaultySystem, assert_whole, commit, new_run, send

FOLDER = "step-0000000010"


def test_ranks_fetch_their_own_files_and_rank_0_commits(tmp_path: Path, url: str) -> None:
    place = open_place(url)
    send(place, tmp_path / "run", commit(new_run(tmp_path / "run", world_size=2), 10))
    copy = read_copy(place, FOLDER)
    stores = new_run(tmp_path / "new", world_size=2, life=5)
    prepare_fetch(tmp_path / "new", copy)
    sizes = [fetch_ranks(place, copy, [rank], tmp_path / "new") for rank in (1, 0)]
    assert sum(sizes) == copy.manifest.state_bytes()
    assert stores[0].catalogue() == []
    put_in_place(copy, tmp_path / "new", stores[0], "a test")
    assert [(info.iteration, info.full) for info in stores[0].catalogue()] == [(10, True)]
    for rank, store in enumerate(stores):
        assert_whole(store, 10, rank)
    assert not (tmp_path / "new" / "fetching").exists()
    commit(stores, 20)  # the run goes on, its commits counted from there
    assert [info.sequence for info in stores[0].catalogue()] == [1, 2]


def test_a_sparse_checkpoint_comes_back_with_experts_of_their_ages(tmp_path: Path, url: str) -> None:
    (store,) = new_run(tmp_path / "run")
    experts = frozenset(list(make_shard().operators)[1:])
    for iteration, saved in ((10, experts), (20, frozenset[str]())):
        save(store, iteration, Contents.sparse(experts, saved))
    place = open_place(url)
    send(place, tmp_path / "run", store.directory / "step-0000000020")
    copy = read_copy(place, "step-0000000020")
    (back,) = new_run(tmp_path / "new", life=5)
    prepare_fetch(tmp_path / "new", copy)
    fetch_ranks(place, copy, [0], tmp_path / "new")
    put_in_place(copy, tmp_path / "new", back, "a test")
    assert verify_run(tmp_path / "new") == []
    shard = make_shard(999)
    back.load(20, shard)
    assert {name: one.iteration for name, one in shard.operators.items()} == {
        name: 10 if name in experts else 20 for name in shard.operators
    }
    expected = {name: make_shard(one.iteration).operators[name] for name, one in shard.operators.items()}
    assert_same_bits(shard, Shard(expected, make_shard(20).others))


def test_what_lies_in_its_place_is_set_aside_and_not_deleted(tmp_path: Path, url: str) -> None:
    run = tmp_path / "run"
    stores = new_run(run)
    directory = commit(stores, 10)
    place = open_place(url)
    send(place, run, directory)
    (directory / "rank-00000.params.safetensors").write_bytes(b"damaged")
    copy = read_copy(place, FOLDER)
    prepare_fetch(run, copy)
    fetch_ranks(place, copy, [0], run)
    put_in_place(copy, run, stores[0], "a test")
    assert_whole(stores[0], 10)
    assert sorted(path.name for path in stores[0].directory.iterdir()) == [f"damaged-{FOLDER}-0", FOLDER]


def test_a_fetch_that_was_cut_off_goes_on_with_what_is_whole(tmp_path: Path, faulty: type[FaultySystem]) -> None:
    place = open_place("faulty://bucket/target")
    send(place, tmp_path / "run", commit(new_run(tmp_path / "run"), 10))
    copy = read_copy(place, FOLDER)
    seen = set()
    for call in itertools.count(1):
        new = tmp_path / f"new-{call}"
        store = new_run(new)[0]
        prepare_fetch(new, copy)
        faulty.arm(call)
        try:
            fetch_ranks(place, copy, [0], new)
        except CopyDamagedError:
            raise
        except TargetError:
            faulty.arm(None)
        else:
            break
        assert store.catalogue() == []
        names = {path.name for path in (new / "fetching" / FOLDER).iterdir()}
        prepare_fetch(new, copy)  # the next start
        seen.add(fetch_ranks(place, copy, [0], new))
        assert names <= {path.name for path in (new / "fetching" / FOLDER).iterdir()}
        put_in_place(copy, new, store, "a test")
        assert_whole(store, 10)
    sizes = sorted(copy.manifest.ranks[0].files.values())
    assert len(seen) == len(sizes)
    assert max(seen) == sum(sizes)


def test_a_staged_file_that_was_altered_is_fetched_again(tmp_path: Path, url: str) -> None:
    place = open_place(url)
    send(place, tmp_path / "run", commit(new_run(tmp_path / "run"), 10))
    copy, new = read_copy(place, FOLDER), tmp_path / "new"
    store = new_run(new)[0]
    prepare_fetch(new, copy)
    fetch_ranks(place, copy, [0], new)
    staged = new / "fetching" / FOLDER
    name = "rank-00000.moments.safetensors"
    (staged / name).write_bytes(bytes((staged / name).stat().st_size))
    (staged / ".left.tmp").write_bytes(b"by a process that was killed")
    (new / "fetching" / "step-0000000005").mkdir()
    prepare_fetch(new, copy)
    assert [path.name for path in (new / "fetching").iterdir()] == [FOLDER]
    assert fetch_ranks(place, copy, [0], new) == copy.manifest.ranks[0].files[name]
    put_in_place(copy, new, store, "a test")
    assert not list(store.directory.rglob(".*"))
    assert_whole(store, 10)


def test_an_endless_file_is_not_read_to_its_end(tmp_path: Path) -> None:
    place = open_place(f"file://{tmp_path}/target")
    send(place, tmp_path / "run", commit(new_run(tmp_path / "run"), 10))
    file = tmp_path / "target" / "checkpoints" / FOLDER / "rank-00000.params.safetensors"
    with file.open("r+b") as opened:
        opened.truncate(1 << 40)
    copy = read_copy(place, FOLDER)
    new_run(tmp_path / "new")
    prepare_fetch(tmp_path / "new", copy)
    with pytest.raises(CopyDamagedError, match=r"rank-00000\.params"):
        fetch_ranks(place, copy, [0], tmp_path / "new")
    assert not list((tmp_path / "new" / "fetching").rglob(".*"))


def test_a_link_or_a_pipe_at_a_local_target_is_damage(tmp_path: Path) -> None:
    place = open_place(f"file://{tmp_path}/target")
    send(place, tmp_path / "run", commit(new_run(tmp_path / "run"), 10))
    file = tmp_path / "target" / "checkpoints" / FOLDER / "rank-00000.params.safetensors"
    copy = read_copy(place, FOLDER)
    new_run(tmp_path / "new")
    replacements: list[Callable[[], None]] = [
        lambda: file.symlink_to(tmp_path / "moved"),
        lambda: os.mkfifo(file),
        file.mkdir,
    ]
    for replace in replacements:
        if file.exists() or file.is_symlink():
            shutil.move(file, tmp_path / "moved")
        replace()
        prepare_fetch(tmp_path / "new", copy)
        with pytest.raises(CopyDamagedError, match=r"rank-00000\.params"):
            fetch_ranks(place, copy, [0], tmp_path / "new")
        shutil.rmtree(file) if file.is_dir() and not file.is_symlink() else file.unlink()


def test_links_where_a_fetch_writes_lead_nowhere(tmp_path: Path, url: str) -> None:
    place = open_place(url)
    send(place, tmp_path / "run", commit(new_run(tmp_path / "run"), 10))
    copy = read_copy(place, FOLDER)
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "rank-00000.json").write_text("of somebody else")
    for link in ("fetching", f"fetching/{FOLDER}"):
        new = tmp_path / link.replace("/", "-")
        store = new_run(new)[0]
        (new / link).parent.mkdir(exist_ok=True)
        (new / link).symlink_to(outside)
        prepare_fetch(new, copy)
        fetch_ranks(place, copy, [0], new)
        put_in_place(copy, new, store, "a test")
        assert_whole(store, 10)
    assert [path.name for path in outside.iterdir()] == ["rank-00000.json"]


def test_manifests_cannot_name_files_outside(tmp_path: Path) -> None:
    """With hashes that fit: somebody may write at the target, but not into the run directory's surroundings."""
    place = open_place(f"file://{tmp_path}/target")
    send(place, tmp_path / "run", commit(new_run(tmp_path / "run"), 10))
    folder = tmp_path / "target" / "checkpoints" / FOLDER
    (tmp_path / "target" / "evil").write_bytes(b"evil")
    digest = hash_file(tmp_path / "target" / "evil")
    for name in ("../../evil", "/etc/cpsr-evil", "rank-00000.params.safetensors/../x", "run.json"):
        record = json.loads((folder / "rank-00000.json").read_bytes())
        manifest = json.loads((folder / "manifest.json").read_bytes())
        record["files"] = {name: {"bytes": digest.bytes, "xxh3_128": digest.xxh3_128}}
        text = json.dumps(record).encode()
        manifest["ranks"]["0"] = {"sha256": hashlib.sha256(text).hexdigest(), "files": {name: digest.bytes}}
        whole = json.dumps(manifest).encode()
        forged = tmp_path / "target" / "checkpoints" / "step-0000000011"
        shutil.rmtree(forged, ignore_errors=True)
        shutil.copytree(folder, forged)
        for file, data in (("rank-00000.json", text), ("manifest.json", whole), ("COMMIT", commit_record(whole))):
            (forged / file).write_bytes(data)
        with pytest.raises(CopyDamagedError, match="is refused"):
            read_copy(place, forged.name)


def test_the_run_directory_after_a_fetch_has_nothing_damaged(tmp_path: Path, url: str) -> None:
    place = open_place(url)
    send(place, tmp_path / "run", commit(new_run(tmp_path / "run"), 10))
    copy = read_copy(place, FOLDER)
    (tmp_path / "new").mkdir()
    prepare_fetch(tmp_path / "new", copy)
    fetch_ranks(place, copy, [0], tmp_path / "new")
    put_in_place(copy, tmp_path / "new", CheckpointStore(tmp_path / "new", 0, 1, RUN, 0), "a test")
    assert verify_run(tmp_path / "new") == []
