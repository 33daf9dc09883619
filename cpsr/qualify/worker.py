"""One rank of `cpsr qualify`: carries out the checks one after the other, and after a restart those that are left.

Rank 0 decides where a life begins, from what all ranks have recorded. A rank whose check fails together with all others
goes on; one that the others do not meet ends, so that the launcher restarts all.
"""

import argparse
import faulthandler
import gc
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from cpsr.demo.device import CPU, CUDA, join_ranks
from cpsr.qualify.environment import kernel_problem, no_kernel, own_process_globals
from cpsr.qualify.records import Records, clear, folder_name, read_records, release_memory
from cpsr.qualify.scene import Scene
from cpsr.qualify.trials import NotApplicable, Trial, trials_of, without
from cpsr.ranks.group import Group

__all__ = ["Rank", "leave", "main"]

MEETING_SECONDS = 20.0  # for ranks that have all failed in a check to meet behind it
LIVES = 2  # of a check in which a rank kills itself
TAIL_CHARACTERS = 4000  # of an error, in the records
Plan = tuple[Sequence[Trial], Sequence[NotApplicable]]


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

    Attributes:
        rank: of this process.
    """

    def __init__(self, folder: Path, device: str) -> None:
        torch.set_num_threads(1)
        if device == CUDA:
            _compute_exactly()
        join_ranks()
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
        self._folder, self._group = folder, Group()
        self._write: Callable[[], object] = lambda: None

    def run(self, plan: Callable[[int, bool, bool], Plan], write: Callable[[], object] = lambda: None) -> None:
        """Carry out what is left of the checks.

        Args:
            plan: gives them, and what does not apply, by the number of ranks, whether stages of a pipeline can send to
                each other, and whether a launcher restarts the job.
            write: writes the records of all ranks for people; called on rank 0 where a check begins, and on every rank
                before it ends itself: the launcher may end rank 0 before it can.
        """
        self._write = write
        if self.rank == 0 and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
            clear(self._folder)
        self._group.barrier()
        can_send = self._device.type == CPU or dist.get_backend() != "gloo"
        trials, empty = plan(self._ranks, can_send, os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0")
        records = Records(self._folder, self.rank)
        for kernel in sorted({trial.cell.kernel for trial in trials} - {""}):
            found = kernel_problem(kernel, self._folder, records) if self.rank == 0 else None
            trials, empty = without(trials, empty, partial(no_kernel, kernel, self._group.broadcast(found)))
        if int(os.environ.get("LOCAL_RANK", "0")) == 0:
            release_memory(self._folder, spared=self._in_progress())
        first = self._group.broadcast(self._first(trials, empty, records) if self.rank == 0 else None)
        for trial in trials[first:]:
            self._carry_out(trial, records)
        self._group.barrier()
        if self.rank == 0:
            records.add("finished")

    def agree_on(self, status: int) -> int:
        """The largest exit status of all ranks, on every rank."""
        return int(self._group.reduce(torch.tensor([status]), "max").item())

    def _first(self, trials: Sequence[Trial], empty: Sequence[NotApplicable], records: Records) -> int:
        """Index of the check that this life begins with (rank 0); records what the life before did not survive."""
        lines = read_records(self._folder)
        if not any(line["event"] == "planned" for line in lines):
            records.add("planned", **_described(trials, empty, self._device))
        for index, trial in enumerate(trials):
            mine = [line for line in lines if line.get("trial") == trial.name]
            began = [line for line in mine if line["event"] == "began"]
            ended = [line for line in mine if line["event"] == "ended"]
            if len({line["rank"] for line in ended}) == self._ranks or any(line["error"] for line in ended):
                continue
            lives = max((sum(line["rank"] == rank for line in began) for rank in range(self._ranks)), default=0)
            if not began or (self._scene(trial).killed and lives < LIVES):
                return index
            missing = sorted(set(range(self._ranks)) - {line["rank"] for line in ended})
            seconds = time.time() - max(line["unix_seconds"] for line in began)
            limit = trial.check.deadline_seconds
            how = f"hung for {limit:g} s" if seconds >= limit else f"ended after at most {seconds:.0f} s"
            records.ended(trial.name, f"rank {', '.join(map(str, missing))} {how} in this check", seconds, {})
        return len(trials)

    def _in_progress(self) -> set[str]:
        """Names of the folders of checks that have begun, and not ended."""
        begun: dict[str, int] = {}
        for line in read_records(self._folder):
            if line["event"] in ("began", "ended"):
                begun[folder_name(line["trial"])] = line["event"] == "began"
        return {slug for slug, running in begun.items() if running}

    def _scene(self, trial: Trial) -> Scene:
        folder = self._folder / folder_name(trial.name)
        return Scene(self._device, self.rank, self._ranks, self._local_ranks, folder)

    def _carry_out(self, trial: Trial, records: Records) -> None:
        scene = self._scene(trial)
        scene.folder.mkdir(parents=True, exist_ok=True)
        if self.rank == 0:
            print(f"[qualify] {trial.name}", file=sys.stderr, flush=True)  # noqa: T201 - the log is read by people
        records.began(trial.name)
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
            if left and _first_life(self._folder, trial):
                leave(1)
            error = traceback.format_exc()
            sys.stderr.write(error)
        except BaseException:  # the rank was asked to leave, by Ctrl-C or the launcher
            if not (trial.check.kills and scene.killed):
                release_memory(self._folder)
            raise
        finally:
            faulthandler.cancel_dump_traceback_later()
        records.ended(trial.name, error[-TAIL_CHARACTERS:], time.perf_counter() - started, figures)
        if not trial.cell.alone and not self._met():
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


def _first_life(folder: Path, trial: Trial) -> bool:
    began: dict[int, int] = {}
    for line in read_records(folder):
        if line["event"] == "began" and line["trial"] == trial.name:
            began[line["rank"]] = began.get(line["rank"], 0) + 1
    return max(began.values()) < LIVES


def _compute_exactly() -> None:
    """Let the GPU give the same results twice, bit for bit."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS may add in another order
    torch.use_deterministic_algorithms(True, warn_only=True)
    # DeepSpeed's buffers are large. mypy does not see this property of a module.
    setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # noqa: B010
    torch.backends.cudnn.benchmark = False


def _described(trials: Sequence[Trial], empty: Sequence[NotApplicable], device: torch.device) -> dict[str, Any]:
    def plain(trial: Trial) -> dict[str, Any]:
        return {"trial": trial.name, "cell": vars(trial.cell), "check": trial.check.name}

    return {
        "trials": [plain(one) for one in trials],
        "not_applicable": [plain(one.trial) | {"reason": one.reason} for one in empty],
        "ranks": dist.get_world_size(),
        "backend": dist.get_backend(),
        "device": device.type,
    }


if __name__ == "__main__":
    main()
