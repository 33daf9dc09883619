"""Machines in small: each has its own network, host name, processes and shared memory; only the disks are one.

A machine is a process that holds kernel namespaces, so nothing is left when it ends, however it ends. The machines are
at one switch. They need root, or what is left out says why it cannot be made.
"""

import functools
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

NAMESPACES = ("--net", "--uts", "--mount", "--ipc", "--pid")
NETWORK = "10.77.0"
MEMORY = "/dev/shm"  # noqa: S108 - each machine has its own
# Waits for the ends of processes whose parents have ended, as the first process of a machine does.
FIRST_PROCESS = """
import signal
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
print("ready", flush=True)
signal.pause()
"""
# -1 is all but the caller and the first one; there may be none.
KILL_ALL = """
import contextlib, os
with contextlib.suppress(ProcessLookupError):
    os.kill(-1, 9)
"""
SECONDS_MAX = 60.0  # for a command of the system; a busy machine needs a part of it


@functools.cache
def obstacle() -> str | None:
    """Why no machines can be made here; None if they can."""
    missing = [name for name in ("ip", "unshare", "nsenter", "setpriv") if shutil.which(name) is None]
    if missing:
        return f"machines in small need {', '.join(missing)}"
    try:
        with Machines(2):
            return None
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None)
        return f"machines in small need root and kernel namespaces: {(said or str(error)).strip()}"


class Machines:
    """Some machines at one switch, as a context; all of their processes end with it.

    Args:
        number: of machines.
        directory: where the table of their names is written; None: they know each other's addresses alone.

    Raises:
        OSError, subprocess.SubprocessError: they cannot be made here; see `obstacle`.
    """

    def __init__(self, number: int, directory: Path | None = None) -> None:
        self._holders: list[tuple[subprocess.Popen[str], int]] = []  # each with the first process of its machine
        self.names = [f"machine-{at}" for at in range(number)]
        self.addresses = [f"{NETWORK}.{at + 1}" for at in range(number)]
        try:
            self._switch = self._hold()
            self._alone(self._switch, "ip", "link", "add", "switch", "type", "bridge")
            self._alone(self._switch, "ip", "link", "set", "switch", "up")
            self._pids = [self._hold() for _ in range(number)]
            for at, pid in enumerate(self._pids):
                self._connect(at, pid)
            if directory is not None:
                self._name(directory / "hosts")
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "Machines":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all machines."""
        for holder, pid in self._holders:
            os.kill(pid, signal.SIGKILL)  # then the kernel ends the others, and removes the network
            holder.communicate()
        self._holders = []

    def start(
        self, machine: int, command: Sequence[str], output: IO[str], environment: Mapping[str, str] | None = None
    ) -> "subprocess.Popen[str]":
        """Start a program on a machine.

        Args:
            machine: its number.
            command: found by its path.
            output: for what it prints.
            environment: all of its variables; None: those of this process.
        """
        inside = ["nsenter", "--target", str(self._pids[machine]), *NAMESPACES, "--", *command]
        return subprocess.Popen(inside, stdout=output, stderr=output, text=True, env=environment)

    def run(self, machine: int, *command: str) -> str:
        """What a command prints on a machine; CalledProcessError where it fails."""
        return self._alone(self._pids[machine], *command)

    def first_process(self, machine: int) -> int:
        """The number of a machine's first process here, outside of it."""
        return self._pids[machine]

    def kill(self, machine: int) -> None:
        """Kill all of its processes; its shared memory stays."""
        self._alone(self._pids[machine], sys.executable, "-c", KILL_ALL)

    def freeze(self, machine: int) -> None:
        """Stop all of its processes: they end no connection and release no lock, as on a machine without power."""
        self._alone(self._pids[machine], sys.executable, "-c", f"import os; os.kill(-1, {int(signal.SIGSTOP)})")

    def thaw(self, machine: int) -> None:
        """Let its processes go on."""
        self._alone(self._pids[machine], sys.executable, "-c", f"import os; os.kill(-1, {int(signal.SIGCONT)})")

    def forget(self, machine: int) -> None:
        """Empty its shared memory, as a new start of the machine does."""
        self._alone(self._pids[machine], "find", MEMORY, "-mindepth", "1", "-delete")

    def cut_off(self, machine: int) -> None:
        """Take its cable out: no other machine hears anything of it, not even that connections have ended."""
        self._alone(self._switch, "ip", "link", "set", f"port{machine}", "down")

    def reconnect(self, machine: int) -> None:
        """Put its cable in again."""
        self._alone(self._switch, "ip", "link", "set", f"port{machine}", "up")

    def _hold(self) -> int:
        """Make the namespaces of a machine; returns its first process, as it is numbered here."""
        holder = subprocess.Popen(
            [
                *("setpriv", "--pdeathsig", "KILL"),  # so that a killed test leaves nothing
                *("unshare", *NAMESPACES, "--fork", "--kill-child", "--mount-proc"),
                *(sys.executable, "-c", FIRST_PROCESS),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert holder.stdout is not None
        if (said := holder.stdout.readline()) != "ready\n":
            holder.kill()
            holder.communicate()
            raise OSError(said)
        pid = int(Path(f"/proc/{holder.pid}/task/{holder.pid}/children").read_text())
        self._holders.append((holder, pid))
        return pid

    def _connect(self, at: int, pid: int) -> None:
        """Give a machine its name, its memory and its network."""
        self._alone(pid, "mount", "-t", "tmpfs", "tmpfs", MEMORY)
        self._alone(pid, "hostname", self.names[at])
        port = ("ip", "link", "add", f"port{at}", "type", "veth", "peer", "name", "eth0", "netns", str(pid))
        self._alone(self._switch, *port, namespaces=("--net",))  # so `ip` sees the numbers of processes as we do
        self._alone(self._switch, "ip", "link", "set", f"port{at}", "master", "switch", "up")
        self._alone(pid, "ip", "address", "add", f"{self.addresses[at]}/24", "dev", "eth0")
        for link in ("lo", "eth0"):
            self._alone(pid, "ip", "link", "set", link, "up")

    def _name(self, table: Path) -> None:
        """Let the machines know each other's names."""
        names = zip(self.addresses, self.names, strict=True)
        table.write_text("127.0.0.1 localhost\n" + "".join(f"{address} {name}\n" for address, name in names))
        for pid in self._pids:
            self._alone(pid, "mount", "--bind", str(table), "/etc/hosts")

    @staticmethod
    def _alone(pid: int, *command: str, namespaces: Sequence[str] = NAMESPACES) -> str:
        inside = ["nsenter", "--target", str(pid), *namespaces, "--", *command]
        ended = subprocess.run(inside, capture_output=True, text=True, timeout=SECONDS_MAX, check=True)
        return ended.stdout
