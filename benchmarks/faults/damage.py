"""Damage to committed checkpoints: every region of every file flipped and cut, files gone, swapped, of another run."""

import itertools
import json
import random
import re
import shutil
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from cpsr.benchmarks.faults.job import COMMITTED, RANKS, RUN_ID, open_run, shard_of, write_run
from cpsr.benchmarks.faults.oracle import FOREIGN, is_right, restart
from cpsr.benchmarks.faults.outcome import Outcome
from cpsr.benchmarks.harness.checkpoint_files import (
    checkpoint_files,
    commit_file,
    counterpart,
    expert_files,
    is_slab,
    kind_of,
    of_other_rank,
    record_files,
)
from cpsr.checkpoint.manifest import SLABS, Save, slab_name, step_name
from cpsr.checkpoint.store import CheckpointStore, verify_run
from cpsr.errors import CheckpointError, RunMismatchError

__all__ = ["damage_regions", "files_of", "holders", "newest", "regions"]

NEWEST, BEFORE = COMMITTED[-1], COMMITTED[-2]
HEADER_LENGTH_BYTES = 8  # a safetensors file begins with the length of its header
MANY = ("damage: flipped bit", "damage: cut off")
_JSON_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"|[-+.\w]+|[{}\[\],:]+')


@dataclass(frozen=True)
class Region:
    """Bytes `[start, stop)` of a file, and what they are."""

    name: str
    start: int
    stop: int


@dataclass(frozen=True)
class Change:
    """One way to damage a run.

    Attributes:
        scenario: its kind.
        fault: what exactly is done.
        apply: does it, in a run's `checkpoints` directory.
        blamed: names of files of which `verify_run` has to name one; empty where the checkpoint is none any more.
        hurt: iterations of the checkpoints that must not load any more.
    """

    scenario: str
    fault: str
    apply: Callable[[Path], object]
    blamed: frozenset[str]
    hurt: frozenset[int] = frozenset({NEWEST})


def newest(checkpoints: Path) -> Path:
    """Directory of the newest checkpoint."""
    return checkpoints / step_name(NEWEST)


def files_of(checkpoints: Path) -> list[Path]:
    """All files of the newest checkpoint, from the run's directory of them."""
    return sorted(path.relative_to(checkpoints) for path in checkpoint_files(newest(checkpoints)))


def regions(path: Path) -> list[Region]:
    """All bytes of a file, in pieces that mean something."""
    data = path.read_bytes()
    if is_slab(path):
        return list(_tensor_regions(data))
    start = data.index(b"{")  # of COMMIT, after the hash and a newline
    found = [Region("hash", 0, start - 1), Region("newline", start - 1, start)] if start else []
    tokens = _JSON_TOKEN.finditer(data, start)
    return found + [Region(token[0].decode()[:40], token.start(), token.end()) for token in tokens]


def holders(checkpoints: Path, *files: Path) -> frozenset[int]:
    """Iterations of the checkpoints that hold one of these files of the newest one: what is carried, several hold."""
    of_each = {iteration: checkpoint_files(checkpoints / step_name(iteration)) for iteration in COMMITTED}
    sought = {checkpoints / file for file in files}
    return frozenset(iteration for iteration, found in of_each.items() if sought & set(found))


def changes(checkpoints: Path, seed: int = 0) -> Iterator[Change]:
    """A flipped bit in, and a cut at, every region of every file of the newest checkpoint; and each file gone."""
    chance = random.Random(seed)  # noqa: S311 - nothing secret is drawn
    committed = commit_file(newest(checkpoints))
    for file in files_of(checkpoints):
        blamed, hurt = frozenset({file.name}), holders(checkpoints, file)
        for region in regions(checkpoints / file):
            offset, bit = chance.randrange(region.start, region.stop), 1 << chance.randrange(8)
            where = f"{file.name}, {region.name}"
            yield Change(MANY[0], f"{where}, byte {offset}", _edit(file, _flip(offset, bit)), blamed, hurt)
            yield Change(MANY[1], f"{where}, at {region.start}", _edit(file, _cut(region.start)), blamed, hurt)
        yield Change("damage: longer", file.name, _edit(file, lambda data: data + b"\0"), blamed, hurt)
        gone = frozenset() if checkpoints / file == committed else blamed
        yield Change("damage: file gone", file.name, _remove(file), gone, hurt)
        yield Change("damage: link in its place", f"{file.name}, to itself", _moved(file), blamed, hurt)
        if _before(checkpoints, file) != checkpoints / file:
            yield Change("damage: link in its place", f"{file.name}, to that before", _link(file), blamed, hurt)
        yield Change("damage: directory in its place", file.name, _directory(file), blamed, hurt)


