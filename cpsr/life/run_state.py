"""The small exact state of a running job: captured with every checkpoint, restored at every restart."""

import copy
import logging
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from cpsr.elastic.global_batch import GlobalBatch
from cpsr.engines import optimizer_state
from cpsr.engines.adapter import EngineAdapter
from cpsr.engines.evaluation import capture_random_states, restore_random_states
from cpsr.engines.torch_refusals import refuse_known
from cpsr.errors import ConfigError, RecoveryError
from cpsr.job import Rewind
from cpsr.life.drawn_batches import Draws
from cpsr.life.hyperparameters import Hyperparameters
from cpsr.restart.prediction import Probes
from cpsr.restart.restore import Restored
from cpsr.state import codec
from cpsr.state.data_recognition import difference_of_data, recognisable
from cpsr.state.frozen_parameters import FrozenWeights
from cpsr.state.host_random import restore_host_rng
from cpsr.state.loader import LoaderHooks, ResumableLoader
from cpsr.state.loader_kinds import dealer_of, is_repeating
from cpsr.state.loader_workers import count_other_loaders, expect_other_loaders
from cpsr.state.losses import LossRecorder
from cpsr.state.small_state import DataPosition, Scalars
from cpsr.state.user_objects import Stateful, stateful

if TYPE_CHECKING:  # loaded when a run opens, by what the job uses
    from cpsr.learning.learner import Learner

__all__ = ["RunState"]

logger = logging.getLogger(__name__)

TWO_STREAMS = (
    "a batch was requested from a stream after resume() had been called once more: two streams are open, and CPSR "
    "keeps the position of one. To train on several loaders side by side, give resume() one iterable that returns "
    "batches of all: a DataLoader over torch's StackDataset, Lightning's CombinedLoader, or resume(pairs()) with a "
    "generator pairs() that does 'yield from zip(first, second)'. Iterate over validation data without resume()"
)


