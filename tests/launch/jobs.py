"""Starts jobs with the real launchers, and reads what they print."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

BIN = Path(sys.executable).parent
LIMIT_SECONDS = 120.0
# torchrun chooses a free port seconds before rank 0 opens it. Among many tests another process is at times faster, and
# the launcher starts the ranks again (test_a_start_whose_port_another_process_has_taken_is_repeated_at_another_port).
PORT_LOST = re.compile(r"\[cpsr run\] Rank \d+ failed \(DistNetworkError: .*address already in use")

# Two ranks of plain torch on gloo: `argv` is the run directory, the last iteration and the seconds of a step.
SCRIPT = """
import sys, time, torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from cpsr import CPSRRecovery, TorchAdapter

dist.init_process_group("gloo")
torch.manual_seed(0)
module = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
data = TensorDataset(torch.randn(4000, 4))
loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data))
config = {"run_dir": sys.argv[1], "mode": "exact", "checkpoint": {"interval_iterations": 5}}
with CPSRRecovery(TorchAdapter(module, optimizer), config) as recovery:
    for (batch,) in recovery.resume(loader):
        optimizer.zero_grad()
        module(batch).pow(2).mean().backward()
        optimizer.step()
        time.sleep(float(sys.argv[3]))
        if dist.get_rank() == 0:
            print("iteration", recovery.iteration, flush=True)
        if recovery.iteration == int(sys.argv[2]):
            break
dist.destroy_process_group()
"""


class Launched:
    """One launcher, running or ended.

    Args:
        directory: where it runs; its output goes to a file there.
        command: begins with the name of an installed script.
        environment: more variables.
    """

    def __init__(self, directory: Path, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        self.log = directory / f"output-{len(list(directory.glob('output-*')))}"
        variables = {name: value for name, value in os.environ.items() if not name.startswith(("PET_", "TORCHELASTIC"))}
        variables |= {"OMP_NUM_THREADS": "1", **(environment or {})}
        with self.log.open("w") as output:
            arguments = [str(BIN / command[0]), *command[1:]]
            self.process = subprocess.Popen(arguments, cwd=directory, env=variables, stdout=output, stderr=output)

    def __enter__(self) -> "Launched":
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
            for pid in self.pids():  # what a killed launcher leaves behind
                if Path(f"/proc/{pid}").exists():
                    os.kill(pid, 9)

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def lines(self) -> list[str]:
        """What `cpsr run` itself has printed, without a start whose port was taken (`PORT_LOST`)."""
        lines = list[str]()
        for line in self.output.splitlines():
            if PORT_LOST.match(line):
                assert lines.pop().startswith("Started"), self.output
            elif line.startswith("[cpsr run]"):
                lines.append(line.removeprefix("[cpsr run] "))
        return lines

    @property
    def ports_lost(self) -> int:
        """Starts whose port was taken; each shows a traceback."""
        return sum(PORT_LOST.match(line) is not None for line in self.output.splitlines())

    def pids(self) -> list[int]:
        """Of the ranks that were started last."""
        started = [line for line in self.lines() if line.startswith("Started")]
        return [int(pid) for pid in re.findall(r"\d+", started[-1].partition("(")[2])] if started else []

    def children(self) -> list[int]:
        """Processes that the launcher has started and that still run."""
        tasks = Path(f"/proc/{self.process.pid}/task").glob("*/children")
        return sorted(int(pid) for task in tasks for pid in task.read_text().split())

    def until(self, condition: Callable[["Launched"], object]) -> None:
        """Wait until the condition holds."""
        patience = _Patience(self.log)
        while not condition(self):
            assert self.process.poll() is None, self.output[-4000:]
            assert not patience.is_over(), self.output[-4000:]
            time.sleep(0.05)

    def wait(self) -> int:
        """Its exit status."""
        patience = _Patience(self.log)
        while (status := self.process.poll()) is None:
            assert not patience.is_over(), self.output[-4000:]
            time.sleep(0.05)
        return status


class _Patience:
    """Ends when a job prints nothing for so long that it hangs, however long it takes in all."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._size, self._since = -1, 0.0

    def is_over(self) -> bool:
        """Whether nothing was printed for `LIMIT_SECONDS`."""
        size, now = self._log.stat().st_size, time.monotonic()
        if size != self._size:
            self._size, self._since = size, now
        return now - self._since > LIMIT_SECONDS


def iterations(launched: Launched) -> list[int]:
    """Iterations that rank 0 of `SCRIPT` has printed."""
    return [int(at) for at in re.findall(r"^iteration (\d+)$", launched.output, re.MULTILINE)]


def has_reached(launched: Launched, iteration: int) -> bool:
    """Whether rank 0 of `SCRIPT` has finished that iteration."""
    reached = iterations(launched)
    return bool(reached) and reached[-1] >= iteration


def has_printed(launched: Launched, text: str, times: int) -> bool:
    """Whether something was printed so often."""
    return launched.output.count(text) >= times
