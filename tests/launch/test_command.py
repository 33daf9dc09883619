"""`cpsr run` with real processes: what it starts again, what it does not, and what it says."""

import os
import re
import signal
from functools import partial
from pathlib import Path

import psutil
import pytest

from cpsr.launch.agent import HOW_IT_ENDS
from tests.launch.jobs import SCRIPT, Launched, has_printed, has_reached, iterations
from tests.rank_processes import free_port

REFUSED = """
import sys
from cpsr import CPSRConfig
with open("starts", "a") as starts:
    starts.write("started ")
CPSRConfig.load({"run_dir": "run", "checkpoints": {}})
"""
EXITS = """
import json, sys
with open("starts", "a") as starts:
    starts.write(json.dumps(sys.argv[1:]))
sys.exit(3)
"""
# One rank of two dies before the other one has met it; both meet in the next start, where one has an error of its own.
FAILS = """
import os, signal, sys, torch.distributed as dist
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "1":
    os.kill(os.getpid(), signal.SIGKILL)
dist.init_process_group("gloo")
own = [path for path in sys.path if "rank_start" in path]
print(f"path {os.environ.get('PYTHONPATH')} {own}")  # in one write: the other rank writes, too
import no_such_module
"""
# Another process takes the port that torchrun has chosen for the ranks, before rank 0 opens it.
PORT_TAKEN = """
import os, socket, torch.distributed as dist
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    taken = socket.create_server(("", int(os.environ["MASTER_PORT"])))
dist.init_process_group("gloo")
print("met")
"""
# The state of iteration 10 is saved, and no start comes further.
FAILS_LATER = SCRIPT.replace(
    "        time.sleep",
    "        if recovery.iteration == 11:\n            raise KeyError('labels')\n        time.sleep",
)


