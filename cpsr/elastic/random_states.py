"""Random states where a run continues on another number of ranks.

Rank r takes those of rank r. Where the run had no rank r, it takes states that are drawn from those of rank r modulo
the old number and from r itself, so that no two ranks have the same ones. A restart from the same checkpoint with the
same number of ranks always gets the same.
"""

import random
from typing import Any

import numpy
import torch
import xxhash

__all__ = ["random_states_of"]

_OFFSET = 0  # of a fresh generator of a GPU


def random_states_of(rank: int, saved_by: int, states: dict[str, Any]) -> dict[str, Any]:
    """The random states of a rank, as `cpsr.engines.evaluation` captures them.

    Args:
        rank: that is to take them.
        saved_by: the rank that saved `states`: the same one, or `rank` modulo the number of ranks then.
        states: of that rank.
    """
    if rank == saved_by:
        return states
    drawn = xxhash.xxh3_64_intdigest(states["host"]["torch"].numpy().tobytes(), seed=rank)
    host = {
        "python": random.Random(drawn).getstate(),  # noqa: S311 - of a training, not of a secret
        "numpy": numpy.random.RandomState(drawn & 0xFFFFFFFF).get_state(),
        "torch": torch.Generator().manual_seed(drawn).get_state(),
    }
    # A CUDA generator's state is its seed and its offset.
    signed = drawn - (1 << 64) if drawn >= 1 << 63 else drawn
    cuda = [torch.tensor([signed, _OFFSET], dtype=torch.int64, device="cpu").view(torch.uint8) for _ in states["cuda"]]
    return {**states, "host": host, "cuda": cuda}
