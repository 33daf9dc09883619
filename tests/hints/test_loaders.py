"""Loops over data loaders go on with their next batch, bit for bit: in this process, and after SIGKILL."""

import math
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from cpsr.errors import NotResumableError, RunMismatchError
from cpsr.hints import resumable
from tests.hints.programs import Program, module_of, seed

TEXT = """
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, RandomSampler, Sampler
from torchdata.stateful_dataloader import StatefulDataLoader
from cpsr.state.loader import ResumableLoader
from cpsr.state.small_state import DataPosition

class Noisy(Dataset):
    def __init__(self, rows=10):
        self.rows = torch.arange(rows)
    def __len__(self):
        return len(self.rows)
    def __getitem__(self, index):
        return self.rows[index] + random.random() + torch.rand(())

class Drawing(Noisy):
    def __init__(self):
        super().__init__()
        self.generator = torch.Generator().manual_seed(4)
    def __getitem__(self, index):
        return self.rows[index] + torch.rand((), generator=self.generator)

class Counting(IterableDataset):
    def __init__(self):
        self.next = 0
    def __iter__(self):
        while self.next < 10:
            self.next += 1
            yield self.next
        self.next = 0
    def state_dict(self):
        return {"next": self.next}
    def load_state_dict(self, state):
        self.next = state["next"]

class Counted(Noisy):
    state_dict, load_state_dict = Counting.state_dict, Counting.load_state_dict

class Passes(Sampler):
    def __init__(self):
        self.passes = 0
    def __iter__(self):
        self.passes += 1
        return iter([index * self.passes % 7 for index in range(10)])
    def __len__(self):
        return 10

class Told(Passes):
    def set_epoch(self, epoch):
        self.passes = epoch

class Epochs(Noisy):
    def __init__(self):
        super().__init__()
        self.epoch = 0
    def set_epoch(self, epoch):
        self.epoch = epoch
    def __getitem__(self, index):
        return self.rows[index] + 100 * self.epoch

def generator():
    return torch.Generator().manual_seed(7)

def over(loader, epochs):
    seen = []
    for epoch in range(epochs):
        if isinstance(loader.sampler, DistributedSampler | Told):
            loader.sampler.set_epoch(epoch)
        for batch in loader:
            seen.append((batch.tolist(), random.random(), float(torch.rand(()))))
            hint()
            seen.append(float(torch.rand(())))
    return seen

def between(loader, epochs):
    seen = []
    for epoch in range(epochs):
        if isinstance(loader.sampler, DistributedSampler):
            loader.sampler.set_epoch(epoch + 1)
        for batch in loader:
            seen.append(batch.tolist())
            if len(seen) % 3 == 2:
                break
        random.random(), torch.rand(())
        hint()
        for batch in loader:
            seen.append(batch.tolist())
    return seen

def unseen(loader):
    for _ in range(2):
        for batch in loader:
            break
        hint()

def nested(loader):
    for _ in loader:
        for _ in loader:
            hint()

def failing(loader, wanted):
    count = 0
    for batch in loader:
        hint()
        count += 1
        if count > wanted:
            raise ValueError("fails")
"""
LOADERS = {
    "shuffled": "DataLoader(Noisy(), 4, shuffle=True)",
    "workers": "DataLoader(Noisy(), 3, shuffle=True, num_workers=2)",
    "generator": "DataLoader(Noisy(), 4, shuffle=True, generator=generator())",
    "generator and workers": "DataLoader(Noisy(), 3, shuffle=True, num_workers=2, generator=generator())",
    "replacement": "DataLoader(Noisy(), 4, sampler=RandomSampler(range(10), True, 11, generator()))",
    "drawing": "DataLoader(Drawing(), 4, shuffle=True)",
    "distributed": "DataLoader(Epochs(), 2, sampler=DistributedSampler(range(10), 2, 1))",
    "counting sampler": "DataLoader(Noisy(), 4, sampler=Passes())",
    "told sampler": "DataLoader(Noisy(), 4, sampler=Told())",
    "torchdata": "StatefulDataLoader(Noisy(), 4, shuffle=True)",
    "torchdata and workers": "StatefulDataLoader(Noisy(), 4, shuffle=True, num_workers=2)",
    "torchdata and generator": "StatefulDataLoader(Noisy(), 4, shuffle=True, generator=generator())",
    "data with a state": "StatefulDataLoader(Counting(), 4)",
    "stream": "ResumableLoader(DataLoader(Noisy(), 4, shuffle=True), DataPosition(), until_epoch=1, sets_epoch=False)",
}


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    return module_of(tmp_path_factory.mktemp("loaders"), TEXT)


def made(module: ModuleType, loader: str) -> Any:
    return eval(loader, vars(module))


@pytest.mark.parametrize("loader", LOADERS)
def test_a_loop_goes_on_with_the_next_batch(module: ModuleType, loader: str) -> None:
    count = Program(module.over).interrupted(lambda: {"loader": made(module, LOADERS[loader]), "epochs": 2})
    assert count == 2 * len(list(made(module, LOADERS[loader])))


@pytest.mark.parametrize("loader", [one for one in LOADERS if one not in ("data with a state", "stream")])
def test_a_pass_after_the_hint_begins_as_it_would_have(module: ModuleType, loader: str) -> None:
    assert Program(module.between).interrupted(lambda: {"loader": made(module, LOADERS[loader]), "epochs": 2}) == 2


