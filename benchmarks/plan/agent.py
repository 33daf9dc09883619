"""Starts the demo's job under torchrun's own agent, with workers that need not import torch anew at every restart.

torchrun starts programs, whose imports take most of a restart. The agent behind it can also start a function from a
fork server, which has the libraries loaded. It watches, ends and restarts such workers in the same way.
"""

import multiprocessing
import os
import signal
import sys

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from cpsr.demo.job import main as train
from cpsr.demo.main import RANKS

__all__ = ["main"]

MONITOR_SECONDS = 0.1  # how often the agent looks at its workers, as in the demo
PRELOADED = ["torch._dynamo", "deepspeed.runtime.zero.muon.original_muon", "cpsr.demo.job"]


def main() -> None:
    """Run `agent.py RESTARTS JOB-OPTIONS...` to the end of the job, or until SIGTERM."""
    restarts = int(sys.argv.pop(1))  # the workers inherit the rest
    multiprocessing.set_forkserver_preload(PRELOADED)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=RANKS,
        run_id=str(os.getpid()),
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=restarts,
        monitor_interval=MONITOR_SECONDS,
        start_method="forkserver",
    )
    try:
        elastic_launch(config, train)()
    except SignalException as error:
        if error.sigval != signal.SIGTERM:
            raise


if __name__ == "__main__":
    main()
