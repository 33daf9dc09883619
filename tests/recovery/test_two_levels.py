"""A mixture whose host memory holds younger experts than its disk, in a job that is killed: what it goes on from."""

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from cpsr import CPSRRecovery
from cpsr.checkpoint.held import HeldState, held_states
from cpsr.checkpoint.history import DiskHistory
from cpsr.checkpoint.manifest import step_name
from cpsr.checkpoint.memory import remove_held
from cpsr.checkpoint.snapshot import SnapshotPool
from cpsr.checkpoint.store import CheckpointStore
from cpsr.engines.torch import TorchAdapter
from cpsr.engines.torch_experts import MixtureOfExperts
from cpsr.errors import RecoveryError
from cpsr.expert_saving import ExpertSaving
from cpsr.journal import JournalReader
from cpsr.restore import Restored
from cpsr.rundir import IDENTITY
from cpsr.state import Shard
from tests.two_ranks import run

EXPERTS, WIDTH, INTERVAL = 5, 4, 2
EXPERT_BYTES = 3 * 4 * (WIDTH * WIDTH + WIDTH)
LAST = 10  # iteration of the snapshot to come back to
SECONDS = 60.0


class Layer(torch.nn.Module):
    """Top-1 of the experts."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = torch.nn.Linear(WIDTH, EXPERTS)
        self.experts = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))
        self.counts = torch.zeros(EXPERTS, dtype=torch.int64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.gate(x).softmax(1).max(1)
        self.counts = torch.bincount(chosen, minlength=EXPERTS)
        routed = torch.stack([self.experts[int(one)](row) for one, row in zip(chosen, x, strict=True)])
        loss: torch.Tensor = ((x + weights.unsqueeze(1) * routed) - x.flip(1)).square().mean()
        return loss


def counts_of(layer: torch.nn.Module) -> torch.Tensor:
    assert isinstance(layer, Layer)
    return layer.counts


def config(run_dir: Path, **experts: Any) -> dict[str, Any]:
    # Two checkpoints of history, from which nothing can be predicted.
    kept = {"interval_iterations": INTERVAL, "fsync": False, "history_span_iterations": 0, "history_min_checkpoints": 2}
    chosen = {"policy": "sequential", "memory": "overlapped", **experts}
    return {"run_dir": str(run_dir), "mode": "auto", "checkpoint": kept, "experts": chosen}


def opened(settings: dict[str, Any]) -> tuple[Layer, torch.optim.Optimizer, CPSRRecovery]:
    torch.manual_seed(0)
    model = Layer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    adapter = TorchAdapter(model, optimizer, experts=MixtureOfExperts(counts_of))
    return model, optimizer, CPSRRecovery(adapter, settings)


def steps(model: Layer, optimizer: torch.optim.Optimizer, recovery: CPSRRecovery) -> Iterator[None]:
    """Train; what follows a step happens between two."""
    batches = recovery.resume(torch.randn(100, 8, WIDTH))
    batch = next(batches)
    while batch is not None:
        loss = model(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        batch = next(batches, None)  # the iteration is over when the loop asks for its next batch
        yield


def slow_link(saving: ExpertSaving, *_: Any, measure: Any = ExpertSaving.note_copied) -> None:
    """As if two experts fitted into an iteration."""
    measure(saving, saving._non_expert_bytes + 2 * EXPERT_BYTES, 1.0, 1.0)


def killed_life(settings: dict[str, Any], note: Path, hangs_at: int, end: int) -> None:
    """Train, note the state at every iteration, and kill this process once the last snapshot is in memory.

    Its link takes two experts to host memory in an iteration; from `hangs_at` on the disk answers no more.
    """
    write = CheckpointStore.write

    def hanging(store: CheckpointStore, snapshot: Any) -> Any:
        while snapshot.iteration >= hangs_at:
            signal.pause()
        return write(store, snapshot)

    setattr(ExpertSaving, "note_copied", slow_link)  # noqa: B010 - mypy refuses to assign to a method
    setattr(CheckpointStore, "write", hanging)  # noqa: B010
    model, optimizer, recovery = opened(settings)
    with recovery:
        for _ in steps(model, optimizer, recovery):
            tensors = {key: values.clone() for key, values in recovery._adapter.shard().tensors()}
            save_file(tensors, note / f"{recovery.iteration}.safetensors")
            if recovery.iteration < hangs_at:
                recovery._writer.drain(SECONDS)
            recovery._pool._settle()
            if recovery.iteration == end:
                os.kill(os.getpid(), signal.SIGKILL)


class Killed:
    """A run whose first life was killed."""

    def __init__(self, directory: Path, hangs_at: int, end: int) -> None:
        self.run_dir, self.note = directory / "run", directory / "note"
        self.note.mkdir()
        arguments = [json.dumps(config(self.run_dir)), str(self.note), str(hangs_at), str(end)]
        ended = subprocess.run(
            [sys.executable, "-m", "tests.recovery.test_two_levels", *arguments],
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        assert ended.returncode == -signal.SIGKILL, ended.stderr[-3000:]

    def restarted(self, mode: str = "auto", **experts: Any) -> tuple[Restored, Shard]:
        """How the next life begins, and its state then."""
        _, _, recovery = opened({**config(self.run_dir, **experts), "mode": mode})
        state = Shard({})
        try:
            with recovery:
                live = recovery._adapter.shard()
                state = Shard(dict(live.operators), {name: values.clone() for name, values in live.others.items()})
                raise InterruptedError  # leaves everything as it is
        except InterruptedError:
            return recovery.restored, state

    @property
    def run_id(self) -> str:
        return str(json.loads((self.run_dir / IDENTITY).read_text())["run_id"])

    def held(self) -> list[HeldState]:
        return held_states(self.run_id)

    def on_disk(self) -> dict[str, int]:
        history = DiskHistory(self.run_dir / "checkpoints", 0)
        newest = len(history.entries) - 1
        ages = {name: history.taken_at(name, newest) for name in history.operators}
        history.close()
        return ages

    def assert_as_noted(self, state: Shard, iteration: int, taken_at: dict[str, int]) -> None:
        """Weights and moments of every operator are those that training had when it was taken, bit for bit."""
        for name, one in state.operators.items():
            noted = load_file(self.note / f"{taken_at.get(name, iteration)}.safetensors")
            for key, values in Shard({name: one}).tensors():
                assert torch.equal(values, noted[key]), (key, taken_at.get(name, iteration))


@pytest.fixture
def killed(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Killed]:
    killed = Killed(tmp_path, *request.param)
    yield killed
    remove_held(killed.run_id)


AHEAD = (LAST, LAST + 1)  # the disk hangs at the last snapshot
SAME = (LAST + 2, LAST + 1)  # the last snapshot is committed


@pytest.mark.parametrize("killed", [AHEAD], indirect=True)
def test_the_run_goes_on_from_memory_that_is_newer_than_the_disk(killed: Killed) -> None:
    newest = [one for one in killed.held() if one.iteration == LAST]
    assert [one.kind for one in newest] == ["mixed"]
    with pytest.raises(RecoveryError, match="no older checkpoint is left"):
        killed.restarted("exact")
    restored, state = killed.restarted()
    assert (restored.method, restored.restored_iteration, restored.checkpoint_iteration) == ("stale", LAST, LAST - 2)
    assert restored.sources[0].tier == "memory"
    assert restored.of_no_run
    # Two of five experts in each snapshot after the first, which had them all at 2.
    assert sorted({*restored.taken_at.values()}) == [LAST - 4, LAST - 2]
    assert len(restored.taken_at) == 2 * (EXPERTS - 2)  # weight and bias
    killed.assert_as_noted(state, LAST, restored.taken_at)
    assert f"from the state of iteration {LAST} in memory; 1 iterations are recomputed" in restored.reason
    assert "up to 4 iterations before it and go on as they were" in restored.reason
    layer = restored.guard["lost_tokens"]["layers"][0]
    assert (layer["stale_experts"], layer["oldest_iteration"]) == (EXPERTS - 2, LAST - 4)
    with JournalReader(killed.run_dir / "journal.db") as journal:
        recovery = journal.recoveries()[-1]
    assert (recovery.method, recovery.sources[0].source, recovery.predicted) == ("stale", "memory", True)
    # What was taken from memory is there for the life after, should this one end before its first snapshot.
    again, state = killed.restarted(stale="catch_up")
    assert (again.method, again.restored_iteration, again.taken_at) == ("stale", LAST, restored.taken_at)
    assert "with longer steps until they have caught up" in again.reason
    assert again.guard["lost_tokens"]["caught_up_at_iteration"] == LAST + 4
    killed.assert_as_noted(state, LAST, again.taken_at)
    predicted, _ = killed.restarted(stale="predict")
    assert predicted.method == "stale"
    assert "since up to a state in memory they cannot be predicted" in predicted.reason


@pytest.mark.parametrize("killed", [SAME], indirect=True)
def test_of_the_same_iteration_memory_has_younger_experts(killed: Killed) -> None:
    on_disk = killed.on_disk()
    assert max(on_disk.values()) == LAST
    restored, state = killed.restarted()
    assert (restored.method, restored.restored_iteration, restored.checkpoint_iteration) == ("stale", LAST, LAST)
    assert restored.sources[0].tier == "memory"
    in_memory = {name: restored.taken_at.get(name, LAST) for name in on_disk}
    assert all(in_memory[name] >= taken_at for name, taken_at in on_disk.items())
    assert sum(in_memory.values()) > sum(on_disk.values())
    killed.assert_as_noted(state, LAST, restored.taken_at)
    # Without memory the disk's are what there is.
    remove_held(killed.run_id)
    restored, state = killed.restarted()
    assert (restored.method, restored.restored_iteration) == ("stale", LAST)
    assert restored.sources[0].tier == "disk"
    assert {name: restored.taken_at.get(name, LAST) for name in on_disk} == on_disk
    killed.assert_as_noted(state, LAST, restored.taken_at)


@pytest.mark.parametrize("killed", [SAME], indirect=True)
def test_a_life_that_ends_at_once_keeps_the_younger_experts(killed: Killed) -> None:
    _, _, recovery = opened(config(killed.run_dir))
    with recovery:
        assert recovery.restored.sources[0].tier == "memory"
        ended = {key: values.clone() for key, values in recovery._adapter.shard().tensors()}
    assert killed.held() == []
    restored, state = killed.restarted()
    assert restored.restored_iteration == LAST
    assert all(torch.equal(values, ended[key]) for key, values in state.tensors())


@pytest.mark.parametrize("killed", [AHEAD], indirect=True)
def test_a_job_without_memory_to_predict_goes_on_from_there_too(killed: Killed) -> None:
    settings = {**config(killed.run_dir), "predictor": {"memory_limit_bytes": 1}}
    _, _, recovery = opened(settings)
    with recovery:
        assert (recovery.restored.method, recovery.restored.restored_iteration) == ("stale", LAST)


def test_after_a_skipped_snapshot_all_experts_are_copied_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not only once the disk, whose slowness made it skipped, has told of it."""
    goes_on, write = threading.Event(), CheckpointStore.write
    monkeypatch.setattr(ExpertSaving, "note_copied", slow_link)

    def slow(store: CheckpointStore, snapshot: Any) -> Any:
        if snapshot.iteration > INTERVAL:
            assert goes_on.wait(SECONDS)
        return write(store, snapshot)

    monkeypatch.setattr(CheckpointStore, "write", slow)
    model, optimizer, recovery = opened(config(tmp_path))
    copied, skipped = dict[int, bool](), 0
    with recovery:
        for _ in steps(model, optimizer, recovery):
            if recovery.iteration == INTERVAL:
                recovery._writer.drain(SECONDS)
            if recovery.iteration % INTERVAL == 0:
                running = recovery._pool._running
                copied[recovery.iteration] = running is not None and not running[0].not_copied
                if running is None and recovery._pool.recovery is not None:  # skipped: no buffer is free
                    skipped = recovery.iteration
                    recovery._pool.release(recovery._pool.recovery)
            if skipped and recovery.iteration > skipped + INTERVAL:
                goes_on.set()
                break
    assert not copied[skipped - INTERVAL]
    assert copied[skipped + INTERVAL]


