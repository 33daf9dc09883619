"""Runs saves that are SIGKILLed, each in a fork of this process, and checks after each what a new life finds.

Usage: kill_driver.py steps <directory> <one of so many of each kind> | kill_driver.py random <directory> <seed> <kills>
Prints the number of kills and the names of the steps at which they happened. Started by test_durability.py.
"""

import contextlib
import itertools
import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from cpsr.checkpoint.catalogue import Retention
from cpsr.checkpoint.history import DiskHistory
from cpsr.checkpoint.host_snapshot import Contents
from cpsr.checkpoint.store import CheckpointStore, verify_run
from cpsr.state.shard import Shard
from tests.checkpoint.conftest import assert_same_bits, make_shard, save

KEEP_ALL = Retention()
CONFIG = Retention(history_span_iterations=20, history_min_checkpoints=2)  # one save more thins and deletes
STEPS = ("open", "write", "fsync", "replace", "rename", "unlink", "rmdir", "mkdir", "chmod", "link")
BEFORE = (10, 20, 30, 40)
EXPERTS = frozenset(list(make_shard().operators)[1:])


def main() -> None:
    mode, base = sys.argv[1], Path(sys.argv[2])
    _in_child(lambda: _prepare_base(base / "base"))
    if mode == "steps":
        names = _kill_at_steps(base, int(sys.argv[3]))
    else:
        names = _kill_at_random(base, random.Random(int(sys.argv[3])), int(sys.argv[4]))
    sys.stdout.write(f"{len(names)} {' '.join(sorted(set(names)))}\n")


def _prepare_base(run_dir: Path) -> None:
    store = CheckpointStore(run_dir, 0, 1, "run", 1)
    store.prepare()
    for iteration in BEFORE:
        save(store, iteration)
        store.retain(KEEP_ALL)
    store.quarantine(20, "a test")


def _work(run_dir: Path) -> None:
    """Save, roll back behind that save, save the same iteration again; with everything that retention does.

    The last save is sparse: one of the two experts that the save before it holds in files of their own is carried
    along.
    """
    store = CheckpointStore(run_dir, 0, 1, "run", 2)
    store.prepare()
    save(store, 50)
    _note(run_dir, 50)
    store.retain(CONFIG)
    store.abandon_after(40, "a test")
    _note(run_dir, 40)
    save(store, 50, Contents.sparse(EXPERTS, EXPERTS))
    _note(run_dir, 50)
    save(store, 60, Contents.sparse(EXPERTS, frozenset([min(EXPERTS)])))
    _note(run_dir, 60)
    store.retain(CONFIG)


def _note(run_dir: Path, iteration: int) -> None:
    with (run_dir.parent / "acknowledged").open("a") as file:
        file.write(f"{iteration}\n")


def _check(run_dir: Path) -> None:
    """The oracle: the newest committed checkpoint is there, whole, bitwise right, and saving goes on."""
    acknowledged = [int(line) for line in _acknowledged(run_dir).split()]
    assert verify_run(run_dir) == []
    store = CheckpointStore(run_dir, 0, 1, "run", 3)
    assert store.prepare() == []
    full = [info.iteration for info in store.catalogue() if info.full]
    newest = full[-1]
    if len(acknowledged) in (1, 2):  # inside abandon_after, or in the second save: at 50 or back at 40
        assert newest in (40, 50)
    else:
        assert newest >= (acknowledged[-1] if acknowledged else 40), (full, acknowledged)
    _check_history(store)
    for iteration in full:
        shard = make_shard(999)
        scalars = store.load(iteration, shard)
        assert scalars["step"] == iteration
        taken = {name: make_shard(one.iteration).operators[name] for name, one in shard.operators.items()}
        assert {one.iteration for name, one in shard.operators.items() if name not in EXPERTS} == {iteration}
        assert_same_bits(shard, Shard(taken, make_shard(iteration).others))
    leftovers = [p for p in store.directory.rglob("*") if p.name.endswith((".tmp", ".skip")) or p.name[:4] == ".tmp"]
    assert not [path for path in leftovers if path.parent.name.startswith("step-")], leftovers
    for iteration in (newest + 10, newest + 20):
        save(store, iteration)
        store.retain(CONFIG)
    assert [info.iteration for info in store.catalogue() if info.full] == [newest + 10, newest + 20]
    assert verify_run(run_dir) == []


