"""The dashboard in a real Chromium, over a journal that the job's own writer wrote."""

import json
import os
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from cpsr.checkpoint.manifest import COMMIT, step_name
from cpsr.journal import (
    CheckpointRow,
    EventRow,
    FailureRow,
    FitRow,
    Journal,
    LearningRow,
    PhaseRow,
    PlanOverride,
    RecoverySource,
    StepRow,
    override_plan,
)
from cpsr.service.access import Access
from cpsr.service.app import create_app
from tests.journal.timeline import START, Timeline
from tests.service.journals import (
    bubble_row,
    flushed,
    measured_plan,
    new_run,
    plan_row,
    record_event,
    recovery_row,
    two_tier_plan,
)

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install -e '.[dev]'")
expect = sync_api.expect

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed: apt-get install chromium")

TOKEN = "c2VjcmV0LXNlY3JldC1zZWNyZXQ="
NARROW = {"width": 375, "height": 800}
WAIT_MILLISECONDS = 30_000  # the machine may be busy; what is there is there at once
LAST = 120


class Service:
    """The service in a thread of this process, which can be stopped and started again on its port."""

    def __init__(self, run_dir: Path, access: Access) -> None:
        self._run_dir, self._access = run_dir, access
        self._port = 0
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}/"

    def start(self) -> None:
        listener = socket.create_server(("127.0.0.1", self._port))
        self._port = listener.getsockname()[1]
        app = create_app(self._run_dir, self._access)
        self._streams = app.state.streams
        self._server = uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1))
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [listener]})
        self._thread.start()

    def stop(self) -> None:
        self._streams.closing = True
        self._server.should_exit = True
        self._thread.join(30)
        assert not self._thread.is_alive()


@contextmanager
def served(run_dir: Path, access: Access | None = None) -> Iterator[Service]:
    service = Service(run_dir, access or Access())
    try:
        yield service
    finally:
        service.stop()


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
        "family": "power_law",
        "held_out_rmse_nats": 0.05,
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
    journal.record(LearningRow(life=0, iteration=60, first_iteration=0, checkpoints=2, updates=16))
    journal.record(FailureRow(life=0, iteration=92, checkpoint_iteration=90, description="<b>killed</b>"))
    guard = {
        "loss": {"accepted": True, "excess_nats": -0.0127, "tolerance_nats": 0.3},
        "lag": {"lag_iterations": -7.0, "standard_error_iterations": 2.5},
    }
    sources = [RecoverySource(rank=rank, source="predicted", iteration=92) for rank in (0, 1, 2, 4)]
    sources.append(RecoverySource(rank=3, source="departure", iteration=92))
    journal.record(recovery_row(method="vitp", guard=guard, sources=tuple(sources), reason="one sentence"))
    journal.record(
        PhaseRow(life=0, phase=0, first_iteration=0, last_iteration=70, xi=1.0, last_xi=1.1, ended_by="change")
    )
    journal.record(FitRow(life=0, iteration=100, kind="loss", result=curve()))
    flushed(journal)


def section(page: Any, name: str) -> Any:
    return page.get_by_role("region", name=name, exact=True)


def opened(page: Any, service: Service) -> None:
    page.goto(service.url)
    expect(page.locator("#connection")).to_have_text("Live")


def test_it_shows_the_run(page: Any, journal: Journal, tmp_path: Path) -> None:
    record_run(journal)
    with served(tmp_path) as service:
        opened(page, service)
        now = section(page, "Now")
        expect(now).to_contain_text("120")
        expect(now).to_contain_text("a predicted state")
        expect(now).to_contain_text("learned from 2 of 3 checkpoints")
        expect(now).to_contain_text("16 gradient steps")
        loss = section(page, "Training loss")
        expect(loss).to_contain_text("120 iterations, 1 failure. Fitted at iteration 100 (power law)")
        expect(loss.get_by_text("95% of single losses")).to_be_visible()
        interval = measured_plan().interval_iterations
        expect(section(page, "Interval between checkpoints")).to_contain_text(f"Every {interval} iterations now; Young")
        expect(section(page, "Why this interval").get_by_role("cell", name="CheckFreq")).to_be_visible()
        expect(section(page, "Newest checkpoints")).to_contain_text("skipped: the disk was busy")