def test_where_a_rank_had_to_copy_all_experts_the_next_time_all_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its source was taken, for what it leaves, between the ranks' choice and its snapshot."""
    monkeypatch.setattr(ExpertSaving, "note_copied", slow_link)
    begin, planned, copied = SnapshotPool.begin, dict[int, bool](), dict[int, bool]()

    def without_source(pool: SnapshotPool, shard: Shard, iteration: int, *rest: Any) -> Any:
        if iteration == 3 * INTERVAL:
            pool._source = None
        snapshot = begin(pool, shard, iteration, *rest)
        planned.setdefault(iteration, rest[2].copied is None)  # the last one is saved again, whole
        copied.setdefault(iteration, snapshot is not None and not snapshot.not_copied)
        return snapshot

    monkeypatch.setattr(SnapshotPool, "begin", without_source)
    model, optimizer, recovery = opened(config(tmp_path))
    with recovery:
        for _ in steps(model, optimizer, recovery):
            recovery._writer.drain(SECONDS)
            if recovery.iteration == 5 * INTERVAL:
                break
    assert [planned[INTERVAL * place] for place in (1, 2, 3, 4, 5)] == [True, False, False, True, False]
    assert copied[3 * INTERVAL]


@pytest.mark.parametrize("killed", [(2 * INTERVAL, 2 * INTERVAL + 1)], indirect=True)
def test_mode_exact_takes_the_checkpoint_where_memory_has_older_experts(killed: Killed) -> None:
    assert [one.kind for one in killed.held() if one.iteration == 2 * INTERVAL] == ["mixed"]
    restored, state = killed.restarted("exact")
    assert (restored.method, restored.restored_iteration, restored.taken_at) == ("exact", INTERVAL, {})
    killed.assert_as_noted(state, INTERVAL, {})


