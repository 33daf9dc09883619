"""Rank 0's planner: follows the phases of the training, fits the curves, and replans, beside the training."""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from cpsr.checkpoint.retention import Retention
from cpsr.checkpoint.writer import SaveOutcome
from cpsr.config import CPSRConfig
from cpsr.errors import JournalError
from cpsr.fitter.phases import Phase, PhaseDetector
from cpsr.journal import FitRow, JournalReader, PhaseRow, PlanOverride, RankJournal, reported_failures
from cpsr.planner.bounds import Limits
from cpsr.planner.inputs import Origin, PlannerInputs
from cpsr.planner.live.curves import Curves, fit_curves, prior_curves
from cpsr.planner.live.first_plan import differs, first_memory_interval, first_plan
from cpsr.planner.live.inputs import Situation, planner_inputs
from cpsr.planner.live.memory_times import MEASURED_SNAPSHOTS, MemoryTimes, memory_tier, window_tier
from cpsr.planner.live.overrides import OverrideWatch, bounded, overridden, override_message, pinned_plan
from cpsr.planner.live.predictable import Predictable, predictable
from cpsr.planner.live.proposals import Proposals
from cpsr.planner.live.rank_costs import RankCosts, RankReport, SaveTimes, costs_of_ranks, second_moment_share
from cpsr.planner.live.recovery_cost import INTERVALS_ITERATIONS, expected_costs
from cpsr.planner.live.stall import StallMeter
from cpsr.planner.plan import FORMS, Plan, fixed_plan, make_plan, with_memory
from cpsr.planner.recovery_curve import EndCostCurve
from cpsr.predictor.line import LinePredictor
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
        accuracy: the predictor's backtests so far; called from the planner's thread.
        straightness: of the weights' path, as the predictor has learned it, None if unknown; called likewise.
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
        self._times = SaveTimes(parameters)
        self._memory = MemoryTimes()
        self._meter = StallMeter()
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
        self._proposals = Proposals()
        self._override: PlanOverride | None = None  # in force
        self._planned_override: PlanOverride | None = None  # in force at the newest proposal
        self._failure: str | None = None
        self._lock = threading.Lock()
        self._wake, self._closing = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None

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

    def begun(self) -> None:
        """A checkpoint was begun."""
        self._meter.begun()

    def step(self, seconds: float) -> None:
        """Add the duration of one step."""
        self._meter.step(seconds)

    def note(self, outcome: SaveOutcome) -> None:
        """This rank's part of a checkpoint is durable."""
        stall_seconds = self._meter.durable(outcome.stall_seconds)
        with self._lock:
            self._times.note(outcome, stall_seconds)
            self._memory.note_copy(outcome.stall_seconds)
            if self._rank == 0:
                self._saves.append(outcome)

    def note_memory(self, stall_seconds: float) -> None:
        """A snapshot went to host memory alone, and training waited so long for it."""
        self._meter.snapshot(stall_seconds)
        with self._lock:
            self._memory.note(stall_seconds)
            known = self._memory.noted == MEASURED_SNAPSHOTS
        # A long fixed interval may have no checkpoint for hours; the interval in memory does not wait for one.
        if known and self._plans_memory_alone and self._thread is not None:
            self._wake.set()

    def note_replica(self, seconds: float) -> None:
        """A snapshot was whole on another machine so long after it was taken."""
        with self._lock:
            self._memory.note_replica(seconds)

    def note_window(self, iterations: int | None) -> None:
        """Windows of snapshots have so many iterations now, the same on all ranks; None: none are taken."""
        self._memory.window_iterations = iterations

    def consider(self, situation: Situation) -> None:
        """Check whether the plan should change; returns at once."""
        if self._thread is not None:
            with self._lock:
                self._situation = situation
            self._wake.set()

    def proposal(self) -> Plan | None:
        """A new plan, once; None if the current one is as good."""
        return self._proposals.take()

    def failure(self) -> str | None:
        """Why planning has ended in this life, once; None otherwise."""
        failure, self._failure = self._failure, None
        return failure

    def state_dict(self, plan: Plan) -> dict[str, Any]:
        """State for this rank's part of a checkpoint: its costs, the phases, and the current intervals."""
        with self._lock:
            return {
                "costs": self._times.to_tree(),
                "phases": self._phases.state_dict(),
                "second_moment_share": self._share,
                "interval_iterations": plan.interval_iterations,
                "memory": self._memory.to_tree(),
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
            ValueError: it was written by another version.
        """
        if state:
            with self._lock:
                self._phases.load_state_dict(state["phases"])
                self._times.restore(state["costs"])
                self._memory.restore(state.get("memory"), replicates=replicates)
                self._share = state.get("second_moment_share")

    def close(self) -> None:
        """Stop after the computation under way, and join the thread."""
        self._closing.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join(CLOSE_SECONDS)
            if self._thread.is_alive():
                logger.warning("the planner's thread did not end within %g s; it is abandoned", CLOSE_SECONDS)

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
                    self._replan_under_override(world_size, journal)
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
            self._propose(situation, (own, *self._others), world_size, journal, anew)

    def _replan_under_override(self, world_size: int, journal: RankJournal) -> None:
        """Replan because the override has changed; later if nothing is measured yet."""
        with self._lock:
            situation, own = self._situation, self._own_report()
        planned = self._config.checkpoint.interval_iterations is None or self._plans_memory_alone
        if planned and situation is not None and own is not None:
            self._propose(situation, (own, *self._others), world_size, journal, anew=True)
        elif self._config.checkpoint.interval_iterations is not None:
            plan = self._fixed_plan()
            every = None if situation is None else situation.plan.memory_interval_iterations
            plan = replace(
                plan, memory_interval_iterations=first_memory_interval(self._config, every, plan.interval_iterations)
            )
            self._offer(plan, situation, journal)

    @property
    def _plans_memory_alone(self) -> bool:
        """Whether there are snapshots in memory beside a fixed interval of the disk."""
        checkpoint = self._config.checkpoint
        return checkpoint.interval_iterations is not None and checkpoint.shared_memory

    def _own_report(self) -> RankReport | None:
        """This rank's costs; of no checkpoint, once snapshots in memory are known and these alone are planned."""
        own = self._times.costs()
        if own is None and self._plans_memory_alone and self._memory.noted >= MEASURED_SNAPSHOTS:
            own = RankCosts(0, 0, 0.0, 0.0, 0, None)
        return None if own is None else RankReport(own, self._memory.to_tree())

    def _fixed_plan(self) -> Plan:
        """The fixed interval, under the override in force."""
        fixed = self._config.checkpoint.interval_iterations
        assert fixed is not None
        plan = fixed_plan(fixed)
        return plan if self._override is None else pinned_plan(plan, self._override, self._limits())

    def _record_override(self, journal: RankJournal, situation: Situation | None) -> None:
        """Record the override in force at the newest proposal."""
        if self._override != self._planned_override:
            self._planned_override = self._override
            kind = "override ended" if self._override is None else "override"
            iteration = None if situation is None else situation.schedule.iteration
            journal.event(kind, override_message(self._override), iteration)

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
        if policy in FORMS and self._config.checkpoint.interval_iterations is None:
            message = f"policy {policy!r} cannot choose an interval yet, and the plan keeps to its limits: {missing}"
            journal.event("not fitted", message, self._curves.iteration)
        else:
            logger.debug("not known yet, and not needed by the plan: %s", missing)

    def _propose(
        self, situation: Situation, reports: Sequence[RankReport], world_size: int, journal: RankJournal, anew: bool
    ) -> None:
        curve, longest = self._end_costs(situation, self._curves)
        with self._lock:
            own_origins = self._memory.origins
        origins = [own_origins, *({} for _ in reports[1:])]
        inputs = [self._inputs(situation, one, curve, of_one) for one, of_one in zip(reports, origins, strict=True)]
        if self._config.checkpoint.interval_iterations is not None:
            plan = with_memory(self._fixed_plan(), inputs, self._limits(longest), self._config.mode)
        else:
            plan = self._planned(inputs, self._limits(longest))
        # What the training thread has told may be older than the newest proposal.
        if anew or differs(plan, self._proposals.newest or situation.plan):
            self._offer(plan, situation, journal)

    def _offer(self, plan: Plan, situation: Situation | None, journal: RankJournal) -> None:
        self._proposals.offer(plan)
        self._record_override(journal, situation)

    def _planned(self, inputs: Sequence[PlannerInputs], limits: Limits) -> Plan:
        planner = self._config.planner
        plan = make_plan(
            inputs,
            bounded(limits, self._override),
            planner.policy,
            self._config.mode,
        )
        return overridden(plan, self._override, limits)

    def _inputs(
        self,
        situation: Situation,
        report: RankReport,
        recovery: EndCostCurve | None,
        memory_origins: Mapping[str, Origin],
    ) -> PlannerInputs:
        watch, iteration = WATCH_ITERATIONS, situation.schedule.iteration
        of_all = self._share is not None
        read_at = iteration if self._others_iteration is None else self._others_iteration
        moments = Origin("measured", 1 + len(self._others) if of_all else 1, max(0, iteration - read_at))
        costs, memory = report.costs, None
        if self._config.replay.enabled:
            memory = window_tier(report.memory, self._memory.window_iterations)
        elif self._config.checkpoint.shared_memory:
            memory = memory_tier(report.memory, self._config, situation.iteration_seconds, costs.stall_seconds)
        return planner_inputs(
            situation, costs, self._curves, recovery, self._phases, watch, moments, memory, memory_origins
        )

    def _end_costs(self, situation: Situation, curves: Curves) -> tuple[EndCostCurve | None, Predictable | None]:
        """Expected end cost of a predicted recovery (None if impossible), and the longest interval for it."""
        lost = curves.lost_share
        expected = expected_costs(LinePredictor(), situation.schedule, Retention(), self._path_straightness, lost)
        if self._config.mode == "exact" or expected is None:
            return None, None
        curve, longest = expected
        found = predictable(longest, curves.costs, INTERVALS_ITERATIONS)
        for observation in curves.costs:
            curve = curve.with_observation(observation)
        return (None if found.interval_iterations is None else curve), found

    def _limits(self, longest: Predictable | None = None) -> Limits:
        limits = Limits(self._config.planner.interval_min_iterations, self._config.planner.interval_max_iterations)
        if longest is None:
            return limits
        return replace(
            limits, predictable_interval_iterations=longest.interval_iterations, predictable_by=longest.because
        )
