"""The one rule by which all ranks choose where their state comes from."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from cpsr.checkpoint.memory_states import Kind
from cpsr.checkpoint.tiers import Entry, Source, decide

NODES = ("one", "two", "three")


def entry(
    rank: int, iteration: int, kind: Kind = "snapshot", node: str = "one", name: str = "0", owned: str = ""
) -> Entry:
    return Entry(rank, iteration, kind, node, name, owned)


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
                kind=st.sampled_from(["snapshot", "departure", "small"]),
                node=st.sampled_from(NODES),
                name=st.sampled_from(["0", "1", "2"]),
                owned=st.sampled_from(["", "these", "those"]),
            ),
            max_size=25,
        )
    )
    return {
        "nodes": nodes,
        "entries": entries,
        "checkpoint_iteration": draw(st.none() | st.integers(1, 12)),
        "published_iteration": draw(st.none() | st.integers(6, 16)),
        "alike": draw(st.lists(st.integers(0, 2), min_size=ranks, max_size=ranks)),
        "stale": draw(st.booleans()),
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
    nodes, c, f = catalogue["nodes"], catalogue["checkpoint_iteration"], catalogue["published_iteration"]
    alike = catalogue["alike"]
    assert isinstance(nodes, list)
    assert isinstance(alike, list)
    for sources in (decision.exact, decision.departed):
        assert [source.rank for source in sources] in ([], list(range(len(nodes))))
        assert len({source.iteration for source in sources}) <= 1
        for source in sources:
            assert (source.entry is None) == (source.tier in ("disk", "predicted"))
            for read in source.entries:
                assert read in catalogue["entries"]  # type: ignore[operator]
                assert read.iteration == source.iteration
    for source in decision.exact:
        # With its own scalars: another rank's would deal it another's data.
        own = source.small or source.entry
        assert own is None or own.rank == source.rank
        assert source.entry is None or source.entry.kind == "snapshot"
        if source.small is not None:
            assert source.entry is not None
            assert source.small.kind == "small"
            assert source.small.owned == source.entry.owned != ""
    for source in decision.departed:
        assert source.small is None
        assert source.entry is None or source.entry.kind != "small"
        assert source.entry is None or alike[source.entry.rank] == alike[source.rank]
    if isinstance(c, int):
        assert decision.exact_iteration is not None
        assert decision.exact_iteration >= c
    if decision.departed:
        assert isinstance(f, int)
        departed_iteration = decision.departed[0].iteration
        assert departed_iteration >= f
        assert departed_iteration > (decision.exact_iteration or 0)


@given(catalogues())
@settings(max_examples=300)
def test_no_newer_whole_state_is_passed_over(catalogue: dict[str, object]) -> None:
    decision = decide(**catalogue)  # type: ignore[arg-type]
    nodes, entries = catalogue["nodes"], catalogue["entries"]
    assert isinstance(nodes, list)
    assert isinstance(entries, list)
    for iteration in range((decision.exact_iteration or 0) + 1, 20):
        assert not all(whole_there(entries, rank, iteration) for rank in range(len(nodes)))


def whole_there(entries: list[Entry], rank: int, iteration: int) -> bool:
    """Whether a rank has its snapshot; or its small state, and a snapshot with its weights and moments."""
    snapshots = [one for one in entries if one.iteration == iteration and one.kind == "snapshot"]
    # Of two that say different things of one iteration, which cannot be, it may take either.
    small = [one.owned for one in entries if (one.rank, one.iteration, one.kind) == (rank, iteration, "small")]
    wanted = {word for word in small if word}
    return any(one.rank == rank for one in snapshots) or (
        len(wanted) == 1 and bool(wanted & {one.owned for one in snapshots})
    )


def test_a_state_that_one_rank_left_a_step_later_than_the_others_does_not_count_against_theirs() -> None:
    entries = [entry(0, 14, "departure"), entry(1, 14, "departure"), entry(2, 15, "departure")]
    decision = decide(["one"] * 4, entries, 12, 14, alike=range(4))
    assert [source.tier for source in decision.departed] == ["departure", "departure", "predicted", "predicted"]
    assert decision.departed[0].iteration == 14


def test_a_state_in_memory_goes_before_a_checkpoint_of_the_same_iteration_with_older_experts() -> None:
    entries = [entry(0, 12)]
    assert decide(["one"], entries, 12, None, alike=[0], stale=True).exact == (Source(0, "memory", 12, entries[0]),)
    assert decide(["one"], entries, 12, None, alike=[0]).exact == (Source(0, "disk", 12),)
