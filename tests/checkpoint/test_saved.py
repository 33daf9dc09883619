"""One branch of a rank's scalars, or its weights, read alone."""

import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from cpsr.benchmarks.harness.checkpoint_files import rank_part, small_state_file
from cpsr.checkpoint.saved import SavedCheckpoint
from cpsr.checkpoint.snapshot import Snapshot
from cpsr.checkpoint.store import CheckpointStore
from cpsr.errors import CheckpointCorruptError
from tests.checkpoint.conftest import make_snapshot

LEARNED: dict[str, Any] = {"of": {"ours": [1, (2.5, None)], "products": torch.arange(4.0)}, "offer": torch.ones(1)}


@pytest.fixture
def directory(store: CheckpointStore) -> Path:
    whole = make_snapshot(10)
    snapshot = Snapshot(10, whole.shard, {**whole.scalars, "learned": LEARNED, "plain": 3})
    store.write(snapshot)
    assert store.commit(10, 5.0, threading.Event()).committed
    return store.catalogue()[0].directory


def test_it_is_what_was_saved_of_it(directory: Path) -> None:
    found = SavedCheckpoint(directory).small_state(0, ("learned", "of"))
    assert found["ours"] == [1, (2.5, None)]
    assert torch.equal(found["products"], LEARNED["of"]["products"])
    assert found.keys() == {"ours", "products"}
    small_state_file(directory).unlink()  # what was read does not lie there any more
    assert found["products"].sum() == 6.0


def test_damage_is_reported(directory: Path) -> None:
    file = small_state_file(directory)
    data = file.read_bytes()
    file.write_bytes(data[:20])
    with pytest.raises(CheckpointCorruptError, match=re.escape(file.name)):
        SavedCheckpoint(directory).small_state(0, ("learned", "of"))
    file.unlink()
    with pytest.raises(CheckpointCorruptError, match="is missing"):
        SavedCheckpoint(directory).small_state(0, ("learned", "of"))
    file.write_bytes(data)
    record = rank_part(directory)
    record.write_bytes(record.read_bytes().replace(b"2.5", b"2.6"))
    with pytest.raises(CheckpointCorruptError, match="SHA-256"):
        SavedCheckpoint(directory).small_state(0, ("learned", "of"))
