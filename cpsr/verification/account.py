"""What the verifications of a run have cost and found, kept over its lives."""

import json
import logging
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from cpsr.checkpoint.files import temporary_name

__all__ = ["Account"]

logger = logging.getLogger(__name__)

FILE = "verification.json"


@dataclass
class Account:
    """The time that verifications may take and have taken, and what they found; in the run's directory.

    Rank 0 reads the file, and writes it after each verification. Where it cannot be read, the account begins anew:
    nothing is verified yet.

    Attributes:
        trained_seconds: since the run began, without verifications.
        spent_seconds: on verifications.
        verified: iterations of the newest committed checkpoint that is verified, and of later ones, ascending.
        wrong: `host/device` -> how often its arithmetic was wrong.
        off: why no step is verified any more; None where steps are.
    """

    trained_seconds: float = 0.0
    spent_seconds: float = 0.0
    verified: list[int] = field(default_factory=list)
    wrong: dict[str, int] = field(default_factory=dict)
    off: str | None = None

    def __post_init__(self) -> None:
        self._seen = time.perf_counter()

    @classmethod
    def of_run(cls, run_dir: Path) -> "Account":
        """That of a run; a new one where it has none."""
        try:
            return cls(**json.loads((run_dir / FILE).read_text(encoding="utf-8")))
        except FileNotFoundError:
            return cls()
        except (OSError, ValueError, TypeError) as error:
            logger.warning("%s cannot be read (%s): no checkpoint counts as verified", run_dir / FILE, error)
            return cls()

    def save(self, run_dir: Path) -> None:
        """Write it; not forced to disk, since a crash of the machine loses an account, and no state."""
        written = temporary_name(run_dir / FILE)
        try:
            written.write_text(json.dumps(asdict(self)), encoding="ascii")
            written.replace(run_dir / FILE)
        except OSError as error:
            logger.warning("%s cannot be written: %s", run_dir / FILE, error)

    def note_committed(self, iteration: int) -> None:
        """This checkpoint is committed: if it is verified, earlier ones need not be kept for that."""
        if iteration in self.verified:
            self.verified = [one for one in self.verified if one >= iteration]

    def affords(self, seconds: float, fraction: float) -> bool:
        """Whether the training so far has earned a verification that takes so long."""
        now = time.perf_counter()
        self.trained_seconds += now - self._seen
        self._seen = now
        return self.spent_seconds + seconds <= fraction * self.trained_seconds

    def spend(self, seconds: float) -> None:
        """A verification has taken so long, until now."""
        self.spent_seconds += seconds
        self._seen += seconds