def test_it_shows_both_tiers_and_what_failures_leave(page: Any, journal: Journal, tmp_path: Path) -> None:
    journal.record(*losses(1, LAST))
    plan = two_tier_plan()
    journal.record(plan_row(plan, from_iteration=30))
    flushed(journal)
    with served(tmp_path) as service:
        opened(page, service)
        every = plan.memory_interval_iterations
        expect(section(page, "Now")).to_contain_text(f"In memory every{every} iterations")
        expect(section(page, "Interval between checkpoints")).to_contain_text(f"In host memory every {every}.")
        why = section(page, "Why this interval")
        expect(why.get_by_role("row", name="replicas of what a machine held")).to_contain_text("a replica")
        expect(why.get_by_role("row", name="every machine and its memory")).to_contain_text("20 h")
        picture = os.environ.get("CPSR_TEST_PICTURES")
        if picture:
            page.screenshot(path=f"{picture}/tiers.png", full_page=True)


def test_it_shows_numbers_of_ranks_over_time(page: Any, tmp_path: Path) -> None:
    journal = Journal.open(tmp_path / "journal.db")
    for life, (ranks, first, last) in enumerate([(4, 0, 60), (3, 50, 90), (3, 90, 100), (2, 95, 130), (4, 130, 150)]):
        journal.start_life("auto", ranks=ranks)
        journal.record(*losses(first + 1, last, life))
        at = {"restored_iteration": first, "checkpoint_iteration": first, "failure_iteration": None}
        if life:
            journal.record(recovery_row(life=life, method="exact", sources=(), **at))
    journal.record(plan_row(measured_plan(), from_iteration=30))
    flushed(journal)
    with served(tmp_path) as service:
        opened(page, service)
        lines = "4since iteration 130before: 2 since 95before: 3 since 50before: 4 since 0"
        expect(section(page, "Now")).to_contain_text(f"Ranks{lines}")
        loss = section(page, "Training loss")
        expect(loss.get_by_text("other number of ranks")).to_be_visible()
        picture = os.environ.get("CPSR_TEST_PICTURES")
        if picture:
            section(page, "Now").screenshot(path=f"{picture}/sizes-now.png")
            loss.screenshot(path=f"{picture}/sizes.png")
        loss.get_by_text("The plot as tables").click()
        expect(loss.get_by_role("row", name="2 ranks, before 3")).to_contain_text("95")
    journal.close()


def test_it_shows_where_the_time_went(page: Any, tmp_path: Path) -> None:
    with Timeline(tmp_path / "journal.db") as timeline:
        timeline.record(0, [plan_row(two_tier_plan())])
        timeline.begin(0, -40)
        timeline.train(0, 1, 720, begins=0, seconds=10)
        timeline.save(0, 100, stall=300)
        timeline.remember(900, stall=90)
        timeline.begin(1, 7250)
        timeline.train(1, 701, 750, begins=7350, seconds=10)
        timeline.begin(2, 7900)
        timeline.train(2, 731, 800, begins=8000, seconds=10)
        timeline.fail(1, 750, at=7990)
        timeline.record(7990, [recovery_row(expected_end_cost_iterations=4.0, created_unix_seconds=START + 7990)])
        timeline.record(8700, [EventRow(life=2, rank=0, kind="test", message="a test")])
    with served(tmp_path) as service:
        page.goto(service.url)
        time_section = section(page, "Where the time went")
        expect(time_section).to_contain_text("Effective training time is")
        expect(time_section).to_contain_text("1 predicted recovery cost 4 iterations at the end")
        expect(time_section.get_by_role("row", name="Last hour")).to_be_visible()
        widths = (
            time_section.locator("svg.bar")
            .first.locator("rect")
            .evaluate_all("parts => parts.map(part => Number(part.getAttribute('width')))")
        )
        assert (len(widths), sum(widths)) == (6, pytest.approx(100))
        expect(section(page, "Now")).to_contain_text("Effective time")
        picture = os.environ.get("CPSR_TEST_PICTURES")
        if picture:
            page.screenshot(path=f"{picture}/time.png", full_page=True)
            page.emulate_media(color_scheme="dark")
            time_section.screenshot(path=f"{picture}/time-dark.png")
            page.set_viewport_size(NARROW)
            time_section.screenshot(path=f"{picture}/time-narrow.png")


