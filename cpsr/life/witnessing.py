"""Witnesses of a life's steps, and the check of steps that a restart repeats."""

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
import xxhash

from cpsr.engines.weight_sample import SentSample, WeightSample
from cpsr.errors import NotRestoredError
from cpsr.job import Job
from cpsr.life.loop import Steps
from cpsr.life.run_state import RunState
from cpsr.ranks.link import report
from cpsr.state.losses import LossRecorder
from cpsr.state.witness import (
    ARITHMETIC,
    CHECKED,
    NOT_RESTORED,
    RATES,
    Difference,
    SampledBytes,
    What,
    Witness,
    Witnesses,
    difference,
    witness_path,
)

__all__ = ["Witnessing", "likely_causes"]

NONE_LEFT = "no witness of these steps is left"
OTHERWISE = "the run came to these steps from another state, or with other hyperparameters"
# After each saved state: a restart may repeat them, and the second shows what the loop does after a step.
SAMPLED_STEPS = 2
AUTOCAST_FORWARDS = 8  # of a life, that are looked at for an autocast
PENDING = 8  # steps whose samples may still be on their way from a GPU
_CHANGED = "the script or the data was changed"
_COUNTS = "the loop counts batches or steps by itself: use recovery.epoch, recovery.batch and recovery.iteration"
_CAUSES: dict[What, tuple[str, ...]] = {
    "batch position": (
        _COUNTS,
        "batches are drawn ahead, in another thread",
        "the dataset, the sampler or the batch size has changed",
    ),
    "learning rate": (_COUNTS, "a schedule is not given to the adapter, nor to recovery.register"),
    "loss": (
        "not all batches come from one recovery.resume(loader), or the data draws random numbers that are not restored",
        "an object that the loop changes is not given to recovery.register",
        "the loop changes weights or buffers after the step, and the restart went on before that",
        _COUNTS,
    ),
    "weights": (
        "an object that changes the gradients or the update is not given to recovery.register",
        "the optimizer keeps an attribute that its state_dict lacks: keep it in a dictionary that is registered",
        _COUNTS,
    ),
}


def likely_causes(found: Difference, *, script_changed: bool = False) -> list[str]:
    """Likely causes of a difference, in order; without a known loss, weights also show what would change the loss.

    Args:
        found: the difference.
        script_changed: whether the script was probably changed, as where people have stopped a job in good order.
    """
    blind = found.what == "weights" and not found.loss_is_known
    causes = [*(_CAUSES["loss"] if blind else ()), *_CAUSES[found.what]]
    causes.insert(0 if script_changed else len(causes), _CHANGED)
    return list(dict.fromkeys(causes))


_NO_SAMPLE = SampledBytes(b"", (0, 0, 0, 0))


@dataclass(frozen=True)
class _Pending:
    witness: Witness  # without loss and weights
    sample: SentSample
    whole: bool


