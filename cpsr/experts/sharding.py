"""Non-expert parts over data-parallel ranks, each of which could save all of them."""

import heapq
from collections.abc import Mapping, Sequence

__all__ = ["adaptive_sharding"]


def adaptive_sharding(part_bytes: Mapping[str, int], expert_bytes: Sequence[int]) -> tuple[tuple[str, ...], ...]:
    """Parts over ranks, the largest first, each to the rank that has least to save (ADPS).

    Only for replicated state (ZeRO-0, DDP). Parts are not divided: no rank can have less to do than
    the largest part. For n ranks the largest sum of a rank is at most `3/2 - 1/(2 n)` times the least possible. Where
    all save equally many bytes of experts, it is at most `4/3 - 1/(3 n)` times that.

    Args:
        part_bytes: of each non-expert part.
        expert_bytes: for each rank, what it saves of experts in this snapshot.

    Returns:
        For each rank, the parts that it saves; the same on every rank that gives it the same: between equals the first
        rank and the first part go first.

    Source: pec, section 3.2. The bounds are those of longest-processing-time scheduling: C.-Y. Lee, "Parallel machines
    scheduling with nonsimultaneous machine available time", 1991; R. L. Graham, "Bounds on multiprocessing timing
    anomalies", 1969.
    """
    least = [(size, rank) for rank, size in enumerate(expert_bytes)]
    heapq.heapify(least)
    parts: list[list[str]] = [[] for _ in expert_bytes]
    for name in sorted(part_bytes, key=lambda name: -part_bytes[name]):
        size, rank = least[0]
        parts[rank].append(name)
        heapq.heapreplace(least, (size + part_bytes[name], rank))
    return tuple(map(tuple, parts))
