"""What kind of loader it is, and what it is made of: its length and its samplers."""

from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Any, TypeGuard

from torch.utils.data import DataLoader, IterableDataset

__all__ = [
    "Calls",
    "base_of",
    "dealer_of",
    "has_own_iteration",
    "has_persistent_workers",
    "index_sampler",
    "is_a",
    "is_plain",
    "is_repeating",
    "iterable_of",
    "length_of",
    "place_inside",
    "rebuilt",
    "samplers_of",
    "set_epochs",
    "told_epochs",
    "with_epochs",
]


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
    return base_of(given, package, name) is not None


def base_of(given: Any, package: str, name: str) -> Any:
    """That class of another package or module, which its class is or comes from; None where it does not."""
    named = (base for base in type(given).__mro__ if base.__name__ == name)
    return next((base for base in named if f"{base.__module__}.".startswith(f"{package}.")), None)


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
    return [one for one in (*samplers_of(loader), *dataset) if callable(getattr(one, "set_epoch", None))]


def told_epochs(loader: Iterable[Any]) -> list[int]:
    """The epochs last set with `set_epoch`, of those that expose them."""
    return [one.epoch for one in with_epochs(loader) if _tells_epoch(one)]


def set_epochs(loader: Iterable[Any], epochs: Iterable[int]) -> None:
    """Set what `told_epochs` returned."""
    for one, epoch in zip(filter(_tells_epoch, with_epochs(loader)), epochs, strict=False):
        if one.epoch != epoch:
            one.set_epoch(epoch)


def _tells_epoch(one: Any) -> bool:
    return isinstance(getattr(one, "epoch", None), int)


def samplers_of(loader: Iterable[Any]) -> list[Any]:
    """What decides the order of a loader; the loader itself where it is no DataLoader."""
    if not isinstance(loader, DataLoader):
        return [loader]
    inner = getattr(loader.batch_sampler, "sampler", None)
    return [item for item in (loader.sampler, loader.batch_sampler, inner) if item is not None]


def place_inside(loader: Any) -> str | None:
    """The attribute in which a loader keeps the DataLoader of torch's that it iterates over; None: it keeps none.

    It has a batch for each of that one, and no state of its own.
    """
    if isinstance(loader, DataLoader | Iterator) or is_repeating(loader) or hasattr(loader, "state_dict"):
        return None
    found = [name for name, one in getattr(loader, "__dict__", {}).items() if isinstance(one, DataLoader)]
    if len(found) != 1 or not isinstance(loader, Iterable) or not isinstance(loader, Sized):
        return None
    inside = vars(loader)[found[0]]
    return found[0] if is_plain(inside) and len(loader) == len(inside) else None


def dealer_of(loader: Any) -> Any:
    """What deals the batches: the DataLoader inside of a loader around one, else the loader itself."""
    place = place_inside(loader)
    return loader if place is None else vars(loader)[place]
