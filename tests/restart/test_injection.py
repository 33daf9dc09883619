"""Where the data continues after a failure."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cpsr.checkpoint.progress import Progress
from cpsr.journal import Beginning
from cpsr.ranks.group import Group
from cpsr.restart.injection import Injection
from cpsr.restart.restored_state import Restored
from cpsr.state.small_state import DataPosition

CHECKPOINT = Restored(
    Beginning.EXACT, 20, 20, 25, "", data=DataPosition(batches=41, epoch=4, batch=1, batches_per_epoch=10)
)


def injection(run_dir: Path) -> Injection:
    """Of a rank that takes two batches a step, and once took three."""
    unused: Any = None
    adapter = SimpleNamespace(micro_batches_per_iteration=2)
    job: Any = SimpleNamespace(adapter=adapter, group=Group(), config=SimpleNamespace(run_dir=run_dir))
    return Injection(job, unused, unused, unused)


@pytest.mark.parametrize(
    ("published", "iteration", "batches"),
    [
        ({24: 50, 25: 52}, 25, 52),  # as it was published, one more than usual
        ({24: 50, 25: 52}, 24, 50),
        ({22: 46, 23: 48}, 25, 52),  # counted on: its device was ahead of what it published
        ({26: 54, 27: 56}, 24, 50),  # counted back: another rank's device was behind
        ({25: 52}, 21, 43),  # the checkpoint is nearer
        ({18: 37, 19: 39}, 25, 51),
        ({24: 50, 25: 52}, 20, 41),
    ],
)
def test_the_data_goes_with_the_iteration(
    tmp_path: Path, published: dict[int, int], iteration: int, batches: int
) -> None:
    progress = Progress({0: published}, {})
    data = injection(tmp_path).data_at(CHECKPOINT, progress, iteration)
    assert data == CHECKPOINT.data.advanced(batches - 41)


@pytest.mark.parametrize("progress", [None, Progress({}, {0: "is absent"})])
def test_without_a_counter_the_usual_number_of_batches_is_counted_from_the_checkpoint(
    tmp_path: Path, progress: Progress | None
) -> None:
    assert injection(tmp_path).data_at(CHECKPOINT, progress, 25).batches == 51


def test_a_rank_that_is_dealt_no_batches_counts_none(tmp_path: Path) -> None:
    nothing = Restored(Beginning.EXACT, 20, 20, 25, "")
    progress = Progress({0: {22: 0, 23: 0}}, {})
    assert injection(tmp_path).data_at(nothing, progress, 25) == DataPosition()