def strays() -> Iterator[Change]:
    """What no checkpoint lists, among the slabs; no checkpoint is worse for it."""
    of_nothing = slab_name(0, "params", Save(NEWEST, 7, 0)), slab_name(RANKS, "moments", Save(NEWEST, 1, 0))
    for name in ("a note", ".torn.tmp", *of_nothing):
        yield Change("damage: stray slab", name, _stray(Path.touch, name), frozenset(), frozenset())
        yield Change("damage: stray slab", f"directory {name}", _stray(Path.mkdir, name), frozenset(), frozenset())
        link = _stray(lambda path: path.symlink_to(path.parents[1] / step_name(NEWEST)), name)
        yield Change("damage: stray slab", f"link {name}", link, frozenset(), frozenset())


def exchange_files(checkpoints: Path, other_run: Path) -> Iterator[Change]:
    """Files put where they do not belong: of another checkpoint, another rank, or another run of the same model.

    Args:
        checkpoints: of the run.
        other_run: the `checkpoints` directory of the other one.
    """
    both, committed = frozenset({NEWEST, BEFORE}), commit_file(newest(checkpoints)).name
    every_file = files_of(checkpoints)
    own = [file for file in every_file if holders(checkpoints, file) == {NEWEST}]
    for file in every_file:
        hurt, blamed = holders(checkpoints, file), frozenset({file.name})
        if file in own:
            names = blamed | {_before(checkpoints, file).name}
            yield Change("exchange: between checkpoints", file.name, _swap_steps([file]), names, both)
            yield Change("exchange: between checkpoints", f"{file.name}, put back", _put_back([file]), blamed)
        # The commit of the other run is whole in itself: which of the manifests are foreign, nobody can tell.
        either = {one.name for one in record_files(newest(checkpoints))} if file.name == committed else frozenset()
        yield Change("exchange: of another run", file.name, _copy(other_run, [file]), blamed | either, hurt)
        other = of_other_rank(file)
        if other is not None:
            hurt, names = holders(checkpoints, file, other), frozenset({file.name, other.name})
            yield Change("exchange: between ranks", file.name, _swap_files(file, other), names, hurt)
    manifests = [file for file in every_file if not is_slab(file)]
    tensors = [file for file in every_file if is_slab(file)]
    hurt, blamed = holders(checkpoints, *tensors), frozenset(file.name for file in tensors)
    yield Change("exchange: of another run", "all manifests", _copy(other_run, manifests), blamed)
    yield Change("exchange: of another run", "all tensors", _copy(other_run, tensors), blamed, hurt)
    # The newest is whole in itself, so that only loading, which knows the run, can refuse it.
    yield Change("exchange: of another run", "all files", _copy(other_run, every_file), frozenset(), hurt)
    slabs = [file for file in own if is_slab(file)]
    blamed = frozenset(file.name for file in slabs)
    names = blamed | {_before(checkpoints, file).name for file in slabs}
    yield Change("exchange: between checkpoints", "all slabs", _swap_steps(slabs), names, both)
    yield Change("exchange: between checkpoints", "all slabs, put back", _put_back(slabs), blamed)
    blamed = frozenset({committed})
    yield Change("exchange: between checkpoints", "all manifests", _swap_directories, blamed, both)
    yield Change("exchange: between checkpoints", "all manifests, put back", _put_back(manifests), blamed)
    yield Change("exchange: between checkpoints", "all files", _swap_steps([*slabs, *manifests]), blamed, both)


