"""The ranks' side groups beside the training's backend: all at work at once, and none disturbs the others."""

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from cpsr.qualify.cells import Cell
from cpsr.qualify.scene import Scene
from cpsr.ranks.group import Ballot, Group, SideGroup, pair_groups

__all__ = ["check_side_group"]

ROUNDS = 20
ELEMENTS = 1 << 18
TIMEOUT_SECONDS = 60.0  # of a neighbour, for what takes milliseconds


def check_side_group(cell: Cell, scene: Scene) -> Mapping[str, Any]:
    """Gather, vote, and send to the neighbours while the training group reduces; returns the training's backend."""
    group = Group()
    votes = group.votes()
    everyone = list(range(scene.ranks))
    # As replicas travel. Of more than two ranks none is in all of the pairs.
    pairs = pair_groups(scene.rank, [(rank, (rank + 1) % scene.ranks) for rank in everyone], TIMEOUT_SECONDS)
    for number in range(1, ROUNDS + 1):
        values = torch.full((ELEMENTS,), float(scene.rank + number), device=scene.device)
        work = dist.all_reduce(values, async_op=True)
        gathered = group.gather([scene.rank, number])
        agreed = votes.exchange(Ballot(interval_iterations=number))
        received = _exchange(pairs, scene.rank + number)
        work.wait()
        assert gathered == [[rank, number] for rank in everyone], gathered
        assert agreed == Ballot(interval_iterations=number - 1), agreed
        for peer, sent in received.items():
            assert torch.equal(sent, _message(peer + number)), f"rank {peer} sent something else"
        assert group.sum(scene.rank) == sum(everyone)
        assert torch.equal(values, torch.full_like(values, float(sum(everyone) + number * scene.ranks)))
    votes.finish()
    group.close()
    for pair in pairs.values():
        pair.close()
    return {"backend": dist.get_backend(), "neighbours": len(pairs)}


def _exchange(pairs: Mapping[int, SideGroup], number: int) -> dict[int, torch.Tensor]:
    """Send this rank's number to each neighbour; returns what they send, by rank."""
    message, received = _message(number), {peer: torch.empty(ELEMENTS) for peer in pairs}
    work = [pair.send(message, peer) for peer, pair in pairs.items()]
    work += [pair.receive(received[peer], peer) for peer, pair in pairs.items()]
    for one in work:
        one.wait(timedelta(seconds=TIMEOUT_SECONDS))
    return received


def _message(number: int) -> torch.Tensor:
    return torch.full((ELEMENTS,), float(number))
