"""Sparse checkpoints of mixtures in a job that is killed: what comes back of experts left out, in pipelines too."""

import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from cpsr import CPSRRecovery
from cpsr.benchmarks.harness.checkpoint_files import slices_in
from cpsr.checkpoint.catalogue import scan
from cpsr.checkpoint.frozen_files import FrozenPart
from cpsr.checkpoint.history import DiskHistory
from cpsr.checkpoint.manifest import step_name
from cpsr.checkpoint.memory_owners import remove_memory_states
from cpsr.checkpoint.remote.copies import scan as copies
from cpsr.checkpoint.remote.place import open_place
from cpsr.checkpoint.run_directory import run_id
from cpsr.checkpoint.snapshot import Snapshot
from cpsr.checkpoint.store import CheckpointStore, verify_run
from cpsr.checkpoint.verify import read_manifest, read_rank_manifest
from cpsr.engines.moe.token_counts import MixtureOfExperts
from cpsr.engines.torch import TorchAdapter
from cpsr.experts.in_memory import InMemory
from cpsr.journal import JournalReader
from cpsr.restart.restore import Restored
from tests.device import NO_STAGES, cpu_only
from tests.recovery.engines import EXPERTS
from tests.recovery.job import INTERVAL, RANKS, Ended, Job

CHECKPOINT, FAILURE, END = 36, 38, 46
SIGKILLED = -9
EXPERT = "experts.deepspeed_moe.experts.deepspeed_experts"
# One of four experts in each checkpoint, from rank to rank, after a first one with all of them at 4.
AGES = {0: 36, 1: 28, 2: 24, 3: 32}
SHARED: dict[str, Any] = {"expert_parallel": 2, "zero": 0, "iterations": END}


# Two checkpoints of history, from which nothing can be predicted: the run goes on from the newest.
SHORT = {"disk_limit_bytes": 1}  # the newest checkpoint alone


def settings(**experts: Any) -> dict[str, Any]:
    return {"experts": {"policy": "sequential", "experts_per_layer": 1, **experts}}


def killed_at(job: Job, iteration: int, sections: dict[str, Any], **options: Any) -> None:
    committed = iteration - iteration % INTERVAL
    killed = job.launch(
        mode="auto", fault=f"step:1:{iteration}", committed=committed, settings=sections, **SHARED, **options
    )
    assert killed.statuses[1] == SIGKILLED, killed.output[1][-3000:]


def taken_at(job: Job, rank: int, iteration: int = CHECKPOINT) -> dict[str, int]:
    return taken_by(job.run_dir, iteration, rank)


def taken_by(run_dir: Path, iteration: int, rank: int = 0) -> dict[str, int]:
    directory = run_dir / "checkpoints" / step_name(iteration)
    record = read_rank_manifest(directory, read_manifest(directory), rank)
    return {name: operator.iteration for name, operator in record.operators.items()}


def expected_ages(names: Any) -> dict[str, int]:
    ages = dict.fromkeys(names, CHECKPOINT)
    for name in ages:
        if name.startswith(EXPERT):
            ages[name] = AGES[int(name.removeprefix(f"{EXPERT}.").partition(".")[0])]
    return ages


def began(job: Job, rank: int) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = load_file(job.directory / f"life-{job.lives}.{rank}.safetensors")
    return found


def trained(job: Job, rank: int) -> dict[tuple[str, int], torch.Tensor]:
    """Weights at every checkpoint of a job that saved all of them: (operator, iteration) -> values."""
    history = DiskHistory(job.run_dir / "checkpoints", slices_in(job.run_dir / "checkpoints", rank))
    return {
        (name, entry.iteration): history.read(name, place, 0, history.numel(name)).clone()
        for name in history.operators
        for place, entry in enumerate(history.entries)
    }


