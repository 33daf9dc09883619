"""What the predictor takes in a process of its own, over real checkpoints on disk."""

import sys
import threading
from pathlib import Path
from typing import Any, Self

import torch

from cpsr.checkpoint.history import DiskHistory
from cpsr.checkpoint.snapshot import Snapshot
from cpsr.checkpoint.store import CheckpointStore
from cpsr.predictor.displacement import measure
from cpsr.predictor.examples import MAX_EXAMPLES
from cpsr.predictor.protocol import Target
from cpsr.predictor.statistics import MAX_SNAPSHOTS
from cpsr.predictor.vitp import VITPPredictor
from cpsr.predictor.vitp_training import Head
from cpsr.state.codec import encode
from cpsr.state.shard import OperatorState, ParamSlice, Shard
from tests.predictor.mapped import own_memory_bytes

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


def write_history(directory: Path, small_operators: int, large_elements: int, checkpoints: int) -> None:
    """Checkpoints of many small operators and a large one, whose weights turn as they move."""
    store = CheckpointStore(directory, 0, 1, "run", 1, fsync=False)
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


def peak_bytes(directory: Path, limit_bytes: int, operators: int, checkpoints: int) -> tuple[int, int, int]:
    """Learn from the last checkpoints one after another, save what was learned, and predict.

    Returns:
        Peak of the process's own memory above the level before, what the predictor's arithmetic allows for, and how
        often its network was trained.
    """
    _settle()
    predictor = VITPPredictor(400, 2.0, 1 << 20, direction="vitp")
    with MemoryPeak() as memory:
        footprint = predictor.stay_within(limit_bytes, operators, checkpoints)
        newest = checkpoints * INTERVAL
        for end in (newest - 2 * INTERVAL, newest - INTERVAL, newest):
            history = DiskHistory(directory / "checkpoints", 0, before=end + 1)
            for _ in predictor.learn(history):
                pass
            history.close()
            state = predictor.state_dict()
        _predict(predictor, directory, newest)
    return memory.above_before_bytes, footprint.peak_bytes, state["vitp"]["head"]["steps"]


def peak_bytes_of_the_line(directory: Path, limit_bytes: int, operators: int, checkpoints: int) -> tuple[int, int]:
    """Predict without learning, and hand on what was learned before; returns the first two of `peak_bytes`."""
    _settle()
    predictor = VITPPredictor(400, 2.0, 1 << 20)
    with MemoryPeak() as memory:
        predictor.follow_line()
        footprint = predictor.stay_within(limit_bytes, operators, checkpoints)
        predictor.load_state_dict(_learned_before(predictor.state_dict(), operators))
        _predict(predictor, directory, checkpoints * INTERVAL)
        saved = encode(predictor.state_dict(), "learned")
    assert saved
    return memory.above_before_bytes, footprint.peak_bytes


def _learned_before(state: dict[str, Any], operators: int) -> dict[str, Any]:
    """As large as what is learned of so many operators becomes, with nothing in it."""
    points = [[place * INTERVAL, place * INTERVAL * LEARNING_RATE, LEARNING_RATE] for place in range(MAX_SNAPSHOTS)]
    triangle = MAX_SNAPSHOTS * (MAX_SNAPSHOTS - 1) // 2
    windows = [
        {"points": points, "weights": torch.ones(1), "products": torch.ones(1, triangle)} for _ in range(MAX_EXAMPLES)
    ]
    statistics = state["vitp"]["statistics"] | {
        "seen": [iteration for iteration, *_ in points],
        "points": [points],
        "operators": {f"layers.{place}.bias": [SMALL_ELEMENTS, 0] for place in range(operators)},
        "products": torch.ones(operators * triangle, dtype=torch.float64),
    }
    examples = state["vitp"]["examples"] | {"windows": windows}
    learned = {"statistics": statistics, "examples": examples, "head": Head().state_dict()}
    return state | {"vitp": state["vitp"] | learned}


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
