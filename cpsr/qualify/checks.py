"""The checks, the cells that they run with, and their order."""

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import IterableDataset

from cpsr.journal import JournalReader
from cpsr.qualify.cells import EMA, LOADER, TORCHDATA, Cell, cells_of, lacking
from cpsr.qualify.conformance import Job, assert_bitwise, check_early_state, check_resume, seed
from cpsr.qualify.kills import check_dump, check_exact, check_prediction
from cpsr.qualify.scene import Scene
from cpsr.qualify.torch_jobs import token_batch
from cpsr.ranks.group import Ballot, Group, SideGroup, pair_groups
from cpsr.recovery import CPSRRecovery

__all__ = ["CHECKS", "Check", "Trial", "check_restart", "trials_of"]

DEADLINE_SECONDS = 300.0  # for what takes seconds; a first use of an operator may compile it
MICRO_BATCHES = 2  # of a restart: where parameters are split, gradients are summed over the ranks at the last
ENDS = (2, 5, 8)  # iterations at which the lives of a loop end
BATCHES = 3  # of a pass of that loop
ROUNDS, ELEMENTS = 20, 1 << 18  # of side groups
NEIGHBOUR_SECONDS = 60.0  # for what takes milliseconds
SPEED_WIDTH, SPEED_LAYERS, SPEED_ITEMS = 768, 4, 64  # 2.4 million parameters
SPEED_INTERVAL = 20  # iterations, of which one begins a checkpoint
TURNS = 7  # the first is not counted

# A sharded, a replicated and a partitioned state; on CUDA also the two fused implementations of AdamW.
ALONE = "torch fp32 adamw"  # the only rank
DDP = "ddp fp32 adamw"
SPLIT = ("fsdp2 bf16 adamw", "tp fp32 adamw")
OF_DEEPSPEED = ("deepspeed zero1 bf16 adamw", "deepspeed zero3 fp32 adamw")
RETURNING = (ALONE, DDP, *SPLIT, *OF_DEEPSPEED)
OFFLOADED = "deepspeed zero2 bf16 json offload_optimizer"
ON_CUDA = ("ddp fp32 adamw-fused", "deepspeed zero1 bf16 fused")


@dataclass(frozen=True)
class Check:
    """One column of the table.

    Attributes:
        name: of the column.
        run: carries it out on every rank, raises an exception where it fails, and returns figures.
        cells: names of the cells that it runs with; None for all.
        kills: whether a rank kills itself in it, so that a launcher must restart the job.
        ranks: that it needs.
        deadline_seconds: after which the processes are ended.
    """

    name: str
    run: Callable[[Cell, Scene], Mapping[str, Any]]
    cells: tuple[str, ...] | None = None
    kills: bool = False
    ranks: int = 1
    deadline_seconds: float = DEADLINE_SECONDS


@dataclass(frozen=True)
class Trial:
    """A check of a cell: one place of the table.

    Attributes:
        check, cell: of it.
        reason: why it stays empty; empty where the check runs.
    """

    check: Check
    cell: Cell
    reason: str = ""

    @property
    def name(self) -> str:
        """In one line, as in `deepspeed zero1 bf16 adamw: restart`."""
        return f"{self.cell.name}: {self.check.name}"


def trials_of(device: str, only: str, ranks: int, stages_can_send: bool, restarted: bool) -> list[Trial]:
    """All places of the table, in the order in which they run: within a process first, then kills, pipelines last.

    Args:
        device: `cpu` or `cuda`.
        only: text that the names of the checks contain; cells without one are left out.
        ranks: of the job.
        stages_can_send: see `cells_of`.
        restarted: whether a launcher restarts the job after a kill.
    """
    trials: list[Trial] = []
    for cell in cells_of(device, ranks, stages_can_send):
        places = [Trial(check, cell, _reason(check, cell, ranks, restarted)) for check in CHECKS]
        if any(only in place.name and not place.reason for place in places):
            missing = lacking(cell, device)
            for place in places:
                left_out = "" if only in place.name else f"left out by --only {only!r}"
                trials.append(Trial(place.check, cell, place.reason or left_out or missing))
    return sorted(trials, key=lambda trial: (trial.cell.engine == "pipeline", trial.check.kills))


def _reason(check: Check, cell: Cell, ranks: int, restarted: bool) -> str:
    """Why a check does not apply; empty where it does."""
    if check.cells is not None and cell.name not in check.cells:
        return "run with representative cells only"
    if cell.name == ALONE and check.cells is not None and ranks > 1:
        return "in a job of several ranks each trains by itself here: run with the other engines"
    if check.ranks > ranks:
        return f"needs {check.ranks} ranks"
    return "no launcher restarts these ranks; start them with `cpsr run`" if check.kills and not restarted else ""


