"""Step boundaries: when the state is consistent, its publication, and its emergency dump.

The host launches steps on a GPU before it completes them. Those that are complete are published.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass
from typing import Any

import torch

from cpsr.checkpoint.boundary import EarlierStep
from cpsr.checkpoint.device import StepEvents
from cpsr.checkpoint.progress import ProgressCounter, progress_path
from cpsr.checkpoint.snapshot import SnapshotPool
from cpsr.engines import TorchAdapter
from cpsr.engines.torch_loop import CAPTURED
from cpsr.errors import SaveError, UnsupportedEngineError
from cpsr.job import Ending, Job, Rewind
from cpsr.life.run_state import RunState
from cpsr.ranks.board import Board
from cpsr.ranks.emergency_dump import EmergencyDump
from cpsr.ranks.exits import Exit, lost_another, note_exit
from cpsr.ranks.group import this_node
from cpsr.ranks.heartbeat import NONE
from cpsr.ranks.liveness import GivenUp, Liveness
from cpsr.ranks.slow_ranks import Place, SlowRanks, device_name
from cpsr.state.codec import host_copy

__all__ = ["Boundary", "Publication"]

logger = logging.getLogger(__name__)

# At the end of a life, for a device that still has steps in its queue.
DEVICE_SECONDS = 10.0
POLL_SECONDS = 0.01  # at the end of a life
UNSTEPPED_BATCHES = 100  # of an iteration each, in which weights change: something trains them
UNSEEN = (
    "weights changed while the loop took {} batches, and {}.step() was called after none of them. Pass TorchAdapter "
    f"the optimizer that the loop calls; or a CUDA graph holds the step. {CAPTURED}"
)


class Boundary:
    """Publishes each step that is complete: the step counter, the heartbeat, and the state for an emergency dump.

    Attributes:
        emergency_dump: dumps the state when this rank leaves a broken group. From its `begin_update` on the state
            belongs to no iteration, until the next `publish` or `rewound`.
        liveness: watches the other ranks.
        no_dump: why no dump may be left, as while the state may still be discarded; None: one may.
        on_device: whether steps are complete later than the host has launched them.
    """

    def __init__(self, job: Job, board: Board, pool: SnapshotPool, state: RunState) -> None:
        self._job, self._pool, self._state = job, pool, state
        self.no_dump: str | None = None
        self._unstepped: dict[str, str] | None = None  # sums of the weights, while a loop takes batches alone
        state.frozen.on_moved = self._on_frozen_moved
        config, rank = job.config, job.group.rank
        counter, steps = ProgressCounter(progress_path(config.run_dir, rank)), pool.steps
        # Alone, no step waits for another rank.
        self.on_device = steps.events is not None
        self._counter = counter
        self._publication = Publication(counter, steps.events, steps.updates if job.group.size > 1 else None)
        self.emergency_dump = EmergencyDump(
            self._dump,
            self._report_dump,
            config.ranks.sigterm_grace_seconds,
            lambda: self.liveness.obstacle(),
            job.journal.flush,
        )
        self.liveness = Liveness(
            config.run_dir,
            job.journal.life,
            board,
            config.ranks,
            self._give_up,
            job.journal.event,
            self._slow_ranks().look,
        )
        self.liveness.start()

    def _slow_ranks(self) -> SlowRanks:
        """Compares the ranks (on rank 0); a collective."""
        job, pipeline = self._job, self._job.adapter.pipeline
        device = device_name(str(job.adapter.device))
        own = Place(this_node(), device, 0 if pipeline is None else pipeline.stage)
        places = [Place(**place) for place in job.group.gather(asdict(own))]
        return SlowRanks(job.config.run_dir, job.journal.life, places, job.journal.event)

    def prepare(self) -> None:
        """Before the first step: mark its boundary, and prepare a dump."""
        self._pool.steps.prepare_dump(self._state.left)
        self._pool.mark_boundary()

    @property
    def changing(self) -> bool:
        """Whether an update or another change of the state has begun, and not ended: it belongs to no iteration."""
        return self.emergency_dump.updating

    def before_update(self) -> None:
        """The next update is about to be launched, while the device may not have completed this step."""
        self._publication.poll()
        self._publication.before_update(self._state.left)

    def begin_update(self) -> None:
        """The host launches an update."""
        self._publication.begin_update()

    def poll(self) -> None:
        """Publish the steps that the device has completed by now."""
        self._publication.poll()

    def require_steps(self) -> None:
        """Check that the loop asks for a batch between two steps, and that its steps are seen.

        The weights of a loop that takes many batches without a step are compared: an accumulation leaves them as they
        are. On the training thread.

        Raises:
            UnsupportedEngineError: inside a step, to which the batch would be counted; or weights changed over many
                batches, of which none was followed by a step.
        """
        draws, adapter = self._state.draws, self._job.adapter
        if not isinstance(adapter, TorchAdapter):
            return
        if self.changing:
            adapter.require_complete_step()
        if draws.counts or not draws.drawn or draws.drawn % (UNSTEPPED_BATCHES * adapter.micro_batches_per_iteration):
            return
        weights = {name: _sum_of(one.parameter.values) for name, one in adapter.shard().operators.items()}
        before, self._unstepped = self._unstepped, weights
        if before not in (None, weights):
            raise UnsupportedEngineError(UNSEEN.format(draws.drawn, type(adapter.optimizer).__name__))

    def publish(self, iteration: int) -> None:
        """The host has launched a step: the state is that after it."""
        event = self._pool.mark_boundary()
        if event is None:
            self._counter.publish(iteration, self._state.trained.batches)
        else:
            self._publication.step(iteration, self._state.trained.batches, event)
        self.emergency_dump.end_update(iteration)

    def reset(self, iteration: int) -> None:
        """The state is that of another iteration, possibly an earlier one."""
        self._publication.reset(iteration, self._state.trained.batches)

    def rewound(self, to: Rewind) -> None:
        """The state is that of another iteration; unless it was not changed, and stays that of the last step."""
        if self.emergency_dump.updating:
            self.reset(to.iteration)
            self.publish(to.iteration)

    def busy(self) -> AbstractContextManager[None]:
        """No step ends inside, on purpose."""
        return self.liveness.busy()

    def leave_in_order(self) -> None:
        """All ranks end together: stop watching the others, and dump nothing."""
        self.emergency_dump.leave_in_order()
        self.liveness.finish()

    def abandon(self, error: BaseException | None) -> None:
        """The group is broken: dump the state of the last boundary, and stop watching the others."""
        self.liveness.settle()
        silent = self.liveness.silent_rank()  # whose collective has timed out
        left = Exit(self._job.group.rank, error=_one_line(error), given_up=silent)
        note_exit(self._job.run.path, self._job.journal.life, left)
        # The error itself is the script's to print; what SystemExit says would be seen nowhere else.
        named = _one_line(error) if isinstance(error, SystemExit) else type(error).__name__
        self.emergency_dump.dump(f"the training loop was left with {named}")
        self.liveness.close(ended=False)

    def close(self, ending: Ending) -> None:
        """Close the counter, which keeps its value; the heartbeat shows how this rank has ended."""
        with ExitStack() as closing:  # an error of one keeps none of the others open
            # Last, since a dump publishes. Only at an error may the device hang.
            closing.callback(self._publication.close, DEVICE_SECONDS if ending.in_order else 0.0)
            closing.callback(self.emergency_dump.close)
            closing.callback(lambda: self.liveness.close(ended=ending.in_order))

    def _give_up(self, why: GivenUp) -> None:
        """Another rank is gone, or training hangs: end this process, from another thread."""
        whom = None if why.lost_rank == NONE else why.lost_rank
        told: dict[str, Any] = {"error": why.reason} if lost_another(why.reason) else {"left": why.reason}
        note_exit(self._job.run.path, self._job.journal.life, Exit(self._job.group.rank, given_up=whom, **told))
        self.emergency_dump.leave(why.reason)

    def _dump(self, iteration: int) -> int:
        """Dump the state before this rank leaves a broken group; returns its iteration."""
        if self.no_dump is not None:
            raise SaveError(self.no_dump)
        if self._state.repeats_batches:
            raise SaveError("the loop was between two steps on one batch, which no position in the data tells")
        state, adapter = self._state, self._job.adapter
        if adapter.scalars(on_device=True).get("module") is not None:
            raise SaveError(
                "the module keeps state outside of its first buffers (its extra state, or a buffer that has grown), "
                "which a forward may have changed since the step"
            )
        dumped = self._pool.dump(adapter.shard, iteration, state.left, self._publication.earlier, frozen=state.frozen)
        self._publication.poll()  # the dump waited for the device, which has completed the step
        return dumped

    def _report_dump(self, kind: str, message: str, iteration: int | None, level: int) -> None:
        """A restart in mode exact takes no dump: a line that names its iteration would announce another one."""
        unused = self._job.config.mode == "exact" and kind == "dumped"
        self._job.journal.event(kind, message, iteration, logging.DEBUG if unused else level)

    def _on_frozen_moved(self, moved: Mapping[str, torch.Tensor]) -> None:
        """Parameters outside the optimizer were written to: from now on an emergency dump has them, too."""
        self._pool.watch(moved)
        self._job.journal.event(
            "frozen weights changed",
            f"{len(moved)} parameters outside the optimizer (the first is {min(moved)!r}) were written to: snapshots "
            f"have their {sum(values.nbytes for values in moved.values())} bytes as they then are. Once they have "
            "rested from one checkpoint to the next they are written to a file of their own",
            self._job.adapter.iteration,
        )


def _one_line(error: BaseException | None) -> str:
    """An exception's kind and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


