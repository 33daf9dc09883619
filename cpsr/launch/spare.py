"""Spare machines: a launcher that waits takes the place of a machine that is lost, and no other place.

torch's rendezvous lists launchers for which the job has no place. By itself one of them goes for any place that is free
for a moment, also for that of a machine which starts its ranks again. Here it takes one only where too few launchers
have been heard for torch's keep-alive time, and in an order that all who wait agree on.
"""

import json
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from types import FrameType
from typing import Any, NoReturn

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.rendezvous import dynamic_rendezvous

from cpsr.launch.ends import JobEndedError
from cpsr.launch.warm import WarmRanks

__all__ = ["Spare", "waiting"]

IMPORTS = "cpsr/imports"  # in the launchers' store: what a warm process needs
CLOSING_SECONDS = 5.0  # that the end of a job waits for launchers to see it, which look once a second
_torch: Any = dynamic_rendezvous


class Spare:
    """Whether this launcher waits for a place in the job, and what it does meanwhile.

    Args:
        warm: the warm process of this machine.
        print_line: prints one line.
        waits: whether it waits even if the job lacks a machine when it starts (`--spare`).

    Attributes:
        waits: whether it waits now.
        leaves_alone: this launcher ends, and the job goes on without it.
    """

    def __init__(self, warm: WarmRanks, print_line: Callable[[str], None], waits: bool = False) -> None:
        self._warm = warm
        self._print_line = print_line
        self.waits, self.leaves_alone = waits, False
        self._handler: Any = None
        self._members: set[Any] = set()  # of this round
        self._command: tuple[str, ...] = ()
        self._is_told = False  # what a warm process needs, or has told it

    @contextmanager
    def meeting(self, handler: object, command: tuple[str, ...]) -> Iterator[None]:
        """Within this context the launcher joins the others.

        Args:
            handler: of the rendezvous.
            command: of a rank.
        """
        self._handler, self._command = handler, command
        yield
        self._members = set(self._handler._state_holder.state.participants) if self._is_dynamic else set()

    def lost(self) -> str | None:
        """Machines of this start that torch's keep-alive has given up, once another one waits; None: none."""
        if not self._is_dynamic or not (state := self._handler._state_holder.state).wait_list:
            return None
        return ", ".join(sorted(node.addr for node in self._members.difference(state.last_heartbeats))) or None

    def share(self) -> None:
        """Leave in the store what the warm process of a spare needs, once; called periodically on one machine."""
        if not self._is_told and self._warm.needs is not None and self._is_dynamic:
            self._is_told = True
            with suppress(RuntimeError):  # a store that is out of reach ends the rendezvous, too
                self._handler._store.set(IMPORTS, json.dumps(self._warm.needs))

    def look(self) -> None:
        """Keep a warm process, as soon as the ranks of the job have said what it imports; called periodically."""
        with suppress(RuntimeError):
            if not self._is_told and self._handler._store.check([IMPORTS]):
                self._is_told = True
                self._warm.prepare(self._command, json.loads(self._handler._store.get(IMPORTS)))
        self._warm.look()

    @property
    def _is_dynamic(self) -> bool:
        return isinstance(self._handler, dynamic_rendezvous.DynamicRendezvousHandler)

    def begins_to_wait(self) -> None:
        """Note that this launcher has no place."""
        self.waits = True
        for number in (signal.SIGTERM, signal.SIGINT):  # torch handles them from the start of the ranks on
            signal.signal(number, _leave)
        self._print_line("Waiting as a spare: this machine takes the place of one that is lost")

    def takes_a_place(self) -> None:
        """Note that it has one."""
        self.waits = False
        self._print_line("A machine of the job is lost; this one takes its place")


class _Join(_torch._RendezvousJoinOp):  # type: ignore[misc]
    """Says what a launcher does next until it has a place.

    Args:
        spare: this launcher.
    """

    def __init__(self, spare: Spare) -> None:
        self._spare = spare
        self._began = time.monotonic()
        self._deadline: float | None = None  # once a place was taken
        self._is_listed = False
        self._heard: dict[Any, datetime] = {}

    def __call__(self, ctx: Any, deadline: float) -> Any:
        """The next action of this launcher.

        Args:
            ctx: the launcher and the state of the rendezvous.
            deadline: when to give up, in seconds of the monotonic clock; not while it waits as a spare.
        """
        action, state, node = _torch._Action, ctx.state, ctx.node
        if node in state.redundancy_list:
            if not self._is_listed:
                self._is_listed = True
                self._spare.begins_to_wait()
            if state.closed:
                return action.REMOVE_FROM_REDUNDANCY_LIST  # which says that this launcher knows
            if self._has_place(ctx):
                return action.ADD_TO_WAIT_LIST  # and off the other list in the same write
            self._spare.look()
            return action.KEEP_ALIVE if _torch._should_keep_alive(ctx) else action.SYNC
        if self._is_listed and node in state.wait_list | state.participants.keys():
            self._is_listed = False
            self._deadline = time.monotonic() + ctx.settings.timeout.join.total_seconds()
            self._spare.takes_a_place()
        if self._spare.waits and state.closed:
            raise JobEndedError(0, "The job has ended; this spare was not needed")
        if self._spare.waits:
            return action.ADD_TO_REDUNDANCY_LIST
        if node in state.wait_list and state.complete and len(state.participants) >= ctx.settings.max_nodes:
            return action.REMOVE_FROM_WAIT_LIST  # for torch's other list: who waits here has the others start again
        return super().__call__(ctx, self._deadline or deadline)

    def _has_place(self, ctx: Any) -> bool:
        """Whether the job lacks a machine, and it is this launcher's turn."""
        state, settings = ctx.state, ctx.settings
        self._heard |= state.last_heartbeats
        oldest = datetime.now(UTC) - settings.keep_alive_interval * settings.keep_alive_max_attempt
        machines = {node for node, at in self._heard.items() if at >= oldest} - state.redundancy_list
        if not (state.complete or state.round) or not machines:
            return False  # it has not begun; or all have left it, as after SIGTERM
        if time.monotonic() < self._began + settings.keep_alive_interval.total_seconds():
            return False  # one that is between two rounds is not in the state for a moment
        return ctx.node in sorted(state.redundancy_list)[: max(0, settings.max_nodes - len(machines))]


class _Close(_torch._RendezvousCloseOp):  # type: ignore[misc]
    """Ends the job for all launchers; not one of a launcher that only waits, or leaves it to the others.

    Args:
        spare: this launcher.
    """

    def __init__(self, spare: Spare) -> None:
        self._spare = spare
        self._until = time.monotonic() + CLOSING_SECONDS

    def __call__(self, ctx: Any, deadline: float) -> Any:
        """The next action; those who wait have seen the end once their list is empty."""
        action = _torch._Action
        if self._spare.waits or self._spare.leaves_alone:
            return action.FINISH
        following = super().__call__(ctx, deadline)
        is_seen = not ctx.state.redundancy_list or time.monotonic() > self._until
        return following if following is not action.FINISH or is_seen else action.SYNC


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    raise SignalException("while it waited", signal.Signals(number))


@contextmanager
def waiting(spare: Spare) -> Iterator[None]:
    """Within this context a launcher without a place waits by the rule above: torch has no argument for that."""
    names = vars(_torch)
    own = {"_RendezvousJoinOp": lambda: _Join(spare), "_RendezvousCloseOp": lambda: _Close(spare)}
    before = {name: names[name] for name in own}
    names.update(own)
    try:
        yield
    finally:
        names.update(before)
