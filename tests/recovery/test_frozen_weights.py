"""Weights outside the optimizer are saved once in a run, and come back with every state of it."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from cpsr import CPSRRecovery, TorchAdapter
from cpsr.benchmarks.harness.checkpoint_files import commit_file, frozen_files, kind_of, rank_part
from cpsr.checkpoint.manifest import RankManifest, step_name
from cpsr.checkpoint.store import verify_run
from cpsr.journal import JournalReader
from tests.committed import wait_until_committed
from tests.device import DEVICE
from tests.situations.lives import Ended, Life, backward, digest, live

FEATURES, RANK = 32, 2
INTERVAL, ITERATIONS = 4, 14
WAIT_SECONDS = 60.0
MOVING = 0.9  # share of itself that the teacher keeps in a step
EACH_STEP = {"checkpoint": {"shared_memory": True}, "memory": {"interval_iterations": 1}}
# Every step is in host memory, and no checkpoint comes before the end.
IN_MEMORY = {"checkpoint": {"shared_memory": True, "interval_iterations": 50}, "memory": {"interval_iterations": 1}}
OTHER_BASE = 4


class Adapted(nn.Module):
    """A frozen linear layer with a trained product of two narrow ones beside it (LoRA)."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(FEATURES, FEATURES).requires_grad_(False)
        self.down = nn.Parameter(torch.randn(RANK, FEATURES) / FEATURES)
        self.up = nn.Parameter(torch.zeros(FEATURES, RANK))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        adapted: torch.Tensor = self.base(x) + x @ self.down.T @ self.up.T
        return adapted

    def merge(self, *, through_data: bool) -> None:
        """Add the product to the frozen layer, and begin with nothing beside it."""
        with torch.no_grad():
            if through_data:
                self.base.weight.data += self.up @ self.down
            else:
                self.base.weight += self.up @ self.down
            self.up.zero_()


class Net(nn.Module):
    """Three such layers, the last on the base of the first; a mean of the inputs as a buffer."""

    def __init__(self, *, teacher: bool) -> None:
        super().__init__()
        self.adapted = [Adapted(), Adapted(), Adapted()]
        self.layers = nn.ModuleList(self.adapted)
        self.adapted[2].base = self.adapted[0].base
        self.teacher = nn.Linear(FEATURES, RANK, bias=False).requires_grad_(False) if teacher else None
        self.seen: torch.Tensor
        self.register_buffer("seen", torch.zeros(FEATURES))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.seen.mul_(0.9).add_(x.mean(0))
        hidden = x
        for layer in self.adapted:
            hidden = torch.tanh(layer(hidden))
        loss = nn.functional.mse_loss(hidden, y)
        return loss if self.teacher is None else loss + self.teacher(hidden).square().mean()

    def follow(self) -> None:
        """Move the teacher towards the trained weights."""
        if self.teacher is not None:
            with torch.no_grad():
                self.teacher.weight.mul_(MOVING).add_(self.adapted[0].down, alpha=1 - MOVING)


def training(life: Life) -> dict[str, Any]:
    """Adapters beside frozen weights, with `life.options`::

    base_seed=3                 of the base weights that the script loads
    teacher=False               a part of the module outside the optimizer follows the trained weights in every step
    merge_at=0                  after this step the adapters are merged into the base, and begin at zero again
    merge_through_data=False    by `.data`, of which torch counts no version
    committed=0                 a checkpoint that is awaited before this life is cut
    settings={}                 more of CPSR's configuration
    """
    options = life.options
    torch.manual_seed(options.get("base_seed", 3))
    module = Net(teacher=options.get("teacher", False)).to(DEVICE)
    torch.manual_seed(11)
    with torch.no_grad():
        for layer in module.adapted:
            layer.down.normal_(std=0.2)
    optimizer = torch.optim.AdamW([one for one in module.parameters() if one.requires_grad], lr=1e-2)
    values = torch.Generator().manual_seed(5)
    items = TensorDataset(*(torch.randn(40, FEATURES, generator=values) for _ in range(2)))
    settings = options.get("settings", {})
    checkpoint = {"interval_iterations": INTERVAL, "shared_memory": False, **settings.get("checkpoint", {})}
    losses: dict[int, float] = {}
    with CPSRRecovery(
        TorchAdapter(module, optimizer), life.config(**settings | {"checkpoint": checkpoint})
    ) as recovery:
        started = recovery.iteration
        for x, y in recovery.resume(DataLoader(items, batch_size=4, shuffle=True), epochs=100):
            loss = module(x.to(DEVICE), y.to(DEVICE))
            optimizer.zero_grad()
            backward(loss)
            optimizer.step()
            # The state of the step before is durable by now, however busy the machine is.
            recovery.life.saver.drain(WAIT_SECONDS)
            recovery.life.saver.pool.settle()
            module.follow()
            if recovery.iteration == options.get("merge_at"):
                for layer in module.adapted[:2]:
                    layer.merge(through_data=options.get("merge_through_data", False))
            losses[recovery.iteration] = loss.item()
            if recovery.iteration == life.at and options.get("committed"):
                wait_until_committed(life.directory / "run", options["committed"])
            life.step(recovery.iteration)
            if recovery.iteration == ITERATIONS:
                break
    return {"losses": losses, "started": started, "state": digest(module)}


