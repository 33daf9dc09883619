"""Models and data that the recovery benchmark trains: a GPT, an LSTM and a conv net on several texts."""

import shutil
import subprocess
from collections.abc import Callable, Iterable
from functools import cache, partial
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import nn
from torch.nn import functional

from cpsr.demo.model import GPT, GPTConfig, read_corpus, split_files
from cpsr.errors import ConfigError

__all__ = [
    "BATCH_WINDOWS",
    "FINAL_CHUNKS",
    "SEED_STRIDE",
    "TASKS",
    "Task",
    "TextTask",
    "batch_generator",
    "gpt_task",
]

FINAL_CHUNKS = 64  # at the end of a training, where a gap of one iteration is some 0.0002 nats
FINAL_CHUNK_SAMPLES = 8
BATCH_WINDOWS = 8
SEED_STRIDE = 1_000_003  # a prime far above any iteration: no two (seed, iteration) share a generator's seed
CONTEXT = 64  # bytes of a window: it keeps a step of a GPT at 10 to 25 ms on one core
# Every so many pieces of a text are held out: a twelfth of it.
TOPICS_VALIDATION_EVERY = 12
PACKAGES_VALIDATION_EVERY = 14
TEXT_BYTES = 8_000_000  # more than a training sees
CONV_KERNEL, CONV_DILATIONS = 3, (1, 2, 4, 8)

_Text = tuple[torch.Tensor, torch.Tensor]  # training and held-out bytes


class Task(Protocol):
    """A model and its data; nothing in it depends on what was drawn before."""

    def model(self) -> nn.Module:
        """A new model, initialised from torch's default generator."""

    def batch(self, seed: int, iteration: int) -> Any:
        """The batch that takes a run from `iteration` to the next: a pure function of its arguments."""

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """Mean loss of the batch in nats, a scalar."""

    def final_losses(self, model: nn.Module) -> torch.Tensor:
        """Mean loss of each chunk of held-out data, `(FINAL_CHUNKS,)` in nats: what the end is judged on."""


def batch_generator(seed: int, iteration: int) -> torch.Generator:
    """Random numbers for one batch, whatever was drawn before."""
    return torch.Generator().manual_seed(seed * SEED_STRIDE + iteration)


# Texts


@cache
def _library() -> _Text:
    return read_corpus()


@cache
def _headers() -> _Text:
    """The C++ headers that torch installs."""
    root = Path(torch.__file__).parent / "include"
    files = sorted(root.rglob("*.h"))
    if not files:
        raise ConfigError(f"no C++ headers under {root}: this torch was installed without them")
    return split_files(files)


@cache
def _documentation() -> _Text:
    """The language reference that Python's `help()` shows, by topic."""
    from pydoc_data.topics import topics  # half a megabyte, for this one task

    return _split((topics[name] for name in sorted(topics)), TOPICS_VALIDATION_EVERY)


@cache
def _descriptions() -> _Text:
    """What the installed packages, but for this one, say about themselves: mostly English, about a megabyte."""
    known = {package.metadata["Name"].lower(): package.metadata for package in metadata.distributions()}
    known.pop("cpsr", None)
    texts = (str(known[name].json.get("description", "")) for name in sorted(known))
    return _split(texts, PACKAGES_VALIDATION_EVERY)


@cache
def _perl() -> _Text:
    """The manual of Perl, 9 MB of marked-up English and code."""
    files = sorted(Path("/usr/share/perl").glob("*/pod/*.pod"))
    if not files:
        raise ConfigError("the text 'perl' is Perl's manual, which is not installed: apt-get install perl-doc")
    return split_files(files)


@cache
def _debian() -> _Text:
    """What Debian's index says of every package: name, dependencies, tags, a line of English."""
    if shutil.which("apt-cache") is None:
        raise ConfigError("the text 'debian' is Debian's index of packages: it needs apt-cache")
    index = subprocess.run(["apt-cache", "dumpavail"], capture_output=True, text=True, check=True).stdout
    fields = ("Package:", "Depends:", "Tag:", "Homepage:", "Description:")
    kept = "".join(line for line in index.splitlines(keepends=True) if line.startswith(fields))
    if len(kept) < TEXT_BYTES:
        raise ConfigError("the text 'debian' is Debian's index of packages, which is not here: apt-get update")
    packages = kept[:TEXT_BYTES].split("Package:")
    return _split((f"Package:{package}" for package in packages), PACKAGES_VALIDATION_EVERY)


def _split(pieces: Iterable[str], validation_every: int) -> _Text:
    parts: tuple[list[str], list[str]] = ([], [])
    for place, text in enumerate(pieces):
        parts[place % validation_every == 0].append(text)
    training, validation = (torch.frombuffer(bytearray("".join(part).encode()), dtype=torch.uint8) for part in parts)
    return training, validation


_TEXTS: dict[str, Callable[[], _Text]] = {
    "library": _library,
    "headers": _headers,
    "documentation": _documentation,
    "descriptions": _descriptions,
    "perl": _perl,
    "debian": _debian,
}