def restarted(job: Job, sections: dict[str, Any], mode: str = "auto", **options: Any) -> Ended:
    back = job.launch(mode=mode, settings=sections, began=True, **SHARED, **options)
    assert back.statuses == [0] * RANKS, back.output[0][-3000:]
    return back


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> list[dict[tuple[str, int], torch.Tensor]]:
    """The same training with every expert in every checkpoint, by rank."""
    job = Job(tmp_path_factory.mktemp("dense"))
    assert job.launch(**{**SHARED, "iterations": FAILURE}).statuses == [0] * RANKS
    return [trained(job, rank) for rank in range(RANKS)]


@pytest.fixture
def failed(job: Job) -> Job:
    """Killed one iteration after the checkpoint."""
    killed_at(job, CHECKPOINT + 1, {**settings(), "checkpoint": SHORT})
    return job


def test_experts_go_on_as_they_were_saved(failed: Job, dense: list[dict[tuple[str, int], torch.Tensor]]) -> None:
    sections = {**settings(), "checkpoint": SHORT}
    for rank in range(RANKS):
        ages = taken_at(failed, rank)
        assert ages == expected_ages(ages)
    back = restarted(failed, sections)
    for rank in range(RANKS):
        assert back.result(rank)["started"]["method"] == "older experts"
        assert back.result(rank)["started"]["iteration"] == CHECKPOINT
        found = began(failed, rank)
        for name, age in expected_ages(found).items():
            assert torch.equal(found[name], dense[rank][name, age].view_as(found[name])), (name, age)
    with JournalReader(failed.run_dir / "journal.db") as journal:
        recovery = journal.recoveries()[-1]
        assert (recovery.method, recovery.outcome, recovery.origin) == ("older experts", "kept", "predicted")
        lost = recovery.guard["lost_tokens"]
        assert lost["layers"][0]["stale_experts"] == EXPERTS - 1
        assert lost["layers"][0]["oldest_iteration"] == min(AGES.values())
        assert 0 < lost["lost_portion"] < 1
        assert journal.checkpoints()[-1].origin == "predicted"
    assert verify_run(failed.run_dir) == []
    assert set(taken_at(failed, 0, END).values()) == {END}  # the last one holds all


def test_a_roll_back_to_older_experts_is_labelled(job: Job) -> None:
    killed_at(job, FAILURE, settings())
    back = restarted(job, settings(), mode="predict", poison=True)
    for rank in range(RANKS):
        assert back.result(rank)["started"]["iteration"] == FAILURE
        assert back.result(rank)["started"]["method"] == "line"
    with JournalReader(job.run_dir / "journal.db") as journal:
        recovery = journal.recoveries()[-1]
        assert (recovery.method, recovery.outcome, recovery.origin) == ("line", "rolled_back", "predicted")
        assert recovery.guard["rolled_back_to"] == "older experts"
        assert journal.checkpoints()[-1].origin == "predicted"


