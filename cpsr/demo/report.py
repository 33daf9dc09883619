"""What the demo measured, read back from the journals and validation losses of its two runs; table and plot."""

import dataclasses
import json
import platform
import statistics
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import matplotlib
import torch
from rich.markup import escape
from rich.table import Table

from cpsr.demo.device import describe_device, device_text
from cpsr.demo.timeline import Part, read_notes, restart_parts
from cpsr.errors import CPSRError
from cpsr.journal import JournalReader, RecoveryRow
from cpsr.ranks.exits import BEGAN

__all__ = ["DemoResult", "Kill", "failure_iteration", "measure", "table", "write_plot"]


@dataclass(frozen=True)
class Kill:
    """What was done to the job: `rank` got SIGKILL when its counter stood at `iteration`, at `time` (Unix seconds)."""

    rank: int
    iteration: int
    time: float


@dataclass(frozen=True)
class DemoResult:
    """One demo.

    Attributes:
        kill: what was done to the job.
        recovery: how it came back, from its journal.
        message: the same for people.
        gap_at_failure_nats, gap_at_end_nats: validation loss of the recovered run above that of the fault-free one.
        restart: the way from the kill to the first finished step of the new processes.
        stalls_seconds: training thread blocked by each checkpoint of the killed run.
        fault_free, recovered: iteration -> validation loss of the two runs.
        device: that both trained on; see `describe_device`.
    """

    kill: Kill
    recovery: RecoveryRow
    message: str
    gap_at_failure_nats: float
    gap_at_end_nats: float
    restart: list[Part]
    stalls_seconds: list[float]
    fault_free: dict[int, float]
    recovered: dict[int, float]
    device: dict[str, Any]
    date: str
    machine: str

    @property
    def failure_iteration(self) -> int:
        """Step f, at which the run failed."""
        assert self.recovery.failure_iteration is not None
        return self.recovery.failure_iteration

    @property
    def checkpoint_iteration(self) -> int:
        """Step c of the last checkpoint before it."""
        assert self.recovery.checkpoint_iteration is not None
        return self.recovery.checkpoint_iteration

    @property
    def lost_iterations(self) -> int:
        """What recomputing from the last checkpoint would have cost."""
        return self.failure_iteration - self.checkpoint_iteration

    @property
    def restart_seconds(self) -> float:
        """From the kill to the first finished step of the new processes."""
        return sum(part.seconds for part in self.restart)

    @property
    def restart_ours_seconds(self) -> float:
        """What of that is CPSR's work."""
        return sum(part.seconds for part in self.restart if part.ours)

    def to_json(self) -> dict[str, Any]:
        """Everything but the curves, as plain data."""
        known = {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}
        for name in ("fault_free", "recovered", "restart"):
            del known[name]
        for name in ("kill", "recovery"):
            known[name] = dataclasses.asdict(known[name])
        return known | {
            "lost_iterations": self.lost_iterations,
            "restart_seconds": self.restart_seconds,
            "restart_ours_seconds": self.restart_ours_seconds,
            "restart_parts": [dataclasses.asdict(part) for part in self.restart],
        }


def failure_iteration(killed: Path) -> int:
    """The step at which the killed run failed, from its journal.

    Raises:
        CPSRError: the run did not recover by prediction, so that there is nothing to compare.
    """
    found = _predicted(killed).failure_iteration
    assert found is not None
    return found


def measure(fault_free: Path, killed: Path, kill: Kill, device: str) -> DemoResult:
    """Compare the two runs, which trained on that device.

    Raises:
        CPSRError: the killed run did not recover by prediction, so that there is nothing to measure.
    """
    f, recovery = failure_iteration(killed), _predicted(killed)
    reference, recovered = _validation_losses(fault_free), _validation_losses(killed)
    after = [at for at in recovered if at >= f]
    with JournalReader(killed / "journal.db") as journal:
        committed = [row for row in journal.checkpoints() if row.status == "committed"]
        failed = next(life for life in journal.lives() if life.life == recovery.life - 1)
        began = [event.message for event in journal.events() if (event.kind, event.life) == (BEGAN, recovery.life)]
    return DemoResult(
        kill=kill,
        recovery=recovery,
        message=began[0],
        gap_at_failure_nats=recovered[after[0]] - reference[after[0]],
        gap_at_end_nats=recovered[after[-1]] - reference[after[-1]],
        restart=restart_parts(kill.time, failed.ended_unix_seconds, read_notes(killed), recovery),
        stalls_seconds=[row.stall_seconds for row in committed if row.stall_seconds is not None],
        fault_free=reference,
        recovered=recovered,
        device=describe_device(device),
        date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        machine=f"{torch.get_num_threads()} threads visible to torch, {platform.machine()}, torch {torch.__version__}",
    )


