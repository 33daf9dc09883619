"""The state of a loader, or of its dataset, that has `state_dict` and `load_state_dict`.

It is taken between two batches, with every checkpoint. A restart loads the newest one, and skips the batches that came
after it one by one: none after an exact restart. A state that cannot continue a pass exactly is not used.
"""

import copy
import inspect
import logging
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import chain
from typing import Any

from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, SequentialSampler

from cpsr.errors import RecoveryError
from cpsr.state import codec
from cpsr.state.loader_kinds import base_of, has_own_iteration, has_persistent_workers, index_sampler, is_a
from cpsr.state.small_state import DataPosition

__all__ = ["LoaderState", "has_more", "report_once"]

logger = logging.getLogger(__name__)

_OF_DATASET = ("dataset_state", "dataset_iter_state")  # in the state of a StatefulDataLoader
_OF_TORCHDATA = "_iterator_finished"  # in every state of a StatefulDataLoader
_NOTHING = object()


class LoaderState:
    """Takes the state of one loader, and continues from it.

    Args:
        loader: as in `ResumableLoader`.

    Attributes:
        is_torchdata: whether this is torchdata's StatefulDataLoader.
        was_loaded: a state was, and no pass has begun since.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        self._loader = loader
        self._dataset = loader.dataset if isinstance(loader, DataLoader) else loader
        self._torchdata = base_of(loader, "torchdata", "StatefulDataLoader")
        self.is_torchdata = self._torchdata is not None
        self.was_loaded = False
        self._holder = None
        if is_a(self._dataset, "datasets", "IterableDataset"):
            report_once("the state of a Hugging Face dataset leaves out what is in a shuffle buffer.")
            return
        self._holder = _holder(loader)
        if self._holder is not None and (obstacle := self._obstacle()) is not None:
            self._give_up(obstacle)

    @property
    def usable(self) -> bool:
        """Whether the loader has a state that continues a pass exactly."""
        return self._holder is not None

    def capture(self, position: DataPosition, *, between: bool) -> dict[str, Any] | None:
        """The state after the last batch that was yielded, as plain data and tensors; None where there is none.

        Args:
            position: that of the batch.
            between: the pass is over, and the next has not begun.
        """
        streams = isinstance(self._dataset, IterableDataset)
        workers = getattr(self._loader, "num_workers", 0)
        of_one_pass = streams and workers and not has_persistent_workers(self._loader)  # nothing of it goes on
        if self._holder is None or (between and of_one_pass):
            return None
        name = type(self._holder).__name__
        try:
            given, unpacked = self._read()
            codec.encode(given, "state_dict()")
            state = copy.deepcopy(given)  # a dataset may give the very lists that it goes on filling
        except Exception as error:  # the user's; training does not need it
            self._give_up(f"the state of the {name} is not saved ({type(error).__name__}: {error}).")
            logger.debug("state_dict() of the %s failed", name, exc_info=True)
            return None
        if not state:
            return None
        if self.is_torchdata and streams and not _is_of_dataset(state):
            name = type(self._dataset).__name__
            packed = f"the state of the {type(self._loader).__name__} does not show that of the {name}."
            none = f"the {name} has neither state_dict nor load_state_dict."
            self._give_up(packed if _has_state(self._dataset) else none)
            return None
        of_batch = {"batches": position.batches, "epoch": position.epoch, "batch": position.batch}
        return {"state": state, **of_batch, "between": between, "workers": workers, "unpacked": unpacked}

    def continues(self, saved: dict[str, Any] | None, position: DataPosition) -> bool:
        """Whether the loader can be brought to a position from a saved state; False: it is skipped to it."""
        if saved is None or saved["batches"] > position.batches:
            return False
        if self._holder is None:
            report_once(
                f"the checkpoint has a state of the data loader, this {type(self._loader).__name__} takes none."
            )
            return False
        if isinstance(self._loader, DataLoader) and self._loader.num_workers != saved["workers"]:
            if isinstance(self._dataset, IterableDataset):
                raise RecoveryError(
                    f"the data loader has {self._loader.num_workers} workers, and had {saved['workers']} when its "
                    "state was saved: their data cannot be divided anew in the middle of a pass. Nothing was trained, "
                    f"the checkpoint is untouched: start the job with num_workers={saved['workers']}"
                )
            report_once("the data loader has another num_workers than its saved state: that is not used.")
            return False
        return True

    def load(self, saved: dict[str, Any]) -> None:
        """Let the next iteration continue after the batch of the saved state.

        Raises:
            RecoveryError: the loader does not take it.
        """
        assert self._holder is not None
        self.was_loaded = True
        try:
            # A copy: it may be changed in place, and a roll-back needs it once more.
            state = copy.deepcopy(saved["state"])
            if saved.get("unpacked"):
                self._torchdata.load_state_dict(self._loader, state)
            else:
                self._holder.load_state_dict(state)
        except Exception as error:
            raise self._refused(saved, error) from error

    def iterate(self, saved: dict[str, Any]) -> Iterator[Any]:
        """The first iteration after `load`.

        Raises:
            RecoveryError: the loader does not take the state.
        """
        try:
            iterator = iter(self._loader)
            if getattr(self._loader, "num_workers", 0):  # which look at the state when they load the first batch
                iterator = has_more(iterator) or iter(())
        except Exception as error:  # StatefulDataLoader looks at the state here
            raise self._refused(saved, error) from error
        return iterator

    def _read(self) -> tuple[Any, bool]:
        """The state, and whether it is torchdata's own, which a subclass packs: torchtitan's loaders pickle it."""
        assert self._holder is not None
        state = self._holder.state_dict()
        packed = self.is_torchdata and state and not _has_key(state, _OF_TORCHDATA)
        if packed and type(self._loader).__iter__ is self._torchdata.__iter__:
            return self._torchdata.state_dict(self._loader), True
        return state, False

    def _give_up(self, why: str) -> None:
        self._holder = None
        report_once(why)

    def _refused(self, saved: dict[str, Any], error: Exception) -> RecoveryError:
        return RecoveryError(
            f"the {type(self._loader).__name__} does not take the state that it had after batch {saved['batches']} "
            f"({type(error).__name__}: {error}). Nothing was trained, the checkpoint is untouched: give resume() the "
            "loader with the dataset and the settings of the run; or one without load_state_dict, whose batches are "
            "skipped one by one, as torch's DataLoader"
        )

    def _obstacle(self) -> str | None:
        """Why a state would not continue a pass exactly; None where it does."""
        loader = self._loader
        if not isinstance(loader, DataLoader):
            return None
        if loader.num_workers and not getattr(loader, "in_order", True):
            return "with in_order=False the state of a data loader is not that of the batches that it has yielded."
        if isinstance(loader.dataset, IterableDataset) or not self.is_torchdata:
            return None
        return _order_obstacle(loader)


def has_more(iterator: Iterator[Any]) -> Iterator[Any] | None:
    """The same batches, of which the first is fetched; None where there are none."""
    first = next(iterator, _NOTHING)
    return None if first is _NOTHING else chain([first], iterator)


@cache
def report_once(why: str) -> None:
    """Warn that batches will be skipped one by one, and why."""
    logger.warning("%s After a restart its batches are skipped one by one.", why)


def _is_of_dataset(state: dict[str, Any]) -> bool:
    """Whether the state of a StatefulDataLoader has one of the iterable dataset or its iterator.

    Without, torchdata loads all batches again, and counts them twice.
    """
    return any(
        part is not None if name in _OF_DATASET else _is_of_dataset(part)
        for name, part in state.items()
        if name in _OF_DATASET or isinstance(part, dict)
    )


def _has_key(state: Any, name: str) -> bool:
    return isinstance(state, dict) and (name in state or any(_has_key(part, name) for part in state.values()))


def _holder(loader: Iterable[Any]) -> Any:
    """What has the state: the loader, or the dataset of a torch DataLoader that loads in this process."""
    if _has_state(loader):
        return loader
    if not isinstance(loader, DataLoader) or has_own_iteration(loader):
        return None
    if not isinstance(loader.dataset, IterableDataset) or not _has_state(loader.dataset):
        return None
    if loader.num_workers:
        report_once(
            f"the state of the {type(loader.dataset).__name__} cannot be read: its copies are in the workers of a "
            "DataLoader. With num_workers=0, or with torchdata's StatefulDataLoader, a restart would continue at once."
        )
        return None
    return loader.dataset


def _has_state(given: Any) -> bool:
    return all(callable(getattr(given, name, None)) for name in ("state_dict", "load_state_dict"))


def _order_obstacle(loader: DataLoader[Any]) -> str | None:
    """A sampler that StatefulDataLoader would run again, after random numbers that are not those of the first time."""
    index: Any = index_sampler(loader)
    inner = getattr(index, "sampler", index) if _is_of("torchdata", index) else index
    if _has_state(index) or _has_state(inner) or _is_of("torchdata", inner):
        return None
    if isinstance(inner, SequentialSampler | DistributedSampler) and _is_of("torch", inner):
        return None  # in an order of their own
    # torchdata's own batches run the sampler when the state is loaded. Generator functions draw nothing before.
    if inner is not index and inspect.isgeneratorfunction(getattr(type(inner), "__iter__", None)):
        return None
    return (
        f"the state of the {type(loader).__name__} may not hold the order of the {type(inner).__name__}. To continue "
        "at once, give the sampler state_dict and load_state_dict, or use one of torch's."
    )


def _is_of(package: str, given: Any) -> bool:
    """Whether its iteration is written in this package."""
    return str(getattr(getattr(type(given), "__iter__", None), "__module__", "")).split(".")[0] == package
