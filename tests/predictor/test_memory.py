"""What the predictor takes of host memory, measured in a process of its own over real checkpoints on disk."""

import multiprocessing
import sys
import threading
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, Self

import pytest
import torch

from cpsr.checkpoint.history import DiskHistory
from cpsr.checkpoint.snapshot import Snapshot
from cpsr.checkpoint.store import CheckpointStore
from cpsr.predictor.guard import measure
from cpsr.predictor.protocol import Target
from cpsr.predictor.statistics import MAX_SNAPSHOTS
from cpsr.predictor.vitp import VITPPredictor, host_memory_bytes
from cpsr.state.shard import OperatorState, ParamSlice, Shard
from tests.predictor.conftest import MakeHistory

INTERVAL = 20
LEARNING_RATE = 1e-3
SMALL_ELEMENTS = 64


class MemoryPeak:
    """Looks at the process's own memory after every call within the work, so that no peak depends on when it looks.

    `above_before_bytes` is how far it rose.
    """

    def __init__(self) -> None:
        self._before = self._peak = 0

    def __enter__(self) -> Self:
        self._before = self._peak = own_memory_bytes()
        sys.setprofile(self._look)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    @property
    def above_before_bytes(self) -> int:
        return self._peak - self._before

    def _look(self, frame: object, event: str, argument: object) -> None:
        if event in ("c_return", "return"):
            self._peak = max(self._peak, own_memory_bytes())


def own_memory_bytes() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


def write_history(directory: Path, small_operators: int, large_elements: int, checkpoints: int) -> None:
    """Checkpoints of many small operators and a large one, whose weights turn as they move."""
    store = CheckpointStore(directory, 0, 1, "run", 1)
    store.prepare()
    generator = torch.Generator().manual_seed(0)
    first, second = torch.randn(2, large_elements, generator=generator)
    for number in range(1, checkpoints + 1):
        iteration = number * INTERVAL
        angle = torch.tensor(0.05 * number)
        large = angle.sin() * first + angle.cos() * second
        names = [("large", large), *((f"layers.{i}.bias", large[:SMALL_ELEMENTS] + i) for i in range(small_operators))]
        operators = {
            name: OperatorState(name, ParamSlice(values, (values.numel(),)), {}, iteration) for name, values in names
        }
        scalars = {"cumulative_learning_rate": iteration * LEARNING_RATE, "learning_rate": LEARNING_RATE}
        store.write(Snapshot(iteration, Shard(operators), scalars))
        assert store.commit(iteration, 10.0, threading.Event()).committed


def peak_bytes(directory: Path, operators: int, checkpoints: int) -> tuple[int, int, int]:
    """Learn from the last checkpoints one after another, save what was learned, and predict.

    Returns:
        Peak of the process's own memory above the level before, what the predictor's arithmetic allows for, and how
        often its network was trained.
    """
    _settle()
    predictor = VITPPredictor(400, 2.0, direction="vitp")
    with MemoryPeak() as memory:
        newest = checkpoints * INTERVAL
        for end in (newest - 2 * INTERVAL, newest - INTERVAL, newest):
            history = DiskHistory(directory / "checkpoints", 0, before=end + 1)
            for _ in predictor.learn(history):
                pass
            history.close()
            state = predictor.state_dict()
        _predict(predictor, directory, newest)
    bound = host_memory_bytes(operators, checkpoints, learns=True)
    return memory.above_before_bytes, bound, state["vitp"]["head"]["steps"]


def _settle() -> None:
    """What a training process has anyway, before the level is taken."""
    torch.set_num_threads(1)
    torch.ones(1 << 20).sum()
    torch.optim.AdamW([torch.zeros(1)])


def _predict(predictor: VITPPredictor, directory: Path, newest: int) -> None:
    history = DiskHistory(directory / "checkpoints", 0)
    target = Target(newest + 15, (newest + 15) * LEARNING_RATE, LEARNING_RATE)
    forecast = predictor.forecast(history, target)
    assert forecast.feasible, forecast.reason
    measure(history, forecast, predictor.predict(history, forecast))
    history.close()


def in_own_process(*arguments: Any) -> tuple[int, int, int]:
    """What `peak_bytes` returns in a new process, whose memory nothing else has touched."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(peak_bytes, *arguments).result()


def test_a_usual_model_stays_far_below_200_megabytes() -> None:
    assert host_memory_bytes(1000, 60, learns=False) < host_memory_bytes(1000, 60, learns=True) < 130_000_000


@pytest.mark.slow
def test_large_tensors_stay_below_the_bound(tmp_path: Path) -> None:
    write_history(tmp_path, small_operators=5, large_elements=3 << 18, checkpoints=12)
    found, bound, updates = in_own_process(tmp_path, 6, 12)
    assert updates > 0  # the network is part of what was measured
    assert found <= bound


@pytest.mark.slow
def test_the_measured_memory_grows_with_the_operators_no_faster_than_its_bound(tmp_path: Path) -> None:
    measured, bounds = [], []
    for number in (60, 260):  # of the fewer ones the network already looks at as many together as it ever does
        directory = tmp_path / str(number)
        write_history(directory, number, SMALL_ELEMENTS, MAX_SNAPSHOTS)
        found, bound, *_ = in_own_process(directory, number + 1, MAX_SNAPSHOTS)
        measured.append(found)
        bounds.append(bound)
        assert found <= bound
    assert 0 < measured[1] - measured[0] <= bounds[1] - bounds[0]


def test_nothing_is_taken_on_the_device_that_the_training_loop_works_on(make_history: MakeHistory) -> None:
    moving = torch.randn(2, 40, generator=torch.Generator().manual_seed(0))
    angles = torch.arange(12) * 0.1
    history = make_history(
        list(range(20, 260, 20)),
        [{"w": angle.sin() * moving[0] + angle.cos() * moving[1], "still": torch.ones(3)} for angle in angles],
    )

    def predicted() -> dict[str, torch.Tensor]:
        predictor = VITPPredictor(200, 2.0, direction="vitp")
        for _ in predictor.learn(history):
            pass
        forecast = predictor.forecast(history, Target(255, 255.0, 1.0))
        assert forecast.settings["direction"] == "vitp"
        measure(history, forecast, predictor.predict(history, forecast))
        return {operator: values for operator, _, values in predictor.predict(history, forecast)}

    expected = predicted()
    with torch.device("meta"):  # where any tensor that is made without naming its device would have no values
        found = predicted()
    assert all(torch.equal(found[operator], values) for operator, values in expected.items())
