"""`cpsr run`: start a job with torchrun's arguments, and restart it after failures."""

import logging
import os
import sys
import tempfile
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path

from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous.api import RendezvousError

from cpsr.launch.agent import Failures, agent_that_recovers
from cpsr.launch.ends import HOW_IT_ENDS, JobEndedError
from cpsr.launch.spare import Spare
from cpsr.launch.warm import WarmRanks
from cpsr.ranks.link import LAUNCHER, SHUTDOWN, VERBOSE, Report

__all__ = ["run_job"]

RESTARTS_MAX = 3
UNUSABLE_STATUS = 2  # of a command line
# By whether this machine only waits as a spare.
LEFT = {
    False: "The job left after {}; start it with the same command to go on",
    True: "This spare left after {}; the job goes on without it",
}
UNREACHED = {
    False: "This node cannot join the others ({}): the launcher of another one has ended, or is out of reach",
    True: "This spare does not reach the machine of --rdzv-endpoint ({}), so it can take no place: the job has left, "
    "or that machine is lost; start the spare again when the job runs",
}
# What is set unless the user has set it.
ENVIRONMENT = {
    # The ranks' own store, new for each life: in the agent's, gloo finds the addresses of the dead group.
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    # How long ranks may take to commit after SIGTERM. Whoever stops the launcher has a limit of its own.
    SHUTDOWN: "600",
}
PORT = 29500  # of several nodes that name none, as torchrun's
_RANK_START = Path(__file__).parent / "rank_start"  # whose `sitecustomize` reports the errors of a rank


def run_job(arguments: Sequence[str]) -> int:
    """Run a job to its end.

    Args:
        arguments: as for torchrun.

    Returns:
        The exit status: 0; 1 where the job was given up; 2 where there is no such script; 78 where it refuses its
        configuration; 128 and the number of the signal that ended it.
    """
    parsed = _parser().parse_args(list(arguments))
    if not (parsed.module or parsed.no_python or Path(parsed.training_script).is_file()):
        _report(f"There is no script {parsed.training_script}; name one, or give -m for a module {HOW_IT_ENDS}")
        return UNUSABLE_STATUS
    _restartable(parsed)
    if parsed.spare and (parsed.standalone or parsed.rdzv_backend != "c10d"):
        _report(f"--spare needs --rdzv-endpoint, the address at which all launchers of the job meet {HOW_IT_ENDS}")
        return UNUSABLE_STATUS
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if parsed.nproc_per_node != "1":
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun, which prints six lines about it
    if parsed.verbose:
        os.environ[VERBOSE] = "1"
    else:
        _hush_agent()
    with tempfile.TemporaryDirectory(prefix="cpsr-run-") as directory:
        os.environ[LAUNCHER] = directory
        path = os.environ.get("PYTHONPATH", "")
        os.environ["PYTHONPATH"] = f"{_RANK_START}{os.pathsep}{path}" if path else str(_RANK_START)
        report = Report(Path(directory))
        details = _report if parsed.verbose else (lambda line: None)
        warm = WarmRanks(report, _report, details, is_on=not (parsed.no_warm or parsed.no_python))
        spare = Spare(warm, _report, waits=parsed.spare)
        try:
            with agent_that_recovers(Failures(report, parsed.max_restarts, _report), report, warm, spare):
                torchrun.run(parsed)  # type: ignore[no-untyped-call]
        except JobEndedError as ended:
            _report(str(ended))
            return ended.status
        except SignalException as error:
            _report(LEFT[spare.waits].format(error.sigval.name))
            return 128 + int(error.sigval)
        except RendezvousError as error:
            _report(f"{UNREACHED[spare.waits].format(error)} {HOW_IT_ENDS}")
            return 1
        except ChildFailedError as error:  # ranks that nothing can end, in the kernel
            _report(f"The job failed: {error.get_first_failure()[1].message} {HOW_IT_ENDS}")
            return 1
    return 0


def _parser() -> ArgumentParser:
    parser = torchrun.get_args_parser()
    parser.prog = "cpsr run"
    parser.description = (
        "Starts a training job as torchrun does, with the same arguments, and starts it again after a failure. A "
        "failure counts against --max-restarts only where the job came no further than before. A job that refuses its "
        f"configuration is not started again (exit status 78). Default of --max-restarts: {RESTARTS_MAX}."
    )
    parser.add_argument("--verbose", action="store_true", help="Show the agent's log and details of each recovery.")
    parser.add_argument("--no-warm", action="store_true", help="Let the ranks import everything again at a restart.")
    parser.add_argument(
        "--spare",
        action="store_true",
        help="Wait, with a warm process, until a machine of the job is lost, and take its place (docs/spare.md).",
    )
    # The default port differs among versions of torch: only a port that the user names is one that jobs may share.
    own_defaults = {"max_restarts": RESTARTS_MAX, "master_port": None}
    from_environment = {name for name in own_defaults if f"PET_{name.upper()}" in os.environ}  # torchrun looks there
    parser.set_defaults(**{name: value for name, value in own_defaults.items() if name not in from_environment})
    return parser


def _restartable(parsed: object) -> None:
    """Choose a c10d rendezvous: at the address and port that the user named, else at a free port of this machine.

    A static rendezvous keeps the store of the dead group.
    """
    arguments = vars(parsed)
    nodes_max = torchrun.parse_min_max_nnodes(arguments["nnodes"])[1]
    port, endpoint = arguments["master_port"], arguments["rdzv_endpoint"]
    if arguments["standalone"] or arguments["rdzv_backend"] not in ("static", "c10d"):
        return
    if nodes_max == 1 and port is None and not endpoint:
        arguments["standalone"] = True
    elif arguments["rdzv_backend"] == "static":
        arguments["rdzv_endpoint"] = endpoint or f"{arguments['master_addr']}:{port or PORT}"
        arguments["rdzv_backend"] = "c10d"
        arguments["node_rank"] = 0  # c10d numbers the nodes itself


def _hush_agent() -> None:
    """Silence the agent's report of a failure: it takes twenty lines, ours takes one."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)


def _report(message: str) -> None:
    print(f"[cpsr run] {' '.join(message.split())}", file=sys.stderr, flush=True)  # noqa: T201
