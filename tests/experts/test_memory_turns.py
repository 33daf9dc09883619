"""Which experts a snapshot in host memory copies: in turn, as many as an iteration overlaps, the same on all ranks."""

from hypothesis import given
from hypothesis import strategies as st

from cpsr.experts.memory_turns import MemoryTurns

REST, EXPERT = 100, 50


def units(layers: int = 2, experts: int = 4, first: int = 0) -> dict[str, str]:
    return {
        f"layer.{layer}.experts.{index}.weight": f"{layer:05d}-{index:05d}"
        for layer in range(layers)
        for index in range(first, first + experts)
    }


def turns(layers: int = 2, experts: int = 4, first: int = 0) -> MemoryTurns:
    own = units(layers, experts, first)
    return MemoryTurns(own, dict.fromkeys(own, EXPERT), REST)


def test_all_are_copied_until_a_copy_was_measured_and_where_all_fit() -> None:
    one = turns()
    assert one.wanted_rounds() == 1
    assert one.left_out() == frozenset()
    one.copies.note(REST + 8 * EXPERT, 1.0, 1.0)
    assert one.wanted_rounds() == 1


def test_as_many_are_copied_as_the_iteration_overlaps() -> None:
    one = turns()
    one.copies.note(1000, 1.0, (REST + 8 * EXPERT / 2) / 1000)
    assert one.wanted_rounds() == 2
    one = turns()
    one.copies.note(1000, 1.0, 0.001)
    assert one.wanted_rounds() == 4, "one expert of each layer is always copied"


@given(layers=st.integers(1, 4), experts=st.integers(1, 8), rounds=st.integers(1, 8), ranks=st.integers(1, 3))
def test_every_expert_has_its_turn_once_a_round_and_ranks_agree(
    layers: int, experts: int, rounds: int, ranks: int
) -> None:
    jobs = [turns(layers, experts, rank * experts) for rank in range(ranks)]
    again = [turns(layers, experts, rank * experts) for rank in range(ranks)]
    for one in (*jobs, *again):
        one.agree(rounds)
    copied: list[str] = []
    for _ in range(rounds):
        for rank, (one, same) in enumerate(zip(jobs, again, strict=True)):
            left = one.left_out()
            assert left == same.left_out()
            copied += units(layers, experts, rank * experts).keys() - left
    assert len(copied) == len(set(copied)) == layers * experts * ranks
