"""From checkpoints whose ranks share out what they hold alike to figures."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cpsr.benchmarks.experts.names import EACH
from cpsr.benchmarks.harness.intervals import Estimate, median_interval, median_ratio_interval

__all__ = ["Written", "written"]


@dataclass(frozen=True)
class Written:
    """Checkpoints of one model, by one way to share out what ranks hold alike.

    Attributes:
        label: of the model.
        way: name.
        busiest_bytes: new ones of the rank that wrote most; median over checkpoints, as is the next.
        write_seconds: to durable files that were read back, of the slowest rank.
        bytes_share: the first over that where each rank writes all of its own.
        write_share: likewise.
    """

    label: str
    way: str
    busiest_bytes: Estimate
    write_seconds: Estimate
    bytes_share: Estimate
    write_share: Estimate


def written(label: str, found: Mapping[str, Any]) -> list[Written]:
    """Every way of one job.

    Args:
        label: of the model.
        found: what `measure_writes` returned.
    """
    slowest = {
        way: {key: [max(one[key]) for one in rounds] for key in ("written_bytes", "write_seconds")}
        for way, rounds in found["rounds"].items()
    }
    return [
        Written(
            label,
            way,
            *(median_interval(values) for values in own.values()),
            *(median_ratio_interval(values, slowest[EACH][key]) for key, values in own.items()),
        )
        for way, own in slowest.items()
    ]
