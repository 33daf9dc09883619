"""The result of `cpsr qualify`: what became of each check of each cell, over all ranks."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal

__all__ = ["CheckResult", "Qualification", "qualification_of"]

FORMAT = 1  # of the JSON

Status = Literal["passed", "failed", "not applicable"]


@dataclass(frozen=True)
class CheckResult:
    """One place of the table.

    Attributes:
        engine, zero, precision, optimizer, offload: the cell; `zero` is None outside DeepSpeed.
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
    offload: str = ""

    @property
    def cell(self) -> str:
        """The cell in one line."""
        zero = "" if self.zero is None else f"zero{self.zero} "
        return f"{self.engine} {zero}{self.precision} {self.optimizer} {self.offload}".rstrip()


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
        """Plain data; see `from_json`."""
        return {"format": FORMAT, "passed": self.passed} | asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Qualification":
        """What `to_json` gave."""
        fields = {name: value for name, value in data.items() if name not in ("format", "passed")}
        return cls(**fields | {"checks": [CheckResult(**one) for one in data["checks"]]})


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
