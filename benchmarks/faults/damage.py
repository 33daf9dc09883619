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

from cpsr.benchmarks.faults.job import COMMITTED, RUN_ID, copy_run, open_run, shard_of, write_run
from cpsr.benchmarks.faults.oracle import FOREIGN, is_right, restart
from cpsr.benchmarks.faults.outcome import Outcome
from cpsr.checkpoint.manifest import experts_taken_at
from cpsr.checkpoint.store import CheckpointStore, verify_run
from cpsr.errors import CheckpointError, RunMismatchError

__all__ = ["damage_regions", "files_of", "holders", "regions", "step"]

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


def step(iteration: int) -> str:
    """Directory of a checkpoint."""
    return f"step-{iteration:010d}"


def files_of(checkpoints: Path, iteration: int = NEWEST) -> list[str]:
    """Names of all files of a checkpoint."""
    return sorted(path.name for path in (checkpoints / step(iteration)).iterdir())


def regions(path: Path) -> list[Region]:
    """All bytes of a file, in pieces that mean something."""
    data = path.read_bytes()
    if path.suffix == ".safetensors":
        return list(_tensor_regions(data))
    if path.suffix == ".json":
        tokens = list(_JSON_TOKEN.finditer(data))
        return [Region(token[0].decode()[:40], token.start(), token.end()) for token in tokens]
    lines = list(re.finditer(rb"[^\n]+|\n", data))
    return [Region(repr(line[0].decode()[:20]), line.start(), line.end()) for line in lines]


def holders(checkpoints: Path, *names: str) -> frozenset[int]:
    """Iterations of the checkpoints that hold one of these files of the newest one: what is carried, several hold."""
    found = {NEWEST}
    for name, iteration in itertools.product(names, COMMITTED):
        path = checkpoints / step(iteration) / name
        if path.exists() and path.samefile(checkpoints / step(NEWEST) / name):
            found.add(iteration)
    return frozenset(found)


def changes(checkpoints: Path, seed: int = 0) -> Iterator[Change]:
    """A flipped bit in, and a cut at, every region of every file of the newest checkpoint; and each file gone."""
    chance = random.Random(seed)  # noqa: S311 - nothing secret is drawn
    for name in files_of(checkpoints):
        blamed, hurt = blamed_for(name), holders(checkpoints, name)
        for region in regions(checkpoints / step(NEWEST) / name):
            offset, bit = chance.randrange(region.start, region.stop), 1 << chance.randrange(8)
            where = f"{name}, {region.name}"
            yield Change(MANY[0], f"{where}, byte {offset}", _edit(name, _flip(offset, bit)), blamed, hurt)
            yield Change(MANY[1], f"{where}, at {region.start}", _edit(name, _cut(region.start)), blamed, hurt)
        yield Change("damage: longer", name, _edit(name, lambda data: data + b"\0"), blamed, hurt)
        yield Change("damage: file gone", name, _remove(name), blamed if name != "COMMIT" else frozenset())
        yield Change("damage: link in its place", name, _link(name), blamed)
        yield Change("damage: directory in its place", name, _directory(name), blamed)


def exchange_files(checkpoints: Path, other_run: Path) -> Iterator[Change]:
    """Files put where they do not belong: of another checkpoint, another rank, or another run of the same model.

    Args:
        checkpoints: of the run.
        other_run: the `checkpoints` directory of the other one.
    """
    both = frozenset({NEWEST, BEFORE})
    every_file = files_of(checkpoints)
    for name in every_file:
        hurt = holders(checkpoints, name)
        if BEFORE not in hurt and (checkpoints / step(BEFORE) / name).exists():
            yield Change("exchange: between checkpoints", name, _swap_steps(name), blamed_for(name), both)
        yield Change("exchange: of another run", name, _copy(other_run, [name]), blamed_for(name), hurt)
        if name.startswith("rank-00000"):
            other = name.replace("rank-00000", "rank-00001")
            yield Change("exchange: between ranks", name, _swap_names(name, other), blamed_for(name, other))
    manifests = [name for name in every_file if not name.endswith(".safetensors")]
    tensors = [name for name in every_file if name.endswith(".safetensors")]
    hurt = holders(checkpoints, *tensors)
    yield Change("exchange: of another run", "all manifests", _copy(other_run, manifests), frozenset(tensors))
    yield Change("exchange: of another run", "all tensors", _copy(other_run, tensors), frozenset(tensors), hurt)
    # The newest is whole in itself, so that only loading, which knows the run, can refuse it.
    yield Change("exchange: of another run", "all files", _copy(other_run, every_file), frozenset(), hurt)
    swap = _swap_directories
    yield Change("exchange: between checkpoints", "all files", swap, frozenset({"manifest.json"}), both)


