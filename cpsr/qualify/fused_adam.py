"""Whether DeepSpeed's FusedAdam can be used here: it is compiled at first use, which needs a CUDA toolkit."""

import sys
import threading
import traceback
from pathlib import Path

from cpsr.qualify.records import Records, read_records

__all__ = ["fused_adam_problem"]

BUILD_SECONDS = 300.0  # of a build that takes one minute
LINE_CHARACTERS = 300  # of an error; the rest is in the log


def fused_adam_problem(folder: Path, records: Records) -> str:
    """Why it cannot be used; empty if it can. Tried once, and recorded for the lives that follow.

    Args:
        folder: the work folder.
        records: of this rank.
    """
    found = [str(line["problem"]) for line in read_records(folder) if line["event"] == "probed"]
    if found:
        return found[0]
    problem = _build_problem()
    records.add("probed", problem=problem)
    return problem


def _build_problem() -> str:
    outcomes: list[str] = []
    # In a thread that may outlive the limit: a compiler that is killed leaves a lock, for which every later one waits.
    thread = threading.Thread(target=lambda: outcomes.append(_build()), name="cpsr-build", daemon=True)
    thread.start()
    thread.join(BUILD_SECONDS)
    return outcomes[0] if outcomes else f"it was not compiled within {BUILD_SECONDS:g} s"


def _build() -> str:
    from deepspeed.ops.op_builder import FusedAdamBuilder

    try:
        FusedAdamBuilder().load()
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the reason
        sys.stderr.write(traceback.format_exc())
        return f"{type(error).__name__}: {error}".split("\n", 1)[0][:LINE_CHARACTERS]
    return ""
