"""What a loader is made of: its length, samplers and generators, and values by which its data are recognised."""

import random
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from functools import partial
from itertools import islice
from typing import Any, TypeGuard

import numpy
import torch
import xxhash
from torch.utils.data import DataLoader, IterableDataset, Sampler

from cpsr.state.user_objects import Stateful, stateful

__all__ = [
    "Calls",
    "data_generators",
    "difference_of_data",
    "has_own_iteration",
    "has_persistent_workers",
    "index_sampler",
    "is_a",
    "is_plain",
    "is_repeating",
    "iterable_of",
    "length_of",
    "order_generators",
    "rebuilt",
    "recognisable",
    "with_epochs",
    "without_state",
]

_DEPTH_MAX = 5
_OBJECTS_MAX = 2000
_ITEMS_MAX = 64  # of a container, that are looked into
_SAMPLED = 16  # values of a sequence
_PARTS_MAX = 8  # sequences of a data set
_GENERATORS = (torch.Generator, numpy.random.Generator, numpy.random.RandomState, random.Random)
_CLOSED: tuple[type[Any], ...] = (types.ModuleType, type, str, bytes, int, float, complex)
_CLOSED += (torch.nn.Module, torch.optim.Optimizer, torch.Tensor, numpy.ndarray)
_OURS = ("cpsr.recovery", "cpsr.life", "cpsr.engines")


class Calls(Iterable[Any]):
    """Batches that a function draws, one at each call: it has no position but the random states."""

    def __init__(self, draw: Callable[[], Any]) -> None:
        self.draw = draw

    def __iter__(self) -> Iterator[Any]:
        while True:
            try:
                batch = self.draw()
            except StopIteration:
                return
            yield batch


def iterable_of(loader: Iterable[Any] | Callable[[], Any]) -> Iterable[Any]:
    """The loader itself; for a function, also inside `iter(function, None)`, the batches that it draws."""
    if isinstance(loader, type(iter(int, 1))):
        return Calls(loader.__next__)
    if isinstance(loader, Iterable) or hasattr(loader, "__getitem__") or not callable(loader):
        return loader  # type: ignore[return-value]  # a sequence iterates by its indices
    return Calls(loader)


def is_repeating(loader: Any) -> bool:
    """Whether this is DeepSpeed's RepeatingLoader, which hides the end of a pass."""
    return type(loader).__name__ == "RepeatingLoader" and hasattr(loader, "loader")


def is_a(given: Any, package: str, name: str) -> bool:
    """Whether its class is, or comes from, that of another package or module, which is not imported here."""
    return any(
        base.__name__ == name and f"{base.__module__}.".startswith(f"{package}.") for base in type(given).__mro__
    )


def has_persistent_workers(loader: Any) -> bool:
    """Whether its workers go on with the next pass."""
    return isinstance(loader, DataLoader) and loader.persistent_workers


def length_of(loader: Iterable[Any]) -> int | None:
    """Batches in a pass; None where only the loader itself finds out."""
    if isinstance(loader, DataLoader) and isinstance(loader.dataset, IterableDataset):
        return None  # its len() is only a guess
    return len(loader) if isinstance(loader, Sized) else None


def is_plain(loader: Iterable[Any]) -> TypeGuard[DataLoader[Any]]:
    """Whether this is a map-style DataLoader with torch's own iteration: its sampler alone decides the order."""
    return (
        isinstance(loader, DataLoader)
        and not has_own_iteration(loader)
        and not isinstance(loader.dataset, IterableDataset)
    )


def has_own_iteration(loader: DataLoader[Any]) -> bool:
    """Whether this subclass of DataLoader iterates in a way of its own."""
    return type(loader).__iter__ is not DataLoader.__iter__


def index_sampler(loader: DataLoader[Any]) -> Iterable[Any]:
    """What deals the indices of each batch."""
    return loader.sampler if loader.batch_sampler is None else loader.batch_sampler


def rebuilt(loader: DataLoader[Any], dealer: Any) -> DataLoader[Any]:
    """A loader of torch's with the parts of another one, whose indices of each batch `dealer` gives."""
    sampling: dict[str, Any] = (
        {"sampler": dealer, "batch_size": None} if loader.batch_sampler is None else {"batch_sampler": dealer}
    )
    return DataLoader(
        loader.dataset,
        **sampling,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
        in_order=getattr(loader, "in_order", True),
    )


def with_epochs(loader: Iterable[Any]) -> list[Any]:
    """The samplers and the data set that have `set_epoch`."""
    dataset = [loader.dataset] if isinstance(loader, DataLoader) else []
    return [one for one in (*_samplers_of(loader), *dataset) if callable(getattr(one, "set_epoch", None))]


