"""Bring a run back: choose the source on all ranks together, put it into the engine, and judge it."""

import copy
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from cpsr.checkpoint.progress import Progress, read_progress
from cpsr.checkpoint.snapshot import Snapshot, SnapshotPool
from cpsr.checkpoint.store import CheckpointStore
from cpsr.checkpoint.tiers import Decision, Entry, Source, Tier
from cpsr.checkpoint.verify import UnreadableFileError
from cpsr.config import CPSRConfig
from cpsr.engines.adapter import EngineAdapter
from cpsr.errors import CheckpointError, RecoveryError, RunMismatchError
from cpsr.group import Group
from cpsr.ladder import Ladder, told
from cpsr.prediction import Forecaster, StatePrediction
from cpsr.predictor.protocol import Forecast, StatePredictor
from cpsr.probes import Probes
from cpsr.scalars import DataPosition, Scalars
from cpsr.target.target import CheckpointTarget
from cpsr.tries import Tries

__all__ = ["Restored", "Restorer"]

logger = logging.getLogger(__name__)

# In the run's directory: the checkpoint from which predicting raised, and that after which lives went on from what the
# ranks had left, with how often; so that restarting does not meet the same for ever.
FAILED_PREDICTION = "prediction-failed.json"
DEPARTED = "departed.json"
# A peer that is killed meanwhile shows as an error, too: the second time it is the state's own.
TRIES = 2


@dataclass(frozen=True)
class Restored:
    """How a life of the run began.

    Attributes:
        method: `scratch`, `exact`, `departure` (every tensor as the ranks left it when the group broke, the small
            state stepped ahead from the checkpoint's), `stale` (exactly what the checkpoint holds, or a snapshot in
            memory, some experts of which are older than it is), `experts` (what the checkpoint holds with those experts
            predicted up to it), or how it was predicted: `line`, or `vitp` where the network turned the line.
        restored_iteration: where training continues.
        checkpoint_iteration: c, the checkpoint it comes from; None from scratch.
        failure_iteration: f, the step of the failure; None where the run had not failed.
        reason: one sentence for people.
        scalars: the checkpoint's exact small state.
        data: where the data continues.
        sources: where each rank's state comes from, by rank; empty from scratch.
        taken_at: this rank's operators that were taken before the state that they come with -> when.
        forecast: the predictor's forecast, where one was asked for.
        guard: the guard's numbers on the predicted state, where there was one.
        cumulative_learning_rate: the predictor's time at the restored iteration.
        load_seconds, predict_seconds, inject_seconds: wall time of the parts.
    """

    method: str
    restored_iteration: int
    checkpoint_iteration: int | None
    failure_iteration: int | None
    reason: str
    scalars: Scalars | None = None
    data: DataPosition = field(default_factory=DataPosition)
    sources: tuple[Source, ...] = ()
    taken_at: dict[str, int] = field(default_factory=dict)
    forecast: Forecast | None = None
    guard: dict[str, Any] = field(default_factory=dict)
    cumulative_learning_rate: float = 0.0
    load_seconds: float = 0.0
    predict_seconds: float = 0.0
    inject_seconds: float = 0.0

    @property
    def predicted(self) -> bool:
        """Whether the state was predicted up to the failure and kept."""
        return self.method not in ("scratch", "exact", "departure", "stale", "experts")

    @property
    def of_no_run(self) -> bool:
        """Whether some of the state is not what the run had: it was predicted, or is older than the rest."""
        return self.predicted or self.method in ("stale", "experts")

    @property
    def partly_predicted(self) -> bool:
        """Whether some ranks' state was predicted and that of others was left when the group broke."""
        return self.predicted and any(source.tier == "departure" for source in self.sources)


