import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from cpsr.journal import Journal, StepRow
from tests.service.journals import error_of, flushed


def steps(life: int, first: int, last: int) -> list[StepRow]:
    return [
        StepRow(life=life, iteration=i, loss=10.0 * life + 1 / i, learning_rate=1e-3, seconds=0.1)
        for i in range(first, last + 1)
    ]


def asked(client: TestClient, **parameters: int) -> dict[str, Any]:
    response = client.get("/losses", params=parameters)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def test_a_short_run_is_returned_whole(client: TestClient, journal: Journal) -> None:
    journal.record(*steps(0, 1, 7))
    flushed(journal)
    assert asked(client) == {"iterations": list(range(1, 8)), "losses": [1 / i for i in range(1, 8)], "total": 7}


@pytest.mark.parametrize("limit", [2, 3, 10, 499, 500])
def test_a_long_one_is_thinned_evenly(client: TestClient, journal: Journal, limit: int) -> None:
    journal.record(*steps(0, 1, 500))
    flushed(journal)
    iterations = asked(client, limit=limit)["iterations"]
    assert (len(iterations), iterations[0], iterations[-1]) == (limit, 1, 500)
    gaps = {later - earlier for earlier, later in pairwise(iterations)}
    assert max(gaps) - min(gaps) <= 1


@pytest.mark.parametrize("limit", [10, 1000])
def test_what_was_given_up_is_left_out(client: TestClient, journal: Journal, limit: int) -> None:
    journal.record(*(steps(0, 1, 100) + steps(1, 61, 80)))
    flushed(journal)
    found = asked(client, limit=limit)
    assert found["iterations"] == sorted(set(found["iterations"]))
    assert found["iterations"][-1] == 80
    assert {loss > 9 for i, loss in zip(found["iterations"], found["losses"], strict=True) if i > 60} == {True}


def test_a_loss_that_is_none_is_null(client: TestClient, journal: Journal) -> None:
    losses = [1.5, math.nan, math.inf, None]
    journal.record(
        *[StepRow(life=0, iteration=i, loss=loss, learning_rate=1e-3, seconds=0.1) for i, loss in enumerate(losses, 1)]
    )
    flushed(journal)
    assert asked(client)["losses"] == [1.5, None, None, None]


def test_a_run_without_a_step_has_an_empty_curve(client: TestClient, journal: Journal) -> None:
    flushed(journal)
    assert asked(client) == {"iterations": [], "losses": [], "total": 0}


def test_without_a_journal_it_says_so(client: TestClient, tmp_path: Path) -> None:
    assert error_of(client.get("/losses"), 503)["code"] == "journal_unavailable"


@pytest.mark.parametrize("limit", ["1", "1001", "x"])
def test_the_limit_is_bounded(client: TestClient, limit: str) -> None:
    error_of(client.get("/losses", params={"limit": limit}), 422)


def test_a_part_of_a_long_run_is_returned_in_more_detail(client: TestClient, journal: Journal) -> None:
    journal.record(*steps(0, 1, 500))
    flushed(journal)
    assert asked(client, first_iteration=100, last_iteration=104)["iterations"] == [100, 101, 102, 103, 104]
    assert asked(client, first_iteration=498)["iterations"] == [498, 499, 500]
    assert asked(client, last_iteration=2)["iterations"] == [1, 2]
    thinned = asked(client, first_iteration=100, last_iteration=200, limit=11)
    assert thinned["iterations"] == list(range(100, 201, 10))
    assert thinned["total"] == 500
    assert asked(client, first_iteration=501)["iterations"] == []
    refused = client.get("/losses", params={"first_iteration": 5, "last_iteration": 4})
    assert error_of(refused, 422)["code"] == "bad_request"


def test_a_part_is_of_the_present_course(client: TestClient, journal: Journal) -> None:
    journal.record(*(steps(0, 1, 100) + steps(1, 61, 80)))
    flushed(journal)
    found = asked(client, first_iteration=58, last_iteration=90)
    assert found["iterations"] == list(range(58, 81))
    assert [loss > 9 for loss in found["losses"]] == [False] * 3 + [True] * 20


def test_a_part_of_steps_that_were_thinned_out(client: TestClient, journal: Journal) -> None:
    journal.record(*[row for row in steps(0, 1, 400) if row.iteration % 4 == 0])
    flushed(journal)
    found = asked(client, first_iteration=97, last_iteration=130, limit=30)["iterations"]
    assert found == list(range(100, 129, 4))
