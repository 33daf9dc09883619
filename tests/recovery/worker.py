"""One rank of a small DeepSpeed job under CPSR, which can kill itself at a chosen point.

The final state and the batches that were trained on are left as JSON, so that runs can be compared bit for bit.
"""

import ctypes
import hashlib
import itertools
import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import deepspeed
import numpy
import torch
from safetensors.torch import save_file

import cpsr.checkpoint.rank_part as part_module
import cpsr.checkpoint.store as store_module
from cpsr import CPSRRecovery
from cpsr.benchmarks.harness.checkpoint_files import is_rest
from cpsr.checkpoint.arena import Arena
from cpsr.checkpoint.copying import CopyEngine
from cpsr.checkpoint.device import DeviceSteps, StepEvents
from cpsr.checkpoint.run_directory import IDENTITY
from cpsr.checkpoint.store import CheckpointStore
from cpsr.checkpoint.writer import CheckpointWriter
from cpsr.demo.device import join_ranks
from cpsr.experts.in_memory import InMemory
from cpsr.fitter.phases import PhaseDetector
from cpsr.learning import learning
from cpsr.planner.live import job_planner
from cpsr.predictor import calibration, line
from cpsr.predictor.guard import Guard
from cpsr.predictor.vitp import VITPPredictor
from cpsr.state.codec import encode
from tests.committed import keep_pace
from tests.costs import priced
from tests.device import ON_CUDA
from tests.recovery.engines import (
    BATCH,
    SEED,
    WIDTH,
    Mixture,
    Regression,
    configuration,
    dataset,
    initialize,
    loader,
    pipeline,
)
from tests.recovery.job import LifeOptions

SAVE_SECONDS = 1.0  # far more than a save of this model takes, and soon over where a dead rank's part never comes


@dataclass(frozen=True)
class Options(LifeOptions):
    """What one life of the job does.

    Attributes:
        fault: `phase:rank:iteration`, the rank also `all`; see `arm` and `Faults`.
        in_memory: before a rank kills itself the state of every rank must be in shared memory, of one iteration from
            this on.
        zero, precision, micro_batches: of the DeepSpeed configuration.
        optimizer: more sections of the DeepSpeed configuration; with one of that name there is no Python object.
        stages: pipeline stages, 0 is no pipeline.
        expert_parallel: ranks that share the experts of a mixture, 0 is a model without experts.
        routed: of a pipeline: layers of experts in its first half and in its second.
        probes: give a pipeline `probe_batches` and `loss_fn`; `without loss_fn` leaves that out, and the loss of
            `reversed` grows as training goes on.
        gain: factor on a predicted displacement, past anything sensible, in place of the limits of its length.
        phase_iterations: length of every phase that the planner sees, in place of what gradients show.
        window_iterations: over which the predictor fits its line, in place of what is expected to cost least.
        turns: the network turns the line, whatever that is expected to cost.
        unpredicted: the predictor may take no memory, so that nothing is predicted.
        poison: train a predicted state on targets that blow it up.
        one_shot: give `resume` an iterator that cannot be started again.
        load_back: the user's own checkpoint is saved at the first iteration and loaded at the second.
        block: hand CPSR its configuration in that of DeepSpeed, as a `mapping` or a `file`.
        odd_rank: a rank whose model has a buffer of another shape.
        apart: an iteration after which rank 1 moves its weights by itself.
        unsampled: move an element that the samples of a snapshot do not show, in a wider model.
        known_young: what failures cost is known of so young a run, too.
        costs: of an iteration that is skipped, and of one of a move; see `priced`.
        began: leave the weights that this life began with beside the result.
        late: a rank whose device is a number of steps behind its host, and that number.
        hidden_bytes: of experts, that an iteration hides, in place of what is measured.
        loading: more settings of the data loader.
    """

    in_memory: int | None = None
    zero: int = 1
    precision: str = "fp32"
    micro_batches: int = 1
    optimizer: dict[str, Any] | None = None
    stages: int = 0
    expert_parallel: int = 0
    routed: tuple[int, int] = (1, 2)
    probes: str = ""
    gain: float = 0.0
    phase_iterations: int = 0
    window_iterations: int = 0
    turns: bool = False
    unpredicted: bool = False
    poison: bool = False
    one_shot: bool = False
    load_back: tuple[int, int] | None = None
    block: str = ""
    odd_rank: int | None = None
    apart: int | None = None
    unsampled: bool = False
    known_young: bool = False
    costs: tuple[float, float] | None = None
    late: tuple[int, int] | None = None
    began: bool = False
    hidden_bytes: float = 0.0
    loading: dict[str, Any] = field(default_factory=dict)


