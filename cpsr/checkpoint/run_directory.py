"""The identity of a run directory: which model and which ranks it belongs to, and how its last life ended."""

import errno
import hashlib
import json
import logging
import shlex
import uuid
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from cpsr.checkpoint.catalogue import scan
from cpsr.checkpoint.files import make_directory, write_bytes
from cpsr.config import ElasticConfig
from cpsr.errors import ConfigError, CPSRError, RunDirectoryError, RunMismatchError
from cpsr.ranks.group import Group, this_node

__all__ = ["RunDirectory", "checkpoint_bytes", "open_run", "run_id"]

logger = logging.getLogger(__name__)

# Errors of a wrong path or owner; any other error may be temporary.
_WRONG_PATH = frozenset([errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG])
IDENTITY = "run.json"
_PIPELINE = "PipelineEngine"
ENDED = "ended.json"
_REFUSALS = (RunMismatchError, ConfigError, RunDirectoryError)  # by rank 0, which broadcasts their names
_FROM_A_COPY = "put it back from a copy, or use another run_dir"


@dataclass(frozen=True)
class RunDirectory:
    """A run directory that this job may use.

    Attributes:
        path: the directory.
        run_id: drawn once, when the directory was first used.
        local_ranks: the ranks of this job on this machine.
        ranks: number of them in this job.
        previous_ranks: of the life before; those of this job where there was none.
        identity: what this job would write about itself; `layouts` are, of each rank, the hash of how its tensors are
            split, where no stage of ZeRO says all of it.
        replicated: whether each rank holds all weights and moments of its model.
        ended: how the last life ended and where (`{"ending", "iteration"}`), where it ended by itself.
    """

    path: Path
    run_id: str
    local_ranks: tuple[int, ...]
    ranks: int
    previous_ranks: int
    identity: dict[str, Any]
    replicated: bool
    ended: dict[str, Any] | None

    @property
    def resized(self) -> bool:
        """Whether the life before had another number of ranks."""
        return self.ranks != self.previous_ranks

    def adopt_ranks(self) -> None:
        """Make this number of ranks the run's, once all of them hold a state of it (rank 0).

        Until then a start that fails leaves what the ranks before have left.
        """
        if self.resized:
            _write_json(self.path / IDENTITY, {"run_id": self.run_id, **self.identity})

    def mark_ended(self, ending: str, iteration: int) -> None:
        """Write the marker of an end that was not a failure (rank 0)."""
        try:
            _write_json(self.path / ENDED, {"ending": ending, "iteration": iteration})
        except OSError as error:
            logger.error("the end of this run could not be marked in %s (%s); its checkpoints hold", self.path, error)

    def clear_ended(self) -> None:
        """Remove the marker: a life has begun (rank 0)."""
        (self.path / ENDED).unlink(missing_ok=True)


def open_run(
    path: Path, group: Group, mode: str, description: dict[str, Any], elastic: ElasticConfig | None = None
) -> RunDirectory:
    """Create a run directory, or check that an existing one belongs to this job; a collective of all ranks.

    Args:
        path: the directory; must be on storage that every rank shares.
        group: the ranks.
        mode: the configured mode, kept for `cpsr inspect` and the service.
        description: `EngineAdapter.describe()` of this rank.
        elastic: which other numbers of ranks may go on with the run; None: no other one.

    Raises:
        RunMismatchError: it belongs to another model or world size, or the ranks' models differ; nothing was changed.
        ConfigError: it cannot be written.
        RunDirectoryError: its file system failed, or the ranks do not see the same directory.
    """
    shapes = {name: list(item["shape"]) for name, item in description["tensors"].items()}
    word = hashlib.sha256(json.dumps(shapes).encode()).hexdigest()
    words, layouts = map(list, zip(*group.gather([word, _layout_hash(description["tensors"])]), strict=True))
    tensors = shapes if words.count(word) == group.size else _all_tensors(shapes, words, group)
    identity: dict[str, Any] = {"world_size": group.size, "mode": mode, "tensors": tensors}
    identity |= {key: description[key] for key in ("engine", "zero_stage", "precision", "optimizer", "module")}
    identity |= {"layouts": layouts} if any(layouts) else {}
    elastic = elastic or ElasticConfig()
    opened = group.broadcast(_open_on_rank_0(path, identity, elastic) if group.rank == 0 else None)
    for refusal in _REFUSALS:
        if refusal.__name__ in opened:
            raise refusal(opened[refusal.__name__])
    _check_shared(path, group, opened["run_id"])
    return RunDirectory(
        path,
        run_id=opened["run_id"],
        local_ranks=tuple(rank for rank, node in enumerate(group.nodes) if node == this_node()),
        ranks=group.size,
        previous_ranks=opened["previous_ranks"],
        identity=identity,
        replicated=identity["zero_stage"] in (None, 0) and identity["engine"] != _PIPELINE and not any(layouts),
        ended=opened["ended"],
    )