class PlainMixture(torch.nn.Module):
    """Top-1 of three experts, without DeepSpeed."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = torch.nn.Linear(4, 3)
        self.experts = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(3))
        self.counts = torch.zeros(3, dtype=torch.int64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.gate(x).softmax(1).max(1)
        self.counts = torch.bincount(chosen, minlength=3)
        routed = torch.stack([self.experts[int(one)](row) for one, row in zip(chosen, x, strict=True)])
        loss: torch.Tensor = ((x + weights.unsqueeze(1) * routed) - x.flip(1)).square().mean()
        return loss


def settle(recovery: CPSRRecovery) -> None:
    """Wait until nothing is being copied or written: tiny steps outrun the disk."""
    recovery.life.saver.finish()
    assert recovery.life.saver.drain(10.0)
    recovery.life.saver.surface()


def plain_life(
    config: dict[str, Any], fail_after: int, *, ends: bool = False, act: Callable[[], None] = lambda: None
) -> tuple[Restored, dict[str, torch.Tensor]]:
    """One life of a plain torch loop, which then acts and fails; how it began, and the weights that it began with."""
    torch.manual_seed(0)
    model = PlainMixture()
    batches = torch.randn(100, 8, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    experts = MixtureOfExperts(lambda layer: layer.counts)  # type: ignore[arg-type, return-value] # PlainMixture's own
    with CPSRRecovery(TorchAdapter(model, optimizer, experts=experts), config) as recovery:
        start = {name: values.detach().clone() for name, values in model.named_parameters()}
        restored = recovery.restored
        if recovery.iteration == fail_after:
            return restored, start
        for batch in recovery.resume(batches):
            settle(recovery)
            if recovery.iteration == fail_after and ends:
                return restored, start
            if recovery.iteration == fail_after:
                act()
                raise RuntimeError("the end of this life")
            loss = model(batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    raise AssertionError("the data ended")


@pytest.mark.parametrize("policy", ["sequential", "load_aware", "dynamic_k", "moetion"])
def test_a_plain_torch_mixture_goes_the_same_way(tmp_path: Path, policy: str) -> None:
    kept = {"interval_iterations": 5, "shared_memory": False}
    config: dict[str, Any] = {"run_dir": str(tmp_path), "checkpoint": kept, "mode": "auto"}
    config["experts"] = {"policy": policy}
    with pytest.raises(RuntimeError, match="the end of this life"):
        plain_life(config, 40)
    history = DiskHistory(tmp_path / "checkpoints", slices_in(tmp_path / "checkpoints"))
    place = len(history.entries) - 1
    saved = {name: history.read(name, place, 0, history.numel(name)).clone() for name in history.operators}
    ages = {name: history.taken_at(name, place) for name in history.operators}
    history.close()
    restored, start = plain_life(config, 40)
    assert restored.restored_iteration == 40
    stale = {name for name, age in ages.items() if age < 40}
    assert stale <= {name for name in ages if name.startswith("experts.")}
    assert restored.taken_at == {name: ages[name] for name in stale}
    assert restored.method == ("older experts" if stale else "exact")
    assert bool(stale) or policy in ("moetion", "dynamic_k")  # which save all: the disk takes it, or the run is short
    for name, values in saved.items():
        assert torch.equal(start[name].reshape(-1), values)


KILLS = """
import json, os, signal, sys
from tests.recovery.test_sparse import plain_life
config, kills = json.loads(sys.argv[1]), json.loads(sys.argv[2])
for kill in kills:
    pid = os.fork()
    if pid == 0:
        plain_life(config, kill, act=lambda: os.kill(os.getpid(), signal.SIGKILL))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
