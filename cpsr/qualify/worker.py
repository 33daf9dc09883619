"""One rank of `cpsr qualify`: carries out the checks one after the other, and after a restart those that are left.

Rank 0 decides where a life begins, from what all ranks have recorded. A rank whose check fails together with all others
goes on; one that the others do not meet ends, so that the launcher restarts all.
"""

import argparse
import faulthandler
import gc
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from cpsr.demo.device import CPU, CUDA, join_ranks
from cpsr.qualify.checks import Trial, trials_of
from cpsr.qualify.result import Records, clear, folder_name, read_records, release_memory
from cpsr.qualify.scene import Scene
from cpsr.ranks.group import Group

__all__ = ["Rank", "leave", "main", "own_process_globals"]

MEETING_SECONDS = 20.0  # for ranks that have all failed in a check to meet behind it
LIVES = 2  # of a check in which a rank kills itself
TAIL_CHARACTERS = 4000  # of an error, in the records
LINE_CHARACTERS = 300  # of why a kernel cannot be compiled; the rest is in the log
BUILD_SECONDS = 300.0  # of a kernel that takes one minute
# What an engine leaves behind in its process. After one with `torch_autocast` all later ones reduce gradients as it
# did, and get a gradient scaler. After one of ZeRO-3 torch's `linear` is another function, and what counts parameters
# that are kept whole goes on counting. After one with `zero_hpz_partition_size` those of ZeRO-3 keep second copies,
# too. A pipeline leaves its stages, and layers of experts their groups, which another would take for its own.
_GLOBALS = {
    "deepspeed.runtime.torch_autocast": ("TORCH_AUTOCAST_INITIALIZED", "TORCH_AUTOCAST_DTYPE"),
    "deepspeed.runtime.zero.partition_parameters": ("zero_init_context",),
    "deepspeed.runtime.zero.partition_parameters:Init": (
        "apply_param_persistence",
        "num_persisted_parameters",
        "num_persisted_elements",
    ),
    "deepspeed.runtime.zero.parameter_offload": ("FWD_MODULE_STACK",),
    "deepspeed.utils.groups": (
        "mpu",
        "_ZERO_PARAM_INTRA_PARALLEL_GROUP",
        "_EXPERT_PARALLEL_GROUP",
        "_EXPERT_PARALLEL_GROUP_RANKS",
        "_EXPERT_DATA_PARALLEL_GROUP",
        "_EXPERT_DATA_PARALLEL_GROUP_RANKS",
    ),
    "deepspeed.utils.nvtx": ("enable_nvtx",),
    "torch.nn.functional": ("linear",),
}


@contextmanager
def own_process_globals() -> Iterator[None]:
    """On exit DeepSpeed's globals and torch's `linear` are as before, and torch.compile has kept nothing."""
    kept = [(holder, name, _copied(getattr(holder, name))) for holder, name in _globals()]
    try:
        yield
    finally:
        for holder, name, value in kept:
            setattr(holder, name, value)
        if "torch._dynamo" in sys.modules:
            torch.compiler.reset()


def _globals() -> Iterator[tuple[Any, str]]:
    for place, names in _GLOBALS.items():
        module, _, inside = place.partition(":")
        holder = sys.modules.get(module)
        if holder is not None and inside:
            holder = getattr(holder, inside)
        yield from ((holder, name) for name in names if hasattr(holder, name))


def _copied(value: Any) -> Any:
    return value.copy() if isinstance(value, list | dict) else value


def main(arguments: Sequence[str] | None = None) -> None:
    """A rank that `cpsr qualify` has started: carries out the checks in the folder that the arguments name."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", required=True)
    parser.add_argument("--only", default="")
    parsed = parser.parse_args(arguments)
    Rank(parsed.folder, parsed.device).run(partial(trials_of, parsed.device, parsed.only))
    leave(0)


def leave(status: int) -> NoReturn:
    """End this process at once: the destructors of DeepSpeed and gloo are not what is checked."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