def test_a_recovery_shows_every_shard_the_lag_and_the_guard(page: Any, journal: Journal, tmp_path: Path) -> None:
    record_run(journal)
    with served(tmp_path) as service:
        opened(page, service)
        table = section(page, "Recoveries").get_by_role("table")
        expect(table).to_contain_text("ranks 0\u20132, 4: predicted, of 92")
        expect(table).to_contain_text("rank 3: emergency dump, of 92")
        expect(table).to_contain_text("lag after 60\u2013160: \u22127 \u00b1 2.5")
        expect(table).to_contain_text("accepted: \u22120.013 of 0.3 nats")
        expect(table.get_by_text("one sentence")).to_be_hidden()
        table.get_by_text("vitp, kept").click()
        expect(table.get_by_text("one sentence")).to_be_visible()


def test_a_failure_is_paid_for_in_one_of_two_ways(page: Any, journal: Journal, tmp_path: Path) -> None:
    record_run(journal)
    expected: dict[str, Any] = {
        "expected_end_cost_iterations": 12.4,
        "settings": {"expected_deviation_iterations": 8.1},
    }
    journal.record(
        recovery_row(**expected),
        recovery_row(**expected, outcome="rolled_back"),
        recovery_row(restored_iteration=70, method="exact"),
        recovery_row(restored_iteration=60, method="stale"),
    )
    flushed(journal)
    with served(tmp_path) as service:
        opened(page, service)
        table = section(page, "Recoveries").get_by_role("table")
        expect(table.get_by_role("row")).to_have_count(6)
        rows = table.get_by_role("row").all_inner_texts()[1:5]  # newest first
        exact = [f"exact: {later} later" for later in (22, 42)]
        ways = ("32 later", *exact, "predicted state; expected cost +12 \u00b1 8.1")
        assert all(way in row for row, way in zip(rows, ways, strict=True)), rows
        assert "exact" not in rows[0]
        expect(section(page, "Why this interval")).to_contain_text("predicted state; expected cost")
        expect(section(page, "Why this interval")).to_contain_text("exact: ")


def test_the_plots_are_drawn_and_shown_as_tables(page: Any, journal: Journal, tmp_path: Path) -> None:
    record_run(journal)
    with served(tmp_path) as service:
        opened(page, service)
        loss = section(page, "Training loss")
        expect(loss).to_contain_text("Fitted")
        assert colours(page, "#loss-plot canvas") > 20
        assert colours(page, "#interval-plot canvas") > 5
        loss.get_by_text("The plot as tables").click()
        expect(loss.get_by_role("cell", name="phase 0 ended (change)")).to_be_visible()
        # What a journal says is text, whatever it looks like.
        expect(loss.get_by_role("cell", name="failure: <b>killed</b>")).to_be_visible()
        intervals = section(page, "Interval between checkpoints")
        intervals.get_by_text("The plot as a table").click()
        expect(intervals.get_by_role("row")).to_have_count(3)


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
    with served(tmp_path) as service:
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