REFUSED = {
    "persistent_workers": "DataLoader(Noisy(), 4, num_workers=1, persistent_workers=True)",
    "in_order": "DataLoader(Noisy(), 4, num_workers=1, in_order=False)",
    "draw from copies of a generator": "DataLoader(Drawing(), 4, num_workers=1)",
    "an iterable data set": "DataLoader(Counting(), 4)",
    "data set that has a state": "DataLoader(Counted(), 4)",
}


@pytest.mark.parametrize("words", REFUSED)
def test_a_loader_that_would_not_go_on_exactly_is_refused(module: ModuleType, words: str) -> None:
    with pytest.raises(NotResumableError, match=f"the argument 'loader' is a DataLoader .*{words}"):
        Program(module.over).interrupted(lambda: {"loader": made(module, REFUSED[words]), "epochs": 1})


@pytest.mark.parametrize("loader", ["data with a state", "stream"])
def test_a_hint_after_batches_that_no_checkpoint_knows_is_refused(module: ModuleType, loader: str) -> None:
    with pytest.raises(NotResumableError, match="between two passes is not known: move the hint"):
        Program(module.unseen).interrupted(lambda: {"loader": made(module, LOADERS[loader])})


def test_a_loader_that_a_loop_around_goes_over_is_refused(module: ModuleType) -> None:
    with pytest.raises(NotResumableError, match="no outer loop may go over the same one"):
        Program(module.nested).interrupted(lambda: {"loader": made(module, LOADERS["shuffled"])})


@pytest.mark.parametrize("other", ["DataLoader(Noisy(), 5)", "DataLoader(Noisy(9), 4)", "DataLoader(Noisy(), 4, True)"])
def test_another_loader_is_refused(module: ModuleType, tmp_path: Path, other: str) -> None:
    def call(loader: str) -> None:
        seed()
        resumable(tmp_path, math.inf)(module.failing)(made(module, loader), 1)

    with pytest.raises(ValueError, match="fails"):
        call("DataLoader(Noisy(), 4)")
    with pytest.raises(RunMismatchError, match="the argument 'loader'"):
        call(other)
    with pytest.raises(ValueError, match="fails"):
        call("DataLoader(Noisy(), 4)")


# Each run is a fork: undisturbed, killed within a pass, gone on and killed at the end of one, gone on to the end.
TRAINING = """
import hashlib, math, os, random, signal, sys
import torch
import torch._dynamo  # the first optimizer does, in seconds
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader
from cpsr import CPSRRecovery
from cpsr.engines.torch import TorchAdapter
from cpsr.hints import hint, resumable

def tick(count):
    if count == int(os.environ["KILL_AT"]):
        os.kill(os.getpid(), signal.SIGKILL)

def train(model, optimizer, loader, epochs):
    losses = []
    for _ in range(epochs):
        for row, label in loader:
            loss = (model(row) - label).square().mean()
            if optimizer is not None:
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            losses.append(loss.item())
            del row, label, loss
            hint()
            tick(len(losses))
    return losses

class Noisy(TensorDataset):
    def __getitem__(self, index):
        row, label = super().__getitem__(index)
        return row + torch.randn(8), label

def main(directory, kind, workers):
    torch.manual_seed(1)
    random.seed(1)  # a fork seeds it otherwise
    data = Noisy(torch.randn(14, 8), torch.randn(14, 1))
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    made = StatefulDataLoader if kind == "torchdata" else DataLoader
    loader = made(data, 4, shuffle=True, num_workers=workers)
    call = resumable(directory + "/hints", math.inf)(train)
    if kind == "resume":
        adapter = TorchAdapter(model, optimizer)
        with CPSRRecovery(adapter, {"run_dir": directory + "/run", "mode": "exact"}) as recovery:
            losses = call(model, None, recovery.resume(loader, epochs=2), 1)
    else:
        losses = call(model, optimizer, loader, 2)
    taken = hashlib.sha256(torch.get_rng_state().numpy().tobytes() + repr(losses).encode())
    for one in model.parameters():
        taken.update(one.detach().numpy().tobytes())
    print(kind, workers, call.resumed_from, taken.hexdigest(), flush=True)

def forked(kill_at, directory, *given):
    os.environ["KILL_AT"] = str(kill_at)
    child = os.fork()
    if not child:
        main(directory, *given)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status == (-signal.SIGKILL if kill_at else 0), status

for workers in (0, 2):
    for kill_at, name in ((0, "undisturbed"), (2, "killed"), (4, "killed"), (0, "killed")):
        forked(kill_at, f"{sys.argv[1]}/{name}-{workers}", sys.argv[2], workers)
"""


@pytest.mark.parametrize("kind", ["torch", "torchdata", "resume"])
def test_a_training_that_was_killed_ends_with_the_same_bits(tmp_path: Path, kind: str) -> None:
    script = tmp_path / "training.py"
    script.write_text(TRAINING)
    command = [sys.executable, str(script), str(tmp_path), kind]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    ended = [line.split() for line in done.stdout.splitlines() if line.startswith(kind)]
    assert [one[:3] for one in ended] == [[kind, workers, came] for workers in "02" for came in ("None", "4")]
    assert len({tuple(one[3:]) for one in ended[:2]}) == len({tuple(one[3:]) for one in ended[2:]}) == 1
