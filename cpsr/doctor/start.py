"""The checks of a job's start: what is cheap, and what nothing else of the start finds out.

The start itself compares the memory and the disk with what the job takes (`cpsr.checkpoint.resources`), whether its
buffers are shared memory (`cpsr.peers`), whether all ranks see the run directory (`cpsr.checkpoint.run_directory`), and
whether torchrun can start the ranks again (`cpsr.ranks.link`).
"""

import logging
from collections.abc import Iterator

from cpsr.doctor.directory import check_file_system, check_files_left
from cpsr.doctor.finding import Finding
from cpsr.doctor.limits import check_locked_memory, check_open_files
from cpsr.doctor.needs import Launched, Needs
from cpsr.doctor.shared_memory import check_lifetime, check_memory_kind
from cpsr.job import Job

__all__ = ["EVENT", "report_machine"]

logger = logging.getLogger(__name__)

EVENT = "machine"  # kind of the journal's events
_LOG_LEVELS = {"warning": logging.WARNING, "error": logging.ERROR}


def report_machine(job: Job) -> None:
    """Report what is wrong with this machine, and of rank 0 with the run directory: one line and one event each.

    The first rank of a machine looks; nothing is written, and no other rank is waited for.
    """
    if job.group.rank != job.run.local_ranks[0]:
        return
    try:
        findings = [one for one in _findings(job) if one.level != "ok"]
    except OSError as error:
        logger.warning("this machine could not be looked at (%s); training begins, `cpsr doctor` looks again", error)
        return
    for one in findings:
        job.journal.event(EVENT, f"{one.subject}: {one.sentence}", level=_LOG_LEVELS[one.level])


def _findings(job: Job) -> Iterator[Finding]:
    needs = Needs(job.config, Launched(job.group.size, len(job.run.local_ranks)))
    yield check_open_files(needs)
    yield check_locked_memory()
    if job.config.checkpoint.shared_memory:
        yield check_memory_kind()
        yield check_lifetime()
    if job.group.rank == 0:
        yield check_file_system(job.config.run_dir)
        yield check_files_left(needs)
