"""Starts the job of `machines_job.py` with `cpsr run` on machines in small, and reads what its ranks leave."""

import json
import os
import signal
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from cpsr.demo.machines import Machines
from tests.launch.jobs import BIN
from tests.launch.machines_job import ENOUGH, GLOBAL_BATCH, ITEMS, loss_of, model_and_data, optimizer_of

JOB = Path(__file__).with_name("machines_job.py")
PORT = 29400
HANGS_SECONDS = 500.0  # without a word; a start takes seconds, and prints nothing meanwhile
# Of the rendezvous: how long it waits for more machines than it needs, and how soon it takes one for gone.
RENDEZVOUS = {"last_call_timeout": 2, "keep_alive_interval": 1, "keep_alive_max_attempt": 4, "read_timeout": 10}
CONFIGURATION: dict[str, Any] = {
    "mode": "exact",
    "elastic": {"min_ranks": 1},
    "checkpoint": {"interval_iterations": 5},
    "memory": {"interval_iterations": None},
    "peers": {"replicas": 0},
    "ranks": {"heartbeat_timeout_seconds": 30.0},
}

Row = Mapping[str, Any]


class MachineJob:
    """A job over machines: one launcher and one rank on each.

    Args:
        machines: where it runs.
        directory: that all of them share.
        kind: `ddp`, or a stage of ZeRO.
        settings: more of CPSR's configuration; sections are merged.
        launcher: `cpsr run`, or `torchrun`.
        nodes: of torchrun's `--nnodes`.
        rendezvous: of its `--rdzv-conf`.
    """

    def __init__(
        self,
        machines: Machines,
        directory: Path,
        kind: str = "ddp",
        settings: Mapping[str, Any] | None = None,
        launcher: str = "cpsr run",
        nodes: str = "1:3",
        rendezvous: Mapping[str, int] = RENDEZVOUS,
    ) -> None:
        program, *command = launcher.split()
        self._command = [str(BIN / program), *command]
        self._machines, self.directory, self._kind = machines, directory, kind
        self._nodes, self._rendezvous = nodes, rendezvous
        self.run_dir = directory / "run"
        config: dict[str, Any] = {"run_dir": str(self.run_dir), **CONFIGURATION}
        for name, value in (settings or {}).items():
            config[name] = {**config.get(name, {}), **value}
        self._arguments = [str(directory), json.dumps(config), kind]
        self.launchers: dict[int, subprocess.Popen[str]] = {}

    def start(self, machine: int, store: int = 0, *more: str) -> None:
        """Start the launcher of a machine.

        Args:
            machine: its number.
            store: the machine at which the launchers meet.
            more: options.
        """
        options = [*more, f"--nnodes={self._nodes}", "--nproc-per-node=1", "--max-restarts=100", "--rdzv-backend=c10d"]
        options += [f"--rdzv-endpoint={self._machines.names[store]}:{PORT}", "--rdzv-id=job"]
        options += [f"--rdzv-conf={','.join(f'{key}={value}' for key, value in self._rendezvous.items())}"]
        options += [] if self._command[0].endswith("torchrun") else ["--verbose"]
        command = [*self._command, *options, str(JOB), *self._arguments]
        left_out = ("PET_", "TORCHELASTIC", "CPSR_")
        variables = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
        variables |= {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        with self._log(machine).open("a") as output:
            self.launchers[machine] = self._machines.start(machine, command, output, variables)

    def begin(self, machines: int, iterations: int = 7, after: int = -1) -> int:
        """Start the launchers of so many machines; the first life that has all of them, after some iterations."""
        for machine in range(machines):
            self.start(machine)
        return self.reached(machines, iterations, after)

    def kill(self, *machines: int) -> None:
        """Kill all that runs there."""
        for machine in machines:
            self._machines.kill(machine)
            self.launchers[machine].wait()

    def lose(self, machine: int) -> None:
        """The machine is gone without a word: its network is down, and its processes stand still with their locks."""
        self._machines.cut_off(machine)
        self._machines.freeze(machine)

    def find(self, machine: int) -> None:
        """A lost machine goes on where it was."""
        self._machines.reconnect(machine)
        self._machines.thaw(machine)
        self.launchers[machine].send_signal(signal.SIGCONT)  # nsenter stops with its program

    def output(self, machine: int) -> str:
        """What its launchers have printed."""
        return self._log(machine).read_text()

    def begins(self) -> dict[int, dict[str, Any]]:
        """How each life began, by number."""
        found = [json.loads(path.read_text()) for path in self.directory.glob("begins-*.json")]
        return {one["life"]: one for one in sorted(found, key=lambda one: one["life"])}

    def rows(self) -> list[Row]:
        """What all ranks of all lives have finished."""
        lines = [
            line
            for path in self.directory.glob("rows-*.jsonl")
            for line in path.read_text().splitlines(keepends=True)
            if line.endswith("\n")
        ]
        return [json.loads(line) for line in lines]

    def reached(self, ranks: int, iterations: int = 3, after: int = -1) -> int:
        """Wait until some life after `after` has so many ranks and has finished so many iterations; its number."""

        def found() -> int | None:
            done: dict[int, int] = defaultdict(int)
            for row in self.rows():
                done[row["life"]] += row["ranks"] == ranks and row["life"] > after
            return max((life for life, rows in done.items() if rows >= iterations * ranks), default=None)

        self.until(lambda: found() is not None)
        life = found()
        assert life is not None
        return life

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait until it holds, as long as something is printed or trained."""
        seen, since = -1, time.monotonic()
        while not condition():
            size = sum(path.stat().st_size for path in self.directory.glob("*.*"))
            if size != seen:
                seen, since = size, time.monotonic()
            assert time.monotonic() - since < HANGS_SECONDS, self.everything()
            time.sleep(0.1)

    def finish(self) -> dict[int, int]:
        """Let the job end; the exit status of each launcher."""
        (self.directory / ENOUGH).touch()
        self.until(lambda: all(launcher.poll() is not None for launcher in self.launchers.values()))
        return {machine: launcher.wait() for machine, launcher in self.launchers.items()}

    def everything(self) -> str:
        """For the message of a failed test."""
        logs = [f"--- machine {machine}\n{self.output(machine)[-5000:]}" for machine in self.launchers]
        return "\n".join([*logs, json.dumps(list(self.begins().values()), indent=1)])

    def _log(self, machine: int) -> Path:
        return self.directory / f"machine.{machine}.log"


def kept(rows: list[Row], begins: Mapping[int, Mapping[str, Any]]) -> dict[int, list[Row]]:
    """By iteration, what is part of the run: of what was trained twice, the later.

    A life is part of it up to where the next one began; of the last life everything is.
    """
    found: dict[int, list[Row]] = {}
    for life in sorted({row["life"] for row in rows}):
        began = begins[life]["iteration"]
        found = {at: there for at, there in found.items() if at <= began}
        for row in rows:
            if row["life"] == life:
                found.setdefault(row["iteration"], []).append(row)
    return {at: there for at, there in sorted(found.items()) if len(there) == there[0]["ranks"]}


def require_one_training(found: Mapping[int, list[Row]], tolerance: float = 1e-3) -> None:
    """Each sample once in each pass, no iteration left out, and the losses of one process that trains on the same.

    Args:
        found: by iteration.
        tolerance: relative, of losses; by itself DeepSpeed differs from plain torch by some percent after 20 updates.
    """
    assert list(found) == list(range(1, len(found) + 1))
    batches = {at: [index for row in there for index in row["samples"]] for at, there in found.items()}
    per_pass = ITEMS // GLOBAL_BATCH
    for first in range(1, len(found) - per_pass + 2, per_pass):
        one_pass = [index for at in range(first, first + per_pass) for index in batches[at]]
        assert sorted(one_pass) == list(range(ITEMS)), f"the pass from iteration {first}"
    model, data = model_and_data()
    optimizer = optimizer_of(model)
    for at, there in found.items():
        inputs, targets, _ = data[torch.tensor(batches[at])]
        loss = loss_of(model, inputs, targets)
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses = [loss for row in there for loss in row["losses"]]
        assert abs(sum(losses) / GLOBAL_BATCH - loss.item()) <= tolerance * loss.item() + 1e-6, f"iteration {at}"
