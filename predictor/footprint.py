"""The parts of the predictor's host memory, and piece sizes that keep it within a limit."""

from dataclasses import dataclass, replace

from cpsr.predictor.statistics import SLICE_ELEMENTS

__all__ = ["MIN_ELEMENTS", "Footprint", "fitted"]

# Below this a piece costs more in calls than in work.
MIN_ELEMENTS = 1 << 14
# Upper bounds of measurements on Linux with glibc and torch 2.13; tests verify them.
# Kept by libraries after first use: threads' heaps, workspaces of matrix products, autograd's own. A few MB for
# small tensors; with the tensors of a model of 350 million weights all of it took 79.5 MB, and this bound is 80.3.
LIBRARY_BYTES = 40_000_000
# The head, its copy, the examples, and the largest batch of operators forward and backward.
NETWORK_BYTES = 24_000_000
# Products of the differences, those in the making, a state that is being saved, and rows while a failure is answered.
OPERATOR_BYTES = 24_000
# The same without learning: rows and what is read of a manifest while a failure is answered, beside what earlier lives
# have learned, which is handed on.
LINE_OPERATOR_BYTES = 6_000
# An operator's place in the header of an open checkpoint, and its coefficient.
OPERATOR_CHECKPOINT_BYTES = 500
# Of a slice of learning: float64 differences and two pieces of float32, each of half a slice at most.
SLICE_BYTES_PER_ELEMENT = 8 + 2 * 2
# Of predicting: pivot, correction, difference, a piece that is read, and two of those who consume what is predicted.
CHUNK_BYTES_PER_ELEMENT = 6 * 4


@dataclass(frozen=True)
class Footprint:
    """Host memory that the predictor takes at most; mapped files are page cache and not counted.

    On the device it takes nothing: checkpoints come from files, and training keeps the device to itself.

    Attributes:
        operators: that this rank holds a slice of.
        checkpoints: in the history.
        slice_elements: weights that one slice of learning reads.
        chunk_elements: weights that are predicted at a time.
        learns: False where it follows the line and learns nothing.
    """

    operators: int
    checkpoints: int
    slice_elements: int
    chunk_elements: int
    learns: bool = True

    @classmethod
    def least(cls, operators: int, checkpoints: int, chunk_elements: int, *, learns: bool = True) -> "Footprint":
        """With the smallest pieces; the arguments are those of `fitted`."""
        return cls(operators, checkpoints, MIN_ELEMENTS, min(MIN_ELEMENTS, chunk_elements), learns)

    @property
    def fixed_bytes(self) -> int:
        """Bytes that do not depend on the model."""
        return LIBRARY_BYTES + (NETWORK_BYTES if self.learns else 0)

    @property
    def operators_bytes(self) -> int:
        """Bytes that grow with the number of operators, not with their size."""
        own = OPERATOR_BYTES if self.learns else LINE_OPERATOR_BYTES
        return self.operators * (own + OPERATOR_CHECKPOINT_BYTES * self.checkpoints)

    @property
    def pieces_bytes(self) -> int:
        """Bytes of weights processed together; it learns or predicts, never both."""
        learning = SLICE_BYTES_PER_ELEMENT * self.slice_elements if self.learns else 0
        return max(learning, CHUNK_BYTES_PER_ELEMENT * self.chunk_elements)

    @property
    def peak_bytes(self) -> int:
        """Bytes of all parts."""
        return self.fixed_bytes + self.operators_bytes + self.pieces_bytes

    def require(self, limit_bytes: int) -> None:
        """Refuse a footprint above the limit.

        Raises:
            ValueError: it is; the message lists the parts.
        """
        if self.peak_bytes > limit_bytes:
            raise ValueError(
                f"the predictor takes {self.peak_bytes} bytes of host memory, {limit_bytes} are allowed: "
                f"{self.fixed_bytes} whatever the model, {self.operators_bytes} for {self.operators} operators over "
                f"{self.checkpoints} checkpoints, {self.pieces_bytes} for weights that are looked at together"
            )


def fitted(
    limit_bytes: int, operators: int, checkpoints: int, chunk_elements: int, *, learns: bool = True
) -> Footprint:
    """The largest pieces with which the predictor stays within a limit.

    Args:
        limit_bytes: of host memory.
        operators: that this rank holds a slice of.
        checkpoints: in the history, at most.
        chunk_elements: no larger chunks are wanted.
        learns: False where it follows the line and learns nothing.

    Raises:
        ValueError: the smallest pieces take more; the message lists the parts.
    """
    least = Footprint.least(operators, checkpoints, chunk_elements, learns=learns)
    least.require(limit_bytes)
    room = limit_bytes - least.fixed_bytes - least.operators_bytes
    chunk = min(chunk_elements, _power_of_two(room // CHUNK_BYTES_PER_ELEMENT))
    if not learns:
        return replace(least, chunk_elements=chunk)
    slices = min(SLICE_ELEMENTS, _power_of_two(room // SLICE_BYTES_PER_ELEMENT))
    return replace(least, slice_elements=slices, chunk_elements=chunk)


def _power_of_two(number: int) -> int:
    """The largest one that is not above `number`, which is positive."""
    return 1 << (number.bit_length() - 1)