class Witnessing:
    """Records a witness of every step, and compares a repeated step with its first execution.

    Weights are sampled in saved states and the two steps after each: errors of a restart show there first.

    Its cost per step is on docs/witnesses.md. Each rank compares its own steps. Two executions
    are compared if the run had the same number of ranks and the same history of predicted and loaded states.

    Args:
        replays: None, or what it returns is: all weights are trained. Else a window is replayed, which checks the
            weights itself: whether this rank computes the step.

    Attributes:
        looks: whether `on_forward` is still to be called.

    Raises:
        NotRestoredError: in a step that differs, with `restart.on_difference: stop`.
    """

    def __init__(
        self,
        job: Job,
        state: RunState,
        losses: LossRecorder,
        steps: Steps,
        replays: Callable[[], bool | None] | None,
    ) -> None:
        self._job, self._state, self._losses, self._steps = job, state, losses, steps
        self._replays = replays
        self._expected = 0  # steps that will be repeated and have a witness of their first execution
        self._obstacle = NONE_LEFT
        self._sample = WeightSample(job.adapter, job.shard)
        self._on_device = self._sample.device is not None and self._sample.device.type != "cpu"
        self._device, self.looks = job.adapter.device.type, True
        self._ring = self._open(job)
        self._pending: deque[_Pending] = deque()
        self._epsilon, self._forwards = _epsilon_of(job), 0
        self._trajectory = 0
        self._last = 0  # newest step with a witness of its first execution
        self._sampled_until = 0  # newest step whose weights are sampled in any case
        self._checked = 0
        self._rounded = 0  # first step that differed by rounding
        self._verdict: Difference | None = None

    def _open(self, job: Job) -> Witnesses | None:
        path = witness_path(job.config.run_dir, job.group.rank)
        try:
            return Witnesses(path)
        except OSError as error:
            self._obstacle = f"{path} cannot be written ({error.strerror or error})"
            message = f"{self._obstacle}: this life keeps no witnesses, and repeated steps are not checked"
            job.journal.event("no witnesses", message, level=logging.WARNING)
            return None

    def compare_after(self, iteration: int) -> None:
        """The state is that after `iteration`; later steps that this run has executed before will be compared."""
        self._pending.clear()
        self._checked = self._rounded = self._expected = 0
        self._verdict = None
        self._trajectory = self._of_state()
        self._sampled_until = iteration + SAMPLED_STEPS
        if self._ring is None:
            return
        left = list(self._ring.after(iteration))
        repeated = {one.iteration for one in left if one.trajectory == self._trajectory}
        self._obstacle = OTHERWISE if left else NONE_LEFT
        self._expected, self._last = len(repeated), max(repeated, default=iteration)

    def outlook(self, lost_iterations: int) -> str:
        """Whether the steps that this restart repeats are checked, one clause for people."""
        if self._job.run.resized:
            return "not checked: the run had another number of ranks"
        if not self._expected:
            return f"not checked: {self._obstacle if lost_iterations > 0 else 'no step is repeated'}"
        if lost_iterations <= 0:
            return f"{self._expected} of its steps are compared with those that the last life trained after saving"
        which = "each repeated step is" if self._expected >= lost_iterations else f"{self._expected} of them are"
        return f"{which} compared with its first execution"

    def _of_state(self) -> int:
        job = self._job
        place = job.group.rank, job.group.size, job.adapter.micro_batches_per_iteration, self._sample.layout
        return xxhash.xxh3_64_intdigest(repr((place, *self._state.descent)).encode())

    # On the training thread, in every step

    def on_forward(self) -> None:
        """A training forward begins: its dtype may be that of an autocast, as in all of this life."""
        if self._forwards < AUTOCAST_FORWARDS:
            self._forwards += 1
            if torch.is_autocast_enabled(self._device):
                self._epsilon = max(self._epsilon, torch.finfo(torch.get_autocast_dtype(self._device)).eps)
        else:
            self.looks = self._on_device
        if self._pending:
            self.poll()

    def after_step(self, iteration: int, *, saves: bool) -> None:
        """One step is complete, its loss is closed, and the loop has changed nothing since.

        Args:
            iteration: of the step.
            saves: whether its state is to be saved.
        """
        if saves:
            self._sampled_until = max(self._sampled_until, iteration + SAMPLED_STEPS)
        computes = None if self._replays is None else self._replays()
        if self._ring is None or computes is False:
            return
        whole = computes is None
        position, loss = self._state.reached, self._losses.newest
        if position.batch == position.batches_per_epoch:
            position = position.advanced(0)
        sent, weights = None, _NO_SAMPLE
        seen, on_its_way = (None, loss) if isinstance(loss, torch.Tensor) else (loss, None)
        samples = iteration <= self._sampled_until or iteration <= self._last
        if self._on_device and (samples or on_its_way is not None):
            sent = self._sample.send(on_its_way, weights=samples)
        elif samples:
            weights = self._sample.read()
        rates = self._steps.rates
        others = xxhash.xxh3_64_intdigest(repr(rates[RATES:]).encode()) if len(rates) > RATES else 0
        seen_by = iteration, self._job.journal.life, self._trajectory
        place = position.epoch, position.batch, position.batches
        witness = Witness(*seen_by, *place, tuple(rates[:RATES]), others, seen, weights, self._epsilon)
        if sent is None:
            self._complete(witness, whole)
            return
        if len(self._pending) == PENDING:
            self._pending.popleft()  # the host is far ahead of the device
        self._pending.append(_Pending(witness, sent, whole))

    def poll(self) -> None:
        """Record the steps whose samples have arrived; without waiting."""
        while self._pending and self._pending[0].sample.arrival.here:
            self._record(self._pending.popleft())

    @property
    def keeps_steps(self) -> bool:
        """Whether the witness of a step would be kept now."""
        return self._ring is not None and (self._replays is None or self._replays() is None)

    def last_step(self, iteration: int) -> None:
        """As `after_step`, at the end of a life; waits for the device."""
        self.after_step(iteration, saves=True)
        if self._pending and self._sample.device is not None:
            torch.cuda.synchronize(self._sample.device)
        while self._pending:
            self._record(self._pending.popleft())

    def _record(self, pending: _Pending) -> None:
        (weights, loss), witness = pending.sample.read(), pending.witness
        self._complete(witness._replace(loss=witness.loss if loss is None else loss, weights=weights), pending.whole)

    def _complete(self, witness: Witness, whole: bool) -> None:
        assert self._ring is not None
        if witness.iteration <= self._last:
            self._compare(witness if whole else witness._replace(weights=_NO_SAMPLE))
        if whole:  # else that of the first execution stays
            self._ring.put(witness)

    # The check

    def _compare(self, again: Witness) -> None:
        """Compare a repeated step with its first execution, which the ring still has."""
        assert self._ring is not None
        step = again.iteration
        first = self._ring.find(step)
        if self._verdict is None and first is not None and first.trajectory == self._trajectory:
            self._checked += 1
            slack = 2.0 ** min(step - self._rounded, 60) if self._rounded else 1.0
            before = self._ring.find(step - 1)
            found = difference(first, again, None if self._rounded else before, slack)
            if found is not None and not (self._rounded and found.rounding):
                self._report(found)
        if step == self._last and self._verdict is None:
            self._end()

    def _report(self, found: Difference) -> None:
        if found.rounding:
            self._rounded = found.iteration
            message = f"arithmetic is not deterministic: {found.amount:.1g} at step {found.iteration} ({found.what})"
            self._job.journal.event(ARITHMETIC, message, found.iteration, logging.WARNING)
            return
        self._verdict, message = found, self._message(found)
        self._job.journal.event(NOT_RESTORED, message, found.iteration, logging.ERROR)
        if self._job.config.restart.on_difference == "stop":
            raise NotRestoredError(
                f"{message}. restart.on_difference is 'stop', so the job ends; the checkpoints before this step are "
                "kept. Correct the loop. Its first steps then differ from those of the loop before: start it once with "
                "restart.on_difference 'warn', or begin a new run"
            )

    def _message(self, found: Difference) -> str:
        """What differs first, and the likely causes in order."""
        rank = f"rank {self._job.group.rank}: " if self._job.group.size > 1 else ""
        first, again = found.first, found.again
        if found.elements:
            first, again = "", f"the first is {self._sample.name(found.elements[0])}"
        values = f"{first} at first, {again} now" if first else f"by {found.amount:.1g}; {again}"
        causes = "; ".join(
            f"({number}) {cause}"
            for number, cause in enumerate(likely_causes(found, script_changed=self._job.run.ended is not None), 1)
        )
        return (
            f"{rank}this loop is not restored: in step {found.iteration}, which the restart repeats, {found.differs} "
            f"first ({values}). Likely causes: {causes}"
        )

    def _end(self) -> None:
        steps = f"{self._checked} repeated step{'' if self._checked == 1 else 's'}"
        if self._rounded:
            message = f"checked over {steps}: equal but for rounding from step {self._rounded} on"
        else:
            message = f"exact, checked over {steps}"
        launcher = report() if self._job.group.rank == 0 else None
        self._job.journal.event(CHECKED, message, self._last, logging.INFO if launcher is None else logging.DEBUG)
        if launcher is not None:
            launcher.recovered(f"{message[0].upper()}{message[1:]}.")

    def close(self) -> None:
        """Record what has arrived, and close the file, which keeps its content."""
        if self._ring is not None:
            self.poll()
            self._ring.close()


def _epsilon_of(job: Job) -> float:
    """Machine epsilon of the least precise dtype of weights in forward and backward."""
    dtypes = {one.parameter.values.dtype for one in job.shard.operators.values()}
    dtypes |= set(job.adapter.compute_dtypes().values())
    return max((torch.finfo(one).eps for one in dtypes if one.is_floating_point), default=torch.finfo().eps)