def test_a_plot_is_walked_through_by_keys(page: Any, journal: Journal, tmp_path: Path) -> None:
    record_run(journal)
    with served(tmp_path) as service:
        opened(page, service)
        expect(section(page, "Training loss")).to_contain_text("Fitted")
        plot = page.get_by_role("slider", name="Training loss: place in the plot")
        plot.focus()
        page.keyboard.press("Home")
        expect(page.locator("#loss-readout")).to_contain_text("Iteration 1 \u00b7 loss 5 \u00b7 fit 5")
        page.keyboard.press("ArrowRight")
        page.keyboard.press("Shift+ArrowRight")
        expect(page.locator("#loss-readout")).to_contain_text("Iteration 12 ")
        assert "Iteration 12 " in plot.get_attribute("aria-valuetext")
        assert plot.get_attribute("aria-valuenow") == "12"
        page.keyboard.press("Escape")
        expect(page.locator("#loss-readout")).to_contain_text("Iteration 120 ")


def shown(page: Any) -> tuple[float, float]:
    """First and last iteration in the plot of the loss, from its status line."""
    words = page.locator("#loss-figure .zoom [role=status]").text_content().split()
    return float(words[1]), float(words[3])


def test_a_part_of_a_plot_is_shown_by_dragging_and_stays_while_the_run_goes_on(
    page: Any, journal: Journal, tmp_path: Path
) -> None:
    record_run(journal)
    with served(tmp_path) as service:
        opened(page, service)
        figure = page.locator("#loss-figure")
        expect(section(page, "Training loss")).to_contain_text("Fitted")
        whole = figure.get_by_role("button", name="Show the whole run")
        expect(whole).to_be_hidden()
        area = page.locator("#loss-plot .u-over").bounding_box()
        assert area is not None
        height = area["y"] + area["height"] / 2
        page.mouse.move(area["x"] + 0.4 * area["width"], height)
        page.mouse.down()
        page.mouse.move(area["x"] + 0.6 * area["width"], height, steps=4)
        page.mouse.up()
        expect(whole).to_be_visible()
        first, last = shown(page)
        assert first == pytest.approx(1 + 0.4 * 149, abs=2)
        assert last == pytest.approx(1 + 0.6 * 149, abs=2)
        journal.record(*losses(LAST + 1, LAST + 15))
        flushed(journal)
        expect(section(page, "Now")).to_contain_text("135")
        assert shown(page) == (first, last)
        page.locator("#loss-plot .u-over").dblclick()
        expect(whole).to_be_hidden()
        figure.get_by_role("button", name="Zoom in").click()
        expect(whole).to_be_visible()
        whole.click()
        expect(figure.locator(".zoom [role=status]")).to_be_empty()


def test_a_plot_is_zoomed_by_keys_about_the_cursor(page: Any, journal: Journal, tmp_path: Path) -> None:
    record_run(journal)
    with served(tmp_path) as service:
        opened(page, service)
        expect(section(page, "Training loss")).to_contain_text("Fitted")
        page.get_by_role("slider", name="Training loss: place in the plot").focus()
        page.keyboard.press("Home")
        page.keyboard.press("+")
        page.keyboard.press("=")
        assert shown(page) == (1, 38)
        page.keyboard.press("-")
        assert shown(page)[1] > 70
        page.keyboard.press("+")
        page.keyboard.press("End")  # goes there
        expect(page.locator("#loss-readout")).to_contain_text("Iteration 150 ")
        assert shown(page) == (113, 150)
        page.keyboard.press("Escape")
        expect(page.locator("#loss-figure .zoom [role=status]")).to_be_empty()
        expect(page.locator("#loss-readout")).to_contain_text("Iteration 150 ")
        for _ in range(20):
            page.keyboard.press("+")
        first, last = shown(page)
        assert 0 < last - first <= 5, "a plot of nothing is none"


