"""Ranks of a machine that hold the same copy a share of it each: what each holds, and what a restart reads."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from cpsr.checkpoint import replicated
from cpsr.checkpoint.arena import Arena
from cpsr.checkpoint.host_snapshot import Contents, Snapshot
from cpsr.checkpoint.memory import SharedMemory
from cpsr.checkpoint.memory_states import MemoryState, load_states, room_for_memory_state, verify_memory_state
from cpsr.checkpoint.parts import Parts
from cpsr.checkpoint.replicated import Replicas, factors, state_hash, sums
from cpsr.checkpoint.saved import operator_record
from cpsr.checkpoint.snapshot import SnapshotPool
from cpsr.checkpoint.tiers import Entry, decide
from cpsr.checkpoint.write_assignment import WriteAssignment
from cpsr.errors import CheckpointError, SaveError
from cpsr.ranks.group import Group
from cpsr.replay.stages import _kept
from cpsr.restart.experts import load_nearer_experts
from cpsr.restart.sources import MemorySources
from cpsr.state.shard import OperatorState, ParamSlice, Shard
from tests.checkpoint.conftest import assert_same_bits, make_shard
from tests.stand_in_device import StandInDevice, stand_in_device

NAMES = tuple(make_shard(0, SIZES := (700, 30, 0, 5_000, 40_000, 9)).operators)
EXPERT = NAMES[3]
UNITS = {name: f"run {index // 2}" for index, name in enumerate(NAMES)} | {EXPERT: "expert"}
RANKS = 2


class Machine:
    """Two ranks that train alike, with a running statistic of their own; rank 0 copies the runs 0 and 2.

    Args:
        device: that has their state; None: the host.
    """

    def __init__(self, run_id: str, life: int = 1, device: StandInDevice | None = None) -> None:
        self.run_id, self.device = run_id, device
        self.live = [make_shard(0, SIZES) for _ in range(RANKS)]
        if device is not None:
            self.live = [on_device(device, live) for live in self.live]
        self.pools = [
            SnapshotPool(self.live[rank], 3, SharedMemory(run_id, rank, life), UNITS) for rank in range(RANKS)
        ]

    def contents(self, rank: int, carried: Collection[str] = ()) -> Contents:
        alike = {name: operator_record(one).described for name, one in make_shard(0, SIZES).operators.items()}
        others = {name: 1 - rank for name, unit in UNITS.items() if (unit in ("run 0", "run 2")) != (rank == 0)}
        experts = frozenset({EXPERT})
        return Contents(experts, frozenset(carried), writers=others, replicated=alike, left=frozenset(others))

    def train(self, iteration: int) -> None:
        for rank, live in enumerate(self.live):
            for (_, values), (_, wanted) in zip(live.tensors(), self.at(rank, iteration).tensors(), strict=True):
                values.copy_(wanted)

    def at(self, rank: int, iteration: int) -> Shard:
        found = make_shard(iteration, SIZES, iteration)
        found.others["norm.count"] += 1000 * rank
        return found

    def snapshot(self, rank: int, iteration: int, carried: Collection[str] = (), *, disk: bool = False) -> Snapshot:
        pool = self.pools[rank]
        begun = pool.begin(self.live[rank], iteration, {"of": rank}, self.contents(rank, carried), disk=disk)
        assert begun is not None
        assert pool.finish() is begun
        pool.settle()
        pool.release(begun)
        return begun

    def states(self, iteration: int) -> list[MemoryState]:
        """By rank."""
        found = [state for state in Arena(self.run_id).list() if state.iteration == iteration]
        assert [state.rank for state in found] == list(range(RANKS))
        return found

    def loaded(self, rank: int, iteration: int) -> Shard:
        states, found = self.states(iteration), make_shard(99, SIZES)
        assert load_states([states[rank], states[1 - rank]], found) == {"of": rank}
        return found

    def close(self) -> None:
        for pool in self.pools:
            pool.close()


@pytest.fixture(params=["host", "device"])
def machine(run_id: str, request: pytest.FixtureRequest) -> Iterator[Machine]:
    if request.param == "host":
        yield Machine(run_id)
        return
    with stand_in_device() as device:
        yield Machine(run_id, device=device)


def on_device(device: StandInDevice, shard: Shard) -> Shard:
    operators = {
        name: replace(
            one,
            parameter=replace(one.parameter, values=device.tensor(one.parameter.values)),
            moments={moment: device.tensor(values) for moment, values in one.moments.items()},
        )
        for name, one in shard.operators.items()
    }
    return Shard(operators, {name: device.tensor(values) for name, values in shard.others.items()})


def test_both_come_back_whole_from_what_each_has_copied(machine: Machine) -> None:
    for iteration in range(1, 6):  # into buffers that held others
        machine.train(iteration)
        taken = [machine.snapshot(rank, iteration) for rank in range(RANKS)]
        assert sum(sum(one.copied_bytes.values()) for one in taken) < 1.1 * machine.at(0, 0).state_bytes
        for rank, state in enumerate(machine.states(iteration)):
            assert verify_memory_state(state) is None
            assert state.lacking.keys() == set(machine.contents(rank).left or ())
            assert state.operators.keys().isdisjoint(state.lacking)
            with safe_open(state.path, framework="pt") as file:
                names = {name for name in file.keys() if name.startswith("param/")}  # noqa: SIM118
            assert names == {f"param/{name}" for name in state.operators}
            assert_same_bits(machine.loaded(rank, iteration), machine.at(rank, iteration))
            room = room_for_memory_state(state)  # as for another number of ranks
            load_states([state, machine.states(iteration)[1 - rank]], room)
            assert_same_bits(room, machine.at(rank, iteration))
    machine.close()


def test_an_expert_that_is_not_due_is_carried_by_the_rank_that_copies_it(machine: Machine) -> None:
    for iteration in (1, 2, 3):
        machine.train(iteration)
        for rank in range(RANKS):
            machine.snapshot(rank, iteration, [EXPERT] if iteration > 1 else [])
    for rank in range(RANKS):
        found = machine.loaded(rank, 3)
        assert {name: one.iteration for name, one in found.operators.items()} == dict.fromkeys(NAMES, 3) | {EXPERT: 1}
        assert torch.equal(
            found.operators[EXPERT].parameter.values, machine.at(0, 1).operators[EXPERT].parameter.values
        )
    machine.close()


def test_an_expert_of_a_checkpoint_is_replaced_by_a_nearer_one_that_another_rank_has_copied(
    machine: Machine, run_id: str
) -> None:
    machine.train(4)
    for rank in range(RANKS):
        machine.snapshot(rank, 4)
    sources = MemorySources(run_id, Group(), machine.live[0], (1, 0))
    sources.decide(2, None, None)
    checkpoint = Snapshot(3, make_shard(3, SIZES, 3))
    old = checkpoint.shard.operators[EXPERT] = make_shard(1, SIZES, 1).operators[EXPERT]
    assert load_nearer_experts(checkpoint, {EXPERT: "expert"}, sources.own, Group()) == 1
    assert torch.equal(old.parameter.values, machine.at(0, 4).operators[EXPERT].parameter.values)
    machine.close()


def test_no_state_is_whole_by_itself_or_with_what_belongs_to_another(machine: Machine, run_id: str) -> None:
    machine.train(4)
    for rank in range(RANKS):
        machine.snapshot(rank, 4)
    mine, yours = machine.states(4)
    with pytest.raises(CheckpointError, match="or lacks it"):
        load_states([mine], make_shard(99, SIZES))
    machine.train(5)
    machine.live[1].operators[NAMES[0]].parameter.values.add_(1.0)  # rank 0 alone holds it in memory
    for rank in range(RANKS):
        machine.snapshot(rank, 5)
    for wrong in ([mine, machine.states(5)[1]], machine.states(5), [yours, machine.states(5)[0]]):
        into = make_shard(99, SIZES)
        with pytest.raises(CheckpointError, match="do not belong together"):
            load_states(wrong, into)
        assert_same_bits(into, make_shard(99, SIZES))
    machine.close()


def test_states_of_two_lives_are_not_joined(run_id: str) -> None:
    first, second = Machine(f"{run_id}a", 1), Machine(f"{run_id}b", 2)
    for machine in (first, second):
        machine.train(4)
        for rank in range(RANKS):
            machine.snapshot(rank, 4)
    with pytest.raises(CheckpointError, match="do not belong together"):
        load_states([first.states(4)[0], second.states(4)[1]], make_shard(99, SIZES))
    first.close()
    second.close()


@pytest.mark.parametrize("name", [NAMES[0], NAMES[4]])
def test_a_flipped_bit_in_what_another_rank_holds_is_found(machine: Machine, name: str) -> None:
    machine.train(4)
    for rank in range(RANKS):
        machine.snapshot(rank, 4)
    states = machine.states(4)
    (giver,) = [state for state in states if name in state.operators]
    place = giver.tensors[f"param/{name}"].first
    content = bytearray(giver.path.read_bytes())
    content[place] ^= 1
    with giver.path.open("r+b") as file:
        file.write(content)
    for rank in range(RANKS):
        with pytest.raises(CheckpointError, match="is damaged"):
            load_states([states[rank], states[1 - rank]], make_shard(99, SIZES))
    machine.close()


def test_a_checkpoint_hashes_what_others_copy_from_the_live_tensors(machine: Machine, tmp_path: Path) -> None:
    machine.train(4)
    for rank in range(RANKS):
        snapshot = machine.snapshot(rank, 4, [EXPERT], disk=True)
        operators = machine.at(rank, 4).operators
        left = machine.contents(rank).left or frozenset()
        taken = left - {EXPERT}  # a carried one keeps its hash
        if machine.device is None:
            assert snapshot.state_hashes == {name: state_hash(operators[name]) for name in taken}
        assert snapshot.state_hashes.keys() >= taken
        rest = machine.contents(rank).without_experts(machine.at(rank, 4)).second_moments()
        assert snapshot.second_moments is not None
        assert rest is not None
        assert torch.equal(snapshot.second_moments, rest)
        assert snapshot.shard.operators.keys() == operators.keys() - left
    machine.close()


def test_a_device_is_not_waited_for_and_its_checksums_show_each_bit(run_id: str) -> None:
    """Of the state as it was copied, not as the next step leaves it."""
    with stand_in_device() as device:
        machine = Machine(run_id, device=device)
        found: list[list[Snapshot]] = []
        for iteration in (4, 5):
            machine.train(4)
            if iteration == 5:  # the last element of what rank 0 alone copies
                values = machine.live[1].operators[NAMES[4]].moments["exp_avg"]
                values[-1:].view(torch.int32).bitwise_xor_(1)
            device.at_once = False
            device.trace.clear()
            begun = [
                pool.begin(live, iteration, {}, machine.contents(rank))
                for rank, (pool, live) in enumerate(zip(machine.pools, machine.live, strict=True))
            ]
            assert device.calls("synchronize") == []
            for pool in machine.pools:
                pool.finish()
            device.at_once = True
            machine.train(99)
            taken = [one for one in begun if one is not None]
            for pool, one in zip(machine.pools, taken, strict=True):
                pool.settle()
                pool.release(one)
            found.append(taken)
        same, other = found
        assert same[0].state_hashes == same[1].state_hashes
        assert same[0].state_hashes.keys() == {*NAMES}
        assert same[0].samples == same[1].samples
        wrong = {name for name in NAMES if other[0].state_hashes[name] != other[1].state_hashes[name]}
        assert wrong == {name for name in NAMES if UNITS[name] == UNITS[NAMES[4]]}
        machine.close()


def test_ranks_stop_to_share_where_a_device_has_no_memory_to_compare(
    run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with stand_in_device() as device:
        machine = Machine(run_id, device=device)
        pool, live, contents = machine.pools[0], machine.live[0], machine.contents(0)

        def full(*_: object) -> torch.Tensor:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 16 MiB")

        with monkeypatch.context() as patch:
            patch.setattr(replicated, "sums", full)
            for iteration in (4, 5, 6, 7):  # no buffer is lost to it
                with pytest.raises(SaveError, match="no memory to compare"):
                    pool.begin(live, iteration, {}, contents)
        assert not pool.shares
        assert pool.begin(live, 8, {}, replace(contents, left=None)) is not None
        assert pool.finish() is not None
        machine.close()


@given(st.data())
def test_checksums_are_those_of_whole_numbers_and_show_each_bit(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from([torch.int32, torch.int16, torch.uint8]))
    limits = torch.iinfo(dtype)
    words = data.draw(st.lists(st.integers(limits.min, limits.max), min_size=1, max_size=9))
    rows = factors()[:, : len(words)].tolist()
    wanted = [sum(word * factor for word, factor in zip(words, row, strict=True)) for row in rows]
    held = torch.tensor(words, dtype=dtype)
    found = sums(held, factors())
    assert [one % 2**64 for one in found.tolist()] == [one % 2**64 for one in wanted]
    held[data.draw(st.integers(0, len(words) - 1))] ^= (
        torch.tensor(1).bitwise_left_shift(data.draw(st.integers(0, limits.bits - 1))).to(dtype)
    )
    assert not (sums(held, factors()) == found).any()
    if len({*words}) > 1:
        assert not torch.equal(sums(torch.tensor(sorted(words), dtype=dtype), factors()), found) or words == sorted(
            words
        )


def test_samples_and_second_moments_of_several_types() -> None:
    """Also beside an operator that this rank alone has."""
    live = make_shard(0, SIZES)
    one = live.operators[EXPERT]
    eights = torch.ones(5_000).to(torch.float8_e4m3fn)
    live.operators[EXPERT] = replace(
        one,
        parameter=replace(one.parameter, values=one.parameter.values.bfloat16()),
        moments={"exp_avg": one.moments["exp_avg"], "exp_avg_sq": eights},
    )

    def samples(**own: OperatorState) -> str:
        parts = Parts((), 0, UNITS | dict.fromkeys(own, "own"))
        return Replicas().samples(Shard(own | live.operators), parts)()["expert"]

    moments = live.second_moments()
    assert moments is not None
    assert moments.isfinite().all()
    found = [samples()]
    assert samples(own=replace(one, moments={"exp_avg_sq": eights})) == found[0]
    for values in (live.operators[EXPERT].parameter.values, *live.operators[EXPERT].moments.values()):
        values.view(torch.uint8)[0] ^= 1
        found.append(samples())
    assert len({*found}) == 4


def test_zeros_that_are_one_number_hash_as_their_copy() -> None:
    """An engine shows a moment so that the optimizer has yet to create."""
    one = make_shard(0, SIZES).operators[NAMES[0]]
    zeros = torch.zeros(1).expand(one.parameter.numel)
    hashes = {state_hash(replace(one, moments={"exp_avg": values})) for values in (zeros, zeros.clone())}
    assert len(hashes) == 1


def test_a_dump_is_whole_also_where_a_shared_snapshot_of_its_iteration_is_there(machine: Machine) -> None:
    """The other rank may be dead."""
    pool, live = machine.pools[0], machine.live[0]
    for iteration in (4, 5):
        machine.train(iteration)
        pool.mark_boundary()
        begun = pool.begin(live, iteration, {"of": 0}, machine.contents(0), disk=False)
        if iteration == 4:
            pool.finish()
            pool.settle()
            assert kept(machine) == {}, "a stage at rest goes on with a state that it has whole"
        assert pool.dump(lambda: live, iteration, lambda: {"of": 0}) == iteration
        states = [one for one in Arena(machine.run_id).list() if one.iteration == iteration]
        assert [one.kind for one in states if one.lacking] == ["snapshot"], "with it all ranks come back exactly"
        (dump,) = [one for one in states if one.kind == "departure"]
        assert kept(machine)[iteration] == dump
        load_states([dump], found := make_shard(99, SIZES))
        assert_same_bits(found, machine.at(0, iteration))
        pool.finish()
        assert begun is not None
        pool.release(begun)
    machine.close()


def test_ranks_that_hold_other_slices_of_an_expert_are_joined_in_the_rest(machine: Machine) -> None:
    for rank, live in enumerate(machine.live):
        machine.pools[rank].close()
        operator = live.operators[EXPERT]
        live.operators[EXPERT] = replace(operator, parameter=replace(operator.parameter, offset=rank * SIZES[3]))
        machine.pools[rank] = SnapshotPool(live, 3, SharedMemory(machine.run_id, rank, 1), UNITS)
    machine.train(4)
    machine.live[1].operators[EXPERT].parameter.values.add_(1.0)
    for rank, pool in enumerate(machine.pools):
        contents = machine.contents(rank)
        left = (contents.left or frozenset()) - {EXPERT}
        assert pool.begin(machine.live[rank], 4, {"of": rank}, replace(contents, left=left), disk=False) is not None
        pool.finish()
        pool.settle()
    states = {one.name: one for one in machine.states(4)}
    entries = [Entry(one.rank, 4, "snapshot", "here", name, one.parts) for name, one in states.items()]
    found = decide(["here"] * RANKS, entries, None, None, alike=range(RANKS)).exact
    assert len(found) == RANKS
    for rank, source in enumerate(found):
        live = machine.live[rank]
        room = room_for_memory_state(states[source.entries[0].name])
        load_states([states[entry.name] for entry in source.entries], room)
        assert_same_bits(room, live)
    machine.close()


def kept(machine: Machine) -> dict[int, MemoryState]:
    """The states of rank 0 with which a stage may rest."""
    adapter = SimpleNamespace(pipeline=SimpleNamespace(stage=0))
    job: Any = SimpleNamespace(
        adapter=adapter, run=SimpleNamespace(run_id=machine.run_id), group=SimpleNamespace(rank=0)
    )
    return dict(_kept(job, MemoryState(Path(), 0, 0, 1, "window"), None)[1])


class Ranks:
    """Of ranks that hold the same, one."""

    def __init__(self, nodes: Sequence[str], rank: int, memories: Sequence[str]) -> None:
        self.nodes, self.rank, self._memories = nodes, rank, memories

    def gather(self, own: Any) -> list[Any]:
        return [[*own[:2], memory] for memory in self._memories]


def left_by(nodes: Sequence[str], memories: Sequence[str]) -> list[frozenset[str] | None]:
    """By rank, what others copy."""
    shard, ranks = make_shard(0, SIZES), range(len(nodes))
    groups: list[Any] = [Ranks(nodes, rank, memories) for rank in ranks]
    return [
        WriteAssignment(shard, {EXPERT: "expert"}, ranks, group, memory=memories[group.rank]).share(None).left
        for group in groups
    ]


def test_ranks_share_where_they_see_one_memory_and_all_take_samples_where_some_do() -> None:
    first, second, alone = left_by("aab", "xxx")
    assert first is not None
    assert second is not None
    assert not first & second
    assert first | second == {*NAMES}
    assert alone == frozenset(), "a restart compares its state with theirs"
    assert left_by("abc", "xxx") == [None] * 3
    assert left_by("aa", "xy") == [None] * 2, "containers of one host"


def test_a_rank_copies_what_it_writes(machine: Machine) -> None:
    contents = machine.contents(0)
    with pytest.raises(ValueError, match="copies what it writes"):
        replace(contents, writers={})


@pytest.mark.parametrize("sizes", [(37, 5), (19, 35), (32, 3)])
def test_checksums_show_one_bit_wherever_it_is_in_large_tensors(
    monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, ...]
) -> None:
    """Several rows of one tensor are summed together, and small tensors join to one row."""
    monkeypatch.setattr(replicated, "WORDS_AT_ONCE", 4)
    monkeypatch.setattr(replicated, "ROWS_AT_ONCE", 3)
    tensors = [torch.arange(size, dtype=torch.float32) for size in sizes]
    operators = {
        str(place): OperatorState(str(place), ParamSlice(one, (len(one),), 0), {}, 1)
        for place, one in enumerate(tensors)
    }
    parts = Parts((), 0, dict.fromkeys(operators, "one"))

    def checksum() -> str:
        return Replicas().checksums(Shard(operators), parts, operators)()["0"]

    found = {checksum()}
    for one in tensors:
        words = one.view(torch.int32)
        for place in range(len(one)):
            words[place] ^= 1
            found.add(checksum())
            words[place] ^= 1
    assert len(found) == 1 + sum(sizes)
