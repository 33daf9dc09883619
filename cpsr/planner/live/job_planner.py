"""Rank 0's planner: follows the phases of the training, fits the curves, and replans, beside the training."""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from cpsr.checkpoint.catalogue import Retention
from cpsr.checkpoint.writer import SaveOutcome
from cpsr.config import CPSRConfig
from cpsr.errors import JournalError
from cpsr.fitter.failures import PRIOR_SHARES
from cpsr.fitter.phases import Phase, PhaseDetector
from cpsr.journal import FitRow, JournalReader, PhaseRow, PlanOverride, RankJournal, reported_failures
from cpsr.planner.inputs import FailureClass, Limits, Origin, PhaseInputs, PlannerInputs
from cpsr.planner.live.adoption import (
    OverrideWatch,
    bounded,
    differs,
    first_memory_interval,
    first_plan,
    memory_tier,
    overridden,
    override_message,
    pinned_plan,
)
from cpsr.planner.live.expectations import (
    Predictable,
    expected_costs,
    fit_curves,
    predictable,
    prior_curves,
)
from cpsr.planner.live.measurements import (
    MEASURED,
    RankCosts,
    RankReport,
    RankTimes,
    costs_of_ranks,
    second_moment_share,
    slowest,
)
from cpsr.planner.plan import Plan, Situation, fixed_plan
from cpsr.planner.planning import make_plan, with_memory
from cpsr.planner.recovery_curve import LEAD_AFTER_ITERATIONS, EndCostCurve
from cpsr.predictor.watch import WATCH_ITERATIONS

__all__ = ["JobPlanner"]

logger = logging.getLogger(__name__)

THREAD_NAME = "cpsr-planner"
CLOSE_SECONDS = 5.0  # longer than a fit takes; an exit does not wait for a file system that hangs
FLUSH_SECONDS = 5.0  # how long the thread waits for the journal's
# Polling interval for overrides: a query of a small file takes about a millisecond; without the file, one stat.
OVERRIDE_POLL_SECONDS = 1.0