def _check_history(store: CheckpointStore) -> None:
    """Of every checkpoint, whole, thinned or partial, the weights are those of the iteration they were taken at."""
    history = DiskHistory(store.directory, 0)
    assert [entry.iteration for entry in history.entries] == [info.iteration for info in store.catalogue()]
    for entry, operator in itertools.product(range(len(history.entries)), history.operators):
        expected = make_shard(history.taken_at(operator, entry)).operators[operator].parameter.values
        assert torch.equal(history.read(operator, entry, 0, history.numel(operator)), expected)
    history.close()


def _acknowledged(run_dir: Path) -> str:
    path = run_dir.parent / "acknowledged"
    return path.read_text() if path.exists() else ""


def _kill_at_steps(base: Path, one_of: int) -> list[str]:
    names: list[str] = []
    for count in chosen_steps(_steps_of(base), one_of):
        run_dir = _fresh(base)
        status = _in_child(lambda run_dir=run_dir, count=count: _work_until(run_dir, count))  # type: ignore[misc]
        assert os.WIFSIGNALED(status), f"the work ended before step {count}"
        _require_good(run_dir, f"killed at step {count}")
        names.append((base / "step").read_text())
    return names


def _steps_of(base: Path) -> list[str]:
    """Names of the steps of the work, in their order, from one that nothing happens to."""
    run_dir = _fresh(base)
    assert _in_child(lambda: _work_until(run_dir, None)) == 0, "the work itself failed"
    _require_good(run_dir, "not killed")
    return (base / "steps").read_text().split()


def chosen_steps(names: Sequence[str], one_of: int) -> list[int]:
    """Numbers, from 1 on, of every so many of the steps of each name; the first of each is among them."""
    seen: Counter[str] = Counter()
    chosen = []
    for number, name in enumerate(names, start=1):
        if seen[name] % one_of == 0:
            chosen.append(number)
        seen[name] += 1
    return chosen


def _kill_at_random(base: Path, chance: random.Random, kills: int) -> list[str]:
    names: list[str] = []
    while len(names) < kills:
        run_dir = _fresh(base)
        delay = chance.uniform(0.0, 0.1)
        status = _in_child(lambda run_dir=run_dir: _work(run_dir), kill_after_seconds=delay)  # type: ignore[misc]
        _require_good(run_dir, f"killed after {delay} s")
        names.append("killed" if os.WIFSIGNALED(status) else "completed")
    return names


def _fresh(base: Path) -> Path:
    shutil.rmtree(base / "case", ignore_errors=True)
    shutil.copytree(base / "base", base / "case" / "run")
    return base / "case" / "run"


def _require_good(run_dir: Path, what: str) -> None:
    status = _in_child(lambda: _check(run_dir))
    if status != 0:
        sys.exit(f"{what}: the check failed with status {status}, {run_dir}")


def _work_until(run_dir: Path, count: int | None) -> None:
    """Die at the given call of a file system primitive: before it, or in the middle of writing; or note them all."""
    names: list[str] = []

    def arm(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def armed(*args: Any, **kwargs: Any) -> Any:
            names.append(name)
            if len(names) == count:
                (run_dir.parent.parent / "step").write_text(name)
                if name == "write":
                    with contextlib.suppress(OSError):  # of half a block, which direct transfers may refuse
                        real_write(args[0], args[1][: len(args[1]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)

        return armed

    real_write = os.write
    originals = {name: getattr(os, name) for name in STEPS}
    for name, call in originals.items():
        setattr(os, name, arm(name, call))
    _work(run_dir)
    (run_dir.parent.parent / "steps").write_text(" ".join(names))


def _in_child(action: Callable[[], None], kill_after_seconds: float | None = None) -> int:
    """Run in a fork, so that importing torch is paid once; returns the wait status."""
    child = os.fork()
    if child == 0:
        try:
            action()
        except BaseException:  # noqa: BLE001 - the fork must not run on into pytest's stack, whatever happened
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    if kill_after_seconds is not None:
        time.sleep(kill_after_seconds)
        os.kill(child, signal.SIGKILL)
    return os.waitpid(child, 0)[1]


if __name__ == "__main__":
    main()
