"""State whose layout is known only once training runs, and state that only a state dict shows."""

import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import prune as untyped_prune
from torch.utils.data import DataLoader, TensorDataset

from cpsr import CPSRRecovery, TorchAdapter
from cpsr.errors import UnsupportedEngineError
from tests.engines.optimizer_cases import Stacked
from tests.situations.lives import Life, alone_and_cut, backward, digest, live

WIDTH = 16
prune: Any = untyped_prune


class Scaling(nn.Linear):
    """Gets the shape of its scale in the first forward, as observers of quantization do."""

    scale: Any

    def __init__(self) -> None:
        super().__init__(WIDTH, 4)
        self.register_buffer("scale", torch.ones(1))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.scale = rows.abs().amax(0) if self.scale.numel() == 1 else self.scale.lerp(rows.abs().amax(0), 0.1)
        found: torch.Tensor = super().forward(rows / self.scale)
        return found


class Bank(nn.Linear):
    """A queue of features that grows by a batch in every step, and a centre that is None before the first."""

    queue: torch.Tensor
    centre: Any

    def __init__(self) -> None:
        super().__init__(WIDTH, 4)
        self.register_buffer("queue", torch.empty(0, 4))
        self.register_buffer("centre", None)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        found = super().forward(rows)
        self.queue = torch.cat([self.queue, found.detach()])[-100:]
        mean = self.queue.mean(0)
        self.centre = mean if self.centre is None else self.centre.lerp(mean, 0.5)
        centre: torch.Tensor = self.centre
        return found - centre


class Leaving(Scaling):
    """Drops a buffer after its third forward."""

    first: Any

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("first", torch.zeros(3, 2))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        found = super().forward(rows)
        if self.first is not None:
            self.first += 1
            found = found + float(self.first.sum())
            self.first = None if self.first[0, 0] == 3 else self.first
        return found


class Amax(nn.Linear):
    """A number beside the tensors, saved as FP8 layers save theirs."""

    def __init__(self) -> None:
        super().__init__(WIDTH, 4)
        self.amax = 1.0

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.amax += 0.1 * rows.abs().max().item()
        return super().forward(rows / self.amax)

    def get_extra_state(self) -> Any:
        return {"amax": torch.tensor(self.amax, dtype=torch.float64), "kept": ["e4m3", 16]}

    def set_extra_state(self, state: Any) -> None:
        self.amax = state["amax"].item()


class Overriding(Amax):
    """The same number in a state dict of its own making."""

    get_extra_state = nn.Module.get_extra_state
    set_extra_state = nn.Module.set_extra_state

    def state_dict(self, *given: Any, **named: Any) -> Any:
        prefix = named.get("prefix", "")
        return super().state_dict(*given, **named) | {prefix + "amax": self.amax}

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        state = dict(state_dict)
        self.amax = state.pop("amax")
        return super().load_state_dict(state, strict, assign)


