"""torchrun's agent for recovery: decides when to restart the ranks, and prints one line for each failure."""

import logging
import os
import signal
import time
import uuid
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.rendezvous import dynamic_rendezvous
from torch.distributed.launcher import api

from cpsr.checkpoint.progress import Progress, read_progress
from cpsr.launch.compile_locks import extensions_directory, remove_stale_locks
from cpsr.launch.ends import HOW_IT_ENDS, JobEndedError
from cpsr.launch.spare import Spare, waiting
from cpsr.launch.warm import WarmRanks, forking
from cpsr.ranks.exits import SIGTERM_STATUS, Exit, cause_of, exits_of, first_of, note_exit, ranks_named
from cpsr.ranks.heartbeat import HeartbeatFiles, newest_claim
from cpsr.ranks.link import (
    EXPECTS_ERRORS,
    JOB,
    LEAVES_STATUS,
    REFUSED_STATUS,
    SHUTDOWN,
    SHUTDOWN_SECONDS,
    Opened,
    Report,
    Uncaught,
)

__all__ = ["HOW_IT_ENDS", "Failures", "JobEndedError", "agent_that_recovers", "job_at"]

logger = logging.getLogger(__name__)

BACK_OFF_SECONDS_MAX = 60.0


class Failures:
    """Decides about restarts after failures of a job.

    A failure counts against the restarts only if the job came no further than before. A job that advances in each life
    may fail any number of times; one that fails repeatedly at the same place is given up soon. An error of the script
    that would come again ends the job at once: one before the first run was opened, and one that comes twice without a
    new iteration in between.

    Args:
        report: what the ranks report.
        restarts_max: consecutive failures without a new iteration after which the job is given up.
        print_line: prints one line.

    Attributes:
        print_line: as given.
        job: the launchers that this one has met; see `job_at`.
    """

    def __init__(self, report: Report, restarts_max: int, print_line: Callable[[str], None]) -> None:
        self._report = report
        self._restarts_max = restarts_max
        self.print_line = print_line
        self._opened: Opened | None = None  # the run of the ranks that run now
        self.job = ""
        self._opened_before: Opened | None = None
        self._counted_run = ""
        self._furthest_iteration = -1
        self._in_vain = 0
        self._errors: frozenset[str] = frozenset()  # of the script, that ended the start before

    def after(self, exits: Sequence[Exit]) -> float:
        """Handle the end of ranks on this machine; prints one line.

        Args:
            exits: how they ended.

        Returns:
            Seconds to wait before the job is started again.

        Raises:
            JobEndedError: it is not started again.
        """
        statuses = {one.status for one in exits}
        if not statuses.isdisjoint((REFUSED_STATUS, LEAVES_STATUS)):
            message = "; ".join(self._report.refusals()) or "a rank ended with status 78"
            raise JobEndedError(REFUSED_STATUS, message, alone=REFUSED_STATUS not in statuses)
        if all(_after_sigterm(one) for one in exits) and any(one.status == SIGTERM_STATUS for one in exits):
            raise JobEndedError(SIGTERM_STATUS, "The job left after SIGTERM; start it with the same command to go on")
        self.look()
        self.require_ours()
        progress = None if self._opened is None else _progress_of(self._opened)
        first, own, uncaught = first_of(exits), self._recorded(exits), self._report.uncaught()
        recorded = {one.rank for one in own}
        unrecorded = [Exit(one.rank, error=one.error) for one in uncaught if one.rank not in recorded]
        message = _sentence(cause_of([*first, *own, *unrecorded], None), self._opened, progress)
        in_vain = self._count(-1 if progress is None else progress.iteration)
        why = self._why_it_ends(in_vain, _errors_of(first, recorded, uncaught))
        if why is not None:
            kept = "" if self._opened is None else f"; `cpsr release {self._opened.run_dir}` frees its host memory"
            raise JobEndedError(1, f"{message}. The job is not started again{why}{kept} {HOW_IT_ENDS}")
        if not in_vain:
            self.print_line(f"{message}. All ranks start again")
            return 0.0
        wait_seconds = min(2.0 ** (in_vain - 1), BACK_OFF_SECONDS_MAX)
        counted = f"restart {in_vain} of {self._restarts_max} without a new iteration"
        self.print_line(f"{message}. All ranks start again in {wait_seconds:g} s ({counted})")
        return wait_seconds

    def _why_it_ends(self, in_vain: int, errors: frozenset[str]) -> str | None:
        """Why the job is not started again after a failure; None if it is.

        Args:
            in_vain: consecutive failures without a new iteration, with this one.
            errors: of the script, that ended this start.
        """
        if EXPECTS_ERRORS in os.environ:
            errors = frozenset()
        repeated = in_vain > 0 and bool(errors & self._errors)
        self._errors = errors
        if errors and self._opened is None and self._opened_before is None:
            return ": the error is the script's, and would come again"
        if repeated:
            return ": the same error has come twice without a new iteration in between"
        if in_vain > self._restarts_max or not self._restarts_max:
            after = f", after {in_vain} failures without a new iteration" if in_vain > 1 else ""
            return f"{after} (--max-restarts={self._restarts_max})"
        return None

    def _count(self, iteration: int) -> int:
        """Consecutive failures without a new iteration, including this one at `iteration`."""
        if self._opened is not None and self._opened.run_dir != self._counted_run:  # a script may train several
            self._counted_run, self._furthest_iteration, self._in_vain = self._opened.run_dir, -1, 0
        self._in_vain = 0 if iteration > self._furthest_iteration else self._in_vain + 1
        self._furthest_iteration = max(iteration, self._furthest_iteration)
        return self._in_vain

    def started(self, pids: Mapping[int, int]) -> None:
        """Report which process is which rank, so that a user can inspect one, or kill it to test a recovery."""
        self._opened_before = self._opened or self._opened_before
        self._opened = None
        named = "pid" if len(pids) == 1 else "pids"
        self.print_line(f"Started {ranks_named(pids)} ({named} {', '.join(str(pids[rank]) for rank in sorted(pids))})")

    def require_ours(self) -> None:
        """Check, before ranks start again, that no other job has taken over their run.

        Raises:
            JobEndedError: one has. Two that both start again would end each other's ranks for ever.
        """
        before = self._opened or self._opened_before
        if before is None:
            return
        newest = newest_claim(Path(before.run_dir))
        other = HeartbeatFiles(Path(before.run_dir), newest).job()
        if newest > before.life and other not in ("", self.job):
            raise JobEndedError(
                REFUSED_STATUS,
                f"Another job has begun life {newest} of the run in {before.run_dir}, and goes on with it; this one, "
                f"which had life {before.life}, is not started again. What it has committed stays {HOW_IT_ENDS}",
            )

    def look(self) -> None:
        """Detect which run the ranks have opened, and report how it began; called periodically."""
        self._opened = self._opened or self._report.opened()
        for message in self._report.take_recovered():
            self.print_line(message)

    def recorded_by_all(self) -> list[Exit]:
        """The ends of ranks on all machines that are recorded in the run so far; none before one is opened."""
        return [] if self._opened is None else exits_of(Path(self._opened.run_dir), self._opened.life)

    def _recorded(self, exits: Sequence[Exit]) -> list[Exit]:
        """What the ranks have recorded in their run about their ends; records there what this launcher saw."""
        if self._opened is None:
            return []
        run_dir, life = Path(self._opened.run_dir), self._opened.life
        for one in first_of(exits):
            note_exit(run_dir, life, one)
        here = {one.rank for one in exits}
        return [one for one in exits_of(run_dir, life) if one.rank in here and not one.by_launcher]


