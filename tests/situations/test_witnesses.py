"""Loops that a restart brings back, and loops that it does not: each repeated step is compared with its first run."""

from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from cpsr import CPSRRecovery, TorchAdapter
from cpsr.journal import JournalReader
from cpsr.ranks.exits import BEGAN
from cpsr.service.plan import plan_of
from cpsr.service.status import run_status
from cpsr.state.witness import read_witnesses
from tests.situations.lives import Life, alone_and_cut, backward, digest, live

KILLED_AT = 13  # three steps after the checkpoint, or eight if that was not durable
FIRST, REPEATED = (6, 11), ("8 repeated steps", "3 repeated steps")


class Regression(torch.nn.Module):
    """Returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.mse_loss(self.layers(x), y)


def before_update(fault: str, life: Life, calls: int, optimizer: torch.optim.Optimizer, norms: list[float]) -> None:
    """What a fault does to the gradients, or to the learning rate."""
    parameters = optimizer.param_groups[0]["params"]
    if fault == "learning rate":
        optimizer.param_groups[0]["lr"] = 1e-2 / calls
    if fault == "gradients on rank 1" and life.rank == 1 and life.number:
        optimizer.param_groups[0]["lr"] = 2e-2
    if fault == "gradients" and life.number and calls == 1:
        for one in parameters:
            one.grad = 0.5 * one.grad
    if "norms" in fault:  # as adaptive clipping keeps them
        norms.append(float(torch.nn.utils.clip_grad_norm_(parameters, sum(norms[-5:], 1.0) / 6)))


def training(life: Life) -> str:
    """A loop with the fault that `life.options` names."""
    fault = life.options.get("fault", "")
    torch.manual_seed(0)
    model = Regression()
    module: torch.nn.Module = model
    if life.ranks > 1:
        torch.distributed.init_process_group("gloo")
        module = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    inputs, targets = torch.randn(160, 8), torch.randn(160, 4)
    loader = DataLoader(TensorDataset(inputs, targets), batch_size=8, shuffle=True)
    own = torch.Generator().manual_seed(1)  # a generator that nobody saves
    calls, norms = 0, list[float]()
    with CPSRRecovery(TorchAdapter(module, optimizer), life.config(**life.options.get("config", {}))) as recovery:
        if fault == "registered norms":
            recovery.register("norms", {"norms": norms})
        for _ in range(3 if fault == "steps before the loop" else 0):  # as a learning-rate finder takes them
            backward(module(inputs[:8], targets[:8]))
            optimizer.step()
        for x, y in recovery.resume(loader, epochs=3 if fault == "accumulation" else 1):
            calls += 1
            if fault == "batches":  # as in nanoGPT's train.py
                rows = torch.randint(0, 160, (8,), generator=own)
                x, y = inputs[rows], targets[rows]
            loss = module(x, y)
            if fault == "rounding" and life.number:
                loss = loss * (1 + 2e-7)  # as if the gradients were summed in another order
            backward(loss)
            if fault == "accumulation" and calls % 3 != 1:
                continue
            before_update(fault, life, calls, optimizer, norms)
            optimizer.step()
            optimizer.zero_grad()
            life.step(recovery.iteration)
    if life.ranks > 1:
        torch.distributed.destroy_process_group()
    return digest(model)


def events(folder: Path, *kinds: str) -> list[tuple[str, int | None, str]]:
    with JournalReader(folder / "run" / "journal.db") as reader:
        return [(one.kind, one.iteration, one.message) for one in reader.events() if one.kind in kinds]


def verdicts(folder: Path) -> list[tuple[str, int | None, str]]:
    return events(folder, "checked", "arithmetic", "not restored")


def test_a_loop_that_comes_back_is_checked(tmp_path: Path) -> None:
    alone, cut = alone_and_cut(training, tmp_path, at=KILLED_AT, fault="registered norms")
    assert cut.result == alone.result
    assert verdicts(tmp_path / "alone") == []
    assert verdicts(tmp_path / "cut") in [[("checked", 13, f"exact, checked over {steps}")] for steps in REPEATED]
    assert "each repeated step is compared with its first execution" in events(tmp_path / "cut", BEGAN)[-1][2].lower()
    seen = read_witnesses(tmp_path / "cut" / "run", 0)
    assert [one.iteration for one in seen] == list(range(1, 21))
    assert [one.life for one in seen] in [[0] * (first - 1) + [1] * (21 - first) for first in FIRST]
    assert all(one.loss is not None and one.batches == one.iteration for one in seen)
    sampled = {one.iteration for one in read_witnesses(tmp_path / "alone" / "run", 0) if one.weights.content}
    assert sampled == {1, 2, 5, 6, 7, 10, 11, 12, 15, 16, 17, 20}  # each saved state, and two steps after it
    assert run_status(tmp_path / "cut" / "run", as_json=True)


@pytest.mark.parametrize(
    ("fault", "differs"),
    [
        ("accumulation", "the batch position differs"),
        ("learning rate", "the learning rate differs"),
        ("batches", "the loss differs"),
        ("gradients", "the weights differ"),
    ],
)
def test_what_differs_first_is_reported(tmp_path: Path, fault: str, differs: str) -> None:
    alone, cut = alone_and_cut(training, tmp_path, at=KILLED_AT, fault=fault)
    assert cut.result != alone.result
    ((kind, iteration, message),) = verdicts(tmp_path / "cut")
    assert kind == "not restored"
    assert iteration in FIRST
    assert f"this loop is not restored: in step {iteration}, which the restart repeats, {differs} first" in message
    # Batches are a cause unless the losses were equal.
    assert ("not all batches come from one recovery.resume(loader)" in message) == (fault == "batches")
    assert message in cut.output
    plan = plan_of(tmp_path / "cut" / "run")
    assert plan is not None
    assert [one.result for one in plan.repeated_steps] == ["not restored"]
    assert plan.warnings == [message]
    assert not run_status(tmp_path / "cut" / "run", as_json=True)


def test_steps_before_the_loop_are_taken_again_which_is_reported(tmp_path: Path) -> None:
    alone_and_cut(training, tmp_path, at=KILLED_AT, fault="steps before the loop")
    ((kind, iteration, _),) = verdicts(tmp_path / "cut")
    assert (kind, iteration in FIRST) == ("not restored", True)


def test_rounding_is_reported_once_and_is_no_error(tmp_path: Path) -> None:
    alone_and_cut(training, tmp_path, at=KILLED_AT, fault="rounding")
    rounded, checked = verdicts(tmp_path / "cut")
    assert rounded[0] == "arithmetic"
    assert rounded[1] in FIRST
    assert "arithmetic is not deterministic: " in rounded[2]
    assert checked[:2] == ("checked", 13)
    assert checked[2].endswith(f"equal but for rounding from step {rounded[1]} on")
    assert run_status(tmp_path / "cut" / "run", as_json=True)


def test_a_difference_can_stop_the_job(tmp_path: Path) -> None:
    stop = {"restart": {"on_difference": "stop"}}
    live(training, Life(tmp_path, KILLED_AT, options={"fault": "batches", "config": stop}))
    for number in (1, 2):  # started again unchanged, it stops again
        again = live(training, Life(tmp_path, number=number, options={"fault": "batches", "config": stop}))
        assert again.statuses != [0]
        assert "NotRestoredError" in again.output
    assert [kind for kind, *_ in verdicts(tmp_path)] == ["not restored"] * 2
    assert live(training, Life(tmp_path, number=3)).statuses == [0]


def test_without_a_repeated_step_nothing_is_claimed(tmp_path: Path) -> None:
    live(training, Life(tmp_path))
    live(training, Life(tmp_path, number=1))
    assert verdicts(tmp_path) == []
    message = events(tmp_path, BEGAN)[-1][2]
    assert message.endswith("Nothing is lost. Not checked: no step is repeated.")


def test_rank_0_hears_of_another_ranks_difference(tmp_path: Path) -> None:
    alone_and_cut(training, tmp_path, at=KILLED_AT, ranks=2, fault="gradients on rank 1")
    found = {message.split(":")[0]: (kind, iteration) for kind, iteration, message in verdicts(tmp_path / "cut")}
    assert found["rank 1"] in [("not restored", first) for first in FIRST]


def test_another_number_of_ranks_compares_nothing(tmp_path: Path) -> None:
    elastic = {"elastic": {"min_ranks": 1}}
    live(training, Life(tmp_path, KILLED_AT, on_rank=None, ranks=2, options={"config": elastic}))
    live(training, Life(tmp_path, number=1, options={"config": elastic}))
    assert verdicts(tmp_path) == []
    assert "the run had another number of ranks" in events(tmp_path, BEGAN)[-1][2]