@pytest.mark.parametrize("killed", [AHEAD], indirect=True)
def test_a_damaged_state_in_memory_sends_the_run_to_the_disk(killed: Killed) -> None:
    (newest,) = [one for one in killed.held() if one.iteration == LAST]
    content = bytearray(newest.path.read_bytes())
    content[5000] ^= 1
    newest.path.write_bytes(content)
    restored, state = killed.restarted()
    assert restored.restored_iteration == LAST - 2
    assert restored.method == "stale"
    killed.assert_as_noted(state, LAST - 2, restored.taken_at)


def left_life(settings: dict[str, Any], state: dict[str, torch.Tensor], *, finished: bool) -> None:
    """Train until the last snapshot, note the state, and leave while that is copied, or after it."""
    model, optimizer, recovery = opened(settings)
    with recovery:
        for _ in steps(model, optimizer, recovery):
            recovery._writer.drain(SECONDS)
            if recovery.iteration == LAST:
                state |= {key: values.clone() for key, values in recovery._adapter.shard().tensors()}
                if finished:
                    recovery._saver.finish()
                raise InterruptedError


@pytest.mark.parametrize("finished", [False, True])
def test_what_the_rank_left_of_that_iteration_goes_before_older_experts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, finished: bool
) -> None:
    monkeypatch.setattr(ExpertSaving, "note_copied", slow_link)
    settings, state = config(tmp_path), dict[str, torch.Tensor]()
    with pytest.raises(InterruptedError):
        left_life(settings, state, finished=finished)
    run_id = str(json.loads((tmp_path / IDENTITY).read_text())["run_id"])
    kinds = {one.kind for one in held_states(run_id) if one.iteration == LAST}
    assert kinds == ({"departure", "mixed"} if finished else {"departure"})
    # Without the checkpoint of that iteration, which may have come to the disk all the same.
    shutil.rmtree(tmp_path / "checkpoints" / step_name(LAST), ignore_errors=True)
    _, _, again = opened(settings)
    with again:
        assert (again.restored.method, again.restored.restored_iteration) == ("departure", LAST)
        assert all(torch.equal(values, state[key]) for key, values in again._adapter.shard().tensors())


