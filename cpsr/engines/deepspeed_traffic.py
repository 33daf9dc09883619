"""What crosses the boundaries of a pipeline's stages in a training step, and steps that repeat only that.

A stage that has lost nothing need not compute an iteration again for a neighbour that has: what it sent the first time
is all that the neighbour needs of it. So its `train_batch` draws the batches, sends what it has sent, receives what
comes, and leaves its weights alone.

Source: moevement, section 3.4. There the neighbour reads the logs; here their owner sends them again, by the calls of
the first time. So they need not be moved between machines, and the stage that computes runs DeepSpeed's own code.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any

import deepspeed
import torch

from cpsr.engines.evaluation import capture_random_states, restore_random_states
from cpsr.engines.hooks import Hooks
from cpsr.engines.stage_operations import SAMPLED_ELEMENTS, Operation, Repeats, TrafficLog, Verb
from cpsr.engines.weight_sample import sampled
from cpsr.errors import RecoveryError
from cpsr.state.codec import same_bits

__all__ = ["DeepSpeedTraffic"]

# Collectives that are not logged; in a step none of them joins ranks of several stages.
_OTHERS = (
    "all_reduce_coalesced",
    "inference_all_reduce",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "broadcast_object_list",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_base",
    "all_gather_coalesced",
    "all_gather_object",
    "all_to_all",
    "all_to_all_single",
    "isend",
    "irecv",
    "batch_isend_irecv",
    "gather",
    "scatter",
    "barrier",
    "monitored_barrier",
)


class DeepSpeedTraffic:
    """What crosses the boundaries of one rank of a `PipelineEngine`; on the training thread.

    Args:
        engine: a `PipelineEngine` of several stages.
        adapter: of it; its random states are logged.

    Attributes:
        log: takes every training step; None: no step is logged.
    """

    def __init__(self, engine: Any, adapter: Any) -> None:
        self._engine, self._adapter = engine, adapter
        self._hooks = Hooks()
        self.log: TrafficLog | None = None
        self._repeats: Repeats | None = None
        self._open = False  # inside a training step, and outside of what DeepSpeed sends once in a life
        self._form: Any = None
        self._groups: dict[int, str | None] = {}

    @property
    def obstacle(self) -> str | None:
        """Why steps of this pipeline cannot be repeated from logs; None where they can."""
        engine = self._engine
        if engine.dynamic_shape:
            return "its layers send tensors of changing shapes (dynamic_shape)"
        if engine.is_model_parallel:
            return "its stages are split by tensor parallelism"
        if engine.module.get_additional_losses() is not None:
            return "its module has additional losses"
        return None

    def follow(self, log: TrafficLog) -> None:
        """Let this take every training step from now on."""
        self.log = log
        engine, hooks = self._engine, self._hooks
        if hooks.installed:
            return
        hooks.wrap(engine, "train_batch", self._train_batch)
        hooks.wrap(engine, "eval_batch", self._eval_batch)
        hooks.wrap(engine, "_next_batch", self._next_batch)
        hooks.wrap(engine, "_send_tensor_meta", self._send_form)
        hooks.wrap(engine, "_recv_tensor_meta", self._aside)
        hooks.wrap(engine, "_aggregate_total_loss", self._aggregate)
        backend = deepspeed.comm.comm.cdb
        hooks.wrap(backend, "send", self._send)
        hooks.wrap(backend, "recv", self._receive)
        hooks.wrap(backend, "all_reduce", self._all_reduce)
        hooks.wrap(backend, "broadcast", self._broadcast)
        for name in _OTHERS:
            if hasattr(backend, name):
                hooks.wrap(backend, name, partial(self._other, name))

    def repeat(self, repeats: Repeats) -> None:
        """From now on this rank repeats only what crosses the boundaries, until `go_on`."""
        self._repeats = repeats

    def go_on(self) -> None:
        """The next step is computed."""
        self._repeats = None

    def stop(self) -> None:
        """Follow no more."""
        self._hooks.remove()
        self.log = self._repeats = None

    # A step that is logged

    def _train_batch(self, original: Callable[..., Any], data_iter: Any = None) -> Any:
        if self._repeats is not None:
            return self._repeated(self._repeats, data_iter)
        engine, log = self._engine, self.log
        if log is None:
            return original(data_iter)
        log.begin(int(engine.global_steps) + 1)
        self._open = True
        try:
            result = original(data_iter)
        except BaseException:
            log.drop(None)
            raise
        finally:
            self._open = False
        losses = torch.stack([engine.agg_train_loss.detach().float(), engine.dp_group_loss.detach().float()])
        if engine.agg_additional_losses is not None:
            log.drop("its module has additional losses")
        norm = engine.get_global_grad_norm()
        norm = norm.detach().clone() if isinstance(norm, torch.Tensor) else norm
        plain = {"states": capture_random_states(self._adapter), "norm": norm}
        log.add(_operation("result", losses), losses, plain)
        log.end(bool(engine.was_step_applied()), self._form)
        return result

    def _next_batch(self, original: Callable[..., Any]) -> Any:
        if not self._open or self.log is None:
            return original()
        before = capture_random_states(self._adapter)
        batch = original()
        drew = not _unchanged(before, capture_random_states(self._adapter))
        self.log.add(Operation("load"), None, before if drew else None)
        return batch

    def _send_form(self, original: Callable[..., Any], buffer: Any, stage: int) -> Any:
        tensors = buffer if isinstance(buffer, tuple) else (buffer,)
        listed = [[list(one.shape), str(one.dtype).removeprefix("torch.")] for one in tensors]
        self._form = {"tuple": isinstance(buffer, tuple), "tensors": listed}
        return self._aside(original, buffer, stage)

    def _aside(self, original: Callable[..., Any], *args: Any) -> Any:
        was, self._open = self._open, False
        try:
            return original(*args)
        finally:
            self._open = was

    def _aggregate(self, original: Callable[..., Any]) -> Any:
        if self._open and self.log is not None:
            self.log.add(Operation("step"), None)
        return original()

    def _send(self, original: Callable[..., Any], tensor: torch.Tensor, dst: int, **more: Any) -> Any:
        if self._open and self.log is not None:
            self.log.add(_operation("send", tensor, str(dst)), tensor)
        return original(tensor=tensor, dst=dst, **more)

    def _receive(self, original: Callable[..., Any], tensor: torch.Tensor, src: int, **more: Any) -> Any:
        result = original(tensor=tensor, src=src, **more)
        if self._open and self.log is not None:
            self.log.add(_operation("receive", tensor, str(src)), sampled(tensor, SAMPLED_ELEMENTS))
        return result

    def _all_reduce(
        self, original: Callable[..., Any], tensor: torch.Tensor, op: Any, group: Any = None, async_op: bool = False
    ) -> Any:
        # The operator's name, which torch's enumeration shows as `RedOpType.SUM`.
        self._cross("all_reduce", tensor, group, str(op).rpartition(".")[2])
        return original(tensor, op, group, async_op)

    def _broadcast(
        self, original: Callable[..., Any], tensor: torch.Tensor, src: int, group: Any = None, async_op: bool = False
    ) -> Any:
        self._cross("broadcast", tensor, group, str(src))
        return original(tensor=tensor, src=src, group=group, async_op=async_op)

    def _cross(self, verb: Verb, tensor: torch.Tensor, group: Any, detail: str) -> None:
        """Log what this rank gives to a collective with ranks of other stages."""
        where = self._crossed(group)
        if where is None or self.log is None:
            return
        if where:
            self.log.add(_operation(verb, tensor, where, detail), tensor)
        else:
            self.log.drop(f"it used {verb} over a group of several stages that is not one of the engine's")

    def _other(self, name: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        groups = [one for one in args if isinstance(one, torch.distributed.ProcessGroup)]
        group = groups[0] if groups else kwargs.get("group")
        if self._crossed(group) is not None and self.log is not None:
            self.log.drop(f"it used {name} over ranks of several stages")
        return original(*args, **kwargs)

    def _crossed(self, group: Any) -> str | None:
        """The name of a group of ranks of several stages, empty where it has none; None of any other, or aside."""
        if not self._open:
            return None
        if id(group) not in self._groups:
            self._groups[id(group)] = self._named(group)
        return self._groups[id(group)]

    def _named(self, group: Any) -> str | None:
        own = set(torch.distributed.get_process_group_ranks(self._engine.grid.get_data_parallel_group()))
        if set(_ranks(group)) <= own:
            return None
        return next((name for name, one in self._known_groups().items() if one is group), "")

    def _known_groups(self) -> dict[str, Any]:
        """The engine's groups of ranks of several stages, by names that are the same in every life."""
        engine = self._engine
        tied = {f"tied/{key}": comm["group"] for key, comm in engine.module.tied_comms.items()}
        grid = engine.grid
        return {"pipe": grid.get_pipe_parallel_group(), "model": grid.get_model_parallel_group(), **tied}

    # A step of which only this is repeated

    def _eval_batch(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        repeats = self._repeats
        if repeats is not None:
            repeats.void()
            raise RecoveryError(
                "eval_batch was called while this stage repeats only what it had sent: its weights are not those of "
                "the iteration. Nothing is lost: the next start repeats these iterations on all stages"
            )
        return original(*args, **kwargs)

    def _repeated(self, repeats: Repeats, data_iter: Any) -> Any:
        engine, iteration = self._engine, int(self._engine.global_steps) + 1
        if data_iter is not None:
            engine.set_dataiterator(data_iter)
        engine.module.train()
        losses = torch.zeros(2)
        received = 0
        with torch.no_grad():
            for operation, values, plain in repeats.operations(iteration):
                if operation.verb == "load":
                    if plain is not None:
                        restore_random_states(self._adapter, plain)
                    engine._next_batch()
                elif operation.verb == "step":
                    self._count_step(applied=repeats.applied(iteration))
                elif operation.verb == "result":
                    restore_random_states(self._adapter, plain["states"])
                    norm = plain["norm"]
                    engine._global_grad_norm = norm.to(engine.device) if isinstance(norm, torch.Tensor) else norm
                    assert values is not None
                    losses = values
                else:
                    received += operation.verb == "receive"
                    self._move(repeats, operation, values, f"receive {received} of iteration {iteration}")
        engine.agg_train_loss, engine.dp_group_loss = (one.clone().to(engine.device) for one in losses)
        return engine.agg_train_loss

    def _move(self, repeats: Repeats, operation: Operation, values: torch.Tensor | None, what: str) -> None:
        if operation.verb in ("send", "receive"):
            if int(operation.where) not in repeats.resting:
                self._pass(repeats, operation, values, what)
            return
        group = self._known_groups()[operation.where]
        if set(_ranks(group)) <= set(repeats.resting):
            return
        assert values is not None
        tensor = values.clone().to(self._engine.device)
        if operation.verb == "all_reduce":
            op = getattr(deepspeed.comm.ReduceOp, operation.detail)
            deepspeed.comm.all_reduce(tensor, op=op, group=group)
        else:
            deepspeed.comm.broadcast(tensor, src=int(operation.detail), group=group)

    def _pass(self, repeats: Repeats, operation: Operation, values: torch.Tensor | None, what: str) -> None:
        engine, other = self._engine, int(operation.where)
        assert values is not None
        if operation.verb == "send":
            if engine.first_output_send and not engine.is_last_stage() and other == self._rank_of(engine.next_stage):
                engine.first_output_send = False
                engine._send_tensor_meta(_as_sent(repeats.form), engine.next_stage)
            deepspeed.comm.send(values.clone().to(engine.device), other)
            return
        if engine.pipe_recv_buf is None and not engine.is_first_stage() and other == self._rank_of(engine.prev_stage):
            engine.pipe_recv_buf = engine._recv_tensor_meta(engine.prev_stage)
        tensor = torch.empty(operation.shape, dtype=getattr(torch, operation.dtype), device=engine.device)
        deepspeed.comm.recv(tensor, other)
        if not same_bits(sampled(tensor, SAMPLED_ELEMENTS).cpu(), values):
            repeats.void()
            raise RecoveryError(
                f"{what} came from rank {other} with other values than the first time (a tensor of shape "
                f"{list(operation.shape)} between two stages): something in that rank's layers is not deterministic, "
                "or its data, code or libraries are others than before. Nothing is lost: the next start repeats these "
                "iterations on this rank's stage, too, and checks the weights"
            )

    def _rank_of(self, stage: int) -> int:
        return int(self._engine.grid.stage_to_global(stage_id=stage))

    def _count_step(self, *, applied: bool) -> None:
        """DeepSpeed's own end of a step, with an optimizer and a clipping that leave everything alone."""
        engine, optimizer = self._engine, self._engine.optimizer
        still = _Standing(optimizer, overflow=not applied)
        with _standing(engine, "optimizer", still), _standing(engine, "clip_fp32_gradients", lambda: None):
            engine._take_model_step(None)


class _Standing:
    """An optimizer that does not step."""

    def __init__(self, optimizer: Any, *, overflow: bool) -> None:
        self._optimizer, self.overflow = optimizer, overflow

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Torch's own; at ZeRO 0 in fp32 DeepSpeed has no wrapper around it."""
        bare = isinstance(self._optimizer, torch.optim.Optimizer)
        inner: torch.optim.Optimizer = self._optimizer if bare else self._optimizer.optimizer
        return inner

    def step(self, *_: Any, **__: Any) -> None:
        """Nothing."""

    def zero_grad(self, *_: Any, **__: Any) -> None:
        """Nothing: no gradient was computed."""


@contextmanager
def _standing(engine: Any, name: str, value: Any) -> Iterator[None]:
    hooks = Hooks()
    hooks.replace(engine, name, value)
    try:
        yield
    finally:
        hooks.remove()


def _operation(verb: Verb, tensor: torch.Tensor, where: str = "", detail: str = "") -> Operation:
    return _same_operation(verb, where, detail, tensor.shape, tensor.dtype)


@lru_cache(256)
def _same_operation(verb: Verb, where: str, detail: str, shape: torch.Size, dtype: torch.dtype) -> Operation:
    """Every step has the same ones."""
    return Operation(verb, where, detail, tuple(shape), str(dtype).removeprefix("torch."))


def _unchanged(before: Any, after: Any) -> bool:
    """Whether random states are the same; those of the host that were not read again are the same objects.

    Bytes are compared, since `torch.equal` lets other threads have Python, and then waits for them.
    """
    if isinstance(before, dict):
        return all(_unchanged(one, after[name]) for name, one in before.items())
    if isinstance(before, list):
        return all(map(_unchanged, before, after))
    return before is after or (isinstance(before, torch.Tensor) and _bytes(before) == _bytes(after))


def _bytes(state: torch.Tensor) -> bytes:
    return state.numpy().tobytes()


def _ranks(group: Any) -> list[int]:
    if group is None:
        return list(range(torch.distributed.get_world_size()))
    return torch.distributed.get_process_group_ranks(group)


def _as_sent(form: Any) -> Any:
    """Tensors of these shapes, without memory."""
    made = [torch.empty(shape, dtype=getattr(torch, dtype), device="meta") for shape, dtype in form["tensors"]]
    return tuple(made) if form["tuple"] else made[0]
