"""Ranks that become slow, and recover: two ranks of a DDP job on a core each, seen as the user sees them.

Rank 1 is made slow. Other work on the machine may slow down rank 0 as well; the test does not look at its reports.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from cpsr.errors import JournalError
from cpsr.journal import EventRow, JournalReader
from cpsr.service.app import create_app
from cpsr.service.status import run_status
from tests.device import cpu_only
from tests.rank_processes import become_rank, free_port, start_ranks

pytestmark = cpu_only("on a GPU these threads do not wait")

PHASES = "even", "sleep", "loader", "core", "end"
EVEN_SECONDS, LONGER_SECONDS = 0.03, 0.03  # of a step; and what a slow one takes beside that
EVERY_SECONDS, COUNT = 0.5, 3  # comparisons that make a rank slow, 0.5 s apart
LIMIT_SECONDS = 120.0  # for what takes three; the machine may be busy
BURNERS = 8  # beside rank 1 on its core
CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def train(options: tuple[Path, int], rank: int, ranks: int) -> None:
    """A rank of the job: it does what the phase says that rank 0 reads, and shares with rank 1 at each step."""
    directory, port = options
    become_rank(directory / f"{rank}.log", rank, ranks)
    if len(CORES) > 1:
        os.sched_setaffinity(0, {CORES[rank]})
    import torch
    from torch import distributed as dist
    from torch import nn

    from cpsr import CPSRRecovery, TorchAdapter
    from cpsr.life import step_boundary
    from cpsr.ranks import liveness
    from cpsr.ranks.slow_ranks import SlowRanks

    vars(step_boundary)["SlowRanks"] = partial(SlowRanks, every_seconds=EVERY_SECONDS, count=COUNT)
    liveness.BEAT_SECONDS = 0.1
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    phase = torch.zeros((), dtype=torch.int64)

    def is_in(name: str) -> bool:
        return PHASES[int(phase)] == name

    class Model(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            slow = rank == 1 and is_in("sleep")
            time.sleep(0.0 if is_in("core") else EVEN_SECONDS + slow * LONGER_SECONDS)
            until = time.thread_time() + EVEN_SECONDS * is_in("core")
            while time.thread_time() < until:
                pass
            return super().forward(x)

    class Data(torch.utils.data.Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return 10**6

        def __getitem__(self, index: int) -> torch.Tensor:
            time.sleep(LONGER_SECONDS if rank == 1 and is_in("loader") else 0.0)
            return torch.ones(8)

    model = nn.parallel.DistributedDataParallel(Model(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    config = {"run_dir": directory / "run", "mode": "exact", "checkpoint": {"interval_iterations": 10**6}}
    with CPSRRecovery(TorchAdapter(model, optimizer), config) as recovery:
        for batch in recovery.resume(torch.utils.data.DataLoader(Data(), 1)):
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()
            if rank == 0:
                phase.fill_(PHASES.index((directory / "phase").read_text()))
            dist.broadcast(phase, 0)
            if is_in("end"):
                break
    dist.destroy_process_group()


@dataclass
class Running:
    """The job while it trains."""

    directory: Path
    is_alive: Callable[[], bool]

    def go(self, phase: str) -> None:
        """Let the ranks do so from one of the next steps on."""
        written = self.directory / "written"
        written.write_text(phase)
        written.rename(self.directory / "phase")

    def wait_for(self, kind: str, count: int) -> list[EventRow]:
        """The events of a kind, once there are so many."""
        until = time.monotonic() + LIMIT_SECONDS
        while True:
            assert self.is_alive(), (self.directory / "0.log").read_text()[-3000:]
            found = self.events(kind)
            if len(found) >= count:
                return found
            assert time.monotonic() < until, (self.events("slow rank", "slow rank recovered"), kind)
            time.sleep(0.1)

    def events(self, *kinds: str) -> list[EventRow]:
        """Those of rank 1 in the journal."""
        try:
            with JournalReader(self.directory / "run" / "journal.db") as reader:
                return [row for row in reader.events(*kinds) if row.message.startswith("rank 1 ")]
        except JournalError:
            return []  # there is none yet


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    processes: Any = []
    job = Running(tmp_path, lambda: all(process.is_alive() for process in processes))
    job.go("even")
    processes += start_ranks(train, (tmp_path, free_port()), 2)
    try:
        yield job
        job.go("end")
        for process in processes:
            process.join(LIMIT_SECONDS)
        assert [process.exitcode for process in processes] == [0, 0], (tmp_path / "0.log").read_text()[-3000:]
    finally:
        for process in processes:
            process.kill()


def shared_core(stack: ExitStack) -> None:
    """Keep the core of rank 1 busy until the stack closes."""
    for _ in range(BURNERS):
        burner = subprocess.Popen([sys.executable, "-c", "while True: pass"])
        stack.callback(burner.wait)
        stack.callback(burner.kill)
        os.sched_setaffinity(burner.pid, {CORES[1]})


def test_a_slow_rank_is_reported_and_recovers(running: Running, capsys: pytest.CaptureFixture[str]) -> None:
    situations = ["sleep", "loader"] + ["core"] * (len(CORES) > 1)
    for number, situation in enumerate(situations, 1):
        with ExitStack() as stack:
            if situation == "core":
                shared_core(stack)
            running.go(situation)
            began = time.monotonic()
            reported = running.wait_for("slow rank", number)[-1]
            assert time.monotonic() - began > EVERY_SECONDS * (COUNT - 1)
            assert_seen(running, reported, "data" if situation == "loader" else "compute", capsys)
            time.sleep(2 * EVERY_SECONDS)
            running.go("even")
        running.wait_for("slow rank recovered", number)
    found = [row.kind for row in running.events("slow rank", "slow rank recovered")]
    assert found == ["slow rank", "slow rank recovered"] * len(situations)
    logged = [line for line in (running.directory / "0.log").read_text().splitlines() if "of its own" in line]
    assert sum("rank 1 (" in line for line in logged) == 2 * len(situations)
    assert 1 not in [slow["rank"] for slow in asked(running.directory / "run").get("/plan").json()["slow_ranks"]]


def asked(run_dir: Path) -> TestClient:
    return TestClient(create_app(run_dir), "http://127.0.0.1")


def assert_seen(running: Running, reported: EventRow, cause: str, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = running.directory / "run"
    client = asked(run_dir)
    (slow,) = (one for one in client.get("/plan").json()["slow_ranks"] if one["rank"] == 1)
    assert (slow["device"], slow["cause"]) == ("cpu", cause)
    assert slow["own_seconds"] > 1.15 * slow["expected_own_seconds"]
    assert slow["host"] in reported.message
    assert (slow["data_seconds"] >= LONGER_SECONDS) == (cause == "data")
    metrics = client.get("/metrics").text
    assert f'cpsr_rank_slow{{host="{slow["host"]}",rank="1",run="run"}} 1.0' in metrics
    assert f'cpsr_rank_slow{{host="{slow["host"]}",rank="0",run="run"}}' in metrics
    assert 'cpsr_rank_step_seconds{kind="data",rank="1",run="run"}' in metrics
    run_status(run_dir, as_json=False)
    assert "rank 1 (host" in capsys.readouterr().out