def exchange_ages(checkpoints: Path) -> Iterator[Change]:
    """Files with experts of one iteration in the place of those of another, in the newest checkpoint."""
    for rank in range(RANKS):
        for first, second in itertools.combinations(expert_files(newest(checkpoints), rank), 2):
            if kind_of(first.name) == kind_of(second.name):
                swap = _swap_files(first.relative_to(checkpoints), second.relative_to(checkpoints))
                names, hurt = (first.name, second.name), holders(checkpoints, first, second)
                yield Change("exchange: between ages", ", ".join(names), swap, frozenset(names), hurt)


def damage_regions(
    directory: Path,
    every: int = 1,
    restart_every: int = 1,
    prepare: Callable[[Path, str], None] = write_run,
) -> Iterator[Outcome]:
    """Do each change to a fresh copy of a run, and look what verifying, loading and restarting make of it.

    Args:
        directory: for the runs; it is removed again.
        every: of the flips and cuts, which are by far the most, and of the others only every so many.
        restart_every: also restart after every so many of the flips and cuts, which takes most of the time, and after
            all others.
        prepare: makes the run of an identity.
    """
    shutil.rmtree(directory, ignore_errors=True)
    base, other, run_dir = directory / "base", directory / "other", directory / "run"
    prepare(base, RUN_ID)
    prepare(other, "another-run")
    checkpoints = base / "checkpoints"
    exchanges = [*exchange_files(checkpoints, other / "checkpoints"), *exchange_ages(checkpoints)]
    todo = [*changes(checkpoints), *strays(), *exchanges]
    many = [change for scenario in MANY for change in todo if change.scenario == scenario]
    few = [change for change in todo if change.scenario not in MANY]
    for position, change in enumerate([*few[::every], *many[::every]]):
        shutil.copytree(base, run_dir)
        change.apply(run_dir / "checkpoints")
        yield _judged(run_dir, change, change.scenario not in MANY or position % restart_every == 0)
        shutil.rmtree(run_dir)
    shutil.rmtree(directory)


def _judged(run_dir: Path, change: Change, restarts: bool) -> Outcome:
    started = time.perf_counter()
    wrong = list(_found_wrong(run_dir, change))
    named = "; ".join(sorted({problem.file.name for problem in verify_run(run_dir)}))
    equal, survived = not any("loads" in one or "loaded" in one for one in wrong), not wrong
    if restarts:
        kept = set(COMMITTED) - change.hurt
        verdict = restart(run_dir, [max(kept)], kept, damaged=True)
        survived, equal = survived and verdict.survived, equal and verdict.state_equal
        wrong += [verdict.what] if verdict.what else []
    seconds = time.perf_counter() - started
    return Outcome(change.scenario, change.fault, True, survived, equal, seconds, "; ".join(wrong) or f"names {named}")


def _found_wrong(run_dir: Path, change: Change) -> Iterator[str]:
    problems = verify_run(run_dir)
    for iteration in sorted(change.hurt) if change.blamed else []:
        named = {problem.file.name for problem in problems if problem.iteration == iteration}
        if not named & change.blamed:
            yield f"of {iteration} verify names {sorted(named)}, damaged is one of {sorted(change.blamed)}"
    if {problem.iteration for problem in problems} - change.hurt:
        yield f"verify blames the checkpoints {sorted({problem.iteration or 0 for problem in problems})}"
    # A rank reads its own files and the manifests: damage to the other's is that one's to refuse.
    for iteration in sorted(change.hurt):
        refusals = list(_refusals(open_run(run_dir, 1), iteration))
        if not any(refused for refused, _ in refusals):
            yield f"checkpoint {iteration} loads on every rank, although it is damaged"
        yield from (what for _, what in refusals if what)


def _refusals(stores: Collection[CheckpointStore], iteration: int) -> Iterator[tuple[bool, str]]:
    """Of each rank whether it refuses the checkpoint, and what is wrong with that."""
    for store in stores:
        shard = shard_of(store.rank, FOREIGN)
        try:
            scalars = store.load(iteration, shard)
        except (CheckpointError, RunMismatchError):
            yield True, ""
        else:
            right = is_right(store.rank, iteration, shard, scalars)
            yield False, "" if right else f"checkpoint {iteration} loads wrong values on rank {store.rank}"


