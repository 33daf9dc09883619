"""The records of a checkpoint: one manifest for each rank, the commit record over all ranks, and the names on disk."""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self

import torch
import xxhash
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    StringConstraints,
    model_serializer,
    model_validator,
)

from cpsr.checkpoint.direct_file import HASHED_PIECE_BYTES, PIECE_DIGITS, PieceHashes, piece_hash, pieces_in

__all__ = ["COMMIT", "SLABS", "FileRecord", "FrozenRecord", "Kind", "Listing", "Manifest"]
__all__ += [
    "OperatorRecord",
    "RankManifest",
    "RankRecord",
    "Save",
    "TensorRecord",
    "dtype_name",
    "experts_taken_at",
    "frozen_slab_name",
    "holds_frozen",
]
__all__ += ["holds_weights", "rank_manifest_name", "saved_at", "slab_name", "slab_path", "step_iteration", "step_name"]
__all__ += ["writer_of"]

COMMIT = "COMMIT"
SLABS = "slabs"

Kind = Literal["params", "moments", "extra", "expert-params", "expert-moments"]

_STEP = re.compile(r"step-(\d{10,})")
_RANK_MANIFEST = re.compile(r"rank-\d{5,}-\d+\.\d+\.json")

# A pattern allows known names only, so that no manifest can point out of the directory of slabs.
_SAVED = r"rank-\d{5,}\.(?P<kind>(expert-)?(params|moments)|extra)-(?P<iteration>\d{10,})-\d+\.\d+\.safetensors"
_FROZEN = r"rank-\d{5,}\.frozen-[0-9a-f]{32}\.safetensors"
FileName = Annotated[str, StringConstraints(pattern=f"^({_SAVED}|{_FROZEN})$")]
FrozenFileName = Annotated[str, StringConstraints(pattern=f"^{_FROZEN}$")]
Xxh3 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")]
PieceDigits = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]*$")]
Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
RunId = Annotated[str, StringConstraints(pattern=r"^[0-9A-Za-z_-]{1,64}$")]  # names are made of it
Count = Annotated[int, Field(ge=0)]
# The years 1 to 9999, the range of a date.
UnixSeconds = Annotated[float, Field(ge=-62_135_596_800, le=253_402_300_799, allow_inf_nan=False)]


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    @classmethod
    def parse(cls, data: bytes) -> Self:
        """Read the JSON form; ValueError where it is not one."""
        try:
            return cls.model_validate(json.loads(data))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"is refused: {error}") from error

    def to_bytes(self) -> bytes:
        """The record as JSON, mappings in their own order. Not pydantic's JSON, which writes NaN as null."""
        return json.dumps(self._plain(), separators=(",", ":")).encode("ascii")

    def _plain(self) -> dict[str, Any]:
        return self.model_dump()