def always_predict(window_iterations: int | None = None, direction: Literal["line", "vitp"] = "line") -> None:
    """The predictor moves them as far as the failure, whatever that is expected to cost in so young a run."""
    predictor = partial(VITPPredictor, window_iterations, gain=1.0, direction=direction)
    setattr(learning, "VITPPredictor", predictor)  # noqa: B010 - mypy refuses it otherwise


def main(options: Options, rank: int, ranks: int) -> None:
    faults = Faults(options, rank)
    if options.late is not None and options.late[0] == rank:
        complete_late(options.late[1])
    if options.hidden_bytes:
        setattr(InMemory, "wanted_bytes", lambda experts: options.hidden_bytes)  # noqa: B010 - mypy refuses it otherwise
    if options.gain:
        scales = lambda guard, moved: torch.full((len(moved.operators),), options.gain, dtype=torch.float64)  # noqa: E731
        setattr(Guard, "limit", scales)  # noqa: B010 - mypy refuses to assign to a method
    if options.phase_iterations:
        lengths = {"min_iterations": options.phase_iterations, "max_iterations": options.phase_iterations}
        setattr(job_planner, "PhaseDetector", partial(PhaseDetector, **lengths))  # noqa: B010 - mypy refuses it otherwise
    if options.config.get("mode") == "predict":
        always_predict(options.window_iterations or None, "vitp" if options.turns else "line")
    if options.known_young:
        calibration.YOUNGEST_ITERATIONS = 0
    if options.costs is not None:
        table = priced(*options.costs)
        setattr(line, "table", lambda: table)  # noqa: B010 - mypy refuses it otherwise
    if options.unpredicted:
        learning.LIMIT_BYTES = 1
    initialize_ranks(options.result)
    seed()
    engine, batches = build(options, rank)
    loop = train_pipeline if options.stages else train
    config = None if options.block else options.config
    with CPSRRecovery(engine, config, **probe_arguments(options, engine, batches)) as recovery:
        restored = recovery.restored
        if options.began:
            weights = {name: one.parameter.values for name, one in recovery.life.job.adapter.shard().operators.items()}
            save_file(weights, options.result.with_suffix(f".{rank}.safetensors"))
        started = {"iteration": recovery.iteration, "method": restored.method, "reason": restored.reason}
        state_at_start = state_digest(recovery)
        dealt = loop(recovery, engine, batches, options, faults)
        result = {"started": started, "state_at_start": state_at_start, "batches": dealt}
        result |= final_state(recovery, engine)
    options.leave(rank, result)
    torch.distributed.destroy_process_group()  # or gloo's threads may abort the exit


def complete_late(steps: int) -> None:
    """Let each step of this process be complete only when so many more have been launched, as on a GPU."""
    launched = itertools.count()

    class Event:
        newest = at = 0

        def record(self, stream: object) -> None:
            self.at = Event.newest = next(launched)

        def query(self) -> bool:
            return Event.newest >= self.at + steps

    original = DeviceSteps.__init__

    def with_events(steps: DeviceSteps, *given: Any) -> None:
        original(steps, *given)
        steps.events = StepEvents(torch.device("cuda", 0))

    cuda: Any = torch.cuda
    cuda.Event, cuda.current_stream = Event, lambda device: None
    cuda.device = lambda device: nullcontext()
    setattr(DeviceSteps, "__init__", with_events)  # noqa: B010 - mypy refuses to assign to a method


def initialize_ranks(result: Path) -> None:
    # Through a file: a port that was free a moment ago may be taken by now.
    join_ranks(f"file://{result.with_suffix('.ranks')}")
    # DeepSpeed asks for fast fp16 instructions; torch computes fp16 correctly without them, only slower.
    deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True


def seed() -> None:
    torch.manual_seed(SEED)
    random.seed(SEED)
    numpy.random.seed(SEED)