def test_a_part_of_a_long_run_is_shown_in_more_detail(page: Any, journal: Journal, tmp_path: Path) -> None:
    journal.record(*losses(1, 3000))
    flushed(journal)
    with served(tmp_path) as service:
        opened(page, service)
        expect(section(page, "Training loss")).to_contain_text("3,000 iterations")
        page.get_by_role("slider", name="Training loss: place in the plot").focus()
        readout = page.locator("#loss-readout")
        page.keyboard.press("Home")
        page.keyboard.press("ArrowRight")
        expect(readout).to_contain_text("Iteration 6 ")  # of so long a run every fifth iteration is there
        page.keyboard.press("Home")
        with page.expect_response(lambda response: "first_iteration=1&last_iteration=188" in response.url):
            for _ in range(4):
                page.keyboard.press("+")
        page.keyboard.press("Home")
        page.keyboard.press("ArrowRight")
        expect(readout).to_contain_text("Iteration 2 ")
        page.keyboard.press("Escape")
        page.keyboard.press("Home")
        page.keyboard.press("ArrowRight")
        expect(readout).to_contain_text("Iteration 6 ")


def test_a_run_that_has_ended_is_not_live(page: Any, journal: Journal, tmp_path: Path) -> None:
    record_run(journal)
    with served(tmp_path) as service:
        opened(page, service)
        journal.end_life("sigterm")
        record_event(journal, "something")
        flushed(journal)
        expect(page.locator("#connection")).to_have_text("The run has left after SIGTERM")
        journal.start_life("auto")
        record_event(journal, "started")
        flushed(journal)
        expect(page.locator("#connection")).to_have_text("Live")
        journal.end_life("clean")
        flushed(journal)
        page.reload()
        expect(page.locator("#connection")).to_have_text("The run has ended")


def test_the_use_of_waits_is_shown_for_each_rank(page: Any, journal: Journal, tmp_path: Path) -> None:
    record_run(journal)
    with served(tmp_path) as service:
        opened(page, service)
        panel = section(page, "Waits of training, and their use")
        expect(panel).to_contain_text("No waits are recorded")
        for rank, life in ((0, 0), (1, 0), (1, 1), (3, 1), (3, 1)):
            journal.record(bubble_row(rank=rank, life=life))
        flushed(journal)
        expect(panel).to_contain_text(
            "Training waited 40% of the time; the predictor worked in 25% of that, and snapshots were copied in 12.5%"
        )
        rows = panel.get_by_role("row")
        expect(rows).to_have_count(3)
        cells = rows.nth(2).get_by_role("cell").all_text_contents()
        assert cells == ["3", "", "16 s (40%)", "4 s (25%)", "1 s, 6 of 80", "500 ms", "2 s: 6 kB, 75% of all"]
        drawn = rows.nth(2).locator("svg rect.waited").bounding_box()
        around = rows.nth(2).locator("svg").bounding_box()
        assert drawn is not None
        assert around is not None
        assert drawn["width"] / around["width"] == pytest.approx(0.4, abs=0.02)


def test_a_checkpoint_shows_where_it_is(page: Any, journal: Journal, tmp_path: Path) -> None:
    record_run(journal)
    step = tmp_path / "checkpoints" / step_name(90)
    step.mkdir(parents=True)
    (step / COMMIT).write_bytes(b"x" * 2000)
    journal.record(EventRow(life=0, rank=0, kind="target copied", message="", iteration=60))
    flushed(journal)
    with served(tmp_path) as service:
        opened(page, service)
        table = section(page, "Newest checkpoints").get_by_role("table")
        expect(table).to_contain_text("disk, 2 kB, verified")
        expect(table).to_contain_text("target, 4.2 MB, verified, 20")