def _samplers_of(loader: Iterable[Any]) -> list[Any]:
    """What decides the order of a loader; the loader itself where it is no DataLoader."""
    if not isinstance(loader, DataLoader):
        return [loader]
    inner = getattr(loader.batch_sampler, "sampler", None)
    return [item for item in (loader.sampler, loader.batch_sampler, inner) if item is not None]


# Generators and data in attributes, containers and closures


class _Counts:
    """Numbers that a sampler of the user changes in its attributes, as its passes; the others are settings.

    Also of one that has a state: that may be of a place within a pass, and these are those of its beginning.

    Args:
        sampler: has them.
        in_state: whether a state of the loader holds them.
    """

    def __init__(self, sampler: Any, *, in_state: bool) -> None:
        self._sampler, self._begun = sampler, self._numbers(sampler)
        self.in_state = in_state

    @staticmethod
    def _numbers(sampler: Any) -> dict[str, Any]:
        told = "epoch" if hasattr(sampler, "set_epoch") else None
        return {name: one for name, one in vars(sampler).items() if type(one) in (bool, int, float) and name != told}

    def state_dict(self) -> dict[str, Any]:
        return {name: one for name, one in self._numbers(self._sampler).items() if self._begun.get(name) != one}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self._sampler).update(self._begun | state)


def _counts(loader: Iterable[Any]) -> Iterator[tuple[str, Stateful]]:
    roots = [] if isinstance(loader, Calls) else _samplers_of(loader)
    dataset = [loader.dataset] if isinstance(loader, DataLoader) else []

    def is_wanted(one: Any) -> bool:
        own = str(type(one).__module__).split(".")[0] not in ("builtins", "torch", "torchdata", "accelerate", "cpsr")
        deals = isinstance(one, Sampler) or any(one is root for root in roots)
        return own and deals and hasattr(one, "__dict__")

    for name, one in _found([(type(root).__name__, root) for root in roots], is_wanted, without=dataset):
        in_state = hasattr(one, "state_dict") and any(one is root for root in roots)
        yield f"numbers of {name}", _Counts(one, in_state=in_state)


def order_generators(loader: Iterable[Any]) -> dict[str, Stateful]:
    """Generators that a pass draws its order from, by their place: those of the loader and its samplers.

    Also the counts of samplers, which are as much a part of what decides the order.
    """
    of_data = {id(one) for _, one in _found(_data_roots(loader), _is_generator)}
    roots: list[tuple[str, Any]] = []
    if not isinstance(loader, Calls):
        own = getattr(loader, "generator", None)
        roots = [("generator", own)] + [(type(one).__name__, one) for one in _samplers_of(loader)]
    drawn = {name: stateful(name, one) for name, one in _found(roots, _is_generator) if id(one) not in of_data}
    return drawn | dict(_counts(loader))


def without_state(drawn: dict[str, Stateful]) -> dict[str, Stateful]:
    """Those of `order_generators` that no state of a loader holds."""
    return {name: one for name, one in drawn.items() if not (isinstance(one, _Counts) and one.in_state)}


def data_generators(loader: Iterable[Any]) -> dict[str, Stateful]:
    """Generators that are drawn from when a batch is loaded: those of the data set, of collate_fn, of a function."""
    return {name: stateful(name, one) for name, one in _found(_data_roots(loader), _is_generator)}


def recognisable(loader: Iterable[Any], registered: Iterable[Any] = ()) -> dict[str, Any] | None:
    """The number of rows of a map-style data set, and a few values of the sequences that it keeps, as plain data.

    No row is read, and no code of the data set is called but its `__len__`.

    Args:
        loader: any; None is returned where it is no `DataLoader` over a map-style data set.
        registered: objects whose state a restart restores.
    """
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return None
    dataset: Any = loader.dataset
    found = _found([("dataset", dataset)], _is_sequence, without=registered)
    parts = ((name, sampled) for name, one in found if (sampled := _sampled(one)) is not None)
    rows = len(dataset) if isinstance(dataset, Sized) else None
    return {"rows": rows, "parts": dict(islice(parts, _PARTS_MAX))}


def difference_of_data(before: Mapping[str, Any] | None, now: Mapping[str, Any] | None) -> str | None:
    """How the data of a run differ from those that it began its pass with, for people; None: in nothing known."""
    if before is None or now is None:
        return None
    if None not in (before["rows"], now["rows"]) and before["rows"] != now["rows"]:
        return f"the data set has {now['rows']} rows, and had {before['rows']}"
    for name, values in now["parts"].items():
        if name in before["parts"] and not _alike(before["parts"][name], values):
            return f"{name} has other values than before, or the same in another order"
    return None