def check_restart(cell: Cell, scene: Scene) -> Mapping[str, Any]:
    """Bitwise equality of what restarted and what never stopped; returns the size of the snapshot."""
    if cell.feature in (EMA, LOADER, TORCHDATA):
        assert_bitwise(_loop_state(cell, scene, "lives", ENDS), _loop_state(cell, scene, "straight", ENDS[-1:]))
        return {}
    build: Callable[[], Job] = scene.builder(cell, MICRO_BATCHES, "cosine")
    result = check_resume(build)
    check_early_state(build)
    tensors: Mapping[str, torch.Tensor] = result["snapshot"]["tensors"]
    return {"snapshot_bytes": sum(tensor.nbytes for tensor in tensors.values())}


class _Numbers(IterableDataset[int]):
    """A loader, or torchdata's data set, that gives its state and takes it back; it counts what it was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.given, self._next = 0, 0

    def __iter__(self) -> Iterator[int]:
        while self._next < BATCHES:
            self._next += 1
            self.given += 1
            yield self._next - 1
        self._next = 0

    def state_dict(self) -> dict[str, int]:
        """The batch that comes next."""
        return {"next": self._next}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on there."""
        self._next = state["next"]


def _loop_state(cell: Cell, scene: Scene, name: str, ends: tuple[int, ...]) -> dict[str, Any]:
    """Weights and average that a run ends with, after so many lives in this process; its loop keeps the average.

    Also: a loader with a state skips no batch at a restart.
    """
    found: dict[str, Any] = {}
    for end in ends:
        seed(1)
        job, numbers, losses = scene.builder(cell, 1, "cosine")(), _Numbers(), []
        average = AveragedModel(job.module, avg_fn=lambda old, new, _: old.lerp(new, 0.1))
        settings = {"run_dir": str(scene.folder / name), "mode": "exact", "checkpoint": {"interval_iterations": 100}}
        with CPSRRecovery(job.adapter, settings) as recovery:
            recovery.register("average", average)
            begun = recovery.iteration
            batches = recovery.resume(_loader(cell.feature, numbers), repeat=True)
            while recovery.iteration < end:
                losses.append(job.train_on([token_batch(int(next(batches)), 0, scene.rank)]))
                if cell.feature == EMA:
                    average.update_parameters(job.module)
        assert cell.feature != LOADER or numbers.given <= end - begun + 1, "a restart has skipped batches one by one"
        found = {f"average/{key}": value.detach().clone() for key, value in average.state_dict().items()}
        found |= {f"weight/{key}": value.detach().clone() for key, value in job.module.state_dict().items()}
        found |= {"loss": losses[-1]}
    return found


def _loader(feature: str, numbers: _Numbers) -> Iterable[int]:
    if feature == TORCHDATA:
        from torchdata.stateful_dataloader import StatefulDataLoader

        # Each of two workers gives all numbers of a pass, in turn with the other.
        loader: Iterable[int] = StatefulDataLoader(numbers, batch_size=None, num_workers=2)
        return loader
    return numbers if feature == LOADER else range(BATCHES)


def check_side_group(cell: Cell, scene: Scene) -> Mapping[str, Any]:
    """Gather, vote, and send to the neighbours while the training group reduces; returns the training's backend."""
    group = Group()
    votes = group.votes()
    everyone = list(range(scene.ranks))
    # As replicas travel. Of more than two ranks none is in all of the pairs.
    pairs = pair_groups(scene.rank, [(rank, (rank + 1) % scene.ranks) for rank in everyone], NEIGHBOUR_SECONDS)
    for number in range(1, ROUNDS + 1):
        values = torch.full((ELEMENTS,), float(scene.rank + number), device=scene.device)
        work = dist.all_reduce(values, async_op=True)
        gathered = group.gather([scene.rank, number])
        agreed = votes.exchange(Ballot(interval_iterations=number))
        received = _exchange(pairs, scene.rank + number)
        work.wait()
        assert gathered == [[rank, number] for rank in everyone], gathered
        assert agreed == Ballot(interval_iterations=number - 1), agreed
        for peer, sent in received.items():
            assert torch.equal(sent, _message(peer + number)), f"rank {peer} sent something else"
        assert group.sum(scene.rank) == sum(everyone)
        assert torch.equal(values, torch.full_like(values, float(sum(everyone) + number * scene.ranks)))
    votes.finish()
    group.close()
    for pair in pairs.values():
        pair.close()
    return {"backend": dist.get_backend(), "neighbours": len(pairs)}


def _exchange(pairs: Mapping[int, SideGroup], number: int) -> dict[int, torch.Tensor]:
    """Send this rank's number to each neighbour; returns what they send, by rank."""
    message, received = _message(number), {peer: torch.empty(ELEMENTS) for peer in pairs}
    work = [pair.send(message, peer) for peer, pair in pairs.items()]
    work += [pair.receive(received[peer], peer) for peer, pair in pairs.items()]
    for one in work:
        one.wait(timedelta(seconds=NEIGHBOUR_SECONDS))
    return received


