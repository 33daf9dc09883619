"""What each checkpoint and each snapshot in host memory holds: everything, or of the experts those whose turn it is."""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from cpsr.checkpoint.host_snapshot import Contents, Snapshot
from cpsr.checkpoint.write_assignment import WriteAssignment
from cpsr.checkpoint.writer import SaveOutcome
from cpsr.journal import Beginning
from cpsr.restart.restored_state import Restored

if TYPE_CHECKING:  # loaded when a run opens, by what the job uses
    from cpsr.experts.routed import RoutedTokens
    from cpsr.experts.saving import ExpertSaving

__all__ = ["SomeExperts", "Whole"]


class Whole:
    """Everything, each time; `SomeExperts` decides otherwise. Each rank decides alike, where they must agree.

    Args:
        writes: assigns replicated state to the ranks that write it; None: each rank writes its own.
        tokens: the counter of experts' tokens; None where neither a policy nor windows use them.

    Attributes:
        writes: as given, until `write_own`.
    """

    def __init__(self, writes: WriteAssignment | None, tokens: "RoutedTokens | None" = None) -> None:
        self.writes, self._tokens = writes, tokens
        self._copies_shared = False  # until a commit has compared what ranks would copy for each other
        self._whole: Contents | None = None  # of each snapshot for host memory alone

    @property
    def popularity(self) -> Mapping[str, float]:
        """Operator -> score of its expert, as last counted; empty: none has one."""
        return {} if self._tokens is None else self._tokens.popularity

    def count_tokens(self) -> None:
        """Count what was routed to experts up to now; a collective, and the host waits for the device."""
        if self._tokens is not None:
            self._tokens.take()

    def write_own(self) -> None:
        """From now on each rank copies and writes all of its own state."""
        self.writes = self._whole = None

    def share_copies(self, alike: bool) -> None:
        """Whether a rank may leave to others of its machine what they hold, too; all ranks say the same."""
        self._copies_shared, self._whole = alike, None

    def due(self, iteration: int, *, whole: bool) -> Contents:
        """What this rank's part of the checkpoint of this iteration holds, and who writes it; a collective.

        Args:
            iteration: of the checkpoint.
            whole: nothing is left out.
        """
        self.count_tokens()
        return self._written(Contents(), None)

    def _written(self, contents: Contents, chosen: frozenset[str] | None) -> Contents:
        if self.writes is None:
            return contents
        writers, left = self.writes.share(chosen)
        left = left if self._copies_shared else None
        return replace(contents, writers=writers, replicated=self.writes.replicated, left=left)

    def due_in_memory(self, iteration: int) -> Contents:
        """What the snapshot of this iteration for host memory alone holds; all ranks ask for the same ones."""
        if self._whole is None:
            self._whole = self._written(Contents(), None)
        return self._whole

    def agree_in_memory(self) -> None:
        """Let these snapshots follow what was measured up to now; a collective."""

    def is_whole(self, iteration: int) -> bool:
        """Whether the last checkpoint, if it is of this iteration, holds everything as it then was."""
        return True

    def copied(self, snapshot: Snapshot) -> None:
        """Learn from a copy to host memory."""

    def saved(self, outcome: SaveOutcome | None, interval_seconds: float = 0.0) -> None:
        """Learn how a save ended.

        Args:
            outcome: None: it was not even begun.
            interval_seconds: between two checkpoints, as they are now.
        """

    def rewound(self) -> None:
        """The run has gone back: earlier checkpoints no longer lead to it, and nobody has compared its state."""
        self.share_copies(alike=False)
        if self._tokens is not None:
            self._tokens.forget()

    def state_dict(self) -> dict[str, Any]:
        """For the small state of a checkpoint: plain data."""
        return {}


class SomeExperts(Whole):
    """Everything but experts, and of these the chosen ones: PEC and MOETION.

    Args:
        experts: chooses them.
        writes: as of `Whole`.
        restored: that the life began with.
    """

    def __init__(self, experts: "ExpertSaving", writes: WriteAssignment | None, restored: Restored) -> None:
        super().__init__(writes, experts.tokens)
        self._experts, self._operators = experts, frozenset(experts.units)
        self._all_next = True  # until a checkpoint of this attempt has all of them, none can be left out
        # The engine may have younger experts than the checkpoint of its iteration, if there is one.
        older = restored.beginning is Beginning.OLDER_EXPERTS or any(one.tier == "memory" for one in restored.sources)
        self._whole_iteration = None if older else restored.restored_iteration  # if the last checkpoint has all experts

    def write_own(self) -> None:
        """See `Whole.write_own`."""
        super().write_own()
        self._experts.shares_rest(None)

    def due(self, iteration: int, *, whole: bool) -> Contents:
        """See `Whole.due`."""
        chosen = self._experts.choose(iteration, whole=whole or self._all_next)
        self._all_next = False
        self._whole_iteration = iteration if chosen is None else None
        units = self._experts.units
        saved = frozenset(name for name, unit in units.items() if chosen is None or unit in chosen)
        return self._written(Contents.sparse(self._operators, saved), chosen)

    def due_in_memory(self, iteration: int) -> Contents:
        """The experts with the most to lose, as many as an iteration hides."""
        left_out = self._experts.in_memory.left_out(iteration)
        return self._written(Contents(self._operators, left_out), None)

    def agree_in_memory(self) -> None:
        """See `Whole.agree_in_memory`."""
        self._experts.agree_in_memory()

    def is_whole(self, iteration: int) -> bool:
        """See `Whole.is_whole`."""
        return iteration == self._whole_iteration

    def copied(self, snapshot: Snapshot) -> None:
        """See `Whole.copied`."""
        seconds = snapshot.copy_seconds, snapshot.overlap_seconds
        self._experts.in_memory.copied(snapshot.copied_bytes, *seconds, snapshot.carried_bytes)

    def saved(self, outcome: SaveOutcome | None, interval_seconds: float = 0.0) -> None:
        """See `Whole.saved`."""
        if outcome is not None and outcome.status in ("committed", "written"):
            self._experts.note_saved(outcome.written_bytes, outcome.write_seconds, interval_seconds)
        else:
            self._all_next = True  # the experts that it left out may not be in any kept checkpoint
            self._whole_iteration = None

    def rewound(self) -> None:
        """See `Whole.rewound`."""
        super().rewound()
        self._experts.forget()
        self._all_next = True

    def state_dict(self) -> dict[str, Any]:
        """See `Whole.state_dict`."""
        return self._experts.state_dict()
