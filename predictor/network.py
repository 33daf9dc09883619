"""The network of VITP: a small transformer from an operator's Gram matrix to one coefficient per snapshot.

Source: CPSR, section III-A: checkpoints at irregular times are tokens, the dynamic time embedding is added to their
features before the position embedding. Here a token is a whole snapshot of an operator, described by products of
differences alone. So the work does not depend on the size of the operator.
"""

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import resources

import numpy
import torch
from safetensors.numpy import load
from torch.nn import functional

from cpsr.predictor.denoise import bands
from cpsr.predictor.line import line_coefficients
from cpsr.predictor.protocol import HistoryEntry
from cpsr.predictor.statistics import MAX_SNAPSHOTS

__all__ = [
    "DIMENSION",
    "MIN_SNAPSHOTS",
    "PARAMETERS",
    "SHAPES",
    "Geometry",
    "corrections",
    "cosines",
    "inner",
    "pretrained_parameters",
    "undisturbed",
]

# Of three snapshots no mid band is left, and the low band is the line.
MIN_SNAPSHOTS = 4
# Some 20 thousand weights: as many as a run's few hundred small examples can bear, and 0.2 MB with their moments.
DIMENSION = 32
HEADS = 4
LAYERS = 2
HIDDEN = 64
# Periods of 4 to 1/4 of the window's span: the longest separates the sides of the window, the shortest neighbours.
TIME_FREQUENCIES = tuple(0.25 * 2.0**octave for octave in range(5))
# Cosines with this many of the newest differences: a row of the normalised Gram matrix, cut or padded.
COSINES = 8
FEATURES = 4 + COSINES
# Below this share of the mean squared difference, or of the largest, a product is rounding of float32.
TINY = 1e-12

# What `cpsr bench network` has pretrained: one tensor, `parameters`.
WEIGHTS = "vitp_weights.safetensors"


LAYER_SHAPES = {
    "norm1": (2, DIMENSION),
    "attention.weight": (3 * DIMENSION, DIMENSION),
    "attention.bias": (3 * DIMENSION,),
    "mix.weight": (DIMENSION, DIMENSION),
    "norm2": (2, DIMENSION),
    "hidden.weight": (HIDDEN, DIMENSION),
    "hidden.bias": (HIDDEN,),
    "back.weight": (DIMENSION, HIDDEN),
}
SHAPES: dict[str, tuple[int, ...]] = {
    "features.weight": (DIMENSION, FEATURES),
    "features.bias": (DIMENSION,),
    "time.weight": (DIMENSION, 1 + 2 * len(TIME_FREQUENCIES)),
    "position": (MAX_SNAPSHOTS, DIMENSION),
    "query": (DIMENSION,),
    **{f"{layer}.{name}": shape for layer in range(LAYERS) for name, shape in LAYER_SHAPES.items()},
    "norm": (2, DIMENSION),
    "head.weight": (1, DIMENSION),
}
PARAMETERS = sum(math.prod(shape) for shape in SHAPES.values())


@dataclass(frozen=True)
class Geometry:
    """Geometry shared by all operators with the same snapshots.

    Attributes:
        line: the line's displacement over the K snapshots, scaled to norm 1, `(K,)`; sums to 0.
        denoised: low and mid band, `(K, K)`.
        scalars: of each snapshot: time before the newest in spans (negative), learning rate over the largest, gap in
            mean gaps (0 for the oldest), `(K, 3)`.
        query: where the direction is asked for, in spans after the newest.
    """

    line: torch.Tensor
    denoised: torch.Tensor
    scalars: torch.Tensor
    query: float

    @staticmethod
    def of(points: Sequence[HistoryEntry], time: float) -> "Geometry":
        """Of snapshots at strictly ascending times, asked for the direction at `time`, after the newest."""
        times = numpy.array([point.time for point in points])
        rates = numpy.array([point.learning_rate for point in points])
        span, count, split = times[-1] - times[0], len(points), bands(times.tolist())
        line = numpy.array(line_coefficients(times.tolist(), span))
        line[-1] -= 1.0
        gaps = numpy.diff(times, prepend=times[0]) * (count - 1) / span
        largest = rates.max()
        scalars = numpy.stack([(times - times[-1]) / span, rates / largest if largest > 0 else rates, gaps], axis=1)
        return Geometry(
            torch.from_numpy(line / numpy.linalg.norm(line)).float(),
            torch.from_numpy(split.low + split.mid).float(),
            torch.from_numpy(scalars).float(),
            float((time - times[-1]) / span),
        )


@contextmanager
def undisturbed() -> Iterator[None]:
    """Gradients in float32, whatever mode the training loop around is in; never kept across a `yield` of `learn`."""
    if torch.is_grad_enabled() and not (torch.is_inference_mode_enabled() or torch.is_autocast_enabled("cpu")):
        yield  # on the learner's thread: the modes would take longer than what is done in them
        return
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast("cpu", enabled=False):
        yield


@functools.cache
def pretrained_parameters() -> torch.Tensor:
    """Weights from the file beside this module, `(PARAMETERS,)` float32; never to be changed in place."""
    values = load(resources.files(__package__).joinpath(WEIGHTS).read_bytes())["parameters"]
    with undisturbed():
        return torch.from_numpy(values.copy()).view(PARAMETERS)


