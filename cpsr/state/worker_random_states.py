"""Random states of a data loader's workers, at the batch that the loop has come to.

Workers load ahead. After each batch a worker notes its states in memory that it shares with its rank, which reads them
when a checkpoint begins. The batches of a map-style loader go to the workers in turn: a restart skips whole rounds,
gives the workers their states of that round, and loads the few batches after it once more. Workers of torchdata's
StatefulDataLoader send their states with those of the dataset.
"""

import random
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import numpy
import torch
from torch.utils.data import DataLoader, get_worker_info
from torch.utils.data._utils import fetch

from cpsr.state.loader_parts import is_hugging_face

__all__ = ["Follower", "InTurn", "WithState", "followed", "requested_follower"]

_PYTHON = struct.Struct("<625I?d")
_NUMPY = struct.Struct("<iid")
_NUMPY_WORDS_BYTES = 624 * 4
_TORCH_BYTES = torch.get_rng_state().numel()
STATE_BYTES = _PYTHON.size + 1 + _NUMPY.size + _NUMPY_WORDS_BYTES + _TORCH_BYTES
# Than a worker loads ahead: the round of the last batch, the next one, one being written, and those drawn ahead.
_MORE_SLOTS = 3 + 8

# What a worker of torchdata sends as the state of its dataset.
_DATASET, _RANDOM = "dataset", "cpsr_random_states"


class Follower(Protocol):
    """Keeps the random states of workers; each worker has a copy."""

    def follow(self, worker: int) -> None:
        """Begin, in a worker, before it loads anything."""


_requested: ContextVar[Follower | None] = ContextVar("_requested", default=None)


@contextmanager
def followed(follower: Follower | None) -> Iterator[None]:
    """Inside, `follower` is for the workers that start (see `cpsr.state.loader_workers`)."""
    token = _requested.set(follower)
    try:
        yield
    finally:
        _requested.reset(token)


def requested_follower() -> Follower | None:
    """The follower for workers that start now; None: their random states are not kept."""
    return _requested.get()


def pack() -> bytes:
    """This process's random states of Python, NumPy and torch on the CPU, in `STATE_BYTES` bytes."""
    _, words, gauss = random.getstate()
    drawn: Any = numpy.random.get_state()
    ours = isinstance(drawn, tuple) and drawn[0] == "MT19937"  # not if the user has set another bit generator
    return b"".join(
        (
            _PYTHON.pack(*words, gauss is not None, gauss or 0.0),
            bytes([ours]),
            _NUMPY.pack(*drawn[2:]) if ours else bytes(_NUMPY.size),
            drawn[1].tobytes() if ours else bytes(_NUMPY_WORDS_BYTES),
            torch.get_rng_state().numpy().tobytes(),
        )
    )


def unpack(packed: bytes) -> None:
    """Restore what `pack` returned."""
    *words, has_gauss, gauss = _PYTHON.unpack_from(packed)
    random.setstate((3, tuple(words), gauss if has_gauss else None))
    at = _PYTHON.size
    if packed[at]:
        keys = numpy.frombuffer(packed, numpy.uint32, 624, at + 1 + _NUMPY.size)
        numpy.random.set_state(("MT19937", keys, *_NUMPY.unpack_from(packed, at + 1)))
    torch.set_rng_state(torch.frombuffer(bytearray(packed[-_TORCH_BYTES:]), dtype=torch.uint8))


