"""A benchmark that is ended by SIGTERM leaves no process behind."""

import signal
import subprocess
import sys

import psutil

# Starts a process of another program, and one of multiprocessing, as benchmarks do.
CODE = """
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


def test_sigterm_ends_what_a_benchmark_has_started() -> None:
    with subprocess.Popen([sys.executable, "-c", CODE], stdout=subprocess.PIPE, text=True) as benchmark:
        assert benchmark.stdout is not None
        pids = [int(pid) for pid in benchmark.stdout.readline().split()]
        assert len(pids) == 2
        benchmark.send_signal(signal.SIGTERM)
        assert benchmark.wait(60) == 128 + signal.SIGTERM
    assert not [pid for pid in pids if psutil.pid_exists(pid)]
