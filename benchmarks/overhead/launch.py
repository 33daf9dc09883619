"""Start one DeepSpeed job of two ranks and read what its rank 0 measured."""

import json
import os
import subprocess
import sys
from pathlib import Path

from cpsr.benchmarks.overhead.blocks import Pair
from cpsr.errors import CPSRError

__all__ = ["RANKS", "run"]

RANKS = 2
TIMEOUT_SECONDS = 900
LOG_LINES = 15  # of a job that failed, in the message: its directory is removed


def run(directory: Path, pairs: int) -> list[Pair]:
    """One run of the job in `directory`.

    Raises:
        CPSRError: the job failed or hung; the message ends with its last lines.
    """
    log_path, result = directory / "job.log", directory / "result.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    command += ["-m", "cpsr.benchmarks.overhead.deepspeed_job", f"--run-dir={directory / 'run'}"]
    command += [f"--pairs={pairs}", f"--result={result}"]
    with log_path.open("w") as log:
        job = subprocess.Popen(command, stdout=log, stderr=log, env=_environment())
        try:
            status = job.wait(TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            raise CPSRError(f"the job did not end within {TIMEOUT_SECONDS} s\n{_tail(log_path)}") from None
        finally:
            if job.poll() is None:
                job.terminate()  # torchrun ends its ranks
                job.wait()
    if status != 0:
        raise CPSRError(f"the job ended with status {status}\n{_tail(log_path)}")
    return [Pair(**pair) for pair in json.loads(result.read_text(encoding="utf-8"))]


def _tail(log_path: Path) -> str:
    return "\n".join(log_path.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_LINES:])


def _environment() -> dict[str, str]:
    # One thread a rank, as torchrun sets it by default: two ranks on two cores.
    return {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