"""


def test_many_kills_take_no_more_tokens_than_dynamic_k_allows(tmp_path: Path) -> None:
    """The limit is that of the whole run: K is all at first, and falls as the run grows."""
    limit = 0.1
    checkpoint = {"interval_iterations": 2, "shared_memory": False, "disk_limit_bytes": 1}
    config: dict[str, Any] = {"run_dir": str(tmp_path), "checkpoint": checkpoint, "mode": "auto"}
    config["experts"] = {"policy": "dynamic_k", "lost_portion_limit": limit}
    kills = json.dumps([37, 68, 83, 90, 95])
    subprocess.run([sys.executable, "-c", KILLS, json.dumps(config), kills], check=True, timeout=200)
    newest = scan(tmp_path / "checkpoints").checkpoints[-1].iteration
    plain_life(config, newest)
    with JournalReader(tmp_path / "journal.db") as journal:
        found = [recovery.guard.get("lost_tokens") for recovery in journal.recoveries()]
    lost = [one for one in found if one is not None]
    assert 0 < max(one["lost_portion_of_run"] for one in lost) <= limit
    assert max(one["layers"][0]["stale_experts"] for one in lost) == 2, "K falls to one of three experts"


@pytest.mark.parametrize("fault", ["the disk is full", "the disk is full, and memory has the state", "a kill"])
def test_the_last_checkpoint_of_a_life_is_given_up_for_nothing_that_is_not_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """It is sparse, and a whole one of the same iteration was to take its place."""
    target = f"file://{tmp_path / 'target'}"
    in_memory = fault.endswith("the state")
    kept = {"interval_iterations": 5, "shared_memory": in_memory, "target": target}
    config: dict[str, Any] = {"run_dir": str(tmp_path / "run"), "checkpoint": kept, "mode": "auto"}
    config["experts"] = {"policy": "sequential"}
    write = CheckpointStore.write

    def refused(store: CheckpointStore, snapshot: Snapshot, outside: FrozenPart | None = None) -> int:
        if not store.attempt:
            return write(store, snapshot, outside)
        if fault == "a kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    pid = os.fork()
    if pid == 0:
        monkeypatch.setattr(CheckpointStore, "write", refused)
        plain_life(config, 20, ends=True)
        os._exit(0)
    ended = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert ended == (SIGKILLED if fault == "a kill" else 0)
    found = scan(tmp_path / "run" / "checkpoints")
    assert (found.checkpoints[-1].iteration, found.asides) == (20, [])
    if fault != "a kill":  # which the thread that copies does not outlive
        assert [one.iteration for one in copies(open_place(target)).usable.values()][-1] == 20
    restored, _ = plain_life(config, 20, ends=True)
    assert (restored.restored_iteration, restored.method) == (20, "exact" if in_memory else "older experts")
    assert verify_run(tmp_path / "run") == []
    assert set(taken_by(tmp_path / "run", 20).values()) == {20}, "a whole one is there now"


def killed_life(config: dict[str, Any], kill_at: int) -> None:
    """A life in a process of its own that copies one of three experts in each snapshot, and is killed."""
    pid = os.fork()
    if pid == 0:
        setattr(InMemory, "wanted_bytes", lambda experts: 1.0)  # noqa: B010 - mypy refuses to assign to a method
        torch.manual_seed(0)
        model = PlainMixture()
        experts = MixtureOfExperts(lambda layer: layer.counts)  # type: ignore[arg-type, return-value] # PlainMixture's
        adapter = TorchAdapter(model, torch.optim.AdamW(model.parameters(), lr=1e-2), experts=experts)
        with CPSRRecovery(adapter, config) as recovery:
            for batch in recovery.resume(torch.randn(100, 8, 4)):
                if recovery.iteration == kill_at - 4:
                    settle(recovery)
                if recovery.iteration == kill_at:
                    recovery.life.saver.finish()
                    recovery.life.saver.pool.settle()
                    os.kill(os.getpid(), signal.SIGKILL)
                loss = model(batch)
                adapter.optimizer.zero_grad()
                loss.backward()
                adapter.optimizer.step()
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == SIGKILLED


def test_mode_exact_takes_no_snapshot_with_older_experts(tmp_path: Path) -> None:
    kept = {"interval_iterations": 20, "shared_memory": True}
    config: dict[str, Any] = {"run_dir": str(tmp_path / "run"), "checkpoint": kept, "mode": "auto"}
    config |= {"experts": {"policy": "sequential"}, "memory": {"interval_iterations": 1}}
    killed_life(config, 48)
    restored, _ = plain_life({**config, "mode": "exact"}, 20)
    remove_memory_states(run_id(tmp_path / "run"))
    assert (restored.method, restored.restored_iteration) == ("exact", 20), "at 40 the disk has older experts, too"


STAGED_RANKS = 4
STAGED: dict[str, Any] = {"ranks": STAGED_RANKS, "stages": 2, "micro_batches": 2, "expert_parallel": 2, "zero": 0}


@cpu_only(NO_STAGES)
def test_experts_of_all_stages_take_turns_and_come_back_with_their_ages(tmp_path: Path) -> None:
    """One expert of each layer in a checkpoint, after a first one with all."""
    at, end, routed = 24, 28, (1, 2)
    options: dict[str, Any] = {**STAGED, "routed": routed, "iterations": end}
    dense = Job(tmp_path / "dense")
    assert dense.launch(**{**options, "iterations": at + 1}).statuses == [0] * STAGED_RANKS
    job = Job(tmp_path / "sparse")
    settings = {"experts": {"policy": "sequential", "experts_per_layer": 1}}
    options["unpredicted"] = True  # the run goes on from the newest checkpoint
    killed = job.launch(mode="auto", fault=f"step:1:{at + 1}", committed=at, settings=settings, **options)
    assert killed.statuses[1] == SIGKILLED, killed.output[1][-3000:]
    back = job.launch(mode="auto", settings=settings, began=True, **options)
    assert back.statuses == [0] * STAGED_RANKS, back.output[0][-3000:]
    directory = job.run_dir / "checkpoints" / step_name(at)
    manifest = read_manifest(directory)
    taken: dict[str, int] = {}
    for rank in range(STAGED_RANKS):
        ages = {name: one.iteration for name, one in read_rank_manifest(directory, manifest, rank).operators.items()}
        found, before = load_file(job.directory / f"life-2.{rank}.safetensors"), trained(dense, rank)
        for name, age in ages.items():
            assert torch.equal(found[name], before[name, age].view_as(found[name])), (name, age)
        assert {age for name, age in ages.items() if ".deepspeed_experts." not in name} == {at}
        taken |= ages
        began = back.result(rank)["started"]
        assert (began["method"], began["iteration"]) == ("older experts", at)
    layers = [f"{number}.experts" for number in (*range(1, 1 + routed[0]), *range(3, 3 + routed[1]))]
    for layer in layers:
        experts = [age for name, age in taken.items() if name.startswith(layer) and name.endswith(".0.weight")]
        assert sorted(experts) == [at - 12, at - 8, at - 4, at]
    with JournalReader(job.run_dir / "journal.db") as journal:
        lost = journal.recoveries()[-1].guard["lost_tokens"]["layers"]
    assert [one["layer"] for one in lost] == layers
    assert all(one["stale_experts"] == 3 and one["lost_tokens"] > 0 for one in lost)
    assert verify_run(job.run_dir) == []


@cpu_only(NO_STAGES)
def test_snapshots_in_memory_leave_out_experts_of_some_stages(tmp_path: Path) -> None:
    """One of four in each; a stage without any copies all that it has, and goes back to the same iteration."""
    routed = (0, 2)
    options: dict[str, Any] = {
        **STAGED,
        "routed": routed,
        "hidden_bytes": 1.0,
        "unpredicted": True,
    }
    settings = {
        "experts": {"policy": "sequential"},
        "checkpoint": {"shared_memory": True, "interval_iterations": 8},
        "memory": {"interval_iterations": 1},
    }
    job = Job(tmp_path)
    try:
        killed = job.launch(mode="auto", fault="step:all:23", in_memory=21, settings=settings, **options)
        assert killed.statuses == [SIGKILLED] * STAGED_RANKS, killed.output[0][-3000:]
        back = job.launch(mode="auto", settings=settings, **options)
    finally:
        remove_memory_states(run_id(job.run_dir))
    assert back.statuses == [0] * STAGED_RANKS, back.output[0][-3000:]
    started = [back.result(rank)["started"] for rank in range(STAGED_RANKS)]
    assert [one["method"] for one in started] == ["older experts"] * STAGED_RANKS
    (began,) = {one["iteration"] for one in started}
    assert began > 16
    with JournalReader(job.run_dir / "journal.db") as journal:
        lost = journal.recoveries()[-1].guard["lost_tokens"]["layers"]
    assert [one["stale_experts"] for one in lost] == [3] * sum(routed)
    assert {one["oldest_iteration"] for one in lost} == {began - 3}