class FrozenJob:
    """A run directory and the lives of its job."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.run_dir = directory / "run"
        self._lives = 0

    def run(self, *, fails: bool = False, fault: int = 0, **options: Any) -> Ended:
        """One life; `fails`: it ends by its `fault`, a kill after that step, or it is refused."""
        life = Life(self._directory, fault, number=self._lives, options=options)
        self._lives += 1
        ended = live(training, life)
        assert (set(ended.statuses) == {0}) is not fails, ended.output[-3000:]
        return ended

    def directory(self, iteration: int) -> Path:
        return self.run_dir / "checkpoints" / step_name(iteration)

    def files(self, iteration: int) -> Mapping[str, os.stat_result]:
        """Files of frozen weights in a checkpoint."""
        return {path.name: path.stat() for path in frozen_files(self.directory(iteration))}

    def record(self, iteration: int) -> RankManifest:
        return RankManifest.parse(rank_part(self.directory(iteration)).read_bytes())

    def events(self, kind: str) -> list[str]:
        with JournalReader(self.run_dir / "journal.db") as journal:
            return [event.message for event in journal.events() if event.kind == kind]


@pytest.fixture
def frozen(tmp_path: Path) -> FrozenJob:
    return FrozenJob(tmp_path)


Alone = Callable[..., tuple[FrozenJob, Ended]]


@pytest.fixture(scope="module")
def left_alone(tmp_path_factory: pytest.TempPathFactory) -> Alone:
    """Runs that nothing happened to, by options."""
    known: dict[str, tuple[FrozenJob, Ended]] = {}

    def of(**options: Any) -> tuple[FrozenJob, Ended]:
        name = repr(sorted(options.items()))
        if name not in known:
            job = FrozenJob(tmp_path_factory.mktemp("alone"))
            known[name] = job, job.run(**options)
        return known[name]

    return of


def same_end(ended: Ended, expected: Ended) -> bool:
    """Whether the losses of this life and the last state are those of another run."""
    one, other = ended.result, expected.result
    return bool(one["state"] == other["state"] and one["losses"].items() <= other["losses"].items())


def test_they_are_written_once_and_a_checkpoint_costs_what_trains(left_alone: Alone) -> None:
    job, _ = left_alone()
    assert len(job.files(12)) == 1
    assert {one.st_ino for one in job.files(12).values()} == {one.st_ino for one in job.files(ITERATIONS).values()}
    record = job.record(ITERATIONS)
    assert not record.others.keys() & record.frozen.keys()
    held = load_file(frozen_files(job.directory(ITERATIONS))[0])
    assert {f"frozen/{one}" for one in record.frozen} == held.keys(), "tied weights are there once"
    trained = sum(one.numel * 4 * (1 + len(one.moments)) for one in record.operators.values())
    new = {file: one.bytes for file, one in record.files.items() if kind_of(file) != "frozen"}
    # Three headers of whole blocks, the buffer, random states, and the predictor's numbers.
    assert sum(new.values()) < trained + 44 * 1024
    assert verify_run(job.run_dir) == []


def test_after_a_kill_they_are_as_they_were_whatever_the_script_loads(frozen: FrozenJob, left_alone: Alone) -> None:
    _, expected = left_alone()
    frozen.run(fault=10, committed=8, fails=True)
    before = frozen.files(8)
    ended = frozen.run(base_seed=OTHER_BASE)
    assert ended.result["started"] == 8
    assert same_end(ended, expected)
    assert frozen.files(12).keys() == before.keys()
    assert {one.st_ino for one in frozen.files(12).values()} == {one.st_ino for one in before.values()}


def test_a_damaged_file_that_is_needed_is_refused(frozen: FrozenJob) -> None:
    frozen.run(fault=10, committed=8, fails=True)
    (path,) = frozen_files(frozen.directory(8))
    path.write_bytes(b"\0" * path.stat().st_size)
    ended = frozen.run(base_seed=OTHER_BASE, fails=True)
    assert "none of the checkpoints of this run can be restored" in ended.output
    assert path.name in ended.output


def test_without_a_checkpoint_a_state_in_memory_needs_the_same_base_weights(
    frozen: FrozenJob, left_alone: Alone
) -> None:
    _, expected = left_alone()
    frozen.run(fault=9, fails=True, settings=IN_MEMORY)
    refused = frozen.run(base_seed=OTHER_BASE, fails=True, settings=IN_MEMORY)
    assert "The script must load the same base weights as before" in refused.output
    assert "It stays in memory" in refused.output
    ended = frozen.run(settings=IN_MEMORY)
    assert ended.result["started"] == 8
    assert same_end(ended, expected)


@pytest.mark.parametrize("settings", [{}, EACH_STEP], ids=["disk", "memory"])
def test_a_part_that_moves_in_every_step_is_in_every_snapshot(
    frozen: FrozenJob, left_alone: Alone, settings: dict[str, Any]
) -> None:
    _, expected = left_alone(teacher=True)
    frozen.run(teacher=True, fault=11, committed=8, fails=True, settings=settings)
    ended = frozen.run(teacher=True, base_seed=OTHER_BASE, settings=settings)
    assert ended.result["started"] == (10 if settings else 8)
    assert same_end(ended, expected)
    record = frozen.record(ITERATIONS)
    assert record.frozen["teacher.weight"].file is None
    assert all(one.file for name, one in record.frozen.items() if name != "teacher.weight")
    assert len(frozen.files(ITERATIONS)) == 1
    assert [message[:40] for message in frozen.events("frozen weights changed")] == [
        "1 parameters outside the optimizer (the "
    ] * 2, "once in each life"


@pytest.mark.parametrize("iteration", [8, 12])
def test_weights_that_are_written_to_once_get_a_new_file(frozen: FrozenJob, left_alone: Alone, iteration: int) -> None:
    """Merged after step 6: checkpoint 8 has them in its small state, and 12, when they have rested, in a file."""
    _, expected = left_alone(merge_at=6)
    frozen.run(merge_at=6, fault=iteration + 1, committed=iteration, fails=True)
    record = frozen.record(iteration)
    written = {name for name, one in record.frozen.items() if one.file is not None}
    assert ("layers.0.base.weight" in written) is (iteration == 12)
    ended = frozen.run(base_seed=OTHER_BASE)
    assert ended.result["started"] == iteration
    assert same_end(ended, expected)
    assert len(frozen.events("frozen weights changed")) == 1
    assert verify_run(frozen.run_dir) == []


def test_what_is_written_past_the_version_count_is_never_committed_as_it_was(
    frozen: FrozenJob, left_alone: Alone
) -> None:
    """Merged after step 6 through `.data`: checkpoint 8 is not saved, 12 has the new values."""
    _, expected = left_alone(merge_at=6)
    failed = frozen.run(merge_at=6, merge_through_data=True, fault=13, committed=12, fails=True)
    assert "were changed where torch does not count it, through .data" in failed.output
    assert not commit_file(frozen.directory(8)).exists()
    ended = frozen.run(base_seed=OTHER_BASE)
    assert ended.result["started"] == 12
    assert same_end(ended, expected)
