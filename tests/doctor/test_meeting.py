"""Ranks that do not come are named, and soon."""

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping

import pytest
import torch.distributed as dist

from cpsr.doctor.meeting import MissingRankError, Roll, meet
from cpsr.ranks.group import this_node

LIMIT_SECONDS = 200.0
SHORT_SECONDS = 5.0


def rolls(ranks: int, wait_seconds: float = 0.5) -> list[Roll]:
    store = dist.HashStore()  # type: ignore[attr-defined]
    return [Roll(store, rank, ranks, wait_seconds) for rank in range(ranks)]


def test_who_never_came_is_named() -> None:
    first, _, third, _ = rolls(4)
    for roll in (first, third):
        roll.enter()
    with pytest.raises(MissingRankError, match=r"^ranks 1, 3 did not come within 0.5 s; 2 of 4 came$") as raised:
        first.await_all()
    assert raised.value.ranks == [1, 3]


def test_who_stays_behind_is_named_with_its_machine_and_place() -> None:
    first, second, third = rolls(3)
    for roll in (first, second, third):
        roll.enter()
    first.await_all()
    second.doing("its GPUs")
    for roll in (first, third):
        roll.enter()
    missing = first.missing(RuntimeError("Connection closed by peer"))
    assert str(missing) == f"rank 1 ({this_node()}, at its GPUs) did not come any further"
    assert missing.ranks == [1]


def test_who_works_on_is_not_taken_for_the_one_that_is_gone() -> None:
    first, second, third = rolls(3, 60.0)
    for roll in (first, second, third):
        roll.enter()
    first.enter()
    threading.Timer(1.0, second.enter).start()
    began = time.monotonic()
    assert first.missing(RuntimeError("Connection reset")).ranks == [2]
    assert time.monotonic() - began < 10


def test_where_all_came_the_rank_whose_connections_failed_first_is_named() -> None:
    first, second = rolls(2)
    for roll in (first, second):
        roll.enter()
    assert "all came" in str(second.missing(RuntimeError("Unable to find interface eth7")))
    assert "rank 1" in str(missing := first.missing(RuntimeError("timed out")))
    assert "Unable to find interface eth7" in str(missing)


def test_what_is_no_place_to_meet_is_refused_at_once() -> None:
    place = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "70000"}
    for environment in (place, place | {"MASTER_PORT": "x"}, {"RANK": "0", "WORLD_SIZE": "2"}):
        with pytest.raises(MissingRankError):
            meet(environment)


# What a rank does in the place of a part of `cpsr doctor`; `ends` is that it stays, as with a disk that hangs.
RANK = f"""
import os, sys, time
import torch.distributed as dist
from cpsr.doctor import command, examination, meeting
meeting.WAIT_SECONDS = {SHORT_SECONDS}
how = sys.argv[1]
if os.environ["RANK"] == "1":
    init = dist.init_process_group
    def vanish(*given, **named):
        init(*given, **named)
        os._exit(9)
    def hang():
        time.sleep(1000)
    if how == "vanish":
        dist.init_process_group = vanish
    elif how == "hang":
        examination.find_devices = hang
    elif how == "absent":
        os._exit(9)
elif how == "first ends" and os.environ["RANK"] == "0":
    examination.find_devices = lambda: os._exit(9)
elif how == "prints late":
    def late(*_):
        time.sleep(3)
        print("printed", flush=True)
    command._print = late
from cpsr.cli.main import main
sys.argv = ["cpsr", "doctor"]
main()
"""


def started(how: str, ranks: int) -> list["subprocess.Popen[str]"]:
    with socket.create_server(("127.0.0.1", 0)) as one:
        port = one.getsockname()[1]
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("TORCHELASTIC", "CPSR_"))}
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}

    def of(rank: int) -> Mapping[str, str]:
        return kept | meeting | {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}

    command = [sys.executable, "-c", RANK, how]
    return [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=of(rank))
        for rank in range(ranks)
    ]


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("absent", "rank 1 did not come within 5 s; 1 of 2 came"),
        ("vanish", f"rank 1 ({this_node()}, at the connections between the ranks) did not come any further"),
        pytest.param("hang", f"rank 1 ({this_node()}, at its GPUs) did not come any further", marks=pytest.mark.slow),
    ],
)
def test_rank_0_names_the_rank_that_is_missing_and_goes_on_alone(how: str, says: str) -> None:
    first, second = started(how, 2)
    output, errors = first.communicate(timeout=LIMIT_SECONDS)
    second.kill()
    second.communicate()
    assert first.returncode == 1, errors
    (line,) = [line for line in output.splitlines() if line.startswith("error")]
    assert line.split(maxsplit=2)[1:] == ["ranks", line[line.index("rank 1") :]]
    assert says in line
    assert "host memory" in output
    assert "1 error" in output


def test_the_others_say_that_rank_0_has_ended() -> None:
    first, second = started("first ends", 2)
    _, errors = second.communicate(timeout=LIMIT_SECONDS)
    first.communicate(timeout=LIMIT_SECONDS)
    assert second.returncode == 1
    assert errors.count("cpsr doctor: rank 0 has ended, or its machine is gone") == 1


def test_no_rank_ends_before_the_report_is_printed() -> None:
    """torchrun ends all ranks as soon as one ends with an error."""
    first, second = started("prints late", 2)
    assert first.stdout is not None
    assert first.stdout.readline() == "printed\n"
    assert second.poll() is None
    for process in (first, second):
        _, errors = process.communicate(timeout=LIMIT_SECONDS)
        assert process.returncode == 0, errors