def checkpoint_bytes(run_dir: Path) -> int:
    """Bytes that checkpoints in a run directory take on the disk now."""
    return sum(path.stat().st_size for path in (run_dir / "checkpoints").rglob("*") if path.is_file())


def run_id(path: Path) -> str:
    """The identity that a run directory was given when it was first used.

    Raises:
        RunMismatchError: it is no run directory.
    """
    known = _read_json(path / IDENTITY)
    if known is None:
        raise RunMismatchError(f"{path} is no run directory: it holds no {IDENTITY}")
    return str(known["run_id"])


def _layout_hash(tensors: dict[str, Any]) -> str:
    """Hash of the places of this rank's parts in tensors that a mesh of ranks splits; empty without any."""
    split = {
        name: [item["layout"], item["offset"], item["numel"]] for name, item in tensors.items() if "layout" in item
    }
    return hashlib.sha256(json.dumps(split, sort_keys=True).encode()).hexdigest()[:16] if split else ""


def _all_tensors(own: dict[str, Any], words: list[str], group: Group) -> dict[str, Any]:
    """Global shapes by name, of which ranks know different ones: those of their stages, experts or partitions.

    Args:
        own: those that this rank knows.
        words: of each rank, the hash of those that it knows.
        group: all ranks.
    """
    # Thousands of ranks, of a few stages, do not send what others have sent.
    parts = group.gather(own if words.index(words[group.rank]) == group.rank else {})
    tensors: dict[str, Any] = {}
    for rank, part in enumerate(parts):
        for name, shape in part.items():
            if tensors.setdefault(name, shape) != shape:
                first = next(known for known, other in enumerate(parts) if name in other)
                raise RunMismatchError(
                    f"the ranks of this job train different models: '{name}' has shape {tuple(tensors[name])} on rank "
                    f"{first} and {tuple(shape)} on rank {rank}; build the same model on every rank. The run directory "
                    "was not touched"
                )
    return tensors


def _open_on_rank_0(path: Path, identity: dict[str, Any], elastic: ElasticConfig) -> dict[str, Any]:
    """What rank 0 broadcasts: the run's number and how it was, or why the directory is refused."""
    try:
        make_directory(path)
        known = _read_json(path / IDENTITY)
        if known is not None:
            _check(path, known, identity, elastic)
        before = known or _told_by_checkpoints(path) or {"run_id": uuid.uuid4().hex}
        previous = before.get("world_size", identity["world_size"])
        written = {"run_id": before["run_id"], **identity}
        if previous != identity["world_size"]:  # it adopts the ranks later
            written |= {"world_size": previous, "layouts": before.get("layouts", [])}
        if written != known:  # a full disk must not prevent a restart
            _write_json(path / IDENTITY, written)
        return {"run_id": before["run_id"], "previous_ranks": previous, "ended": _read_json(path / ENDED)}
    except RunMismatchError as error:
        return {RunMismatchError.__name__: str(error)}
    except (KeyError, TypeError, AttributeError) as error:  # on this rank alone: the others wait for it
        return {ConfigError.__name__: f"{path / IDENTITY} is damaged ({error!r}); {_FROM_A_COPY}"}
    except (OSError, CPSRError) as error:
        temporary = isinstance(error, OSError) and error.errno not in _WRONG_PATH
        refusal = RunDirectoryError if temporary else ConfigError
        return {refusal.__name__: f"the run directory {path} cannot be used: {error}"}


def _told_by_checkpoints(path: Path) -> dict[str, Any] | None:
    """The identity of a run whose file of it is gone, by the newest checkpoint; None where nothing is committed."""
    newest = max(scan(path / "checkpoints").checkpoints, key=lambda info: info.listing.sequence, default=None)
    if newest is None:
        return None
    manifest = newest.manifest
    logger.warning(
        "%s holds checkpoints of the run %s and no %s, which is written anew: the run goes on, if its newest "
        "checkpoint is of this job's model",
        path,
        manifest.run_id,
        IDENTITY,
    )
    return {"run_id": manifest.run_id, "world_size": manifest.world_size}