class _RecordOfSome(_Record):
    """Absent fields are left out: every restart reads manifests of thousands of operators."""

    @model_serializer(mode="wrap")
    def _without_absent(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        written: dict[str, Any] = write(self)
        return {key: value for key, value in written.items() if value is not None}


class FileRecord(_RecordOfSome):
    """One file: its size, and the hash of the hashes of its MiB."""

    bytes: Count
    xxh3_128: Xxh3 = Field(description="hash of the file: xxh3-128 of the xxh3-64 of every MiB")
    pieces: PieceDigits | None = Field(
        default=None, description="xxh3-64 of every MiB, one after the other; absent in the commit record"
    )

    @classmethod
    def of_pieces(cls, size: int, pieces: str) -> Self:
        """The record of a file with this many bytes, and these hashes of its MiB."""
        return cls(bytes=size, xxh3_128=xxhash.xxh3_128_hexdigest(bytes.fromhex(pieces)), pieces=pieces)

    @classmethod
    def of(cls, found: PieceHashes) -> Self:
        """The record of a file with the bytes that were taken."""
        return cls.of_pieces(found.bytes, found.digests().hex())

    @property
    def listed(self) -> Self:
        """As the commit record lists it."""
        return self.model_copy(update={"pieces": None})

    def first_difference(self, found: "FileRecord") -> int | None:
        """First byte of the first MiB in which another file differs; 0 where that is not known; None: the same."""
        if (self.bytes, self.xxh3_128) == (found.bytes, found.xxh3_128):
            return None
        if self.pieces is None or found.pieces is None:
            return 0
        both = range(pieces_in(max(self.bytes, found.bytes)))
        differ = (index for index in both if piece_hash(self.pieces, index) != piece_hash(found.pieces, index))
        return HASHED_PIECE_BYTES * next(differ, 0)

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        if self.pieces is None:
            return self
        if len(self.pieces) != PIECE_DIGITS * pieces_in(self.bytes):
            raise ValueError(f"has {len(self.pieces)} digits of pieces for {self.bytes} bytes")
        if xxhash.xxh3_128_hexdigest(bytes.fromhex(self.pieces)) != self.xxh3_128:
            raise ValueError("has another hash than that of its pieces")
        return self


class TensorRecord(_Record):
    """One buffer."""

    shape: tuple[Count, ...]
    dtype: str


class FrozenRecord(_RecordOfSome):
    """One parameter outside the optimizer (see `cpsr.state.frozen_parameters`)."""

    shape: tuple[Count, ...]
    dtype: str
    file: FrozenFileName | None = Field(
        default=None, description="slab with its values, of any rank; absent: they are in the small state"
    )
    xxh3_128: Xxh3 | None = Field(default=None, description="hash of its bytes, where a file has it")
    global_shape: tuple[Count, ...] | None = Field(
        default=None,
        description="of the whole parameter, where ranks hold parts; absent: it is whole",
    )
    offset: Count | None = Field(default=None, description="of the part's first element in the flattened whole")
    block: tuple[Count, ...] | None = Field(default=None, description="as of `OperatorRecord`")

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """Shape of the whole parameter, if that is known."""
        return self.shape if self.global_shape is None else self.global_shape

    @property
    def described(self) -> "FrozenRecord":
        """The part, without its values and where they are."""
        return self.model_copy(update={"file": None, "xxh3_128": None})


class OperatorRecord(_RecordOfSome):
    """One operator's slice on one rank, as `cpsr.state.shard.OperatorState` describes it."""

    global_shape: tuple[Count, ...]
    offset: Count
    numel: Count
    dtype: str
    iteration: Count
    moments: dict[str, str] = Field(description="moment -> dtype, and its size where that is not numel")
    saved_by: Count | None = Field(
        default=None, description="rank in whose files it is; absent: this one's (see `cpsr.checkpoint.replicated`)"
    )
    xxh3_128: Xxh3 | None = Field(
        default=None, description="where other ranks hold it, too: hash of weights and moments, or of a GPU's checksums"
    )
    block: tuple[Count, ...] | None = Field(
        default=None, description="shape of a block that is no range; see `cpsr.state.shard.ParamSlice`"
    )
    apart: Literal[True] | None = Field(
        default=None, description="an expert's: it lies in the files of its iteration (see `cpsr.checkpoint.rank_part`)"
    )

    def is_same_state(self, other: "OperatorRecord") -> bool:
        """Whether it is the same slice at the same iteration, whichever rank saved it."""
        return (self.iteration, self.described) == (other.iteration, other.described)

    @property
    def described(self) -> "OperatorRecord":
        """The slice, without the rank that saved it and the iteration."""
        return self.model_copy(update={"saved_by": None, "xxh3_128": None, "iteration": 0, "apart": None})


class RankManifest(_Record):
    """What one rank wrote for one checkpoint."""

    format: Literal[1] = 1
    run_id: RunId
    life: int
    attempt: int
    rank: Count
    world_size: Annotated[int, Field(ge=1)]
    iteration: Count
    operators: dict[str, OperatorRecord]
    others: dict[str, TensorRecord]
    frozen: dict[str, FrozenRecord] = Field(default_factory=dict)
    files: dict[FileName, FileRecord]
    scalars: Any = Field(description="`cpsr.state.codec` JSON; its tensors are in the extra file")

    @classmethod
    def parse_listed(cls, data: bytes, manifest: "Manifest", rank: int) -> "RankManifest":
        """Read one rank's manifest of a committed checkpoint; ValueError with what is wrong with it."""
        listed = manifest.ranks[rank]
        if hashlib.sha256(data).hexdigest() != listed.sha256:
            raise ValueError(f"its SHA-256 is not the one in {COMMIT}; it is torn or altered")
        record = cls.parse(data)
        whole = (manifest.run_id, manifest.life, manifest.attempt, manifest.iteration, manifest.world_size, rank)
        if (record.run_id, record.life, record.attempt, record.iteration, record.world_size, record.rank) != whole:
            raise ValueError(f"is not of the checkpoint that {COMMIT} describes")
        if {name: file.listed for name, file in record.files.items()} != listed.files:
            raise ValueError(f"lists other files than {COMMIT}")
        return record

    def _plain(self) -> dict[str, Any]:
        """Without a look at each number of the scalars: the random state of Python alone has 625."""
        return {**self.model_dump(exclude={"scalars"}), "scalars": self.scalars}

    def frozen_files(self) -> dict[str, set[str]]:
        """Parameters outside the optimizer by the file that has them."""
        found: dict[str, set[str]] = {}
        for name, one in self.frozen.items():
            if one.file is not None:
                found.setdefault(one.file, set()).add(name)
        return found

    @property
    def sparse(self) -> bool:
        """Whether experts have slabs of their own (see `cpsr.checkpoint.rank_part`)."""
        return any(experts_taken_at(name) is not None for name in self.files)

    @property
    def save(self) -> "Save":
        """Of which save this rank's new slabs are."""
        return Save(self.iteration, self.life, self.attempt)


class RankRecord(_Record):
    """One rank's manifest as rank 0 saw it at the commit."""

    sha256: Sha256
    files: dict[FileName, FileRecord] = Field(description="slabs with this rank's part, without hashes of their MiB")


class Manifest(_Record):
    """The commit record: the whole checkpoint, over all ranks.

    Attributes:
        sequence: counts the commits of the run; orders them also after a roll-back, without a clock.
        label: `scalars["origin"]` of rank 0, where it is a string.
        weights_only: all other slabs are given up: training cannot restart there.
    """

    format: Literal[1] = 1
    run_id: RunId
    life: int
    attempt: int
    iteration: Count
    world_size: Annotated[int, Field(ge=1)]
    sequence: Count
    label: str | None
    created_unix_seconds: UnixSeconds
    weights_only: bool = False
    ranks: dict[Count, RankRecord]

    @classmethod
    def parse(cls, data: bytes, step: str = "") -> Self:
        """Read the content of COMMIT; ValueError with what is wrong with it.

        Args:
            data: all of it.
            step: name of its directory; empty: any.
        """
        word, _, content = data.partition(b"\n")
        if word != hashlib.sha256(content).hexdigest().encode("ascii"):
            raise ValueError("does not begin with the SHA-256 of the rest; it is torn or altered")
        manifest = super().parse(content)
        if sorted(manifest.ranks) != list(range(manifest.world_size)):
            raise ValueError(f"lists the ranks {sorted(manifest.ranks)} of {manifest.world_size}")
        if step and manifest.iteration != step_iteration(step):
            raise ValueError(f"is of iteration {manifest.iteration}, not of its directory's")
        return manifest

    def to_bytes(self) -> bytes:
        """Content of COMMIT: the SHA-256 of the JSON, a newline, and the JSON."""
        content = super().to_bytes()
        return f"{hashlib.sha256(content).hexdigest()}\n".encode("ascii") + content

    @property
    def save(self) -> "Save":
        """Which save of the run it is."""
        return Save(self.iteration, self.life, self.attempt)

    @property
    def parts(self) -> list[str]:
        """Names of the ranks' manifests, in their order."""
        return [rank_manifest_name(rank, self.save) for rank in range(self.world_size)]

    @property
    def files(self) -> dict[str, FileRecord]:
        """The slabs that it lists, by name."""
        return {
            name: file
            for record in self.ranks.values()
            for name, file in record.files.items()
            if not self.weights_only or holds_weights(name)
        }

    @property
    def total_bytes(self) -> int:
        """Of the slabs that it lists."""
        return sum(file.bytes for file in self.files.values())

    @property
    def listing(self) -> "Listing":
        """What stays in memory of it."""
        sizes = {name: file.bytes for name, file in self.files.items()}
        words = b"".join(bytes.fromhex(self.ranks[rank].sha256) for rank in range(self.world_size))
        return Listing(self.save, self.sequence, self.world_size, self.weights_only, sizes, words)


@dataclass(frozen=True)
class Listing:
    """The part of a commit record that stays in memory, a fifth of the whole: 0.2 kB for each slab.

    Attributes:
        save, sequence, world_size, weights_only: as in the record.
        sizes: slab that it lists -> bytes.
        words: SHA-256 of the ranks' manifests, one after the other.
    """

    save: "Save"
    sequence: int
    world_size: int
    weights_only: bool
    sizes: Mapping[str, int]
    words: bytes

    def sha256(self, rank: int) -> bytes:
        """Hash of a rank's manifest."""
        return self.words[32 * rank : 32 * rank + 32]


class Save(NamedTuple):
    """Which save of a run: an iteration may be saved again after a roll-back, or in another life."""

    iteration: int
    life: int
    attempt: int

    @property
    def word(self) -> str:
        """Its part of the names of slabs."""
        return f"{self.iteration:010d}-{self.life}.{self.attempt}"


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` for torch.float32."""
    return str(dtype).removeprefix("torch.")


def step_name(iteration: int) -> str:
    """Directory of the checkpoint at an iteration."""
    return f"step-{iteration:010d}"


def step_iteration(name: str) -> int | None:
    """Iteration of a checkpoint's directory, None for any other name."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match and step_name(int(match[1])) == name else None


def rank_manifest_name(rank: int, save: Save) -> str:
    """File of one rank's manifest of a save, beside which those of other saves of the iteration may lie."""
    return f"rank-{rank:05d}-{save.life}.{save.attempt}.json"


def is_rank_manifest(name: str) -> bool:
    """Whether `rank_manifest_name` gives such names."""
    return _RANK_MANIFEST.fullmatch(name) is not None


def slab_name(rank: int, kind: Kind, save: Save) -> str:
    """Slab of one kind of one rank's tensors, as this save wrote it."""
    return f"rank-{rank:05d}.{kind}-{save.word}.safetensors"


def frozen_slab_name(rank: int, word: str) -> str:
    """Slab of parameters outside the optimizer.

    Args:
        rank: that writes it.
        word: hash of names and content (`cpsr.state.frozen_parameters.word_of`): slabs of one name are the same.
    """
    return f"rank-{rank:05d}.frozen-{word}.safetensors"


def slab_path(checkpoint: Path, name: str) -> Path:
    """Where a slab lies that the checkpoint in this directory lists."""
    return checkpoint.parent / SLABS / name


def saved_at(name: str) -> int | None:
    """Iteration at which a slab was saved; None of frozen parameters, and of names that no slab has."""
    match = re.fullmatch(_SAVED, name)
    return int(match["iteration"]) if match else None


def experts_taken_at(name: str) -> int | None:
    """Iteration at which the experts in a slab were saved; None of a slab that has no experts of its own."""
    return saved_at(name) if ".expert-" in name else None


def holds_weights(name: str) -> bool:
    """Whether a slab holds trained weights, which are kept longest."""
    match = re.fullmatch(_SAVED, name)
    return match is not None and match["kind"].endswith("params")


def holds_frozen(name: str) -> bool:
    """Whether a slab holds parameters outside the optimizer."""
    return re.fullmatch(_FROZEN, name) is not None


def writer_of(name: str) -> int:
    """The rank that writes a slab."""
    return int(name.split(".")[0].removeprefix("rank-"))