def exchange_ages(checkpoints: Path) -> Iterator[Change]:
    """Files with experts of one iteration in the place of those of another, in the newest checkpoint."""
    for first, second in itertools.combinations(files_of(checkpoints), 2):
        ages = experts_taken_at(first), experts_taken_at(second)
        if None not in ages and first.replace(str(ages[0]), "") == second.replace(str(ages[1]), ""):
            yield Change(
                "exchange: between ages", f"{first}, {second}", _swap_names(first, second), frozenset({first, second})
            )


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
    todo = [*changes(checkpoints), *exchanges]
    many = [change for scenario in MANY for change in todo if change.scenario == scenario]
    few = [change for change in todo if change.scenario not in MANY]
    for position, change in enumerate([*few[::every], *many[::every]]):
        copy_run(base, run_dir)
        change.apply(run_dir / "checkpoints")
        yield _judged(run_dir, change, change.scenario not in MANY or position % restart_every == 0)
        shutil.rmtree(run_dir)
    shutil.rmtree(directory)


def blamed_for(*names: str) -> frozenset[str]:
    """Files of which one has to be named when these are damaged: the two that vouch for each other count as one."""
    vouch = {"COMMIT", "manifest.json"}
    return frozenset(names) | (vouch if "manifest.json" in names else set())


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


def _edit(name: str, edited: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    """Replace the content of a file of the newest checkpoint."""

    def apply(checkpoints: Path) -> None:
        path = checkpoints / step(NEWEST) / name
        path.write_bytes(edited(path.read_bytes()))

    return apply


def _flip(offset: int, bit: int) -> Callable[[bytes], bytes]:
    return lambda data: data[:offset] + bytes([data[offset] ^ bit]) + data[offset + 1 :]


def _cut(size: int) -> Callable[[bytes], bytes]:
    return lambda data: data[:size]


def _remove(name: str) -> Callable[[Path], object]:
    return lambda checkpoints: (checkpoints / step(NEWEST) / name).unlink()


def _link(name: str) -> Callable[[Path], object]:
    """A link to the file of the checkpoint before, as a program that saves space might leave it."""

    def apply(checkpoints: Path) -> None:
        path = checkpoints / step(NEWEST) / name
        path.unlink()
        path.symlink_to(checkpoints / step(BEFORE) / name)

    return apply


def _directory(name: str) -> Callable[[Path], object]:
    def apply(checkpoints: Path) -> None:
        path = checkpoints / step(NEWEST) / name
        path.unlink()
        path.mkdir()

    return apply


def _exchange(first: Path, second: Path) -> None:
    aside = first.with_name("aside")
    first.rename(aside)
    second.rename(first)
    aside.rename(second)


def _swap_steps(name: str) -> Callable[[Path], object]:
    return lambda checkpoints: _exchange(checkpoints / step(NEWEST) / name, checkpoints / step(BEFORE) / name)


def _swap_names(name: str, other: str) -> Callable[[Path], object]:
    return lambda checkpoints: _exchange(checkpoints / step(NEWEST) / name, checkpoints / step(NEWEST) / other)


def _swap_directories(checkpoints: Path) -> None:
    _exchange(checkpoints / step(NEWEST), checkpoints / step(BEFORE))


def _copy(other_run: Path, names: Collection[str]) -> Callable[[Path], object]:
    def apply(checkpoints: Path) -> None:
        for name in names:
            shutil.copyfile(other_run / step(NEWEST) / name, checkpoints / step(NEWEST) / name)

    return apply
