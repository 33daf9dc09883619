"""States of a run in a machine's shared memory: listed by the headers of their files, verified, and loaded.

Each file is a slab: one safetensors image, which that library alone can read::

    8 bytes: length of the header; 0 while the file is being filled
    the header, filled up with spaces to the size that was reserved for it
    the buffer: `param/...`, `moment/...` and `other/...`, with `padding/...` in the gaps
    the small state: its tensors, a safetensors image within `small/tensors`, and its tree as JSON in `small`
    the last padding

The header's metadata is the index. Its texts are: `hash`, xxh3-128 of the rest of the header and of all that lies
behind the buffer; `sealed_at`, in ns, another one at each seal; `run`, `rank`, `life`, `branch`, `kind`, `iteration`,
`owned` (see `MemoryState`); `buffer_bytes` and `file_bytes`; and as JSON `operators` (global shape, offset, block and
part of each), `taken_at` (iteration of each part), `segments` (first byte in the buffer and byte after the last) and
`hashes` (of each segment, the xxh3-64 of every MiB of it); and `samples` of the parts that ranks share.

A part that `taken_at` lacks is not there: its tensors are called `elsewhere/...`, its segments have no hash, and other
ranks of the machine hold it.
"""

import errno
import json
import logging
import math
import mmap
import os
import re
import stat
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self, get_args

import torch
import xxhash

from cpsr.checkpoint.assemble import Piece, Slab, Wanted, assemble, wanted_of
from cpsr.checkpoint.direct_file import PIECE_DIGITS, hash_pieces, pieces_in
from cpsr.checkpoint.manifest import dtype_name
from cpsr.checkpoint.parts import operator_of
from cpsr.checkpoint.ranges import WantedRange
from cpsr.checkpoint.tensor_file import LENGTH_BYTES, METADATA, NO_HEADER, PlacedTensor, TensorHeader
from cpsr.errors import CheckpointError, RunMismatchError
from cpsr.state.codec import decode
from cpsr.state.shard import OperatorState, ParamSlice, Shard

__all__ = [
    "BLOCK_BYTES",
    "BUFFERS",
    "ELSEWHERE",
    "HASH_PLACE",
    "NAME",
    "PAGE_BYTES",
    "PENDING_HASH",
    "REPLICAS",
    "SHARED_MEMORY",
]
__all__ += ["WINDOWS", "HeldOperator", "HeldPart", "Kind", "Left", "MemoryState", "OpenState", "SlabSize"]
__all__ += ["belong_together", "describe", "fill"]
__all__ += ["hash_of", "identity", "load_states", "open_own", "room_for_memory_state", "size_of"]
__all__ += ["verify_memory_state", "write_at"]

logger = logging.getLogger(__name__)

# Tests use other directories, so that one machine acts as several.
SHARED_MEMORY = Path(os.environ.get("CPSR_SHARED_MEMORY", "/dev/shm"))  # noqa: S108 - that it is shared memory is the purpose; mode 0600, links refused
PAGE_BYTES = 4096
# Of a header; see `SlabSize.for_tensors`.
INDEX_BYTES, TENSOR_BYTES, OPERATOR_BYTES = 2000, 240, 300
BLOCK_BYTES = 512  # of st_blocks, by POSIX
NAME = re.compile(r"cpsr-(?P<run_id>[0-9A-Za-z_-]+)-rank-(?P<rank>\d{5})-(?P<slot>[0-9a-z-]+)")
ELSEWHERE = "elsewhere/"
BUFFERS, WINDOWS, REPLICAS = r"\d+", r"window-\d+", r"replica-.+"  # slots of one kind

Kind = Literal["snapshot", "departure", "small", "window", "upstream"]


class Left(NamedTuple):
    """Which state an earlier process has left; those of an older life, or from before it went back, are less."""

    life: int
    branch: int
    iteration: int


