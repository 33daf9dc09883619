"""Which windows a rank has in memory, as newer ones are taken, sent to peers, and adopted by the next life."""

import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cpsr.checkpoint.arena import Arena
from cpsr.checkpoint.copying import CopyEngine, CopyPlan
from cpsr.checkpoint.device import DeviceSteps
from cpsr.checkpoint.memory import MemoryFile, SharedMemory
from cpsr.checkpoint.memory_states import describe, verify_memory_state
from cpsr.checkpoint.running_copy import RunningCopy
from cpsr.checkpoint.snapshot import SnapshotPool
from cpsr.errors import SaveError
from cpsr.replay.conversion import load_window
from cpsr.replay.recorder import FILES, FILES_WITH_PEERS, Recorder
from cpsr.replay.schedule import WindowLayout
from cpsr.state.shard import OperatorState, ParamSlice, Shard
from tests.stand_in_device import StandInDevice, stand_in_device

RUN_ID = "0123abcd"


def shard_at(iteration: int) -> Shard:
    operators = {}
    for name in ("first", "second"):
        values = torch.arange(16, dtype=torch.float32) + iteration + (100 if name == "second" else 0)
        operators[name] = OperatorState(name, ParamSlice(values, (16,), 0), {"exp_avg": values / 3}, iteration)
    return Shard(operators, {"mean": torch.tensor([float(iteration)])})


class Rank:
    """One that takes windows of two iterations; each is sealed before the next step."""

    def __init__(self, directory: Path, files: int = FILES, life: int = 0) -> None:
        self.directory, self.iteration = directory, 0
        self.problems: list[str] = []
        self.recorder = Recorder(SharedMemory(RUN_ID, 0, life, directory), self.shard, self.problems.append, files)
        self.recorder.on_sealed = self._on_sealed
        self.layout = WindowLayout(shard_at(0), (("first",), ("second",)), {})
        self.offered: list[int] = []
        self._sealed = threading.Event()

    def shard(self) -> Shard:
        return shard_at(self.iteration)

    def _on_sealed(self, path: Path, iteration: int, /, *, send: bool) -> None:
        state = describe(path)
        assert state is not None
        assert (state.iteration, state.kind) == (iteration, "window")
        self.offered += [iteration] if send else []
        self._sealed.set()

    def begin(self, first: int) -> None:
        self.iteration = first
        self.recorder.begin_window(self.layout, first, lambda: {"place": first})
        assert self.recorder.capture(first, send=True) is None  # it does not end here

    def end(self, *, send: bool = False) -> None:
        self.iteration += 1
        self._sealed.clear()
        window = self.recorder.capture(self.iteration, send=send)
        assert (window is not None) == send
        self.recorder.finish()
        assert self._sealed.wait(30)

    @property
    def whole(self) -> set[int]:
        """First iterations of the windows that a kill would leave now."""
        return {state.iteration for state in Arena(RUN_ID, self.directory).list()}


@settings(max_examples=30, deadline=None)
@given(transfers=st.lists(st.integers(1, 5), min_size=1, max_size=6))
def test_the_window_that_peers_have_and_the_one_they_receive_stay(transfers: list[int]) -> None:
    """Each transfer takes so many windows; the next one is sent when the one before has arrived."""
    with tempfile.TemporaryDirectory() as directory:
        rank = Rank(Path(directory), FILES_WITH_PEERS)
        arrived: int | None = None
        first = 1
        for windows in transfers:
            sent = first
            for number in range(windows):
                rank.begin(first)
                rank.end(send=number == 0)
                rank.recorder.keep([sent if arrived is None else arrived, sent])
                first += 2
                rank.begin(first)  # the one before may not be sealed on other ranks: it stays as well
                assert {first - 2, sent, sent if arrived is None else arrived} <= rank.whole
                rank.end()
                first += 2
            arrived = sent
            rank.recorder.keep([arrived])
        assert len(rank.offered) == len(transfers)
        rank.recorder.close(remove=True)


@pytest.mark.parametrize("files", [FILES, FILES_WITH_PEERS])
def test_a_kill_finds_the_newest_window_and_the_one_before(files: int, tmp_path: Path) -> None:
    rank = Rank(tmp_path, files)
    for first in range(1, 20, 2):
        rank.begin(first)
        assert {max(1, first - 4), max(1, first - 2)} <= rank.whole | {first}
        rank.end(send=first == 1)
        rank.recorder.keep([1])
    assert (1 in rank.whole) == (files == FILES_WITH_PEERS)
    rank.recorder.close(remove=True)