class RunState:
    """Keeps counters that the engine lacks, and collects the state of a checkpoint beside its tensors.

    Args:
        adapter: the engine.
        losses: this rank's training losses.
        probes: recent inputs.
        learner: its predictor's state is saved with every checkpoint.
        waiting, loading: as in `LoaderHooks`.
        global_batch: is compared with that of the run; None: with nothing.
        hyperparameters: `restart.hyperparameters`.
        exact: whether other data than those of the run are refused.

    Attributes:
        hyperparameters: those of the script and of the run.
        notice: what the script sets otherwise than the run, for people; None if nothing.
        frozen: parameters outside the optimizer.
        draws: follows the batches that the loop draws.
    """

    def __init__(
        self,
        adapter: EngineAdapter,
        losses: LossRecorder,
        probes: Probes,
        learner: "Learner",
        waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
        loading: Callable[[], AbstractContextManager[None]] = nullcontext,
        global_batch: GlobalBatch | None = None,
        hyperparameters: Literal["checkpoint", "script"] = "checkpoint",
        *,
        exact: bool = False,
    ) -> None:
        self._adapter = adapter
        self.hyperparameters = Hyperparameters(adapter, hyperparameters)
        self.notice: str | None = None
        self._exact = exact
        self._global_batch = global_batch or GlobalBatch(adapter, None)
        self._losses = losses
        self._probes = probes
        self._learner = learner
        self._waiting, self._loading = waiting, loading
        self.frozen = FrozenWeights(adapter.frozen)
        self._registered: dict[str, Stateful] = {}
        self.objects: list[Any] = []  # as they were registered
        self.optimizers: list[Optimizer] = []  # of these
        self._unclaimed: dict[str, Any] = {}  # restored state of objects that are not registered yet
        self._restored = self._warned = False
        # At which iteration optimizers were restored, and their parameter groups then.
        self._rates: tuple[int, list[tuple[Optimizer, Any]]] = -1, []
        self._pending_rng: dict[str, Any] | None = None
        self._held: tuple[dict[str, Any], DataPosition] | None = None  # see `hold`
        self._stream: ResumableLoader | None = None
        self._data = DataPosition()
        self.draws = Draws()
        self._redrawn: list[dict[str, Any]] = []  # random states for batches that the last life had drawn ahead
        self._recognised: dict[str, Any] | None = None  # how to recognise the data set
        # With batches drawn ahead, until a step is complete.
        self._restored_data: tuple[DataPosition, dict[str, Any]] | None = None
        self._cumulative_learning_rate = 0.0
        self._peak_learning_rate = 0.0
        self._lineage: list[dict[str, int]] = []
        self.history_start = 0
        self.unwatch()

    def unwatch(self) -> None:
        """Call nobody when the loop takes batches."""
        self.on_request: Callable[[], None] = lambda: None  # called when the loop asks for a further batch
        self.on_end: Callable[[bool], object] = lambda last: None  # called when a pass has ended

    @property
    def position(self) -> DataPosition:
        """The position of the state: after its last trained batch; the end of a pass is the start of the next."""
        return self.trained.advanced(0)

    @property
    def trained(self) -> DataPosition:
        """The position after the last trained batch, also at the end of a pass."""
        first = self.draws.first
        if first is not None:
            return first.before
        return self._data if self._stream is None else self._stream.position

    @property
    def taken(self) -> DataPosition:
        """The position after the last batch that the loop has taken; the end of a pass is the start of the next."""
        return (self._data if self._stream is None else self._stream.position).advanced(0)

    @property
    def batch(self) -> int:
        """Batches of the current pass that the loop has taken; 0 once it has left that pass."""
        return 0 if self._stream is not None and self._stream.left else self.taken.batch

    @property
    def reached(self) -> DataPosition:
        """The position in the data as it is, also at the end of a pass."""
        return self._data if self._stream is None else self._stream.position

    @property
    def pass_is_over(self) -> bool:
        """Whether the loop has taken the last batch of a pass whose length is known."""
        return self.reached.batch > 0 and self.reached.batch == self.reached.batches_per_epoch

    @property
    def descent(self) -> tuple[int, list[dict[str, int]]]:
        """What a state descends from, beside steps of this run: a state that the user loaded, and predicted ones."""
        altered = [{"hyperparameters_iteration": iteration} for iteration in self.hyperparameters.since]
        return self.history_start, [*self._lineage, *altered]

    @property
    def inside_batch(self) -> bool:
        """Whether the loop trains once more on a batch: a state in between has no position in the data."""
        return self.draws.inside and self._stream is not None and not self._stream.left

    @property
    def repeats_batches(self) -> bool:
        """Whether the loop takes several steps on one batch, and may be between two of them."""
        return self.draws.repeats and self.inside_batch

    @property
    def peak_learning_rate(self) -> float:
        """Largest learning rate of the updates so far."""
        return self._peak_learning_rate

    @property
    def can_rewind(self) -> bool:
        """Whether a roll-back can return to earlier batches."""
        return self._stream is None or self._stream.can_seek

    def stream(self, loader: Iterable[Any], epochs: int | None, repeat: bool) -> ResumableLoader:
        """The loader from the current position on: to the end of the current pass, of `epochs` passes, or forever."""
        dealer = dealer_of(loader)
        self._global_batch.require(dealer)
        position = self.taken
        repeat = repeat or (epochs is None and is_repeating(loader))
        if self._stream is not None and position.batch and self._stream.loader is not loader:
            logger.warning(
                "resume() was given another loader in the middle of a pass (after %d batches): the pass counts as "
                "over. Pass only training data to resume()",
                position.batch,
            )
        left_early = position.batch > 0
        before = self._stream
        after = before if before is not None and before.loader is loader and not left_early else None
        if self._stream is not None:
            # A new pass in this process: no states to restore, and a pass that the loop left early is over.
            position = replace(position, epoch=position.epoch + left_early, batch=0)
            position = replace(position, states=None, loader=None, workers=None)
        self._stream = ResumableLoader(
            loader,
            position,
            until_epoch=None if repeat else position.epoch + 1 if epochs is None else epochs,
            sets_epoch=repeat or epochs is not None,
            hooks=LoaderHooks(
                self._positioned,
                self._deal,
                self._requested,
                lambda last: self.on_end(last),
                self._waiting,
                self._loading,
            ),
            after=after,
        )
        if before is None:
            expect_other_loaders(self._data.others or 0)
            self._require_same_data(dealer)
            self._stream.name_generators_in_workers()
        else:
            before.close(TWO_STREAMS)
            self._recognised = recognisable(dealer, self.objects)  # each pass may be given data of its own
        return self._stream

    def _require_same_data(self, loader: Iterable[Any]) -> None:
        """Refuse other data than those of the pass that goes on, or warn of them."""
        before, position = self._data.data, self._data
        self._recognised = recognisable(loader, self.objects)
        difference = None if position.resized else difference_of_data(before, self._recognised)
        if difference is None:
            return
        if not position.batch or not self._exact:
            logger.warning(
                "%s: from here on the run trains on other batches than it would have without the restart", difference
            )
            return
        raise RecoveryError(
            f"{difference}. The run stopped after batch {position.batch} of pass {position.epoch}: the rest of that "
            "pass would repeat some rows and leave others out, so mode 'exact' has trained nothing. Start with the "
            "data of the run, or with mode 'auto', which goes on with a warning. Data that the loop itself changes "
            'belong into a registered object: recovery.register("labels", {"labels": tensor})'
        )

    def register(self, name: str, given: Any) -> None:
        """Save and restore a user's object with every checkpoint.

        Args:
            name: unique in the run.
            given: as for `stateful`.

        Raises:
            ConfigError: the name is taken, or the object has no state, as a second engine or a pair of parts.
            UnsupportedEngineError: its state is not plain data and tensors, or it is DeepSpeed's engine.
        """
        if name in self._registered:
            raise ConfigError(f"an object named '{name}' is registered already")
        refuse_known(given, of="deepspeed")
        item = stateful(name, given)
        codec.encode(item.state_dict(), name)
        self._registered[name] = item
        self.objects.append(given)
        if isinstance(given, Optimizer):
            self.optimizers.append(given)
        if isinstance(given, LRScheduler):
            restored = partial(self._claim, name, item) if name in self._unclaimed else None
            if (notice := self.hyperparameters.register(name, given, restored)) is not None:
                logger.warning("'%s': %s", name, notice)
                self._keep_rates()
        elif name in self._unclaimed:
            self._claim(name, item)
        elif self._restored:
            logger.warning("'%s' is registered, but the checkpoint has no state of that name: it keeps its own", name)

    def _claim(self, name: str, item: Stateful) -> None:
        item.load_state_dict(self._unclaimed.pop(name))
        if isinstance(item, Optimizer):
            self._rates[1].append((item, optimizer_state.hyperparameters(item)))
        self._put_back_rates()

    def _keep_rates(self) -> None:
        """The parameter groups are as a restart has left them."""
        every = [*self._adapter.optimizers, *self.optimizers]
        self._rates = self._adapter.iteration, [(one, optimizer_state.hyperparameters(one)) for one in every]

    def _put_back_rates(self) -> None:
        """Restore the learning rates: a schedule created after the restart has reset them to their initial values."""
        iteration, rates = self._rates
        for optimizer, own in rates if self._adapter.iteration == iteration else ():
            optimizer_state.load_hyperparameters(optimizer, own)

    def end_step(self, learning_rate: float = 0.0) -> None:
        """A step is complete: what the loop draws from here on belongs to the next one.

        Args:
            learning_rate: of its update; 0 where it was skipped.
        """
        self.draws.step()
        self._restored_data = None
        self._cumulative_learning_rate += learning_rate
        if learning_rate > self._peak_learning_rate:
            self._peak_learning_rate = learning_rate

    def hold(self) -> None:
        """Until `release`, states captured have the random states and the position in the data of this moment."""
        self._held = self._drawn()

    def release(self) -> None:
        """From here on captured states have the random states and the position of their own moment."""
        self._held = None

    def capture(self, *, whole: bool = True) -> Scalars:
        """The exact state of this iteration, including restored state of objects not registered (yet).

        Numbers on a CUDA device are not waited for: see `DeviceNumber`.

        Args:
            whole: with what only the recovery near a failure uses (see `Scalars.without_learned`).
        """
        if self._unclaimed and not self._warned:
            logger.warning("the checkpoint has state of %s, not registered in this job", sorted(self._unclaimed))
            self._warned = True
        random_states, position = self._held or self._drawn()
        return Scalars(
            iteration=self._adapter.iteration,
            cumulative_learning_rate=self._cumulative_learning_rate,
            learning_rate=optimizer_state.learning_rate(self._adapter.optimizers),
            peak_learning_rate=self._peak_learning_rate,
            origin="predicted" if self._lineage else "trained",
            lineage=list(self._lineage),
            history_start=self.history_start,
            engine=self._adapter.scalars(on_device=True),
            rng=random_states,
            data=position,
            registered={**self._unclaimed, **{name: item.state_dict() for name, item in self._registered.items()}},
            recent_losses=self._losses.recent_so_far(),
            probes=self._probes.saved() if whole else [],
            learned=self._learner.state_dict() if whole else {},
            frozen=self.frozen.state(whole=whole),
            global_batch_size=self._global_batch.size,
            script=self.hyperparameters.state(),
        )

    def _drawn(self) -> tuple[dict[str, Any], DataPosition]:
        """What drawing a batch changes: as it was before the first batch that this state has not trained."""
        if self._restored_data is not None:
            position, random_states = self._restored_data
            return random_states, position
        random_states, first, stream = capture_random_states(self._adapter), self.draws.first, self._stream
        if stream is None:
            position = self._data if first is None else first.before
        elif first is None:
            position = stream.saved_position()
        else:
            position = stream.saved_before(first.before) if first.stream is stream else first.before
        if self.draws.next is not None:
            random_states["host"] = self.draws.next.host
        elif stream is not None and (own := stream.data_states()):
            random_states["host"]["data"] = own
        ahead = [one.host for one in self.draws.untrained]
        return random_states, replace(
            position.advanced(0), ahead=ahead or None, data=self._recognised, others=count_other_loaders()
        )

    def left(self) -> dict[str, Any]:
        """The part of the small state that is known at any time between two steps; names as in `Scalars`.

        Numbers on a CUDA device are not waited for: see `DeviceNumber`.
        """
        return {
            "engine": self._adapter.scalars(on_device=True),
            "cumulative_learning_rate": self._cumulative_learning_rate,
            "peak_learning_rate": self._peak_learning_rate,
            "lineage": list(self._lineage),
            "script": self.hyperparameters.state(),
        }

    def adopt(self, restored: Restored) -> None:
        """Continue from a restored state; the engine has its own already."""
        scalars = restored.scalars
        self.frozen.settle()
        self._data = restored.data
        if scalars is None:
            return
        self._global_batch.continue_from(scalars.global_batch_size, resized=restored.data.resized is not None)
        self._cumulative_learning_rate = restored.cumulative_learning_rate
        self._peak_learning_rate = scalars.peak_learning_rate
        self.history_start = scalars.history_start
        self._lineage = list(scalars.lineage)
        if restored.beginning.labelled:
            checkpoint = restored.checkpoint_iteration or 0
            self._lineage.append({"failure_iteration": restored.restored_iteration, "checkpoint_iteration": checkpoint})
        self._losses.restart(scalars.recent_losses)
        self._restored = True
        # Copies: objects may change their state in place, and a roll-back needs it once more.
        for name, state in copy.deepcopy(scalars.registered).items():
            if name in self._registered:
                self._registered[name].load_state_dict(state)
            else:
                self._unclaimed[name] = state
        self.notice = self.hyperparameters.compare(scalars.script)
        self._keep_rates()
        not_restored = restore_random_states(self._adapter, scalars.rng)
        if not_restored is not None:
            logger.warning("%s", not_restored)
        self._pending_rng = scalars.rng  # restored again after the loader is positioned, which draws random numbers
        self.draws.restart()
        self._redrawn = list(self._data.ahead or ())
        self._restored_data = (self._data, scalars.rng) if self._redrawn else None
        if self._stream is not None:
            self._stream.seek(self._data)

    def rewound(self, to: Rewind) -> None:
        """Drop losses and history if the new state comes from outside of the run."""
        if to.checkpoint_iteration is None:
            self.history_start = to.iteration
            self._losses.restart([])
            self.frozen.settle(anew=True)  # the user's own load may have written into them in any way

    def close(self) -> None:
        """Let the loader go with its workers: as garbage, these hang for seconds where it is collected."""
        if self._stream is not None:
            self._data = self._stream.position
            self._stream.close()
            self._stream = None

    def put_back(self, scalars: Scalars, *, random_states: bool = True) -> None:
        """Restore registered objects, and random states unless told otherwise, as they were at `capture`."""
        for name, item in self._registered.items():
            state = scalars.registered.get(name)  # None if a restored checkpoint is older than the registration
            if state is not None and not codec.same(item.state_dict(), state):
                item.load_state_dict(copy.deepcopy(state))
        if random_states:
            restore_random_states(self._adapter, scalars.rng)

    def adopt_again(self, scalars: Scalars) -> None:
        """Undo all changes since `adopt`, also those of a registered schedule to the parameter groups."""
        self.put_back(scalars, random_states=self._held is None)  # else the next batch is drawn from them already
        self._put_back_rates()

    def _requested(self, expected: bool) -> None:
        """The loop asks for a batch, if one is expected; to look for it may draw random numbers."""
        if expected:
            self.draws.requested = True
            self.on_request()
        stream = self._stream
        assert stream is not None
        host = None
        if self._redrawn:
            host = self._redrawn[0]
            self._restore_host(host)
        elif self._pending_rng is not None and stream.is_moved:
            host = self._pending_rng["host"]
        self._draw = stream.before_draw(host)

    def _restore_host(self, states: dict[str, Any]) -> None:
        restore_host_rng(states)
        if self._stream is not None and "data" in states:
            self._stream.restore_data_states(states["data"])

    def _deal(self, batch: Any) -> None:
        self.draws.add(self._draw)
        if self._redrawn:
            self._redrawn.pop(0)
            self._positioned()
        if self._probes.of_batches:
            self._probes.on_batch(batch)

    def _positioned(self) -> None:
        """Restore the random states from which the next batch is drawn: those of training, but for one drawn ahead."""
        if self._redrawn:
            self._restore_host(self._redrawn[0])
        elif self._pending_rng is not None:
            restore_random_states(self._adapter, self._pending_rng)
            self._restore_host(self._pending_rng["host"])
            self._pending_rng = None
