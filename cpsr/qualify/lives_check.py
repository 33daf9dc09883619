"""A run in three lives of this process, whose loop keeps more than the engine, against one that never stopped."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch.optim.swa_utils import AveragedModel
from torch.utils.data import IterableDataset

from cpsr.qualify.cells import EMA, LOADER, TORCHDATA
from cpsr.qualify.conformance import assert_bitwise, seed
from cpsr.qualify.models import token_batch
from cpsr.qualify.scene import Scene
from cpsr.qualify.torch_cases import small_job
from cpsr.recovery import CPSRRecovery

__all__ = ["check_lives"]

LIVES = (2, 5, 8)  # iterations at which they end
BATCHES = 3  # of a pass


WORKERS = 2  # of torchdata's loader


class Numbers(IterableDataset[int]):
    """A loader, or torchdata's data set, that gives its state and takes it back; it counts what it was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.given, self._next = 0, 0

    def __iter__(self) -> Iterator[int]:
        while self._next < BATCHES:
            self._next += 1
            self.given += 1
            yield self._next - 1
        self._next = 0

    def state_dict(self) -> dict[str, int]:
        """The batch that comes next."""
        return {"next": self._next}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on there."""
        self._next = state["next"]


def check_lives(feature: str, scene: Scene) -> Mapping[str, Any]:
    """Bitwise equality of weights, averages and losses; and a loader with a state skips no batch.

    Args:
        feature: `EMA`, `LOADER` or `TORCHDATA`: what the loop keeps beside the engine.
        scene: where it runs.
    """
    straight, lives = _run(feature, scene, "straight", LIVES[-1:]), _run(feature, scene, "lives", LIVES)
    assert_bitwise(lives, straight)
    return {}


def _run(feature: str, scene: Scene, name: str, ends: tuple[int, ...]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for end in ends:
        seed(1)
        job, numbers, losses = small_job("fp32", "adamw", scene.device, scene.ranks), Numbers(), []
        average = AveragedModel(job.module, avg_fn=lambda old, new, _: old.lerp(new, 0.1))
        settings = {"run_dir": str(scene.folder / name), "mode": "exact", "checkpoint": {"interval_iterations": 100}}
        with CPSRRecovery(job.adapter, settings) as recovery:
            recovery.register("average", average)
            begun = recovery.iteration
            batches = recovery.resume(_loader(feature, numbers), repeat=True)
            while recovery.iteration < end:
                losses.append(job.train_on([token_batch(int(next(batches)), 0, scene.rank)]))
                if feature == EMA:
                    average.update_parameters(job.module)
        assert feature != LOADER or numbers.given <= end - begun + 1, "a restart has skipped batches one by one"
        found = {f"average/{key}": value.detach().clone() for key, value in average.state_dict().items()}
        found |= {f"weight/{key}": value.detach().clone() for key, value in job.module.state_dict().items()}
        found |= {"loss": losses[-1]}
    return found


def _loader(feature: str, numbers: Numbers) -> Iterable[int]:
    if feature == TORCHDATA:
        from torchdata.stateful_dataloader import StatefulDataLoader

        # Each worker gives all numbers of a pass, in turn with the other.
        loader: Iterable[int] = StatefulDataLoader(numbers, batch_size=None, num_workers=WORKERS)
        return loader
    return numbers if feature == LOADER else range(BATCHES)
