"""Files of shared memory as the safetensors library alone sees them, and the room for their headers."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load

import cpsr.checkpoint.memory_states as reader_module
from cpsr.checkpoint.arena import Arena, Sealed
from cpsr.checkpoint.buffers import HostBuffer, slab_size
from cpsr.checkpoint.memory import SharedMemory
from cpsr.checkpoint.memory_states import (
    MemoryState,
    OpenState,
    describe,
    load_states,
    room_for_memory_state,
    verify_memory_state,
)
from cpsr.checkpoint.snapshot import SnapshotPool
from cpsr.engines.stage_operations import Operation
from cpsr.errors import CheckpointError
from cpsr.peers.small_states import SmallStates
from cpsr.replay.recorder import Recorder
from cpsr.replay.schedule import WindowLayout
from cpsr.replay.stages import StageLogs
from cpsr.state.codec import encode
from cpsr.state.shard import OperatorState, ParamSlice, Shard
from tests.checkpoint.conftest import assert_same_bits, live_shard, make_shard

RUN_ID = "0123abcd"
SMALL = {"rng": torch.arange(5), "nested": [(1, 2.5), None], "half": torch.ones(3, dtype=torch.bfloat16)}


def opened(path: Path) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
    """Metadata and tensors of a file, which has nothing else in it."""
    with safe_open(path, framework="pt") as file:
        return file.metadata(), {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118


def held(path: Path) -> dict[str, torch.Tensor]:
    return {key: tensor for key, tensor in opened(path)[1].items() if key.startswith(("param", "moment", "other"))}


def assert_same(found: dict[str, torch.Tensor], expected: Shard) -> None:
    wanted = dict(expected.tensors())
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)


@pytest.mark.parametrize("kind", ["snapshot", "departure"])
def test_a_snapshot(kind: str, run_id: str) -> None:
    shard = live_shard(3, iteration=7)
    pool = SnapshotPool(shard, memory=SharedMemory(run_id, 3, 2))
    if kind == "snapshot":
        assert pool.begin(shard, 7, SMALL) is not None
        pool.finish()
    else:
        pool.dump(lambda: shard, 7, lambda: SMALL)
    pool.close(remove=False)
    (state,) = Arena(run_id).list()
    index, tensors = opened(state.path)
    assert_same(held(state.path), make_shard(3))
    assert torch.equal(load(tensors["small/tensors"].numpy().tobytes())["scalars.rng"], torch.arange(5))
    assert json.loads(tensors["small"].numpy().tobytes()).keys() == SMALL.keys()
    told = {name: index[name] for name in ("run", "rank", "life", "branch", "kind", "iteration")}
    assert told == {"run": run_id, "rank": "3", "life": "2", "branch": "0", "kind": kind, "iteration": "7"}
    assert state.size.header_bytes % 4096 == state.size.buffer_bytes % 4096 == 0


def test_a_small_state(tmp_path: Path) -> None:
    memory = SharedMemory(RUN_ID, 0, 0, tmp_path)
    small, pool = SmallStates(memory, make_shard(0)), SnapshotPool(make_shard(5), 1, memory)
    pool.begin(make_shard(5), 9, SMALL)
    pool.finish()
    pool.settle()
    (whole,) = Arena(RUN_ID, tmp_path).list()
    path = small.seal(Sealed.at(whole.path, 9)).path
    assert_same(held(path), Shard({}, make_shard(5).others))
    small.close(remove=True)
    pool.close()


def test_a_window(tmp_path: Path) -> None:
    shard = make_shard(4)
    recorder = Recorder(SharedMemory(RUN_ID, 0, 0, tmp_path), lambda: shard, pytest.fail)
    names = tuple(shard.operators)
    recorder.begin_window(WindowLayout(shard, (names[:2], names[2:]), {}), 8, lambda: SMALL)
    recorder.capture(8)
    recorder.capture(9, {"loss": 2.0})
    recorder.finish()
    recorder.close(remove=False)
    (state,) = Arena(RUN_ID, tmp_path).list()
    assert state.kind == "window"
    tensors = held(state.path)
    last = shard.operators[names[-1]].parameter.values
    assert torch.equal(tensors[f"other/compute/0/{names[-1]}"], last)
    assert_same({key: one for key, one in tensors.items() if "/compute/" not in key and "/sample/" not in key}, shard)


def test_what_a_stage_has_sent(tmp_path: Path) -> None:
    memory = SharedMemory(RUN_ID, 0, 0, tmp_path)
    logs = StageLogs(memory, torch.device("cpu"), lambda message, level: None, lambda: 1 << 20)
    logs.keep(2)
    for iteration in (1, 2):
        logs.begin(iteration)
        logs.add(Operation("send", shape=(4,)), torch.full((4,), float(iteration)), {"states": torch.arange(9)})
        logs.end(True, None)
    logs.close(remove=False)
    (state,) = Arena(RUN_ID, tmp_path).list()
    assert (state.kind, state.iteration) == ("upstream", 2)
    assert torch.equal(held(state.path)["other/all"][:16].view(torch.float32), torch.full((4,), 2.0))


def sealed(memory: SharedMemory, shard: Shard, small: object = None) -> MemoryState:
    """A state in a file of its own."""
    file = memory.file("0", slab_size(shard))
    views = HostBuffer(shard, pinned=False, memory=file).shard_at(1)
    for (_, into), (_, values) in zip(views.tensors(), shard.tensors(), strict=True):
        into.copy_(values)
    file.seal("snapshot", views, 1, small)
    file.close(remove=False)
    state = describe(file.path)
    assert state is not None
    return state


def test_a_state_tells_the_blocks_that_its_rank_owns(tmp_path: Path) -> None:
    values = torch.arange(6, dtype=torch.float32)
    block = OperatorState("w", ParamSlice(values, (4, 3), 1, (3, 2)), {"exp_avg": values / 2}, 0)
    state = sealed(SharedMemory(RUN_ID, 0, 0, tmp_path), Shard({"w": block}))
    room = room_for_memory_state(state)
    load_states([state], room)
    assert_same_bits(room, Shard({"w": block}))
    assert room.operators["w"].parameter.block == (3, 2)
    another = replace(block, parameter=replace(block.parameter, block=None))
    with pytest.raises(CheckpointError, match="another slice of w"):
        load_states([state], Shard({"w": another}))


def problem_of(data: bytes) -> str | None:
    """What a stranger who has read docs/memory.md alone finds wrong with a file."""
    length = int.from_bytes(data[:8], "little")
    text, buffer = data[8 : 8 + length], data[8 + length :]
    index = json.loads(text)["__metadata__"]
    buffer, behind = buffer[: int(index["buffer_bytes"])], buffer[int(index["buffer_bytes"]) :]
    if xxhash.xxh3_128_hexdigest(text.replace(index["hash"].encode(), b"", 1) + behind) != index["hash"]:
        return "header"
    for (begin, end), told in zip(json.loads(index["segments"]), json.loads(index["hashes"]), strict=True):
        pieces = (buffer[first : min(first + (1 << 20), end)] for first in range(begin, end, 1 << 20))
        if "".join(map(xxhash.xxh3_64_hexdigest, pieces)) != told:
            return f"segment at {begin}"
    return None


def test_a_stranger_can_verify_a_file(tmp_path: Path) -> None:
    state = sealed(SharedMemory(RUN_ID, 0, 0, tmp_path), make_shard(1, sizes=(5, 0, 300_000)), SMALL)
    data = state.path.read_bytes()
    assert problem_of(data) is None
    first, newline = state.size.header_bytes, 10
    for at, byte, problem in ((first - 1, newline, "header"), (-1, data[-1] ^ 1, "header"), (first, 1, "segment at 0")):
        damaged = bytearray(data)
        damaged[at] = byte
        assert problem_of(bytes(damaged)) == problem


def test_a_smaller_state_after_a_larger_one_fills_the_file(tmp_path: Path) -> None:
    memory, shard = SharedMemory(RUN_ID, 0, 0, tmp_path), make_shard(1)
    sizes = []
    for count in (3, 5000, 3):
        state = sealed(memory, shard, {"values": torch.arange(count)})
        sizes.append(state.path.stat().st_size)
        with OpenState(state) as reading:
            assert torch.equal(reading.scalars()["values"], torch.arange(count))
        assert verify_memory_state(state) is None
    assert sizes[0] < sizes[1] == sizes[2]


def test_the_first_page_tells_one_seal_from_another(tmp_path: Path) -> None:
    """A state that is sent, or read, while it is overwritten with the same one could be torn."""
    memory, shard = SharedMemory(RUN_ID, 0, 0, tmp_path), make_shard(1)
    pages = {sealed(memory, shard).path.read_bytes()[:4096] for _ in range(3)}
    assert len(pages) == 3


def test_a_state_that_is_overwritten_while_it_is_verified_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, shard = SharedMemory(RUN_ID, 0, 0, tmp_path), make_shard(1)
    state = sealed(memory, shard)
    is_whole: Callable[..., bool] = vars(reader_module)["_is_whole"]

    def overwritten(*given: object) -> bool:
        whole = is_whole(*given)
        memory.file("0", slab_size(shard)).unseal()
        return whole

    monkeypatch.setattr(reader_module, "_is_whole", overwritten)
    with pytest.raises(CheckpointError, match="damaged"):
        OpenState(state)


@settings(max_examples=50, deadline=None)
@given(
    name=st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=60),
    operators=st.integers(1, 40),
    dimensions=st.integers(0, 4),
)
def test_a_header_of_the_longest_entries_has_room(
    tmp_path_factory: pytest.TempPathFactory, name: str, operators: int, dimensions: int
) -> None:
    """Each operator is a part of its own, without moments."""
    whole, far = (1_000_000_007,) * dimensions, 1_000_000_007**2
    shard = Shard(
        {
            f"{name}{number}": OperatorState(
                f"{name}{number}", ParamSlice(torch.ones(1), whole, far, whole), {}, 1_000_000_007
            )
            for number in range(operators)
        }
    )
    size = slab_size(shard)
    file = SharedMemory(RUN_ID, 0, 0, tmp_path_factory.mktemp("memory")).file("0", size)
    buffer = HostBuffer(shard, pinned=False, memory=file, units={one: f"expert {one}" for one in shard.operators})
    buffer.held.fill(buffer.held.parts.names, 1_000_000_007)
    file.prepare("snapshot", buffer.views, 1, encode(SMALL), held=buffer.held)()
    assert file.iteration == 1
    file.close(remove=True)


def test_a_small_state_may_have_any_number_of_tensors(tmp_path: Path) -> None:
    """As averages of the weights are, on a rank that owns few operators."""
    small = [torch.full((number % 3,), number, dtype=torch.int16) for number in range(9000)]
    state = sealed(SharedMemory(RUN_ID, 0, 0, tmp_path), make_shard(1), small)
    assert verify_memory_state(state) is None
    with OpenState(state) as reading:
        found = reading.scalars()
    assert all(torch.equal(one, other) for one, other in zip(found, small, strict=True))
