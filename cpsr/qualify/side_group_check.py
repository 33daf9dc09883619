"""The ranks' side group beside the training's backend: both at work at once, and neither disturbs the other."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from cpsr.qualify.cells import Cell
from cpsr.qualify.scene import Scene
from cpsr.ranks.group import Group

__all__ = ["check_side_group"]

ROUNDS = 20
ELEMENTS = 1 << 18


def check_side_group(cell: Cell, scene: Scene) -> Mapping[str, Any]:
    """Gather and vote on the side while the training group reduces; returns the backend of the training group."""
    group = Group()
    votes = group.votes()
    everyone = list(range(scene.ranks))
    for number in range(1, ROUNDS + 1):
        values = torch.full((ELEMENTS,), float(scene.rank + number), device=scene.device)
        work = dist.all_reduce(values, async_op=True)
        gathered = group.gather([scene.rank, number])
        agreed = votes.exchange(False, number)
        work.wait()
        assert gathered == [[rank, number] for rank in everyone], gathered
        assert agreed == (False, number - 1, 0), agreed
        assert group.sum(scene.rank) == sum(everyone)
        assert torch.equal(values, torch.full_like(values, float(sum(everyone) + number * scene.ranks)))
    votes.finish()
    group.close()
    return {"backend": dist.get_backend()}
