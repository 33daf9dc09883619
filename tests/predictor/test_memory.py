"""What the predictor takes of host memory, measured in a process of its own over real checkpoints on disk."""

import multiprocessing
import threading
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from cpsr.benchmarks.harness.processes import MemoryPeak, own_bytes
from cpsr.checkpoint.history import DiskHistory
from cpsr.checkpoint.snapshot import Snapshot
from cpsr.checkpoint.store import CheckpointStore
from cpsr.predictor.guard import measure
from cpsr.predictor.protocol import Target
from cpsr.predictor.statistics import MAX_SNAPSHOTS
from cpsr.predictor.vitp import VITPPredictor, host_memory_bytes
from cpsr.state.shard import OperatorState, ParamSlice, Shard

INTERVAL = 20
LEARNING_RATE = 1e-3
SMALL_ELEMENTS = 64


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
    with MemoryPeak(own_bytes) as memory:
        newest = checkpoints * INTERVAL
        for end in (newest - 2 * INTERVAL, newest - INTERVAL, newest):
            history = DiskHistory(directory / "checkpoints", 0, before=end + 1)
            for _ in predictor.learn(history):
                pass
            history.close()
            state = predictor.state_dict()
        _predict(predictor, directory, newest)
    bound = host_memory_bytes(operators, checkpoints, learns=True)
    return memory.peak_bytes - memory.before_bytes, bound, state["vitp"]["head"]["steps"]


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
