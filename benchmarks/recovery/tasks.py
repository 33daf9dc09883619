"""Models and data that the recovery benchmark trains: a GPT and an LSTM on several texts, and a conv net on digits."""

import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator
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
    "DigitsTask",
    "Task",
    "TextTask",
    "batch_generator",
    "gpt_task",
]

FINAL_CHUNKS = 64  # at the end of a training, where a gap of one iteration is some 0.0002 nats
FINAL_CHUNK_SAMPLES = 8
BATCH_WINDOWS = 8
BATCH_IMAGES = 32
SEED_STRIDE = 1_000_003  # a prime far above any iteration: no two (seed, iteration) share a generator's seed
CONTEXT = 64  # bytes of a window: it keeps a step of a GPT at 10 to 25 ms on one core
# Every so many pieces of a text are held out: a twelfth of it.
TOPICS_VALIDATION_EVERY = 12
PACKAGES_VALIDATION_EVERY = 14
TEXT_BYTES = 8_000_000  # more than a training sees
# Held-out digits are every fifth image; noise and shifts make every image new, or a training would learn them by heart.
DIGITS_VALIDATION_EVERY = 5
NOISE = 0.5  # standard deviation, of pixels between 0 and 1
FINAL_SEED = -1  # of the noise in the images that the end is judged on

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
        return cast(GPT | LSTM, model).losses(batch).mean()

    def final_losses(self, model: nn.Module) -> torch.Tensor:
        """Mean loss of each chunk of eight held-out windows, the same in all runs."""
        device = next(model.parameters()).device
        count = FINAL_CHUNKS * FINAL_CHUNK_SAMPLES
        starts = torch.linspace(0, self._held_out.numel() - self._context - 1, count).long()
        chunks = self._windows(self._held_out, starts).view(FINAL_CHUNKS, FINAL_CHUNK_SAMPLES, -1)
        return torch.stack([cast(GPT | LSTM, model).losses(chunk.to(device)).mean() for chunk in chunks])

    def _windows(self, text: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        return text[starts[:, None] + torch.arange(self._context + 1)].long()


def gpt_task(config: GPTConfig, text: str = "library") -> TextTask:
    """A GPT of that shape on a text."""
    return TextTask(partial(GPT, config), text, config.context)


# Images

_Images = tuple[torch.Tensor, torch.Tensor]  # (n, 1, 8, 8) float32, and (n,) int64 labels


@cache
def _digits() -> tuple[_Images, _Images]:
    """Training and held-out images of scikit-learn's digits."""
    from sklearn.datasets import load_digits  # a second, for this one task

    pixels, labels = load_digits(return_X_y=True)
    images = torch.tensor(pixels / 16.0, dtype=torch.float32).view(-1, 1, 8, 8)
    known = torch.tensor(labels, dtype=torch.int64)
    held_out = torch.arange(len(images)) % DIGITS_VALIDATION_EVERY == 0
    return (images[~held_out], known[~held_out]), (images[held_out], known[held_out])


class DigitsTask:
    """Noisy digits, moved by a pixel at most, named by a conv net of 0.06 million weights (a `Task`)."""

    def __init__(self) -> None:
        self._training, self._held_out = _digits()

    def model(self) -> nn.Module:
        """A new model, initialised from torch's default generator."""
        return nn.Sequential(
            *(nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32, affine=True, track_running_stats=False), nn.ReLU()),
            *(nn.Conv2d(32, 48, 3, padding=1), nn.BatchNorm2d(48, affine=True, track_running_stats=False), nn.ReLU()),
            *(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(768, 64), nn.ReLU(), nn.Linear(64, 10)),
        )

    def batch(self, seed: int, iteration: int) -> _Images:
        """Training images with new noise."""
        generator = batch_generator(seed, iteration)
        images, labels = self._training
        chosen = torch.randint(len(images), (BATCH_IMAGES,), generator=generator)
        return _noisy(images[chosen], generator), labels[chosen]

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """Mean cross-entropy in nats an image."""
        images, labels = batch
        return functional.cross_entropy(model(images), labels)

    def final_losses(self, model: nn.Module) -> torch.Tensor:
        """Mean loss of each chunk of held-out images, the same in all runs."""
        device = next(model.parameters()).device
        return torch.stack([self.loss(model, [part.to(device) for part in chunk]) for chunk in self._final_chunks()])

    def _final_chunks(self) -> Iterator[_Images]:
        images, labels = self._held_out
        for chunk in range(FINAL_CHUNKS):
            generator = batch_generator(FINAL_SEED, chunk)
            chosen = torch.randint(len(images), (4 * BATCH_IMAGES,), generator=generator)
            yield _noisy(images[chosen], generator), labels[chosen]


def _noisy(images: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    down, right = (int(shift) for shift in torch.randint(-1, 2, (2,), generator=generator))
    moved = torch.roll(images, (down, right), (2, 3))
    return moved + NOISE * torch.randn(images.shape, generator=generator)


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
    "conv-0.1M": DigitsTask,
}
