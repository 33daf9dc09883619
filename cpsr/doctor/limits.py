"""Limits of a process: open files, and memory that it may lock."""

import resource
from pathlib import Path

from cpsr.doctor.finding import Finding, error, ok, size, warning
from cpsr.doctor.needs import Needs

__all__ = ["check_locked_memory", "check_open_files"]

_INFINIBAND = Path("/sys/class/infiniband")
# Of a rank: a job of 4 ranks has 43 files open at a time, one of 6 has 45, on four machines 64 (2026-11-26). The
# training's own, loader workers and logs come to it.
_FILES_LEAST, _FILES = 64, 512
_FILES_PER_RANK_LEAST, _FILES_PER_RANK = 1, 4
_RAISE = "raise `ulimit -n` (Slurm takes it from the shell of sbatch, systemd LimitNOFILE, docker --ulimit nofile)"


def check_open_files(needs: Needs) -> Finding:
    """The limit of open files, which connections between ranks count against."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    figures = {"soft": soft, "hard": hard}
    ranks = needs.launched.ranks
    least = _FILES_LEAST + _FILES_PER_RANK_LEAST * ranks
    wanted = _FILES + _FILES_PER_RANK * ranks
    text = f"{'any number of' if soft == resource.RLIM_INFINITY else soft} open files a process"
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return ok("open files", text, **figures)
    if soft < least:
        return error("open files", text, f"a rank needs {least} at least; {_RAISE}", **figures)
    return warning("open files", text, f"a rank may need {wanted}; {_RAISE}", **figures)


def check_locked_memory(infiniband: Path = _INFINIBAND) -> Finding:
    """The limit of locked memory, which transfers over InfiniBand and RoCE (RDMA) need; CUDA's pinning does not."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    unlimited = soft == resource.RLIM_INFINITY
    text = f"{'any amount' if unlimited else size(soft)} of locked memory"
    try:
        adapters = sorted(path.name for path in infiniband.iterdir())
    except OSError:
        adapters = []
    figures = {"soft_bytes": None if unlimited else soft, "rdma_adapters": adapters}
    if unlimited or not adapters:
        return ok("locked memory", text if unlimited else f"{text}, and no adapter for RDMA that needs it", **figures)
    advice = f"NCCL over {', '.join(adapters)} registers more; `ulimit -l unlimited` (docker --ulimit memlock=-1)"
    return warning("locked memory", text, advice, **figures)
