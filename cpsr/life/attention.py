"""The mark of a step whose end has more to do than that of an ordinary one."""

__all__ = ["Attention"]


class Attention:
    """Tells the training thread when to look for work at the end of a step; an ordinary step compares once.

    Each look names the iteration of the next one, by all that is due at some iteration. What comes from elsewhere
    calls: a signal, the result of a save or of a copy, a new plan, another state of the run.
    """

    def __init__(self) -> None:
        self._called = True
        self._at = 0

    def call(self) -> None:
        """The end of the next step looks; on any thread, also in a handler of a signal."""
        self._called = True

    def is_due(self, iteration: int) -> bool:
        """Whether the end of this step looks. It then looks for what came before this; later calls are of the next.

        Until `look_at`, each step looks.
        """
        if not self._called and iteration < self._at:
            return False
        self._called, self._at = False, 0
        return True

    def look_at(self, iteration: int) -> None:
        """The next look is at the end of this iteration, or sooner if one is called for."""
        self._at = iteration