def corrections(parameters: torch.Tensor, geometry: Geometry, products: torch.Tensor) -> torch.Tensor:
    """Corrections of the line's direction, for B operators with the same K snapshots.

    Args:
        parameters: `(PARAMETERS,)` float32.
        geometry: of their snapshots.
        products: Gram matrices of the differences between them, of any scale, `(B, K - 1, K - 1)` float32.

    Returns:
        `(B, K)` float32: rows over the snapshots that sum to 0, in the low and mid band, against `geometry.line`.
    """
    pieces = torch.split(parameters, [math.prod(shape) for shape in SHAPES.values()])
    weights = {name: piece.view(shape) for (name, shape), piece in zip(SHAPES.items(), pieces, strict=True)}
    answers = _transformed(weights, _tokens(weights, geometry, products))
    return (answers - answers.mean(dim=1, keepdim=True)) @ geometry.denoised


def cosines(rows: torch.Tensor, others: torch.Tensor, products: torch.Tensor) -> torch.Tensor:
    """Cosines between displacements `rows` and `others`, each `(B, K)` or `(K,)` over the same K snapshots.

    Args:
        rows: coefficients that sum to 0.
        others: likewise.
        products: Gram matrices of the differences between the snapshots, `(B, K - 1, K - 1)`, each of trace 1 or so.

    Returns:
        `(B,)`; 0 where one of the two displacements vanishes.
    """
    between = inner(rows, products, others)
    scale = inner(rows, products, rows).clamp_min(TINY) * inner(others, products, others).clamp_min(TINY)
    return between / scale.sqrt()


def inner(rows: torch.Tensor, products: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """Inner products of the displacements `rows` and `others`; arguments as in `cosines`. Returns `(B,)`."""
    # A row over the snapshots that sums to 0 is one over the differences: minus its partial sums.
    first, second = -rows.cumsum(dim=-1)[..., :-1], -others.cumsum(dim=-1)[..., :-1]
    return (first.unsqueeze(-2) @ products @ second.unsqueeze(-1)).reshape(len(products))


def _tokens(weights: Mapping[str, torch.Tensor], geometry: Geometry, products: torch.Tensor) -> torch.Tensor:
    """Embedded snapshots, oldest first, and the query: `(B, K + 1, DIMENSION)`."""
    batch, count = len(products), len(geometry.line)
    squared = products.diagonal(dim1=1, dim2=2)
    norms = (squared / squared.mean(dim=1, keepdim=True).clamp_min(TINY)).clamp_min(TINY).sqrt()
    cosine = products / (squared.unsqueeze(1) * squared.unsqueeze(2)).clamp_min(TINY**2).sqrt()
    newest = cosine.flip(2)[..., :COSINES]
    features = torch.zeros(batch, count, FEATURES, dtype=torch.float32, device="cpu")
    features[..., :3] = geometry.scalars
    features[:, 1:, 3] = norms.log()
    features[:, 1:, 4 : 4 + newest.shape[2]] = newest
    snapshots = functional.linear(features, weights["features.weight"], weights["features.bias"])
    times = torch.cat([geometry.scalars[:, 0], torch.tensor([geometry.query], dtype=torch.float32, device="cpu")])
    query = weights["query"].expand(batch, 1, DIMENSION)
    phases = 2.0 * math.pi * torch.outer(times, torch.tensor(TIME_FREQUENCIES, dtype=torch.float32, device="cpu"))
    waves = torch.cat([times.unsqueeze(1), phases.cos(), phases.sin()], dim=1)
    timed = torch.cat([snapshots, query], dim=1) + functional.linear(waves, weights["time.weight"])
    return timed + functional.pad(weights["position"][:count].flip(0), (0, 0, 0, 1))  # the query has none


def _transformed(weights: Mapping[str, torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
    """One coefficient per snapshot, `(B, K)`: pre-norm layers of attention among all tokens."""
    batch, length, _ = tokens.shape
    for layer in range(LAYERS):
        normed = _normed(tokens, weights[f"{layer}.norm1"])
        mixed = functional.linear(normed, weights[f"{layer}.attention.weight"], weights[f"{layer}.attention.bias"])
        queries, keys, values = mixed.view(batch, length, 3, HEADS, DIMENSION // HEADS).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(queries, keys, values)
        attended = attended.transpose(1, 2).reshape(batch, length, DIMENSION)
        tokens = tokens + functional.linear(attended, weights[f"{layer}.mix.weight"])
        normed = _normed(tokens, weights[f"{layer}.norm2"])
        hidden = functional.gelu(
            functional.linear(normed, weights[f"{layer}.hidden.weight"], weights[f"{layer}.hidden.bias"])
        )
        tokens = tokens + functional.linear(hidden, weights[f"{layer}.back.weight"])
    return functional.linear(_normed(tokens, weights["norm"])[:, :-1], weights["head.weight"]).squeeze(2)


def _normed(tokens: torch.Tensor, scale_and_shift: torch.Tensor) -> torch.Tensor:
    scale, shift = scale_and_shift.unbind()  # one call, where two indices are two
    return functional.layer_norm(tokens, (DIMENSION,), scale, shift)
