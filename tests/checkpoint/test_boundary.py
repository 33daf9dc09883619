"""What loops change between steps: buffers as they were at the last boundary, and weights while they are copied."""

import threading
from collections.abc import Callable
from contextlib import suppress

import pytest
import torch

from cpsr.checkpoint.boundary import SMALL_BYTES, BoundaryBuffers, WriteWatch
from cpsr.errors import SaveError
from cpsr.state.shard import OperatorState, ParamSlice, Shard
from tests.device import DEVICE, ON_CUDA, cpu_only

LARGE = SMALL_BYTES // 4 + 1  # elements of float32


def written(buffer: torch.Tensor, value: float, how: str) -> None:
    """A forward writes into a buffer."""
    if how == "counted":
        buffer.fill_(value)
    else:  # as vector quantizers update their codebooks
        buffer.data.fill_(value)


@pytest.mark.parametrize("how", ["counted", "through .data"])
@pytest.mark.parametrize("size", [3, LARGE])
@pytest.mark.parametrize("first", [1, 3, 4, 5])
def test_what_steps_write_is_that_of_the_boundary_or_is_not_known(size: int, how: str, first: int) -> None:
    """From that step on; each is interrupted once."""
    if ON_CUDA and size == LARGE and how == "through .data" and first in (3, 5):
        pytest.skip("of a device that may hang nothing is read: it is looked for at the steps 1, 2, 4, 8")
    codebook = torch.full((size,), float("nan"), device=DEVICE)
    buffers = BoundaryBuffers({"codebook": codebook})
    buffers.keep()
    known = []
    for step in range(2, 20):
        if step >= first:
            written(codebook, step, how)
        buffers.keep()
        expected = codebook.clone()
        if step >= first:
            written(codebook, -1, how)
        with suppress(SaveError):
            found = buffers.at_boundary({"codebook": codebook})["codebook"]
            assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))
            known.append(step)
        codebook.data.copy_(expected)
    assert len(known) >= 17, "it is refused once at most: from then on it is copied at every boundary"


@pytest.mark.parametrize("how", ["counted", "through .data"])
def test_what_is_watched_is_that_of_the_boundary(how: str) -> None:
    base = torch.zeros(LARGE, device=DEVICE)
    buffers = BoundaryBuffers({})
    buffers.watch({"base": base})
    for _ in range(4):
        written(base, 1, how)
        buffers.keep()
        expected = base.clone()
    written(base, 1, how)
    assert torch.equal(buffers.at_boundary({"base": base})["base"], expected)


@cpu_only("of a device that may hang nothing is read")
def test_a_value_that_was_overwritten_uncounted_is_not_guessed() -> None:
    mask = torch.zeros(LARGE)
    buffers = BoundaryBuffers({"mask": mask})
    buffers.keep()
    assert buffers.at_boundary({"mask": mask})["mask"] is mask
    written(mask, 1, "through .data")
    with pytest.raises(SaveError, match=r"the buffer 'mask' was written to where torch does not count it"):
        buffers.at_boundary({"mask": mask})


@pytest.mark.parametrize("size", [3, LARGE])
def test_a_buffer_whose_memory_was_exchanged_is_refused(size: int) -> None:
    """The tensor is the same, and its copies are of what it was."""
    mean = torch.zeros(size, device=DEVICE)
    buffers = BoundaryBuffers({"mean": mean})
    mean.data = torch.ones(size, device=DEVICE)
    buffers.keep()
    with pytest.raises(SaveError, match="the buffer 'mean' was replaced since the start of this life"):
        buffers.at_boundary({"mean": mean})


def disturbed_watch(**take_backs: Callable[[], None]) -> WriteWatch:
    """A watch of weights that the loop has changed while these copies were under way."""
    weights, watch = torch.zeros(8), WriteWatch()
    shard = Shard({"w": OperatorState("w", ParamSlice(weights, (8,)), {}, 0)})
    for name, take_back in take_backs.items():
        watch.begin(name, shard, thorough=True, on_change=take_back)
    weights.add_(1)
    return watch


def test_who_hears_of_a_change_finds_the_copies_taken_back_whoever_has_seen_it_first() -> None:
    """As a dump does while the training thread takes them back."""
    begun, go, taken_back = threading.Event(), threading.Event(), threading.Event()

    def slow() -> None:
        begun.set()
        assert go.wait(30)
        taken_back.set()

    watch = disturbed_watch(snapshot=slow)
    training = threading.Thread(target=watch.look)
    training.start()
    assert begun.wait(30)
    threading.Timer(0.05, go.set).start()
    assert watch.look(forward=False)
    assert taken_back.is_set()
    training.join()


def test_a_signal_handler_may_look_while_its_thread_takes_back() -> None:
    taken_back: list[bool] = []

    def interrupted() -> None:
        taken_back.append(True)
        if len(taken_back) == 1:
            assert watch.look(forward=False)

    watch = disturbed_watch(snapshot=interrupted)
    assert watch.look()
    assert len(taken_back) == 2


def test_a_copy_that_cannot_be_taken_back_keeps_no_other_from_it() -> None:
    taken_back: list[str] = []

    def fails() -> None:
        raise OSError("an unseal failed")

    watch = disturbed_watch(
        snapshot=lambda: taken_back.append("snapshot"), broken=fails, window=lambda: taken_back.append("window")
    )
    with pytest.raises(OSError, match="an unseal failed"):
        watch.look()
    assert sorted(taken_back) == ["snapshot", "window"]
