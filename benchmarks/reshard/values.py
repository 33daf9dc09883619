"""The state that is saved and loaded: GPT-2's parameters, filled with values that are found again by their place."""

from collections.abc import Iterator

import torch

__all__ = ["KINDS", "MOMENTS", "fill", "holds", "parameter_shapes"]

VOCABULARY, CONTEXT, MLP = 50_257, 1_024, 4  # GPT-2's
MOMENTS = ("exp_avg", "exp_avg_sq")
KINDS = 1 + len(MOMENTS)  # of values of a parameter
PERIOD = 65_521  # of the values; float32 holds them exactly


def parameter_shapes(width: int, layers: int) -> dict[str, tuple[int, ...]]:
    """Shape of each parameter of a GPT-2 of this size, by name."""
    return dict(_shapes(width, layers))


def _shapes(width: int, layers: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "wte", (VOCABULARY, width)
    yield "wpe", (CONTEXT, width)
    for layer in range(layers):
        for name, rows, columns in (("attn", 3, 1), ("proj", 1, 1), ("fc", MLP, 1), ("out", 1, MLP)):
            yield f"h.{layer}.{name}.weight", (rows * width, columns * width)
            yield f"h.{layer}.{name}.bias", (rows * width,)
        for name in ("ln_1", "ln_2"):
            yield f"h.{layer}.{name}.weight", (width,)
            yield f"h.{layer}.{name}.bias", (width,)


def fill(into: torch.Tensor, kind: int, name: str, start: int) -> torch.Tensor:
    """Write the values of a range of a parameter.

    Args:
        into: contiguous float32, which is filled.
        kind: 0 for the weights, then the moments.
        name: of the parameter.
        start: first element of the range in the whole parameter.

    Returns:
        `into`.
    """
    for part, values in _parts(into, kind, name, start):
        part.copy_(values)
    return into


def holds(found: torch.Tensor, kind: int, name: str, start: int) -> bool:
    """Whether a contiguous tensor holds what `fill` writes there."""
    return all(torch.equal(part, values.expand_as(part)) for part, values in _parts(found, kind, name, start))


def _parts(whole: torch.Tensor, kind: int, name: str, start: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The periods of a tensor as rows, and their values; then the rest that is shorter."""
    first = start + 7 * kind + 131 * len(name)
    values = ((torch.arange(first, first + PERIOD) % PERIOD) * (kind + 1)).float()
    flat = whole.view(-1)
    periods, rest = divmod(flat.numel(), PERIOD)
    yield flat[: periods * PERIOD].view(periods, PERIOD), values
    yield flat[periods * PERIOD :], values[:rest]
