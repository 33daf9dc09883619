"""System calls by name and number: what a process called, and what happens instead at one of them.

strace does both, from outside the process: no matter whether a call comes from Python, from Rust or from C. It counts
the calls of each thread and of each name.
"""

import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from cpsr.errors import CPSRError

__all__ = ["CHANGING", "READING", "Call", "Tracer", "read_calls", "require_strace", "why_no_strace"]

CHANGING = (
    *("openat", "open", "creat", "write", "pwrite64", "writev", "pwritev", "ftruncate", "truncate", "fallocate"),
    *("fsync", "fdatasync", "sync_file_range", "rename", "renameat", "renameat2", "unlink", "unlinkat", "rmdir"),
    *("mkdir", "mkdirat", "link", "linkat", "symlink", "symlinkat", "chmod", "fchmod", "fchmodat", "copy_file_range"),
    *("sendfile",),
)
READING = ("read", "preadv", "pread64", "getdents64")
_LINE = re.compile(r"^(\d+)\s+(\w+)\((.*)$")
# Where a call of another thread comes between, one call takes two lines.
_RESUMED = re.compile(r"^(\d+)\s+<\.\.\. (\w+) resumed>(.*)$")
_UNFINISHED = "<unfinished ...>"
_PADDING = re.compile(r"\) +=")
_RETURNED = re.compile(r"\) += (-?\d+)")
_OPENED_TO_WRITE = re.compile(r"O_WRONLY|O_RDWR|O_CREAT|O_TRUNC")
_PATHS = re.compile(r'"([^"]*)"|<(/[^>]*)>')
ATTACH_SECONDS = 20.0


def why_no_strace() -> str | None:
    """What is missing for tracing, and what to do; None where it works."""
    path = shutil.which("strace")
    if path is None:
        return "strace is not installed, and faults are injected with it: `apt-get install strace` (or your system's)"
    done = subprocess.run([path, "-o", "/dev/null", "true"], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        return f"strace cannot trace processes here (containers need CAP_SYS_PTRACE): {done.stderr.strip()}"
    return None


def require_strace() -> str:
    """Where the program is; CPSRError, with what to do, where it cannot be used."""
    missing = why_no_strace()
    if missing is not None:
        raise CPSRError(missing)
    return str(shutil.which("strace"))


@dataclass(frozen=True)
class Call:
    """One system call as it was recorded.

    Attributes:
        thread: the kernel's number of the thread.
        name: of the call.
        number: which of that thread's calls of that name, from 1.
        of: how many of them there were.
        file: name of the last file in its arguments.
        arguments: as strace prints them.
        returned: what it returned, None where that was not seen.
    """

    thread: int
    name: str
    number: int
    of: int
    file: str
    arguments: str
    returned: int | None

    @property
    def changes(self) -> bool:
        """Whether it changed something in the file system."""
        if self.returned is None or self.returned < 0 or self.name in READING:
            return False
        return self.name not in ("openat", "open") or bool(_OPENED_TO_WRITE.search(self.arguments))

    def __str__(self) -> str:
        return f"{self.name} {self.number} of {self.of}: {self.file}"


class Tracer:
    """strace, attached to a process and all its threads, until that process ends.

    Args:
        process: its id.
        log: where the calls are recorded.
        injections: as strace's `inject` takes them: `fsync:error=EIO:when=3`.
        names: of the calls that are recorded.

    Raises:
        CPSRError: strace is absent, or was not permitted to attach.
    """

    def __init__(
        self, process: int, log: Path, injections: Sequence[str] = (), names: Sequence[str] = CHANGING
    ) -> None:
        traced = ",".join(f"?{name}" for name in names)
        options = [option for one in injections for option in ("-e", f"inject={one}")]
        command = ["strace", "-f", "-y", "-s", "0", "-o", str(log), "-e", f"trace={traced}", "-e", "signal=none"]
        self._strace = subprocess.Popen(
            [*command, *options, "-p", str(process)], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
        )
        assert self._strace.stderr is not None
        line = self._strace.stderr.readline()
        if "attached" not in line:
            rest = self._strace.stderr.read()
            self._strace.stderr.close()
            self._strace.wait(ATTACH_SECONDS)
            raise CPSRError(f"strace cannot trace a process here, so nothing can be injected: {line}{rest}")

    def detach(self) -> None:
        """Trace no further; the process goes on."""
        self._strace.terminate()
        self.end()

    def end(self) -> None:
        """Wait for it after its process ended."""
        self._strace.communicate(timeout=ATTACH_SECONDS)


def read_calls(log: Path, below: Path) -> list[Call]:
    """The calls in a recording that touched anything below a directory, in their order."""
    lines = _whole_lines(log.read_text(errors="replace").splitlines())
    totals = Counter((thread, name) for thread, name, _ in lines)
    return list(_calls(lines, totals, str(below)))


def _whole_lines(lines: Sequence[str]) -> list[tuple[str, str, str]]:
    """Thread, name and the rest of each call, in the order in which they began."""
    found: list[tuple[str, str, str]] = []
    open_at: dict[str, int] = {}  # by thread
    for line in lines:
        if match := _LINE.match(line):
            thread, name, rest = match.groups()
            if rest.endswith(_UNFINISHED):
                open_at[thread] = len(found)
            found.append((thread, name, _PADDING.sub(") =", rest.removesuffix(_UNFINISHED).rstrip())))
        elif (match := _RESUMED.match(line)) and match[1] in open_at:
            thread, name, begun = found[open_at[match[1]]]
            found[open_at.pop(thread)] = thread, name, begun + _PADDING.sub(") =", match[3])
    return found


def _calls(lines: Sequence[tuple[str, str, str]], totals: Counter[tuple[str, str]], below: str) -> Iterator[Call]:
    seen: Counter[tuple[str, str]] = Counter()
    for thread, name, rest in lines:
        seen[thread, name] += 1
        if below not in rest:
            continue
        arguments = rest.rpartition(") = ")[0] or rest
        paths = [path for pair in _PATHS.findall(arguments) for path in pair if path.startswith(below)]
        returned = _RETURNED.search(rest)
        yield Call(
            thread=int(thread),
            name=name,
            number=seen[thread, name],
            of=totals[thread, name],
            file=Path(paths[-1]).name if paths else "",
            arguments=arguments,
            returned=int(returned[1]) if returned else None,
        )
