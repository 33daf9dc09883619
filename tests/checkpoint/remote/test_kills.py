"""Copies to a local target and fetches from it, SIGKILLed at each step: what is committed stays.

`python -m tests.checkpoint.remote.test_kills copy|fetch <directory>` does it, each time in a fork of its own, and
prints the number of kills and the names of the steps at which they happened.
"""

import os
import shutil
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cpsr.benchmarks.harness.checkpoint_files import commit_file, listed_anyhow, slab_files
from cpsr.checkpoint.catalogue import Retention
from cpsr.checkpoint.catalogue import scan as scan_local
from cpsr.checkpoint.manifest import SLABS
from cpsr.checkpoint.remote.copies import scan, upload, verify
from cpsr.checkpoint.remote.place import Place, open_place
from cpsr.checkpoint.store import CheckpointStore, verify_run
from tests.checkpoint.remote.conftest import (
    RUN,
    assert_whole,
    commit,
    committed_at,
    copy_newest,
    fetched,
    folder_of,
    new_run,
    target_at,
)

ROOT = Path(__file__).parents[3]
STEPS = ("open", "write", "fsync", "replace", "rename", "unlink", "rmdir", "mkdir", "chmod", "link", "sendfile")
WRITES = {"fsync", "mkdir", "open", "replace", "rmdir", "sendfile", "unlink", "write"}


@pytest.mark.slow  # of campaigns like this one each change runs those of tests/faults
@pytest.mark.parametrize(("what", "steps"), [("copy", WRITES), ("fetch", WRITES - {"rmdir", "sendfile"} | {"rename"})])
def test_killed_at_every_file_system_step(tmp_path: Path, what: str, steps: set[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.checkpoint.remote.test_kills", what, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    kills, *met = done.stdout.split()
    assert set(met) == steps  # all primitives were met: the injection really is in the way of the code under test
    assert int(kills) > 70


def main() -> None:
    mode, base = sys.argv[1], Path(sys.argv[2])
    prepare, work, check = CAMPAIGNS[mode]
    prepare(base / "base")
    assert _run(base, None, work, check) == 0, "the work itself failed"
    names = (base / "steps").read_text().split()
    for count in range(1, len(names) + 1):
        assert os.WIFSIGNALED(_run(base, count, work, check)), f"the work ended before step {count}"
    sys.stdout.write(f"{len(names)} {' '.join(sorted(set(names)))}\n")


def _run(base: Path, count: int | None, work: Callable[[Path], None], check: Callable[[Path, bool], None]) -> int:
    """The wait status of the work, killed at a step or not at all, once what it left was checked."""
    case = base / "case"
    shutil.rmtree(case, ignore_errors=True)
    shutil.copytree(base / "base", case)
    status = _in_child(lambda: _until(count, case, work))
    try:
        check(case, os.WIFSIGNALED(status))
    except Exception:
        sys.stderr.write(f"at step {count}, wait status {status}\n")
        raise
    return status


def _prepare_copy(case: Path) -> None:
    """Two copies that stand, one whose state was given up, and one that was cut off."""
    stores = new_run(case / "run")
    place = _place(case)
    for iteration in (10, 20, 25):
        upload(place, commit(stores, iteration))
    stores[0].abandon_after(20, "a test")
    cut_off = case / "target" / "checkpoints" / folder_of(place, 20).replace("20.", "22.")
    shutil.copytree(case / "target" / "checkpoints" / folder_of(place, 20), cut_off)
    commit_file(cut_off).unlink()
    commit(stores, 30)


def _copy(case: Path) -> None:
    reports = copy_newest(_place(case), CheckpointStore(case / "run", 0, 1, RUN, 1))
    assert {one.kind for one in reports} <= {"target copied"}
    (case / "acknowledged").touch()


def _check_copy(case: Path, killed: bool) -> None:
    """The oracle: the newest committed copy is whole, bitwise right, and copying goes on."""
    there = committed_at(_place(case))
    assert there in ([10, 20, 25], [10, 20, 25, 30], [20, 25, 30], [25, 30], [20, 30], [10, 20, 30]), there
    assert scan(_place(case)).damaged == {}
    if (case / "acknowledged").exists():
        assert there == [20, 30]
    assert verify(_place(case)) == []
    assert fetched(_place(case), case / "new") == there[-1]
    _copy(case)
    assert committed_at(_place(case)) == [20, 30]
    assert len(_place(case).list()) == 2
    assert not list((case / "target").rglob(".*"))
    if not killed:
        assert there == [20, 30]


def _prepare_fetch(case: Path) -> None:
    """A run directory without identity whose newest checkpoint has no whole slab, and a target that has everything."""
    stores = new_run(case / "run")
    for iteration in (10, 20):
        upload(_place(case), commit(stores, iteration))
    for path in slab_files(stores[0].directory / "step-0000000020"):
        path.write_bytes(b"damaged")
    (case / "run" / "run.json").unlink()


def _fetch(case: Path) -> None:
    target = target_at(_place(case), case / "run")
    target.adopt_run()
    store = CheckpointStore(case / "run", 0, 1, RUN, 2)
    store.prepare()
    target.fetch(store, (20,) if verify_run(case / "run") else ())
    (case / "acknowledged").touch()


def _check_fetch(case: Path, killed: bool) -> None:
    """The oracle: what was there before is there, and the next start has it all, whole and bitwise right."""
    store = CheckpointStore(case / "run", 0, 1, RUN, 3)
    assert_whole(store, 10)
    problems = verify_run(case / "run")
    assert {problem.iteration for problem in problems} <= {20}
    if (case / "acknowledged").exists():
        assert problems == []
    _fetch(case)
    assert_whole(store, 20)
    assert verify_run(case / "run") == []
    assert not list((case / "run" / "checkpoints").glob("fetching-*"))
    assert (case / "run" / "run.json").exists()
    store.retain(Retention(full_checkpoints=100))
    listed = {name for info in store.catalogue() for name in info.manifest.files}
    for aside in scan_local(store.directory).asides:
        listed |= listed_anyhow(aside.directory)
    assert {path.name for path in (store.directory / SLABS).iterdir()} == listed
    if not killed:
        assert verify(_place(case)) == []
        commit([store], 30)


def _place(case: Path) -> Place:
    return open_place(f"file://{case}/target")


def _until(count: int | None, case: Path, work: Callable[[Path], None]) -> None:
    """Die at the given call of a file system primitive: before it, or in the middle of writing; or note them all."""
    names: list[str] = []

    def arm(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def armed(*args: Any, **kwargs: Any) -> Any:
            names.append(name)
            if len(names) == count:
                if name == "write":
                    real_write(args[0], bytes(args[1])[: len(args[1]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)

        return armed

    real_write = os.write
    for name in STEPS:  # fsspec copies a file by sendfile
        setattr(os, name, arm(name, getattr(os, name)))
    work(case)
    (case.parent / "steps").write_text(" ".join(names))


def _in_child(action: Callable[[], None]) -> int:
    """Run in a fork, so that importing torch is paid once; returns the wait status."""
    child = os.fork()
    if child == 0:
        try:
            action()
        except BaseException:  # noqa: BLE001 - the fork must not run on into pytest's stack, whatever happened
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1]


CAMPAIGNS = {"copy": (_prepare_copy, _copy, _check_copy), "fetch": (_prepare_fetch, _fetch, _check_fetch)}


if __name__ == "__main__":
    main()