class Noting(torch.optim.AdamW):
    """Keeps a number that its own state dict returns, and one in its parameter groups."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=1e-2)
        self.taken = {"of": [0]}
        self.register_state_dict_post_hook(lambda _, state: {**state, "taken": self.taken})
        self.register_load_state_dict_pre_hook(lambda own, state: setattr(own, "taken", state["taken"]))

    def step(self, closure: Any = None) -> Any:
        self.taken["of"][0] += 1
        for group in self.param_groups:
            group["lr"] = 1e-2 / self.taken["of"][0]
            group.setdefault("past", []).append(self.taken["of"][0])
        return super().step(closure)


MODULES: dict[str, Callable[[], nn.Module]] = {
    "shape in the first forward": Scaling,
    "grows, and None before": lambda: nn.Sequential(nn.BatchNorm1d(WIDTH), Bank()),
    "becomes None": Leaving,
    "extra state": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Amax()),
    "overridden state dict": Overriding,
}


def of_module(life: Life) -> str:
    module = MODULES[life.options["module"]]()
    return trained(life, module, torch.optim.AdamW(module.parameters(), lr=1e-2))


def stacked(life: Life) -> str:
    module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)), nn.Linear(WIDTH, 4))
    return trained(life, module, Stacked(module.parameters(), short=12))


def noting(life: Life) -> str:
    module = nn.Linear(WIDTH, 4)
    optimizer = Noting(module.parameters())
    return f"{trained(life, module, optimizer)} {optimizer.taken} {optimizer.param_groups[0]['past']}"


def trained(life: Life, module: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    torch.manual_seed(life.rank)
    for parameter in module.parameters():
        nn.init.constant_(parameter, 0.1)
    wrapped = module
    if life.ranks > 1:
        torch.distributed.init_process_group("gloo")
        wrapped = nn.parallel.DistributedDataParallel(module, broadcast_buffers=False)
    rows = torch.randn(256, WIDTH)
    loader = DataLoader(TensorDataset(rows, rows[:, :4]), batch_size=8, shuffle=True)
    with CPSRRecovery(TorchAdapter(wrapped, optimizer), life.config()) as recovery:
        assert recovery.iteration > 0 or not life.number
        for inputs, targets in recovery.resume(loader, epochs=1):
            loss = functional.mse_loss(wrapped(inputs), targets)
            optimizer.zero_grad()
            backward(loss)
            optimizer.step()
            life.step(recovery.iteration)
            if recovery.iteration == 20:
                break
    more = [value for value in module.state_dict().values() if not isinstance(value, torch.Tensor)]
    return f"{digest(module)} {more} {loss}"


@pytest.mark.parametrize("module", MODULES)
def test_state_of_a_module(module: str, tmp_path: Path) -> None:
    how = signal.SIGTERM if module == "becomes None" else signal.SIGKILL
    alone, cut = alone_and_cut(of_module, tmp_path, at=13, how=how, module=module)
    assert cut.result == alone.result


def test_each_rank_has_its_own(tmp_path: Path) -> None:
    alone, cut = alone_and_cut(of_module, tmp_path, at=13, ranks=2, module="grows, and None before")
    assert cut.results == alone.results
    assert alone.results[0] != alone.results[1]


@pytest.mark.parametrize("loop", [stacked, noting])
def test_state_of_an_optimizer(loop: Callable[[Life], str], tmp_path: Path) -> None:
    alone, cut = alone_and_cut(loop, tmp_path, at=13)
    assert cut.result == alone.result


class Opaque(Amax):
    """Its extra state is no plain data."""

    def get_extra_state(self) -> Any:
        return {"history": object()}


class OneWay(nn.Linear):
    """Nobody can set its extra state again."""

    def get_extra_state(self) -> Any:
        return 1


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (Opaque, r"cannot save Sequential\.state_dict\(\)\.0\._extra_state\.history: builtins\.object"),
        (lambda: OneWay(WIDTH, 4), r"OneWay \(0\) has get_extra_state and no set_extra_state"),
    ],
)
def test_what_cannot_be_saved_is_refused_at_the_start(module: Callable[[], nn.Module], message: str) -> None:
    whole = nn.Sequential(module())
    with pytest.raises(UnsupportedEngineError, match=message):
        TorchAdapter(whole, torch.optim.SGD(whole.parameters()))


def with_a_new_parameter(life: Life) -> int:
    module = nn.Linear(WIDTH, 4)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    module.register_parameter("late", nn.Parameter(torch.ones(4), requires_grad=False))
    config = life.config(mode=life.options["mode"])
    with CPSRRecovery(TorchAdapter(module, optimizer), config) as recovery:
        for batch in recovery.resume([torch.ones(2, WIDTH)] * 20):
            backward((module(batch) * module.late).sum())
            optimizer.step()
            assert recovery.life.saver.drain(60.0)
            if recovery.iteration == 7:
                optimizer.add_param_group({"params": [module.late.requires_grad_(True)]})
    return recovery.iteration


def test_a_job_whose_state_cannot_be_saved_ends_at_the_checkpoint(tmp_path: Path) -> None:
    ended = live(with_a_new_parameter, Life(tmp_path, options={"mode": "exact"}))
    assert ended.statuses == [1]
    assert "no checkpoint can be taken of iteration 10 or later (the newest is of 5)" in ended.output
    assert "trained tensors has changed since the start of this life: param/late is new" in ended.output


def pruning(life: Life) -> str:
    """A loop that prunes its weights after the eighth step, and again after the fifteenth."""
    torch.manual_seed(0)
    layers = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)
    module = nn.Sequential(layers[0], nn.ReLU(), layers[1])
    for layer in layers if life.options["pruned"] == "from the start" else ():
        prune.identity(layer, "weight")
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    rows = torch.randn(160, WIDTH)
    loader = DataLoader(TensorDataset(rows, rows[:, :4]), batch_size=8, shuffle=True)
    with CPSRRecovery(TorchAdapter(module, optimizer), life.config()) as recovery:
        for inputs, targets in recovery.resume(loader, epochs=1):
            optimizer.zero_grad()
            backward(functional.mse_loss(module(inputs), targets))
            optimizer.step()
            for layer in layers if recovery.iteration in (8, 15) else ():
                prune.l1_unstructured(layer, "weight", amount=0.3)
                if life.options["pruned"] == "for good":
                    prune.remove(layer, "weight")
            life.step(recovery.iteration)
    return str([value.tolist() for layer in layers for _, value in sorted(layer.state_dict().items())])


def test_pruning_that_a_restart_would_not_know_ends_the_job(tmp_path: Path) -> None:
    ended = live(pruning, Life(tmp_path, options={"pruned": "later"}))
    assert ended.statuses == [1]
    assert "no checkpoint can be taken of iteration 10 or later" in ended.output
    assert (
        "the loop has added a buffer 0.weight_mask, and the module has none of that name at its start" in ended.output
    )


@pytest.mark.parametrize(("pruned", "at"), [("from the start", 18), ("for good", 13)])
def test_pruning_comes_back(pruned: str, at: int, tmp_path: Path) -> None:
    alone, cut = alone_and_cut(pruning, tmp_path, at=at, pruned=pruned)
    assert cut.result == alone.result
