"""A VGG-style convolutional net on scikit-learn's handwritten digits, augmented so that it goes on learning."""

import math
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional

from cpsr.benchmarks.recovery.task import FINAL_CHUNKS, VALIDATION_CHUNKS, batch_generator

__all__ = ["DigitsTask"]

PIXELS = 16  # the 8 x 8 scans are drawn onto twice as fine a canvas
CHANNELS = 24
HIDDEN = 128
CLASSES = 10
BATCH_IMAGES = 64
CHUNK_IMAGES = 24
VALIDATION_EVERY = 5  # every fifth scan is held out
VALIDATION_SEED = 1 << 40  # no training batch is drawn with it
FINAL_CHUNK_IMAGES = 48
# The augmentation: with less of it the validation loss stops falling before the run ends.
ROTATION_RADIANS = math.pi / 4
SCALES = (0.7, 1.2)
SHEAR = 0.4
SHIFT = 0.3  # of half the canvas
NOISE = 0.2  # standard deviation, ink being 1
PATCH_PIXELS = 6  # a square of it is blanked


class DigitsTask:
    """Classification of one distorted digit (a `Task`); a batch is `(64, 1, 16, 16)` images and `(64,)` labels."""

    def __init__(self) -> None:
        scans, labels = load_digits(return_X_y=True)
        images = torch.tensor(scans, dtype=torch.float32).view(-1, 1, 8, 8) / 16.0
        held_out = torch.arange(len(images)) % VALIDATION_EVERY == 0
        targets = torch.tensor(labels, dtype=torch.int64)
        self._images, self._targets = images[~held_out], targets[~held_out]
        self._held_out = images[held_out], targets[held_out]
        self._validation = self._drawn(VALIDATION_CHUNKS * CHUNK_IMAGES)

    def model(self) -> nn.Module:
        """Two pairs of 3 x 3 convolutions, each pooled, then two dense layers; no normalisation, as in VGG."""
        pooled = PIXELS // 4
        return nn.Sequential(
            *_convolutions(1, CHANNELS),
            *_convolutions(CHANNELS, 2 * CHANNELS),
            nn.Flatten(),
            nn.Linear(2 * CHANNELS * pooled**2, HIDDEN),
            nn.ReLU(),
            nn.Linear(HIDDEN, CLASSES),
        )

    def batch(self, seed: int, iteration: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Freshly distorted training images."""
        return _draw(self._images, self._targets, BATCH_IMAGES, batch_generator(seed, iteration))

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """Mean cross-entropy in nats an image."""
        images, targets = batch
        return functional.cross_entropy(model(images), targets)

    def validation_losses(self, model: nn.Module) -> torch.Tensor:
        """Mean loss of each chunk of 24 held-out images, distorted once and for all."""
        device = next(model.parameters()).device
        images, targets = (part.to(device) for part in self._validation)
        losses = functional.cross_entropy(model(images), targets, reduction="none")
        return losses.view(VALIDATION_CHUNKS, CHUNK_IMAGES).mean(1)

    def final_losses(self, model: nn.Module) -> torch.Tensor:
        """Mean loss of each chunk of 48 held-out images, distorted once and for all."""
        device = next(model.parameters()).device
        images, targets = (part.to(device) for part in self._drawn(FINAL_CHUNKS * FINAL_CHUNK_IMAGES))
        losses = functional.cross_entropy(model(images), targets, reduction="none")
        return losses.view(FINAL_CHUNKS, FINAL_CHUNK_IMAGES).mean(1)

    def _drawn(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        return _draw(*self._held_out, count, batch_generator(0, VALIDATION_SEED))


def _convolutions(inputs: int, outputs: int) -> list[nn.Module]:
    pair = [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(), nn.Conv2d(outputs, outputs, 3, padding=1), nn.ReLU()]
    return [*pair, nn.MaxPool2d(2)]


def _draw(
    images: torch.Tensor, targets: torch.Tensor, count: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """`count` images with replacement, each rotated, scaled, sheared, shifted, blanked in part, and noised."""
    chosen = torch.randint(len(images), (count,), generator=generator)
    grid = functional.affine_grid(_distortions(count, generator), [count, 1, PIXELS, PIXELS], align_corners=False)
    drawn = functional.grid_sample(images[chosen], grid, align_corners=False)
    drawn = drawn * _patches(count, generator)
    drawn = drawn + NOISE * torch.randn(drawn.shape, generator=generator)
    return drawn, targets[chosen]


def _distortions(count: int, generator: torch.Generator) -> torch.Tensor:
    uniform = 2 * torch.rand(5, count, generator=generator) - 1
    angle, shear = ROTATION_RADIANS * uniform[0], SHEAR * uniform[1]
    low, high = SCALES
    zoom = 1 / (low + (high - low) * (uniform[2] + 1) / 2)  # the grid maps the canvas back to the scan
    cosine, sine = zoom * torch.cos(angle), zoom * torch.sin(angle)
    rows = (
        torch.stack([cosine, shear * cosine - sine, SHIFT * uniform[3] * zoom]),
        torch.stack([sine, shear * sine + cosine, SHIFT * uniform[4] * zoom]),
    )
    return torch.stack(rows).permute(2, 0, 1)


def _patches(count: int, generator: torch.Generator) -> torch.Tensor:
    """1, and 0 inside one square of each image: `(count, 1, 16, 16)`."""
    corner = torch.randint(PIXELS - PATCH_PIXELS + 1, (2, count, 1), generator=generator)
    place = torch.arange(PIXELS)
    inside = (place >= corner) & (place < corner + PATCH_PIXELS)
    blank = inside[0][:, :, None] & inside[1][:, None, :]
    return (~blank).float()[:, None]
