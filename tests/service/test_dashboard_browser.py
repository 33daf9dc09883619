"""The dashboard in a real Chromium, over a journal that the job's own writer wrote."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cpsr.journal import (
    CheckpointRow,
    FailureRow,
    FitRow,
    Journal,
    PhaseRow,
    RecoverySource,
    StepRow,
)
from cpsr.service.access import Access
from tests.service.conftest import Service
from tests.service.journals import (
    flushed,
    measured_plan,
    plan_row,
    record_event,
    recovery_row,
)

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install -e '.[dev]'")
expect = sync_api.expect

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed: apt-get install chromium")

TOKEN = "c2VjcmV0LXNlY3JldC1zZWNyZXQ="
WAIT_MILLISECONDS = 30_000  # the machine may be busy; what is there is there at once
LAST = 120


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    # A sandbox is more than root may have.
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A page that fails the test where a script of it fails, or it asks anybody else."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    page = context.new_page()
    page.set_default_timeout(WAIT_MILLISECONDS)
    expect.set_options(timeout=WAIT_MILLISECONDS)
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda line: wrong.append(line.text) if "Content Security Policy" in line.text else None)
    page.on("request", lambda request: None if "//127.0.0.1:" in request.url else wrong.append(request.url))
    yield page
    context.close()
    assert wrong == []


def losses(first: int, last: int, life: int = 0) -> list[StepRow]:
    return [
        StepRow(life=life, iteration=i, loss=2 + 30 / (i + 9), learning_rate=1e-3, seconds=0.5)
        for i in range(first, last + 1)
    ]


def curve() -> dict[str, Any]:
    places = [1.0, 60.0, 150.0]
    at = [2 + 30 / (place + 9) for place in places]
    return {
        "curve": {
            "iterations": places,
            "loss_nats": at,
            "low_nats": [one - 0.2 for one in at],
            "high_nats": [one + 0.2 for one in at],
        },
    }


def record_run(journal: Journal) -> None:
    """A run that has failed once, with everything that the page shows."""
    journal.record(*losses(1, LAST))
    journal.record(plan_row(from_iteration=0, origin="fixed", explanation={}, interval_iterations=40))
    journal.record(plan_row(measured_plan(), from_iteration=30))
    for iteration in (30, 60, 90):
        journal.record(CheckpointRow(life=0, iteration=iteration, status="committed", bytes=4_200_000))
    journal.record(CheckpointRow(life=0, iteration=110, status="skipped", reason="the disk was busy"))
    journal.record(FailureRow(life=0, iteration=92, checkpoint_iteration=90, description="<b>killed</b>"))
    guard = {"loss": {"accepted": True, "excess_nats": -0.0127, "tolerance_nats": 0.3}}
    sources = [RecoverySource(rank=rank, source="predicted", iteration=92) for rank in (0, 1, 2, 4)]
    sources.append(RecoverySource(rank=3, source="departure", iteration=92))
    journal.record(
        recovery_row(
            life=1, origin="predicted", method="vitp", guard=guard, sources=tuple(sources), reason="one sentence"
        )
    )
    journal.record(
        PhaseRow(life=0, phase=0, first_iteration=0, last_iteration=70, xi=1.0, last_xi=1.1, ended_by="change")
    )
    journal.record(FitRow(life=0, iteration=100, kind="loss", result=curve()))
    flushed(journal)


def section(page: Any, name: str) -> Any:
    return page.get_by_role("region", name=name, exact=True)


def opened(page: Any, service: Service) -> None:
    page.goto(f"{service.url}/")
    expect(page.locator("#connection")).to_have_text("Live")


def test_it_shows_the_run(page: Any, journal: Journal, tmp_path: Path) -> None:
    record_run(journal)
    with Service(tmp_path) as service:
        opened(page, service)
        now = section(page, "Now")
        expect(now).to_contain_text("120")
        expect(now).to_contain_text("predicted state")
        loss = section(page, "Training loss")
        expect(loss).to_contain_text("120 iterations, 1 failure. Fitted at iteration 100.")
        expect(loss.get_by_text("95% of single losses")).to_be_visible()
        interval = measured_plan().interval_iterations
        expect(section(page, "Interval between checkpoints")).to_contain_text(f"Every {interval} iterations now; Young")
        expect(section(page, "What if failures had another rate?").get_by_role("cell", name="Daly")).to_be_visible()
        expect(section(page, "Newest checkpoints")).to_contain_text("skipped: the disk was busy")
        table = section(page, "Recoveries").get_by_role("table")
        expect(table).to_contain_text("ranks 0\u20132, 4: predicted, of 92")
        expect(table).to_contain_text("rank 3: emergency dump, of 92")
        expect(table).to_contain_text("accepted: \u22120.013 of 0.3 nats")
        expect(table.get_by_text("one sentence")).to_be_hidden()
        table.get_by_text("vitp, kept").click()
        expect(table.get_by_text("one sentence")).to_be_visible()


def test_the_plots_are_drawn_and_what_happened_is_a_table(page: Any, journal: Journal, tmp_path: Path) -> None:
    record_run(journal)
    with Service(tmp_path) as service:
        opened(page, service)
        loss = section(page, "Training loss")
        expect(loss).to_contain_text("Fitted")
        assert colours(page, "#loss-plot canvas") > 20
        assert colours(page, "#interval-plot canvas") > 5
        loss.get_by_text("What happened, as a table").click()
        expect(loss.get_by_role("cell", name="phase 0 ended (change)")).to_be_visible()
        # What a journal says is text, whatever it looks like.
        expect(loss.get_by_role("cell", name="failure: <b>killed</b>")).to_be_visible()


def colours(page: Any, selector: str) -> int:
    """How many colours a canvas shows."""
    count = page.locator(selector).evaluate(
        """canvas => {
            const {data} = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
            return new Set(new Uint32Array(data.buffer)).size;
        }"""
    )
    return int(count)


def test_what_happens_is_shown_without_being_asked(page: Any, journal: Journal, tmp_path: Path) -> None:
    record_run(journal)
    with Service(tmp_path) as service:
        opened(page, service)
        expect(section(page, "Newest checkpoints")).to_contain_text("4 of 4")
        page.evaluate("marked = document.querySelector('#why td')")
        journal.record(*losses(LAST + 1, LAST + 15))
        journal.record(CheckpointRow(life=0, iteration=130, status="committed", bytes=1))
        record_event(journal, "something")
        flushed(journal)
        expect(section(page, "Now")).to_contain_text("135")
        expect(section(page, "Newest checkpoints")).to_contain_text("5 of 5")
        assert page.evaluate("marked.isConnected"), "what is the same as before is left alone"


def test_the_slider_asks_what_if(page: Any, journal: Journal, tmp_path: Path) -> None:
    record_run(journal)
    with Service(tmp_path) as service:
        opened(page, service)
        panel = section(page, "What if failures had another rate?")
        slider = panel.get_by_role("slider", name="Mean time between failures of the job")
        own = panel.get_by_role("row").filter(has_text="This job").get_by_role("cell")
        own_interval = str(measured_plan().interval_iterations)
        expect(own.nth(2)).to_have_text(own_interval)
        assert slider.get_attribute("aria-valuetext") == "12 h, the job's own"
        slider.focus()
        page.keyboard.press("Home")
        expect(panel.get_by_role("status")).to_have_text("43.2 s")
        expect(own.nth(2)).not_to_have_text(own_interval)
        expect(own.nth(1)).to_have_text(own_interval)
        panel.get_by_role("button", name="The job's own rate").click()
        expect(own.nth(2)).to_have_text(own_interval)


def test_with_a_token_it_asks_for_it(page: Any, journal: Journal, tmp_path: Path) -> None:
    record_run(journal)
    with Service(tmp_path, Access(TOKEN)) as service:
        page.goto(f"{service.url}/")
        field = page.get_by_label("Token", exact=True)
        field.fill("not the token of it")
        page.keyboard.press("Enter")
        expect(page.get_by_role("alert")).to_contain_text("not the token of this service")
        expect(section(page, "Now")).to_be_hidden()
        field.fill(TOKEN)
        page.get_by_role("button", name="Open").click()
        expect(page.locator("#connection")).to_have_text("Live")
        expect(section(page, "Now")).to_contain_text("120")
        assert TOKEN not in page.url
