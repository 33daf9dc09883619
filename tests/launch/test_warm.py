"""Warm ranks of real jobs: forks of a process with the imports of the ranks before, and no rank can tell."""

import json
import os
import re
import signal
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.launch.jobs import SCRIPT, Launched, has_printed, has_reached, iterations

READY = "Restarts fork their ranks from process"
# A rank notes all that it can see of its start. The first start trains until it is killed, a later one ends at once.
NOTES = '''
"""A script with a docstring."""
import gc, os, sys
first = {
    "main": sorted(vars()), "name": __name__, "file": __file__, "package": __package__, "doc": __doc__,
    "spec": None if __spec__ is None else [__spec__.name, __spec__.origin], "annotations": "__annotations__" in vars(),
    "argv": sys.argv, "orig_argv": sys.orig_argv, "path": sys.path, "flags": str(sys.flags), "xoptions": sys._xoptions,
    "executable": [sys.executable, sys.prefix, sys.base_prefix, sys.pycache_prefix, sys.dont_write_bytecode],
    "environ": dict(os.environ),
    "collector": [gc.isenabled(), gc.get_threshold(), gc.get_freeze_count(), gc.get_debug()],
    "users": [name for name in ("helper", "beside") if name in sys.modules],
    "hooks": [repr(type(one)) for one in sys.meta_path] + [one.__name__ for one in sys.path_hooks],
    "interpreter": [sys.getrecursionlimit(), sys.getswitchinterval(), sys.gettrace(), sys.getprofile()],
    "excepthook": [sys.excepthook.__module__, sys.unraisablehook.__module__, sys.displayhook.__module__],
    "streams": [
        [s.name, s.mode, s.encoding, s.errors, s.line_buffering, s.write_through, s.isatty(), s.fileno(), s.closed]
        for s in (sys.stdin, sys.stdout, sys.stderr)
    ],
    "same streams": [sys.stdin is sys.__stdin__, sys.stdout is sys.__stdout__, sys.stderr is sys.__stderr__],
}
import json, locale, logging, multiprocessing, random, resource, signal, threading, time, warnings
from pathlib import Path
import numpy as np
import sklearn.cluster, sympy, threadpoolctl, torch
import torch.distributed as dist
from cpsr import CPSRRecovery, TorchAdapter
from cpsr.checkpoint.files import temporary_name
import helper

own = Path("/proc/self")
status = dict(line.split(":", 1) for line in (own / "status").read_text().splitlines())
umask = os.umask(0); os.umask(umask)
target = lambda path: os.readlink(path) if os.path.lexists(path) else "closed"
descriptors = {d: target(own / "fd" / d) for d in sorted(os.listdir(own / "fd"))}
here = {
    **first,
    "process": [os.getpgid(0) == os.getpid(), os.getsid(0) == os.getpid(), os.getcwd(), umask, os.nice(0)],
    "status": {name: status[name].split()
               for name in ("SigIgn", "SigBlk", "SigCgt", "Cpus_allowed", "NoNewPrivs", "Threads")},
    "limits": (own / "limits").read_text(), "cgroup": (own / "cgroup").read_text(),
    "oom": (own / "oom_score_adj").read_text(), "autogroup": (own / "autogroup").read_text().split("nice")[-1],
    "cmdline": (own / "cmdline").read_bytes().decode(), "comm": (own / "comm").read_text(),
    "descriptors": {d: re_ for d, re_ in descriptors.items() if not re_.startswith(("pipe", "socket", "closed"))},
    "handlers": {s: getattr(h := signal.getsignal(s), "__name__", str(h)) for s in sorted(signal.valid_signals())},
    "timers": [signal.getitimer(timer) for timer in (0, 1, 2)],
    "thread": [threading.current_thread().name, threading.current_thread() is threading.main_thread(),
               threading.main_thread().ident == threading.get_ident(), threading.get_native_id() == os.getpid(),
               threading.active_count(), threading.stack_size()],
    "processes": [multiprocessing.get_start_method(True), multiprocessing.current_process().name,
                  multiprocessing.parent_process(), len(multiprocessing.active_children())],
    "threads": [torch.get_num_threads(), torch.get_num_interop_threads()],
    "pools": sorted([p["prefix"], p["filepath"], p["num_threads"]] for p in threadpoolctl.threadpool_info()),
    "torch": [str(torch.get_default_dtype()), torch.is_grad_enabled()],
    "warnings": [[a, str(m), c.__name__, str(d), n] for a, m, c, d, n in warnings.filters],
    "logging": {n: [str(h) for h in getattr(l, "handlers", [])] + [getattr(l, "level", 0)]
                for n, l in [("root", logging.root), *logging.root.manager.loggerDict.items()]},
    "locale": [locale.setlocale(locale.LC_ALL), time.tzname, str(np.get_printoptions()), str(np.geterr())],
    "numbers": [torch.ones(4).sum().item(), float(np.ones((64, 64)) @ np.ones(64) @ np.ones(64)), helper.VALUE],
    "modules": sorted(sys.modules),
}
there = {"file": temporary_name(Path("x")).name.partition("-")[2], "random": random.random(),
         "numpy": np.random.rand(), "torch": torch.rand(1, dtype=torch.float64).item(),
         "torch seed": torch.initial_seed(), "sympy": sympy.core.random.rng.random(),
         "authkey": multiprocessing.current_process().authkey.hex(),
         "seed": str(np.random.get_bit_generator().seed_seq.entropy),
         "parent": os.getppid(), "pid": os.getpid(), "warm": "CPSR_WARM" in (own / "environ").read_text()}
rank, start = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
Path(f"notes-{start}-{rank}").write_text(json.dumps([here, there]))
print("noted", rank, start, flush=True)
if int(start):
    sys.exit(0)
dist.init_process_group("gloo")
module = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
loader = torch.utils.data.DataLoader(torch.zeros(40000, 4), batch_size=4)
config = {"run_dir": "run", "mode": "exact", "checkpoint": {"interval_iterations": 5}, "service": {"enabled": False}}
with CPSRRecovery(TorchAdapter(module, optimizer), config) as recovery:
    for batch in recovery.resume(loader):
        optimizer.zero_grad(); module(batch).sum().backward(); optimizer.step(); time.sleep(0.05)
'''
# What each start sets anew.
OF_A_START = ("MASTER_PORT", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_ERROR_FILE")


def is_ready(launched: Launched) -> bool:
    """Whether the next restart forks."""
    assert "import everything again" not in launched.output, launched.lines()
    return has_printed(launched, READY, 1)


def noted(folder: Path, start: int, rank: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a rank has noted of its start: what is equal in all starts, and what differs."""
    here, there = json.loads((folder / f"notes-{start}-{rank}").read_text())
    for name in OF_A_START:
        here["environ"].pop(name)
    here["descriptors"] = {d: re.sub(r"attempt_\d", "attempt", file) for d, file in here["descriptors"].items()}
    return here, there


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("options", "script", "threads"),
    [
        ([], ["train.py", "a", "b"], "1"),
        (["--log-dir=logs", "--redirects=1", "--tee=0:2"], ["-m", "folder.train", "c"], "2"),
    ],
)
def test_a_rank_cannot_tell_a_fork_from_a_fresh_start(
    tmp_path: Path, options: Sequence[str], script: Sequence[str], threads: str
) -> None:
    for file in (tmp_path / "train.py", tmp_path / "folder" / "train.py"):
        file.parent.mkdir(exist_ok=True)
        file.write_text(NOTES.lstrip())
    (tmp_path / "helper.py").write_text("VALUE = 7\n")
    (tmp_path / "sitecustomize.py").write_text("import os\nos.environ['CUSTOMIZED'] = os.environ.get('RANK', '')\n")
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    command = ["cpsr", "run", "--verbose", "--nproc-per-node=2", *options, *script]
    with Launched(tmp_path, command, {"OMP_NUM_THREADS": threads, "PYTHONPATH": path}) as launched:
        launched.until(is_ready)
        os.kill(launched.pids()[1], signal.SIGKILL)
        assert launched.wait() == 0, launched.output
        launcher = launched.process.pid
    for rank in range(2):
        (fresh, _), (warm, of_warm) = noted(tmp_path, 0, rank), noted(tmp_path, 1, rank)
        for name in ("environ", "logging"):  # where imports leave something from the start
            warm[name] = {key: value for key, value in warm[name].items() if key in fresh[name]}
        assert set(fresh.pop("modules")) <= set(warm.pop("modules"))  # the first start imported more later
        assert [(name, value, warm[name]) for name, value in fresh.items() if warm[name] != value] == []
        assert of_warm["parent"] == launcher
    noted_there = [noted(tmp_path, start, rank)[1] for start in range(2) for rank in range(2)]
    assert [one.pop("warm") for one in noted_there] == [False, False, True, True], launched.output
    for name in ("file", "random", "numpy", "sympy", "torch", "torch seed", "authkey", "seed", "pid"):
        assert len({one[name] for one in noted_there}) == 4, name


def is_fork(pid: int) -> bool:
    """Whether a rank is a fork of the warm process."""
    return b"CPSR_WARM=" in Path(f"/proc/{pid}/environ").read_bytes()


@pytest.mark.timeout(300)
def test_forks_come_back_after_the_end_of_one_rank_and_of_all_and_end_with_the_launcher(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT.replace("randn(4000, 4)", "randn(40000, 4)"))
    command = ["cpsr", "run", "--verbose", "--nproc-per-node=2", "train.py", "run", "100000", "0.05"]
    with Launched(tmp_path, command) as launched:
        launched.until(is_ready)
        process = psutil.Process(int(launched.output.partition(READY)[2].split()[0].rstrip(",")))
        for kill, ranks in enumerate((slice(1, 2), slice(None))):
            trained = iterations(launched)[-1]
            killed = launched.pids()
            for pid in killed[ranks]:
                os.kill(pid, signal.SIGKILL)
            launched.until(partial(has_printed, text="All ranks continue at iteration", times=kill + 1))
            launched.until(partial(has_reached, iteration=trained + 20))
            assert [is_fork(pid) for pid in launched.pids()] == [True, True]
            assert not {*killed} & {*launched.pids()}
        assert "\n".join(launched.lines()).count("exact from") == 2
        assert process.is_running()
        launched.process.kill()
        launched.wait()
        process.wait(30)


@pytest.mark.timeout(300)
def test_no_warm_process_where_it_is_not_wanted(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    command = ["cpsr", "run", "--verbose", "--no-warm", "--nproc-per-node=1", "train.py", "run", "60", "0.02"]
    with Launched(tmp_path, command) as launched:
        launched.until(partial(has_reached, iteration=20))
        assert launched.children() == launched.pids()
        os.kill(launched.pids()[0], signal.SIGKILL)
        assert launched.wait() == 0
    assert READY not in launched.output