@dataclass(eq=False)
class _Step:
    event: torch.cuda.Event
    iteration: int
    batches: int
    boundary: int
    begins: torch.cuda.Event | None  # before its update; None: not known
    small: Any = None  # the small state before the next update


def _sum_of(values: torch.Tensor) -> str:
    """In text: NaN is then like NaN."""
    return str(values.detach().sum(dtype=torch.complex128 if values.is_complex() else torch.float64).item())


class Publication:
    """The step counter of a rank, never ahead of its device.

    A step that is still queued dies with the process: it counts neither as trained, nor its batches as used. `step` and
    `reset` belong to the training thread.

    Args:
        counter: what a restart reads.
        events: of the step boundaries on the device; None on the host.
        updates: for the begin of updates there; None: no earlier step is ever dumped.

    Attributes:
        published: the newest step that the device has completed; on the host not kept.
    """

    def __init__(self, counter: ProgressCounter, events: StepEvents | None, updates: StepEvents | None = None) -> None:
        self._counter = counter
        self._events = events
        self._updates = updates
        self._pending: deque[_Step] = deque()  # oldest first
        self._complete: _Step | None = None  # the newest that is published
        self.published = 0
        self._begun: torch.cuda.Event | None = None  # of the update under way
        self._polling = threading.Lock()  # around the device's answers, for which no other thread waits
        self._changing = threading.Lock()  # around the steps and the counter, for a few lines

    def step(self, iteration: int, batches: int, event: torch.cuda.Event) -> None:
        """Publish this iteration once its event is complete.

        Args:
            iteration: that the host has launched.
            batches: used up to it.
            event: of its boundary.
        """
        assert self._events is not None
        with self._changing:
            begins, self._begun = self._begun, None
            if self._pending and self._pending[-1].event is event:  # all are held: it took over the last one's
                begins = self._pending.pop().begins  # what follows the step before begins there
            else:
                self._events.hold(event)
                if begins is not None and self._updates is not None:
                    self._updates.hold(begins)
            self._pending.append(_Step(event, iteration, batches, self._events.recorded, begins))
        self.poll()

    def before_update(self, small: Callable[[], Any]) -> None:
        """Keep the small state of the last step, which the device may not have completed."""
        if self._updates is None:
            return
        try:
            kept = host_copy(small())
        except UnsupportedEngineError as error:
            self._updates = None
            logger.info("an emergency dump waits for the newest step, and takes no earlier one: %s", error)
            return
        with self._changing:
            newest = self._pending[-1] if self._pending else self._complete
            if newest is not None:
                newest.small = kept

    def begin_update(self) -> None:
        """The host launches an update: mark its begin on the device."""
        if self._events is not None:
            self._events.updating()
        if self._updates is not None and self._begun is None:
            self._begun = self._updates.record()

    def earlier(self) -> EarlierStep | None:
        """The last step that the device has completed, if later ones wait there; on any thread.

        Raises:
            RuntimeError: the device has failed.
        """
        self.poll()
        with self._changing:
            complete, updates = self._complete, self._updates
            following = self._pending[0] if self._pending else None
        if complete is None or complete.small is None or updates is None:
            return None
        if following is None or (begins := following.begins) is None:
            return None

        def overtaken() -> bool:
            begun = updates.reached(begins)
            with self._changing:  # once that step is published, the event may be another's
                return begun or not self._pending or self._pending[0] is not following

        if overtaken():
            return None
        return EarlierStep(complete.iteration, complete.boundary, complete.small, overtaken)

    def poll(self) -> None:
        """Publish the steps that are complete by now, the newest last; on any thread, without waiting.

        Raises:
            RuntimeError: the device has failed.
        """
        # A second thread need not wait: the first one publishes.
        if self._events is None or not self._pending or not self._polling.acquire(blocking=False):
            return
        try:
            while (step := self._oldest()) is not None and self._events.reached(step.event):
                self._publish(step)
        finally:
            self._polling.release()

    def reset(self, iteration: int, batches: int) -> None:
        """The state is that of another iteration: steps that are still pending lead elsewhere."""
        with self._changing:
            self._forget()
            self._counter.reset(iteration, batches)
            self.published = iteration

    def close(self, wait_seconds: float) -> None:
        """Publish what the device completes within this time, and close the counter, which keeps its value."""
        deadline = time.monotonic() + wait_seconds
        try:
            self.poll()
            while self._pending and time.monotonic() < deadline:
                time.sleep(POLL_SECONDS)
                self.poll()
        except RuntimeError as error:  # a life that ends with an error raises that
            logger.warning("the device has failed, and its last %d steps do not count: %s", len(self._pending), error)
        finally:
            with self._changing:
                self._forget()
                self._counter.close()

    def _oldest(self) -> _Step | None:
        with self._changing:
            return self._pending[0] if self._pending else None

    def _publish(self, step: _Step) -> None:
        with self._changing:
            if not self._pending or self._pending[0] is not step:  # forgotten, or taken over, while the device answered
                return
            self._pending.popleft()
            self._counter.publish(step.iteration, step.batches)
            self._release(step)
            self._complete = step
            self.published = step.iteration

    def _forget(self) -> None:
        self._complete = self._begun = None
        while self._pending:
            self._release(self._pending.popleft())

    def _release(self, step: _Step) -> None:
        assert self._events is not None
        self._events.release(step.event)
        if step.begins is not None and self._updates is not None:
            self._updates.release(step.begins)