class _Agent(LocalElasticAgent):
    """Asks `Failures` before torchrun's agent decides; set by `agent_that_recovers`."""

    failures: Failures
    report: Report
    warm: WarmRanks
    spare: Spare
    _asked_to_leave = False  # by a SIGTERM that arrived while ranks were being stopped

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result: RunResult = super()._monitor_workers(worker_group)
        self.failures.look()
        self.warm.look()
        if worker_group.group_rank == 0:
            self.spare.share()
        if result.state is WorkerState.HEALTHY and (lost := self.spare.lost()) is not None:
            self.report.lose(lost)  # or ranks would wait for those of that machine
            self.failures.print_line(f"Nothing is heard of {lost}. All ranks start again, with a machine that waits")
        if result.state is WorkerState.FAILED:
            exits = [
                Exit.of_status(rank, failure.exitcode, float(failure.timestamp))
                for rank, failure in result.failures.items()
            ]
            try:
                time.sleep(self.failures.after(exits))
            except JobEndedError as ended:
                self.spare.leaves_alone = ended.alone
                raise
            # The decision to restart is made here. The difference of the two numbers counts the starts.
            self._worker_group.spec.max_restarts += 1
            self._remaining_restarts += 1
        return result

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        spec = worker_group.spec
        command = (str(spec.entrypoint), *map(str, spec.args))
        with self.spare.meeting(spec.rdzv_handler, command), _no_spread(spec.rdzv_handler):
            super()._rendezvous(worker_group)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self.report.clear()
        os.environ[JOB] = self.failures.job = job_at(worker_group.store)
        self.failures.require_ours()
        for lock in remove_stale_locks(extensions_directory()):
            self.failures.print_line(f"Removed {lock}, left by a process that was killed while it compiled an operator")
        self.warm.begin_start()
        pids: dict[int, Any] = super()._start_workers(worker_group)
        self.failures.started({worker_group.workers[local].global_rank: pid for local, pid in pids.items()})
        return pids

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        super()._stop_workers(worker_group)
        if self._asked_to_leave:
            raise SignalException("SIGTERM came while the ranks were stopped to start again", signal.SIGTERM)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, *args: Any, **kwargs: Any) -> None:
        # Ranks commit after SIGTERM alone. Before 2.12 torch gives them 30 s; later also where a machine joins.
        given = int(os.environ.get(SHUTDOWN, SHUTDOWN_SECONDS))
        ended = self.failures.recorded_by_all()
        commits = death_sig is signal.SIGTERM and self.report.lost() is None
        commits = commits and not any(one.is_failure for one in ended)
        self._kill({one.given_up for one in ended})
        patience = getattr(self, "_shutdown_timeout", given) if commits else SHUTDOWN_SECONDS
        # The ranks were asked to exit, and the launcher waits for them: a second SIGTERM must not orphan them.
        before = signal.signal(signal.SIGTERM, self._record_sigterm)
        try:
            if self._pcontext is not None:
                self._pcontext.close(death_sig, patience)
            super()._shutdown(death_sig, *args, **kwargs)  # which finds no rank any more
        finally:
            signal.signal(signal.SIGTERM, before)

    def _kill(self, ranks: Container[int | None]) -> None:
        """Kill ranks of this machine that the others have given up: one that hangs does not leave after SIGTERM."""
        for worker in self._worker_group.workers:
            if worker.global_rank in ranks:
                with suppress(ProcessLookupError):
                    os.kill(int(worker.id), signal.SIGKILL)

    def _record_sigterm(self, number: int, frame: FrameType | None) -> None:
        self._asked_to_leave = True