class Restorer:
    """Restores one run into one engine; every method is a collective of all ranks.

    Args:
        adapter: the engine.
        group: the ranks.
        store: the run's checkpoints.
        pool: the host buffers; the restored checkpoint stays in its recovery buffer.
        ladder: what is left of the state outside the checkpoints.
        predictor: predicts the state at the failure.
        probes: what the guard's veto evaluates.
        config: the run's configuration.
        target: where copies of checkpoints may come from.
        older_experts: whether a checkpoint will do some of whose experts were saved before it.
    """

    def __init__(
        self,
        adapter: EngineAdapter,
        group: Group,
        store: CheckpointStore,
        pool: SnapshotPool,
        ladder: Ladder,
        predictor: StatePredictor,
        probes: Probes,
        config: CPSRConfig,
        target: CheckpointTarget,
        *,
        older_experts: bool = True,
    ) -> None:
        self._target = target
        self._older_experts = older_experts
        self._adapter = adapter
        self._group = group
        self._store = store
        self._pool = pool
        self._ladder = ladder
        self._predictor = predictor
        self._config = config
        self._prediction = StatePrediction(adapter, group, store, predictor, probes, config.guard)
        self._damaged: dict[int, str] = {}
        self._failures = Tries(config.run_dir / FAILED_PREDICTION, group)
        self._departures = Tries(config.run_dir / DEPARTED, group)

    def restore(self, mode: str) -> Restored:
        """Bring the engine to the newest state that can be had.

        Args:
            mode: `auto`, `predict` or `exact`, as in the configuration.

        Raises:
            RecoveryError: checkpoints were committed, but none of them can be read.
            RunMismatchError: the checkpoints belong to another model or to other slices of it.
        """
        started = time.perf_counter()
        snapshot = self._load_newest()
        stale = None if snapshot is None else self._stale(snapshot)
        restored = self._restore(mode, snapshot, started, stale=stale is not None)
        if snapshot is None or stale is None or restored.method != "exact" or restored.sources[0].tier != "disk":
            return restored
        if not self._older_experts:
            raise RecoveryError(
                f"the state in memory could not be read, and checkpoint {snapshot.iteration} holds experts that are "
                "older than it is, which mode 'exact' does not take. Nothing was changed: start again, which looks for "
                "an older checkpoint; or with mode 'auto'"
            )
        return self._with_stale_experts(restored, snapshot, stale, predict=mode != "exact")

    def _restore(self, mode: str, snapshot: Snapshot | None, started: float, *, stale: bool) -> Restored:
        c = None if snapshot is None else snapshot.iteration
        progress = read_progress(self._config.run_dir, self._group.size)
        f = self._failure_iteration(progress, c or 0)
        found = self._ladder.decide(c, f, None if snapshot is None else snapshot.shard, stale=stale)
        if not self._older_experts:
            found = replace(found, mixed=())
        if found.nearest_iteration is None:
            return Restored("scratch", self._adapter.iteration, None, None, "no checkpoint has been committed yet")
        if snapshot is None or mode == "exact" or f is None:
            return self._exactly(found, snapshot, f, started, mode)
        # All tensors as the ranks have left them go before a state in memory with some experts that are older.
        if found.nearest_iteration >= f and not (found.mixed and found.complete):
            return self._exactly(found, snapshot, f, started, mode)
        at_checkpoint = self._at(snapshot, snapshot, f, started)
        restored = self._near_the_failure(at_checkpoint, snapshot, found, progress, f, mode)
        if restored.method != "exact" or found.nearest[0].tier == "disk":
            return restored
        exact = self._exactly(found, snapshot, f, started, mode)
        return replace(
            exact, reason=f"{exact.reason}; {restored.reason}", forecast=restored.forecast, guard=restored.guard
        )

    def _exactly(
        self, found: Decision, checkpoint: Snapshot | None, f: int | None, started: float, mode: str
    ) -> Restored:
        """The newest state that every rank has whole: the checkpoint's, or one that is still in memory."""
        # What is tried next must not be overwritten by what is tried first.
        spare = [one[self._group.rank].entry for one in (found.mixed, found.exact) if one]
        for sources in (found.mixed, found.exact):
            held = self._load_from_memory(sources, spare) if sources and sources[0].tier == "memory" else None
            if held is None:
                continue
            stale = self._stale(held)
            if stale is not None and not self._older_experts:
                raise RecoveryError(
                    f"the state of iteration {held.iteration} in memory was said to be of one iteration, and is not: "
                    "this is a defect, please report it. Nothing was changed on the disk; after `cpsr release` the run "
                    "goes on from there"
                )
            restored = replace(self._at(held, checkpoint, f, started), sources=sources)
            if stale is not None:
                return self._with_older_experts(restored, held, stale)
            return replace(restored, reason=_why_exact(mode, held.iteration, f, in_memory=True))
        if checkpoint is None:
            return Restored("scratch", self._adapter.iteration, None, None, "no checkpoint has been committed yet")
        restored = self._at(checkpoint, checkpoint, f, started)
        return replace(restored, reason=_why_exact(mode, checkpoint.iteration, f, in_memory=False))

    def _at(self, snapshot: Snapshot, checkpoint: Snapshot | None, f: int | None, started: float) -> Restored:
        """Put a whole state into the engine; `checkpoint` is the newest one that is on the disk."""
        loaded = time.perf_counter()
        scalars = Scalars.from_tree(snapshot.scalars)
        self.inject(snapshot)
        self._take_over(scalars.learned)
        return Restored(
            method="exact",
            restored_iteration=snapshot.iteration,
            checkpoint_iteration=None if checkpoint is None else checkpoint.iteration,
            failure_iteration=f,
            reason="",
            scalars=scalars,
            data=scalars.data,
            sources=self._all_from("disk", snapshot.iteration),
            cumulative_learning_rate=scalars.cumulative_learning_rate,
            load_seconds=loaded - started,
            inject_seconds=time.perf_counter() - loaded,
        )

    def _near_the_failure(
        self,
        exact: Restored,
        snapshot: Snapshot,
        found: Decision,
        progress: Progress | None,
        f: int,
        mode: str,
    ) -> Restored:
        """From the checkpoint to the failure: by what the ranks left, by prediction of what they did not leave."""
        assert exact.scalars is not None
        failed, why = self._failures.of(snapshot.iteration)
        # Alone, there is no peer whose end could have looked like an error of the state's.
        if failed >= (1 if self._group.size == 1 else TRIES):
            return replace(exact, reason=f"exact, since coming back from this checkpoint failed before ({why})")
        # What was left is not committed, and what broke the group may be in it.
        if found.departed and self._departures.of(snapshot.iteration)[0] >= TRIES:
            found = replace(found, departed=())
        if not found.departed and (found.nearest_iteration or 0) >= f:
            return replace(exact, reason="what the ranks had left failed to load before")
        target = found.departed_iteration or f
        data = self._data_at(progress, exact.scalars, target)
        try:
            if found.complete:
                self._note_departure(snapshot.iteration, found)
                return self._as_left(exact, snapshot, found, data)
            # Rank 0's word: the others do not know what was planned. It weighs what this one failure cannot: the watch,
            # in which nothing is committed, and leads that the next failure cuts short.
            planned = self._group.broadcast(exact.scalars.planning.get("mode"))
            if mode == "auto" and planned == "recompute":
                lost = f - (found.nearest_iteration or 0)
                return replace(
                    exact,
                    reason=f"the plan finds recomputing cheaper than predicting; {lost} iterations are recomputed",
                )
            if found.departed:
                self._note_departure(snapshot.iteration, found)
            return self._predict(exact, snapshot, data, target, mode, found=found)
        except Exception as error:  # noqa: BLE001 - whatever it is, the checkpoint is whole and the run must come back
            return self._without_prediction(exact, snapshot, error)

    def _stale(self, snapshot: Snapshot) -> tuple[int, int] | None:
        """Operators of all ranks that are older than the loaded checkpoint, and the oldest's iteration, if any are."""
        ages = _older(snapshot).values()
        told = self._group.gather([len(ages), min(ages, default=snapshot.iteration)])
        count = sum(part[0] for part in told)
        return (count, min(part[1] for part in told)) if count else None

    def _with_stale_experts(
        self, exact: Restored, snapshot: Snapshot, stale: tuple[int, int], *, predict: bool
    ) -> Restored:
        """From a checkpoint with experts that were saved earlier: they are predicted up to it, or go on as saved."""
        assert exact.scalars is not None
        c = snapshot.iteration
        told = f"{stale[0]} parameters of experts were saved up to {c - stale[1]} iterations before the checkpoint"
        how = ", with longer steps until they have caught up" if self._config.experts.stale == "catch_up" else ""
        as_saved = replace(
            exact,
            method="stale",
            reason=f"{exact.reason}; {told} and go on as they were{how}",
            taken_at=_older(snapshot),
        )
        if self._config.experts.stale != "predict" or not predict:
            return as_saved
        failed, why = self._failures.of(c)
        if failed >= (1 if self._group.size == 1 else TRIES):
            return replace(as_saved, reason=f"{as_saved.reason}, since predicting them failed before ({why})")
        try:
            prediction = self._prediction.attempt(exact.scalars, c, None, only=as_saved.taken_at.keys())
        except Exception as error:  # noqa: BLE001 - whatever it is, the run must come back
            return self._without_prediction(as_saved, snapshot, error)
        tried = replace(
            as_saved,
            forecast=prediction.forecast,
            guard={**exact.guard, "experts": prediction.guard},
            predict_seconds=exact.predict_seconds + prediction.predict_seconds,
            inject_seconds=exact.inject_seconds + prediction.inject_seconds,
        )
        if not prediction.accepted:
            self.inject(snapshot)
            return replace(tried, reason=f"{as_saved.reason}: {prediction.reason}")
        return replace(tried, method="experts", reason=f"{exact.reason}; {told}, up to which they are predicted")

    def _with_older_experts(self, exact: Restored, held: Snapshot, stale: tuple[int, int]) -> Restored:
        """From a snapshot in memory with experts that were copied earlier: they go on as they were."""
        m, f = held.iteration, exact.failure_iteration
        again = f"; {f - m} iterations are recomputed" if f is not None and f > m else ""
        how = {
            "stale": "",
            "catch_up": ", with longer steps until they have caught up",
            "predict": ", since up to a state in memory they cannot be predicted",
        }[self._config.experts.stale]
        return replace(
            exact,
            method="stale",
            reason=f"from the state of iteration {m} in memory{again}; {stale[0]} parameters of experts were copied "
            f"there up to {m - stale[1]} iterations before it and go on as they were{how}",
            taken_at=_older(held),
        )

    def _as_left(self, exact: Restored, snapshot: Snapshot, found: Decision, data: DataPosition) -> Restored:
        """Every rank's tensors as it left them, where they are finite and their loss is not far above the checkpoint's.

        Raises:
            CheckpointError: a rank's cannot be read after all; every rank raises it.
        """
        started = time.perf_counter()
        assert exact.scalars is not None
        assert found.departed_iteration is not None
        loss_checkpoint = self.probe_loss(exact.scalars.probes)
        self._ladder.bring(found.departed)
        left = self._ladder.load(found.departed[self._group.rank], self._adapter.shard())
        self._adapter.load_scalars(left["engine"])
        self._adapter.push_down()
        guard: dict[str, Any] = {}
        accepted, reason = False, "some values are not finite"
        if self._prediction.finite():
            accepted, reason = self._prediction.judge(exact.scalars, loss_checkpoint, guard, "what was left")
        if not accepted:
            self.inject(snapshot)
            return replace(exact, guard=guard, reason=f"what the ranks left when the group broke was refused: {reason}")
        small = {name: left[name] for name in ("lineage", "peak_learning_rate")}
        return replace(
            exact,
            method="departure",
            restored_iteration=found.departed_iteration,
            reason=f"every rank's state was left at iteration {found.departed_iteration} when the group broke; "
            f"random states and registered objects are those of checkpoint {snapshot.iteration}; {reason}",
            scalars=replace(exact.scalars, **small),
            guard=guard,
            data=data,
            sources=found.departed,
            cumulative_learning_rate=left["cumulative_learning_rate"],
            inject_seconds=exact.inject_seconds + time.perf_counter() - started,
        )

    def _note_departure(self, checkpoint_iteration: int, found: Decision) -> None:
        if self._group.rank == 0:
            self._departures.note(checkpoint_iteration, f"from iteration {found.departed_iteration}")

    def _load_from_memory(self, sources: Sequence[Source], spare: Sequence[Entry | None]) -> Snapshot | None:
        """A state in memory, in the recovery buffer; None where a rank cannot read it after all, or they differ."""
        source = sources[self._group.rank]
        snapshot = self._pool.acquire(source.iteration, {entry.name for entry in spare if entry is not None})
        if snapshot is None:
            raise RecoveryError("no host buffer is free to restore into; this is a defect, please report it")
        try:
            self._ladder.bring(sources)
            snapshot.scalars = self._ladder.load(source, snapshot.shard)
            self._require_same_ages(snapshot)
        except CheckpointError as error:
            logger.warning("the state in memory cannot be used, the checkpoint is: %s", error)
            self._pool.release(snapshot)
            return None
        self._pool.keep(snapshot)
        self._pool.seal(snapshot)  # of this life from now on, should it end before its first snapshot
        return snapshot

    def _require_same_ages(self, snapshot: Snapshot) -> None:
        """Ranks that hold the same parameter, or parts of it, must go on with it as it was at one iteration.

        Raises:
            CheckpointError: they would not; on every rank.
        """
        own = snapshot.shard.operators
        older = [item for part in self._group.gather(_older(snapshot)) for item in part.items()]
        differing = [
            f"{name} ({taken_at})" for name, taken_at in older if name in own and own[name].iteration != taken_at
        ]
        problems = [part[0] for part in self._group.gather(differing[:1]) if part]
        if problems:
            raise CheckpointError(
                f"the ranks' snapshots of iteration {snapshot.iteration} hold {problems[0]} of different iterations"
            )

    def _all_from(self, tier: Tier, iteration: int) -> tuple[Source, ...]:
        return tuple(Source(rank, tier, iteration) for rank in range(self._group.size))

    def rehearse(self, into: Snapshot, failure_iteration: int, forecaster: Forecaster | None = None) -> Restored:
        """Restore what a failure would have been restored to, by prediction, as `restore` does it.

        The caller has set the exact state aside: this one is for trying out. Partial checkpoints are left out, so that
        what is measured is of one horizon and one interval for all ranks.

        Args:
            into: a host buffer for the checkpoint, at the iteration of that checkpoint.
            failure_iteration: where the run is taken to have failed, after the checkpoint.
            forecaster: decides instead of the predictor's own `forecast`.

        Returns:
            `predicted` is False where there is no predicted state; `reason` says why.

        Raises:
            RunMismatchError: the checkpoint does not fit this engine.
        """
        started = time.perf_counter()
        problem = self._load(into.iteration, into)
        loaded = time.perf_counter()
        exact = Restored("exact", into.iteration, into.iteration, failure_iteration, problem or "")
        if problem is not None:
            return replace(exact, load_seconds=loaded - started)
        scalars = Scalars.from_tree(into.scalars)
        self.inject(into)
        exact = replace(
            exact,
            scalars=scalars,
            load_seconds=loaded - started,
            inject_seconds=time.perf_counter() - loaded,
        )
        live = self._predictor.state_dict()
        try:
            self._take_over(scalars.learned)  # what it has learned since is not what a restart would know
            return self._predict(exact, into, scalars.data, failure_iteration, "predict", forecaster, partial=False)
        finally:
            self._predictor.load_state_dict(live)

    def probe_loss(self, saved: list[Any]) -> float | None:
        """Mean loss of saved probes over all ranks with the engine's present weights; None where there are none."""
        return self._prediction.probe_loss(saved)

    def roll_back(self, restored: Restored) -> Restored:
        """Give a predicted state up: back to the checkpoint in the recovery buffer, exactly.

        Args:
            restored: how this life began, by prediction.

        Raises:
            RecoveryError: the recovery buffer does not hold that checkpoint.
        """
        snapshot = self._pool.recovery
        if snapshot is None or snapshot.iteration != restored.checkpoint_iteration or restored.scalars is None:
            raise RecoveryError(
                f"checkpoint {restored.checkpoint_iteration} is no longer in memory; restart the job with mode 'exact' "
                "to recompute from it"
            )
        self.inject(snapshot)
        stale = self._stale(snapshot)
        aside = "" if stale is None else f", with {stale[0]} parameters of experts from iteration {stale[1]} on"
        return replace(
            restored,
            method="exact" if stale is None else "stale",
            restored_iteration=snapshot.iteration,
            taken_at=_older(snapshot),
            reason=f"the predicted state diverged; recomputing from checkpoint {snapshot.iteration}{aside}",
            data=restored.scalars.data,
            cumulative_learning_rate=restored.scalars.cumulative_learning_rate,
        )

    def _without_prediction(self, exact: Restored, snapshot: Snapshot, error: Exception) -> Restored:
        """Prediction raised: exact where this rank is alone, and at a later start where others may wait for it."""
        message = f"{type(error).__name__}: {error}"
        self._failures.note(snapshot.iteration, message)
        if self._group.size > 1:
            raise RecoveryError(
                f"predicting the state failed on rank {self._group.rank} ({message}); checkpoint {snapshot.iteration} "
                f"is untouched, and where it fails {TRIES} times it is restored as it is: start the job again"
            ) from error
        logger.exception("predicting the state failed; the checkpoint is restored as it is")
        self.inject(snapshot)
        return replace(exact, reason=f"{exact.reason}; predicting the state failed ({message}): it is the checkpoint's")

    def _take_over(self, learned: dict[str, Any]) -> None:
        """What the predictor had learned; where another kind or version wrote it, it begins anew and says so."""
        try:
            self._predictor.load_state_dict(learned)
        except ValueError as error:
            logger.warning("what the predictor had learned cannot be taken over (%s): it begins anew", error)

    def _predict(
        self,
        exact: Restored,
        snapshot: Snapshot,
        data: DataPosition,
        f: int,
        mode: str,
        forecaster: Forecaster | None = None,
        *,
        partial: bool = True,
        found: Decision | None = None,
    ) -> Restored:
        assert exact.scalars is not None
        alternative = snapshot.iteration if found is None else found.nearest_iteration or 0
        departed = () if found is None else found.departed
        lineages: list[Any] = []
        prediction = self._prediction.attempt(
            exact.scalars,
            f,
            f - alternative if mode == "auto" else None,
            forecaster,
            partial=partial,
            stale=self._stale(snapshot) is not None or (found is not None and bool(found.mixed)),
            left=(lambda: self._take_what_is_left(departed, lineages)) if departed else None,
        )
        tried = replace(
            exact,
            forecast=prediction.forecast,
            guard=prediction.guard,
            predict_seconds=prediction.predict_seconds,
            inject_seconds=exact.inject_seconds + prediction.inject_seconds,
        )
        if not prediction.accepted:
            self.inject(snapshot)
            in_memory = found is not None and found.nearest[0].tier == "memory"
            where = "the state in memory" if in_memory else "the checkpoint"
            return replace(
                tried, reason=f"{prediction.reason}; {f - alternative} iterations are recomputed from {where}"
            )
        sources = departed or self._all_from("predicted", f)
        return replace(
            tried,
            method=prediction.forecast.method,
            restored_iteration=f,
            reason=f"{told(sources)}; {prediction.reason}" if departed else prediction.reason,
            scalars=replace(exact.scalars, lineage=lineages[0]) if lineages else exact.scalars,
            data=data,
            sources=sources,
            cumulative_learning_rate=prediction.target.time,
            taken_at=_older(snapshot),
        )

    def _take_what_is_left(self, departed: tuple[Source, ...], lineages: list[Any]) -> bool:
        """Put what this rank left when the group broke into the engine; False where nothing of it was left.

        The lineage that every rank's state had is added to `lineages`.
        """
        source = departed[self._group.rank]
        self._ladder.bring(departed)
        left = self._ladder.load(source, self._adapter.shard())
        lineages += [one for one in self._group.gather(None if left is None else left["lineage"]) if one is not None]
        return source.entry is not None

    def inject(self, snapshot: Snapshot) -> None:
        """Put a snapshot's tensors and the engine's scalars back, exactly."""
        live = dict(self._adapter.shard().tensors())
        with torch.no_grad():
            for key, values in snapshot.shard.tensors():
                live[key].copy_(values)
        # A copy: schedulers keep what they are given and change it in place.
        self._adapter.load_scalars(copy.deepcopy(snapshot.scalars["engine"]))
        self._adapter.push_down()

    def _load_newest(self) -> Snapshot | None:
        """The newest checkpoint that every rank can verify, in the recovery buffer; damaged newer ones are set aside.

        With all experts of its own iteration, where older ones will not do. None where the run has never committed one.
        """
        passed_over: list[int] = []
        while (iteration := self._newest_usable(passed_over)) is not None:
            snapshot = self._pool.acquire(iteration)
            if snapshot is None:
                raise RecoveryError("no host buffer is free to restore into; this is a defect, please report it")
            problem = self._load(iteration, snapshot)
            if problem is None and not self._older_experts and self._stale(snapshot) is not None:
                # A state of the same iteration or a newer one may be in memory, with all experts.
                held = self._ladder.decide(iteration, None, snapshot.shard, stale=True)
                if held.exact[0].tier == "disk":
                    logger.warning("checkpoint %d has experts that are older: mode 'exact' goes behind it", iteration)
                    self._pool.release(snapshot)
                    passed_over.append(iteration)
                    continue
            if problem is None:
                self._pool.keep(snapshot)
                self._set_damaged_aside()
                return snapshot
            self._pool.release(snapshot)
            self._damaged[iteration] = problem
            logger.error("checkpoint %d cannot be used; trying the next older one. %s", iteration, problem)
        remains = self._group.broadcast(self._store.remains())
        if passed_over:
            raise RecoveryError(
                f"checkpoints {passed_over} hold experts that are older than they are, and no older checkpoint is left "
                "whose experts are all of one iteration, as mode 'exact' needs. Nothing was changed: start with mode "
                "'auto', which predicts these experts or goes on with them as they are"
            )
        if remains:
            raise RecoveryError(
                f"none of the checkpoints of this run can be restored: {'; '.join(self.damaged) or 'none is whole'}. "
                f"Nothing was changed; the directory holds {', '.join(remains)}. Put a whole one back from a copy, or "
                "use another run_dir to start anew"
            )
        return None

    def _newest_usable(self, passed_over: Sequence[int]) -> int | None:
        """The newest checkpoint that was not passed over, fetched first where the target has a newer one."""
        fetched = self._target.fetch(self._store, self._damaged)
        if fetched is not None:
            self._damaged.pop(fetched, None)
        full = [info.iteration for info in self._store.catalogue() if info.full]
        usable = [iteration for iteration in full if iteration not in self._damaged and iteration not in passed_over]
        newest: int | None = self._group.broadcast(max(usable, default=None))
        return newest

    @property
    def damaged(self) -> list[str]:
        """What is wrong with checkpoints that had to be passed over."""
        return list(self._damaged.values())

    def _load(self, iteration: int, into: Snapshot) -> str | None:
        """Load this rank's part; returns what is wrong with the checkpoint on any rank.

        Raises:
            RunMismatchError: a rank's part is of another model or split over ranks; every rank raises it.
            RecoveryError: a file system refuses to give a file now: the checkpoint may be whole, and going on from an
                older one would give it up; every rank raises it.
        """
        damage = mismatch = unreadable = None
        try:
            into.scalars = self._store.load(iteration, into.shard)
        except RunMismatchError as error:
            mismatch = f"rank {self._group.rank}: {error}"
        except UnreadableFileError as error:
            unreadable = f"rank {self._group.rank}: {error}"
        except CheckpointError as error:
            damage = f"rank {self._group.rank}: {error}"
        told = self._group.gather({"damage": damage, "mismatch": mismatch, "unreadable": unreadable})
        mismatches = [part["mismatch"] for part in told if part["mismatch"] is not None]
        if mismatches:
            raise RunMismatchError("; ".join(mismatches))
        refused = [part["unreadable"] for part in told if part["unreadable"] is not None]
        if refused:
            raise RecoveryError(f"checkpoint {iteration} cannot be read now. {'; '.join(refused)}")
        return "; ".join(part["damage"] for part in told if part["damage"] is not None) or None

    def _set_damaged_aside(self) -> None:
        """Only now that an older one is in memory: without it, what is damaged may be all there is."""
        for iteration, problem in self._damaged.items():
            if self._group.rank == 0:
                self._store.quarantine(iteration, problem)
        self._group.barrier()

    def _failure_iteration(self, progress: Progress | None, checkpoint_iteration: int) -> int | None:
        """f, the last iteration that every rank had finished; None where nothing is lost."""
        for rank, why in progress.missing.items() if progress is not None and self._group.rank == 0 else ():
            logger.warning("the step counter of rank %d %s: the failure step comes from the other ranks", rank, why)
        f: int = self._group.broadcast(0 if progress is None else progress.iteration)
        return f if f > checkpoint_iteration else None

    def _data_at(self, progress: Progress | None, scalars: Scalars, f: int) -> DataPosition:
        """Where this rank's data stood at f: counted by the rank itself, or as many batches a step as usual."""
        batches = None if progress is None else progress.batches_at(f)[self._group.rank]
        if batches is None:
            ahead = (f - scalars.iteration) * self._adapter.micro_batches_per_iteration
            return scalars.data.advanced(ahead if scalars.data.batches else 0)
        return scalars.data.advanced(max(batches - scalars.data.batches, 0))


def _older(snapshot: Snapshot) -> dict[str, int]:
    """This rank's operators that were saved before the checkpoint they are in -> when."""
    operators = snapshot.shard.operators
    return {name: one.iteration for name, one in operators.items() if one.iteration < snapshot.iteration}


def _why_exact(mode: str, iteration: int, failure_iteration: int | None, *, in_memory: bool) -> str:
    where = f"the state of iteration {iteration} in memory" if in_memory else f"checkpoint {iteration}"
    if failure_iteration is None or failure_iteration <= iteration:
        return f"exactly at {where}; nothing is lost"
    return f"mode {mode}: {failure_iteration - iteration} iterations are recomputed from {where}"