def test_focus_is_seen_and_reaches_everything(page: Any, journal: Journal, tmp_path: Path) -> None:
    record_run(journal)
    with served(tmp_path) as service:
        opened(page, service)
        expect(section(page, "What if failures had another rate?").get_by_role("row")).to_have_count(4)
        reached = []
        for _ in range(12):
            page.keyboard.press("Tab")
            reached.append(
                page.evaluate(
                    "[document.activeElement.id || document.activeElement.textContent,"
                    " getComputedStyle(document.activeElement).outlineStyle]"
                )
            )
        names = [name for name, _ in reached]
        zoom = ["\u2212", "+"]
        order = ["Skip to the figures", "loss-plot", *zoom, "The plot as tables", "interval-plot", *zoom]
        order += ["mtbf", "The job's own rate"]
        assert [name for name in names if name in order] == order
        assert {style for name, style in reached if name in order} == {"solid"}


def test_the_slider_asks_what_if(page: Any, journal: Journal, tmp_path: Path) -> None:
    record_run(journal)
    with served(tmp_path) as service:
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


def test_a_lost_connection_is_shown_and_taken_up_again(page: Any, journal: Journal, tmp_path: Path) -> None:
    record_run(journal)
    with served(tmp_path) as service:
        opened(page, service)
        expect(section(page, "Now")).to_contain_text("120")
        service.stop()
        expect(page.locator("#connection")).to_contain_text("No connection since")
        expect(section(page, "Now")).to_contain_text("120")
        journal.record(*losses(LAST + 1, LAST + 2))
        flushed(journal)
        service.start()
        expect(page.locator("#connection")).to_have_text("Live")
        expect(section(page, "Now")).to_contain_text("122")


def test_a_journal_that_is_begun_anew_leaves_nothing_of_the_old_one(
    page: Any, journal: Journal, tmp_path: Path
) -> None:
    followed = tmp_path.with_name(f"{tmp_path.name}-followed")
    followed.symlink_to(tmp_path)
    anew = tmp_path.with_name(f"{tmp_path.name}-anew")
    new_run(anew)
    record_run(journal)
    with served(followed) as service:
        opened(page, service)
        expect(section(page, "Now")).to_contain_text("120")
        # What cannot be asked for again must not stay in sight.
        page.route("**/losses?**", lambda route: route.abort())
        page.route("**/plan?**", lambda route: route.abort())
        followed.unlink()
        followed.symlink_to(anew)
        expect(section(page, "Now")).not_to_contain_text("120")


@pytest.mark.parametrize(("last_event_kept", "stays"), [(3, True), (0, False)])
def test_a_reset_of_the_stream_forgets_only_where_nothing_is_kept(
    page: Any, journal: Journal, tmp_path: Path, last_event_kept: int, stays: bool
) -> None:
    record_run(journal)
    with served(tmp_path) as service:
        opened(page, service)
        expect(section(page, "Now")).to_contain_text("120")
        service.stop()
        expect(page.locator("#connection")).to_contain_text("No connection since")
        for asked in ("**/losses?**", "**/plan?**"):
            page.route(asked, lambda route: route.abort())
        kept = json.dumps({"event": last_event_kept, "plan": 0})
        reset = f'event: reset\ndata: {{"reason": "a test", "kept": {kept}}}\n\n'
        page.route("**/events?**", lambda route: route.fulfill(content_type="text/event-stream", body=reset))
        with page.expect_request("**/plan?**"):  # follows upon the reset
            service.start()
        now = expect(section(page, "Now"))
        (now.to_contain_text if stays else now.not_to_contain_text)("120")


def test_a_run_that_has_not_begun_is_waited_for(page: Any, tmp_path: Path) -> None:
    with served(tmp_path) as service:
        page.goto(service.url)
        expect(page.locator("#connection")).to_have_text("Waiting for the run")
        expect(page.locator("#notices")).to_contain_text("There is no journal")
        expect(section(page, "Now")).to_be_hidden()
        journal = Journal.open(tmp_path / "journal.db")
        try:
            journal.start_life("auto")
            flushed(journal)
            expect(page.locator("#connection")).to_have_text("Live")
            expect(section(page, "Training loss")).to_contain_text("No step has been recorded yet")
            expect(page.locator("#loss-plot")).to_be_hidden()
        finally:
            journal.close()


