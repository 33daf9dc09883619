"""The ways to come back that are compared: how each is set up, as its own documentation describes."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from cpsr.benchmarks.drill.job import MACHINES, Job

__all__ = ["PEERS", "PLAIN", "Peer", "Place"]

PROGRAMS = Path(__file__).parent / "programs"
BIN = Path(sys.executable).parent
PORT = 29400
LIGHTHOUSE_PORT = 29510  # its default
RESTARTS = 1000  # the drill ends what does not come back


@dataclass(frozen=True)
class Place:
    """Where a launcher is started.

    Attributes:
        machine: its number.
        names: of all machines; the last one is the head node, which trains nothing.
        job: that is trained.
        program: the training script.
    """

    machine: int
    names: list[str]
    job: Job
    program: Path

    @property
    def ranks(self) -> int:
        """On each machine."""
        return self.job.ranks // MACHINES

    @property
    def head(self) -> str:
        """The name of the machine that trains nothing."""
        return self.names[-1]


@dataclass(frozen=True)
class Peer:
    """A way to come back.

    Attributes:
        name: in the table.
        program: the file of its training script.
        launch: the command that starts a machine's launcher.
        settings: what was chosen, in words.
        source: the page that describes the setup.
        package: the distribution whose version is recorded; None: torch's own.
        modules: that must be importable, beside our own dependencies.
        plugins: whether its package has plugins of torch's launcher, which then imports them.
        chooses: whether the script says how often to save; the drill then uses Young's interval.
        jobs: shardings that it was set up for.
        absent: by sharding that it was not set up for, the reason.
        environment: variables of its launchers.
        server: the command of a server on the head node.
    """

    name: str
    program: str
    launch: Callable[[Place], list[str]]
    settings: str
    source: str
    package: str | None = None
    modules: tuple[str, ...] = ()
    plugins: bool = False
    chooses: bool = True
    jobs: tuple[str, ...] = ("ddp", "fsdp2")
    absent: Mapping[str, str] = field(default_factory=dict)
    environment: Callable[[Place], dict[str, str]] = lambda place: {}
    server: Callable[[Place], list[str]] | None = None

    @property
    def installed(self) -> bool:
        """Whether it can be run here."""
        return all(find_spec(module) is not None for module in self.modules)

    @property
    def version(self) -> str:
        """Of its package."""
        return version(self.package or "torch")

    def place(self, machine: int, names: list[str], job: Job) -> Place:
        """Where its launcher is started."""
        return Place(machine, names, job, PROGRAMS / self.program)


# As a module: the script may belong to another environment, over which this one lies.
TORCHRUN = ("python", "-m", "torch.distributed.run")


def torchrun(place: Place, *options: str, launcher: tuple[str, ...] = TORCHRUN) -> list[str]:
    """A launcher that meets the other machine's at machine 0."""
    return [
        str(BIN / launcher[0]),
        *launcher[1:],
        f"--nnodes={MACHINES}",
        f"--nproc-per-node={place.ranks}",
        f"--max-restarts={RESTARTS}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={place.names[0]}:{PORT}",
        "--rdzv-id=drill",
        *options,
        str(place.program),
        str(place.job.directory),
    ]


PLAIN = Peer("no checkpoints", "plain.py", torchrun, "", "", chooses=False)

# Its sockets are files in this folder, which machines have each for themselves: there is one agent on each.
OWN_SOCKETS = """
mkdir -p /tmp/ckpt_sock && { mountpoint -q /tmp/ckpt_sock || mount -t tmpfs tmpfs /tmp/ckpt_sock; } && exec "$@"
"""


def dlrover_run(place: Place) -> list[str]:
    """DLRover's launcher, which meets the others at its master."""
    launcher = ("python", "-m", "dlrover.trainer.torch.elastic_run")
    return ["sh", "-c", OWN_SOCKETS, "sh", *torchrun(place, "--save-at-breakpoint", launcher=launcher)]


def dlrover_master(place: Place) -> list[str]:
    """DLRover's master, for a job outside of Kubernetes."""
    master = [sys.executable, "-m", "dlrover.python.master.main", "--platform=local", "--job_name=drill"]
    return [*master, f"--node_num={MACHINES}", f"--port={PORT}"]


def dlrover_environment(place: Place) -> dict[str, str]:
    """Where the master is, and which machine this is."""
    return {
        "DLROVER_MASTER_ADDR": f"{place.head}:{PORT}",
        "NODE_RANK": str(place.machine),
        "NODE_ID": str(place.machine),
        "NODE_NUM": str(MACHINES),
        "ELASTIC_JOB_NAME": "drill",
    }


