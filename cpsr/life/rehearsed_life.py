"""A life that `cpsr rehearse` watches: it trains in another run directory, for a few steps, and may be cut short.

The command describes the life in one variable of the environment, and the ranks leave their records in its folder::

    <folder>/run                        the run directory
    <folder>/cut-0                      rank 0 has been cut short, once
    <folder>/loop-0-1.jsonl             rank 0, life 1: fingerprints of what the loop keeps, one line for each step
    <folder>/end-0.json                 how the last life of rank 0 ended
"""

import json
import os
import signal
from dataclasses import asdict, dataclass
from pathlib import Path

from cpsr.config import CPSRConfig
from cpsr.job import Job

__all__ = ["REHEARSED", "Cut", "Rehearsed", "RehearsedJob", "rehearsed", "rehearsed_config"]

REHEARSED = "CPSR_REHEARSE"


@dataclass(frozen=True)
class Cut:
    """When a life is cut short.

    Attributes:
        signal: name of the signal that each cut rank sends to itself.
        iteration: the finished one after which it does.
        rank: which rank; None: each one.
    """

    signal: str
    iteration: int
    rank: int | None = None


@dataclass(frozen=True)
class RehearsedJob:
    """One job of a rehearsal, as its ranks find it in the environment.

    Attributes:
        folder: holds the run directory and what the ranks record.
        last_iteration: after which all ranks commit and leave.
        interval_iterations: between checkpoints.
        cut: None: the job is left alone.
    """

    folder: str
    last_iteration: int
    interval_iterations: int
    cut: Cut | None = None

    def to_variable(self) -> str:
        """As the variable `REHEARSED` has it."""
        return json.dumps(asdict(self))

    @staticmethod
    def of_variable(value: str) -> "RehearsedJob":
        """Back from `to_variable`."""
        fields = json.loads(value)
        cut = fields.pop("cut")
        return RehearsedJob(**fields, cut=None if cut is None else Cut(**cut))


class Rehearsed:
    """Follows one life on one rank, records what the loop keeps, and cuts the life short."""

    def __init__(self, asked: RehearsedJob, job: Job) -> None:
        self._asked, self._job = asked, job
        self._iteration = 0
        self._folder, self._rank = Path(asked.folder), job.group.rank
        self._log = self._folder / f"loop-{self._rank}-{job.journal.life}.jsonl"

    def after_step(self, iteration: int) -> bool:
        """A step is complete; returns whether it was the last one, alike on all ranks."""
        self._iteration = iteration
        from cpsr.life.loop_variables import fingerprints  # no other job needs it

        adapter = self._job.adapter
        values = fingerprints([adapter.module, *adapter.optimizers, *adapter.loop_parts])
        line = {"iteration": iteration, "values": values}
        with self._log.open("a", encoding="utf-8") as log:
            log.write(json.dumps(line) + "\n")
        self._cut()
        return iteration >= self._asked.last_iteration

    def close(self) -> None:
        """The life ends, and not by SIGKILL."""
        end = {"iteration": self._iteration, "ranks": self._job.group.size, "life": self._job.journal.life}
        (self._folder / f"end-{self._rank}.json").write_text(json.dumps(end), encoding="utf-8")

    def _cut(self) -> None:
        cut = self._asked.cut
        if cut is None or cut.iteration != self._iteration:
            return
        done = self._folder / f"cut-{self._rank}"
        if cut.rank in (None, self._rank) and not done.exists():
            done.touch()
            os.kill(os.getpid(), signal.Signals[cut.signal])


def rehearsed() -> RehearsedJob | None:
    """What `cpsr rehearse` asks of this process; None if it did not start it."""
    value = os.environ.get(REHEARSED)
    return None if value is None else RehearsedJob.of_variable(value)


def rehearsed_config(config: CPSRConfig) -> CPSRConfig:
    """The configuration of a rehearsed job: that of the user, exact, in another run directory, and by itself."""
    job = rehearsed()
    if job is None:
        return config
    every = job.interval_iterations
    return config.model_copy(
        update={
            "run_dir": Path(job.folder) / "run",
            "mode": "exact",
            "checkpoint": config.checkpoint.model_copy(update={"interval_iterations": every, "target": None}),
            "memory": config.memory.model_copy(update={"interval_iterations": every}),
            "restart": config.restart.model_copy(update={"on_difference": "warn"}),  # the command compares
            "service": config.service.model_copy(update={"enabled": False}),
        }
    )
