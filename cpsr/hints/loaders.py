"""Data loaders among the arguments of a call: a loop over one is a pass, which goes on with its next batch.

`ResumableLoader` brings a new iteration there, as in a training, without loading the batches before where that is
exact. The generators of the loader, its samplers and its data set are restored with the global random states.
"""

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from cpsr.errors import NotResumableError
from cpsr.state.data_recognition import recognisable
from cpsr.state.loader import ResumableLoader
from cpsr.state.loader_generators import data_generators, order_generators, restore_states, states_of
from cpsr.state.loader_kinds import is_a, is_plain, length_of, set_epochs, told_epochs
from cpsr.state.small_state import DataPosition

__all__ = ["LoaderArgument", "Pass", "is_loader"]


def is_loader(value: Any) -> bool:
    """Whether it is a data loader of torch or torchdata, or a stream of `recovery.resume`."""
    return isinstance(value, DataLoader | ResumableLoader)


class LoaderArgument:
    """A data loader among the arguments.

    Args:
        given: the loader, or the stream of one.
        name: for messages.

    Raises:
        NotResumableError: its passes could not go on exactly; says why.
    """

    def __init__(self, given: Any, name: str) -> None:
        self.given = given
        self._loader: Any = given.loader if isinstance(given, ResumableLoader) else given
        loader = self._loader
        self._order, self._data = order_generators(loader), data_generators(loader)
        if (obstacle := _obstacle(loader, draws=bool(self._data))) is not None:
            raise NotResumableError(f"{name} is a {type(loader).__qualname__} {obstacle}")

    @property
    def length(self) -> int | None:
        """Batches of a pass; None: not known."""
        return length_of(self._loader)

    def identity(self) -> dict[str, Any]:
        """Plain data that tell it from another one, and its state when the call begins."""
        loader = self._loader
        samplers = [_described(one) for one in (loader.sampler, loader.batch_sampler)]
        known = [self.length, loader.batch_size, loader.drop_last, loader.num_workers, samplers, recognisable(loader)]
        return {"loader": known, "random": self.random_states(), "passed": self.passed()}

    def passed(self) -> dict[str, Any]:
        """Plain data that go on from pass to pass: batches of a stream, and the state of a data set that has one."""
        batches = self.given.position.batches if isinstance(self.given, ResumableLoader) else 0
        return {"batches": batches, "data": self._loader.dataset.state_dict() if _has_state(self._loader) else None}

    def random_states(self) -> dict[str, Any]:
        """States of the generators that its order and its data are drawn from, and the epochs that it was told."""
        states = {"order": states_of(self._order), "data": states_of(self._data)}
        return {**states, "epochs": told_epochs(self._loader)}

    def restore(self, states: dict[str, Any]) -> None:
        """Restore what `random_states` returned."""
        restore_states(self._order, states["order"])
        restore_states(self._data, states["data"])
        set_epochs(self._loader, states["epochs"])

    def begin_pass(self) -> ResumableLoader:
        """A new pass."""
        if isinstance(self.given, ResumableLoader):
            return self.given
        drawn = self._order, self._data
        return ResumableLoader(self._loader, DataPosition(), until_epoch=1, sets_epoch=False, generators=drawn)


class Pass:
    """A loop over a data loader.

    Args:
        source: the argument.
        saved: what `saved` returned, to go on from; None: a new pass.

    Attributes:
        position: batches of the pass that were given.
    """

    def __init__(self, source: LoaderArgument, saved: dict[str, Any] | None = None) -> None:
        self.source, self.length = source.given, source.length
        self.position: int = 0 if saved is None else saved["position"]
        self._stream = source.begin_pass()
        self._goes_on = saved is not None
        if saved is not None:
            self._stream.continue_pass(DataPosition(**saved["stream"]))

    def saved(self) -> dict[str, Any]:
        """Where it is, as plain data and tensors."""
        return {"position": self.position, "stream": self._stream.saved_position().to_tree()}

    def __iter__(self) -> Iterator[Any]:
        batches = self._stream.rest_of_pass() if self._goes_on else iter(self._stream)
        for batch in batches:
            self.position += 1
            yield batch


def _obstacle(loader: Any, *, draws: bool) -> str | None:
    """Why a pass would not go on exactly; None where it does."""
    if not isinstance(loader, DataLoader):
        return "which is none of torch's or torchdata's: give a DataLoader, or a list"
    if loader.persistent_workers:
        return "with persistent_workers, whose random states go on from pass to pass: leave that out"
    if loader.num_workers and not getattr(loader, "in_order", True):
        return "with in_order=False: leave that out"
    if loader.num_workers and draws:
        return "whose workers draw from copies of a generator: draw from torch's, NumPy's or Python's global one there"
    if is_plain(loader) and _has_state(loader):
        return "over a data set that has a state: give torchdata's StatefulDataLoader"
    if not is_plain(loader) and not is_a(loader, "torchdata", "StatefulDataLoader"):
        kind = "an iterable data set" if isinstance(loader.dataset, IterableDataset) else "an iteration of its own"
        return f"with {kind}, whose position is not known: give torchdata's StatefulDataLoader"
    return None


def _has_state(loader: Any) -> bool:
    return hasattr(loader.dataset, "state_dict")


def _described(sampler: Any) -> list[Any]:
    """Its class, and of torch's the settings; another one's numbers may be counts."""
    kind = type(sampler)
    given = {**vars(sampler), "epoch": None} if kind.__module__.startswith("torch.") else {}
    settings = {name: one for name, one in given.items() if type(one) in (bool, int, float)}
    return [f"{kind.__module__}.{kind.__qualname__}", settings]