def build(options: Options, rank: int) -> tuple[Any, Any]:
    """The engine and the data, both the same in every life."""
    ds_config: Any = configuration(options.zero, options.precision, options.micro_batches) | (options.optimizer or {})
    if options.block:
        ds_config["cpsr"] = options.config
    if options.block == "file":
        path = options.result.with_suffix(f".deepspeed-{rank}.json")
        path.write_text(json.dumps(ds_config))
        ds_config = str(path)
    module = model(options)
    ranks = torch.distributed.get_world_size()
    parts = ranks // max(options.stages, 1)  # ranks of a stage follow each other
    data = loader(dataset(), parts, rank % parts, **options.loading)
    engine = initialize(module, ds_config)
    if rank == options.odd_rank:
        engine.module.register_buffer("seen", torch.zeros(2))
    return engine, (batch for _ in range(100) for batch in data) if options.one_shot else data


def model(options: Options) -> torch.nn.Module:
    if options.stages:
        stages: torch.nn.Module = pipeline(options.stages, options.expert_parallel, options.routed)
        return stages
    width = 4 * WIDTH if options.unsampled else WIDTH
    return Mixture(options.expert_parallel) if options.expert_parallel else Regression(width)


def probe_arguments(options: Options, engine: Any, batches: Any) -> dict[str, Any]:
    if not options.probes:
        return {}
    inputs, targets, _ = batches.dataset[:BATCH]
    probe = inputs, -targets if options.probes == "reversed" else targets
    if options.probes == "without loss_fn":
        return {"probe_batches": [probe]}
    repeated = engine.gradient_accumulation_steps()
    return {"probe_batches": [probe], "loss_fn": lambda batch: engine.eval_batch(iter([batch] * repeated))}


def on_device(engine: Any, *batch: torch.Tensor) -> list[torch.Tensor]:
    """A pipeline moves its batches itself; other engines leave it to the loop."""
    return [part.to(engine.device) for part in batch]


def train(recovery: CPSRRecovery, engine: Any, batches: Any, options: Options, faults: "Faults") -> list[list[int]]:
    """The usual loop; returns the iteration after, and the indices of, every batch."""
    dealt, loaded = [], False
    for inputs, targets, indices in recovery.resume(batches, repeat=True):
        faults.at_batch(recovery.iteration, engine.micro_steps % options.micro_batches)
        poisoned = 100 * targets if options.poison and recovery.restored.predicted else targets
        loss = engine(*on_device(engine, inputs, poisoned))
        engine.backward(loss)
        engine.step()
        keep_pace(recovery, SAVE_SECONDS)
        if recovery.iteration == options.apart and engine.global_rank == 1:
            move_weights(recovery, int(options.unsampled))
        dealt.append([recovery.iteration, *indices.tolist()])
        if options.load_back is not None:
            folder = str(options.result.with_suffix(".user"))
            if recovery.iteration == options.load_back[0] and not loaded:
                engine.save_checkpoint(folder)
            if recovery.iteration == options.load_back[1] and not loaded:
                loaded = True
                engine.load_checkpoint(folder)
        if recovery.iteration >= options.iterations:
            break
    return dealt


def train_pipeline(
    recovery: CPSRRecovery, engine: Any, batches: Any, options: Options, faults: "Faults"
) -> list[list[int]]:
    """The same over `train_batch`; a stage in the middle is dealt nothing."""
    dealt = []

    def noted() -> Iterator[Any]:
        for inputs, targets, indices in recovery.resume(batches, repeat=True):
            dealt.append([recovery.iteration + 1, *indices.tolist()])
            yield inputs, targets

    data = noted()
    while recovery.iteration < options.iterations:
        faults.at_batch(recovery.iteration, 0)
        engine.train_batch(data)
        keep_pace(recovery, SAVE_SECONDS)
    return dealt


def move_weights(recovery: CPSRRecovery, element: int) -> None:
    """As a fault in memory does, or a gradient that was not averaged."""
    recovery.life.saver.finish()
    operators = recovery.life.job.adapter.shard().operators
    next(iter(operators.values())).parameter.values[element] += 0.01


def state_digest(recovery: CPSRRecovery) -> str:
    digest = hashlib.sha256()
    for _, tensor in sorted(recovery.life.job.adapter.shard().all_tensors()):
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def final_state(recovery: CPSRRecovery, engine: Any) -> dict[str, Any]:
    return {
        "iteration": recovery.iteration,
        "state": state_digest(recovery),
        "rng": rng_digest(),
        "other_rng": [random.random(), numpy.random.random()],
        "counters": encode(recovery.life.job.adapter.scalars())[0],
        "gradient_norm": str(engine.get_global_grad_norm()),
        "learning_rate": engine.get_lr(),
    }