@contextmanager
def _no_spread(handler: object) -> Iterator[None]:
    """Within this context a node without others does not spread its requests over 0.3 s, as torch has it do."""
    names = vars(dynamic_rendezvous)
    before = names.get("_delay")
    alone = getattr(getattr(handler, "settings", None), "max_nodes", None) == 1
    if before is None or not alone:
        yield
        return
    names["_delay"] = lambda seconds: None if isinstance(seconds, tuple) else before(seconds)
    try:
        yield
    finally:
        names["_delay"] = before


@contextmanager
def agent_that_recovers(failures: Failures, report: Report, warm: WarmRanks, spare: Spare) -> Iterator[None]:
    """Within this context torchrun's launcher constructs our agent: it has no argument for that."""
    names = vars(api)
    before = names["LocalElasticAgent"]
    parts = {"failures": failures, "report": report, "warm": warm, "spare": spare}
    names["LocalElasticAgent"] = type("RecoveringAgent", (_Agent,), parts)
    try:
        with forking(warm), waiting(spare):
            yield
    finally:
        names["LocalElasticAgent"] = before


def job_at(store: Any) -> str:
    """The name of the launchers that meet at a store: new with each store, and the same in all of its rounds."""
    store = getattr(store, "underlying_store", store)  # without the prefix of a round
    return str(store.compare_set(JOB, "", uuid.uuid4().hex).decode())


def _progress_of(opened: Opened) -> Progress | None:
    """The ranks' progress; None where it cannot be read: the failure then counts as one without progress."""
    try:
        return read_progress(Path(opened.run_dir), opened.ranks)
    except OSError as error:
        logger.warning("how far the run in %s came cannot be read: %s", opened.run_dir, error)
        return None


def _errors_of(first: Sequence[Exit], recorded: Container[int], uncaught: Sequence[Uncaught]) -> frozenset[str]:
    """What identifies the errors of the script; none if a rank was killed, or only lost another one.

    Args:
        first: the ranks that ended by themselves. One without a report, after `sys.exit`, is identified by its status.
        recorded: ranks that have recorded in their run why they ended.
        uncaught: the exceptions that ended ranks.
    """
    lost_another = (None, "SIGTERM", "SIGABRT")  # a rank that waits for a failed one aborts
    if any(one.signal not in lost_another for one in first):
        return frozenset()
    reported = {one.rank for one in uncaught}
    silent = [one for one in first if one.status and one.rank not in reported and one.rank not in recorded]
    return frozenset([one.identity for one in uncaught if not one.passing] + [f"status {one.status}" for one in silent])


def _after_sigterm(one: Exit) -> bool:
    return one.status == SIGTERM_STATUS or one.signal == "SIGTERM"


def _sentence(cause: str, opened: Opened | None, progress: Progress | None) -> str:
    if opened is None:
        where = "before a run was opened"
    elif progress is None:
        where = "before the first iteration"
    else:
        where = f"after iteration {progress.iteration}"
    return f"{cause[0].upper()}{cause[1:]} {where}"