@pytest.mark.parametrize("slot", ["fetched-00000-window", "replica-00003-1"])
def test_a_window_from_a_peer_takes_the_place_of_the_oldest_and_is_one_of_the_new_life(
    slot: str, tmp_path: Path
) -> None:
    before = Rank(tmp_path)
    for first in (1, 3, 5):
        before.begin(first)
        before.end()
    before.recorder.close(remove=False)
    memory = SharedMemory(RUN_ID, 0, 1, tmp_path)
    (newest,) = [state for state in Arena(RUN_ID, tmp_path).list() if state.iteration == 5]
    newest.path.rename(memory.path(slot))
    rank = Rank(tmp_path, life=1)
    state = rank.recorder.adopt(memory.path(slot))
    assert state.path == newest.path  # of the three names the one that no window had
    assert state == describe(newest.path)
    assert (state.life, state.iteration, verify_memory_state(state)) == (1, 5, None)
    assert load_window(state, into := shard_at(0)) == {"place": 5}
    assert into.operators["first"].moments["exp_avg"].equal(shard_at(5).operators["first"].moments["exp_avg"])
    assert not memory.path(slot).exists()
    rank.recorder.prepare(rank.layout)
    rank.recorder.keep([5])
    for first in (7, 9):
        rank.begin(first)
        assert 5 in rank.whole
        rank.end()
    rank.recorder.close(remove=True)
    assert list(tmp_path.iterdir()) == []


def test_what_could_not_be_copied_is_not_sealed_and_the_next_window_takes_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = Rank(tmp_path)
    for first in (1, 3):
        rank.begin(first)
        rank.end()
    for first in (5, 7, 9):
        rank.begin(first)
        rank.recorder.finish()
        with monkeypatch.context() as patch:
            patch.setattr(CopyPlan, "run", refuse)
            rank.recorder.capture(first + 1)
            rank.recorder.finish()
    rank.recorder.close(remove=False)
    assert rank.whole == {1, 3}
    assert any("no memory" in problem for problem in rank.problems)


def refuse(*_: object, hashed: bool) -> None:
    raise RuntimeError("no memory")


def test_a_file_that_held_another_order_of_the_operators_tells_the_new_one(tmp_path: Path) -> None:
    """Popular experts have their turns later: in windows of one iteration this moves tensors and changes no name."""
    rank = Rank(tmp_path)
    for order in (("first", "second"), ("second", "first")):
        rank.layout = WindowLayout(shard_at(0), (order,), {})
        for _ in range(FILES):
            rank.iteration += 1
            rank.recorder.begin_window(rank.layout, rank.iteration, dict)
            rank.recorder.capture(rank.iteration)
            rank.recorder.finish()
    rank.recorder.close(remove=False)
    for state in Arena(RUN_ID, tmp_path).list():
        load_window(state, into := shard_at(0))
        expected = shard_at(state.iteration)
        for name, operator in into.operators.items():
            assert torch.equal(operator.parameter.values, expected.operators[name].parameter.values), name


def shard_on(device: StandInDevice) -> Shard:
    """The state of iteration 1 there."""
    operators = {}
    for name, one in shard_at(1).operators.items():
        values, moment = device.tensor(one.parameter.values), device.tensor(one.moments["exp_avg"])
        operators[name] = OperatorState(name, ParamSlice(values, (16,), 0), {"exp_avg": moment}, 1)
    return Shard(operators, {"mean": device.tensor(torch.tensor([1.0]))})


def test_a_window_of_a_device_is_that_of_its_steps(tmp_path: Path) -> None:
    """Its compute weights are converted there, in the order of the copies."""
    problems: list[str] = []
    with stand_in_device() as device:
        live = shard_on(device)
        recorder = Recorder(SharedMemory(RUN_ID, 0, 0, tmp_path), lambda: live, problems.append)
        layout = WindowLayout(live, (("first",), ("second",)), {"second": torch.bfloat16})
        recorder.prepare(layout)
        for iteration in (1, 2):
            device.at_once = False
            if iteration == 1:
                recorder.begin_window(layout, 1, lambda: {"place": 1})
            recorder.capture(iteration, {"loss": 1.0})
            device.at_once = True
            recorder.finish()
            for (_, values), (_, wanted) in zip(live.tensors(), shard_at(iteration + 1).tensors(), strict=True):
                values.copy_(device.tensor(wanted))
        recorder.close(remove=False)
    assert problems == []
    (state,) = Arena(RUN_ID, tmp_path).list()
    assert verify_memory_state(state) is None
    into = shard_at(0)
    assert load_window(state, into) == {"place": 1}
    for name, operator in into.operators.items():
        wanted = shard_at(1).operators[name].parameter.values
        assert torch.equal(operator.parameter.values, wanted.bfloat16().float() if name == "second" else wanted), name
    assert torch.equal(into.others["mean"], torch.tensor([1.0]))