@dataclass(frozen=True)
class SlabSize:
    """Bytes of a file that are known before its state is: where the buffer begins, and how long it is."""

    header_bytes: int
    buffer_bytes: int

    @property
    def bytes(self) -> int:
        """Of both."""
        return self.header_bytes + self.buffer_bytes

    @classmethod
    def for_tensors(cls, keys: Iterable[str], buffer_bytes: int) -> Self:
        """The size of a file with the tensors of these keys in its buffer, whatever its small state will be.

        A tensor takes its key and some 110 bytes of the header, and padding before it as many. In the index, an
        operator takes its name, that of its part and some 60; and a part three times its name and some 180. Each MiB
        has a hash.
        """
        wanted = LENGTH_BYTES + INDEX_BYTES + PIECE_DIGITS * pieces_in(buffer_bytes)
        for key in keys:
            name = len(json.dumps(key))
            wanted += TENSOR_BYTES + name + (OPERATOR_BYTES + 6 * name if key.startswith("param/") else 0)
        return cls(-(-wanted // PAGE_BYTES) * PAGE_BYTES, buffer_bytes)


@dataclass(frozen=True)
class HeldOperator:
    """What a state holds of an operator; the first three as of `cpsr.state.shard.ParamSlice`."""

    global_shape: tuple[int, ...]
    offset: int
    block: tuple[int, ...] | None
    iteration: int
    part: str = ""


class HeldPart(NamedTuple):
    """A part of a rank's weights and moments, to be compared with that of another rank.

    Attributes:
        name: of the part, with a hash of its tensors' names, slices and types: ranks may hold other slices of
            one expert.
        sample: hash of a few of its elements, with the life and branch; empty where no rank lacks a part.
        word: hash of all its bytes; empty where the state lacks it.
    """

    name: str
    sample: str
    word: str

    @property
    def of(self) -> str:
        """The part of the buffer."""
        return self.name.rpartition(" ")[0]

    def is_given_by(self, other: "HeldPart") -> bool:
        """Whether another state has this part, and the two are alike as far as they say."""
        known = bool(self.sample or self.word)
        return known and bool(other.word) and self.sample == other.sample and self.word in ("", other.word)


def belong_together(own: Iterable[HeldPart], other: Iterable[HeldPart]) -> bool:
    """Whether two states of one iteration are alike in all that their ranks share, also where none gives it."""
    there = {part.name: part for part in other}
    both = [(part, there[part.name]) for part in own if part.name in there]
    shared = [(one, two) for one, two in both if one.sample or two.sample]
    return all(one.sample == two.sample and one.word in ("", two.word or one.word) for one, two in shared)


@dataclass(frozen=True)
class MemoryState:
    """A complete state in shared memory, as its file's header describes it; not verified.

    Attributes:
        path: its file.
        rank: the rank whose state it is.
        iteration: iteration at which it was taken.
        life: life of the run that took it.
        branch: how often that life had gone back before.
        kind: `snapshot`, with all scalars; `departure`, the tensors at the last step boundary of a broken group;
            `small`, all but weights and moments; `window`, sparse snapshots of several iterations, of which `iteration`
            is the first (`cpsr.replay`); `upstream`, what a stage sent to others in that iteration.
        owned: of a `small` one, which weights and moments belong to it: the `parts` of these as JSON; else empty.
        oldest_iteration: of its parts; older than `iteration` where experts are.
        newest_iteration: of its parts; of a window the last one.
        size: without the small state.
        operators: what it holds of each.
        lacking: operators of the rank that this state lacks, and others hold; of no iteration.
        index: the header's metadata.
        header: the whole of it, by which the file is recognised.
    """

    path: Path
    rank: int
    iteration: int
    life: int
    kind: Kind
    owned: str = ""
    branch: int = 0
    oldest_iteration: int = -1
    newest_iteration: int = -1
    size: SlabSize = field(default=SlabSize(0, 0), compare=False)
    operators: Mapping[str, HeldOperator] = field(default_factory=dict, compare=False, repr=False)
    lacking: Mapping[str, HeldOperator] = field(default_factory=dict, compare=False, repr=False)
    index: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    header: TensorHeader = field(default_factory=lambda: TensorHeader(0), compare=False, repr=False)

    @property
    def name(self) -> str:
        """Of its file."""
        return self.path.name

    @property
    def place(self) -> Literal["own", "replica", "other"]:
        """By the file's name: a rank's own buffer or window, a replica, or what a restart or a replication needs."""
        matched = NAME.fullmatch(self.path.name)
        slot = "" if matched is None else matched["slot"]
        if re.fullmatch(f"{BUFFERS}|{WINDOWS}", slot):
            return "own"
        return "replica" if re.fullmatch(REPLICAS, slot) else "other"

    @property
    def ages(self) -> dict[str, int]:
        """Iteration of each operator."""
        return {name: one.iteration for name, one in self.operators.items()}

    @cached_property
    def tensors(self) -> Mapping[str, PlacedTensor]:
        """Where every tensor lies in the file, but padding; CheckpointError where the header is damaged."""
        return {one.name: one for one in self.placed if operator_of(one.name) not in self.lacking}

    @property
    def is_shared(self) -> bool:
        """Whether other ranks may lack parts of theirs that it holds, or the other way round."""
        return self.index["samples"] != "{}"

    @cached_property
    def placed(self) -> list[PlacedTensor]:
        """The file's tensors but padding, also where those would be that it lacks."""
        try:
            found = [one for one in self.header.tensors() if not one.name.startswith("padding/")]
            return [replace(one, name=one.name.removeprefix(ELSEWHERE)) for one in found]
        except NO_HEADER as error:
            raise CheckpointError(f"the header of {self.path} is damaged: {error}") from error

    def spans(self, segments: Collection[int] | None = None) -> list[tuple[int, int]]:
        """First byte, and the one after the last, of the stretches of its file with these segments; then of its end.

        Args:
            segments: by their numbers; None: all but those that other ranks hold.

        Raises:
            CheckpointError: the header is damaged.
        """
        first, found = self.size.header_bytes, list[tuple[int, int]]()
        try:
            known = zip(json.loads(self.index["segments"]), json.loads(self.index["hashes"]), strict=True)
            for number, ((begin, end), digest) in enumerate(known):
                wanted = bool(digest) if segments is None else number in segments
                if wanted:
                    begin = found.pop()[0] if found and found[-1][1] == first + begin else first + begin
                    found.append((begin, first + end))
        except NO_HEADER as error:
            raise CheckpointError(f"the header of {self.path} is damaged: {error}") from error
        return [*found, (self.size.bytes, int(self.index["file_bytes"]))]

    @cached_property
    def parts(self) -> tuple[HeldPart, ...]:
        """Parts of weights and moments that it holds, lacks, or belongs to; CheckpointError as of `tensors`."""
        if self.kind == "small":
            return tuple(HeldPart(*one) for one in json.loads(self.owned))
        described, first, operators = dict[str, list[str]](), dict[int, str](), {**self.operators, **self.lacking}
        digests = dict[str, list[str]]()
        for one in self.placed:
            if (name := operator_of(one.name)) in operators:
                part = operators[name].part
                what = one.name, one.shape, dtype_name(one.dtype), _slice(operators[name])
                described.setdefault(part, []).append(repr(what))
                if one.end > one.first:
                    first[one.first - self.size.header_bytes] = part
        segments = zip(json.loads(self.index["segments"]), json.loads(self.index["hashes"]), strict=True)
        for (begin, _), digest in segments:
            if begin in first:
                digests.setdefault(first[begin], []).append(digest)
        held, samples = {one.part for one in self.operators.values()}, json.loads(self.index["samples"])
        return tuple(
            HeldPart(
                f"{part} {xxhash.xxh3_64_hexdigest(repr(sorted(what)).encode())}",
                f"{self.life}.{self.branch}.{samples[part]}" if part in samples else "",
                xxhash.xxh3_64_hexdigest(repr(digests.get(part)).encode()) if part in held else "",
            )
            for part, what in described.items()
        )


def describe(path: Path, descriptor: int | None = None) -> MemoryState | None:
    """The state that a file holds, by its header; None where it holds no complete one, or cannot be opened.

    Args:
        path: of the file.
        descriptor: of the file, where it is open.
    """
    if descriptor is not None:
        return _described(path, descriptor)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)  # nor waits for a pipe
    except FileNotFoundError:
        return None
    except OSError as error:
        logger.warning("%s cannot be read, and is ignored: %s", path, error)
        return None
    try:
        return _described(path, descriptor)
    finally:
        os.close(descriptor)


def _described(path: Path, descriptor: int) -> MemoryState | None:
    status = os.fstat(descriptor)
    if not _is_own(status):
        logger.warning("%s belongs to another user, or is no plain file, and is ignored", path)
        return None
    header = TensorHeader(status.st_size)
    try:
        header.take(memoryview(os.pread(descriptor, LENGTH_BYTES, 0)))
        if header.end == LENGTH_BYTES:  # it is being filled, or holds nothing
            return None
        header.take(memoryview(os.pread(descriptor, header.end - LENGTH_BYTES, LENGTH_BYTES)))
        index = header.metadata()
        return _state_in(path, header, index) if int(index["file_bytes"]) == status.st_size else None
    except NO_HEADER as error:
        why = type(error).__name__, error  # not its `repr`, which may hold all that was read
        logger.warning("the header of the state in %s cannot be read; it is ignored: %s: %s", path, *why)
        return None


def _state_in(path: Path, header: TensorHeader, index: Mapping[str, str]) -> MemoryState:
    rank, iteration, life, branch = (int(index[name]) for name in ("rank", "iteration", "life", "branch"))
    kind: Any = index["kind"]
    if kind not in get_args(Kind):
        raise ValueError(f"{kind!r} is no kind of state")
    named = NAME.fullmatch(path.name)
    if named is not None and (named["run_id"], int(named["rank"])) != (index["run"], rank):
        raise ValueError(f"it is of rank {rank} of the run {index['run']!r}")
    taken_at = {part: int(at) for part, at in json.loads(index["taken_at"]).items()}
    every = {
        name: HeldOperator(tuple(shape), offset, None if block is None else tuple(block), taken_at.get(part, -1), part)
        for name, (shape, offset, block, part) in json.loads(index["operators"]).items()
    }
    operators = {name: one for name, one in every.items() if one.part in taken_at}
    lacking = {name: one for name, one in every.items() if one.part not in taken_at}
    ages, size = taken_at.values(), SlabSize(header.end, int(index["buffer_bytes"]))
    stamp = rank, iteration, life, kind, index["owned"], branch, min(ages), max(ages)
    return MemoryState(path, *stamp, size, operators, lacking, index, header)


def load_states(states: Sequence[MemoryState], into: Shard) -> Any:
    """Copy a rank's state into the views of `into`, whose operators get the iterations at which they were taken.

    Args:
        states: its snapshot, and behind it those of other ranks with what it lacks; or those of other ranks with the
            same weights and moments, and its own small one behind them.
        into: views to be written.

    Returns:
        Its small state.

    Raises:
        CheckpointError: a state is no longer whole, or is of another model or split, or they do not belong together;
            `into` is unchanged.
    """
    own = states[-1] if states[-1].kind == "small" else states[0]
    _require_together(own, states)
    with ExitStack() as opened:
        slabs = [opened.enter_context(OpenState(state)) for state in states]
        slabs.sort(key=lambda slab: slab.state is not own)
        scalars, givers, taken_at = slabs[0].scalars(), [], dict[str, int]()
        if missing := sorted({f"other/{name}" for name in into.others} - slabs[0].tensors.keys()):
            raise CheckpointError(f"{own.path} holds no {missing[0]}: it is of another model")
        for slab in slabs:
            given = {name: into.operators[name] for name in into.operators.keys() - taken_at.keys()}
            given = {name: one for name, one in given.items() if _gives(slab.state, own, name)}
            taken_at |= slab.taken_at(Shard(given))
            givers.append(_Giver(slab, given.keys()))
        if missing := sorted(into.operators.keys() - taken_at.keys()):
            raise CheckpointError(f"{states[0].path} holds another slice of {missing[0]}, or lacks it")
        fill(givers, wanted_of(into), own.path)
    into.operators.update({name: replace(into.operators[name], iteration=at) for name, at in taken_at.items()})
    return scalars


def _require_together(own: MemoryState, states: Sequence[MemoryState]) -> None:
    """Raise CheckpointError unless what a state does not hold itself is held by the others, and all are alike."""
    others = [state for state in states if state is not own]
    held = [part for state in others for part in state.parts if part.word]
    wanted = [part for part in own.parts if own.kind == "small" or not part.word] if others else []
    alike = all(belong_together(own.parts, state.parts) for state in others)
    for part in wanted:
        there = [one for one in held if one.name == part.name]
        alike = alike and bool(there) and all(map(part.is_given_by, there))
    if not alike:
        paths = " and ".join(str(state.path) for state in states)
        raise CheckpointError(f"{paths} do not belong together: they hold other weights or moments")


def _gives(state: MemoryState, own: MemoryState, name: str) -> bool:
    """Whether an operator is read from this state. Experts of other ranks may have the name of one that is lacking."""
    if state is own or own.kind == "small" or name not in state.operators:
        return name in state.operators
    one, other = own.lacking.get(name), state.operators[name]
    return one is not None and (one.part, _slice(one)) == (other.part, _slice(other))


@dataclass(frozen=True)
class _Giver:
    """A state of which these operators alone are read, and the buffers; see `cpsr.checkpoint.assemble.Slab`."""

    slab: "OpenState"
    names: Collection[str]

    @property
    def rank(self) -> int:
        return self.slab.rank

    @cached_property
    def pieces(self) -> Mapping[str, Piece]:
        pieces = self.slab.pieces.items()
        return {key: one for key, one in pieces if (name := operator_of(key)) in self.names or not name}

    def read(self, wanted: Sequence[WantedRange]) -> int:
        return self.slab.read(wanted)


def fill(slabs: Sequence[Slab], wanted: Mapping[str, Wanted], where: Path) -> None:
    """Fill tensors from states that are open; CheckpointError where one is in none of them, and nothing is written."""
    try:
        assemble(slabs, wanted, where)
    except RunMismatchError as error:
        raise CheckpointError(str(error)) from error


def room_for_memory_state(state: MemoryState) -> Shard:
    """Host memory of its own for a rank's tensors, also those that its state lacks, of whatever split.

    For `load_states`.

    Raises:
        CheckpointError: its header is damaged.
    """
    tensors = {
        one.name: torch.empty(one.shape, dtype=one.dtype) for one in state.placed if not one.name.startswith("small")
    }
    moments: dict[str, dict[str, torch.Tensor]] = {name: {} for name in (*state.operators, *state.lacking)}
    for key, values in tensors.items():
        if key.startswith("moment/"):
            _, moment, name = key.split("/", 2)
            moments[name][moment] = values
    operators = {}
    for name, one in {**state.operators, **state.lacking}.items():
        parameter = ParamSlice(tensors[f"param/{name}"], one.global_shape, one.offset, one.block)
        operators[name] = OperatorState(name, parameter, moments[name], one.iteration)
    prefix = "other/"
    return Shard(operators, {key.removeprefix(prefix): one for key, one in tensors.items() if key.startswith(prefix)})


def verify_memory_state(state: MemoryState) -> str | None:
    """What is wrong with a state; None where its hash matches."""
    try:
        with OpenState(state):
            return None
    except CheckpointError as error:
        return str(error)


class OpenState:
    """A state's file, mapped and verified; tensors are views of it while it is open.

    Args:
        state: as its file described it.

    Attributes:
        state: as given.

    Raises:
        CheckpointError: it is not there any more, or damaged.
    """

    def __init__(self, state: MemoryState) -> None:
        self.state = state
        try:
            with state.path.open("rb") as file:
                data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:  # mapping may fail for lack of memory, or the file may be truncated
            raise CheckpointError(f"{state.path} cannot be read: {error}") from error
        self._bytes = torch.frombuffer(data, dtype=torch.uint8)
        content, header = memoryview(data), state.header.content
        if content[: len(header)] != header:
            raise CheckpointError(f"{state.path} does not hold iteration {state.iteration} any more")
        # The header last: whoever overwrites the state changes it first.
        is_whole = _is_whole(state, content) and content[: len(header)] == header
        if not is_whole:
            raise CheckpointError(f"{state.path} (iteration {state.iteration}) is damaged: its hash does not hold")
        self.tensors = state.tensors

    def __enter__(self) -> "OpenState":
        return self

    def __exit__(self, *_: object) -> None:
        del self._bytes

    def as_it_is(self, key: str) -> torch.Tensor:
        """The tensor of that key, of its own shape and type.

        Raises:
            CheckpointError: there is none.
        """
        if key not in self.tensors:
            raise CheckpointError(f"{self.state.path} holds no {key}")
        one = self.tensors[key]
        return self._bytes[one.first : one.end].view(one.dtype).view(one.shape)

    def holds_whole_operators(self) -> bool:
        """Whether it has all elements of each of its operators."""
        held = self.state.operators.items()
        return all(math.prod(one.global_shape) == self.tensors[f"param/{name}"].numel for name, one in held)

    @property
    def rank(self) -> int:
        """That saved it."""
        return self.state.rank

    @cached_property
    def pieces(self) -> Mapping[str, Piece]:
        """By key; see `cpsr.checkpoint.assemble.Slab`."""
        found = {}
        for key, one in self.tensors.items():
            operator = operator_of(key)
            found[key] = Piece(one.shape, one.dtype, 0, one.numel)
            if operator and one.numel == self.tensors[f"param/{operator}"].numel:
                whole = self.state.operators[operator]
                found[key] = Piece(whole.global_shape, one.dtype, whole.offset, one.numel, whole.block)
        return found

    def read(self, wanted: Sequence[WantedRange]) -> int:
        """See `cpsr.checkpoint.assemble.Slab.read`; all of it was verified when it was opened."""
        for one in wanted:
            values = self.as_it_is(one.key).reshape(-1)
            one.target.copy_(values[one.start : one.start + one.target.numel()])
        return sum(one.target.nbytes for one in wanted)

    def taken_at(self, into: Shard) -> dict[str, int]:
        """Iteration of each of these operators.

        Raises:
            CheckpointError: a slice does not match.
        """
        held = self.state.operators
        for name, operator in into.operators.items():
            if name not in held or _slice(held[name]) != _slice(operator.parameter):
                raise CheckpointError(f"{self.state.path} holds another slice of {name}")
        return {name: held[name].iteration for name in into.operators}

    def scalars(self) -> Any:
        """A decoded copy, outside shared memory.

        Raises:
            CheckpointError: they cannot be decoded.
        """
        image, tree = self.as_it_is("small/tensors"), self.as_it_is("small").numpy().tobytes()
        header = TensorHeader(len(image))
        try:
            header.take(image.numpy().data)
            return decode(json.loads(tree), {one.name: one.view(image).clone() for one in header.tensors()})
        except NO_HEADER as error:
            raise CheckpointError(
                f"the scalars of {self.state.path} cannot be decoded: {type(error).__name__}: {error}"
            ) from error


def _is_whole(state: MemoryState, content: memoryview) -> bool:
    """Whether the segments cover the buffer, and all hashes hold."""
    index, buffer, end = state.index, content[state.size.header_bytes : state.size.bytes], 0
    if hash_of(state.header.content, content[state.size.bytes :]) != index.get("hash"):
        return False
    for (begin, after), digest in zip(json.loads(index["segments"]), json.loads(index["hashes"]), strict=True):
        if begin != end or (digest and hash_pieces(buffer[begin:after]).hex() != digest):
            return False
        end = after
    return end == len(buffer)


def _slice(one: ParamSlice | HeldOperator) -> tuple[object, ...]:
    """What of the whole parameter it is."""
    return tuple(one.global_shape), one.offset, one.block


_HASH_AT = LENGTH_BYTES + len(f'{{"{METADATA}":{{"hash":"')  # it comes first
PENDING_HASH = "0" * 32
HASH_PLACE = slice(_HASH_AT, _HASH_AT + len(PENDING_HASH))


def hash_of(header: bytes | memoryview, behind: bytes | memoryview) -> str:
    """The hash that belongs into a header: of all else in it, and of what lies behind the buffer."""
    state = xxhash.xxh3_128(memoryview(header)[LENGTH_BYTES : HASH_PLACE.start])
    state.update(memoryview(header)[HASH_PLACE.stop :])
    state.update(behind)
    return state.hexdigest()


def identity() -> str | None:
    """Which shared memory this process sees: containers of one host name have their own. None where there is none."""
    try:
        found = SHARED_MEMORY.stat()
    except OSError:
        return None
    return f"{found.st_dev} {found.st_ino}"


def size_of(path: Path) -> int:
    """The bytes of a file, 0 where there is none."""
    try:
        return path.lstat().st_size
    except FileNotFoundError:
        return 0


def open_own(path: Path) -> int:
    """A descriptor of a file that is to be written, made where there is none.

    Raises:
        OSError: it belongs to another user, who could read what is written, or is no plain file; or cannot be opened.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    try:
        if not _is_own(os.fstat(descriptor)):
            raise OSError(errno.EPERM, "it belongs to another user, or is no plain file: remove it", str(path))
        os.fchmod(descriptor, 0o600)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _is_own(status: os.stat_result) -> bool:
    return status.st_uid == os.geteuid() and stat.S_ISREG(status.st_mode)


def write_at(descriptor: int, data: bytes | memoryview, offset: int) -> None:
    """Write all of it: one call takes 2 GiB at most."""
    left = memoryview(data)
    while left:
        written = os.pwrite(descriptor, left, offset)
        left, offset = left[written:], offset + written
