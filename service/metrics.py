"""`GET /metrics`: what a Prometheus server scrapes, of every run; base units throughout."""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from fastapi import APIRouter, Request
from fastapi.responses import Response
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from cpsr.errors import JournalError
from cpsr.journal import FailureRow, JournalReader, PhaseRow, reported_failures
from cpsr.journal.account import CHECKPOINT_SUMS
from cpsr.service.ettr import PARTS, read_ettr
from cpsr.service.run import RECENT_STEPS, LifeState, Runs, health_of, iteration_seconds, open_journal

__all__ = ["router"]

RUNS_MAX = 100  # beyond which a scrape would take seconds; `cpsr serve` over fewer runs reports all of them

router = APIRouter(tags=["metrics"])


@router.get(
    "/metrics",
    operation_id="get_metrics",
    response_class=Response,
    responses={200: {"content": {CONTENT_TYPE_LATEST: {}}, "description": "Prometheus text."}},
)
def get_metrics(request: Request) -> Response:
    """Figures of all runs, each with the label `run`; `cpsr_journal_up` is 0 where a run's journal cannot be read."""
    runs: Runs = request.app.state.runs
    families = _Families()
    for name in runs.names()[:RUNS_MAX]:
        run_dir = runs.find(name)
        health, up = health_of(run_dir), True
        families.gauge("healthy", "Whether the run is healthy, as in /healthz.", name, health.status == "ok")
        age = health.journal_age_seconds
        families.gauge("journal_age_seconds", "Since the journal was last written.", name, age)
        try:
            with open_journal(run_dir) as reader:
                _steps(families, name, reader)
                _ettr(families, name, reader, health.life)
                _plan(families, name, reader)
                _checkpoints(families, name, reader)
                _failures(families, name, reader, run_dir)
        except JournalError:
            up = False
        families.gauge("journal_up", "Whether the run's journal could be read.", name, up)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(families)
    return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)


class _Families(Collector):
    """Metric families by name, in the order of their first sample."""

    def __init__(self) -> None:
        self._families: dict[str, GaugeMetricFamily | CounterMetricFamily] = {}

    def collect(self) -> Iterable[Metric]:
        """All of them."""
        return self._families.values()

    def gauge(self, name: str, text: str, run: str, value: float | None, **labels: str) -> None:
        """A sample that may go up and down; None leaves it out."""
        self._add(GaugeMetricFamily, name, text, run, value, labels)

    def counter(self, name: str, text: str, run: str, value: float, **labels: str) -> None:
        """A sample that only grows; the exposition adds `_total` to the name."""
        self._add(CounterMetricFamily, name, text, run, value, labels)

    def _add(
        self,
        family: type[GaugeMetricFamily] | type[CounterMetricFamily],
        name: str,
        text: str,
        run: str,
        value: float | None,
        labels: dict[str, str],
    ) -> None:
        if value is None:
            return
        if name not in self._families:
            self._families[name] = family(f"cpsr_{name}", text, labels=["run", *labels])
        self._families[name].add_metric([run, *labels.values()], float(value))


def _steps(families: _Families, run: str, reader: JournalReader) -> None:
    steps, lives = reader.recent_steps(RECENT_STEPS), reader.lives()
    families.gauge("lives", "Processes that the run has had so far.", run, len(lives))
    families.gauge("ranks", "Of the newest life.", run, lives[-1].ranks if lives else None)
    if not steps:
        return
    families.gauge("iteration", "Newest iteration.", run, steps[0].iteration)
    families.gauge("training_loss", "Of the newest iteration.", run, steps[0].loss)
    families.gauge("learning_rate", "Of the newest iteration.", run, steps[0].learning_rate)
    families.gauge("iteration_seconds", "Median of the recent iterations.", run, iteration_seconds(steps))


def _ettr(families: _Families, run: str, reader: JournalReader, state: LifeState | None) -> None:
    found = read_ettr(reader, reader.lives(), state)
    if found is None:
        return
    families.gauge("ettr_ratio", "Effective training time: useful time over wall time.", run, found.ettr)
    for part in PARTS:
        seconds = getattr(found, f"{part}_seconds")
        families.gauge("time_seconds", "Parts of the run's wall time.", run, seconds, part=part)
    families.gauge("lost_iterations", "Lost and not trained again yet.", run, found.lost_iterations)


def _plan(families: _Families, run: str, reader: JournalReader) -> None:
    plan = reader.latest_plan()
    if plan is None:
        return
    families.gauge(
        "checkpoint_interval_iterations",
        "Between checkpoints, by the current plan.",
        run,
        plan.interval_iterations,
        origin=plan.origin,
    )
    families.gauge(
        "memory_interval_iterations",
        "Between snapshots in host memory, by the current plan.",
        run,
        plan.memory_interval_iterations,
    )
    for scope, one in plan.explanation.get("classes", {}).items():
        text = "Expected failures by what they leave."
        families.gauge("class_failures_per_second", text, run, float(one["failures_per_second"]), scope=scope)
        text = "Expected loss of a failure by what it leaves."
        families.gauge("class_loss_iterations", text, run, float(one["loss_iterations"]), scope=scope)
    expected = plan.explanation.get("expected", {}).get("cost_per_second")
    cost = None if expected is None else float(expected)
    text = "Share of the time that checkpoints and failures are expected to cost."
    families.gauge("expected_cost_ratio", text, run, cost)
    rate = plan.explanation.get("inputs", {}).get("failures_per_second")
    families.gauge(
        "failures_per_second", "Failure rate that the plan uses.", run, None if rate is None else float(rate)
    )
    ended = reader.newest(PhaseRow, 1)
    families.gauge("phases_ended", "Phases of the training that have ended.", run, ended[0].phase + 1 if ended else 0)


def _checkpoints(families: _Families, run: str, reader: JournalReader) -> None:
    account = reader.account()
    for status, (count, *totals) in ({} if account is None else account.checkpoints).items():
        families.counter("checkpoints", "Checkpoints that were due.", run, count, status=status)
        for name, total in zip(CHECKPOINT_SUMS, totals, strict=True):
            text = f"Sum of {name} over checkpoints."
            families.counter(f"checkpoint_{name}", text, run, total, status=status)
    newest = reader.latest_checkpoint()
    if newest is not None:
        families.gauge("checkpoint_iteration", "Of the newest committed checkpoint.", run, newest.iteration)
        created = newest.created_unix_seconds
        families.gauge("checkpoint_timestamp_seconds", "When it was recorded, since 1970.", run, created)


def _failures(families: _Families, run: str, reader: JournalReader, run_dir: Path) -> None:
    text = "Failures of the job."
    families.counter("failures", text, run, reader.count(FailureRow), reported="false")
    families.counter("failures", text, run, len(reported_failures(run_dir)), reported="true")
    for (method, outcome), count in Counter((row.method, row.outcome) for row in reader.recoveries()).items():
        families.counter("recoveries", "Recoveries.", run, count, method=method, outcome=outcome)
