from pathlib import Path

import numpy
import pytest

from cpsr.errors import ConfigError
from cpsr.simulate.arrivals import TraceReplay
from cpsr.simulate.run import simulate
from cpsr.simulate.system import Checkpoints, Job, Rollback, System
from cpsr.simulate.trace import Trace, read_trace

EVENTS = """0,add,a
0,add,b
0,add,c
60000,remove,a
60000,remove,b
120000,add,d
90000,remove,c
180000,add,e
"""
INSTANCES = """2021-12-11, 10:00:00, 8
2021-12-11, 10:10:00, 5
2021-12-11, 10:05:00, 8
2021-12-11, 10:20:00, 9
"""
SAMPLES = """,Time,GPUs
0,1000.5,56
1,1063.5,50
2,1126.5,50
3,1189.5,52
"""


@pytest.fixture
def read(tmp_path: Path):  # type: ignore[no-untyped-def]
    def read_text(text: str) -> Trace:
        path = tmp_path / "trace"
        path.write_text(text, encoding="utf-8")
        return read_trace(path)

    return read_text


def test_events_of_one_instant_are_one_incident(read) -> None:  # type: ignore[no-untyped-def]
    trace = read(EVENTS)
    assert trace.incident_seconds.tolist() == [60, 90]
    assert trace.removed.tolist() == [2, 1]
    assert trace.alive_before.tolist() == [3, 1]
    assert trace.alive.tolist() == [3, 1, 0, 1, 2]
    assert (trace.span_seconds, trace.malformed) == (180, ())


def test_instances_are_sorted_by_time(read) -> None:  # type: ignore[no-untyped-def]
    trace = read(INSTANCES)
    assert trace.alive_seconds.tolist() == [0, 300, 600, 1200]
    assert trace.incident_seconds.tolist() == [600]
    assert (trace.removed.tolist(), trace.alive_before.tolist()) == ([3], [8])


def test_samples_have_a_header(read) -> None:  # type: ignore[no-untyped-def]
    trace = read(SAMPLES)
    assert (trace.incident_seconds.tolist(), trace.removed.tolist(), trace.span_seconds) == ([63], [6], 189)


@pytest.mark.parametrize(
    ("text", "line", "why"),
    [
        (EVENTS + "200000,remov,e\n", 9, "is not"),
        (EVENTS + "200000,remove,z\n", 9, "not there"),
        (EVENTS + "200000,add,e\n", 9, "already there"),
        (EVENTS + "-5,add,x\n", 9, "is not"),
        (INSTANCES + "2021-12-11, 10:25:00\n", 5, "is not"),
        (INSTANCES + "2021-13-11, 10:25:00, 4\n", 5, "month"),
        (SAMPLES + "4,yesterday,3\n", 6, "is not"),
        (SAMPLES + "4,1300.5,-3\n", 6, "is not"),
    ],
)
def test_malformed_lines_are_named_and_the_rest_is_read(read, text: str, line: int, why: str) -> None:  # type: ignore[no-untyped-def]
    trace = read(text)
    assert len(trace.malformed) == 1
    assert trace.malformed[0].startswith(f"line {line}: ")
    assert why in trace.malformed[0]
    assert len(trace.incident_seconds) >= 1


@pytest.mark.parametrize("text", ["", "a,b\n", "0,add,a\n", ",Time,GPUs\n", "5,Time\n0,1000.5,56\n"])
def test_files_without_a_form_or_a_span_are_refused(read, text: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError, match=r"form|spans no time"):
        read(text)


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        read_trace(tmp_path / "absent")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot read"):
        read_trace(tmp_path / "binary")


def test_run_0_meets_the_trace_as_recorded_again_and_again(read) -> None:  # type: ignore[no-untyped-def]
    stream = TraceReplay(read(EVENTS)).stream(2, numpy.random.default_rng(0))
    met, now = [], numpy.zeros(2)
    for _ in range(5):
        now = stream.after(now)
        met.append(now.copy())
    assert [times[0] for times in met] == [60, 90, 240, 270, 420]
    gaps = numpy.diff([times[1] for times in met])
    assert set(numpy.round(gaps, 6)) == {30.0, 150.0}


def test_incidents_during_a_wait_are_not_met(read) -> None:  # type: ignore[no-untyped-def]
    # 3 nodes of 3 until 60 s; then too few until the trace begins again at 180 s.
    job, system = Job(1.0, 360.0), System("x", Checkpoints(10, 0.0), Rollback())
    result = simulate(job, system, TraceReplay(read(EVENTS), nodes=3), runs=1)
    assert result.failures.tolist() == [2]
    assert result.waiting_seconds.tolist() == pytest.approx([240.0])
    assert result.useful_seconds.tolist() == pytest.approx([120.0])


def test_a_removal_meets_the_job_as_often_as_it_takes_one_of_its_nodes(read) -> None:  # type: ignore[no-untyped-def]
    # 3 of 8 nodes go once in 1,200 s. The job uses 2: spared with C(6,3) / C(8,3) = 20/56.
    job, system = Job(1.0, 50 * 1200.0), System("x", Checkpoints(10, 0.0), Rollback())
    result = simulate(job, system, TraceReplay(read(INSTANCES), nodes=2), runs=400)
    mean, error = result.mean_and_error(result.failures)
    assert mean == pytest.approx(50 * 36 / 56, abs=4 * error)


def test_the_mean_time_between_failures_is_that_of_the_job_and_not_of_the_machines(read) -> None:  # type: ignore[no-untyped-def]
    # Of 1,200 s with one incident, which takes one of 2 nodes with 36/56; and of 8 nodes, all of them.
    assert TraceReplay(read(INSTANCES), nodes=2).mtbf_seconds == pytest.approx(1200 * 56 / 36)
    assert TraceReplay(read(INSTANCES)).mtbf_seconds == 1200
    # With all 8 it waits from the incident on, after 600 s.
    assert TraceReplay(read(INSTANCES), nodes=8).mtbf_seconds == 600
    # The second incident strikes while the job waits: it runs 60 s, and all of its 3 nodes may go then.
    assert TraceReplay(read(EVENTS), nodes=3).mtbf_seconds == 60


def test_a_job_that_never_fits_is_refused(read) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match="never has 4 nodes"):
        TraceReplay(read(EVENTS), nodes=4)


def test_a_quiet_trace_never_fails(read) -> None:  # type: ignore[no-untyped-def]
    trace = read("0,add,a\n60000,add,b\n")
    result = simulate(Job(1.0, 100.0), System("x", Checkpoints(10, 0.0), Rollback()), TraceReplay(trace), runs=3)
    assert result.failures.sum() == 0
    assert TraceReplay(trace).mtbf_seconds == numpy.inf
