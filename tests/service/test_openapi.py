"""Whatever the description allows is asked, and much that it does not: answers must be as it says."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from schemathesis import Case, HookContext
from schemathesis.engine import from_schema
from schemathesis.engine.events import FatalError, NonFatalError, ScenarioFinished
from schemathesis.engine.recorder import ScenarioRecorder
from schemathesis.openapi.loaders import from_asgi

from cpsr.journal import EventRow, Journal
from cpsr.service.access import Access
from cpsr.service.app import create_app
from tests.service.conftest import BASE_URL
from tests.service.journals import ROWS, measured_plan, plan_row, record_steps

SEED = 1
FAILURES_SHOWN = 20
EXAMPLES = 10  # of each operation, beside those at the edges of every parameter
FEWER_EXAMPLES = 2  # where nothing can be read: every operation gives the same answer then
NO_SERVER_ERROR = ["2xx", "3xx", "4xx"]


def _whole(run_dir: Path) -> None:
    """A row of every kind, of a job that is alive: this process."""
    journal = Journal.open(run_dir / "journal.db")
    journal.start_life("auto")
    record_steps(journal)
    journal.record(*ROWS, plan_row(measured_plan()))
    journal.record(EventRow(life=0, rank=0, kind="test", message="a test"))
    journal.close()


def _absent(run_dir: Path) -> None:
    """Nothing is there."""


def filter_case(_: HookContext, case: "Case[Any]") -> bool:
    """Leaves out what is refused by a rule that JSON Schema has no words for: failures in the future."""
    failed = case.body.get("failed_unix_seconds") if isinstance(case.body, dict) else None
    return not isinstance(failed, int | float) or failed <= time.time()


@pytest.mark.parametrize("record", [_whole, _absent], ids=lambda record: record.__name__.strip("_"))
def test_every_answer_is_as_described(tmp_path: Path, record: Callable[[Path], None]) -> None:
    record(tmp_path)
    app = create_app(tmp_path, Access(allow_writes=True))
    # Without a journal 503 is the answer; with one no 5xx is.
    unavailable = [] if record is _whole else ["503"]
    config = schemathesis.Config.from_dict(
        {
            "seed": SEED,
            "workers": 1,
            "base-url": BASE_URL,
            "generation": {
                "max-examples": EXAMPLES if record is _whole else FEWER_EXAMPLES,
                "deterministic": True,
                "database": "none",
            },
            "checks": {"not_a_server_error": {"expected-statuses": NO_SERVER_ERROR + unavailable}},
        }
    )
    schema = from_asgi("/openapi.json", app, config=config, headers={"Host": "127.0.0.1"})
    schema.hook(filter_case)
    asked: set[str] = set()
    wrong: list[str] = []
    for event in from_schema(schema).execute():
        if isinstance(event, NonFatalError | FatalError):
            wrong.append(str(event))
        elif isinstance(event, ScenarioFinished):
            asked |= {case.value.operation.label for case in event.recorder.cases.values()}
            wrong += _failed(event.recorder)
    assert not wrong, "\n\n".join(wrong[:FAILURES_SHOWN])
    paths = app.openapi()["paths"].items()
    assert asked == {f"{method.upper()} {path}" for path, methods in paths for method in methods}


def _failed(recorder: ScenarioRecorder) -> list[str]:
    """Each check that an answer failed, with what brings it about again."""
    return [
        f"{recorder.label}: {check.name}: {check.failure_info.failure}\n{check.failure_info.code_sample}"
        for checks in recorder.checks.values()
        for check in checks
        if check.failure_info is not None
    ]
