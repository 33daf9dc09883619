"""Which calls are of the save that meets an error."""

from cpsr.benchmarks.faults.errors import Fault, first_save
from cpsr.benchmarks.faults.saves import PLAIN
from cpsr.benchmarks.faults.tracing import Call

READS = Fault("EIO of a read", ("openat",), "EIO", reads=True)
FIRST, SECOND = (f"checkpoints/step-{iteration:010d}" for iteration in PLAIN.iterations)


def opened(*files: str) -> list[Call]:
    """Calls that open these to read, in this order."""
    return [
        Call(1, "openat", number, len(files), file.rpartition("/")[2], f'"/run/{file}", O_RDONLY', 3)
        for number, file in enumerate(files, 1)
    ]


def test_the_second_save_begins_when_it_looks_for_a_newer_life() -> None:
    calls = opened("progress", FIRST, "progress", FIRST, "checkpoints", "progress", SECOND, "progress")
    assert first_save(calls, READS, PLAIN) == calls[:5]
