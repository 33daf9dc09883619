"""What a machine and its versions lack for some cells, and what an engine leaves behind in its process."""

import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from cpsr.qualify.cells import Cell
from cpsr.qualify.records import Records, read_records

__all__ = ["kernel_problem", "no_cpu_sharding", "no_kernel", "no_muon", "own_process_globals"]

BUILD_SECONDS = 300.0  # of a build that takes one minute
LINE_CHARACTERS = 300  # of an error; the rest is in the log
# After an engine with `torch_autocast` all later ones reduce gradients as it did, and get a gradient scaler. After one
# of ZeRO-3 torch's `linear` is another function, and what counts parameters that are kept whole goes on counting. After
# one with `zero_hpz_partition_size` those of ZeRO-3 keep second copies, too. A pipeline leaves its stages, and
# layers of experts their groups, which those of another pipeline would take for their own.
_GLOBALS = (
    ("deepspeed.runtime.torch_autocast", "", ("TORCH_AUTOCAST_INITIALIZED", "TORCH_AUTOCAST_DTYPE")),
    ("deepspeed.runtime.zero.partition_parameters", "", ("zero_init_context",)),
    (
        "deepspeed.runtime.zero.partition_parameters",
        "Init",
        ("apply_param_persistence", "num_persisted_parameters", "num_persisted_elements"),
    ),
    ("deepspeed.runtime.zero.parameter_offload", "", ("FWD_MODULE_STACK",)),
    (
        "deepspeed.utils.groups",
        "",
        (
            "mpu",
            "_ZERO_PARAM_INTRA_PARALLEL_GROUP",
            "_EXPERT_PARALLEL_GROUP",
            "_EXPERT_PARALLEL_GROUP_RANKS",
            "_EXPERT_DATA_PARALLEL_GROUP",
            "_EXPERT_DATA_PARALLEL_GROUP_RANKS",
        ),
    ),
    ("deepspeed.utils.nvtx", "", ("enable_nvtx",)),
    ("torch.nn.functional", "", ("linear",)),
)


def no_muon() -> str:
    """Why this torch has no optimizer Muon; empty where it has."""
    return "" if hasattr(torch.optim, "Muon") else f"torch {torch.__version__} has no Muon"


def no_cpu_sharding() -> str:
    """Why this torch cannot train with FSDP2 on a processor; empty where it can.

    Torch 2.6 calls `record_event` on the stream of the device, and its stream of the CPU has none.
    """
    if hasattr(torch.cpu.Stream, "record_event"):
        return ""
    return f"torch {torch.__version__} has no FSDP2 on processors"


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


@contextmanager
def own_process_globals() -> Iterator[None]:
    """On exit DeepSpeed's globals and torch's `linear` are as before, and torch.compile has kept nothing."""
    kept = [(holder, name, _copied(getattr(holder, name))) for holder, name in _held()]
    try:
        yield
    finally:
        for holder, name, value in kept:
            setattr(holder, name, value)
        if "torch._dynamo" in sys.modules:
            torch.compiler.reset()


def _held() -> Iterator[tuple[Any, str]]:
    for module, inside, names in _GLOBALS:
        holder = sys.modules.get(module)
        if holder is not None and inside:
            holder = getattr(holder, inside)
        yield from ((holder, name) for name in names if hasattr(holder, name))


def _copied(value: Any) -> Any:
    return value.copy() if isinstance(value, list | dict) else value
