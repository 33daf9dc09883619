"""Bad input and faults of one process: what is refused, what is survived, and what is reported."""

import errno
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from cpsr import CPSRRecovery, TorchAdapter
from cpsr.benchmarks.harness.checkpoint_files import is_rest, slab_files, steps_in
from cpsr.checkpoint import ranges, verify
from cpsr.checkpoint.catalogue import scan
from cpsr.checkpoint.files import open_plain
from cpsr.errors import RecoveryError, ResourceError, RunMismatchError
from cpsr.journal import JournalReader
from cpsr.predictor.protocol import Forecast, History, Target
from cpsr.predictor.vitp import VITPPredictor
from tests.device import DEVICE

INTERVAL = 3


class CrashError(Exception):
    """What ends a life here without a clean end."""


class Model(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 1))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        device = next(self.parameters()).device
        return nn.functional.mse_loss(self.layers(x.to(device)), y.to(device))


class Loop:
    """A user's script: model, optimizer and what CPSR is given."""

    def __init__(self, width: int = 8, seed: int = 0, module: nn.Module | None = None, device: str = DEVICE) -> None:
        torch.manual_seed(seed)
        self.model = (Model(width) if module is None else module).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.adapter = TorchAdapter(self.model, self.optimizer)

    def step(self, loss: torch.Tensor) -> None:
        torch.autograd.backward(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()


def loader() -> "DataLoader[Any]":
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(x, x.sum(1, keepdim=True))
    return DataLoader(data, batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(2))


def config(run_dir: Path, **settings: Any) -> dict[str, Any]:
    # What a crashed life left in memory would hide what its disk holds.
    own = {"interval_iterations": INTERVAL, "shared_memory": False}
    checkpoint = own | settings.pop("checkpoint", {})
    return {"run_dir": run_dir, "mode": "exact", "checkpoint": checkpoint} | settings


def train(recovery: CPSRRecovery, loop: Loop, until: int, crash: bool = False, sigterm_at: int | None = None) -> None:
    for x, y in recovery.resume(loader(), repeat=True):
        if recovery.iteration == sigterm_at:
            os.kill(os.getpid(), signal.SIGTERM)
        if recovery.iteration % INTERVAL == 0:
            recovery.life.saver.finish()
            recovery.life.saver.drain(10)  # tiny steps would outrun the disk
        if crash and recovery.iteration >= until:
            raise CrashError
        loop.step(loop.model(x, y))
        if recovery.iteration >= until and not crash:
            break


def life(
    run_dir: Path, until: int, *, width: int = 8, seed: int = 0, crash: bool = False, **settings: Any
) -> tuple[CPSRRecovery, list[torch.Tensor]]:
    """One life; returns the recovery and the weights at its end."""
    loop = Loop(width, seed)
    try:
        with CPSRRecovery(loop.adapter, config(run_dir, **settings)) as recovery:
            train(recovery, loop, until, crash)
    except CrashError:
        pass
    return recovery, [parameter.detach().clone() for parameter in loop.model.parameters()]


def same(mine: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(mine, others, strict=True))


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> list[torch.Tensor]:
    """Weights of the run that nothing happened to."""
    _, weights = life(tmp_path_factory.mktemp("reference"), 20)
    return weights


def test_no_checkpoint_yet_starts_from_scratch_and_says_so(tmp_path: Path) -> None:
    recovery, _ = life(tmp_path, 2, crash=True)
    assert recovery.restored.method == "scratch"
    assert recovery.restored.reason == "no checkpoint has been committed yet"
    with JournalReader(tmp_path / "journal.db") as journal:
        assert any("no checkpoint has been committed yet" in event.message for event in journal.events())
    assert life(tmp_path, 2)[0].restored.method == "scratch"


def test_exact_mode_is_bitwise_the_uninterrupted_run(tmp_path: Path, reference: list[torch.Tensor]) -> None:
    life(tmp_path / "run", 11, crash=True)
    recovery, weights = life(tmp_path / "run", 20, seed=5)
    assert recovery.restored.restored_iteration == 9
    assert recovery.restored.failure_iteration == 11
    assert same(weights, reference)


def test_a_clean_end_leaves_a_marker(tmp_path: Path, reference: list[torch.Tensor]) -> None:
    life(tmp_path / "run", 10)
    assert json.loads((tmp_path / "run" / "ended.json").read_text()) == {"ending": "clean", "iteration": 10}
    recovery, weights = life(tmp_path / "run", 20, seed=5)
    assert recovery.restored.restored_iteration == 10
    assert recovery.restored.failure_iteration is None
    assert same(weights, reference)
    with JournalReader(tmp_path / "run" / "journal.db") as journal:
        assert any("ended cleanly at iteration 10" in event.message for event in journal.events())
        assert [entry.ending for entry in journal.lives()] == ["clean", "clean"]
        assert journal.failures() == []


def test_a_file_that_cannot_be_read_now_is_no_reason_to_give_its_checkpoint_up(
    tmp_path: Path, reference: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    life(tmp_path / "run", 11, crash=True)
    before = sorted((tmp_path / "run" / "checkpoints").rglob("*"))

    def refusing(path: Path, **options: Any) -> int:
        if is_rest(path, 9):
            raise OSError(errno.EIO, "Input/output error", str(path))
        return open_plain(path, **options)

    with monkeypatch.context() as patch:
        patch.setattr(verify, "_PAUSES_SECONDS", (0.0,))
        patch.setattr(ranges, "open_plain", refusing)
        with pytest.raises(RecoveryError, match="checkpoint 9 cannot be read now"):
            life(tmp_path / "run", 20, seed=5)
    assert sorted((tmp_path / "run" / "checkpoints").rglob("*")) == before, "nothing was changed"
    recovery, weights = life(tmp_path / "run", 20, seed=6)
    assert recovery.restored.checkpoint_iteration == 9
    assert same(weights, reference)


def test_all_checkpoints_damaged_is_not_a_new_start(tmp_path: Path) -> None:
    life(tmp_path, 11, crash=True)
    for info in scan(tmp_path / "checkpoints").checkpoints:
        for path in slab_files(info.directory):
            path.write_bytes(b"rust")
    for _ in range(2):  # a launcher tries again by itself; the second try must not begin anew either
        with pytest.raises(RecoveryError, match="none of the checkpoints of this run can be restored"):
            life(tmp_path, 20)
    assert not list((tmp_path / "checkpoints").glob("damaged-*")), "nothing was renamed"


def test_another_model_is_refused_by_its_first_tensor(tmp_path: Path) -> None:
    life(tmp_path, 4)
    before = sorted(path for path in tmp_path.rglob("*") if path.is_file())
    with pytest.raises(RunMismatchError, match=r"'layers\.0\.bias', shape \(8,\) there and shape \(9,\) here"):
        life(tmp_path, 4, width=9)
    assert sorted(path for path in tmp_path.rglob("*") if path.is_file()) == before


def in_process(script: str, *before: str) -> "subprocess.CompletedProcess[str]":
    """Run Python code that may import this module, in a process of its own."""
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [*before, sys.executable, "-c", textwrap.dedent(script)]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)


def test_training_goes_on_with_a_full_disk(tmp_path: Path) -> None:
    """The checkpoints lie on a file system that holds two of them and not three."""
    (tmp_path / "checkpoints").mkdir()
    mounted = ["unshare", "--map-root-user", "--mount", "sh", "-c"]
    mounted += ['mount -t tmpfs -o size=430k tmpfs "$0" && exec "$@"', str(tmp_path / "checkpoints")]
    ended = in_process(
        f"""
        from pathlib import Path
        from cpsr.checkpoint.verify import verify_run
        from tests.recovery.test_faults import life
        recovery, _ = life(Path({str(tmp_path)!r}), 20, width=2000)
        assert recovery.iteration == 20
        assert verify_run(Path({str(tmp_path)!r})) == []
        print("trained to the end")
        """,
        *mounted,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert "trained to the end" in ended.stdout
    assert "No space left on device" in ended.stderr
    with JournalReader(tmp_path / "journal.db") as journal:
        rows = {row.iteration: row for row in journal.checkpoints()}
        failures = [event for event in journal.events() if event.kind == "checkpoint failed"]
    assert [rows[iteration].status for iteration in (3, 6, 9)] == ["committed", "committed", "failed"]
    assert "No space left on device" in rows[9].reason
    assert "training continues, earlier checkpoints are kept" in failures[0].message


def test_a_disk_that_does_not_suffice_is_refused_but_not_for_what_the_run_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    short = {"disk_limit_bytes": 1}
    life(tmp_path / "run", 12, width=500, crash=True, checkpoint=short)
    stored_bytes = sum(path.stat().st_size for path in (tmp_path / "run" / "checkpoints").rglob("*") if path.is_file())
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage._replace(free=stored_bytes))
    with pytest.raises(ResourceError, match=f"{stored_bytes} are free"):
        life(tmp_path / "another", 12, width=500, checkpoint=short)
    assert life(tmp_path / "run", 13, width=500, checkpoint=short)[0].restored.restored_iteration == 12


def test_a_predictor_that_raises_leads_to_the_exact_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    life(tmp_path, 11, crash=True)

    def broken(self: VITPPredictor, history: History, target: Target) -> Forecast:
        raise ValueError("no such row")

    monkeypatch.setattr(VITPPredictor, "forecast", broken)
    recovery, _ = life(tmp_path, 12, mode="predict", crash=True)
    assert (recovery.restored.method, recovery.restored.restored_iteration) == ("exact", 9)
    assert "ValueError: no such row" in recovery.restored.reason
    monkeypatch.undo()
    noted = json.loads((tmp_path / "prediction-failed.json").read_text())
    assert noted["checkpoint_iteration"] == 9


class Average:
    """Keeps what it is given and changes it in place, as many users' objects do."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {"values": torch.zeros(2), "seen": []}

    def update(self, iteration: int) -> None:
        self.state["values"] += 1
        self.state["seen"].append(iteration)

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def test_sigterm_commits_the_state_when_the_loop_asks_for_its_next_batch(tmp_path: Path) -> None:
    """After the grace a dump is there, and called one, until the loop asks."""
    at = INTERVAL  # where a checkpoint is due, too

    def dumps() -> list[str]:
        with JournalReader(tmp_path / "journal.db") as journal:
            return [event.message for event in journal.events() if event.kind == "dumped"]

    def one_life() -> tuple[int, int, list[float]]:
        loop, counters = Loop(), {"steps": 0}
        with CPSRRecovery(
            loop.adapter, config(tmp_path, ranks={"sigterm_grace_seconds": 0.3}, checkpoint={"shared_memory": True})
        ) as recovery:
            recovery.register("counters", counters)
            if recovery.iteration:
                return recovery.iteration, counters["steps"], torch.rand(3).tolist()
            for x, y in recovery.resume(loader()):
                if recovery.iteration == at - 1:
                    os.kill(os.getpid(), signal.SIGTERM)
                loop.step(loop.model(x, y))
                if recovery.iteration == at:
                    assert scan(tmp_path / "checkpoints").checkpoints == []
                    limit = time.monotonic() + 30
                    while not dumps() and time.monotonic() < limit:
                        time.sleep(0.05)
                torch.rand(3)
                counters["steps"] += 1
                states.append(torch.get_rng_state())
        raise AssertionError("the loop ended")

    states: list[torch.Tensor] = []
    with pytest.raises(SystemExit):
        one_life()
    assert len(states) == at + 1  # the second step for the next life to compare with ends inside the loop's body
    torch.set_rng_state(states[at - 1])
    expected = torch.rand(3).tolist()
    assert one_life() == (at, at, expected)
    assert steps_in(tmp_path / "checkpoints") == [f"step-{at:010d}"]
    with JournalReader(tmp_path / "journal.db") as journal:
        assert [(one.iteration, one.status) for one in journal.checkpoints()] == [(at, "committed")]
        assert [event.iteration for event in journal.events() if event.kind == "sigterm"] == [at]
    assert f"weights and moments of iteration {at}" in dumps()[0]


def test_state_that_nobody_registered_again_is_carried_along(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    logging.getLogger("cpsr").propagate = True
    loop, average = Loop(), Average()
    with CPSRRecovery(loop.adapter, config(tmp_path)) as recovery:
        recovery.register("average", average)
        average.update(0)
        train(recovery, loop, 4)
    life(tmp_path, 8)
    assert "has state of ['average'], not registered in this job" in caplog.text
    again = Average()
    with CPSRRecovery(Loop().adapter, config(tmp_path)) as recovery:
        recovery.register("average", again)
        recovery.register("another", Average())
    assert again.state["seen"] == [0]
    assert "'another' is registered, but the checkpoint has no state of that name" in caplog.text