def _predicted(run_dir: Path) -> RecoveryRow:
    with JournalReader(run_dir / "journal.db") as journal:
        recovery = journal.latest_recovery()
    if recovery is None or recovery.failure_iteration is None or recovery.checkpoint_iteration is None:
        raise CPSRError(f"the journal of {run_dir} records no failure that was recovered from")
    if not recovery.beginning.predicted:
        raise CPSRError(f"the run {run_dir} was not recovered by prediction: {recovery.reason}")
    return recovery


def _validation_losses(run_dir: Path) -> dict[int, float]:
    """Mean validation losses that a run has written, ascending; of an iteration that was reached twice, the later."""
    rows = map(json.loads, (run_dir / "validation.jsonl").read_text().splitlines())
    losses = {row["iteration"]: statistics.fmean(row["losses"]) for row in rows}
    return dict(sorted(losses.items()))


def table(result: DemoResult) -> Table:
    """The result as a table for the terminal: what, and how much."""
    stalls = sorted(1000 * stall for stall in result.stalls_seconds)
    rows = [
        ("device", device_text(result.device)),
        ("killed", f"rank {result.kill.rank}, SIGKILL from outside"),
        ("failure step f", str(result.failure_iteration)),
        ("last checkpoint c", str(result.checkpoint_iteration)),
        ("what happened", result.message),
        ("outcome of the watch", result.recovery.outcome),
        ("recomputing would cost", f"{result.lost_iterations} iterations"),
        ("loss gap at the failure", f"{result.gap_at_failure_nats:+.4f} nats"),
        ("loss gap at the end", f"{result.gap_at_end_nats:+.4f} nats"),
        (
            "from the kill to the first new step",
            f"{result.restart_seconds:.1f} s, of which CPSR's own {result.restart_ours_seconds:.2f} s (*)",
        ),
        *((f"- {part.name}", f"{part.seconds:.2f} s" + " (*)" * part.ours) for part in result.restart),
        (
            "stall per checkpoint",
            f"{statistics.median(stalls):.1f} ms median, {stalls[-1]:.1f} ms at most, of {len(stalls)}",
        ),
    ]
    title = (
        f"Failure at iteration {result.failure_iteration}. An exact restart would have repeated "
        f"{result.lost_iterations} iterations. The predicted state repeated none; its loss at the end: "
        f"{result.gap_at_end_nats:+.4f} nats"
    )
    shown = Table(title=title, show_header=False, title_justify="left")
    shown.add_column(style="bold", no_wrap=True)
    shown.add_column(overflow="fold")
    for what, value in rows:
        shown.add_row(what, escape(value))
    return shown


def write_plot(result: DemoResult, path: Path) -> None:
    """Draw the validation losses of both runs."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 4.5), layout="constrained")
    alone = result.fault_free
    after = {at: loss for at, loss in result.recovered.items() if at >= result.failure_iteration}
    axes.plot(list(alone), list(alone.values()), color="tab:blue", label="fault-free run")
    axes.plot(list(after), list(after.values()), color="tab:orange", linestyle="--", label="killed and recovered")
    axes.axvline(result.checkpoint_iteration, color="tab:green", linewidth=1, label="last checkpoint c")
    axes.axvline(result.failure_iteration, color="tab:red", linewidth=1, label="failure f")
    axes.set(xlabel="iteration", ylabel="validation loss (nats per byte)")
    axes.legend(frameon=False)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