_TORCH = "https://docs.pytorch.org"
_LM_RESILIENCY = "https://github.com/LMResiliency/lm-resiliency/blob/f591cb1c28d86437665d332c900eb313162e2d3f"
_DLROVER = "https://github.com/intelligent-machine-learning/dlrover/blob/75644f4629bd9ab86ac1b5711b4d21117551dce4"
PEERS = (
    Peer(
        "CPSR",
        "with_cpsr.py",
        lambda place: torchrun(place, "--no-warm", launcher=("cpsr", "run")),
        "the defaults; mtbf_hours and heartbeat_timeout_seconds are the drill's; new processes after a failure",
        "docs/launching.md",
        package="cpsr",
        chooses=False,
        jobs=("ddp",),
        absent={"fsdp2": "it differs from warm ranks by the imports alone, as with DDP"},
    ),
    Peer(
        "CPSR, warm ranks",
        "with_cpsr.py",
        lambda place: torchrun(place, launcher=("cpsr", "run")),
        "the defaults; mtbf_hours and heartbeat_timeout_seconds are the drill's",
        "docs/launching.md",
        package="cpsr",
        chooses=False,
    ),
    Peer(
        "torch.save",
        "torch_save.py",
        torchrun,
        "torchrun; rank 0 (DDP) or each rank (FSDP2) writes a file and renames it",
        f"{_TORCH}/tutorials/beginner/ddp_series_fault_tolerance.html",
    ),
    Peer(
        "DCP async_save",
        "dcp.py",
        torchrun,
        "torchrun; a save waits for the one before",
        f"{_TORCH}/tutorials/recipes/distributed_async_checkpoint_recipe.html",
    ),
    Peer(
        "torchft",
        "with_torchft.py",
        lambda place: torchrun(place, "--nnodes=1", f"--rdzv-endpoint={place.names[place.machine]}:{PORT}"),
        "each machine is a replica with its own torchrun, whose timer ends a hung rank; heartbeats: 1 s; gloo: 5 s; "
        "init_sync=False; PGTransport; the first replica also writes files; DDP's hook is mended (pull request 294)",
        "https://github.com/meta-pytorch/torchft/blob/7eb7087885f7ffaf51148a9df3289d73b8709fbd/README.md",
        package="torchft",
        modules=("torchft",),
        environment=lambda place: {
            "TORCHFT_LIGHTHOUSE": f"http://{place.head}:{LIGHTHOUSE_PORT}",
            "REPLICA_GROUP_ID": str(place.machine),
            "NUM_REPLICA_GROUPS": str(MACHINES),
            "TORCHELASTIC_ENABLE_FILE_TIMER": "1",
        },
        server=lambda place: [
            str(BIN / "torchft_lighthouse"),
            *("--min_replicas", "1", "--quorum_tick_ms", "100", "--join_timeout_ms", "10000"),
            *("--heartbeat_timeout_ms", "1000"),  # ten heartbeats; its default of 5000 is waited for at each loss
        ],
    ),
    Peer(
        "lm-resiliency",
        "with_lm_resiliency.py",
        torchrun,
        "torchrun; GEMINI: a copy in the memory of a rank on the other machine, and, each time, files on the disk that "
        "all machines share, where a rank also finds the copy its peer wrote as it left; torch.save every tenth time. "
        "Without SCOUT, which replays layers on CUDA devices alone, and without the rendezvous backend of 0.2.0, which "
        "PyTorch 2.13 does not register",
        f"{_LM_RESILIENCY}/docs/api.md",
        package="lm-resiliency",
        modules=("lm_resiliency",),
        plugins=True,
    ),
    Peer(
        "DLRover flash checkpoint",
        "with_dlrover.py",
        dlrover_run,
        "dlrover-run --save-at-breakpoint, with a master on the head node; DdpCheckpointer: to shared memory, and "
        "every fourth time to storage. Without copies at other nodes: 0.6.1 fetches them and loads empty memory",
        f"{_DLROVER}/docs/blogs/flash_checkpoint.md",
        package="dlrover",
        modules=("dlrover", "grpc", "kubernetes"),
        jobs=("ddp",),
        absent={
            "fsdp2": "its checkpointers for FSDP call FSDP1's optim_state_dict, which refuses FSDP2's modules "
            "(dlrover/trainer/torch/flash_checkpoint/fsdp.py, lines 101 and 245 of 0.6.1)"
        },
        environment=dlrover_environment,
        server=dlrover_master,
    ),
)
