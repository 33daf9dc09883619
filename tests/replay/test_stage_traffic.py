"""Logs of what a stage sends: one file an iteration, as many as windows need."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from cpsr.checkpoint.arena import Arena
from cpsr.checkpoint.memory import SharedMemory
from cpsr.checkpoint.memory_states import MemoryState, SlabSize
from cpsr.engines.stage_operations import Operation
from cpsr.errors import CheckpointError
from cpsr.replay.stages import LoggedSteps, StageLogs

RUN = "0123456789abcdef"
SENT = Operation("send", "1", "", (3, 4), "float32")


class Logs:
    """A rank's logs in a directory of their own."""

    def __init__(self, directory: Path, life: int = 1, room: int = 1 << 26) -> None:
        self.directory, self.said = directory, list[str]()
        memory = SharedMemory(RUN, 0, life, directory, wait_seconds=0.1)
        report = lambda message, level: self.said.append(message)  # noqa: E731
        self.stage = StageLogs(memory, torch.device("cpu"), report, lambda: room)

    def train(self, iteration: int, values: torch.Tensor | None = None) -> None:
        self.stage.begin(iteration)
        self.stage.add(Operation("load"), None, {"states": iteration})
        self.stage.add(SENT, torch.full((3, 4), float(iteration)) if values is None else values)
        self.stage.end(iteration % 2 == 0, {"tuple": False, "tensors": [[[3, 4], "float32"]]})

    def left(self) -> dict[int, MemoryState]:
        self.stage.close(remove=False)
        return {state.iteration: state for state in Arena(RUN, self.directory).list()}


@pytest.fixture
def logs(tmp_path: Path) -> Iterator[Logs]:
    made = Logs(tmp_path)
    yield made
    made.stage.close(remove=True)


def test_what_was_sent_comes_back_in_order_bit_for_bit(logs: Logs) -> None:
    logs.stage.keep(4)
    for iteration in range(1, 10):
        logs.train(iteration)
    left = logs.left()
    assert sorted(left) == [6, 7, 8, 9]
    steps = LoggedSteps(left, frozenset({0}), lambda: None)
    for iteration in (6, 9):
        load, sent = steps.operations(iteration)
        assert load[0] == Operation("load")
        assert load[2] == {"states": iteration}
        assert sent[0] == SENT
        assert sent[1] is not None
        assert torch.equal(sent[1], torch.full((3, 4), float(iteration)))
        assert steps.applied(iteration) == (iteration % 2 == 0)
        assert steps.form == {"tuple": False, "tensors": [[[3, 4], "float32"]]}


def test_the_first_iteration_is_measured_and_what_grows_is_kept_from_the_next_on(logs: Logs) -> None:
    logs.stage.keep(8)
    for iteration in (1, 2):
        logs.train(iteration)
    for iteration in (3, 4, 5):
        logs.train(iteration, torch.ones(5000))
    assert sorted(logs.left()) == [2, 4, 5]
    assert len(logs.said) == 2
    assert all("MB of host memory" in one for one in logs.said)


def test_with_little_memory_fewer_iterations_are_kept_and_it_says_so(tmp_path: Path) -> None:
    logs = Logs(tmp_path, room=3 * SlabSize.for_tensors(["other/all"], 4096).bytes)
    logs.stage.keep(8)
    for iteration in range(1, 10):
        logs.train(iteration)
    assert sorted(logs.left()) == [7, 8, 9]
    assert "for 3: a failure after more of them repeats all stages" in logs.said[0]
    logs.stage.close(remove=True)


def test_the_next_life_keeps_the_logs_and_overwrites_the_oldest(logs: Logs, tmp_path: Path) -> None:
    logs.stage.keep(4)
    for iteration in range(1, 6):
        logs.train(iteration)
    left = logs.left()
    later = Logs(tmp_path, life=2)
    later.stage.keep(5)
    kept = later.stage.adopt(list(left.values()))
    assert sorted(kept) == [2, 3, 4, 5]
    assert {state.life for state in kept.values()} == {2}
    _, sent = LoggedSteps(kept, frozenset({0}), lambda: None).operations(3)
    assert sent[1] is not None
    assert torch.equal(sent[1], torch.full((3, 4), 3.0))
    later.train(6)
    later.train(7)
    assert sorted(later.left()) == [3, 4, 5, 6, 7]  # there are five files now
    later.stage.close(remove=True)


def test_what_changes_after_it_was_sent_is_not_logged_with_other_values(logs: Logs) -> None:
    """Collectives write into what they were given; nobody writes into what was sent to another stage."""
    logs.stage.keep(4)
    gives = Operation("all_reduce", "pipe", "SUM", (1 << 20,), "float32")
    for iteration in range(1, 5):
        logs.stage.begin(iteration)
        for operation in (SENT, gives):
            values = torch.full((1 << 20,), float(iteration))
            logs.stage.add(operation, values)
            if operation is gives or iteration == 3:
                values.add_(1000.0)
        logs.stage.end(True, None)
    left = logs.left()
    assert sorted(left) == [2, 4]
    for iteration in left:
        for _, logged, _ in LoggedSteps(left, frozenset(), lambda: None).operations(iteration):
            assert logged is not None
            assert torch.equal(logged, torch.full((1 << 20,), float(iteration)))
    assert any("has written to a tensor after it was sent" in one for one in logs.said)


def test_a_damaged_log_is_told(logs: Logs) -> None:
    logs.stage.keep(4)
    for iteration in range(1, 4):
        logs.train(iteration)
    left = logs.left()
    with left[3].path.open("r+b") as file:
        file.seek(left[3].size.header_bytes + 4)
        file.write(b"another")
    with pytest.raises(CheckpointError, match="damaged"):
        next(LoggedSteps(left, frozenset(), lambda: None).operations(3))
