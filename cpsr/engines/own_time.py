"""A rank's own time: what its steps take without its waits for other ranks, and what of that it waits for data.

A rank waits for others in these calls. A thread does on the host; on a GPU they put the wait into a stream:

- `Work.wait` of torch.distributed. Its blocking collectives, messages and barriers wait there, too, and so do ZeRO,
  FSDP2 and pipelines; DTensors, as of tensor parallelism, in `wait_tensor`.
- The end of a backward under DDP. Its reducer waits in C++, in a callback that the autograd engine calls when all
  gradients are there. Another callback before that one, and one behind it, show how long.
- `_broadcast_coalesced`, by which DDP makes buffers alike before a forward.
- On a GPU also collectives that run on the stream of the training, and its waits for other streams.

What waits elsewhere counts as the rank's own: docs/slow_ranks.md has the cases.
"""

import sys
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from threading import get_ident
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist

from cpsr.engines.adapter import EngineAdapter
from cpsr.engines.hooks import Hooks
from cpsr.state.device_values import captures, reached

__all__ = ["DeviceOwnTime", "OwnTime"]

SAMPLED_SECONDS = 0.5  # between two steps that are measured on a GPU: events cost microseconds each
MICROSECONDS = 1e6
COLLECTIVES = "all", "reduce", "broadcast", "gather", "scatter", "send", "recv", "end_coalescing"
Sums = tuple[int, int, int]

_queue = torch.autograd.Variable._execution_engine.queue_callback  # of the backward under way


