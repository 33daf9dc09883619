"""The tiny models that try an engine adapter, and their batches."""

import torch
from torch import nn
from torch.nn import functional

__all__ = [
    "BATCH",
    "HIDDEN",
    "LENGTH",
    "VOCABULARY",
    "WIDTH",
    "TinyConvNet",
    "TinyLM",
    "TinyMixture",
    "TinyMixtures",
    "TinySplitLM",
    "image_batch",
    "lay_out",
    "token_batch",
]

VOCABULARY, WIDTH, HIDDEN = 11, 7, 13  # odd, so that partitions straddle tensors and end in padding
BATCH, LENGTH = 2, 3


class TinyLM(nn.Module):
    """Tied embedding, dropout, a frozen layer, and a buffer that changes in training and matters for the loss."""

    drift: torch.Tensor

    def __init__(self, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.up = nn.Linear(WIDTH, hidden)
        self.dropout = nn.Dropout(0.2)
        self.down = nn.Linear(hidden, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("drift", torch.zeros(WIDTH))

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor, loss_factor: float = 1.0) -> torch.Tensor:
        """The loss of token sequences, times a factor with which a test can make it overflow."""
        hidden = self.embed(tokens)
        hidden = hidden + self.frozen(hidden) + self.drift.to(hidden.dtype)
        hidden = hidden + self.down(self.dropout(torch.relu(self.up(hidden))))
        if self.training:
            with torch.no_grad():
                self.drift.mul_(0.9).add_(hidden.float().mean((0, 1)).to(self.drift.dtype), alpha=0.1)
        loss = functional.cross_entropy(self.head(hidden).float().flatten(0, 1), targets.flatten())
        return loss * loss_factor


class TinySplitLM(TinyLM):
    """One to be split over ranks: with a parameter of one element, so that all ranks but one hold nothing of it."""

    def __init__(self, hidden: int = HIDDEN) -> None:
        super().__init__(hidden)
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor, loss_factor: float = 1.0) -> torch.Tensor:
        """As of `TinyLM`, times that parameter."""
        return super().forward(tokens, targets, loss_factor) * self.gain.squeeze()


class TinyMixture(nn.Module):
    """Experts beside a shared one, of which each token takes the best; `counts` says how many took which."""

    counts: torch.Tensor

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, experts, bias=False)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(experts))
        self.shared = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Route each token to its best expert, and add the shared layer."""
        weights, places = self.gate(hidden).softmax(-1).max(-1)
        self.counts = torch.bincount(places.flatten(), minlength=len(self.experts))
        every = torch.stack([expert(hidden) for expert in self.experts], -2)
        taken = every.gather(-2, places[..., None, None].expand(*places.shape, 1, WIDTH)).squeeze(-2)
        output: torch.Tensor = hidden + self.shared(hidden) + weights.unsqueeze(-1) * taken
        return output


class TinyMixtures(nn.Module):
    """Two layers of experts, not equally many."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.first, self.second = TinyMixture(4), TinyMixture(3)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The loss of token sequences."""
        logits = self.head(self.second(self.first(self.embed(tokens))))
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class TinyConvNet(nn.Module):
    """Convolutions in channels_last memory with batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.ReLU(), nn.Dropout(0.2), nn.Conv2d(5, VOCABULARY, 3)
        )

    def forward(self, images: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
        """The loss of images, in a dictionary as some models return it."""
        logits = self.layers(images).mean((2, 3))
        return {"loss": functional.cross_entropy(logits.float(), targets)}


def lay_out(module: nn.Module, memory_format: torch.memory_format) -> None:
    """Give the four-dimensional parameters a memory format."""
    for parameter in module.parameters():
        if parameter.dim() == 4:
            parameter.data = parameter.data.contiguous(memory_format=memory_format)


def token_batch(step: int, micro: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and targets of one micro-batch, int64 of shape `(BATCH, LENGTH)`, on the CPU."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def image_batch(step: int, micro: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Images in channels_last memory, of shape `(4, 3, 6, 6)`, and int64 targets, on the CPU."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
    images = torch.randn(4, 3, 6, 6, generator=generator).to(memory_format=torch.channels_last)
    return images, torch.randint(VOCABULARY, (4,), generator=generator)
