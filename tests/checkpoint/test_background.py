"""Threads of lower priority."""

import os
import threading
from pathlib import Path

from cpsr.checkpoint.background import NICENESS, yield_to_training
from cpsr.checkpoint.snapshot import SnapshotPool
from cpsr.checkpoint.store import CheckpointStore
from cpsr.checkpoint.writer import CheckpointWriter
from cpsr.config import CheckpointConfig
from tests.checkpoint.conftest import make_shard

LOWEST = 19


def niceness(thread: int) -> int:
    return os.getpriority(os.PRIO_PROCESS, thread)


def lowered() -> int:
    return min(LOWEST, niceness(threading.get_native_id()) + NICENESS)


def test_the_calling_thread_alone_yields() -> None:
    before, found = niceness(threading.get_native_id()), []

    def work() -> None:
        yield_to_training()
        found.append(niceness(threading.get_native_id()))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [lowered()]
    assert niceness(threading.get_native_id()) == before


def test_the_writer_yields_and_the_copies_that_training_waits_for_do_not(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, 0, 1, "run", 1)
    store.prepare()
    before = set(threading.enumerate())
    pool = SnapshotPool(make_shard())
    writer = CheckpointWriter(store, pool, CheckpointConfig())
    scalars = {"step": 1, "cumulative_learning_rate": 0.0, "learning_rate": 0.1}
    pool.begin(make_shard(1), 1, scalars)
    snapshot = pool.finish()
    assert snapshot is not None
    writer.submit(snapshot)
    assert writer.drain(20)
    found = {one.name: niceness(one.native_id) for one in set(threading.enumerate()) - before if one.native_id}
    assert found == {"cpsr-writer": lowered(), "cpsr-snapshot_0": niceness(threading.get_native_id())}
    writer.close(5)
    pool.close()
