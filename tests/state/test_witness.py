"""Witnesses: the ring survives its process, leaves out what a kill has torn, and tells what differs."""

import struct
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from cpsr.state.witness import (
    RECORD_BYTES,
    STEPS,
    SampledBytes,
    Witness,
    Witnesses,
    difference,
    read_witnesses,
    witness_path,
)


def sample(*values: float) -> SampledBytes:
    return SampledBytes(struct.pack(f"<{len(values)}f", *values), (0, len(values), 0, 0))


def witness(iteration: int = 1, **more: Any) -> Witness:
    given: dict[str, Any] = {
        "life": 0,
        "trajectory": 7,
        "epoch": 0,
        "batch": iteration,
        "batches": iteration,
        "learning_rates": (1e-3,),
        "other_rates": 0,
        "loss": 2.0,
        "weights": sample(0.5, -0.25),
        "epsilon": 2.0**-23,
    }
    return Witness(iteration, **{**given, **more})


counts = st.tuples(*(st.integers(0, 12) for _ in range(4)))
samples = counts.flatmap(
    lambda found: st.binary(
        min_size=8 * found[0] + 4 * found[1] + 2 * (found[2] + found[3]),
        max_size=8 * found[0] + 4 * found[1] + 2 * (found[2] + found[3]),
    ).map(lambda content: SampledBytes(content, found))
)
word = st.integers(0, 2**64 - 1)
number = st.floats(allow_nan=False)
witnesses = st.builds(
    Witness,
    st.integers(0, 3 * STEPS),
    st.integers(0, 2**32 - 1),
    word,
    word,
    word,
    word,
    st.lists(number, max_size=4).map(tuple),
    word,
    st.none() | number,
    samples,
    number,
)


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(witnesses, max_size=12), st.data())
def test_the_last_execution_of_each_step_survives_unless_it_was_torn(
    tmp_path: Path, executed: list[Witness], data: st.DataObject
) -> None:
    path = witness_path(tmp_path, 0)
    path.unlink(missing_ok=True)
    kept: dict[int, Witness] = {}
    for life in (executed[: len(executed) // 2], executed[len(executed) // 2 :]):
        ring = Witnesses(path)
        for one in life:
            ring.put(one)
            kept[one.iteration % STEPS] = one
        assert sorted(ring.after(2)) == sorted(one for one in kept.values() if one.iteration > 2)
        ring.close()
    if kept:  # a kill while one record was written: the rest of it is that of before
        torn = data.draw(st.sampled_from(sorted(kept)))
        at = torn * RECORD_BYTES + data.draw(st.integers(0, RECORD_BYTES - 1))
        content = bytearray(path.read_bytes())
        content[at] ^= data.draw(st.integers(1, 255))
        path.write_bytes(content)
        del kept[torn]
    assert read_witnesses(tmp_path, 0) == sorted(kept.values())


def test_a_stopped_process_of_an_earlier_life_writes_into_a_file_of_its_own(tmp_path: Path) -> None:
    stopped = Witnesses(witness_path(tmp_path, 0))
    stopped.put(witness(1))
    ring = Witnesses(witness_path(tmp_path, 0))
    ring.put(witness(2, life=1))
    stopped.put(witness(2, life=0, loss=9.0))
    assert [(one.iteration, one.life) for one in read_witnesses(tmp_path, 0)] == [(1, 0), (2, 1)]


@pytest.mark.parametrize(
    ("changed", "what", "rounding"),
    [
        ({}, None, False),
        ({"life": 1}, None, False),
        ({"loss": None}, None, False),
        ({"batch": 2, "batches": 2, "loss": 3.0}, "batch position", False),
        ({"learning_rates": (2e-3,), "loss": 3.0}, "learning rate", False),
        ({"other_rates": 5}, "learning rate", False),
        ({"loss": 2.0000002}, "loss", True),
        ({"loss": 2.01}, "loss", False),
        ({"loss": 2.001, "epsilon": 2.0**-7}, "loss", True),  # bfloat16
        ({"loss": float("nan")}, "loss", False),
        ({"weights": sample(0.5, -0.25000003)}, "weights", True),
        ({"weights": sample(0.501, -0.25)}, "weights", False),
        ({"weights": sample(0.5)}, None, False),  # other elements
    ],
)
def test_what_differs_first(changed: dict[str, Any], what: str | None, rounding: bool) -> None:
    found = difference(witness(), witness(**changed))
    assert (None if found is None else found.what) == what
    if found is not None:
        assert found.rounding == rounding


def test_the_update_tells_rounding_from_errors() -> None:
    before, first = witness(0, weights=sample(0.5, 0.5)), witness(weights=sample(0.501, 0.501))
    again = witness(weights=sample(0.501001, 0.501))  # a thousandth of the update, at one of two elements
    found = difference(first, again, before)
    assert found is not None
    assert (found.rounding, found.elements) == (True, (0,))
    far = difference(first, witness(weights=sample(0.5005, 0.501)), before)  # half of the update
    assert far is not None
    assert not far.rounding
