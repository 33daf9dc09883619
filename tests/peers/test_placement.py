"""Where replicas lie, against every placement that there is on small clusters."""

from collections.abc import Sequence
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpsr.peers.placement import Member, Placement, place, place_within


def choices(members: Sequence[Member], owner: int, count: int) -> list[tuple[int, ...]]:
    """Every set of holders by which the owner has so many copies, with as many of its group as in any such set."""
    others = [rank for rank, member in enumerate(members) if member.node != members[owner].node]
    apart = [
        chosen for chosen in combinations(others, count) if len({members[rank].node for rank in chosen}) == len(chosen)
    ]
    within = [sum(members[rank].group == members[owner].group for rank in chosen) for chosen in apart]
    return [chosen for chosen, number in zip(apart, within, strict=True) if number == max(within)]


def load_of(members: Sequence[Member], holders: Sequence[Sequence[int]]) -> list[int]:
    load = [0] * len(members)
    for owner, chosen in enumerate(holders):
        for rank in chosen:
            alike = members[rank].group == members[owner].group
            load[rank] += members[owner].bytes_within if alike else members[owner].bytes_beyond
    return load


def smallest_largest_load(members: Sequence[Member], count: int) -> int:
    """By going through all placements, a branch ending where it is no better than the best so far."""
    options = [choices(members, owner, count) for owner in range(len(members))]
    best = sum(count * max(member.bytes_within, member.bytes_beyond) for member in members)
    load = [0] * len(members)

    def descend(owner: int) -> None:
        nonlocal best
        if owner == len(members):
            best = min(best, max(load))
            return
        for chosen in options[owner]:
            added = [
                (
                    rank,
                    members[owner].bytes_within
                    if members[rank].group == members[owner].group
                    else members[owner].bytes_beyond,
                )
                for rank in chosen
            ]
            for rank, size in added:
                load[rank] += size
            if max(load) < best:
                descend(owner + 1)
            for rank, size in added:
                load[rank] -= size

    descend(0)
    return best


def check(members: Sequence[Member], replicas: int, placement: Placement) -> None:
    nodes = {member.node for member in members}
    count = min(replicas, len(nodes) - 1)
    for owner, holders in enumerate(placement.holders):
        assert len(holders) == count == len({members[rank].node for rank in holders} - {members[owner].node})
        alike = [members[rank].group == members[owner].group for rank in holders]
        group_nodes = {member.node for member in members if member.group == members[owner].group}
        assert sum(alike) == min(count, len(group_nodes) - 1)
        assert alike == sorted(alike, reverse=True)  # its own group's come first
        assert all(owner in placement.owners_kept_by(rank) for rank in holders)
        for lost in combinations(sorted(nodes), count):
            assert {members[rank].node for rank in (owner, *holders)} - set(lost)
    assert list(placement.load_bytes) == load_of(members, placement.holders)
    assert (placement.shortfall is None) == (count == replicas)


def check_choices(members: Sequence[Member], placement: Placement) -> None:
    for owner, holders in enumerate(placement.holders):
        assert tuple(sorted(holders)) in choices(members, owner, len(holders))


SIZES = st.integers(1, 12)


@st.composite
def clusters(draw: st.DrawFn, ranks: int, *, equal: bool = False) -> list[Member]:
    size = draw(SIZES)
    return [
        Member(
            f"node-{draw(st.integers(0, 4))}",
            draw(st.integers(0, 2)),
            size if equal else draw(SIZES),
            size if equal else draw(SIZES),
        )
        for _ in range(draw(st.integers(1, ranks)))
    ]


@given(clusters(5, equal=True), st.integers(0, 3))
def test_with_equal_sizes_the_largest_load_is_the_smallest_possible(members: list[Member], replicas: int) -> None:
    placement = place(members, replicas)
    check(members, replicas, placement)
    check_choices(members, placement)
    best = smallest_largest_load(members, min(replicas, len({member.node for member in members}) - 1))
    assert max(placement.load_bytes) == best


@given(clusters(6), st.integers(0, 3))
def test_with_any_sizes_the_largest_load_is_within_one_replica_of_the_smallest_possible(
    members: list[Member], replicas: int
) -> None:
    placement = place(members, replicas)
    check(members, replicas, placement)
    check_choices(members, placement)
    best = smallest_largest_load(members, min(replicas, len({member.node for member in members}) - 1))
    largest = max(max(member.bytes_within, member.bytes_beyond) for member in members)
    assert best <= max(placement.load_bytes) < best + largest


def test_a_stage_on_one_node_is_replicated_by_the_others() -> None:
    """Both ranks of each pipeline stage share a node: the group has no other, and the load is spread all the same."""
    members = [Member(f"node-{rank // 2}", rank // 2, 100, 100) for rank in range(6)]
    placement = place(members, 2)
    assert set(placement.load_bytes) == {200}
    assert all(
        {members[rank].node for rank in ranks} == {"node-0", "node-1", "node-2"} - {members[owner].node}
        for owner, ranks in enumerate(placement.holders)
    )


def test_what_is_impossible_is_reported() -> None:
    members = [Member(node, 0, 5, 5) for node in ("a", "a", "b", "b")]
    placement = place(members, 3)
    assert all(len(ranks) == 1 for ranks in placement.holders)
    assert placement.shortfall is not None
    assert (
        "3 replicas of each rank's state are asked for and 1 possible: the job runs on 2 nodes" in placement.shortfall
    )
    alone = place(members[:1], 2)
    assert alone.holders == ((),)
    assert alone.shortfall is not None
    assert "the job runs on one node" in alone.shortfall
    with pytest.raises(ValueError, match="sends nothing"):
        Member("a", 0, 0, 5)


SLOTS = 2


def fits(members: Sequence[Member], placement: Placement, room_bytes: dict[str, int]) -> bool:
    load = dict.fromkeys(room_bytes, 0)
    for member, received in zip(members, placement.load_bytes, strict=True):
        load[member.node] += SLOTS * received
    return all(load[node] <= room for node, room in room_bytes.items())


@given(clusters(6), st.integers(0, 3), st.lists(st.integers(0, 120), min_size=5, max_size=5))
def test_there_are_as_many_replicas_as_every_machine_has_memory_for(
    members: list[Member], replicas: int, rooms: list[int]
) -> None:
    room_bytes = {member.node: rooms[int(member.node[-1])] for member in members}
    placement = place_within(members, replicas, room_bytes, SLOTS)
    most = max(count for count in range(replicas + 1) if fits(members, place(members, count), room_bytes))
    assert placement.holders == place(members, most).holders
    if len(placement.holders[0]) == len(place(members, replicas).holders[0]):
        assert placement == place(members, replicas)
    else:
        assert "there is memory for" in (placement.shortfall or "")


def test_too_little_memory_is_reported_with_the_machine_and_its_bytes() -> None:
    members = [Member(node, 0, 100, 100) for node in "abc"]
    placement = place_within(members, 2, {"a": 1000, "b": 399, "c": 1000}, SLOTS)
    assert [len(holders) for holders in placement.holders] == [1, 1, 1]
    assert placement.shortfall is not None
    assert "for 1: with 2 the machine b would hold 400 bytes for other ranks, and 399" in placement.shortfall
