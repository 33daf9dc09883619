"""Workers of a data loader go on after SIGTERM, and end of everything else that ends them without CPSR."""

import builtins
import gc
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.utils.data import DataLoader, Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from cpsr.state.loader_workers import prepared_workers

ITEMS = 40
WAIT_SECONDS = 30.0  # for what comes within two; the machine may be busy
SETTINGS = [
    pytest.param({"multiprocessing_context": "fork"}, id="fork"),
    pytest.param({"persistent_workers": True}, id="persistent"),
    pytest.param({"multiprocessing_context": "spawn"}, id="spawn", marks=pytest.mark.slow),
]
LOADERS = [DataLoader, StatefulDataLoader]


class Items(Dataset[int]):
    """Each item is its index, once what the item `at` does is done."""

    def __init__(self, at: int = -1, act: Callable[[], object] | None = None) -> None:
        self._at, self._act = at, act

    def __len__(self) -> int:
        return ITEMS

    def __getitem__(self, index: int) -> int:
        if index == self._at and self._act is not None:
            self._act()
        return index


class Signalled(Items):
    """SIGTERM comes while a spawned worker starts, before torch's code and CPSR's run in it, and at its very end."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        os.kill(os.getpid(), signal.SIGTERM)
        vars(builtins)["last"] = Last()


class Last:
    """Goes when the interpreter has taken its signal handlers back."""

    def __del__(self, kill: Any = os.kill, pid: Any = os.getpid, number: int = signal.SIGTERM) -> None:
        kill(pid(), number)


@pytest.fixture(autouse=True)
def prepared() -> Iterator[None]:
    with prepared_workers():
        yield
    gc.collect()  # what a test has left
    assert ended(workers())


def loader(data: Dataset[Any], make: Any = DataLoader, **settings: Any) -> "DataLoader[Any]":
    made: DataLoader[Any] = make(data, batch_size=2, **{"num_workers": 2, **settings})
    return made


def workers() -> list[psutil.Process]:
    pids = [worker.pid for worker in multiprocessing.active_children()]
    return [psutil.Process(pid) for pid in pids if pid is not None and psutil.pid_exists(pid)]


def items(batches: Iterator[torch.Tensor]) -> list[int]:
    return [int(item) for batch in batches for item in batch]


def ended(processes: list[psutil.Process]) -> bool:
    return not psutil.wait_procs(processes, WAIT_SECONDS)[1]


@pytest.mark.parametrize("make", LOADERS)
@pytest.mark.parametrize("settings", SETTINGS)
def test_they_go_on(settings: dict[str, Any], make: Any) -> None:
    batches = iter(loader(Items(), make, **settings))
    dealt = next(batches).tolist()
    for _ in range(2):
        for worker in workers():
            worker.send_signal(signal.SIGTERM)
    assert dealt + items(batches) == list(range(ITEMS))


def test_they_go_on_where_it_comes_while_they_start_or_end() -> None:
    batches = iter(loader(Signalled(), num_workers=1, multiprocessing_context="spawn"))
    (worker,) = multiprocessing.active_children()
    assert items(batches) == list(range(ITEMS))
    worker.join()
    assert worker.exitcode == 0


def in_a_rank(work: Callable[[], object], path: Path) -> multiprocessing.Process:
    """A process whose workers fail, or hang; what `work` says is in `path` at its end."""

    def run() -> None:
        sys.stderr = path.open("w", buffering=1)
        sys.stderr.write(f"{work()}\n")

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    return process  # type: ignore[return-value] # a ForkProcess


@pytest.mark.parametrize("failure", ["killed", "exits", "raises"])
def test_a_worker_that_fails_otherwise_still_makes_torch_raise(failure: str, tmp_path: Path) -> None:
    acts: dict[str, tuple[Callable[[], object], str]] = {
        # Of what torch says first when a worker goes, what it was doing decides.
        "killed": (lambda: os.kill(os.getpid(), signal.SIGKILL), "Error"),
        "exits": (lambda: os._exit(3), "Error"),
        "raises": (lambda: int("no number"), "in DataLoader worker process"),
    }
    act, message = acts[failure]
    rank = in_a_rank(lambda: items(iter(loader(Items(9, act)))), tmp_path / "output")
    rank.join(WAIT_SECONDS)
    assert rank.exitcode == 1
    assert re.search(message, (tmp_path / "output").read_text())


@pytest.mark.parametrize("terminated", [True, False])
def test_a_worker_that_is_ended_on_purpose_is_no_failure(terminated: bool, tmp_path: Path) -> None:
    """By whoever terminates it, and by torch with its loader, also where it hangs."""

    def work() -> str:
        batches = iter(loader(Items(4, lambda: time.sleep(600))))
        next(batches)
        before = workers()
        assert len(before) == 2
        for process in multiprocessing.active_children() if terminated else ():
            process.terminate()
        assert not terminated or ended(before)
        del batches  # torch waits five seconds for one that hangs
        gc.collect()
        return f"all ended: {ended(before)}"

    rank = in_a_rank(work, tmp_path / "output")
    rank.join(2 * WAIT_SECONDS)
    assert (tmp_path / "output").read_text() == "all ended: True\n"
    assert rank.exitcode == 0


@pytest.mark.parametrize("make", LOADERS)
@pytest.mark.parametrize("in_order", [True, False])
def test_they_end_with_their_rank_also_where_they_hang(in_order: bool, make: Any, tmp_path: Path) -> None:
    pids_file = tmp_path / "workers"

    def work() -> None:
        batches = iter(loader(Items(0, lambda: time.sleep(600)), make))
        pids_file.with_suffix(".tmp").write_text(" ".join(str(worker.pid) for worker in workers()))
        pids_file.with_suffix(".tmp").replace(pids_file)
        if not in_order:
            next(batches)
        vars(multiprocessing)["kept"] = batches  # to the end of the process

    rank = in_a_rank(work, tmp_path / "output")
    deadline = time.monotonic() + WAIT_SECONDS
    while not pids_file.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    left = [psutil.Process(int(pid)) for pid in pids_file.read_text().split() if psutil.pid_exists(int(pid))]
    if not in_order:
        for worker in left:
            worker.send_signal(signal.SIGTERM)
        rank.kill()
    rank.join(WAIT_SECONDS)
    assert rank.exitcode == (0 if in_order else -signal.SIGKILL)
    assert ended(left)


def test_what_a_worker_starts_itself_ends_by_sigterm(tmp_path: Path) -> None:
    def act() -> None:
        with subprocess.Popen(["sleep", "600"]) as process:
            process.terminate()
            (tmp_path / "status").write_text(str(process.wait()))

    assert items(iter(loader(Items(3, act)))) == list(range(ITEMS))
    assert (tmp_path / "status").read_text() == str(-signal.SIGTERM)


def test_the_signal_reaches_the_rank_itself_as_ever() -> None:
    heard = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    try:
        batches = iter(loader(Items()))
        os.kill(os.getpid(), signal.SIGTERM)
        assert items(batches) == list(range(ITEMS))
        assert heard == [signal.SIGTERM]
        assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    finally:
        signal.signal(signal.SIGTERM, before)