def rng_digest() -> str:
    """Of torch's random states: the host's, and that of the GPU which is trained on."""
    states = [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if ON_CUDA else [])]
    return hashlib.sha256(b"".join(state.numpy().tobytes() for state in states)).hexdigest()


class Faults:
    """What happens to this rank, and when.

    Phases of the training loop: `step` (killed before a step), `micro` (killed between the micro-batches of one),
    `stop` (before a step), and `error`, which is raised before a step. At `alone` the rank is killed before a step, and
    the others hang there without an error, as over NCCL. Also `sigterm`, and `sigterm-group`, which goes to all
    processes of the rank's group. Phases deeper down: `snapshot`, `persist`, `commit`, `load` (killed there), and
    `sigterm-twice`, whose second signal comes while the rank is leaving. The iteration is the one that is complete.
    """

    def __init__(self, options: Options, rank: int) -> None:
        phase, victim, at = options.fault.split(":") if options.fault else ("", "", "0")
        self._phase = phase if victim in (str(rank), "all") else ""
        self._hangs = phase == "alone" and not self._phase
        self._at = int(at)
        self._committed = options.committed
        self._in_memory = options.in_memory
        self._run_dir = Path(options.config["run_dir"])
        if self._phase:
            self._arm()

    def at_batch(self, iteration: int, micro_batch: int) -> None:
        if iteration != self._at:
            return
        if self._hangs:
            ctypes.CDLL(None).pause()
        if self._phase in (("micro",) if micro_batch else ("step", "alone")):
            self._die()
        if self._phase in ("sigterm", "sigterm-twice"):
            os.kill(os.getpid(), signal.SIGTERM)
        if self._phase == "sigterm-group":  # by another process: torch's workers take their rank's for its end
            command = ["kill", "-TERM", "--", f"-{os.getpgrp()}"]
            subprocess.run(command, check=True, start_new_session=True)
        if self._phase == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if self._phase == "error":
            self._wait()
            raise RuntimeError("an error of the loop")

    def _die(self) -> None:
        self._wait()
        os.kill(os.getpid(), signal.SIGKILL)

    def _wait(self) -> None:
        deadline = time.monotonic() + 30
        while self._committed is not None and not self._committed.exists() and time.monotonic() < deadline:
            time.sleep(0.005)
        while self._in_memory is not None and not self._holds(self._in_memory) and time.monotonic() < deadline:
            time.sleep(0.005)

    def _holds(self, iteration: int) -> bool:
        run_id = json.loads((self._run_dir / IDENTITY).read_text())["run_id"]
        states = Arena(run_id).list()
        life = max((state.life for state in states), default=0)
        ranks: dict[int, set[int]] = {}
        for state in states:
            if state.iteration >= iteration and state.life == life:
                ranks.setdefault(state.iteration, set()).add(state.rank)
        return any(len(found) == torch.distributed.get_world_size() for found in ranks.values())

    def _arm(self) -> None:
        at = self._at
        if self._phase == "snapshot":
            # The plan is for its snapshot, the only one of the arguments that knows the iteration.
            due = lambda engine, plan, *rest: getattr(plan.args[0], "iteration", -1) == at  # noqa: E731
            before(CopyEngine, "_copy_on_host", due, self._die)
        elif self._phase == "persist":
            before(part_module, "write_tensors", lambda path, *rest, **more: is_rest(path, at), self._die)
        elif self._phase == "commit":
            before(store_module, "seal", lambda attempt, *rest, **more: attempt.save.iteration == at, self._die)
        elif self._phase == "load":
            before(CheckpointStore, "load", lambda store, iteration, *_, **__: iteration == at, self._die)
        elif self._phase == "sigterm-twice":
            again = lambda: os.kill(os.getpid(), signal.SIGTERM)  # noqa: E731
            before(CheckpointWriter, "close", lambda writer, timeout: True, again)


def before(owner: Any, name: str, is_due: Callable[..., bool], act: Callable[[], None]) -> None:
    """Act at the start of `owner.name(...)` where `is_due` says so of its arguments."""
    original = getattr(owner, name)

    def watched(*args: Any, **kwargs: Any) -> Any:
        if is_due(*args, **kwargs):
            act()
        return original(*args, **kwargs)

    setattr(owner, name, watched)
