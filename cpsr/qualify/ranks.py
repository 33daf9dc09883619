"""One rank of `cpsr qualify`: carries out the checks one after the other, and after a restart those that are left.

Rank 0 decides where a life begins, from what all ranks have recorded. A rank whose check fails together with all others
goes on; one that the others do not meet ends, so that the launcher restarts all.

The ranks record in the work folder, on a disk that all of them see. Every line of a record is complete once written,
whatever happens to the process.
"""

import faulthandler
import gc
import json
import os
import shutil
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from cpsr.checkpoint.memory_owners import remove_memory_states
from cpsr.checkpoint.run_directory import IDENTITY
from cpsr.demo.device import CPU, CUDA, join_ranks
from cpsr.qualify.cells import Scene
from cpsr.qualify.checks import Trial
from cpsr.ranks.group import Group

__all__ = ["Rank", "leave", "own_process_globals", "read_records", "record", "release_memory"]

MEETING_SECONDS = 20.0  # for ranks that have all failed in a check to meet behind it
LIVES = 2  # of a check in which a rank kills itself
TAIL_CHARACTERS = 4000  # of an error, in the records
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


def record(folder: Path, rank: int, event: str, **fields: Any) -> None:
    """Append one line to the record of a rank, with the time: `planned`, `began` or `ended`, as `event` says."""
    line = json.dumps({"event": event, "rank": rank, "unix_seconds": time.time()} | fields)
    with (folder / f"rank-{rank:05d}.jsonl").open("a", encoding="utf-8") as file:
        file.write(line + "\n")


def read_records(folder: Path) -> list[dict[str, Any]]:
    """All lines of all ranks, by time; a line that is being written is left out."""
    texts = [path.read_text(encoding="utf-8") for path in folder.glob("rank-*.jsonl")]
    found = [json.loads(line) for text in texts for line in text.split("\n")[:-1]]  # the last one may be incomplete
    return sorted(found, key=lambda line: float(line["unix_seconds"]))


def release_memory(folder: Path, spared: Path | None = None) -> None:
    """Free this machine's shared memory of the checks in a work folder, but for the one in that folder of its own."""
    for identity in folder.glob(f"*/run/{IDENTITY}"):
        if identity.parents[1] != spared:
            remove_memory_states(json.loads(identity.read_text(encoding="utf-8"))["run_id"])


def leave(status: int) -> NoReturn:
    """End this process at once: the destructors of DeepSpeed and gloo are not what is checked."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


class Rank:
    """One rank, joined with the others.

    Args:
        folder: the work folder, on a disk that all ranks see; a first life replaces what another call left in it.
        device: `cpu` or `cuda`.
        init_method: where the ranks meet.

    Attributes:
        rank: of this process.
        ranks: their number.
        stages_can_send: whether stages of a pipeline can send to each other.
        group: of all ranks.
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
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self._local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", self.ranks))
        self._device = torch.device(device)
        if device == CUDA:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
            self._device = torch.device(CUDA, torch.cuda.current_device())
        self.stages_can_send = device == CPU or dist.get_backend() != "gloo"
        self._folder, self.group = folder, Group()
        if self.rank == 0 and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
            folder.mkdir(parents=True, exist_ok=True)
            release_memory(folder)
            for path in folder.glob("rank-*.jsonl"):
                path.unlink()
            for path in folder.glob("*--*"):
                shutil.rmtree(path, ignore_errors=True)
        self.group.barrier()

    def run(self, trials: Sequence[Trial], write: Callable[[], object] = lambda: None) -> None:
        """Carry out what is left of the checks.

        Args:
            trials: all of them.
            write: writes the records of all ranks for people; called on rank 0 where a check begins, and on every rank
                before it ends itself: the launcher may end rank 0 before it can.
        """
        first = self.group.broadcast(self._first(trials) if self.rank == 0 else None)
        if int(os.environ.get("LOCAL_RANK", "0")) == 0:
            release_memory(self._folder, self._scene(trials[first]).folder if first < len(trials) else None)
        for trial in trials[first:]:
            self._carry_out(trial, write)
        self.group.barrier()

    def _first(self, trials: Sequence[Trial]) -> int:
        """Index of the check that this life begins with; records what the life before did not survive."""
        lines = read_records(self._folder)
        if not lines:
            names = [[one.cell.name, one.check.name] for one in trials]
            backend = dist.get_backend()
            record(self._folder, self.rank, "planned", trials=names, ranks=self.ranks, backend=backend)
        for index, trial in enumerate(trials):
            mine = [line for line in lines if line.get("trial") == trial.name]
            began = [line for line in mine if line["event"] == "began"]
            ended = [line for line in mine if line["event"] == "ended"]
            if len({line["rank"] for line in ended}) == self.ranks or any(line["error"] for line in ended):
                continue
            if not began or (self._scene(trial).killed and _lives(began) < LIVES):
                return index
            missing = sorted(set(range(self.ranks)) - {line["rank"] for line in ended})
            seconds = time.time() - max(line["unix_seconds"] for line in began)
            limit = trial.check.deadline_seconds
            how = f"hung for {limit:g} s" if seconds >= limit else f"ended after at most {seconds:.0f} s"
            self._ended(trial, f"rank {', '.join(map(str, missing))} {how} in this check")
        return len(trials)

    def _ended(self, trial: Trial, error: str) -> None:
        record(self._folder, self.rank, "ended", trial=trial.name, error=error[-TAIL_CHARACTERS:])

    def _scene(self, trial: Trial) -> Scene:
        folder = self._folder / trial.name.replace(": ", "--").replace(" ", "-")
        return Scene(self._device, self.rank, self.ranks, self._local_ranks, folder)

    def _carry_out(self, trial: Trial, write: Callable[[], object]) -> None:
        scene, error = self._scene(trial), ""
        scene.folder.mkdir(parents=True, exist_ok=True)
        returned = scene.killed
        record(self._folder, self.rank, "began", trial=trial.name)
        if self.rank == 0:
            print(f"[qualify] {trial.name}", file=sys.stderr, flush=True)  # noqa: T201 - the log is read by people
            write()
        faulthandler.dump_traceback_later(trial.check.deadline_seconds, exit=True)
        try:
            with own_process_globals():
                trial.check.run(trial.cell, scene)
        except Exception as failure:  # noqa: BLE001 - the traceback is the result
            # Where a rank has killed itself, the others raise what they get; what a check asserts is a finding.
            if scene.killed and not returned and not isinstance(failure, AssertionError):
                leave(1)
            error = traceback.format_exc()
            sys.stderr.write(error)
        finally:
            faulthandler.cancel_dump_traceback_later()
        self._ended(trial, error)
        if not self._met():
            write()
            leave(1)  # the launcher restarts all ranks
        gc.collect()

    def _met(self) -> bool:
        """Whether all ranks are here, so that the groups are intact whatever has failed."""
        try:
            self.group.reduce(torch.zeros(1), timeout_seconds=MEETING_SECONDS)
        except RuntimeError:
            return False
        return True


def _lives(began: Sequence[dict[str, Any]]) -> int:
    """How often any rank has begun a check."""
    return max(Counter(line["rank"] for line in began).values())


def _compute_exactly() -> None:
    """Let the GPU give the same results twice, bit for bit."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS may add in another order
    torch.use_deterministic_algorithms(True, warn_only=True)
    # DeepSpeed's buffers are large. mypy does not see this property of a module.
    setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # noqa: B010
    torch.backends.cudnn.benchmark = False
