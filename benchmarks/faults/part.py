"""What the ranks of a job are to do, in a module that imports nothing of the product.

A rank learns where its machine's shared memory is before it imports what asks for it.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["RANKS", "Fault", "Part", "notes_path"]

RANKS = 2


@dataclass(frozen=True)
class Fault:
    """One signal, which the rank sends to itself, or a step that never ends.

    Attributes:
        moment: see `moments`.
        signal: its name; `hang` sleeps in its place.
        ranks: all that meet it.
        at: iteration or number of the call, see `moments`.
        delay_seconds: from that moment on.
    """

    moment: str
    signal: str
    ranks: tuple[int, ...]
    at: int
    delay_seconds: float = 0.0

    @staticmethod
    def step_after(faults: "tuple[Fault, ...]", iteration: int) -> bool:
        """Whether one of them happens in the step after an iteration."""
        return any(fault.moment == "step" and fault.at == iteration for fault in faults)

    def __str__(self) -> str:
        who = "all ranks" if len(self.ranks) == RANKS else f"rank {self.ranks[0]}"
        late = f" and {1e3 * self.delay_seconds:.0f} ms" if self.moment == "step" and self.delay_seconds else ""
        return f"{self.signal} of {who}, {self.moment} {self.at}{late}"


@dataclass(frozen=True)
class Part:
    """What a life of the job does.

    Attributes:
        config: CPSR's configuration.
        result: where notes and output go, `.<rank>` and an ending appended.
        iterations: end of the run.
        zero: stage.
        poison: see `Scenario`.
        faults: what happens in this life.
        nodes: by rank, where each is a machine of its own: the directory that is its shared memory, whose name is the
            machine's. Empty where all are on this one.
    """

    config: dict[str, Any]
    result: Path
    iterations: int
    zero: int
    poison: bool = False
    faults: tuple[Fault, ...] = ()
    nodes: tuple[Path, ...] = ()


def notes_path(result: Path, rank: int) -> Path:
    """Where a rank's notes lie: one JSON object a line."""
    return result.with_suffix(f".{rank}.jsonl")
