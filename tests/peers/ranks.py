"""A script run as several gloo ranks, each of which believes to be on a node of its own choice."""

import atexit
import functools
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# One process imports, and forks the ranks before it has any thread: imports take longer than everything else here.
# A rank that stops itself stays so until the others have ended.
LAUNCHER = """
import gc, json, logging, os, signal, sys, time
from pathlib import Path
import torch, torch.distributed as dist
from cpsr.checkpoint.arena import Arena
from cpsr.checkpoint.memory_owners import remove_unused
from cpsr.checkpoint.memory_states import describe
from cpsr.checkpoint.memory_states import OpenState, load_states, verify_memory_state
from cpsr.checkpoint.store import CheckpointStore
from cpsr.checkpoint.tiers import Entry, decide
from cpsr.checkpoint import arena as arena_module
from cpsr.peers.peer import Peer, answer
from cpsr.peers.transport import Channel
from cpsr.errors import CheckpointError
from cpsr.ranks.group import NODE_VARIABLE, Group, this_node
from cpsr.ranks.group import SideGroup, group_name
from cpsr.peers.fetch import fetch
from cpsr.peers.replicator import Replicator
from tests.peers.states import RUN_ID, States, is_right
def follow(root, script, nodes):
    ranks, stopped, statuses = {}, set(), {}
    for rank, node in enumerate(nodes):
        pid = os.fork()
        if pid == 0:
            os.environ |= {"RANK": str(rank), NODE_VARIABLE: node}
            exec(compile(script, "rank", "exec"), globals() | {"root": root, "rank": rank})
            sys.exit(0)
        ranks[pid] = rank
    while len(statuses) + len(stopped) < len(ranks):
        pid, status = os.waitpid(-1, os.WUNTRACED)
        if os.WIFSTOPPED(status):
            stopped.add(pid)
        else:
            statuses[ranks[pid]] = os.waitstatus_to_exitcode(status)
    for pid in stopped:
        os.kill(pid, signal.SIGKILL)
        statuses[ranks[pid]] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return [statuses[rank] for rank in sorted(statuses)]
gc.freeze()  # no rank looks through, and so copies, what was imported
for line in sys.stdin:
    job = json.loads(line)
    os.environ |= {"WORLD_SIZE": str(len(job["nodes"])), "MASTER_PORT": job["port"]}
    print(json.dumps(follow(Path(job["root"]), job["script"], job["nodes"])), flush=True)
"""

# What every script begins with: the group, a directory for its node's memory, and what is reported.
PROLOGUE = """
dist.init_process_group("gloo")
group = Group()
found, events = {}, []
arena_module.PIECE_BYTES = 8192
memory = root / this_node()
memory.mkdir(exist_ok=True)
def report(kind, message, iteration, level):
    events.append([kind, message, iteration, level])
def opened(states, groups=None, replicas=2, window_bytes=0, bytes_to_come=0, **settings):
    groups = groups or [range(group.size)] * group.size
    beside = {"alike": True, **settings}
    beside |= {"window_bytes": window_bytes, "bytes_to_come": bytes_to_come}
    return Replicator(states.memory, group, groups[rank], states.template, replicas, report, **beside)
def sending(replicator):
    return any(link.busy for link in replicator.outgoing)
def slow_down(bytes_per_second):
    send = Channel.send
    def slowly(channel, message):
        time.sleep(len(message.data) / bytes_per_second)
        send(channel, message)
    Channel.send = slowly
def replicated(owner, node=None):
    '''Iterations of an owner's replicas at a node that are whole.'''
    states = Arena(RUN_ID, root / (node or this_node())).list()
    replicas = [state for state in states if state.rank == owner and "replica" in state.path.name]
    return [replica.iteration for replica in replicas if verify_memory_state(replica) is None]
def until(condition, seconds=20):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, (rank, events)
        time.sleep(0.03)
def meet(ranks):
    '''Wait for these ranks, whatever has become of the others.'''
    (root / f"met.{rank}").touch()
    until(lambda: all((root / f"met.{other}").exists() for other in ranks))
def leave(hard=False):
    found["events"] = events
    (root / f"found.{rank}").write_text(json.dumps(found))
    if not hard:  # else somebody is dead, and leaving the group would wait for it
        group.close()
        dist.destroy_process_group()
"""


@functools.cache
def _launcher() -> subprocess.Popen[str]:
    env = {**os.environ, "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
    env["PYTHONPATH"] = os.pathsep.join(["", *sys.path])
    command = [sys.executable, "-c", LAUNCHER]
    pipe = subprocess.PIPE
    launcher = subprocess.Popen(command, env=env, stdin=pipe, stdout=pipe, text=True, start_new_session=True)
    atexit.register(os.killpg, launcher.pid, signal.SIGKILL)
    return launcher


def run(script: str, directory: Path, nodes: Sequence[str], statuses: Sequence[int] | None = None) -> list[Any]:
    """What each rank found, None of one that left nothing.

    Args:
        script: what each rank does after `PROLOGUE`.
        directory: for what is found, and for the nodes' memories.
        nodes: one rank for each of these names.
        statuses: with which the ranks must end, by default all well.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    launcher = _launcher()
    assert launcher.stdin is not None
    assert launcher.stdout is not None
    job = {"root": str(directory), "script": PROLOGUE + script, "nodes": list(nodes), "port": port}
    launcher.stdin.write(json.dumps(job) + "\n")
    launcher.stdin.flush()
    assert json.loads(launcher.stdout.readline()) == list(statuses or [0] * len(nodes))
    paths = [directory / f"found.{rank}" for rank in range(len(nodes))]
    return [json.loads(path.read_text()) if path.exists() else None for path in paths]
