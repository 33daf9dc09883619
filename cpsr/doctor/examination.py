"""All checks of `cpsr doctor` in their order: of each machine, of the disk, and of the job."""

import os
import platform
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from cpsr.doctor.devices import Devices, check_devices, find_devices
from cpsr.doctor.directory import check_file_system, check_files_left, check_space
from cpsr.doctor.disk import (
    check_bandwidth,
    check_direct,
    check_durable,
    check_journal,
    check_operations,
    scratch_folder,
)
from cpsr.doctor.finding import FULL, Finding, failed, ok, warning
from cpsr.doctor.launcher import check_cluster, check_elastic, check_grace, check_launcher
from cpsr.doctor.limits import check_locked_memory, check_open_files
from cpsr.doctor.meeting import Meeting
from cpsr.doctor.needs import Launched, Needs
from cpsr.doctor.packages import check_packages, check_python, installed_versions
from cpsr.doctor.ports import check_address, check_rendezvous, check_service_port
from cpsr.doctor.shared_memory import check_host_memory, check_lifetime, check_memory_kind, check_shared_memory
from cpsr.doctor.together import check_clocks, check_locks, check_shared, check_versions, clock_rounds
from cpsr.ranks.group import this_node

__all__ = ["Examination"]


class Examination:
    """One rank's part of the checks, which all ranks run together.

    Args:
        group: the ranks, or this process alone.
        needs: the job; without ranks of its own where this process is alone.
        has_run_dir: whether its run directory was given.

    Attributes:
        findings: of this rank, in the order of the checks.
    """

    def __init__(self, group: Meeting, needs: Needs, *, has_run_dir: bool) -> None:
        self._group = group
        nodes = group.gather(this_node())
        if group.size > 1:
            launched = Launched(group.size, nodes.count(this_node()), len(set(nodes)))
            needs = replace(needs, launched=launched)
        self._needs, self._has_run_dir = needs, has_run_dir
        self._first_on_machine = group.rank == nodes.index(this_node())
        self._commit_seconds: float | None = None
        self.findings: list[Finding] = []

    def run(self) -> list[Finding]:
        """All checks; a collective. Returns the findings of all ranks, on every rank."""
        self._group.doing("its GPUs")
        devices = find_devices()
        seen = self._group.gather([this_node(), devices["uuids"]])  # a launcher may give each rank a GPU of its own
        here = {uuid for node, uuids in seen if node == this_node() for uuid in uuids}
        self._group.doing("its memory and limits")
        if self._first_on_machine:
            self._of_machine(self._machine_checks(devices, len(here)))
        if self._has_run_dir:
            self._try_directory()
        elif self._group.rank == 0:
            advice = "give --config or --run-dir, and its disk is checked"
            self.findings.append(warning("run directory", "none is given", advice))
        self._check_job()
        parts = self._group.gather([one.to_json() for one in self.findings])
        return [Finding.from_json(one) for part in parts for one in part]

    def _of_machine(self, found: Iterator[Finding]) -> None:
        self.findings += [replace(one, machine=this_node()) for one in found]

    def _machine_checks(self, devices: Devices, gpus: int) -> Iterator[Finding]:
        needs = self._needs
        yield check_python()
        yield check_packages()
        yield check_devices(devices, needs.launched, gpus)
        yield check_host_memory(needs)
        yield check_shared_memory(needs)
        yield check_memory_kind()
        yield check_lifetime()
        yield check_open_files(needs)
        yield check_locked_memory()
        yield check_address()

    def _try_directory(self) -> None:
        """The run directory: from all ranks together, and its disk from each machine."""
        needs, group = self._needs, self._group
        group.doing("the run directory")
        name = group.broadcast(uuid.uuid4().hex[:12])
        with ExitStack() as opened:
            folder = None
            try:
                made = opened.enter_context(scratch_folder(needs.run_dir, name))
                (made / f"rank-{group.rank}").mkdir()
                folder = made
            except OSError as problem:
                found = failed("run directory", "cannot be written in", problem, rank=group.rank)
                self._of_machine(iter([found]))
            if group.size > 1:
                self._check_shared(folder)
            elif folder is not None:
                self.findings.append(
                    ok("run directory", f"{needs.run_dir} can be written in, seen from this process alone")
                )
            group.doing("the disk of the run directory")
            if folder is not None and self._first_on_machine:
                self._of_machine(self._disk_checks(folder / f"rank-{group.rank}"))
            group.barrier()  # the folder is removed once nobody needs it
            group.doing("the removal of its scratch folder")
        if group.rank == 0 and folder is not None:
            self._try("disk space", lambda: check_space(needs))
            self._try("inodes", lambda: check_files_left(needs))

    def _check_shared(self, folder: Path | None) -> None:
        shared = check_shared(self._group, folder, self._needs.run_dir)
        found = [shared]
        if shared.level == "ok":
            assert folder is not None
            found.append(check_locks(self._group, folder))
        if self._group.rank == 0:
            self.findings += found

    def _disk_checks(self, folder: Path) -> Iterator[Finding]:
        yield check_file_system(self._needs.run_dir)
        checks: dict[str, Callable[[Path], Finding]] = {
            "operations": check_operations,
            "direct I/O": check_direct,
            "fsync": check_durable,
            "bandwidth": self._bandwidth,
            "journal": check_journal,
        }
        for subject, check in checks.items():
            try:
                yield check(folder)
            except OSError as problem:  # of a file system that fails meanwhile
                yield failed(subject, "the file system failed", problem)
                if problem.errno in FULL:  # the others would say the same
                    return

    def _bandwidth(self, folder: Path) -> Finding:
        found = check_bandwidth(folder, self._needs)
        self._commit_seconds = found.figures["commit_seconds"]
        return found

    def _check_job(self) -> None:
        needs, group = self._needs, self._group
        group.doing("packages and clocks")
        found: list[Finding | None] = []
        if group.size > 1:
            versions = {"python": platform.python_version(), **installed_versions()}
            found += [check_versions(group.gather(versions)), check_clocks(clock_rounds(group))]
        if group.rank != 0:
            return
        found += [
            check_launcher(needs.launched),
            check_elastic(needs),
            check_grace(self._commit_seconds),
            check_cluster(self._commit_seconds),
            check_service_port(needs.config.service),
            check_rendezvous() if "RANK" not in os.environ else None,  # a launcher holds it itself,
        ]
        self.findings += [one for one in found if one is not None]

    def _try(self, subject: str, check: Callable[[], Finding]) -> None:
        try:
            self.findings.append(check())
        except OSError as problem:
            self.findings.append(failed(subject, "the file system failed", problem))
