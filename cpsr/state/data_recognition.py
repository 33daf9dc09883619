"""Values by which the data of a run are recognised, read from what a data set keeps and not from its rows."""

from collections.abc import Iterable, Mapping, Sized
from itertools import islice
from typing import Any

import numpy
import torch
import xxhash
from torch.utils.data import DataLoader, IterableDataset

from cpsr.state.loader_generators import ITEMS_MAX, objects_in

__all__ = ["difference_of_data", "recognisable"]

_SAMPLED = 16  # values of a sequence
_PARTS_MAX = 8  # sequences of a data set


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
    found = objects_in([("dataset", dataset)], _is_sequence, without=registered)
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


def _is_sequence(one: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.layout == torch.strided and not one.is_complex() and one.device.type != "meta" and one.numel() > 1
    if isinstance(one, numpy.ndarray):
        return one.dtype.kind in "biuf" and one.size > 1
    return isinstance(one, list | tuple) and len(one) > 1


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
    if isinstance(value, list | tuple) and len(value) <= ITEMS_MAX:
        parts = [_plain(one) for one in value]
        return None if None in parts else "\1".join(map(str, parts))
    return None


def _alike(before: Any, now: Any) -> bool:
    """Whether samples are equal; numbers but for what another machine may compute otherwise."""
    if isinstance(before, str) or isinstance(now, str):
        return bool(before == now)
    return len(before) == len(now) and bool(numpy.allclose(before, now, rtol=1e-3, atol=1e-6, equal_nan=True))
