"""The one rule by which all ranks choose where their state comes from."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from cpsr.checkpoint.tiers import Decision, Entry, Source, decide

NODES = ("one", "two", "three")


def entry(rank: int, iteration: int, kind: str = "snapshot", node: str = "one", name: str = "0") -> Entry:
    assert kind in ("snapshot", "departure")
    return Entry(rank, iteration, "snapshot" if kind == "snapshot" else "departure", node, name)


@st.composite
def catalogues(draw: st.DrawFn) -> dict[str, object]:
    ranks = draw(st.integers(1, 5))
    nodes = draw(st.lists(st.sampled_from(NODES), min_size=ranks, max_size=ranks))
    entries = draw(
        st.lists(
            st.builds(
                Entry,
                rank=st.integers(0, ranks - 1),
                iteration=st.integers(5, 16),
                kind=st.sampled_from(["snapshot", "departure"]),
                node=st.sampled_from(NODES),
                name=st.sampled_from(["0", "1", "2"]),
            ),
            max_size=20,
        )
    )
    return {
        "nodes": nodes,
        "entries": entries,
        "checkpoint_iteration": draw(st.none() | st.integers(1, 12)),
        "failure_iteration": draw(st.none() | st.integers(6, 16)),
        "alike": draw(st.booleans()),
        "remote": draw(st.booleans()),
    }


@given(catalogues(), st.randoms())
@settings(max_examples=400)
def test_ranks_never_choose_differently(catalogue: dict[str, object], shuffled: random.Random) -> None:
    decision = decide(**catalogue)  # type: ignore[arg-type] # drawn by name
    entries = catalogue["entries"]
    assert isinstance(entries, list)
    entries = list(entries)
    shuffled.shuffle(entries)
    assert decide(**{**catalogue, "entries": entries}) == decision  # type: ignore[arg-type]


@given(catalogues())
@settings(max_examples=600)
def test_a_decision_is_of_one_iteration_and_of_states_that_are_there(catalogue: dict[str, object]) -> None:
    decision = decide(**catalogue)  # type: ignore[arg-type]
    nodes, c, f = catalogue["nodes"], catalogue["checkpoint_iteration"], catalogue["failure_iteration"]
    assert isinstance(nodes, list)
    for sources in (decision.exact, decision.departed):
        assert [source.rank for source in sources] in ([], list(range(len(nodes))))
        assert len({source.iteration for source in sources}) <= 1
        for source in sources:
            if source.entry is None:
                assert source.tier in ("disk", "predicted")
                continue
            assert source.entry in catalogue["entries"]  # type: ignore[operator]
            assert source.entry.iteration == source.iteration
            assert catalogue["remote"] or source.entry.node == nodes[source.rank]
            assert catalogue["alike"] or source.entry.rank == source.rank
    for source in decision.exact:
        # With its own scalars: another rank's would deal it another's data.
        assert source.entry is None or (source.entry.rank, source.entry.kind) == (source.rank, "snapshot")
    if isinstance(c, int):
        assert decision.exact_iteration is not None
        assert decision.exact_iteration >= c
    if decision.departed:
        assert isinstance(f, int)
        assert decision.departed_iteration is not None
        assert decision.departed_iteration >= f
        assert decision.departed_iteration > (decision.exact_iteration or 0)


@given(catalogues())
@settings(max_examples=300)
def test_no_newer_whole_state_is_passed_over(catalogue: dict[str, object]) -> None:
    decision = decide(**catalogue)  # type: ignore[arg-type]
    nodes, entries = catalogue["nodes"], catalogue["entries"]
    assert isinstance(nodes, list)
    assert isinstance(entries, list)
    for iteration in range((decision.exact_iteration or 0) + 1, 20):
        missing = [
            rank
            for rank, node in enumerate(nodes)
            if not any(
                (one.rank, one.iteration, one.kind) == (rank, iteration, "snapshot")
                and (catalogue["remote"] or one.node == node)
                for one in entries
            )
        ]
        assert missing


def test_only_the_lost_rank_is_predicted() -> None:
    decision = decide(["one", "one"], [entry(0, 14, "departure")], 12, 14, alike=False)
    assert decision == Decision(
        (Source(0, "disk", 12), Source(1, "disk", 12)),
        (Source(0, "departure", 14, entry(0, 14, "departure")), Source(1, "predicted", 14)),
    )
    assert not decision.complete


def test_where_all_ranks_hold_the_same_one_is_enough() -> None:
    decision = decide(["one", "one"], [entry(0, 14, "departure")], 12, 14, alike=True)
    assert decision.complete
    assert [source.entry for source in decision.departed] == [entry(0, 14, "departure")] * 2


def test_what_lies_on_another_machine_counts_where_it_can_be_fetched() -> None:
    entries = [entry(0, 14, node="one"), entry(1, 14, node="two")]
    assert decide(["one", "one"], entries, 12, 14, alike=False).exact_iteration == 12
    assert decide(["one", "one"], entries, 12, 14, alike=False, remote=True).exact_iteration == 14


def test_memory_serves_where_no_checkpoint_was_committed_yet() -> None:
    decision = decide(["one"], [entry(0, 3)], None, 4, alike=True)
    assert decision.exact == (Source(0, "memory", 3, entry(0, 3)),)
    assert decision.departed == ()


def test_a_state_that_one_rank_left_a_step_later_than_the_others_does_not_count_against_theirs() -> None:
    entries = [entry(0, 14, "departure"), entry(1, 14, "departure"), entry(2, 15, "departure")]
    decision = decide(["one"] * 4, entries, 12, 14, alike=False)
    assert [source.tier for source in decision.departed] == ["departure", "departure", "predicted", "predicted"]
    assert decision.departed_iteration == 14