def _data_roots(loader: Iterable[Any]) -> list[tuple[str, Any]]:
    if isinstance(loader, Calls):
        return [("function", loader.draw)]
    if isinstance(loader, DataLoader):
        return [("dataset", loader.dataset), ("collate_fn", loader.collate_fn)]
    return []


def _is_generator(one: Any) -> bool:
    shared = random._inst, numpy.random.mtrand._rand, torch.default_generator
    return isinstance(one, _GENERATORS) and all(one is not other for other in shared)


def _is_sequence(one: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.layout == torch.strided and not one.is_complex() and one.device.type != "meta" and one.numel() > 1
    if isinstance(one, numpy.ndarray):
        return one.dtype.kind in "biuf" and one.size > 1
    return isinstance(one, list | tuple) and len(one) > 1


def _found(
    roots: Iterable[tuple[str, Any]], wanted: Callable[[Any], bool], without: Iterable[Any] = ()
) -> Iterator[tuple[str, Any]]:
    """Objects in attributes and containers, nearest first, each once."""
    kept = list(without)  # alive: ids stay their own
    seen, layer, left = {id(one) for one in kept}, list(roots), _OBJECTS_MAX
    for _ in range(_DEPTH_MAX):
        following: list[tuple[str, Any]] = []
        for name, one in layer:
            if id(one) in seen or one is None or left <= 0:
                continue
            seen.add(id(one))
            kept.append(one)
            left -= 1
            if wanted(one):
                yield name, one
            if not isinstance(one, (*_CLOSED, *_GENERATORS)) and not type(one).__module__.startswith(_OURS):
                following += _inside(name, one)
        layer = following


def _inside(name: str, one: Any) -> list[tuple[str, Any]]:
    if isinstance(one, dict):
        return [(f"{name}[{key!r}]", value) for key, value in list(one.items())[:_ITEMS_MAX]]
    if isinstance(one, list | tuple):
        return [(f"{name}[{index}]", value) for index, value in enumerate(one[:_ITEMS_MAX])]
    if isinstance(one, types.MethodType):
        return [(name, one.__self__), (name, one.__func__)]
    if isinstance(one, partial):
        return [(name, one.func), (name, one.args), (name, one.keywords)]
    if isinstance(one, types.FunctionType):
        named = {key: one.__globals__[key] for key in one.__code__.co_names if key in one.__globals__}
        cells = zip(one.__code__.co_freevars, one.__closure__ or (), strict=True)
        return [*named.items(), *((key, cell.cell_contents) for key, cell in cells if cell != types.CellType())]
    return [(f"{name}.{key}", value) for key, value in getattr(one, "__dict__", {}).items()]


def _sampled(one: Any) -> list[float] | str | None:
    """Values of a few places, spread over the sequence; None where they cannot be told."""
    if isinstance(one, torch.Tensor | numpy.ndarray):
        size = one.numel() if isinstance(one, torch.Tensor) else one.size
        places = torch.linspace(0, size - 1, _SAMPLED, dtype=torch.float64).long()
        if isinstance(one, torch.Tensor):
            flat = one.detach().reshape(-1) if one.is_contiguous() else None
            return None if flat is None else flat[places.to(flat.device)].double().cpu().tolist()
        flat_values = one.reshape(-1) if one.flags.c_contiguous else None
        return None if flat_values is None else flat_values[places.numpy()].astype(float).tolist()
    step = (len(one) - 1) / (_SAMPLED - 1)
    plain = [_plain(one[round(place * step)]) for place in range(_SAMPLED)]
    return None if None in plain else xxhash.xxh3_64_hexdigest("\0".join(map(str, plain)).encode())


def _plain(value: Any) -> str | None:
    """A value that is the same in every process; of a path its last part."""
    if isinstance(value, str):
        return value.rsplit("/", 1)[-1]
    if isinstance(value, bool | int | float):
        return repr(value)
    if isinstance(value, list | tuple) and len(value) <= _ITEMS_MAX:
        parts = [_plain(one) for one in value]
        return None if None in parts else "\1".join(map(str, parts))
    return None


def _alike(before: Any, now: Any) -> bool:
    """Whether samples are equal; numbers but for what another machine may compute otherwise."""
    if isinstance(before, str) or isinstance(now, str):
        return bool(before == now)
    return len(before) == len(now) and bool(numpy.allclose(before, now, rtol=1e-3, atol=1e-6, equal_nan=True))
