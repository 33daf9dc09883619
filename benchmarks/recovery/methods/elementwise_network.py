"""The network of elementwise VITP: from values of a tensor's mid band at its checkpoints to those at a later time.

Source: CPSR, sections III-A and VI-C4: a tensor is cut into tokens of 1024 or 4096 values in a row. The dynamic time
embedding of the checkpoints is added to them before the position embedding.
"""

import math
from typing import cast

import torch
from torch import nn

__all__ = ["MAX_SNAPSHOTS", "Network", "new_network", "timing"]

MAX_SNAPSHOTS = 16
DIMENSION = 32
HEADS = 4
LAYERS = 2
HIDDEN = 64
# Periods of 4 to 1/4 of the window's span: the longest shows the target's side of the window, the shortest neighbours.
TIME_FREQUENCIES = tuple(0.25 * 2.0**octave for octave in range(5))
TIME_FEATURES = 2 + 2 * len(TIME_FREQUENCIES)


class Network(nn.Module):
    """A transformer over one sequence a token: its mid band at K checkpoints, then a query at the asked time.

    Args:
        token_elements: values in a token, T.
    """

    def __init__(self, token_elements: int) -> None:
        super().__init__()
        self.values = nn.Linear(token_elements, DIMENSION)
        self.time = nn.Linear(TIME_FEATURES, DIMENSION, bias=False)
        self.position = nn.Parameter(torch.empty(MAX_SNAPSHOTS, DIMENSION))
        self.query = nn.Parameter(torch.empty(DIMENSION))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(DIMENSION, HEADS, HIDDEN, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(LAYERS)
        )
        self.norm = nn.LayerNorm(DIMENSION)
        self.head = nn.Linear(DIMENSION, token_elements, bias=False)

    def forward(self, mid: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
        """The mid band at the query's time.

        Args:
            mid: at the checkpoints, oldest first, in units of its own size, `(B, K, T)` float32, K at most 16.
            times: `timing` of the checkpoints and the query, `(K + 1, TIME_FEATURES)` float32.

        Returns:
            `(B, T)` float32 in the same units.
        """
        batch, count, _ = mid.shape
        tokens = torch.cat([self.values(mid), self.query.expand(batch, 1, -1)], dim=1) + self.time(times)
        positions = torch.cat([self.position[:count].flip(0), torch.zeros_like(self.position[:1])])
        tokens = tokens + positions
        for layer in self.layers:
            tokens = layer(tokens)
        return cast(torch.Tensor, self.head(self.norm(tokens[:, -1])))


def new_network(token_elements: int, seed: int) -> Network:
    """A network that predicts no mid band at all, so that its start is the baseline; leaves global generators alone."""
    with torch.device("meta"):
        network = Network(token_elements)
    network = network.to_empty(device="cpu").float()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if parameter.dim() == 1 and name != "query":
                parameter.fill_(1.0 if "norm" in name and name.endswith("weight") else 0.0)
            elif name == "head.weight":
                parameter.zero_()
            else:
                parameter.normal_(generator=generator).div_(math.sqrt(parameter.shape[-1]))
    return network


def timing(times: torch.Tensor, asked: float) -> torch.Tensor:
    """What the dynamic time embedding is formed from, for K checkpoints and the query.

    Args:
        times: cumulative learning rates of the checkpoints, `(K,)` float64, strictly ascending, at least 2.
        asked: that of the query, after the newest.

    Returns:
        `(K + 1, TIME_FEATURES)` float32. In order: time after the newest checkpoint in spans of the window, gap in mean
        gaps, cosines and sines of the time. The oldest checkpoint's gap is 0.
    """
    span = times[-1] - times[0]
    gaps = torch.diff(times, prepend=times[:1], append=times.new_tensor([asked])) * (len(times) - 1) / span
    after = (torch.cat([times, times.new_tensor([asked])]) - times[-1]) / span
    phases = 2.0 * math.pi * torch.outer(after, times.new_tensor(TIME_FREQUENCIES))
    return torch.cat([after[:, None], gaps[:, None], phases.cos(), phases.sin()], dim=1).float()
