"""Views that one part of the job keeps are given up when the engine's tensors are others, whoever else has looked."""

import copy

import torch
from torch import nn

from cpsr import TorchAdapter
from cpsr.engines.kept_views import KeptViews


class Job:
    """One layer under AdamW, before its first step."""

    def __init__(self) -> None:
        self.module = nn.Linear(3, 2)
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=0.1)
        self.adapter = TorchAdapter(self.module, self.optimizer)
        self.kept = KeptViews(self.adapter)

    def step(self) -> None:
        torch.autograd.backward(self.module(torch.ones(1, 3)).sum())
        self.optimizer.step()

    def is_present(self) -> bool:
        """Whether the kept views are of the optimizer's own state."""
        moment = self.kept().operators["weight"].moments["exp_avg"]
        own: torch.Tensor = self.optimizer.state[self.module.weight]["exp_avg"]
        return moment.data_ptr() == own.data_ptr()


def test_state_that_is_created_is_seen_also_after_another_part_has_looked() -> None:
    job = Job()
    job.kept()
    job.step()
    job.adapter.shard()
    assert job.is_present()


def test_state_that_is_replaced_is_seen_also_after_another_part_has_looked() -> None:
    job = Job()
    job.step()
    assert job.is_present()
    job.optimizer.load_state_dict(copy.deepcopy(job.optimizer.state_dict()))
    job.adapter.shard()
    assert job.is_present()


def test_views_of_what_has_not_changed_are_kept_whoever_has_looked() -> None:
    job = Job()
    job.step()
    first = job.kept()
    job.adapter.shard()
    assert job.kept().operators is first.operators
