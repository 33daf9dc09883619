"""Processes, memory and ratios of every benchmark."""

import mmap
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from cpsr.benchmarks.harness.intervals import median_ratio_interval
from cpsr.benchmarks.harness.processes import MemoryPeak, Workers, in_own_process, own_bytes
from cpsr.benchmarks.stall.trial import family_bytes
from cpsr.benchmarks.tests.recovery.tiny import one_thread
from cpsr.errors import CPSRError

MIB = 2**20
# Starts a process of another program, and one of multiprocessing, as benchmarks do.
ENDED = """
import multiprocessing, subprocess, time
import typer
from cpsr.benchmarks.cli import bench, end_together

if __name__ == "__main__":
    context = typer.Context(typer.main.get_command(bench))
    end_together(context)
    other = subprocess.Popen(["sleep", "600"])
    own = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
    own.start()
    print(other.pid, own.pid, flush=True)
    other.wait()
"""


def test_rounds_stay_together_in_a_ratio_of_medians() -> None:
    # Every round is ten times slower or not; on both sides of the ratio, so that it does not move at all.
    slowness = [1.0, 10.0] * 15
    estimate = median_ratio_interval([2 * value for value in slowness], slowness)
    assert (estimate.low, estimate.value, estimate.high) == pytest.approx((2.0, 2.0, 2.0))
    # Of medians, and not the median of ratios.
    assert median_ratio_interval([2.0, 4.0, 9.0], [1.0, 4.0, 2.0]).value == pytest.approx(4.0 / 2.0)


@pytest.mark.parametrize("count", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_results_keep_the_order_of_the_items_and_an_error_comes_out(count: int) -> None:
    done: list[int] = []
    with one_thread(), Workers(count) as workers:
        assert workers.each(int, ["5", "1", "4"], done.append) == [5, 1, 4]
        assert done == [1, 2, 3]
        with pytest.raises(ValueError, match="two"):
            workers.each(int, ["1", "two"])
        if count > 1:
            with pytest.raises(CPSRError, match="a worker was killed"):
                workers.each(os._exit, [1])


def test_a_process_that_ends_from_outside_is_named() -> None:
    with pytest.raises(CPSRError, match="_exit was ended from outside, perhaps for lack of memory"):
        in_own_process(os._exit, 9)


def test_sigterm_ends_what_a_benchmark_has_started() -> None:
    with subprocess.Popen([sys.executable, "-c", ENDED], stdout=subprocess.PIPE, text=True) as benchmark:
        assert benchmark.stdout is not None
        pids = [int(pid) for pid in benchmark.stdout.readline().split()]
        assert len(pids) == 2
        benchmark.send_signal(signal.SIGTERM)
        assert benchmark.wait(60) == 128 + signal.SIGTERM
    assert not [pid for pid in pids if psutil.pid_exists(pid)]


def test_a_peak_is_found_after_the_memory_is_gone_and_a_mapped_file_is_no_memory_of_our_own(tmp_path: Path) -> None:
    path = tmp_path / "mapped"
    path.write_bytes(b"\x01" * (64 * MIB))
    with MemoryPeak(own_bytes) as memory:
        mapped = torch.from_file(str(path), shared=False, size=64 * MIB, dtype=torch.uint8)
        assert int(mapped.max()) == 1
        values = torch.ones(64 * MIB // 4)
        while memory.peak_bytes - memory.before_bytes < 60 * MIB:  # the sampler sees it; else the test's time is over
            pass
        del values
    assert 60 * MIB <= memory.peak_bytes - memory.before_bytes < 80 * MIB


def test_memory_of_children_counts_and_shared_memory_counts_once() -> None:
    hold = "import sys; kept = bytearray(b'x') * (64 * 2**20); print(flush=True); sys.stdin.read()"
    with MemoryPeak(family_bytes, 0.01) as memory:
        with subprocess.Popen([sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
            assert child.stdout is not None
            child.stdout.readline()
            deadline = time.monotonic() + 10  # a busy machine may take no sample while the child is there
            while memory.peak_bytes - memory.before_bytes <= 60 * MIB and time.monotonic() < deadline:
                time.sleep(0.01)
        assert family_bytes() - memory.before_bytes < 30 * MIB
    assert memory.peak_bytes - memory.before_bytes > 60 * MIB
    with mmap.mmap(-1, 64 * MIB) as shared:
        shared.write(b"x" * (64 * MIB))
        assert 60 * MIB < family_bytes() - memory.before_bytes < 90 * MIB
