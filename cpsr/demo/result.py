"""What the demo measured, read back from the journals and the validation losses of its two runs."""

import dataclasses
import json
import platform
import statistics
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy
import torch

from cpsr.demo.device import describe_device, device_text
from cpsr.demo.launch import RANKS, Kill
from cpsr.demo.notes import read_notes
from cpsr.demo.timeline import Restart, restart
from cpsr.errors import CPSRError
from cpsr.fitter.curve import LossCurve
from cpsr.fitter.lag import Lag, Transient, paired_lag, transient
from cpsr.journal import JournalReader, RecoveryRow
from cpsr.ranks.exits import BEGAN

__all__ = ["DemoResult", "failure_iteration", "measure", "validation_curve"]


@dataclass(frozen=True)
class DemoResult:
    """One demo.

    Attributes:
        kill: what was done to the job.
        failure_iteration: f.
        checkpoint_iteration: c, the last checkpoint before it.
        recovery: how it came back, from its journal.
        message: the same for people.
        lag: of the recovered run behind the paired fault-free one, after 60 to 160 iterations.
        transient: the loss gap at injection and how long it lasted.
        restart: from the kill to the first finished step of the new processes.
        stalls_seconds: training thread blocked by each checkpoint of the killed run.
        checkpoints: iterations of its committed checkpoints.
        fault_free, recovered: validation losses of the two runs.
        device: that both trained on; see `describe_device`.
    """

    kill: Kill
    failure_iteration: int
    checkpoint_iteration: int
    recovery: RecoveryRow
    message: str
    lag: Lag
    transient: Transient
    restart: Restart
    stalls_seconds: list[float]
    checkpoints: list[int]
    fault_free: LossCurve
    recovered: LossCurve
    device: dict[str, Any]
    date: str
    machine: str

    @property
    def lost_iterations(self) -> int:
        """What recomputing from the last checkpoint would have cost."""
        return self.failure_iteration - self.checkpoint_iteration

    def rows(self) -> list[tuple[str, str]]:
        """The table: what, and how much."""
        recovery, stalls = self.recovery, sorted(1000 * stall for stall in self.stalls_seconds)
        gone = self.transient.iterations
        return [
            ("device", device_text(self.device)),
            ("killed", f"rank {self.kill.rank}, SIGKILL from outside"),
            ("failure step f", str(self.failure_iteration)),
            ("last checkpoint c", str(self.checkpoint_iteration)),
            ("what happened", self.message),
            ("outcome of the watch", recovery.outcome),
            ("recomputing would cost", f"{self.lost_iterations} iterations"),
            ("lag after 60-160 iterations", f"{self.lag.iterations:+.1f} +- {self.lag.standard_error:.1f} iterations"),
            ("loss gap behind the failure", f"{self.lag.gap_nats:+.4f} +- {self.lag.gap_standard_error:.4f} nats"),
            (
                "transient",
                f"{self.transient.gap_nats:+.4f} nats at injection, "
                + ("not gone within the run" if gone is None else f"gone after {gone} iterations"),
            ),
            (
                "from the kill to the first new step",
                f"{self.restart.seconds:.1f} s, of which CPSR's own {self.restart.ours_seconds:.2f} s (*)",
            ),
            *((f"- {part.name}", f"{part.seconds:.2f} s" + " (*)" * part.ours) for part in self.restart.parts),
            (
                "aims of that",
                ", ".join(f"{aim}: {'met' if met else 'missed'}" for aim, met in self.restart.aims.items()),
            ),
            (
                "stall per checkpoint",
                f"{statistics.median(stalls):.1f} ms median, {stalls[-1]:.1f} ms at most, of {len(stalls)}",
            ),
        ]

    def to_json(self) -> dict[str, Any]:
        """Everything but the curves, as plain data."""
        return {
            "date": self.date,
            "machine": self.machine,
            "device": self.device,
            "kill": dataclasses.asdict(self.kill),
            "recovery": dataclasses.asdict(self.recovery),
            "message": self.message,
            "lost_iterations": self.lost_iterations,
            "lag": dataclasses.asdict(self.lag),
            "transient": dataclasses.asdict(self.transient),
            "restart_seconds": self.restart.seconds,
            "restart_ours_seconds": self.restart.ours_seconds,
            "restart_parts": [dataclasses.asdict(part) for part in self.restart.parts],
            "aims": self.restart.aims,
            "stalls_seconds": self.stalls_seconds,
        }


def failure_iteration(killed: Path) -> int:
    """The step at which the killed run failed, from its journal.

    Raises:
        CPSRError: the run did not recover by prediction, so that there is nothing to compare.
    """
    return _predicted(killed)[0]


def measure(fault_free: Path, killed: Path, kill: Kill, device: str) -> DemoResult:
    """Compare the two runs, which trained on that device.

    Raises:
        CPSRError: the killed run did not recover by prediction, so that there is nothing to measure.
        ValueError: the loss is too flat, or was taken too seldom, for a lag in iterations.
    """
    f, c, recovery = _predicted(killed)
    reference, recovered = validation_curve(fault_free), validation_curve(killed)
    with JournalReader(killed / "journal.db") as journal:
        committed = [row for row in journal.checkpoints() if row.status == "committed"]
        failed = next(life for life in journal.lives() if life.life == recovery.life - 1)
        began = [event.message for event in journal.events() if (event.kind, event.life) == (BEGAN, recovery.life)]
    return DemoResult(
        kill=kill,
        failure_iteration=f,
        checkpoint_iteration=c,
        recovery=recovery,
        message=began[0],
        lag=paired_lag(recovered, reference, f),
        transient=transient(recovered.between(f, numpy.inf), reference, f),
        restart=restart(kill.time, failed.ended_unix_seconds, read_notes(killed, RANKS), recovery),
        stalls_seconds=[row.stall_seconds for row in committed if row.stall_seconds is not None],
        checkpoints=[row.iteration for row in committed],
        fault_free=reference,
        recovered=recovered,
        device=describe_device(device),
        date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        machine=f"{torch.get_num_threads()} threads visible to torch, {platform.machine()}, torch {torch.__version__}",
    )


def _predicted(run_dir: Path) -> tuple[int, int, RecoveryRow]:
    """Failure step, checkpoint and the record of a predicted recovery."""
    with JournalReader(run_dir / "journal.db") as journal:
        recovery = journal.latest_recovery()
    if recovery is None or recovery.failure_iteration is None or recovery.checkpoint_iteration is None:
        raise CPSRError(f"the journal of {run_dir} records no failure that was recovered from")
    if not recovery.beginning.predicted:
        raise CPSRError(f"the run {run_dir} was not recovered by prediction: {recovery.reason}")
    return recovery.failure_iteration, recovery.checkpoint_iteration, recovery


def validation_curve(run_dir: Path) -> LossCurve:
    """Validation losses that a run has written; of an iteration that was reached twice, the later ones."""
    losses: dict[int, list[float]] = {}
    for line in (run_dir / "validation.jsonl").read_text().splitlines():
        row = json.loads(line)
        losses[row["iteration"]] = row["losses"]  # what was evaluated again after the restart replaces what was lost
    iterations = sorted(losses)
    return LossCurve(numpy.array(iterations), numpy.array([losses[iteration] for iteration in iterations]))
