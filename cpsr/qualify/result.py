"""The result of `cpsr qualify`: what became of each check of each cell, over all ranks, as JSON and as a table."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from cpsr.demo.device import device_text
from cpsr.qualify.cells import Cell
from cpsr.tables import print_table

__all__ = ["CheckResult", "Qualification", "print_result", "qualification_of"]

FORMAT = 1  # of the JSON
WORDS = {"passed": "passed", "failed": "[bold red]FAILED[/]", "not applicable": "-"}

Status = Literal["passed", "failed", "not applicable"]


@dataclass(frozen=True)
class CheckResult:
    """One place of the table.

    Attributes:
        engine, zero, precision, optimizer, feature: the cell; `zero` is None outside DeepSpeed.
        check: name of the check.
        status: of it.
        reason: why it failed (end of the first traceback) or does not apply; empty where it passed.
        seconds: of the slowest rank, over all lives.
        figures: of rank 0.
    """

    engine: str
    zero: int | None
    precision: str
    optimizer: str
    check: str
    status: Status
    reason: str = ""
    seconds: float = 0.0
    figures: Mapping[str, Any] = field(default_factory=dict)
    feature: str = ""

    @property
    def cell(self) -> str:
        """The cell in one line."""
        return Cell(self.engine, self.zero, self.precision, self.optimizer, self.feature).name


@dataclass(frozen=True)
class Qualification:
    """Everything that `cpsr qualify` found.

    Attributes:
        date: UTC, ISO 8601.
        machine: processor, cores, memory and device, as plain data.
        versions: of the packages that matter.
        ranks: of the job.
        backend: of its training group.
        log: path of the ranks' output, or where to find it.
        seconds: of all checks.
        checks: every place of the table.
    """

    date: str
    machine: Mapping[str, Any]
    versions: Mapping[str, str]
    ranks: int
    backend: str
    log: str
    seconds: float
    checks: Sequence[CheckResult]

    @property
    def failed(self) -> list[CheckResult]:
        """The checks that failed."""
        return [one for one in self.checks if one.status == "failed"]

    @property
    def passed(self) -> bool:
        """Whether there were checks, and none failed."""
        return not self.failed and any(one.status == "passed" for one in self.checks)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {"format": FORMAT, "passed": self.passed} | asdict(self)


def qualification_of(
    lines: Sequence[Mapping[str, Any]], machine: Mapping[str, Any], versions: Mapping[str, str], log: str
) -> Qualification:
    """Put the ranks' records together.

    Args:
        lines: of all ranks, by time.
        machine: see `Qualification`.
        versions: likewise.
        log: likewise.
    """
    planned: Mapping[str, Any] = next((line for line in lines if line["event"] == "planned"), {})
    trials = [_checked(place, lines, planned["ranks"]) for place in planned.get("trials", ())]
    empty = [
        CheckResult(**place["cell"], check=place["check"], status="not applicable", reason=place["reason"])
        for place in planned.get("not_applicable", ())
    ]
    times = [float(line["unix_seconds"]) for line in lines] or [0.0]
    return Qualification(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        machine=machine,
        versions=versions,
        ranks=planned.get("ranks", 0),
        backend=planned.get("backend", ""),
        log=log,
        seconds=times[-1] - times[0],
        checks=[*trials, *empty],
    )


def _checked(place: Mapping[str, Any], lines: Sequence[Mapping[str, Any]], ranks: int) -> CheckResult:
    """A check passed where every rank has ended it without an error."""
    mine = [line for line in lines if line.get("trial") == place["trial"]]
    ended = [line for line in mine if line["event"] == "ended"]
    reason = next((line["error"] for line in ended if line["error"]), "")
    if not reason and len({line["rank"] for line in ended}) < ranks:
        reason = "the job ended in this check" if mine else "the job ended before this check"
    return CheckResult(
        **place["cell"],
        check=place["check"],
        status="failed" if reason else "passed",
        reason=reason,
        seconds=max(line["unix_seconds"] for line in mine) - min(line["unix_seconds"] for line in mine)
        if mine
        else 0.0,
        figures=next((line["figures"] for line in ended if line["rank"] == 0), {}),
    )


def print_result(console: Console, result: Qualification, json_path: Path) -> None:
    """Print the table, the figures, and one line for each check that failed."""
    print_table(console, _table(result))
    for one in result.checks:
        if one.status == "passed" and (text := _figures(one)):
            console.print(f"{one.cell}, {one.check}: {text}", highlight=False, soft_wrap=True)
    for one in result.failed:
        why = (one.reason.strip().splitlines() or ["no reason"])[-1]
        console.print(
            f"FAILED {one.cell}, {one.check}: {why} | send us {json_path} and {result.log}",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
    count = sum(one.status == "passed" for one in result.checks)
    console.print(f"{count} checks passed, {len(result.failed)} failed; {json_path}", highlight=False, soft_wrap=True)


def _machine_text(result: Qualification) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in result.versions.items())
    machine = result.machine
    return (
        f"{machine['processor']}, {machine['cores']} cores, {device_text(machine['device'])}; "
        f"{result.ranks} ranks over {result.backend}; {versions}; {result.seconds:.0f} s"
    )


def _table(result: Qualification) -> Table:
    columns = list(dict.fromkeys(one.check for one in result.checks))
    rows: dict[str, dict[str, str]] = {}
    for one in result.checks:
        rows.setdefault(one.cell, dict.fromkeys(columns, "-"))[one.check] = WORDS[one.status]
    table = Table("combination", *columns, title="cpsr qualify", caption=_machine_text(result))
    for cell, words in rows.items():
        table.add_row(cell, *words.values())
    return table


def _figures(one: CheckResult) -> str:
    """What a reader compares; empty for checks without."""
    figures: Mapping[str, Any] = one.figures
    if "stall_ratio" in figures:
        return (
            f"stall {_ratio(figures['stall_ratio'])} of a copy of {figures['copied_bytes'] / 1e6:.0f} MB, "
            f"steps {_ratio(figures['step_ratio'])} of those without CPSR"
        )
    if "guard" in figures:
        return f"{figures['outcome']} ({figures['method']}); guard: {figures['guard']['reason']}"
    return ""


def _ratio(spread: Mapping[str, float]) -> str:
    return f"{spread['median']:.2f} ({spread['min']:.2f} to {spread['max']:.2f})"
