"""What every job that the tests launch is given, and where it leaves its result."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["LifeOptions"]


@dataclass(frozen=True)
class LifeOptions:
    """One life of a job; each job has more.

    Attributes:
        config: CPSR's configuration.
        result: where the result goes, `.<rank>.json` appended.
        iterations: end of the run.
    """

    config: dict[str, Any]
    result: Path
    iterations: int

    @property
    def meeting(self) -> str:
        """The file through which the ranks find each other."""
        return f"file://{self.result.with_suffix('.ranks')}"

    def leave(self, rank: int, found: Any) -> None:
        """Leave what a rank has to say at its end."""
        self.result.with_suffix(f".{rank}.json").write_text(json.dumps(found))
