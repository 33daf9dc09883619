"""The one rule by which all ranks choose where their state comes from."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from cpsr.checkpoint.memory_states import HeldPart, Kind
from cpsr.checkpoint.tiers import Entry, Source, decide, wholes

NODES = ("one", "two", "three")


def entry(rank: int, iteration: int, kind: Kind = "snapshot", node: str = "one", name: str = "0") -> Entry:
    return Entry(rank, iteration, kind, node, name)


def parts() -> st.SearchStrategy[tuple[HeldPart, ...]]:
    """Of some states two parts that are compared; a state may lack any of them."""
    part = [
        st.builds(HeldPart, st.just(name), st.sampled_from(["", "x", "y"]), st.sampled_from(["", "these", "those"]))
        for name in "ab"
    ]
    return st.just(()) | st.tuples(*part)


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
                parts=parts(),
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
        assert own is None or all(map(held_by(source), own.parts))
    for source in decision.departed:
        assert source.small is None
        assert not source.more
        assert source.entry is None or (source.entry.kind != "small" and source.entry.is_whole)
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


def held_by(source: Source) -> Callable[[HeldPart], bool]:
    """Whether a source has a part: its own state, or another rank's snapshot."""
    others = [one for one in source.entries if one is not source.own]
    alone = source.small is None and all(one.kind == "snapshot" for one in others)
    return lambda part: (alone and part.word != "") or given_by(part, others)


def given_by(part: HeldPart, others: Sequence[Entry]) -> bool:
    """Whether one of these holds a part as it is wanted, of the same life, and alike."""
    there = [one for other in others for one in other.parts if one.name == part.name and one.word]
    return any(
        one.sample == part.sample and (one.word == part.word or (not part.word and part.sample != "")) for one in there
    )


def whole_there(entries: list[Entry], rank: int, iteration: int) -> bool:
    """Whether a rank has its snapshot, with what it lacks; or its small state, with all weights and moments."""
    snapshots = [one for one in entries if one.iteration == iteration and one.kind == "snapshot"]
    # Of two that say different things of one iteration, which cannot be, it may take either.
    small = {one.parts for one in entries if (one.rank, one.iteration, one.kind) == (rank, iteration, "small")} - {()}
    own = [[part for part in one.parts if not part.word] for one in snapshots if one.rank == rank]
    return any(all(given_by(part, snapshots) for part in lacking) for lacking in own) or (
        len(small) == 1 and all(given_by(part, snapshots) for part in small.pop())
    )


def part(name: str, word: str, sample: str = "1.0.x") -> HeldPart:
    return HeldPart(name, sample, word)


def test_ranks_of_a_machine_take_from_each_other_what_each_has_copied() -> None:
    ab = [(part("a", "1"), part("b", "")), (part("a", ""), part("b", "2"))]
    states = [
        replace(entry(rank, 14, node=node), parts=ab[rank % 2]) for rank, node in enumerate(["one"] * 2 + ["two"] * 2)
    ]
    nodes = [one.node for one in states]
    found = decide(nodes, states, 12, None, alike=range(4)).exact
    assert [(one.entry, one.more) for one in found] == [(states[at], (states[at ^ 1],)) for at in range(4)]
    # The second machine is lost: its ranks have their own small states alone, of a replica each.
    small = [replace(one, kind="small", node="one") for one in states[2:]]
    found = decide([*nodes[:2], "new", "new"], states[:2] + small, 12, None, alike=range(4)).exact
    assert [(one.entry, one.small, one.more) for one in found[2:]] == [(states[0], one, (states[1],)) for one in small]


def test_what_belongs_to_no_common_state_is_never_joined() -> None:
    mine = replace(entry(0, 14), parts=(part("a", "1"), part("b", "")))
    yours = replace(entry(1, 14), parts=(part("a", ""), part("b", "2")))
    apart = [
        replace(yours, parts=(part("a", ""), part("b", "2", "1.0.y"))),  # other elements
        replace(yours, parts=(part("a", ""), part("b", "2", "2.0.x"))),  # of another life
        replace(yours, iteration=15),
    ]
    for other in apart:
        assert {one.tier for one in decide(["one"] * 2, [mine, other], 12, None, alike=range(2)).exact} == {"disk"}
        assert wholes(["one"] * 2, [mine, other]) == []
    assert len(wholes(["one"] * 2, [mine, yours])) == 2


def test_a_state_that_one_rank_left_a_step_later_than_the_others_does_not_count_against_theirs() -> None:
    entries = [entry(0, 14, "departure"), entry(1, 14, "departure"), entry(2, 15, "departure")]
    decision = decide(["one"] * 4, entries, 12, 14, alike=range(4))
    assert [source.tier for source in decision.departed] == ["departure", "departure", "predicted", "predicted"]
    assert decision.departed[0].iteration == 14


def test_a_state_in_memory_goes_before_a_checkpoint_of_the_same_iteration_with_older_experts() -> None:
    entries = [entry(0, 12)]
    assert decide(["one"], entries, 12, None, alike=[0], stale=True).exact == (Source(0, "memory", 12, entries[0]),)
    assert decide(["one"], entries, 12, None, alike=[0]).exact == (Source(0, "disk", 12),)