def _tensor_regions(data: bytes) -> Iterator[Region]:
    header_end = HEADER_LENGTH_BYTES + int.from_bytes(data[:HEADER_LENGTH_BYTES], "little")
    yield Region("length of the header", 0, HEADER_LENGTH_BYTES)
    header = data[HEADER_LENGTH_BYTES:header_end]
    for token in _JSON_TOKEN.finditer(header):
        start = HEADER_LENGTH_BYTES + token.start()
        yield Region(f"header {token[0].decode()[:40]}", start, HEADER_LENGTH_BYTES + token.end())
    for name, tensor in json.loads(header).items():
        if name != "__metadata__" and tensor["data_offsets"][0] < tensor["data_offsets"][1]:
            start, stop = (header_end + offset for offset in tensor["data_offsets"])
            yield Region(name, start, stop)


def _edit(file: Path, edited: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    """Replace the content of a file of the newest checkpoint."""

    def apply(checkpoints: Path) -> None:
        path = checkpoints / file
        path.write_bytes(edited(path.read_bytes()))

    return apply


def _flip(offset: int, bit: int) -> Callable[[bytes], bytes]:
    return lambda data: data[:offset] + bytes([data[offset] ^ bit]) + data[offset + 1 :]


def _cut(size: int) -> Callable[[bytes], bytes]:
    return lambda data: data[:size]


def _before(checkpoints: Path, file: Path) -> Path:
    """Where the checkpoint before has what this file is in the newest one."""
    return counterpart(checkpoints / file, checkpoints / step_name(BEFORE))


def _remove(file: Path) -> Callable[[Path], object]:
    return lambda checkpoints: (checkpoints / file).unlink()


def _moved(file: Path) -> Callable[[Path], object]:
    """A link to where the file now lies, as someone leaves it who needs space."""

    def apply(checkpoints: Path) -> None:
        path, moved = checkpoints / file, checkpoints.parent / "moved"
        path.rename(moved)
        path.symlink_to(moved)

    return apply


def _stray(make: Callable[[Path], object], name: str) -> Callable[[Path], object]:
    return lambda checkpoints: make(checkpoints / SLABS / name)


def _link(file: Path) -> Callable[[Path], object]:
    """A link to the file of the checkpoint before, as a program that saves space might leave it."""

    def apply(checkpoints: Path) -> None:
        path, before = checkpoints / file, _before(checkpoints, file)
        path.unlink()
        path.symlink_to(before)

    return apply


def _directory(file: Path) -> Callable[[Path], object]:
    def apply(checkpoints: Path) -> None:
        path = checkpoints / file
        path.unlink()
        path.mkdir()

    return apply


def _exchange(first: Path, second: Path) -> None:
    aside = first.with_name("aside")
    first.rename(aside)
    second.rename(first)
    aside.rename(second)


def _swap_steps(files: Collection[Path]) -> Callable[[Path], object]:
    def apply(checkpoints: Path) -> None:
        for file in files:
            _exchange(checkpoints / file, _before(checkpoints, file))

    return apply


def _put_back(files: Collection[Path]) -> Callable[[Path], object]:
    """Copies of the files of the checkpoint before, as of a backup that was put back in part."""

    def apply(checkpoints: Path) -> None:
        for file in files:
            shutil.copyfile(_before(checkpoints, file), checkpoints / file)

    return apply


def _swap_files(file: Path, other: Path) -> Callable[[Path], object]:
    return lambda checkpoints: _exchange(checkpoints / file, checkpoints / other)


def _swap_directories(checkpoints: Path) -> None:
    _exchange(newest(checkpoints), checkpoints / step_name(BEFORE))


def _copy(other_run: Path, files: Collection[Path]) -> Callable[[Path], object]:
    def apply(checkpoints: Path) -> None:
        for file in files:
            shutil.copyfile(other_run / file, checkpoints / file)

    return apply
