"""States in shared memory: whole and found again, or not taken at all."""

import os
import resource
import signal
import stat
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
import torch

from cpsr.checkpoint.arena import Arena, Sealed
from cpsr.checkpoint.buffers import slab_size
from cpsr.checkpoint.memory import SharedMemory
from cpsr.checkpoint.memory_states import (
    SHARED_MEMORY,
    MemoryState,
    load_states,
    verify_memory_state,
)
from cpsr.checkpoint.running_copy import RunningCopy
from cpsr.checkpoint.snapshot import SnapshotPool
from cpsr.errors import CheckpointError, SaveError
from cpsr.state.shard import Shard
from tests.checkpoint.conftest import assert_same_bits, live_shard, make_shard
from tests.device import DEVICE

SCALARS = {"iteration": 7, "rng": torch.arange(5), "nested": [(1, 2.5), None]}


def pool_of(run_id: str, life: int = 0) -> SnapshotPool:
    pool = SnapshotPool(live_shard(0), memory=SharedMemory(run_id, 0, life))
    assert pool.shared_memory_problem is None
    return pool


def hold(run_id: str, seed: int = 3, iteration: int = 7, life: int = 0) -> MemoryState:
    """One sealed snapshot, as a process leaves it that dies."""
    pool = pool_of(run_id, life=life)
    assert pool.begin(live_shard(seed, iteration=iteration), iteration, SCALARS) is not None
    pool.finish()
    pool.close(remove=False)
    (state,) = Arena(run_id).list()
    return state


def test_a_state_takes_another_life_with_all_of_its_scalars(run_id: str) -> None:
    state = hold(run_id)
    memory = SharedMemory(run_id, 0, 5)
    file = memory.file("0", slab_size(live_shard(0)))
    memory.branch = 1
    file.restamp()
    (found,) = Arena(run_id).list()
    assert (found.life, found.branch, found.iteration) == (5, 1, state.iteration)
    into = make_shard(0)
    assert load_states([found], into)["rng"].tolist() == [0, 1, 2, 3, 4]
    assert_same_bits(into, make_shard(3))
    with found.path.open("r+b") as damaged:
        damaged.seek(-1, os.SEEK_END)  # of the small state
        damaged.write(b"\0")
    with pytest.raises(OSError, match="damaged"):  # and not declared whole
        file.restamp()
    file.close(remove=True)


def test_only_the_user_may_read_it(run_id: str) -> None:
    state = hold(run_id)
    assert stat.S_IMODE(state.path.stat().st_mode) == 0o600