def _check(path: Path, known: dict[str, Any], identity: dict[str, Any], elastic: ElasticConfig) -> None:
    kept = "nothing in it was changed; start with what it holds, or use another run_dir"
    before, tensors, world_size = known["tensors"], identity["tensors"], identity["world_size"]
    for name in sorted(before.keys() | tensors.keys()):
        old, new = before.get(name), tensors.get(name)
        if old != new:
            theirs = f"shape {tuple(old)}" if old is not None else "absent"
            ours = f"shape {tuple(new)}" if new is not None else "absent"
            raise RunMismatchError(
                f"{path} holds a run of another model: the first tensor that differs is '{name}', {theirs} there and "
                f"{ours} here; {kept}"
            )
    resized = known["world_size"] != world_size
    if resized and not elastic.allows(world_size):
        raise RunMismatchError(
            f"{path} holds a run of {known['world_size']} ranks, this job has {world_size}, which elastic.min_ranks "
            f"({elastic.min_ranks or 'not set'}) does not allow; nothing in it was changed. Start with "
            f"{known['world_size']} ranks, or set elastic.min_ranks to {world_size} or less (docs/elastic.md). "
            f"{_way_out(path, known)}"
        )
    for key in ("zero_stage", "precision", "optimizer"):
        if known[key] != identity[key]:
            raise RunMismatchError(
                f"{path} holds a run with {key} {known[key]!r}, this job has {identity[key]!r}; {kept}"
            )
    layouts = known.get("layouts", []), identity.get("layouts", [])
    other = [rank for rank, (old, new) in enumerate(zip_longest(*layouts)) if old != new]
    if not resized and other:
        raise RunMismatchError(
            f"{path} holds a run whose tensors are split over the ranks in another way: ranks {other} hold other parts "
            f"now. The mesh or the placements of fully_shard or parallelize_module have changed; {kept}"
        )


def _way_out(path: Path, known: dict[str, Any]) -> str:
    """How to continue with another number of ranks, as far as engine and optimizer allow it."""
    if known["engine"] == _PIPELINE:
        return "There is no other way for a pipeline: or use another run_dir to start anew"
    if known["engine"] == "torch" or not str(known["optimizer"]).endswith(("Adam", "AdamW")):
        out = f"{path}.safetensors"
        return (
            f"To go on from its weights: `cpsr export {shlex.quote(str(path))} --out {shlex.quote(out)} --format "
            f"safetensors`, then load_state_dict(safetensors.torch.load_file({out!r})) of the bare model (model.module "
            "under DDP, before fully_shard with FSDP2) before CPSRRecovery, and "
            "another run_dir; the optimizer's state, the schedule and the position in the data begin anew"
        )
    out = f"{path}-universal"
    return (
        f"To go on with its weights, moments and schedule: `cpsr export {shlex.quote(str(path))} --out "
        f'{shlex.quote(out)}`, then "checkpoint": {{"load_universal": true}} in the DeepSpeed configuration (ZeRO 1, 2 '
        f"or 3), engine.load_checkpoint({out!r}) before CPSRRecovery, and another run_dir; the position in the data "
        "begins anew"
    )


def _check_shared(path: Path, group: Group, run_id: str) -> None:
    try:
        identity = _read_json(path / IDENTITY)
        sees = identity is not None and identity["run_id"] == run_id
    except (OSError, CPSRError, KeyError):
        sees = False
    strangers = [rank for rank, seen in enumerate(group.gather(sees)) if not seen]
    if strangers:
        raise RunDirectoryError(
            f"ranks {strangers} do not see the run directory {path} that rank 0 sees: run_dir must be on storage that "
            "all ranks share"
        )


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CPSRError(f"{path} is damaged ({error}); {_FROM_A_COPY}") from error
    if not isinstance(data, dict):
        raise CPSRError(f"{path} is damaged (not a mapping); {_FROM_A_COPY}")
    return data


def _write_json(path: Path, data: dict[str, Any]) -> None:
    write_bytes(path, json.dumps(data, indent=1).encode())
