"""Start a DeepSpeed job of a few ranks and read what they measured."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from cpsr.errors import CPSRError

__all__ = ["RANKS", "launch", "start_gloo"]

RANKS = 2
TIMEOUT_SECONDS = 900
LOG_LINES = 15  # of a job that failed, in the message: its directory is removed


def launch(
    directory: Path, module: str, ranks: int = RANKS, timeout_seconds: float = TIMEOUT_SECONDS, **options: int | str
) -> list[Any]:
    """One run of the job in `directory`.

    Args:
        directory: for the job's run directory, log and results.
        module: of the benchmarks, the job; it takes `--run-dir`, `--results` and the options.
        ranks: processes that it has.
        timeout_seconds: after which it is given up.
        options: of its command line.

    Returns:
        What each rank wrote as JSON into `<results>/<rank>.json`, by rank; ranks that wrote nothing are left out.

    Raises:
        CPSRError: the job failed or hung; the message ends with its last lines.
    """
    log_path, results = directory / "job.log", directory / "results"
    results.mkdir()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += ["-m", f"cpsr.benchmarks.{module}", f"--run-dir={directory / 'run'}", f"--results={results}"]
    command += [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    with log_path.open("w") as log:
        job = subprocess.Popen(command, stdout=log, stderr=log, env=_environment())
        try:
            status = job.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            raise CPSRError(f"the job did not end within {timeout_seconds:g} s\n{_tail(log_path)}") from None
        finally:
            if job.poll() is None:
                job.terminate()  # torchrun ends its ranks
                job.wait()
    if status != 0:
        raise CPSRError(f"the job ended with status {status}\n{_tail(log_path)}")
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(results.iterdir())]


def start_gloo() -> None:
    """Join the other ranks; called in a job."""
    import deepspeed  # the starting process does without

    # Else DeepSpeed compiles a shared-memory collective for 70 s.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo")


def _tail(log_path: Path) -> str:
    return "\n".join(log_path.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_LINES:])


def _environment() -> dict[str, str]:
    # One thread a rank, as torchrun sets it by default: two ranks on two cores.
    return {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