def test_a_window_follows_the_update_on_whatever_stream_that_is(tmp_path: Path) -> None:
    """A loop may train on a stream of its own, and ask for its batches outside of it."""
    problems: list[str] = []
    with stand_in_device() as device:
        live = shard_on(device)
        steps = DeviceSteps(torch.device("cuda", 0))
        memory = SharedMemory(RUN_ID, 0, 0, tmp_path)
        recorder = Recorder(memory, lambda: live, problems.append, after_step=steps.after_step)
        layout = WindowLayout(live, (tuple(live.operators),), {})
        recorder.prepare(layout)
        device.at_once = False
        with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call] # torch
            for (_, values), (_, wanted) in zip(live.tensors(), shard_at(2).tensors(), strict=True):
                values.copy_(device.tensor(wanted))
            steps.mark_boundary()
        recorder.begin_window(layout, 2, lambda: {"place": 2})
        recorder.capture(2)
        recorder.finish()
        device.complete()
        device.at_once = True
        recorder.close(remove=False)
    assert problems == []
    (state,) = Arena(RUN_ID, tmp_path).list()
    into = shard_at(0)
    assert load_window(state, into) == {"place": 2}
    for name, operator in into.operators.items():
        assert torch.equal(operator.parameter.values, shard_at(2).operators[name].parameter.values), name
    assert torch.equal(into.others["mean"], torch.tensor([2.0]))


def test_a_run_goes_back_whose_windows_got_no_memory(tmp_path: Path) -> None:
    rank = Rank(tmp_path)
    rank.recorder.prepare(rank.layout)
    rank.recorder.close(remove=True)
    rank.recorder.forget()
    rank.recorder.close(remove=True)
    assert list(tmp_path.iterdir()) == []


class Disturbed:
    """A loop that changes a weight after the last copy of its third window; the process then leaves from a dump."""

    def __init__(self, directory: Path, *, snapshot: bool = False) -> None:
        self.directory, self.live, memory = directory, shard_at(0), SharedMemory(RUN_ID, 0, 0, directory)
        self.pool = SnapshotPool(self.live, memory=memory)
        self.problems: list[str] = []
        self.recorder = Recorder(memory, lambda: self.live, self.problems.append, writes=self.pool.engine.writes)
        layout = WindowLayout(self.live, (("first",), ("second",)), {})
        for first in (1, 3, 5):
            self.recorder.begin_window(layout, first, dict)
            for iteration in (first, first + 1):
                self.recorder.finish()
                self.pool.mark_boundary()
                self.recorder.capture(iteration)
                if snapshot and iteration == 6:
                    self.pool.begin(self.live, iteration, {})
        assert self.pool.engine.writes.trusted
        self.live.operators["first"].parameter.values.add_(1)

    def leave(self) -> set[int]:
        """Iterations that the next life finds."""
        with pytest.raises(SaveError, match="the loop changes weights"):
            self.pool.dump(lambda: self.live, 6, dict)
        return {state.iteration for state in Arena(RUN_ID, self.directory).list()}

    def close(self) -> None:
        self.pool.close()
        self.recorder.close(remove=True)


@pytest.mark.parametrize("snapshot", [True, False], ids=["beside a snapshot", "alone"])
def test_a_dump_takes_back_a_window_that_the_loop_disturbed(snapshot: bool, tmp_path: Path) -> None:
    loop = Disturbed(tmp_path, snapshot=snapshot)
    assert loop.leave() == {1, 3}
    loop.close()


def test_a_dump_takes_back_a_window_that_the_training_thread_is_finishing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, waits, done = Disturbed(tmp_path), threading.Event(), threading.Event()
    finish = CopyEngine.finish

    def slow(engine: CopyEngine, running: RunningCopy) -> Any:
        waits.set()
        assert done.wait(30)
        return finish(engine, running)

    monkeypatch.setattr(CopyEngine, "finish", slow)
    training = threading.Thread(target=loop.recorder.finish)
    training.start()
    assert waits.wait(30)
    assert loop.leave() == {1, 3}
    done.set()
    training.join()
    loop.close()


def test_a_window_that_is_sealed_late_does_not_count_once_it_was_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cpsr.replay.recorder.CLOSE_SECONDS", 0.1)
    prepare, begun, go = MemoryFile.prepare, threading.Event(), threading.Event()

    def slow(file: MemoryFile, kind: Any, shard: Shard, iteration: int, *state: Any, **more: Any) -> Any:
        if iteration == 5:
            begun.set()
            assert go.wait(30)
        return prepare(file, kind, shard, iteration, *state, **more)

    monkeypatch.setattr(MemoryFile, "prepare", slow)
    told: list[int] = []
    loop = Disturbed(tmp_path)
    loop.recorder.on_sealed = lambda _, first, send: told.append(first)
    assert begun.wait(30)
    loop.pool.look()
    go.set()
    loop.recorder.finish()
    loop.recorder.close(remove=False)
    assert {state.iteration for state in Arena(RUN_ID, tmp_path).list()} == {1, 3}
    assert 5 not in told
    loop.pool.close()
