"""A small byte-level GPT under ZeRO-1, and text that every machine has: Python's own standard library."""

import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset

__all__ = ["BATCH", "GPT", "GPTConfig", "Windows", "read_corpus", "split_files", "zero_engine"]

BATCH = 4  # windows per rank and step


@dataclass(frozen=True)
class GPTConfig:
    """Shape of the model; the default has 0.84 million parameters."""

    layers: int = 4
    heads: int = 4
    width: int = 128
    context: int = 128
    vocabulary: int = 256


class _Block(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.norm_attention = nn.LayerNorm(config.width)
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.project = nn.Linear(config.width, config.width)
        self.norm_mlp = nn.LayerNorm(config.width)
        self.mlp = nn.Sequential(
            nn.Linear(config.width, 4 * config.width), nn.GELU(), nn.Linear(4 * config.width, config.width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, time, width = x.shape
        q, k, v = self.qkv(self.norm_attention(x)).view(batch, time, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(attended.transpose(1, 2).reshape(batch, time, width))
        mixed: torch.Tensor = x + self.mlp(self.norm_mlp(x))
        return mixed


class GPT(nn.Module):
    """A pre-norm GPT over bytes; `forward(windows)` is the mean cross-entropy in nats a byte."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.token = nn.Embedding(config.vocabulary, config.width)
        self.position = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(_Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.apply(_initialise)

    def forward(self, windows: torch.Tensor) -> torch.Tensor:
        """Loss of int64 windows of shape `(batch, context + 1)`: a scalar."""
        return self.losses(windows).mean()

    def losses(self, windows: torch.Tensor) -> torch.Tensor:
        """Loss of each window: shape `(batch,)`."""
        inputs, targets = windows[:, :-1], windows[:, 1:]
        x = self.token(inputs) + self.position(torch.arange(inputs.shape[1], device=inputs.device))
        for block in self.blocks:
            x = block(x)
        logits = self.norm(x) @ self.token.weight.T
        losses: torch.Tensor = functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
        return losses.mean(1)


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def zero_engine(
    model: nn.Module, optimizer: torch.optim.Optimizer, schedule: Callable[[int], float] | None = None
) -> Any:
    """DeepSpeed's engine of this rank with ZeRO stage 1; `schedule` gives the factor of the learning rate by step."""
    import deepspeed  # here: jobs of plain torch do without

    scheduler = None if schedule is None else torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        lr_scheduler=scheduler,
        config={
            "train_micro_batch_size_per_gpu": BATCH,
            "zero_optimization": {"stage": 1},
            "zero_allow_untested_optimizer": True,
            "gradient_clipping": 1.0,
            "steps_per_print": 10**9,
        },
    )
    return engine


CORPUS_BYTES = 8_000_000  # enough that a demo run never sees a window twice
VALIDATION_EVERY = 20  # every 20th file is for validation


def read_corpus() -> tuple[torch.Tensor, torch.Tensor]:
    """Training and validation text.

    Returns:
        Two 1-D uint8 tensors; the files of one never occur in the other.

    Raises:
        FileNotFoundError: this Python has no readable standard library sources.
    """
    root = Path(sysconfig.get_path("stdlib"))
    if not any(root.glob("*.py")):
        raise FileNotFoundError(f"no Python sources under {root}: the demo trains on the standard library's source")
    return split_files(_sources(root))


def _sources(directory: Path) -> Iterator[Path]:
    """Python sources below a directory, in the order of their paths, without installed packages."""
    for path in sorted(directory.iterdir()):
        if path.is_dir():
            if path.name != "site-packages":
                yield from _sources(path)
        elif path.suffix == ".py":
            yield path


def split_files(files: Iterable[Path]) -> tuple[torch.Tensor, torch.Tensor]:
    """Training and validation text of the first files that hold 8 MB: every 20th is for validation.

    Returns:
        Two 1-D uint8 tensors.
    """
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    size = 0
    for index, path in enumerate(files):
        text = path.read_bytes()
        parts[index % VALIDATION_EVERY == 0].append(text)
        size += len(text)
        if size >= CORPUS_BYTES:
            break
    train, validation = (torch.frombuffer(bytearray(b"".join(part)), dtype=torch.uint8) for part in parts)
    return train, validation


class Windows(Dataset[torch.Tensor]):
    """Windows of `length + 1` bytes, one every `length` bytes.

    Items are int64 tensors of shape `(length + 1,)`: inputs are all but the last byte, targets all but the first.
    """

    def __init__(self, text: torch.Tensor, length: int) -> None:
        self._text = text
        self._length = length

    def __len__(self) -> int:
        return (self._text.numel() - 1) // self._length

    def __getitem__(self, index: int) -> torch.Tensor:
        start = index * self._length
        return self._text[start : start + self._length + 1].long()