def _message(number: int) -> torch.Tensor:
    return torch.full((ELEMENTS,), float(number))


class _Wide(nn.Module):
    """Returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(SPEED_WIDTH, SPEED_WIDTH) for _ in range(SPEED_LAYERS))

    def forward(self, inputs: torch.Tensor, loss_factor: float = 1.0) -> torch.Tensor:
        hidden = inputs.to(next(self.parameters()).dtype)
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        return functional.mse_loss(hidden.float(), torch.zeros_like(inputs)) * loss_factor


def check_speed(cell: Cell, scene: Scene) -> Mapping[str, Any]:
    """Measure in turns; nothing is required of the figures.

    Returns:
        `stall_ratio`: stall of a snapshot over a copy of the same bytes to the host, pinned on CUDA; `step_ratio`: time
        of the steps between two checkpoints with CPSR over that without. Each a median with the smallest and largest.
    """
    torch.manual_seed(1)
    batch = [(torch.randn(SPEED_ITEMS, SPEED_WIDTH, device=scene.device),)]
    plain, watched = (scene.builder(cell, 1, model=_Wide)() for _ in range(2))
    config = {
        "run_dir": str(scene.folder / "run"),
        "mode": "auto",  # in mode `exact` the steps without CPSR, by another optimizer, would end the run
        "checkpoint": {"interval_iterations": SPEED_INTERVAL},
    }
    with CPSRRecovery(watched.adapter, config) as recovery:
        batches = recovery.resume([0], repeat=True)
        shard = [tensor for _, tensor in watched.adapter.shard().tensors()]
        hosts = [torch.empty(one.shape, dtype=one.dtype, pin_memory=one.is_cuda) for one in shard]

        def with_cpsr() -> float:
            seconds = _timed(
                scene, lambda: [watched.train_on(batch) for _ in range(SPEED_INTERVAL) if next(batches) == 0]
            )
            recovery.life.saver.drain(60.0)  # the steps without CPSR share no core with its writes
            return seconds

        def without() -> float:
            return _timed(scene, lambda: [plain.train_on(batch) for _ in range(SPEED_INTERVAL)])

        step_ratios, copies = [], []
        for turn in range(TURNS):  # which of the steps are first changes by turns
            measured = {act: act() for act in ((with_cpsr, without) if turn % 2 else (without, with_cpsr))}
            step_ratios.append(measured[with_cpsr] / measured[without])
            copies.append(_timed(scene, partial(_copy_out, shard, hosts)))
    copy_seconds = statistics.median(copies[1:])
    return {
        "copied_bytes": sum(one.nbytes for one in shard),
        "copy_seconds": copy_seconds,
        "stall_ratio": _spread([stall / copy_seconds for stall in _stalls(scene)]),
        "step_ratio": _spread(step_ratios[1:]),
    }


def _copy_out(shard: Sequence[torch.Tensor], hosts: Sequence[torch.Tensor]) -> None:
    """Copy tensors to the host as fast as the device can: into pinned memory nothing waits before the last."""
    for host, one in zip(hosts, shard, strict=True):
        host.copy_(one, non_blocking=True)


def _stalls(scene: Scene) -> list[float]:
    """Seconds of each committed checkpoint but the first, from the journal."""
    with JournalReader(scene.folder / "run" / "journal.db") as journal:
        rows = [row for row in journal.checkpoints() if row.status == "committed"]
    stalls = [row.stall_seconds for row in rows if row.stall_seconds is not None]
    assert len(stalls) >= TURNS // 2, f"only {len(stalls)} checkpoints were committed"
    return stalls[1:]


def _timed(scene: Scene, act: Callable[[], object]) -> float:
    """Seconds that it takes, until the device is done."""
    started = time.perf_counter()
    act()
    if scene.device.type == "cuda":
        torch.cuda.synchronize(scene.device)
    return time.perf_counter() - started


def _spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


CHECKS = (
    Check("restart", check_restart),
    Check("side group", check_side_group, (DDP,), ranks=2),
    Check("speed", check_speed, (DDP, "deepspeed zero1 fp32 adamw", ALONE, *ON_CUDA)),
    Check("memory", partial(check_exact, "memory"), (*RETURNING, OFFLOADED, *ON_CUDA), kills=True),
    Check("replay", partial(check_exact, "replay"), (*RETURNING, "deepspeed zero2 fp16 adamw"), kills=True),
    Check("disk", partial(check_exact, "disk"), (*RETURNING, OFFLOADED), kills=True),
    Check("dump", check_dump, (DDP, SPLIT[0], OF_DEEPSPEED[0], *ON_CUDA), kills=True, ranks=2),
    Check("predict", check_prediction, (*SPLIT, *OF_DEEPSPEED, OFFLOADED, *ON_CUDA, ALONE), kills=True),
)