class LSTM(nn.Module):
    """A byte-level LSTM of 0.2 million weights."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(256, 64)
        self.recurrent = nn.LSTM(64, 160, batch_first=True)
        self.head = nn.Linear(160, 256)

    def losses(self, windows: torch.Tensor) -> torch.Tensor:
        """Loss of each int64 window: `(batch,)`."""
        hidden, _ = self.recurrent(self.token(windows[:, :-1]))
        logits = self.head(hidden).transpose(1, 2)
        losses: torch.Tensor = functional.cross_entropy(logits, windows[:, 1:], reduction="none")
        return losses.mean(1)


class ConvNet(nn.Module):
    """A byte-level causal conv net of 0.1 million weights, that sees the 31 bytes before the one it predicts."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(256, 64)
        self.norms = nn.ModuleList(nn.LayerNorm(64) for _ in CONV_DILATIONS)
        self.wide = nn.ModuleList(nn.Conv1d(64, 64, CONV_KERNEL, dilation=dilation) for dilation in CONV_DILATIONS)
        self.narrow = nn.ModuleList(nn.Conv1d(64, 64, 1) for _ in CONV_DILATIONS)
        self.head = nn.Linear(64, 256)

    def losses(self, windows: torch.Tensor) -> torch.Tensor:
        """Loss of each int64 window: `(batch,)`."""
        hidden = self.token(windows[:, :-1])
        for norm, wide, narrow, dilation in zip(self.norms, self.wide, self.narrow, CONV_DILATIONS, strict=True):
            before = functional.pad(norm(hidden).transpose(1, 2), ((CONV_KERNEL - 1) * dilation, 0))
            hidden = hidden + narrow(functional.gelu(wide(before))).transpose(1, 2)
        logits = self.head(hidden).transpose(1, 2)
        losses: torch.Tensor = functional.cross_entropy(logits, windows[:, 1:], reduction="none")
        return losses.mean(1)


class TextTask:
    """Next-byte prediction (a `Task`); a batch is `(8, context + 1)` int64 windows at random places.

    Args:
        model: makes one.
        text: its name.
        context: bytes of a window.
    """

    def __init__(self, model: Callable[[], nn.Module], text: str = "library", context: int = CONTEXT) -> None:
        self._model, self._context = model, context
        self._text, self._held_out = _TEXTS[text]()

    def model(self) -> nn.Module:
        """A new model, initialised from torch's default generator."""
        return self._model()

    def batch(self, seed: int, iteration: int) -> torch.Tensor:
        """Windows that begin anywhere in the training text."""
        last = self._text.numel() - self._context
        starts = torch.randint(last, (BATCH_WINDOWS,), generator=batch_generator(seed, iteration))
        return self._windows(self._text, starts)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """Mean cross-entropy in nats a byte."""
        return cast(GPT | LSTM | ConvNet, model).losses(batch).mean()

    def final_losses(self, model: nn.Module) -> torch.Tensor:
        """Mean loss of each chunk of eight held-out windows, the same in all runs."""
        device = next(model.parameters()).device
        count = FINAL_CHUNKS * FINAL_CHUNK_SAMPLES
        starts = torch.linspace(0, self._held_out.numel() - self._context - 1, count).long()
        chunks = self._windows(self._held_out, starts).view(FINAL_CHUNKS, FINAL_CHUNK_SAMPLES, -1)
        return torch.stack([cast(GPT | LSTM | ConvNet, model).losses(chunk.to(device)).mean() for chunk in chunks])

    def _windows(self, text: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        return text[starts[:, None] + torch.arange(self._context + 1)].long()


def gpt_task(config: GPTConfig, text: str = "library") -> TextTask:
    """A GPT of that shape on a text."""
    return TextTask(partial(GPT, config), text, config.context)


# By name


# Four times the recoveries an hour with the small one.
_SMALL = GPTConfig(layers=2, heads=4, width=64, context=CONTEXT)
_MEDIUM = GPTConfig(layers=3, heads=4, width=96, context=CONTEXT)
TASKS: dict[str, Callable[[], Task]] = {
    "gpt-0.1M": partial(gpt_task, _SMALL),
    "gpt-0.4M": partial(gpt_task, _MEDIUM),
    "gpt-0.1M-descriptions": partial(gpt_task, _SMALL, "descriptions"),
    "gpt-0.4M-headers": partial(gpt_task, _MEDIUM, "headers"),
    "gpt-0.4M-documentation": partial(gpt_task, _MEDIUM, "documentation"),
    "gpt-0.4M-perl": partial(gpt_task, _MEDIUM, "perl"),
    "gpt-0.4M-debian": partial(gpt_task, _MEDIUM, "debian"),
    "lstm-0.2M": partial(TextTask, LSTM),
    "lstm-0.2M-perl": partial(TextTask, LSTM, "perl"),
    "conv-0.1M": partial(TextTask, ConvNet),
}
