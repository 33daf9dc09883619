"""The small state of optimizers on another number of ranks, by name and by parameter group."""

from typing import Any

import pytest
import torch

from cpsr.engines.optimizer_restore import reshard_optimizers, restore_optimizers
from cpsr.engines.optimizer_state import OptimizerState
from cpsr.engines.updated_tensor import Updated
from cpsr.errors import UnsupportedEngineError


class Rank:
    """Flat tensors of many parameters, as ZeRO keeps one or several for each parameter group; or named parameters."""

    def __init__(self, *groups: list[int], names: list[str] | None = None, kind: type = torch.optim.AdamW) -> None:
        self.masters = [[torch.nn.Parameter(torch.ones(size)) for size in group] for group in groups]
        self.optimizer = kind([{"params": group} for group in self.masters], lr=0.1)
        flat = [(master, group) for group in self.optimizer.param_groups for master in group["params"]]
        given = names or [""] * len(flat)
        self.every = [
            Updated(self.optimizer, group, master, name) for (master, group), name in zip(flat, given, strict=True)
        ]
        self.state = OptimizerState([self.optimizer])

    def train(self, steps: int, *, but: int | None = None) -> "Rank":
        for _ in range(steps):
            for index, one in enumerate(self.every):
                one.master.grad = None if index == but else torch.ones_like(one.master)
            self.optimizer.step()
        return self

    def scalars(self) -> dict[str, Any]:
        return self.state.scalars(self.every)

    def loaded(self, scalars: dict[str, Any]) -> list[float]:
        """The step counts after it has loaded them."""
        for one in self.every:
            for values in self.state.views("flat", one, to_fill=True)[1].values():
                values.fill_(0.5)
        restore_optimizers(self.state, self.every, scalars)
        return [float(self.optimizer.state[one.master]["step"]) for one in self.every]


@pytest.mark.parametrize("groups", [([4], [7]), ([2], [1]), ([3, 3], [1, 1, 1])])
def test_a_flat_tensor_takes_the_numbers_of_its_group(groups: tuple[list[int], list[int]]) -> None:
    saved = Rank([3], [5]).train(4).scalars()
    rank = Rank(*groups)
    assert rank.loaded(reshard_optimizers(saved, rank.every)) == [4.0] * sum(map(len, groups))
    assert all(state["exp_avg"].tolist() == [0.5] * len(master) for master, state in rank.optimizer.state.items())


def test_a_named_parameter_takes_its_own() -> None:
    saved = Rank([2, 3], names=["a", "b"]).train(2).train(1, but=0).scalars()
    rank = Rank([2, 3], names=["a", "b"])
    assert rank.loaded(reshard_optimizers(saved, rank.every)) == [2.0, 3.0]


def test_what_was_one_parameter_may_be_a_part_of_a_flat_tensor() -> None:
    saved = Rank([6], names=["a"]).train(3).scalars()
    rank = Rank([4])
    assert rank.loaded(reshard_optimizers(saved, rank.every)) == [3.0]


def test_state_that_is_absent_stays_absent() -> None:
    saved = Rank([3]).scalars()
    rank = Rank([2]).train(2)
    restore_optimizers(rank.state, rank.every, reshard_optimizers(saved, rank.every))
    assert not rank.optimizer.state


def test_parts_that_took_different_steps_have_no_count_in_common() -> None:
    saved = Rank([3, 3]).train(2).train(1, but=0).scalars()
    with pytest.raises(UnsupportedEngineError, match="have taken different steps"):
        reshard_optimizers(saved, Rank([4]).every)
