"""Warm ranks: at a restart the ranks are forks of a process that has imported what the ranks before had imported."""

import json
import math
import os
import select
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from torch.distributed.elastic.multiprocessing import api
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from cpsr.launch.warm_process import PR_SET_CHILD_SUBREAPER, WARM, prctl
from cpsr.ranks.link import LAUNCHER, Report

__all__ = ["ForkedRank", "WarmRanks", "forking"]

PATIENCE_SECONDS = 30.0  # with a process that has nothing else to do
_FRESH = "Restarts of this job import everything again"
INHERITED = ("Umask", "SigIgn", "SigBlk", "Cpus_allowed", "NoNewPrivs")  # by ranks; of /proc/self/status


class ForkedRank:
    """A child of the launcher that it has not started itself; waited for as for a `subprocess.Popen`.

    Attributes:
        pid: of the rank.
        returncode: its exit status; negative after a signal; None while it runs.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit status; None while it runs."""
        if self.returncode is None:
            try:
                ended, status = os.waitpid(self.pid, os.WNOHANG)
                self.returncode = os.waitstatus_to_exitcode(status) if ended else None
            except ChildProcessError:  # its status is lost: somebody else has waited for it
                self.returncode = 1
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end.

        Args:
            timeout: seconds.

        Raises:
            subprocess.TimeoutExpired: it still runs.
        """
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() >= deadline:
                raise subprocess.TimeoutExpired(f"rank with pid {self.pid}", timeout or 0.0)
            time.sleep(0.02)
        return status


class WarmRanks:
    """The warm process of this machine; without one that can be used, ranks start fresh.

    Args:
        report: what the ranks report.
        print_line: prints one line.
        print_detail: prints one line for people who look into it.
        is_on: whether there may be one.

    Attributes:
        needs: what the process of any machine of the job needs: variables and imports of a rank; None until known.
    """

    def __init__(
        self,
        report: Report,
        print_line: Callable[[str], None],
        print_detail: Callable[[str], None],
        is_on: bool = True,
    ) -> None:
        self._report = report
        self._print_line, self._print_detail = print_line, print_detail
        self._command: tuple[str, ...] = ()  # of the first rank of this machine
        self._environment: dict[str, str] = {}
        self._process: _WarmProcess | None = None
        self._is_over = not is_on  # or after an obstacle that would come again
        self._forks = False  # in this start
        self.needs: dict[str, Any] | None = None

    def look(self) -> None:
        """Start the process once the ranks have opened a run, and see how it does; called periodically."""
        if self._is_over:
            return
        try:
            self._begin()
            obstacle = None if self._process is None else self._process.look(self._print_detail)
        except OSError as error:
            obstacle = f"the warm process does not answer ({error})"
        if obstacle is not None:
            self._end(f"{_FRESH}: {obstacle}", is_over=True)

    def prepare(self, command: tuple[str, ...], needs: dict[str, Any]) -> None:
        """Let `look` start the process before this machine has ranks.

        Args:
            command: of a rank.
            needs: of another machine.
        """
        self._command, self._environment, self.needs = command, {**os.environ, **needs["variables"]}, needs

    def _begin(self) -> None:
        if self._process is not None or not self._command:
            return
        if self.needs is None and (imported := self._report.imported()) is not None:
            given = {name: value for name, value in self._environment.items() if os.environ.get(name) != value}
            self.needs = {"variables": given, "imported": asdict(imported)}
        if self.needs is not None:
            self._process = _WarmProcess(self._command, self._environment)
            self._process.ask({"launcher": os.getpid(), "imported": self.needs["imported"]})

    def begin_start(self) -> None:
        """Decide, before ranks start, whether they can be forks."""
        self.look()
        self._forks = False
        if self._process is None or not self._process.is_ready:
            return
        try:
            changed = self._process.changed()
        except OSError as error:
            self._end(f"{_FRESH}: the warm process does not answer ({error})", is_over=True)
            return
        if changed is None:
            self._forks = True
        else:
            self._end(f"The ranks import everything again: {changed}", is_over=False)

    def fork(
        self, command: tuple[str, ...], environment: Mapping[str, str], out: IO[str] | None, error: IO[str] | None
    ) -> ForkedRank | None:
        """Fork a rank.

        Args:
            command: of the rank.
            environment: all its variables.
            out: its standard output; None: the launcher's.
            error: its standard error; None: the launcher's.

        Returns:
            The rank; None if it must start fresh.
        """
        if environment.get("LOCAL_RANK") == "0" and self._process is None:
            self._command, self._environment = command, dict(environment)
        if self._process is None or not self._forks:
            return None
        differing = self._process.differing(command, environment)
        if differing is not None:
            self._end(f"{_FRESH}: {differing}", is_over=True)
            return None
        try:
            return self._process.fork(environment, out, error)
        except OSError as problem:
            self._end(f"{_FRESH}: {problem}", is_over=True)
            return None

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.close()
            self._process = None

    def _end(self, message: str, is_over: bool) -> None:
        self.close()
        if not is_over:
            self._report.forget_imported()
            self.needs = None
        self._is_over, self._forks = is_over, False
        self._print_line(message)


class _WarmProcess:
    """The process, and what is sent to it.

    Args:
        command: of a rank.
        environment: of a rank.
    """

    def __init__(self, command: tuple[str, ...], environment: Mapping[str, str]) -> None:
        self._command, self._environment = command, dict(environment)
        self._inherited = _inherited()
        self._read: set[str] | None = None  # variables that the imports have read
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(PATIENCE_SECONDS)
        with theirs:
            variables = {**environment, WARM: str(theirs.fileno())}
            self._process = subprocess.Popen(  # noqa: S603
                command, env=variables, pass_fds=[theirs.fileno()], start_new_session=True
            )

    @property
    def is_ready(self) -> bool:
        """Whether it has imported everything."""
        return self._read is not None

    def look(self, print_line: Callable[[str], None]) -> str | None:
        """See whether it has become ready; return why no fork of it can be a rank, or None."""
        if self._process.poll() is not None:
            return f"the warm process ended with status {self._process.returncode}"
        if self._read is None and select.select([self._socket], [], [], 0.0)[0]:
            answer = self._answer()
            if answer["obstacle"] is not None:
                return str(answer["obstacle"])
            self._read = set(answer["read"])
            print_line(f"Restarts fork their ranks from process {self._process.pid}, which has their imports")
        return None

    def changed(self) -> str | None:
        """What is no longer as it was when the process started; None if nothing.

        Raises:
            OSError: the process does not answer.
        """
        now = _inherited()
        if now != self._inherited:
            name = next(name for name in now if now[name] != self._inherited.get(name))
            return f"{name} of cpsr run is not as it was"
        self.ask({})
        changed: str | None = self._answer()["changed"]
        return None if changed is None else f"{changed} has changed"

    def differing(self, command: tuple[str, ...], environment: Mapping[str, str]) -> str | None:
        """Why a rank with this command and environment would have other imports; None if it would not."""
        if command != self._command:
            return "the ranks have different arguments"
        for name in sorted(self._read or ()):
            if environment.get(name) != self._environment.get(name):
                return f"imports read {name}, which each start sets"
        return None

    def fork(self, environment: Mapping[str, str], out: IO[str] | None, error: IO[str] | None) -> ForkedRank:
        """Fork a rank.

        Raises:
            OSError: no fork has become a rank.
        """
        given = {name: value for name, value in environment.items() if name != LAUNCHER}  # the imports took it
        streams = [1 if out is None else out.fileno(), 2 if error is None else error.fileno()]
        theirs, go = os.pipe()
        try:
            with _adopting():
                self.ask({"environment": given}, [*streams, theirs])
                answers = self._answer()
                while "failed" not in answers and not {"pid", "forked", "ready"} <= {*answers}:
                    answers |= self._answer()
            if "failed" in answers:
                raise OSError(f"no rank could be forked ({answers['failed']})")
            rank = ForkedRank(answers["pid"])
            if rank.poll() is not None:
                raise OSError("no rank could be forked (it has ended, or is no child of cpsr run)")
            os.write(go, b"1")
        finally:
            os.close(theirs)
            os.close(go)
        return rank

    def ask(self, request: Mapping[str, object], descriptors: list[int] | None = None) -> None:
        """Send a request; its content is a file, since an environment may be larger than a message."""
        content = os.memfd_create("request")
        try:
            os.write(content, json.dumps(request).encode())
            socket.send_fds(self._socket, [b"1"], [content, *(descriptors or [])])
        finally:
            os.close(content)

    def close(self) -> None:
        """End it."""
        self._socket.close()
        self._process.kill()
        self._process.wait()

    def _answer(self) -> dict[str, Any]:
        said = self._socket.recv(1 << 20)
        if not said:
            raise OSError("the warm process has ended")
        answer: dict[str, Any] = json.loads(said)
        return answer


@contextmanager
def forking(warm: WarmRanks) -> Iterator[None]:
    """Within this context torchrun's launcher starts ranks as forks where it can: it has no argument for that."""

    def start(self: Any, args: tuple[str, ...], env: dict[str, str]) -> Any:
        return warm.fork(args, env, self._stdout, self._stderr) or SubprocessHandler._popen(self, args, env)

    names = vars(api)
    before = names["get_subprocess_handler"]
    names["get_subprocess_handler"] = type("WarmHandler", (SubprocessHandler,), {"_popen": start})
    try:
        yield
    finally:
        names["get_subprocess_handler"] = before
        warm.close()


@contextmanager
def _adopting() -> Iterator[None]:
    """Meanwhile children of ended descendants become children of this process."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        prctl(PR_SET_CHILD_SUBREAPER, 0)


def _inherited() -> dict[str, str]:
    """What ranks get from this process as it is now."""
    own = Path("/proc/self")
    status = (own / "status").read_text().splitlines()
    found = {line.partition(":")[0]: line for line in status if line.startswith(INHERITED)}
    for name in ("limits", "cgroup", "oom_score_adj"):
        with suppress(OSError):
            found[name] = (own / name).read_text()
    return found | {"nice": str(os.nice(0)), "folder": str(Path.cwd())}
