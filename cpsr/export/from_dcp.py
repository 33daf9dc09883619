"""Reads a checkpoint of `torch.distributed.checkpoint`, without its own reader, which executes pickles.

Names are those of `torch.distributed.checkpoint.state_dict`: `model.<name>`, `optim.state.<name>.<key>`, and
`optim.param_groups.<name>.<key>` or a list `optim.param_groups`; also `optimizer` in the place of `optim`.
"""

import collections
from collections.abc import Mapping
from pathlib import Path, PosixPath
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata

from cpsr.errors import CheckpointError, UnsupportedEngineError
from cpsr.export.deepspeed_files import split_entry
from cpsr.export.foreign import ForeignParameter, ForeignState
from cpsr.export.foreign_files import ListedUnpickler, loaded
from cpsr.state.codec import same

__all__ = ["SMALL", "read_dcp"]

SMALL = "cpsr"  # key of what the export adds: counters and schedule
_SCHEDULES = ("lr_scheduler", "scheduler")  # where jobs of others keep the schedule
_OPTIMIZERS = ("optim", "optimizer")
_NOT = "Nothing was written"

# Plain descriptions; making them and setting their attributes has no effects. Of `builtins` types alone.
_LISTED: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): lambda name: torch.strided if name == "torch.strided" else None,
    ("pathlib", "PosixPath"): PosixPath,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): filesystem._StorageInfo,
    **{
        ("torch.distributed.checkpoint.metadata", name): getattr(metadata, name)
        for name in (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    },
    **{("torch", str(one).removeprefix("torch.")): one for one in vars(torch).values() if isinstance(one, torch.dtype)},
}


class _Files:
    """The entries of a checkpoint by name; each is read when it is asked for."""

    def __init__(self, source: Path) -> None:
        self._source = source
        path = source / ".metadata"
        try:
            with path.open("rb") as file:
                found = ListedUnpickler(file, path, _LISTED).value()
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read ({error}): it is no whole checkpoint. {_NOT}") from error
        if not isinstance(found, Metadata) or not isinstance(found.storage_data, dict):
            raise CheckpointError(f"{path} is no metadata of a file system's checkpoint. {_NOT}")
        self._storage: dict[MetadataIndex, Any] = found.storage_data
        self.entries = found.state_dict_metadata
        self.paths: dict[str, tuple[Any, ...]] = dict(found.planner_data or {})

    def value(self, name: str) -> Any:
        """A whole tensor, or plain data.

        Raises:
            CheckpointError: a file is absent or damaged, or holds other objects than plain data.
        """
        entry = self.entries[name]
        if isinstance(entry, BytesStorageMetadata):
            return self._part(MetadataIndex(name))
        if not isinstance(entry, TensorStorageMetadata):
            raise CheckpointError(f"{self._source}: {name} is {type(entry).__name__}, which is not known. {_NOT}")
        whole = torch.empty(entry.size, dtype=entry.properties.dtype, device="cpu")
        missing = torch.ones(entry.size, dtype=torch.bool, device="cpu")
        for chunk in entry.chunks:
            part = self._part(MetadataIndex(name, chunk.offsets))
            if not isinstance(part, torch.Tensor) or part.dtype != whole.dtype or part.shape != chunk.sizes:
                raise CheckpointError(f"{self._source}: a part of {name} is not as .metadata describes it. {_NOT}")
            place = tuple(slice(at, at + size) for at, size in zip(chunk.offsets, chunk.sizes, strict=True))
            whole[place], missing[place] = part, False
        if absent := int(missing.sum()):
            raise CheckpointError(f"{self._source}: {absent} elements of {name} are absent. {_NOT}")
        return whole

    def _part(self, index: MetadataIndex) -> Any:
        place = self._storage.get(index)
        if place is None:
            raise CheckpointError(f"{self._source}: .metadata names no file for {index.fqn}. {_NOT}")
        if place.transform_descriptors:
            raise UnsupportedEngineError(f"{self._source}: {index.fqn} was transformed ({place.transform_descriptors})")
        path = self._source / place.relative_path
        if Path(place.relative_path).name != place.relative_path:
            raise CheckpointError(f"{self._source}: .metadata names {place.relative_path!r}, outside of it. {_NOT}")
        try:
            with path.open("rb") as file:
                file.seek(place.offset)
                data = file.read(place.length)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read ({error}). {_NOT}") from error
        return loaded(data, path)


