"""Sampled elements: about a hundred of a rank's weights, read in a few microseconds, and a few of one tensor."""

import struct
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import xxhash

from cpsr.engines.adapter import EngineAdapter
from cpsr.engines.distributed_tensors import is_distributed, local
from cpsr.state.device_values import Arrival
from cpsr.state.shard import Shard, integers_of
from cpsr.state.witness import SAMPLE_BYTES, SampledBytes

__all__ = ["SentSample", "WeightSample", "sampled"]

# In the order of a `SampledBytes`.
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class _Element:
    operator: str
    index: int
    view: torch.Tensor  # `(1,)`
    owner: torch.Tensor  # the tensor of the optimizer in which it lies


@dataclass(frozen=True)
class SentSample:
    """Elements on their way from a device.

    Attributes:
        arrival: of the copy.
        host: their bytes, and then the loss as float32, in pinned memory.
        counts: of the elements.
        has_loss: whether the loss is there.
    """

    arrival: Arrival
    host: torch.Tensor
    counts: tuple[int, int, int, int]
    has_loss: bool

    def read(self) -> tuple[SampledBytes, float | None]:
        """The elements and the loss, once they are here."""
        content = self.host.numpy().tobytes()
        loss = struct.unpack("<f", content[-4:])[0] if self.has_loss else None
        return SampledBytes(content[:-4] if self.has_loss else content, self.counts), loss


class WeightSample:
    """Always the same elements: spread over all operators, and over the elements of each.

    Where there are fewer operators than elements, every operator has at least one. Weights that are no real floating
    numbers are left out, and so are those that no parameter of an optimizer contains.

    Args:
        adapter: the engine.
        shard: its views now.
    """

    def __init__(self, adapter: EngineAdapter, shard: Shard) -> None:
        self._adapter = adapter
        self._build(shard)
        places = ",".join(f"{one.operator}:{one.index}:{one.view.dtype}" for one in self._elements)
        self.layout = xxhash.xxh3_64_intdigest(places.encode())

    @property
    def device(self) -> torch.device | None:
        """Where the elements lie; None if there is none."""
        return self._elements[0].view.device if self._elements else None

    def name(self, index: int) -> str:
        """Where an element lies, for people."""
        return f"{self._elements[index].operator}[{self._elements[index].index}]"

    def read(self) -> SampledBytes:
        """The elements now, after this step; of weights on the host."""
        self._renew()
        return SampledBytes(b"".join(self._buffers), self._counts)

    def send(self, loss: torch.Tensor | None, *, weights: bool = True) -> SentSample:
        """Enqueue a copy of the elements and the loss on the current stream; returns at once.

        Args:
            loss: of the step; None: there is none.
            weights: whether the elements are copied; one of the two is.
        """
        if weights:
            self._renew()
        with torch.no_grad():
            parts = [torch.cat(views) for views in self._by_dtype] if weights else []
            if loss is not None:
                parts.append(loss.float().reshape(1))
            packed = torch.cat([part.view(torch.uint8) for part in parts])
            host = torch.empty(packed.shape, dtype=torch.uint8, device="cpu", pin_memory=True)
            host.copy_(packed, non_blocking=True)
            arrival = Arrival(packed.device)
        return SentSample(arrival, host, self._counts if weights else (0, 0, 0, 0), loss is not None)

    def _renew(self) -> None:
        """Look where the weights lie now: a loop may give a parameter other memory, once or in every step."""
        if any((local(one) if split else one).data_ptr() != address for one, address, split in self._owners):
            self._build(self._adapter.shard())

    def _build(self, shard: Shard) -> None:
        elements = list(_chosen(self._adapter, shard))
        elements.sort(key=lambda one: _DTYPES.index(one.view.dtype))  # stable
        self._elements = elements
        found = {id(one.owner): one.owner for one in elements}.values()
        self._owners = [(one, local(one).data_ptr(), is_distributed(one)) for one in found]
        views = {dtype: [one.view for one in elements if one.view.dtype == dtype] for dtype in _DTYPES}
        doubles, floats, bfloats, halves = (len(views[dtype]) for dtype in _DTYPES)
        self._counts = doubles, floats, bfloats, halves
        self._by_dtype = [same for same in views.values() if same]
        on_host = self.device is not None and self.device.type == "cpu"
        self._buffers = [integers_of(one.view).numpy().data for one in elements] if on_host else []


def sampled(tensor: torch.Tensor, count: int) -> torch.Tensor:
    """So many elements of one tensor at most, evenly spread over it; a view, if the tensor is contiguous."""
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, -(-flat.numel() // count))]


def _chosen(adapter: EngineAdapter, shard: Shard) -> Iterator[_Element]:
    """The sampled elements, in the order of the operators' names."""
    owners = sorted(
        ((local(one).data_ptr(), id(one), one) for each in adapter.optimizers for one in _parameters(each)),
        key=lambda place: place[:2],
    )
    begins = [begin for begin, _, _ in owners]
    found = []
    for name in sorted(shard.operators):
        values = shard.operators[name].parameter.values
        place = bisect_right(begins, values.data_ptr()) - 1
        if values.dtype not in _DTYPES or not values.numel() or place < 0:
            continue
        begin, _, owner = owners[place]
        if values.data_ptr() + values.nbytes <= begin + local(owner).nbytes and values.device == owner.device:
            found.append((name, values, owner))
    # One device: of weights that an engine keeps on the host in part, only those on the GPU, whose samples come late.
    on_device = [one for one in found if one[1].is_cuda] or found
    if not on_device:
        return
    room = SAMPLE_BYTES // max(values.element_size() for _, values, _ in on_device)
    count = min(room, SAMPLE_BYTES // 4)
    each = max(1, count // len(on_device))
    for name, values, owner in on_device[:: -(-len(on_device) // count)]:
        size = values.numel()
        begin = xxhash.xxh3_64_intdigest(name.encode()) % size
        for index in dict.fromkeys((begin + turn * size // each) % size for turn in range(each)):
            yield _Element(name, index, values[index : index + 1], owner)


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [one for group in optimizer.param_groups for one in group["params"]]