def test_a_link_in_the_place_of_a_buffer_is_not_followed(run_id: str, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    (SHARED_MEMORY / f"cpsr-{run_id}-rank-00000-0").symlink_to(victim)
    pool = SnapshotPool(live_shard(0), memory=SharedMemory(run_id, 0, 0))
    assert pool.shared_memory_problem is not None
    assert victim.read_bytes() == b"precious"


def test_a_state_that_is_being_overwritten_does_not_count(run_id: str) -> None:
    hold(run_id)
    pool = pool_of(run_id)
    for _ in range(3):  # the newest is taken last
        assert Arena(run_id).list()
        assert pool.acquire(9) is not None
    assert Arena(run_id).list() == []


def test_one_of_which_the_hash_was_not_written_does_not_count(run_id: str) -> None:
    pool = pool_of(run_id)
    whole = pool.acquire(7)  # `begin` would have the worker seal it
    assert whole is not None
    for (_, into), (_, value) in zip(whole.shard.tensors(), make_shard(3).tensors(), strict=True):
        into.copy_(value)
    whole.scalars = SCALARS
    assert Arena(run_id).list() == []
    sealed = pool.seal(whole)
    assert sealed is not None
    assert sealed.result()
    assert [state.iteration for state in Arena(run_id).list()] == [7]


@pytest.mark.parametrize("cut", ["flip", "truncate"])
def test_damage_anywhere_is_seen(run_id: str, cut: str) -> None:
    state = hold(run_id)
    whole = state.path.read_bytes()
    into, before = make_shard(0), make_shard(0)
    # All but the sequence, of which any even value will do.
    places = {*range(8), *range(16, 56, 3), *range(4096, len(whole), max(1, len(whole) // 60)), len(whole) - 1}
    for place in sorted(places):
        damaged = bytearray(whole)
        damaged[place] ^= 0x10
        state.path.write_bytes(damaged if cut == "flip" else whole[:place])
        found = Arena(run_id).list()
        problem = verify_memory_state(state)
        assert problem is not None or found == [], place
        for one in found:
            with pytest.raises(CheckpointError, match=r"damaged|shorter|any more"):
                load_states([one], into)
        assert_same_bits(into, before)
    state.path.write_bytes(whole)
    assert verify_memory_state(state) is None


def test_a_state_of_another_model_is_refused_and_nothing_is_written(run_id: str) -> None:
    state = hold(run_id)
    into = make_shard(0, sizes=(5, 0, 301))
    with pytest.raises(CheckpointError, match="another slice of layers"):
        load_states([state], into)
    assert_same_bits(into, make_shard(0, sizes=(5, 0, 301)))


def test_buffers_are_taken_over_and_the_newest_states_stay_the_longest(run_id: str) -> None:
    hold(run_id, iteration=7)
    pool = pool_of(run_id, life=1)
    for iteration in (8, 9, 10, 11):
        snapshot = pool.begin(live_shard(iteration, iteration=iteration), iteration, SCALARS)
        assert snapshot is not None
        pool.finish()
        pool.settle()
        pool.release(snapshot)
        iterations = [state.iteration for state in Arena(run_id).list()]
        assert iterations == list(range(max(7, iteration - 2), iteration + 1))
    pool.forget_after(9)
    assert [state.iteration for state in Arena(run_id).list()] == [9]
    pool.close()
    assert Arena(run_id).list() == []
    assert list(SHARED_MEMORY.glob(f"*{run_id}*")) == []


def test_a_dump_holds_the_state_of_now(run_id: str) -> None:
    template = live_shard(0)
    pool = SnapshotPool(template, memory=SharedMemory(run_id, 0, 0))
    assert pool.acquire(2) is not None
    assert pool.acquire(3) is not None
    shard = live_shard(5, iteration=20)
    pool.dump(lambda: Shard(shard.operators, template.others), 20, lambda: SCALARS)
    (state,) = Arena(run_id).list()
    assert (state.iteration, state.kind) == (20, "departure")
    into = make_shard(0)
    load_states([state], into)
    assert_same_bits(into, Shard(shard.operators, template.others))


def test_a_dump_holds_the_buffers_of_the_boundary_and_not_of_the_interrupted_forward(run_id: str) -> None:
    norm = torch.nn.BatchNorm1d(3).to(DEVICE)  # whose running statistics torch changes without counting it
    others = dict(norm.named_buffers())
    shard = Shard(live_shard(3, iteration=20).operators, others)
    pool = SnapshotPool(shard, memory=SharedMemory(run_id, 0, 0))
    norm(torch.randn(8, 3, device=DEVICE))
    pool.mark_boundary()
    boundary = {name: buffer.clone() for name, buffer in others.items()}
    norm(torch.randn(8, 3, device=DEVICE))
    pool.dump(lambda: shard, 20, lambda: SCALARS)
    into = Shard(make_shard(0).operators, {name: torch.zeros_like(one, device="cpu") for name, one in others.items()})
    assert load_states([Arena(run_id).list()[0]], into)["iteration"] == 7
    assert_same_bits(into, Shard(shard.operators, boundary))


def test_two_processes_never_share_a_buffer(run_id: str) -> None:
    pool = pool_of(run_id)
    other = SnapshotPool(make_shard(0), memory=SharedMemory(run_id, 0, 1))
    assert f"process {os.getpid()} (" in (other.shared_memory_problem or "")
    pool.close(remove=False)
    assert SnapshotPool(make_shard(0), memory=SharedMemory(run_id, 0, 1)).shared_memory_problem is None


def test_a_stopped_process_that_goes_on_writes_into_its_own_buffer_alone(run_id: str) -> None:
    program = f"""
        import os, signal, torch
        from tests.checkpoint.conftest import make_shard
        from cpsr.checkpoint.memory import SharedMemory
        from cpsr.checkpoint.copying import CopyPlan
        from cpsr.checkpoint.snapshot import SnapshotPool
        pool = SnapshotPool(make_shard(0), memory=SharedMemory({run_id!r}, 0, 0))
        copy = CopyPlan.run
        def stopping(*given, **named):
            os.kill(os.getpid(), signal.SIGSTOP)
            copy(*given, **named)
        CopyPlan.run = stopping
        pool.begin(make_shard(3, iteration=7), 7, None)
        pool.finish()
        pool.close(remove=False)
    """
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)], cwd=Path.cwd())
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)
    next_life = SharedMemory(run_id, 0, 1, wait_seconds=0.2)
    problem = SnapshotPool(make_shard(0), memory=next_life).shared_memory_problem or ""
    assert f"process {process.pid} (" in problem
    assert "nlarge" not in problem, "there is room enough"
    process.send_signal(signal.SIGCONT)
    assert process.wait(timeout=60) == 0
    (state,) = Arena(run_id).list()
    assert (state.iteration, state.life) == (7, 0)
    assert SnapshotPool(make_shard(0), memory=next_life).shared_memory_problem is None, "it has let go"


def test_too_little_shared_memory_leaves_the_process_its_own(run_id: str) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
    try:
        pool = SnapshotPool(live_shard(0, sizes=(10_000, 10_000)), memory=SharedMemory(run_id, 0, 0))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert pool.shared_memory_problem is not None
    assert list(SHARED_MEMORY.glob(f"*{run_id}*")) == []
    assert pool.begin(live_shard(1, sizes=(10_000, 10_000)), 1, None) is not None
    assert pool.finish() is not None
    with pytest.raises(SaveError, match="no shared memory"):
        pool.dump(lambda: live_shard(1, sizes=(10_000, 10_000)), 2, lambda: SCALARS)