def test_a_refused_configuration_is_shown_once_and_not_started_again(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(REFUSED)
    with Launched(tmp_path, ["cpsr", "run", "--nproc-per-node=2", "train.py"]) as launched:
        assert launched.wait() == 78
        refusals = [line for line in launched.output.splitlines() if "checkpoints" in line]
    assert len(refusals) == 1
    assert refusals[0].startswith("[cpsr run] ConfigError: ")
    assert "Traceback" not in launched.output
    assert len((tmp_path / "starts").read_text().split()) <= 2


def test_a_start_whose_port_another_process_has_taken_is_repeated_at_another_port(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PORT_TAKEN)
    with Launched(tmp_path, ["cpsr", "run", "--nproc-per-node=1", "train.py"]) as launched:
        assert launched.wait() == 0, launched.output
        assert "EADDRINUSE" in launched.output
        assert launched.output.count("Traceback") == launched.ports_lost == 1
        assert [line.partition(" ")[0] for line in launched.lines()] == ["Started"]
        assert launched.output.endswith("met\n")


def test_a_script_that_is_not_there_is_not_tried(tmp_path: Path) -> None:
    with Launched(tmp_path, ["cpsr", "run", "--nproc-per-node=2", "nowhere.py"]) as launched:
        assert launched.wait() == 2
        assert launched.lines() == [f"There is no script nowhere.py; name one, or give -m for a module {HOW_IT_ENDS}"]


def test_a_script_that_exits_before_it_trains_is_not_started_again_and_gets_its_arguments(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(EXITS)
    command = ["cpsr", "run", "--nproc-per-node", "1", "train.py", "--verbose", "--help"]
    with Launched(tmp_path, command) as launched:
        assert launched.wait() == 1
        lines = [line for line in launched.lines() if not line.startswith("Started")]
    assert lines == [
        "Rank 0 ended with status 3 before a run was opened. The job is not started again: the error is the script's, "
        f"and would come again {HOW_IT_ENDS}",
    ]
    assert (tmp_path / "starts").read_text() == '["--verbose", "--help"]'


def test_what_the_environments_own_sitecustomize_keeps_lives_on(tmp_path: Path) -> None:
    kept = "import os, tempfile\nkept = tempfile.TemporaryDirectory()\nos.environ['KEPT'] = kept.name\n"
    (tmp_path / "sitecustomize.py").write_text(kept)
    (tmp_path / "train.py").write_text("import os\nos.rmdir(os.environ['KEPT'])\nexit(7)\n")
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    with Launched(tmp_path, ["cpsr", "run", "--nproc-per-node=1", "train.py"], {"PYTHONPATH": path}) as launched:
        assert launched.wait() == 1
        assert "Rank 0 ended with status 7" in launched.output, launched.output


def test_a_killed_rank_is_started_again_and_an_error_before_the_run_is_final(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(FAILS)
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    command = ["cpsr", "run", "--nproc-per-node=2", "train.py"]
    with Launched(tmp_path, command, {"PYTHONPATH": path}) as launched:
        assert launched.wait() == 1
        lines = [line for line in launched.lines() if not line.startswith("Started")]
    assert lines[0].startswith("Rank 1 was killed (SIGKILL) before a run was opened. All ranks start again in 1 s")
    assert re.fullmatch(
        r"Rank [01] failed \(ModuleNotFoundError: No module named 'no_such_module'\) before a run was opened. The job "
        rf"is not started again: the error is the script's, and would come again {re.escape(HOW_IT_ENDS)}",
        lines[1],
    )
    assert len(lines) == 2
    assert launched.output.count("Traceback") == 1 + launched.ports_lost
    assert f"path {path} []" in launched.output  # as the user set it


def test_an_error_that_comes_twice_at_one_iteration_is_shown_once_and_ends_the_job(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(FAILS_LATER)
    with Launched(tmp_path, ["cpsr", "run", "--nproc-per-node=1", "train.py", "run", "20", "0"]) as launched:
        assert launched.wait() == 1
        lines = launched.lines()
    assert sum(line.startswith("Started") for line in lines) == 2
    assert "failed (KeyError: 'labels') after iteration 11. The job is not started again: the same error" in lines[-1]
    assert launched.output.count("Traceback") == 1


def test_jobs_of_one_machine_meet_at_ports_of_their_own(tmp_path: Path) -> None:
    script = "import os, time; print('port', os.environ['MASTER_PORT'], os.environ['RANK'], flush=True); time.sleep(60)"
    (tmp_path / "train.py").write_text(script)
    command = ["cpsr", "run", "--nproc-per-node=2", "train.py"]
    with Launched(tmp_path, command) as first, Launched(tmp_path, command) as second:
        jobs = (first, second)
        for job in jobs:
            job.until(lambda job: job.output.count("port ") == 2)
            job.process.send_signal(signal.SIGTERM)
        ports = [set(re.findall(r"port (\d+)", job.output)) for job in jobs]
        [job.wait() for job in jobs]
    assert [len(found) for found in ports] == [1, 1]
    assert ports[0] != ports[1]
    assert "29500" not in ports[0] | ports[1]


def test_sigterm_commits_on_all_ranks_and_the_same_command_goes_on(tmp_path: Path) -> None:
    """To the launcher alone; where every process gets it, see below."""
    (tmp_path / "train.py").write_text(SCRIPT)
    command = ["cpsr", "run", "--nproc-per-node=2", "train.py", "run"]
    with Launched(tmp_path, [*command, "100000", "0.02"]) as launched:
        launched.until(partial(has_reached, iteration=12))
        launched.process.send_signal(signal.SIGTERM)
        launched.process.send_signal(signal.SIGTERM)  # a second one while the ranks commit
        assert launched.wait() == 143
        left = re.findall(r"leaving at iteration (\d+) after SIGTERM: its state is committed", launched.output)
        assert len(left) == 1
        assert "left after SIGTERM; start it with the same command to go on" in launched.lines()[-1]
    iteration = int(left[0])
    with Launched(tmp_path, [*command, str(iteration + 5), "0"]) as again:
        assert again.wait() == 0
        assert f"All ranks continue at iteration {iteration}, exact from" in again.output
        assert iterations(again)[:2] == [iteration + 1, iteration + 2]


# A command that watches a job, as `cpsr demo` does.
WATCH = """
import signal, time
from pathlib import Path
from cpsr.launch.process import launched

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it
with launched(["--nproc-per-node=1", "train.py"], Path("log"), {}):
    time.sleep(60)
"""


def test_no_process_of_a_job_outlives_the_command_that_watches_it(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import time; print('training', flush=True); time.sleep(60)")
    (tmp_path / "watch.py").write_text(WATCH)
    with Launched(tmp_path, ["python", "watch.py"]) as watching:
        watching.until(lambda _: (tmp_path / "log").exists() and "training" in (tmp_path / "log").read_text())
        family = psutil.Process(watching.process.pid).children(recursive=True)
        watching.process.send_signal(signal.SIGHUP)
        watching.process.send_signal(signal.SIGTERM)  # another one while the job ends
        assert watching.wait() == 128 + signal.SIGHUP
    assert len(family) >= 2
    assert [one for one in family if one.is_running() and one.status() != "zombie"] == []


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("launcher", ["cpsr run", "cpsr run --no-warm", "torchrun --max-restarts=5"])
def test_five_kills_are_recovered_from(tmp_path: Path, launcher: str) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [*launcher.split(), "--nproc-per-node=2", "train.py", "run", "120", "0.05"]
    # As README's line for torchrun has it; `cpsr run` sets it by itself.
    variables = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} if launcher.startswith("torchrun") else {}
    with Launched(tmp_path, command, variables) as launched:
        for kill in range(5):
            launched.until(partial(has_reached, iteration=10 * (kill + 1)))
            back = launched.output.count("All ranks continue")
            ranks = launched.pids() or launched.children()  # torchrun names none
            os.kill(ranks[-1], signal.SIGKILL)
            launched.until(partial(has_printed, text="All ranks continue", times=back + 1))
        assert launched.wait() == 0
    assert iterations(launched)[-1] == 120
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE" not in launched.output


@pytest.mark.slow
def test_torchrun_without_it_is_warned_of(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    command = ["torchrun", "--nproc-per-node=2", "--max-restarts=1", "train.py", "run", "3", "0"]
    with Launched(tmp_path, command) as launched:
        assert launched.wait() == 0
    assert launched.output.count("TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1") == 1
    assert "cpsr run" in launched.output


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_nodes_with_torchruns_static_arguments_come_back(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    shared = ["--nnodes=2", "--nproc-per-node=1", "--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    script = ["train.py", "run", "60", "0.05"]
    nodes = [Launched(tmp_path, ["cpsr", "run", *shared, f"--node-rank={node}", *script]) for node in range(2)]
    with nodes[0], nodes[1]:
        nodes[0].until(lambda _: any(has_reached(node, 15) for node in nodes))
        os.kill(nodes[1].pids()[0], signal.SIGKILL)
        assert [node.wait() for node in nodes] == [0, 0]
    recovered = [line for node in nodes for line in node.lines() if "continue at iteration" in line]
    assert len(recovered) == 1
    assert "was killed (SIGKILL) after iteration" in recovered[0]
    assert max(iterations(nodes[0]) + iterations(nodes[1])) == 60


# A rank whose commit takes longer than the 30 s that torch leaves it.
LONG_COMMIT = """
import pathlib, signal, sys, time
def leave(*_):
    time.sleep(34)
    pathlib.Path("committed").touch()
    sys.exit(143)
if not pathlib.Path("began").exists():
    signal.signal(signal.SIGTERM, leave)
    pathlib.Path("began").touch()
    time.sleep(600)
"""


@pytest.mark.slow
def test_ranks_have_ten_minutes_to_commit_also_where_a_machine_joins(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(LONG_COMMIT)
    command = ["cpsr", "run", "--nnodes=1:2", "--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-id=join"]
    command += [f"--rdzv-endpoint=localhost:{free_port()}", "--rdzv-conf=last_call_timeout=1", "train.py"]
    with Launched(tmp_path, command) as first:
        first.until(lambda _: (tmp_path / "began").exists())
        with Launched(tmp_path, command) as second:
            assert [first.wait(), second.wait()] == [0, 0], first.output
    assert (tmp_path / "committed").exists(), first.output
