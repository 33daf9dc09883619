"""Whether DeepSpeed's kernels of Adam can be used here: they are compiled at first use, for minutes.

That of FusedAdam needs a CUDA toolkit where there is a GPU; on processors, and that of DeepSpeedCPUAdam, a compiler.
"""

import sys
import threading
import traceback
from pathlib import Path

from cpsr.qualify.cells import Cell
from cpsr.qualify.records import Records, read_records

__all__ = ["kernel_problem", "no_kernel"]

BUILD_SECONDS = 300.0  # of a build that takes one minute
LINE_CHARACTERS = 300  # of an error; the rest is in the log


def kernel_problem(kernel: str, folder: Path, records: Records) -> str:
    """Why it cannot be used; empty if it can. Tried once, and recorded for the lives that follow.

    Args:
        kernel: of `FusedAdam` or `DeepSpeedCPUAdam`.
        folder: the work folder.
        records: of this rank.
    """
    found = [
        str(line["problem"]) for line in read_records(folder) if line["event"] == "probed" and line["kernel"] == kernel
    ]
    if found:
        return found[0]
    problem = _build_problem(kernel)
    records.add("probed", kernel=kernel, problem=problem)
    return problem


def no_kernel(kernel: str, problem: str, cell: Cell) -> str:
    """Why a cell cannot run, where there is a problem with a kernel; empty if it can."""
    return f"no {kernel} here: {problem}" if problem and cell.kernel == kernel else ""


def _build_problem(kernel: str) -> str:
    outcomes: list[str] = []
    # In a thread that may outlive the limit: a compiler that is killed leaves a lock, for which every later one waits.
    thread = threading.Thread(target=lambda: outcomes.append(_build(kernel)), name="cpsr-build", daemon=True)
    thread.start()
    thread.join(BUILD_SECONDS)
    return outcomes[0] if outcomes else f"it was not compiled within {BUILD_SECONDS:g} s"


def _build(kernel: str) -> str:
    from deepspeed.ops.op_builder import CPUAdamBuilder, FusedAdamBuilder

    try:
        (FusedAdamBuilder if kernel == "FusedAdam" else CPUAdamBuilder)().load()
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the reason
        sys.stderr.write(traceback.format_exc())
        return f"{type(error).__name__}: {error}".split("\n", 1)[0][:LINE_CHARACTERS]
    return ""
