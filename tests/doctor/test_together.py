"""What two real ranks find out together, and what follows from figures of many."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpsr.doctor.together import check_clocks, check_shared, check_versions
from cpsr.ranks.group import Group
from tests.two_ranks import run

SCRIPT = """
import json, sys, time
from datetime import timedelta
from pathlib import Path
import torch.distributed as dist
from cpsr.doctor.disk import scratch_folder
from cpsr.doctor.together import *
from cpsr.ranks.group import Group
dist.init_process_group("gloo", timeout=timedelta(seconds=60))
group, rank, root = Group(), dist.get_rank(), Path(sys.argv[1]).parent
found = {}
def both(name, *run_dirs):
    run_dir = root / run_dirs[rank % len(run_dirs)]
    with scratch_folder(run_dir, name) as folder:
        found[name] = check_shared(group, folder, run_dir).to_json()
        found[name + " locks"] = check_locks(group, folder).to_json()
        group.barrier()
for name in ("one", "other"):
    (root / name).mkdir(exist_ok=True)
both("same", "one")
both("same not made", "new/run")
both("different", "one", "other")
both("different not made", "new-0", "new-1")
run_dir = root / "one"
found["unwritable"] = check_shared(group, (root / "one") if rank == 0 else None, run_dir).to_json()
clocks = clock_rounds(group)
found["clocks"] = check_clocks(clocks).to_json()
group.barrier()
(root / "one" / "token-0").unlink(missing_ok=True)
Path(f"{sys.argv[1]}.{rank}").write_text(json.dumps(found))
group.close()
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], dict[str, Any]]:
    directory = tmp_path_factory.mktemp("ranks")
    return directory, *run(SCRIPT, directory)


Found = tuple[Path, dict[str, Any], dict[str, Any]]


@pytest.mark.parametrize("name", ["same", "same not made"])
def test_one_directory_is_seen_from_all_ranks_and_its_locks_hold(found: Found, name: str) -> None:
    for rank in found[1:]:
        assert rank[name]["level"] == "ok", rank[name]
        assert rank[f"{name} locks"]["level"] == "ok"


@pytest.mark.parametrize(("name", "given"), [("different", "one"), ("different not made", "new-0")])
def test_two_directories_are_an_error_also_before_they_are_made(found: Found, name: str, given: str) -> None:
    directory, first, second = found
    assert first[name]["level"] == second[name]["level"] == "error"
    assert f"ranks were given {directory / given}" in first[name]["measured"]
    assert first[name] == second[name]


def test_a_lock_that_another_rank_was_given_too_is_a_warning(found: Found) -> None:
    """As on a mount whose locks are of each machine alone: the two lock files differ."""
    assert found[1]["different locks"]["level"] == "warning"
    assert found[1]["different locks"]["figures"] == {"ranks": [1]}


def test_a_rank_that_cannot_write_is_named(found: Found) -> None:
    assert found[1]["unwritable"]["level"] == "error"
    assert found[1]["unwritable"]["figures"]["blind_ranks"] == [0, 1]


def test_nothing_is_left(found: Found) -> None:
    directory = found[0]
    assert list((directory / "one").iterdir()) == list((directory / "other").iterdir()) == []
    assert not list(directory.glob(".cpsr-doctor-*"))


def test_clocks_of_one_machine_are_one(found: Found) -> None:
    assert found[1]["clocks"]["level"] == "ok"
    assert found[1]["clocks"]["figures"]["apart_seconds"] < 0.5


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=6), st.data())
def test_the_skew_is_found_though_some_ranks_leave_barriers_late(skews: list[float], data: st.DataObject) -> None:
    rounds = []
    for number in range(9):
        late = data.draw(st.integers(0, len(skews) - 1)) if number < 4 else None
        rounds.append([1e9 + number + skew + 0.5 * (rank == late) for rank, skew in enumerate(skews)])
    apart = max(skews) - min(skews)
    found = check_clocks(rounds)
    assert found.figures["apart_seconds"] == pytest.approx(apart, abs=1e-5)
    assert found.level == ("ok" if found.figures["apart_seconds"] <= 1 else "warning")


def test_the_rank_that_is_ahead_is_named() -> None:
    found = check_clocks([[5.0, 2.0, 65.0]] * 9)
    assert found.level == "warning"
    assert "the clock of rank 2 is 63 s ahead of that of rank 1" in found.measured


def test_other_packages_on_a_machine_are_an_error() -> None:
    same: dict[str, str | None] = {"torch": "2.13.0", "numpy": "2.4.6"}
    assert check_versions([same] * 3).level == "ok"
    found = check_versions([same, {**same, "torch": "2.12.0"}, {"numpy": "2.4.6"}])
    assert found.level == "error"
    assert found.measured == "torch: 2.13.0 on ranks 0, 2.12.0 on ranks 1, none on ranks 2"


def test_one_rank_sees_itself(tmp_path: Path) -> None:
    assert check_shared(Group(), tmp_path, tmp_path).level == "ok"
