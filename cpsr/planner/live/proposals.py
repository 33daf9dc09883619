"""Proposed plans on their way from the planner's thread to the training thread."""

import threading

from cpsr.planner.plan import Plan

__all__ = ["Proposals"]


class Proposals:
    """The newest proposal, which is taken once; every method may be called from any thread.

    Attributes:
        newest: taken or not; None before the first.
    """

    def __init__(self) -> None:
        self.newest: Plan | None = None
        self._waiting: Plan | None = None
        self._lock = threading.Lock()

    def offer(self, plan: Plan) -> None:
        """Propose a plan, in place of one that was not taken."""
        with self._lock:
            self._waiting = self.newest = plan

    def take(self) -> Plan | None:
        """A new plan, once; None where there is none."""
        with self._lock:
            plan, self._waiting = self._waiting, None
            return plan