class OwnTime:
    """Measures the own time of a rank whose training thread computes; nothing where there are no other ranks.

    Attributes:
        sums: steps so far, and their microseconds of compute and of waiting for data; replaced as a whole.
    """

    def __init__(self) -> None:
        self.sums: Sums = 0, 0, 0
        self._loading = _Loading(self)
        self._hooks = Hooks()
        self._thread: int | None = None  # that trains; None: nothing is measured
        self._forget(0.0)

    @staticmethod
    def of(device: torch.device) -> "OwnTime":
        """What measures where forward and backward run on that device."""
        return DeviceOwnTime(device) if device.type == "cuda" else OwnTime()

    def attach(self, adapter: EngineAdapter) -> None:
        """Begin to measure; called by the thread that trains.

        Args:
            adapter: the engine.
        """
        if adapter.world_size == 1:
            return
        self._watch()
        if adapter.wrapper is not None:
            self._hooks.wrap(dist, "_broadcast_coalesced", self._around)
            trained = [one for one in adapter.module.parameters() if one.requires_grad]
            # All are used in each backward, unless DDP looks for the unused ones: then the first or the last may be.
            for one in {*trained[:1], *(trained[-1:] if adapter.wrapper.find_unused_parameters else ())}:
                self._hooks.add(one.register_hook(self._on_gradient))
        self._thread = get_ident()
        self._forget(perf_counter())

    def _watch(self) -> None:
        self._hooks.wrap(dist.Work, "wait", self._around)
        if (functional := sys.modules.get("torch.distributed._functional_collectives")) is not None:
            self._hooks.wrap(functional, "wait_tensor", self._around)

    def detach(self) -> None:
        """Measure no more; without `attach` nothing happens."""
        self._thread = None
        self._hooks.remove()

    def loading(self) -> "_Loading":
        """A context in which a batch is loaded."""
        return self._loading

    def end_step(self) -> Sums:
        """A step is complete; returns the new sums."""
        if self._thread is not None:
            self._thread = get_ident()
            now = perf_counter()
            self._end_step(now)
            self._forget(now)
        return self.sums

    def _end_step(self, now: float) -> None:
        self._add(now - self._ended - self._waited, self._loaded)

    def _add(self, own_seconds: float, data_seconds: float) -> None:
        steps, compute, data = self.sums
        compute += int((own_seconds - data_seconds) * MICROSECONDS)
        self.sums = steps + 1, compute, data + int(data_seconds * MICROSECONDS)

    def _forget(self, now: float) -> None:
        """A step begins; an error may have left a wait open."""
        self._ended = now
        self._waited = self._loaded = 0.0  # seconds of this step
        self._began: Any = None  # of the open wait
        self._queued = False  # the callbacks of a backward

    def _around(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling() or self._began is not None or not self._trains():
            return original(*args, **kwargs)
        self._began = self._mark()
        try:
            return original(*args, **kwargs)
        finally:
            self._end_wait()

    def _trains(self) -> bool:
        """Whether this thread is the one that trains, or runs a backward for it."""
        return get_ident() == self._thread or torch._C._current_graph_task_id() >= 0

    def _mark(self) -> Any:
        return perf_counter()

    def _end_wait(self) -> None:
        if self._began is not None:
            self._waited += perf_counter() - self._began
            self._began = None

    def _on_gradient(self, gradient: torch.Tensor) -> None:
        """DDP queues its callback with the last gradient: not before this."""
        if not self._queued:
            self._queued = True
            _queue(self._backward_computed)

    def _backward_computed(self) -> None:
        self._queued = False
        if self._began is None:
            self._began = self._mark()
            _queue(self._end_wait)


class _Loading(AbstractContextManager[None]):
    """The thread that trains loads a batch; what it waits there for other ranks is no data."""

    def __init__(self, own: OwnTime) -> None:
        self._own = own
        self._began = self._waited = 0.0

    def __enter__(self) -> None:
        if get_ident() == self._own._thread:  # a thread that prefetches keeps nobody waiting
            self._waited = self._own._waited
            self._began = perf_counter()

    def __exit__(self, *_: object) -> None:
        own = self._own
        if get_ident() == own._thread:
            own._loaded += perf_counter() - self._began - (own._waited - self._waited)


@dataclass
class _Sample:
    """A step on a GPU: events on the stream of its beginning."""

    stream: torch.cuda.Stream
    begin: torch.cuda.Event
    end: torch.cuda.Event | None = None
    waits: list[tuple[torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)
    loaded_seconds: float = 0.0


class DeviceOwnTime(OwnTime):
    """The own time of a rank on a GPU, of one step in half a second: its stream's, without the waits in it.

    Nothing waits for the events: they are read at the end of a later step.

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._sample: _Sample | None = None  # the step under way
        self._arriving: _Sample | None = None  # the last one, which the device may not have completed
        self._sampled = 0.0  # when the last one began

    def _watch(self) -> None:
        super()._watch()
        for name in [*vars(dist.ProcessGroup)]:
            if name.lstrip("_").startswith(COLLECTIVES):
                self._hooks.wrap(dist.ProcessGroup, name, self._around)
        self._hooks.wrap(torch.cuda.Stream, "wait_event", self._around_stream)

    def detach(self) -> None:
        """See `OwnTime.detach`."""
        super().detach()
        self._sample = self._arriving = None

    def _around_stream(self, original: Any, stream: torch.cuda.Stream, *args: Any, **kwargs: Any) -> Any:
        if self._sample is None or stream != self._sample.stream:
            return original(stream, *args, **kwargs)
        return self._around(original, stream, *args, **kwargs)

    def _end_step(self, now: float) -> None:
        sample, self._sample = self._sample, None
        if sample is not None:
            sample.end, sample.loaded_seconds = self._event(sample.stream), self._loaded
            self._arriving = None if sample.end is None else sample
        arrived = self._arriving
        if arrived is not None and arrived.end is not None and reached(arrived.end):
            seconds = (
                _milliseconds(arrived.begin, arrived.end) - sum(_milliseconds(*one) for one in arrived.waits)
            ) / 1e3
            self._add(seconds, min(arrived.loaded_seconds, seconds))
            self._arriving = None
        if self._arriving is None and now - self._sampled >= SAMPLED_SECONDS:
            stream = torch.cuda.current_stream(self._device)
            if (begin := self._event(stream)) is not None:
                self._sample, self._sampled = _Sample(stream, begin), now

    def _event(self, stream: torch.cuda.Stream) -> torch.cuda.Event | None:
        """An event at this point of the stream; None where another one is current, or captured."""
        if torch.cuda.current_stream(self._device) != stream or captures():
            return None
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call] # torch's stub has no types
        event.record(stream)
        return event

    def _mark(self) -> Any:
        return None if self._sample is None else self._event(self._sample.stream)

    def _end_wait(self) -> None:
        began, sample, self._began = self._began, self._sample, None
        if began is not None and sample is not None and (ended := self._event(sample.stream)) is not None:
            sample.waits.append((began, ended))


def _milliseconds(begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
    return float(begin.elapsed_time(end))
