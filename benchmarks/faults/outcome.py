"""What became of one injected fault."""

from dataclasses import dataclass

__all__ = ["Outcome"]


@dataclass(frozen=True)
class Outcome:
    """One fault, and what a new start of the job found after it.

    Attributes:
        scenario: the kind of fault and the work that met it.
        fault: this one of its kind.
        injected: False where the fault did not happen; then `survived` means nothing.
        survived: the newest state that was promised came back, the next save was committed, and failures gave a reason.
        state_equal: everything that was read back is bit for bit what was saved.
        seconds: until the state was back and the following save committed, from the restart on.
        what: what went wrong, or why it could not be injected; else what the job reported.
    """

    scenario: str
    fault: str
    injected: bool
    survived: bool
    state_equal: bool
    seconds: float
    what: str = ""

    @property
    def good(self) -> bool:
        """Whether it was injected and survived, with equal state."""
        return self.injected and self.survived and self.state_equal
