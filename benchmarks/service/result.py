"""From latencies and memory to the aims of the service."""

from dataclasses import asdict, dataclass
from typing import Any

import numpy

from cpsr.benchmarks.service.clients import Answers

__all__ = ["AIM_BYTES", "AIM_SECONDS", "MEGABYTE", "MILLISECONDS", "Result", "summarise"]

AIM_SECONDS = 0.020
AIM_BYTES = 150e6
MILLISECONDS, MEGABYTE = 1e3, 1e6


@dataclass(frozen=True)
class Result:
    """One journal.

    Attributes:
        name: what is particular about it.
        step_rows: that it had when the clients began.
        journal_bytes: of its file then.
        requests: that were answered.
        refused: others.
        p50_seconds: from when a request was meant to be sent to its answer.
        p99_seconds: the same.
        longest_seconds: the same.
        late_p99_seconds: of that, the clients' own delay in sending.
        answer_processor_seconds: of the service, for one answer: what other processes do does not lengthen it much.
        answer_bytes: of one answer.
        service_bytes: the most memory that the service had.
        trained_iterations: of the training job meanwhile.
    """

    name: str
    step_rows: int
    journal_bytes: int
    requests: int
    refused: int
    p50_seconds: float
    p99_seconds: float
    longest_seconds: float
    late_p99_seconds: float
    answer_processor_seconds: float
    answer_bytes: int
    service_bytes: int
    trained_iterations: int

    def aims(self) -> dict[str, bool]:
        """Each aim and whether it is met."""
        return {
            f"{self.name}: 99 of 100 answers within {MILLISECONDS * AIM_SECONDS:.0f} ms": not self.refused
            and self.p99_seconds < AIM_SECONDS,
            f"{self.name}: below {AIM_BYTES / MEGABYTE:.0f} MB": self.service_bytes < AIM_BYTES,
        }

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self) | {"aims": self.aims()}


def summarise(
    name: str,
    answers: Answers,
    *,
    step_rows: int,
    journal_bytes: int,
    processor_seconds: float,
    service_bytes: int,
    trained_iterations: int,
) -> Result:
    """The figures of one journal; at least one request was answered."""
    p50, p99 = numpy.quantile(answers.seconds, [0.5, 0.99])
    return Result(
        name=name,
        step_rows=step_rows,
        journal_bytes=journal_bytes,
        requests=len(answers.seconds),
        refused=answers.refused,
        p50_seconds=float(p50),
        p99_seconds=float(p99),
        longest_seconds=max(answers.seconds),
        late_p99_seconds=float(numpy.quantile(answers.late_seconds, 0.99)),
        answer_processor_seconds=processor_seconds / len(answers.seconds),
        answer_bytes=answers.bytes,
        service_bytes=service_bytes,
        trained_iterations=trained_iterations,
    )