class Rank:
    """One rank, joined with the others.

    Args:
        folder: the work folder, on a disk that all ranks see.
        device: `cpu` or `cuda`.
        init_method: where the ranks meet.

    Attributes:
        rank: of this process.
    """

    def __init__(self, folder: Path, device: str, init_method: str = "env://") -> None:
        torch.set_num_threads(1)
        if device == CUDA:
            _compute_exactly()
        join_ranks(init_method)
        from deepspeed.accelerator import get_accelerator

        if device == CPU:
            # DeepSpeed asks for fast fp16 instructions; torch computes fp16 correctly without them, only slower.
            get_accelerator().is_fp16_supported = lambda: True
        self.rank, self._ranks = dist.get_rank(), dist.get_world_size()
        self._local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", self._ranks))
        self._device = torch.device(device)
        if device == CUDA:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
            self._device = torch.device(CUDA, torch.cuda.current_device())
        self._folder, self._group, self._records = folder, Group(), Records(folder, self.rank)
        self._write: Callable[[], object] = lambda: None

    def run(self, plan: Callable[[int, bool, bool], list[Trial]], write: Callable[[], object] = lambda: None) -> None:
        """Carry out what is left of the checks.

        Args:
            plan: gives all places of the table, by the number of ranks, whether stages of a pipeline can send to each
                other, and whether a launcher restarts the job.
            write: writes the records of all ranks for people; called on rank 0 where a check begins, and on every rank
                before it ends itself: the launcher may end rank 0 before it can.
        """
        self._write = write
        if self.rank == 0 and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
            clear(self._folder)
        self._group.barrier()
        can_send = self._device.type == CPU or dist.get_backend() != "gloo"
        places = plan(self._ranks, can_send, os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0")
        for kernel in sorted({place.cell.kernel for place in places if not place.reason} - {""}):
            found = kernel_problem(kernel, self._folder, self._records) if self.rank == 0 else None
            if problem := self._group.broadcast(found):
                places = without_kernel(kernel, problem, places)
        if int(os.environ.get("LOCAL_RANK", "0")) == 0:
            release_memory(self._folder, spared=self._in_progress())
        trials = [place for place in places if not place.reason]
        first = self._group.broadcast(self._first(places, trials) if self.rank == 0 else None)
        for trial in trials[first:]:
            self._carry_out(trial)
        self._group.barrier()
        if self.rank == 0:
            self._records.add("finished")

    def agree_on(self, status: int) -> int:
        """The largest exit status of all ranks, on every rank."""
        return int(self._group.reduce(torch.tensor([status]), "max").item())

    def _first(self, places: Sequence[Trial], trials: Sequence[Trial]) -> int:
        """Index of the check that this life begins with (rank 0); records what the life before did not survive."""
        lines = read_records(self._folder)
        if not any(line["event"] == "planned" for line in lines):
            planned = [
                {"trial": one.name, "cell": vars(one.cell), "check": one.check.name, "reason": one.reason}
                for one in places
            ]
            backend = dist.get_backend()
            self._records.add("planned", trials=planned, ranks=self._ranks, backend=backend, device=self._device.type)
        for index, trial in enumerate(trials):
            mine = [line for line in lines if line.get("trial") == trial.name]
            began = [line for line in mine if line["event"] == "began"]
            ended = [line for line in mine if line["event"] == "ended"]
            if len({line["rank"] for line in ended}) == self._ranks or any(line["error"] for line in ended):
                continue
            if not began or (self._scene(trial).killed and self._lives(trial) < LIVES):
                return index
            missing = sorted(set(range(self._ranks)) - {line["rank"] for line in ended})
            seconds = time.time() - max(line["unix_seconds"] for line in began)
            limit = trial.check.deadline_seconds
            how = f"hung for {limit:g} s" if seconds >= limit else f"ended after at most {seconds:.0f} s"
            self._records.ended(trial.name, f"rank {', '.join(map(str, missing))} {how} in this check", seconds, {})
        return len(trials)

    def _lives(self, trial: Trial) -> int:
        """How often any rank has begun a check."""
        lines = read_records(self._folder)
        began = [line["rank"] for line in lines if line["event"] == "began" and line["trial"] == trial.name]
        return max((began.count(rank) for rank in began), default=0)

    def _in_progress(self) -> set[str]:
        """Names of the folders of checks that have begun, and not ended."""
        begun: dict[str, bool] = {}
        for line in read_records(self._folder):
            if line["event"] in ("began", "ended"):
                begun[folder_name(line["trial"])] = line["event"] == "began"
        return {name for name, running in begun.items() if running}

    def _scene(self, trial: Trial) -> Scene:
        folder = self._folder / folder_name(trial.name)
        return Scene(self._device, self.rank, self._ranks, self._local_ranks, folder)

    def _carry_out(self, trial: Trial) -> None:
        scene = self._scene(trial)
        scene.folder.mkdir(parents=True, exist_ok=True)
        if self.rank == 0:
            print(f"[qualify] {trial.name}", file=sys.stderr, flush=True)  # noqa: T201 - the log is read by people
        self._records.began(trial.name)
        if self.rank == 0:
            self._write()
        faulthandler.dump_traceback_later(trial.check.deadline_seconds, exit=True)
        started, error, figures = time.perf_counter(), "", {}
        try:
            with own_process_globals():
                figures = dict(trial.check.run(trial.cell, scene))
        except Exception as failure:  # noqa: BLE001 - the traceback is the result
            # Where a rank has killed itself, the others raise what they get; what a check asserts is a finding.
            left = trial.check.kills and scene.killed and not isinstance(failure, AssertionError)
            if left and self._lives(trial) < LIVES:
                leave(1)
            error = traceback.format_exc()
            sys.stderr.write(error)
        except BaseException:  # the rank was asked to leave, by Ctrl-C or the launcher
            if not (trial.check.kills and scene.killed):
                release_memory(self._folder)
            raise
        finally:
            faulthandler.cancel_dump_traceback_later()
        self._records.ended(trial.name, error[-TAIL_CHARACTERS:], time.perf_counter() - started, figures)
        if not trial.cell.is_alone and not self._met():
            self._write()
            leave(1)  # the launcher restarts all ranks
        gc.collect()

    def _met(self) -> bool:
        """Whether all ranks are here, so that the groups are intact whatever has failed."""
        try:
            self._group.reduce(torch.zeros(1), timeout_seconds=MEETING_SECONDS)
        except RuntimeError:
            return False
        return True


def _compute_exactly() -> None:
    """Let the GPU give the same results twice, bit for bit."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS may add in another order
    torch.use_deterministic_algorithms(True, warn_only=True)
    # DeepSpeed's buffers are large. mypy does not see this property of a module.
    setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # noqa: B010
    torch.backends.cudnn.benchmark = False


def without_kernel(kernel: str, problem: str, places: Sequence[Trial]) -> list[Trial]:
    """The places of the table where this kernel cannot be compiled."""
    reason = f"no {kernel} here: {problem}"
    return [place if place.reason or place.cell.kernel != kernel else replace(place, reason=reason) for place in places]


def kernel_problem(kernel: str, folder: Path, records: Records) -> str:
    """Why a kernel cannot be used; empty if it can. Tried once, and recorded for the lives that follow.

    Args:
        kernel: of `FusedAdam` or `DeepSpeedCPUAdam`.
        folder: the work folder.
        records: of this rank.
    """
    for line in read_records(folder):
        if line["event"] == "probed" and line["kernel"] == kernel:
            return str(line["problem"])
    outcomes: list[str] = []
    # In a thread that may outlive the limit: a compiler that is killed leaves a lock, for which every later one waits.
    thread = threading.Thread(target=lambda: outcomes.append(_build(kernel)), name="cpsr-build", daemon=True)
    thread.start()
    thread.join(BUILD_SECONDS)
    problem = outcomes[0] if outcomes else f"it was not compiled within {BUILD_SECONDS:g} s"
    records.add("probed", kernel=kernel, problem=problem)
    return problem


def _build(kernel: str) -> str:
    from deepspeed.ops.op_builder import CPUAdamBuilder, FusedAdamBuilder

    try:
        (FusedAdamBuilder if kernel == "FusedAdam" else CPUAdamBuilder)().load()
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the reason
        sys.stderr.write(traceback.format_exc())
        return f"{type(error).__name__}: {error}".split("\n", 1)[0][:LINE_CHARACTERS]
    return ""


if __name__ == "__main__":
    main()