class JobPlanner:
    """Plans the checkpoints of a running job; the training thread only passes numbers and takes plans.

    Every rank records the costs of its own checkpoints in its part of the next one. Rank 0 reads them there, ends the
    phases, and fits the curves at the end of each. It proposes a plan if a phase has ended, or if the plan differs
    enough from the current one. Its errors never reach training: the last plan stays, and `failure` returns why.

    Phases follow the mean second moment of all ranks. For the newest checkpoint rank 0 knows only its own mean. It
    scales that by the ratio of the two means in the last checkpoint that it has read.

    An override of the interval (`cpsr.journal.PlanOverride`) is seen within a second. The plan follows at once if the
    run has measured its first checkpoint, or has a fixed interval. When the override expires, a plan without
    it follows.

    Args:
        config: of the run.
        rank: this process.
        parameters: weights that it owns.
        beta2: decay of the optimizer's second moments; 0 if it keeps none.
        accuracy: how well the predictor has predicted checkpoints; called from the planner's thread.
        straightness: of the weights' path, as the predictor has learned it, None if unknown; called likewise.

    Attributes:
        times: what checkpoints and snapshots cost this rank.
    """

    def __init__(
        self,
        config: CPSRConfig,
        rank: int,
        parameters: int,
        beta2: float,
        accuracy: Callable[[], Sequence[dict[str, Any]]],
        straightness: Callable[[], float | None],
    ) -> None:
        self._config = config
        self._rank = rank
        self._accuracy = accuracy
        self._straightness = straightness
        self.times = RankTimes(parameters)
        self._window_iterations: int | None = None
        self._phases = PhaseDetector(beta2=beta2)
        self._saves: list[SaveOutcome] = []  # not processed yet
        self._situation: Situation | None = None
        self._curves = prior_curves(0, config)
        self._path_straightness: float | None = None  # at the newest fit
        self._fitted = False
        self._missing: tuple[str, ...] = ()
        self._others: list[RankReport] = []
        self._others_iteration: int | None = None  # when the costs of the others were read
        self._share: float | None = None  # ratio of all ranks' second moment to this one's; None until read
        self._proposed: Plan | None = None  # the newest, taken or not
        self._waiting: Plan | None = None  # not taken yet
        self._override: PlanOverride | None = None  # in force
        self._planned_override: PlanOverride | None = None  # in force at the newest proposal
        self._failure: str | None = None
        self._lock = threading.Lock()
        self._wake, self._closing = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None

    # On the training thread

    def first_plan(self, saved: dict[str, Any]) -> Plan:
        """The first plan of a life, the same on every rank.

        Args:
            saved: `state_dict` from the checkpoint that this life begins with; empty in the first life.
        """
        return first_plan(self._config, saved)

    def start(self, run_dir: Path, world_size: int, journal: RankJournal) -> None:
        """Begin to plan; does nothing on other ranks than 0."""
        if self._rank == 0:
            arguments = run_dir, world_size, journal
            self._thread = threading.Thread(target=self._run, args=arguments, name=THREAD_NAME, daemon=True)
            self._thread.start()

    def note(self, outcome: SaveOutcome) -> None:
        """This rank's part of a checkpoint is durable."""
        self.times.durable(outcome)
        if self._rank == 0:
            with self._lock:
                self._saves.append(outcome)

    def note_memory(self, stall_seconds: float) -> None:
        """A snapshot went to host memory alone, and training waited so long for it."""
        self.times.snapshot(stall_seconds)
        # A long fixed interval may have no checkpoint for hours; the interval in memory does not wait for one.
        if self.times.snapshots == MEASURED and self._plans_memory_alone and self._thread is not None:
            self._wake.set()

    def note_window(self, iterations: int | None) -> None:
        """Windows of snapshots have so many iterations now, the same on all ranks; None: none are taken."""
        self._window_iterations = iterations

    def consider(self, situation: Situation) -> None:
        """Check whether the plan should change; returns at once."""
        if self._thread is not None:
            with self._lock:
                self._situation = situation
            self._wake.set()

    def proposal(self) -> Plan | None:
        """A new plan, once; None if the current one is as good."""
        with self._lock:
            plan, self._waiting = self._waiting, None
        return plan

    def failure(self) -> str | None:
        """Why planning has ended in this life, once; None otherwise."""
        failure, self._failure = self._failure, None
        return failure

    def state_dict(self, plan: Plan) -> dict[str, Any]:
        """State for this rank's part of a checkpoint: its costs, the phases, and the current intervals."""
        with self._lock:
            followed = {"phases": self._phases.state_dict(), "second_moment_share": self._share}
        return {
            **self.times.to_tree(),
            **followed,
            "interval_iterations": plan.interval_iterations,
            "memory_interval_iterations": plan.memory_interval_iterations,
            "mode": plan.mode,
            "prices": plan.explanation.get("prices"),
        }

    def load_state_dict(self, state: dict[str, Any], *, replicates: bool) -> None:
        """Continue with the phases and the costs of an earlier life.

        Args:
            state: `state_dict` from the checkpoint that this life begins with.
            replicates: whether other machines hold replicas of this rank's snapshots in this life.

        Raises:
            ValueError: it is no such state.
        """
        if state:
            self.times.restore(state, replicates=replicates)
            with self._lock:
                self._phases.load_state_dict(state["phases"])
                self._share = state.get("second_moment_share")

    def close(self) -> None:
        """Stop after the computation under way, and join the thread."""
        self._closing.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join(CLOSE_SECONDS)
            if self._thread.is_alive():
                logger.warning("the planner's thread did not end within %g s; it is abandoned", CLOSE_SECONDS)

    # On the planner's thread

    def _run(self, run_dir: Path, world_size: int, journal: RankJournal) -> None:
        overrides = OverrideWatch(run_dir)
        try:
            while True:
                woken = self._wake.wait(OVERRIDE_POLL_SECONDS)
                self._wake.clear()
                if self._closing.is_set():  # checked after clearing, or an end in between would be missed
                    return
                self._override = overrides.now()
                if woken:
                    self._update(run_dir, world_size, journal)
                if self._override != self._planned_override:
                    self._replan_under_override(journal)
        except Exception as error:
            self._failure = (
                f"the planner stopped for the rest of this life ({type(error).__name__}: {error}): it keeps the "
                "current interval, and training is not affected"
            )
            logger.exception("planning failed")

    def _update(self, run_dir: Path, world_size: int, journal: RankJournal) -> None:
        """End phases, fit at their ends, and propose."""
        with self._lock:
            situation, saves, self._saves = self._situation, self._saves, []
        own = self._own_report()
        if situation is not None:
            self._read_other_ranks(situation.schedule.iteration, run_dir, world_size)
        with self._lock:
            ended = [phase for save in saves for phase in self._observe(save)]
        for phase, number in ended:
            journal.record(PhaseRow(life=journal.life, phase=number, **asdict(phase)))
        if situation is None or own is None:
            return
        # Beside the ends of phases, also once in a life: the failure that began it is known now.
        if ended or not self._fitted:
            self._fitted = self._fit(situation, [phase for phase, _ in ended], run_dir, journal)
        if self._config.checkpoint.interval_iterations is None or self._plans_memory_alone:
            anew = bool(ended) or self._override != self._planned_override
            self._propose(situation, own, journal, anew=anew)

    def _replan_under_override(self, journal: RankJournal) -> None:
        """Replan because the override has changed; later if nothing is measured yet."""
        situation, own = self._situation, self._own_report()
        fixed = self._config.checkpoint.interval_iterations is not None
        if (not fixed or self._plans_memory_alone) and situation is not None and own is not None:
            self._propose(situation, own, journal, anew=True)
        elif fixed:
            plan = self._fixed_plan()
            before = None if situation is None else situation.plan.memory_interval_iterations
            every = first_memory_interval(self._config, before, plan.interval_iterations)
            self._offer(replace(plan, memory_interval_iterations=every), situation, journal)

    @property
    def _plans_memory_alone(self) -> bool:
        """Whether there are snapshots in memory beside a fixed interval of the disk."""
        checkpoint = self._config.checkpoint
        return checkpoint.interval_iterations is not None and checkpoint.shared_memory

    def _own_report(self) -> RankReport | None:
        """This rank's costs; of no checkpoint, once snapshots in memory are known and these alone are planned."""
        own = self.times.costs()
        if own is None and self._plans_memory_alone and self.times.snapshots >= MEASURED:
            own = RankCosts(0, 0, 0.0, 0.0, 0, None)
        return None if own is None else RankReport(own, self.times.memory())

    def _read_other_ranks(self, iteration: int, run_dir: Path, world_size: int) -> None:
        """Read all ranks' costs from the newest checkpoint: at first, and then as often as a phase can end.

        A thousand manifests take this thread 0.15 s or more: too long for every checkpoint.
        """
        read_at = self._others_iteration
        recently = read_at is not None and 0 <= iteration - read_at < self._phases.min_iterations
        if world_size == 1 or recently:
            return
        costs = costs_of_ranks(run_dir / "checkpoints", world_size)
        if not costs:
            return
        self._others, self._others_iteration = costs[1:], iteration
        share = second_moment_share([report.costs for report in costs])
        if share is None:
            return
        with self._lock:
            if self._share is None:  # until now phases followed this rank's moments
                self._phases.rescale(share)
            self._share = share

    def _observe(self, save: SaveOutcome) -> list[tuple[Phase, int]]:
        """The phase that a checkpoint ends, with its number, if any."""
        if save.iteration < 1:
            return []
        # If the optimizer keeps no second moments, phases end by their length alone.
        moment = (save.mean_second_moment or 0.0) * (1.0 if self._share is None else self._share)
        phase = self._phases.observe(save.iteration, moment)
        return [] if phase is None else [(phase, self._phases.ended - 1)]

    def _fit(self, situation: Situation, ended: Sequence[Phase], run_dir: Path, journal: RankJournal) -> bool:
        """Fit the curves to the journal; False if it cannot be read now: the old curves stay until the next update."""
        lengths = [phase.last_iteration - phase.first_iteration for phase in ended]
        span = lengths[-1] if lengths else self._phases.min_iterations
        journal.flush(FLUSH_SECONDS)  # or losses of a branch that was given up would still be the newest
        accuracy, self._path_straightness = self._accuracy(), self._straightness()
        try:
            reported = reported_failures(run_dir)
            with JournalReader(run_dir / "journal.db") as reader:
                iteration = situation.schedule.iteration
                curves = fit_curves(reader, accuracy, iteration, span, self._config, reported)
        except JournalError as error:
            logger.warning("the planner cannot read the journal now, and keeps its curves: %s", error)
            return False
        self._curves = curves
        for kind, result in curves.to_rows():
            journal.record(FitRow(life=journal.life, iteration=curves.iteration, kind=kind, result=result))
        if curves.missing and curves.missing != self._missing:
            self._missing = curves.missing
            self._report_missing(journal)
        return True

    def _report_missing(self, journal: RankJournal) -> None:
        """Report missing curves as an event only if the chosen policy needs them."""
        missing, policy = "; ".join(self._missing), self._config.planner.policy
        if policy == "theorem1" and self._config.checkpoint.interval_iterations is None:
            message = f"policy {policy!r} cannot choose an interval yet, and the plan keeps to its limits: {missing}"
            journal.event("not fitted", message, self._curves.iteration)
        else:
            logger.debug("not known yet, and not needed by the plan: %s", missing)

    def _propose(self, situation: Situation, own: RankReport, journal: RankJournal, *, anew: bool) -> None:
        curve, longest = self._end_costs(situation)
        job, limits = self._inputs(situation, own, curve), self._limits(longest)
        planner = self._config.planner
        if self._config.checkpoint.interval_iterations is not None:
            plan = with_memory(self._fixed_plan(), job, limits, self._config.mode)
        else:
            within = make_plan(job, bounded(limits, self._override), planner.policy, self._config.mode)
            plan = overridden(within, self._override, limits)
        # What the training thread has told may be older than the newest proposal.
        if anew or differs(plan, self._proposed or situation.plan):
            self._offer(plan, situation, journal)

    def _offer(self, plan: Plan, situation: Situation | None, journal: RankJournal) -> None:
        with self._lock:
            self._waiting = self._proposed = plan
        if self._override != self._planned_override:
            self._planned_override = self._override
            kind = "override ended" if self._override is None else "override"
            iteration = None if situation is None else situation.schedule.iteration
            journal.event(kind, override_message(self._override), iteration)

    def _fixed_plan(self) -> Plan:
        """The fixed interval, under the override in force."""
        fixed = self._config.checkpoint.interval_iterations
        assert fixed is not None
        plan = fixed_plan(fixed)
        return plan if self._override is None else pinned_plan(plan, self._override, self._limits())

    def _limits(self, longest: Predictable | None = None) -> Limits:
        limits = Limits(self._config.planner.interval_min_iterations, self._config.planner.interval_max_iterations)
        if longest is None:
            return limits
        return replace(
            limits, predictable_interval_iterations=longest.interval_iterations, predictable_by=longest.because
        )

    def _end_costs(self, situation: Situation) -> tuple[EndCostCurve | None, Predictable | None]:
        """Expected end cost of a predicted recovery (None if impossible), and the longest interval for it."""
        curves = self._curves
        expected = expected_costs(situation.schedule, Retention(), self._path_straightness, curves.lost_share)
        if self._config.mode == "exact" or expected is None:
            return None, None
        curve, longest = expected
        found = predictable(longest, curves.costs)
        for observation in curves.costs:
            curve = curve.with_observation(observation)
        return (None if found.interval_iterations is None else curve), found

    def _inputs(self, situation: Situation, own: RankReport, recovery: EndCostCurve | None) -> PlannerInputs:
        report, curves = slowest([own, *self._others]), self._curves
        costs, seconds = report.costs, situation.iteration_seconds
        memory = memory_tier(self._config, report.memory, seconds, costs.stall_seconds, self._window_iterations)
        phase = self._phase(costs.parameters)
        failures = curves.failures
        return PlannerInputs(
            seconds,
            costs.stall_seconds,
            costs.persist_seconds,
            failures.total.mean_per_second,
            recovery,
            predict_seconds=curves.predict_seconds,
            watch_iterations=WATCH_ITERATIONS,
            lead_after_iterations=LEAD_AFTER_ITERATIONS,
            phase=phase,
            origins=self._origins(
                situation, costs, replicates=memory is not None and memory.replica_seconds is not None
            ),
            classes={
                scope: FailureClass(failures.share(scope), prior, failures.seen.get(scope, 0))
                for scope, prior in PRIOR_SHARES.items()
            },
            memory=memory,
            load_seconds={place: seconds for place, (seconds, _) in curves.load_seconds.items()},
            lost_share=curves.lost_share,
        )

    def _phase(self, parameters: int) -> PhaseInputs | None:
        """The paper's curves for the phase that has begun, assumed to be as long as the one before."""
        curves, xi, first, before = self._curves, self._phases.xi, self._phases.first_iteration, self._phases.phases
        if curves.loss is None or curves.accuracy is None or xi is None or first is None or not before:
            return None
        length = before[-1].last_iteration - before[-1].first_iteration
        loss, accuracy = curves.loss, curves.accuracy
        return PhaseInputs(
            first,
            first + length,
            loss.alpha1_per_iteration,
            loss.alpha2,
            accuracy.tau1_per_checkpoint,
            accuracy.tau2,
            xi,
            parameters,
        )

    def _origins(self, situation: Situation, costs: RankCosts, *, replicates: bool) -> Mapping[str, Origin]:
        iteration, curves = situation.schedule.iteration, self._curves
        saves = Origin.of_samples(costs.saves, max(0, iteration - costs.iteration))
        fitted = max(0, iteration - curves.iteration)
        failures = curves.failures.total
        read_at = iteration if self._others_iteration is None else self._others_iteration
        ranks = 1 if self._share is None else 1 + len(self._others)
        samples = self.times.memory_samples()
        origins = {
            "iteration_seconds": Origin.of_samples(situation.timed_iterations, 0),
            "stall_seconds": saves,
            "persist_seconds": saves,
            # Time without a failure lowers the rate; it only shows that the rate is not higher.
            "failures_per_second": Origin.of_samples(round(failures.failures), fitted)
            if failures.exposure_seconds
            else Origin("configured"),
            "recovery": Origin.of_samples(len(curves.costs), fitted),
            "predict_seconds": Origin.of_samples(curves.predictions, fitted),
            "lead_after_iterations": Origin("prior"),
            "memory_stall_seconds": saves,
            "replica_seconds": saves if replicates else Origin("prior"),
            "xi": Origin("measured", ranks, max(0, iteration - read_at)),
        }
        if curves.loss is not None:
            origins["phase"] = Origin.of_samples(curves.loss.points, fitted)
        for place, (_, count) in curves.load_seconds.items():
            origins[f"{place}_load_seconds"] = Origin.of_samples(count, fitted)
        for name, measured in {"memory_stall_seconds": "stall_seconds", "replica_seconds": "replica_seconds"}.items():
            if measured in samples:
                origins[name] = Origin.of_samples(samples[measured], 0)
        return origins
