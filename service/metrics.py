"""`GET /metrics`: what a Prometheus server scrapes; base units throughout."""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from fastapi import APIRouter
from fastapi.responses import Response
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from cpsr.errors import JournalError
from cpsr.journal import FailureRow, JournalReader, PhaseRow, reported_failures
from cpsr.service.run import RECENT_STEPS, RunDir, health_of, iteration_seconds, open_journal, paces_of

__all__ = ["router"]

router = APIRouter(tags=["metrics"])


@router.get(
    "/metrics",
    operation_id="get_metrics",
    response_class=Response,
    responses={200: {"content": {CONTENT_TYPE_LATEST: {}}, "description": "Prometheus text."}},
)
def get_metrics(run_dir: RunDir) -> Response:
    """Figures of the run, with its name as the label `run`; `cpsr_journal_up` is 0 where its journal cannot be read."""
    families = _Families(run_dir.absolute().name)
    health, up = health_of(run_dir), True
    families.gauge("healthy", "Whether the run is healthy, as in /healthz.", health.status == "ok")
    families.gauge("journal_age_seconds", "Since the journal was last written.", health.journal_age_seconds)
    try:
        with open_journal(run_dir) as reader:
            _steps(families, reader)
            _ranks(families, reader, run_dir)
            _plan(families, reader)
            _checkpoints(families, reader)
            _failures(families, reader, run_dir)
    except JournalError:
        up = False
    families.gauge("journal_up", "Whether the run's journal could be read.", up)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(families)
    return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)


class _Families(Collector):
    """Metric families by name, in the order of their first sample."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._families: dict[str, GaugeMetricFamily | CounterMetricFamily] = {}

    def collect(self) -> Iterable[Metric]:
        """All of them."""
        return self._families.values()

    def gauge(self, name: str, text: str, value: float | None, **labels: str) -> None:
        """A sample that may go up and down; None leaves it out."""
        if value is not None:
            self._add(GaugeMetricFamily, name, text, value, labels)

    def counter(self, name: str, text: str, value: float, **labels: str) -> None:
        """A sample that only grows; the exposition adds `_total` to the name."""
        self._add(CounterMetricFamily, name, text, value, labels)

    def _add(
        self,
        family: type[GaugeMetricFamily] | type[CounterMetricFamily],
        name: str,
        text: str,
        value: float,
        labels: dict[str, str],
    ) -> None:
        if name not in self._families:
            self._families[name] = family(f"cpsr_{name}", text, labels=["run", *labels])
        self._families[name].add_metric([self._run, *labels.values()], float(value))


def _steps(families: _Families, reader: JournalReader) -> None:
    steps, lives = reader.recent_steps(RECENT_STEPS), reader.lives()
    families.gauge("lives", "Processes that the run has had so far.", len(lives))
    families.gauge("ranks", "Of the newest life.", lives[-1].ranks if lives else None)
    if not steps:
        return
    families.gauge("iteration", "Newest iteration.", steps[0].iteration)
    families.gauge("training_loss", "Of the newest iteration.", steps[0].loss)
    families.gauge("learning_rate", "Of the newest iteration.", steps[0].learning_rate)
    families.gauge("iteration_seconds", "Median of the recent iterations.", iteration_seconds(steps))


def _ranks(families: _Families, reader: JournalReader, run_dir: Path) -> None:
    text = "A rank's own time for a step, without its waits for other ranks; kind is compute or data."
    for pace in paces_of(run_dir, reader.lives()):
        rank = str(pace.rank)
        families.gauge("rank_step_seconds", text, pace.compute_seconds, rank=rank, kind="compute")
        families.gauge("rank_step_seconds", text, pace.data_seconds, rank=rank, kind="data")
        families.gauge("rank_slow", "Whether the rank is reported as slow.", pace.slow, rank=rank, host=pace.host)


def _plan(families: _Families, reader: JournalReader) -> None:
    plan = reader.latest_plan()
    if plan is None:
        return
    text = "Between checkpoints, by the current plan."
    families.gauge("checkpoint_interval_iterations", text, plan.interval_iterations, origin=plan.origin)
    text = "Between snapshots in host memory, by the current plan."
    families.gauge("memory_interval_iterations", text, plan.memory_interval_iterations)
    cost = plan.explanation.get("expected", {}).get("cost_per_second")
    text = "Share of the time that checkpoints and failures are expected to cost."
    families.gauge("expected_cost_ratio", text, cost)
    rate = plan.explanation.get("inputs", {}).get("failures_per_second")
    families.gauge("failures_per_second", "Failure rate that the plan uses.", rate)
    ended = reader.newest(PhaseRow, 1)
    families.gauge("phases_ended", "Phases of the training that have ended.", ended[0].phase + 1 if ended else 0)


def _checkpoints(families: _Families, reader: JournalReader) -> None:
    for status, totals in reader.checkpoint_totals().items():
        families.counter("checkpoints", "Checkpoints that were due.", totals.pop("count"), status=status)
        for name, total in totals.items():
            text = f"Sum of {name} over checkpoints."
            families.counter(f"checkpoint_{name}", text, total, status=status)
    newest = reader.latest_checkpoint()
    if newest is not None:
        families.gauge("checkpoint_iteration", "Of the newest committed checkpoint.", newest.iteration)
        text = "When it was recorded, since 1970."
        families.gauge("checkpoint_timestamp_seconds", text, newest.created_unix_seconds)


def _failures(families: _Families, reader: JournalReader, run_dir: Path) -> None:
    text = "Failures of the job."
    families.counter("failures", text, reader.count(FailureRow), reported="false")
    families.counter("failures", text, len(reported_failures(run_dir)), reported="true")
    for (method, outcome), count in Counter((row.method, row.outcome) for row in reader.recoveries()).items():
        families.counter("recoveries", "Recoveries.", count, method=method, outcome=outcome)