class InTurn:
    """The random states of workers that take the batches of a pass in turn: those of a map-style loader.

    Args:
        loader: has workers.
        first: batches of the pass that its first iteration leaves out.
        resumed: what the workers begin with, one row of `STATE_BYTES` bytes for each; None: with what their seeds give.
    """

    def __init__(self, loader: DataLoader[Any], first: int, resumed: torch.Tensor | None) -> None:
        self._workers = loader.num_workers
        self._first = first
        self._resumed = resumed  # at the beginning of the pass
        self._ended = False
        slots = (loader.prefetch_factor or 0) + _MORE_SLOTS
        self._noted = torch.zeros((self._workers, slots, STATE_BYTES), dtype=torch.uint8)
        self._noted.share_memory_()  # type: ignore[no-untyped-call]  # untyped in torch

    def at(self, batch: int) -> dict[str, Any]:
        """The states at the beginning of the round of this batch, the last that was yielded.

        Args:
            batch: batches of the pass, with those left out.

        Returns:
            The batches of the pass at that beginning, the number of workers, and the states; None: those of the seeds.
        """
        rounds = (batch - self._first) // self._workers
        states = self._noted[:, rounds % self._noted.shape[1]].clone() if rounds else self._resumed
        return {"batch": self._first + rounds * self._workers, "workers": self._workers, "states": states}

    def at_end(self, batch: int) -> torch.Tensor:
        """The states after a whole pass of so many batches."""
        dealt, slots = batch - self._first, self._noted.shape[1]
        loaded = [(dealt + self._workers - 1 - worker) // self._workers for worker in range(self._workers)]
        return torch.stack([self._noted[worker, count % slots] for worker, count in enumerate(loaded)])

    def end_pass(self, batch: int) -> None:
        """A whole pass of so many batches is over."""
        self._resumed, self._ended = self.at_end(batch), True

    def begin_pass(self) -> None:
        """The same workers, which are persistent, begin a further pass."""
        if not self._ended:  # the loop left the pass early, and they have loaded ahead
            self._resumed = None
        self._first, self._ended = 0, False

    @property
    def between(self) -> torch.Tensor | None:
        """The states between two passes; None: they are not known."""
        return self._resumed if self._ended else None

    def follow(self, worker: int) -> None:
        """Begin with the resumed states, and note them after every batch that this worker loads."""
        slots = self._noted[worker].numpy()
        resumed = [] if self._resumed is None else [self._resumed[worker].numpy().tobytes()]
        kind: Any = fetch._MapDatasetFetcher
        begin, load, loaded = kind.__init__, kind.fetch, 0

        def note(fetcher: Any) -> None:
            nonlocal loaded
            if fetcher.dataset is not _dataset():  # that of a loader inside the dataset
                return
            loaded += 1
            slots[loaded % len(slots)] = numpy.frombuffer(pack(), numpy.uint8)

        def begin_pass(fetcher: Any, *given: Any, **named: Any) -> None:
            nonlocal loaded
            begin(fetcher, *given, **named)
            if fetcher.dataset is _dataset():
                loaded = 0
                if resumed:
                    unpack(resumed.pop())

        def load_batch(fetcher: Any, index: Any) -> Any:
            try:
                return load(fetcher, index)
            finally:  # a loop may catch the error, and go on without the batch
                note(fetcher)

        kind.__init__, kind.fetch = begin_pass, load_batch


class WithState:
    """Random states of torchdata's workers, which go to the rank and come back with the state of the dataset.

    This relies on torchdata 0.8 to 0.11: a worker makes its state with `_make_state_dict`, for the first time when a
    state has been loaded and nothing has been fetched, and again when a pass begins; it loads the state of its dataset
    with `try_to_deserialize`.
    """

    def follow(self, worker: int) -> None:
        """Add the random states to this worker's state."""
        module: Any = sys.modules.get("torchdata.stateful_dataloader.worker")
        if module is None:  # the loader that has a state starts these workers for something else
            return
        make, load = module._make_state_dict, module.try_to_deserialize
        loaded: list[dict[str, Any]] = []
        current: Any = None

        def make_state(worker: int, kind: int, fetcher: Any, dataset: Any) -> dict[str, Any]:
            nonlocal current
            begins, current = fetcher is not current, fetcher
            given = loaded.pop() if loaded else {}
            if given:
                unpack(given[_RANDOM])
            state: dict[str, Any] = make(worker, kind, fetcher, dataset)
            own, fetched = state["dataset_state"], state["fetcher_state"]
            if begins and is_hugging_face(dataset):  # it has no state of this pass yet
                own = given.get(_DATASET)
                if not given:
                    dataset.load_state_dict({})  # or every pass begins where the loaded state is
            elif fetched is not None and own is None and fetched["dataset_iter_state"] is None:
                return state  # torchdata loads all batches again, from the seeds on
            return {**state, "dataset_state": {_DATASET: own, _RANDOM: pack()}}

        def load_state(given: Any, state: Any) -> Any:
            if isinstance(state, dict) and _RANDOM in state:
                loaded.append(state)
                state = state[_DATASET]
            return given if state is None else load(given, state)

        module._make_state_dict, module.try_to_deserialize = make_state, load_state


def _dataset() -> Any:
    info = get_worker_info()
    return None if info is None else info.dataset
