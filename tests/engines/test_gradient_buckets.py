"""Three ranks of DDP go on bit for bit: gradients are added up in the order of the run left alone."""

import json
import logging
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cpsr.engines import TorchAdapter
from cpsr.qualify.conformance import Recorder
from tests.rank_processes import become_rank, found_by, start_ranks

RANKS = 3
STEPS, SAVED = 6, 3
LIMIT_SECONDS = 300.0  # for what takes seconds; the machine may be busy


class Model(nn.Module):
    """Its parameters are not in the order in which they are used."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.middle = nn.Linear(24, 40), nn.Linear(40, 8), nn.Linear(40, 40)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.last(self.middle(self.first(x).tanh()).tanh()), y)


class Run:
    def __init__(self, seed: int, hooked: bool = False, **settings: Any) -> None:
        torch.manual_seed(seed)
        self.model = DistributedDataParallel(Model(), **settings)
        self.taken: list[torch.Size] = []
        for one in self.model.parameters() if hooked else ():
            take: Any = one.register_post_accumulate_grad_hook  # torch's stub has no types
            take(lambda one: self.taken.append(one.shape))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.adapter = TorchAdapter(self.model, self.optimizer)

    def train(self, first: int, last: int, accumulate: int) -> None:
        for step in range(first, last):
            for micro in range(accumulate):
                draw = torch.Generator().manual_seed(1000 * step + 10 * micro + torch.distributed.get_rank())
                x, y = torch.randn(4, 24, generator=draw), torch.randint(8, (4,), generator=draw)
                with nullcontext() if micro == accumulate - 1 else self.model.no_sync():
                    torch.autograd.backward(self.model(x, y))
            self.optimizer.step()
            self.optimizer.zero_grad()

    def weights(self) -> list[torch.Tensor]:
        return [one.detach().clone() for one in self.model.parameters()]


class Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def restart(heard: Heard, accumulate: int = 1, saved: int = SAVED, forget: bool = False, **settings: Any) -> Any:
    """Whether the weights equal those of the run left alone, and what was logged."""
    alone = Run(1, **settings)
    alone.adapter.attach(Recorder())
    alone.train(0, saved, accumulate)
    state = {key: values.clone() for key, values in alone.adapter.shard().tensors()}
    scalars = json.loads(json.dumps(alone.adapter.scalars()))
    alone.train(saved, STEPS, accumulate)
    if forget:
        scalars.pop("buckets", None)
    heard.messages.clear()
    back = Run(2, **settings)
    live = dict(back.adapter.shard(to_fill=True).tensors())
    with torch.no_grad():
        for key, values in state.items():
            live[key].copy_(values)
    back.adapter.load_scalars(scalars)
    back.adapter.attach(Recorder())
    assert all(one.grad is None for one in back.model.parameters())
    assert back.taken == []
    back.train(saved, STEPS, accumulate)
    again = back.adapter.scalars().get("buckets")
    back.adapter.detach()
    equal = all(map(torch.equal, alone.weights(), back.weights()))
    return {"equal": equal, "warned": heard.messages[:], "kept": again}


CASES: dict[str, Callable[[Heard], Any]] = {
    "plain": restart,
    "after the first step": partial(restart, saved=1),
    "accumulated": partial(restart, accumulate=2),
    "in views": partial(restart, gradient_as_bucket_view=True),
    "several buckets": partial(restart, bucket_cap_mb=0.004),
    "no order saved": partial(restart, forget=True),
    "unused looked for": partial(restart, find_unused_parameters=True),
    "static graph": partial(restart, static_graph=True),
    "hooks": partial(restart, hooked=True),
}


def run_rank(folder: Path, rank: int, ranks: int) -> None:
    become_rank(folder / f"{rank}.log", rank, ranks)
    meeting = f"file://{folder / 'meeting'}"
    torch.distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=ranks)
    heard = Heard()
    logging.getLogger("cpsr").addHandler(heard)
    found = {name: case(heard) for name, case in CASES.items()}
    (folder / f"{rank}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    return found_by(start_ranks(run_rank, folder, RANKS), folder, LIMIT_SECONDS)


@pytest.mark.parametrize("case", ["plain", "after the first step", "accumulated", "in views", "several buckets"])
def test_a_restart_adds_up_in_the_order_of_the_run_left_alone(found: list[dict[str, Any]], case: str) -> None:
    for rank in found:
        assert rank[case]["equal"]
        assert rank[case]["warned"] == []
        assert len(rank[case]["kept"].split()) == 6


def test_without_the_order_it_differs_and_says_so(found: list[dict[str, Any]]) -> None:
    """An older version saved none. From the next checkpoint on it is there."""
    warned = [rank["no order saved"]["warned"] for rank in found]
    assert [len(messages) for messages in warned] == [1, 0, 0]
    assert "the checkpoint does not have the order" in warned[0][0]
    assert not any(rank["no order saved"]["equal"] for rank in found), "else this module is of no use"
    assert all(len(rank["no order saved"]["kept"].split()) == 6 for rank in found)


@pytest.mark.parametrize(("case", "why"), [("static graph", "static_graph=True"), ("hooks", "hooks take gradients")])
def test_where_it_cannot_be_restored_it_says_so(found: list[dict[str, Any]], case: str, why: str) -> None:
    (message,) = found[0][case]["warned"]
    assert why in message


def test_where_ddp_keeps_one_order_nothing_is_done(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert rank["unused looked for"] == {"equal": True, "warned": [], "kept": None}