@pytest.mark.parametrize("free", [1, 2, 3])
def test_a_state_stays_where_its_file_cannot_be_opened_now(run_id: str, free: int) -> None:
    """Not its lock, not the file, not its memory, or not the next one."""
    state, memory, size = hold(run_id), SharedMemory(run_id, 0, 1), slab_size(live_shard(0))
    numbers = [number for number in range(1024) if not os.path.lexists(f"/proc/self/fd/{number}")]
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (numbers[free], limits[1]))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            memory.files(["0", "1"], size)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert Arena(run_id).list() == [state]


def test_the_bytes_that_are_required_for_a_pool_are_those_of_its_files(run_id: str) -> None:
    pool = pool_of(run_id)
    files = SHARED_MEMORY.glob(f"*{run_id}*")
    assert sum(path.stat().st_size for path in files) == 3 * slab_size(live_shard(0)).bytes
    pool.close()


def test_a_state_that_shared_memory_has_no_room_for_is_not_stored_and_logged(
    run_id: str, caplog: pytest.LogCaptureFixture
) -> None:
    pool = pool_of(run_id)
    for iteration, scalars in ((1, SCALARS), (2, {"large": torch.zeros(1 << 20)})):
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
        try:
            assert pool.begin(live_shard(3, iteration=iteration), iteration, scalars) is not None
            snapshot = pool.finish()
            pool.settle()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert snapshot is not None, "it is whole, and goes on to the disk"
        pool.release(snapshot)
    assert [state.iteration for state in Arena(run_id).list()] == [1]
    assert "iteration 2 is not held in shared memory: [Errno 27] File too large" in caplog.text
    pool.close()


def confirmed_early(run_id: str) -> tuple[SnapshotPool, Shard]:
    """A pool that trusts its loop."""
    live = make_shard(3)
    pool = SnapshotPool(live, memory=SharedMemory(run_id, 0, 0))
    for iteration in (1, 2, 3):
        snapshot = pool.begin(live, iteration, {})
        assert snapshot is not None
        pool.finish()
        pool.release(snapshot)
    pool.settle()
    assert pool.engine.writes.trusted
    return pool, live


def test_a_dump_takes_back_a_running_snapshot_that_the_loop_disturbed(run_id: str) -> None:
    pool, live = confirmed_early(run_id)
    pool.mark_boundary()
    assert pool.begin(live, 4, {}) is not None
    for operator in live.operators.values():
        operator.parameter.values.add_(1)
    with pytest.raises(SaveError, match="the loop changes weights"):
        pool.dump(lambda: live, 4, dict)
    assert 4 not in {state.iteration for state in Arena(run_id).list()}
    pool.close()


def test_what_fails_once_a_copy_is_confirmed_is_said_to_who_confirms_it() -> None:
    """As an error that torch's handler of SIGCHLD raises on the training thread."""

    def fails(unchanged: bool) -> None:
        raise OSError("a worker was killed")

    copy = RunningCopy(None)
    copy.when_confirmed(fails)
    with pytest.raises(OSError, match="a worker was killed"):
        copy.confirm(unchanged=True)


def test_the_training_thread_does_nothing_for_a_snapshot_that_counts_and_nobody_takes_its_buffer(run_id: str) -> None:
    """The first snapshots of a life count once the next update is due."""
    live = make_shard(3)
    pool = SnapshotPool(live, 1, SharedMemory(run_id, 0, 0))
    told: list[tuple[bool, bool]] = []

    def tell(*_: object) -> None:
        taken = pool.occupancy.take(2, keep_newest=True)
        told.append((threading.current_thread() is threading.main_thread(), taken is not None))

    def count() -> None:
        tell()
        common.append(pool.occupancy.common)

    common: list[int] = []
    pool.on_sealed, pool.on_counting = tell, count
    snapshot = pool.begin(live, 1, {})
    assert snapshot is not None
    pool.engine.settle()
    pool.finish()
    pool.release(snapshot)
    pool.settle()
    assert told == [(False, False)] * 2
    assert common == [1]
    pool.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can write to a file of another user")
@pytest.mark.parametrize("content", [b"", b"x"])
def test_nothing_is_written_into_a_file_of_another_user_and_it_stays(
    run_id: str, content: bytes, tmp_path: Path
) -> None:
    state = hold(run_id)
    there = Arena(run_id, tmp_path)
    for slot in ("replica-00001-0", "0"):
        path = there.path(0, slot)
        path.write_bytes(content)
        os.chown(path, 65534, 65534)
    with pytest.raises(OSError, match="belongs to another user"):
        there.put(there.path(0, "replica-00001-0").name, Sealed.at(state.path, state.iteration))
    pool = SnapshotPool(live_shard(0), memory=SharedMemory(run_id, 0, 0, tmp_path))
    assert "belongs to another user" in (pool.shared_memory_problem or "")
    pool.close()
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [content] * 2
