"""Rank 0's planner: follows the phases of the training, fits the curves, and replans, beside the training."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cpsr.checkpoint.writer import SaveOutcome
from cpsr.config import CPSRConfig
from cpsr.errors import JournalError
from cpsr.fitter.failures import PRIOR_SHARES
from cpsr.fitter.phases import Phase, PhaseDetector
from cpsr.journal import FitRow, JournalReader, PhaseRow, PlanOverride, RankJournal, latest_override, reported_failures
from cpsr.planner.inputs import FailureClass, Limits, PhaseInputs, PlannerInputs
from cpsr.planner.live.adoption import differs, first_plan, memory_tier, override_message, planned
from cpsr.planner.live.expectations import expected_costs, fit_curves, prior_curves
from cpsr.planner.live.measurements import MEASURED, RankCosts, RankTimes, costs_of_ranks, of_job
from cpsr.planner.plan import Plan, Situation
from cpsr.planner.recovery_curve import EndCostCurve
from cpsr.predictor.calibration import HORIZON_ITERATIONS
from cpsr.predictor.divergence_watch import WATCH_ITERATIONS

__all__ = ["JobPlanner"]

logger = logging.getLogger(__name__)

THREAD_NAME = "cpsr-planner"
CLOSE_SECONDS = 5.0  # longer than a fit takes; an exit does not wait for a file system that hangs
FLUSH_SECONDS = 5.0  # how long the thread waits for the journal's
# Polling interval for overrides: a query of a small file takes about a millisecond; without the file, one stat.
OVERRIDE_POLL_SECONDS = 1.0


class JobPlanner:
    """Plans the checkpoints of a running job; the training thread only passes numbers and takes plans.

    Every rank records the costs of its checkpoints and snapshots in its part of the next checkpoint. Rank 0 reads them
    there, ends the phases, and fits the curves at the end of each. It proposes a plan if a phase has ended, or if the
    plan differs enough from the current one. Its errors never reach training: the last plan stays, and `failure`
    returns why.

    Phases follow the mean second moment of rank 0's gradients; the paper's terms have that of all ranks.

    An override of the interval (`cpsr.journal.PlanOverride`) is seen within a second. The plan follows once the run has
    measured a checkpoint, or eight snapshots in memory beside a fixed interval. When the override expires, a plan
    without it follows.

    Args:
        config: of the run.
        rank: this process.
        ranks: number of them.
        parameters: weights that this one owns.
        beta2: decay of the optimizer's second moments; 0 if it keeps none.
        accuracy: how well the predictor has predicted checkpoints; called from the planner's thread.

    Attributes:
        times: what checkpoints and snapshots cost this rank.
        on_proposal: called in its thread when there is a new plan.
    """

    def __init__(
        self,
        config: CPSRConfig,
        rank: int,
        ranks: int,
        parameters: int,
        beta2: float,
        accuracy: Callable[[], Sequence[dict[str, Any]]],
    ) -> None:
        self._config = config
        self._rank, self._ranks = rank, ranks
        self._accuracy = accuracy
        self.times = RankTimes(parameters)
        self.on_proposal: Callable[[], None] = lambda: None
        self._window_iterations: int | None = None
        self._phases = PhaseDetector(beta2=beta2)
        self._saves: list[SaveOutcome] = []  # not processed yet
        self._situation: Situation | None = None
        self._curves = prior_curves(0, config)
        self._fitted = False
        self._others: list[RankCosts] = []
        self._others_iteration: int | None = None  # when the costs of the others were read
        self._saved_choice: int | None = None  # Theorem 1's, in the checkpoint that this life began with
        self._share = 1.0  # ratio of all ranks' mean second moment to this one's, in one checkpoint
        self._proposed: Plan | None = None  # the newest, taken or not
        self._waiting: Plan | None = None  # not taken yet
        self._newest_override: PlanOverride | None = None  # that could be read
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

    def start(self, run_dir: Path, journal: RankJournal) -> None:
        """Begin to plan; does nothing on other ranks than 0."""
        if self._rank == 0:
            self._thread = threading.Thread(target=self._run, args=(run_dir, journal), name=THREAD_NAME, daemon=True)
            self._thread.start()

    def note(self, outcome: SaveOutcome) -> None:
        """This rank's part of a checkpoint is durable."""
        self.times.durable(outcome)
        if self._rank == 0:
            with self._lock:
                self._saves.append(outcome)

    def note_memory(self, stall_seconds: float, copy_seconds: float) -> None:
        """A snapshot went to host memory alone; see `RankTimes.snapshot`."""
        self.times.snapshot(stall_seconds, copy_seconds)
        if self.times.snapshots == MEASURED:  # a long fixed interval may have no checkpoint for hours
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
            phases = self._phases.state_dict()
        costs = self.times.costs()
        return {
            "costs": None if costs is None else asdict(costs),
            "phases": phases,
            "interval_iterations": plan.interval_iterations,
            "memory_interval_iterations": plan.memory_interval_iterations,
            "mode": plan.mode,
            "theorem1_interval_iterations": self._theorems_interval(plan),
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
            self.times.restore(state["costs"], replicates=replicates)
            with self._lock:
                self._phases.load_state_dict(state["phases"])
            self._saved_choice = state.get("theorem1_interval_iterations")

    def close(self) -> None:
        """Stop after the computation under way, and join the thread."""
        self._closing.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join(CLOSE_SECONDS)
            if self._thread.is_alive():
                logger.warning("the planner's thread did not end within %g s; it is abandoned", CLOSE_SECONDS)

    # On the planner's thread

    def _run(self, run_dir: Path, journal: RankJournal) -> None:
        try:
            while True:
                woken = self._wake.wait(OVERRIDE_POLL_SECONDS)
                self._wake.clear()
                if self._closing.is_set():  # checked after clearing, or an end in between would be missed
                    return
                self._read_override(run_dir)
                if woken or self._override != self._planned_override:
                    self._update(run_dir, journal)
        except Exception as error:
            self._failure = (
                f"the planner stopped for the rest of this life ({type(error).__name__}: {error}): it keeps the "
                "current interval, and training is not affected"
            )
            logger.exception("planning failed")

    def _read_override(self, run_dir: Path) -> None:
        """Find the override in force; where it cannot be read now, the last one that was read holds while it lasts."""
        try:
            self._newest_override = latest_override(run_dir)
        except JournalError as error:
            logger.debug("overrides of the interval cannot be read now: %s", error)
        newest = self._newest_override
        self._override = newest if newest is not None and newest.holds(time.time()) else None

    def _update(self, run_dir: Path, journal: RankJournal) -> None:
        """End phases, fit at their ends, and propose."""
        with self._lock:
            situation, saves, self._saves = self._situation, self._saves, []
            ended = list[Phase]()
            for save in saves:
                # If the optimizer keeps no second moments, phases end by their length alone.
                phase = self._phases.observe(save.iteration, save.mean_second_moment or 0.0) if save.iteration else None
                if phase is not None:
                    ended.append(phase)
                    journal.record(PhaseRow(life=journal.life, phase=self._phases.ended - 1, **asdict(phase)))
        checkpoint = self._config.checkpoint
        fixed = checkpoint.interval_iterations is not None
        own = self.times.costs(memory_alone=fixed and checkpoint.shared_memory)
        if situation is None or own is None:
            return
        self._read_other_ranks(situation.iteration, run_dir)
        # Beside the ends of phases, also once in a life: the failure that began it is known now.
        if ended or not self._fitted:
            self._fitted = self._fit(situation, run_dir, journal)
        overridden = self._override != self._planned_override
        if overridden or not fixed or checkpoint.shared_memory:
            self._propose(situation, own, journal, anew=bool(ended) or overridden)

    def _read_other_ranks(self, iteration: int, run_dir: Path) -> None:
        """Read all ranks' costs from the newest checkpoint: at first, and then as often as a phase can end.

        A thousand manifests take this thread 0.15 s or more: too long for every checkpoint.
        """
        read_at = self._others_iteration
        recently = read_at is not None and 0 <= iteration - read_at < self._phases.min_iterations
        if self._ranks == 1 or recently:
            return
        costs = costs_of_ranks(run_dir / "checkpoints", self._ranks)
        if costs:
            self._others, self._others_iteration = costs[1:], iteration
            # Adam's bias is the same on all ranks of one checkpoint, and cancels in the ratio.
            mean, own = of_job(costs).mean_second_moment, costs[0].mean_second_moment
            self._share = mean / own if mean and own else 1.0

    def _fit(self, situation: Situation, run_dir: Path, journal: RankJournal) -> bool:
        """Fit the curves to the journal; False if it cannot be read now: the old curves stay until the next update."""
        journal.flush(FLUSH_SECONDS)  # or losses of a branch that was given up would still be the newest
        accuracy = self._accuracy()
        try:
            reported = reported_failures(run_dir)
            with JournalReader(run_dir / "journal.db") as reader:
                iteration = situation.iteration
                curves = fit_curves(reader, accuracy, iteration, self._config, reported)
        except JournalError as error:
            logger.warning("the planner cannot read the journal now, and keeps its curves: %s", error)
            return False
        self._curves = curves
        for kind, result in curves.to_rows():
            journal.record(FitRow(life=journal.life, iteration=curves.iteration, kind=kind, result=result))
        return True

    def _propose(self, situation: Situation, own: RankCosts, journal: RankJournal, *, anew: bool) -> None:
        curve, planner = self._end_cost(situation), self._config.planner
        limits = Limits(planner.interval_min_iterations, planner.interval_max_iterations, HORIZON_ITERATIONS)
        plan = planned(self._inputs(situation, own, curve), limits, self._config, self._override)
        # What the training thread has told may be older than the newest proposal.
        if not (anew or differs(plan, self._proposed or situation.plan)):
            return
        with self._lock:
            self._waiting = self._proposed = plan
        self.on_proposal()
        if self._override != self._planned_override:
            self._planned_override = self._override
            kind = "override ended" if self._override is None else "override"
            journal.event(kind, override_message(self._override), situation.iteration)

    def _end_cost(self, situation: Situation) -> EndCostCurve | None:
        """Expected end cost of a recovery that skips what was lost; None if that is not allowed."""
        curves = self._curves
        return None if self._config.mode == "exact" else expected_costs(situation, curves.lost_share, curves.outcomes)

    def _inputs(self, situation: Situation, own: RankCosts, recovery: EndCostCurve | None) -> PlannerInputs:
        costs, curves, seconds = of_job([own, *self._others]), self._curves, situation.iteration_seconds
        failures = curves.failures
        return PlannerInputs(
            seconds,
            costs.stall_seconds,
            costs.persist_seconds,
            failures.total.mean_per_second,
            recovery,
            predict_seconds=curves.predict_seconds,
            watch_iterations=WATCH_ITERATIONS,
            phase=self._phase(costs.parameters),
            classes={
                scope: FailureClass(failures.share(scope), prior, failures.seen.get(scope, 0))
                for scope, prior in PRIOR_SHARES.items()
            },
            memory=memory_tier(self._config, costs, seconds, self._window_iterations),
            lost_share=curves.lost_share,
            interval_iterations=self._theorems_interval(self._proposed or situation.plan),
        )

    def _theorems_interval(self, plan: Plan) -> int:
        """What Theorem 1 chose last, before a slow disk or an override changed it; before that the plan's interval."""
        last = plan.explanation.get("rivals", {}).get("theorem1", {}).get("interval_iterations", self._saved_choice)
        return min(last or plan.interval_iterations, self._config.planner.interval_max_iterations)

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
            xi * self._share,
            parameters,
            accuracy.tau1_low_per_checkpoint,
        )