def test_a_run_without_a_loss_says_what_to_call(page: Any, tmp_path: Path) -> None:
    journal = Journal.open(tmp_path / "journal.db")
    try:
        life = journal.start_life("auto")
        step = StepRow(life=life, iteration=1, loss=None, learning_rate=1e-3, seconds=0.1)
        journal.record(*(replace(step, iteration=at) for at in range(1, 41)))
        flushed(journal)
        with served(tmp_path) as service:
            page.goto(service.url)
            loss = section(page, "Training loss")
            expect(loss).to_contain_text("40 iterations, but no loss")
            expect(loss).to_contain_text("recovery.log_loss(loss)")
            expect(page.locator("#loss-plot")).to_be_hidden()
            if picture := os.environ.get("CPSR_TEST_PICTURE"):
                page.screenshot(path=picture, full_page=True)
            journal.record(replace(step, iteration=41, loss=2.5))
            flushed(journal)
            expect(page.locator("#loss-plot")).to_be_visible()
    finally:
        journal.close()


def test_what_is_amiss_is_shown_first(page: Any, journal: Journal, tmp_path: Path) -> None:
    record_run(journal)
    journal.record(CheckpointRow(life=0, iteration=119, status="failed", reason="the disk is full"))
    flushed(journal)
    now = time.time()
    override_plan(
        tmp_path,
        PlanOverride(
            interval_min_iterations=25,
            interval_max_iterations=25,
            reason="<i>spot prices</i>",
            expires_unix_seconds=now + 3600,
            created_unix_seconds=now,
        ),
    )
    with served(tmp_path) as service:
        opened(page, service)
        notices = page.locator("#notices")
        expect(notices).to_contain_text("Not healthy: the checkpoint at iteration 119 failed: the disk is full.")
        expect(notices).to_contain_text("The interval is pinned to 25 iterations until")
        expect(notices).to_contain_text("<i>spot prices</i>; the job has not applied it yet.")


def test_with_a_token_it_asks_for_it(page: Any, journal: Journal, tmp_path: Path) -> None:
    record_run(journal)
    with served(tmp_path, Access(TOKEN)) as service:
        page.goto(service.url)
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


def test_of_several_runs_one_is_chosen(page: Any, tmp_path: Path) -> None:
    for name, last in (("long", 40), ("short", 9)):
        (tmp_path / name).mkdir()
        journal = Journal.open(tmp_path / name / "journal.db")
        journal.start_life("auto")
        journal.record(*losses(1, last))
        journal.close()
    with served(tmp_path) as service:
        opened(page, service)
        expect(section(page, "Training loss")).to_contain_text("40 iterations")
        page.get_by_role("combobox", name="Run").select_option("short")
        expect(section(page, "Training loss")).to_contain_text("9 iterations")
        assert page.url.endswith("?run=short")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_narrow_page_scrolls_to_no_side(page: Any, journal: Journal, tmp_path: Path, scheme: str) -> None:
    record_run(journal)
    page.set_viewport_size(NARROW)
    page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
    with served(tmp_path) as service:
        opened(page, service)
        expect(section(page, "Recoveries").get_by_role("table")).to_contain_text("predicted, of 92")
        assert page.evaluate("document.documentElement.scrollWidth") <= NARROW["width"]
        plot = page.locator("#loss-plot canvas").bounding_box()
        assert plot is not None
        assert plot["x"] + plot["width"] <= NARROW["width"]
        text, ground = (
            page.evaluate(f"getComputedStyle(document.body).{name}.match(/\\d+/g).map(Number)")
            for name in ("color", "backgroundColor")
        )
        assert (sum(text) < sum(ground)) == (scheme == "light")
        assert page.locator("#connection").evaluate("e => getComputedStyle(e, '::before').animationName") == "none"