def test_it_is_said_where_no_snapshot_outlives_its_process(tmp_path: Path) -> None:
    settings = config(tmp_path)
    settings["checkpoint"]["shared_memory"] = False
    _, _, recovery = opened(settings)
    with recovery:
        pass
    with JournalReader(tmp_path / "journal.db") as journal:
        told = [event.message for event in journal.events() if event.kind == "experts in memory"]
    assert len(told) == 1
    assert "there is no shared memory (it is turned off): no snapshot outlives its process" in told[0]


SCRIPT = textwrap.dedent(
    """
    import json, sys
    import torch, torch.distributed as dist
    from cpsr.checkpoint.snapshot import Snapshot
    from cpsr.errors import CheckpointError
    from cpsr.group import Group
    from cpsr.restore import Restorer
    from cpsr.state import OperatorState, ParamSlice, Shard
    dist.init_process_group("gloo")
    rank, said = dist.get_rank(), []
    restorer = Restorer.__new__(Restorer)
    restorer._group = Group()
    for ages in ({"both": 8, f"own {rank}": 6 + rank}, {"both": 8 + 2 * rank, f"own {rank}": 8}):
        owned = {name: OperatorState(name, ParamSlice(torch.ones(1), (1,)), {}, age) for name, age in ages.items()}
        try:
            restorer._require_same_ages(Snapshot(10, Shard(owned)))
            said.append("")
        except CheckpointError as error:
            said.append(str(error))
    restorer._group.close()
    json.dump(said, open(sys.argv[1] + f".{rank}", "w"))
    dist.destroy_process_group()
    """
)


def test_ranks_that_hold_the_same_expert_go_on_with_it_as_of_one_iteration(tmp_path: Path) -> None:
    """Else what is one model would come apart; each rank may have others of any age of its own."""
    first, second = run(SCRIPT, tmp_path)
    assert first == second == ["", "the ranks' snapshots of iteration 10 hold both (8) of different iterations"]


if __name__ == "__main__":
    killed_life(json.loads(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