def read_dcp(source: Path) -> ForeignState:
    """The state in a DCP directory; takes host memory for all weights and moments.

    Args:
        source: the directory with `.metadata`.

    Raises:
        CheckpointError: it is not whole, or holds what is neither tensor nor plain data.
        UnsupportedEngineError: its names are not those of `get_state_dict`; the message tells which are expected.
    """
    files = _Files(source)
    tree = _tree(files)
    model = tree.get("model")
    optimizer = next((tree[key] for key in _OPTIMIZERS if key in tree), None)
    if not isinstance(model, dict) or not isinstance(optimizer, dict):
        raise UnsupportedEngineError(
            f"{source} holds {sorted(tree)}; expected are 'model' and 'optim' (or 'optimizer'), with what "
            f"get_model_state_dict and get_optimizer_state_dict returned. {_NOT}"
        )
    state, groups = optimizer.get("state", {}), optimizer.get("param_groups")
    unnamed = sorted(name for name in state if name not in model)
    if unnamed or not state:
        raise UnsupportedEngineError(
            f"{source}: the optimizer's state is of {unnamed[:1] or 'nothing'}, which is no name of the model: save "
            f"what get_optimizer_state_dict returns, not optimizer.state_dict(). {_NOT}"
        )
    parameters = {}
    for name, entry in state.items():
        moments, numbers = split_entry(entry)
        parameters[name] = ForeignParameter(model[name], moments, numbers)
    return ForeignState(
        parameters=parameters,
        outside={name: one for name, one in model.items() if name not in state and isinstance(one, torch.Tensor)},
        **_grouped(source, groups, list(state)),
        **_small(tree, parameters),
    )


def _tree(files: _Files) -> dict[str, Any]:
    """The state dict as it was saved, with model and optimizer by the parameters' own names."""
    found: dict[str, Any] = {}
    for key in files.entries:
        path = list(files.paths.get(key, (key,)))
        head, rest = str(path[0]), path[1:]
        if not rest and "." in head:  # saved flat
            head, _, name = head.partition(".")
            rest = [name]
        if head == "model":
            found.setdefault(head, {})[".".join(map(str, rest))] = files.value(key)
        elif head in _OPTIMIZERS:
            _put(found.setdefault(head, {}), _optimizer_path(".".join(map(str, rest))), files.value(key))
        elif head in (SMALL, *_SCHEDULES):
            _put(found, [head, *rest], files.value(key))
        else:
            found.setdefault(head, None)
    return found


def _optimizer_path(name: str) -> list[str]:
    """`state.<parameter>.<key>`, or `param_groups.<parameter or number>.<key>`, taken apart."""
    kind, _, rest = name.partition(".")
    owner, _, key = rest.rpartition(".")
    return [kind, owner, key] if owner else [part for part in (kind, key) if part]


def _put(tree: dict[str, Any], path: list[Any], value: Any) -> None:
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = value


def _grouped(source: Path, given: Any, names: list[str]) -> dict[str, Any]:
    """`groups` and `group_of` of a `ForeignState`, from a list of groups or from the values of each parameter."""
    if isinstance(given, list):
        given = {str(index): group for index, group in enumerate(given)}
    given = given or {}
    listed = {key: group for key, group in given.items() if "params" in group}
    if listed:
        groups = [{key: value for key, value in group.items() if key != "params"} for group in listed.values()]
        return {
            "groups": groups,
            "group_of": {name: at for at, one in enumerate(listed.values()) for name in one["params"]},
        }
    if absent := [name for name in names if name not in given]:
        raise UnsupportedEngineError(f"{source}: no parameter group has {absent[0]}. {_NOT}")
    groups, group_of = [], {}
    for name in names:
        at = next((index for index, group in enumerate(groups) if same(group, given[name])), len(groups))
        groups += [given[name]] if at == len(groups) else []
        group_of[name] = at
    return {"groups": groups, "group_of": group_of}


def _small(tree: Mapping[str, Any], parameters: Mapping[str, ForeignParameter]) -> dict[str, Any]:
    own = tree.get(SMALL) or {}
    schedule = next(((tree[key],) for key in _SCHEDULES if isinstance(tree.get(key), dict)), ())
    if "schedule" in own:
        schedule = (own["schedule"],)
    steps = [one.numbers["step"] for one in parameters.values() if "step" in one.numbers]
    return {
        "iteration": int(own.get("iteration", max(steps, default=0))),
        "counters": own.get("counters") or {},
        "loss_scale": own.get("loss_scale") or {},
        "grad_scaler": own.get("grad_scaler"),
        "schedule": schedule,
    }
