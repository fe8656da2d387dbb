"""The Distributed Lion paper's vision transformer, small, on scikit-learn's digits."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from benchmarks.convergence.setting import Setting
from benchmarks.convergence.tasks import Task, evaluating, generator, seeded

HEADS, CLASSES, VALIDATION_BATCH = 8, 10, 256
# Separates random numbers of an epoch's order from those of a batch, which begin with a worker.
ORDER = 1 << 20


class Batch(NamedTuple):
    """Images and their labels.

    Attributes:
        pixels: float32, shape (images, channels, side, side), about -1 to 1.
        labels: int64, shape (images,).
    """

    pixels: Tensor
    labels: Tensor


@functools.lru_cache(maxsize=1)
def digits() -> tuple[Batch, Batch]:
    """Returns scikit-learn's 1797 handwritten digits of 8 x 8 pixels; every fifth is held out."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError(
            'the task "vision" needs scikit-learn for its images: pip install scikit-learn'
        ) from error
    data = load_digits()
    pixels = torch.from_numpy(data.images).float()[:, None] / 8.0 - 1.0
    labels = torch.from_numpy(data.target).long()
    held_out = torch.arange(len(labels)) % 5 == 4
    return tuple(Batch(pixels[chosen], labels[chosen]) for chosen in (~held_out, held_out))


class Digits(Task):
    """The paper's vision setting with handwritten digits, at a size for a CPU."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._train, self._held_out = digits()

    def model(self, seed: int) -> nn.Module:
        """Returns a new vision transformer with 8 heads, without dropout."""
        from transformers import ViTConfig, ViTForImageClassification

        hidden, (_, channels, _, side) = self.setting.hidden, self._train.pixels.shape
        if hidden % HEADS:
            raise ValueError(
                f"--hidden must be a multiple of {HEADS}, the number of heads (got {hidden})"
            )
        config = ViTConfig(
            image_size=side, num_channels=channels, patch_size=2, hidden_size=hidden,
            intermediate_size=hidden, num_hidden_layers=self.setting.layers,
            num_attention_heads=HEADS,
        )  # fmt: skip
        config.num_labels = CLASSES
        with seeded(seed):
            return ViTForImageClassification(config)

    def batch(self, worker: int, step: int, seed: int) -> Batch:
        """Returns a worker's images. Each worker sees all images once per epoch, in a new order."""
        size, images = self.setting.batch, len(self._train.labels)
        chosen = [
            _order(seed, worker, place // images, images)[place % images]
            for place in range(step * size, (step + 1) * size)
        ]
        return Batch(*(part[chosen] for part in self._train))

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(model(pixel_values=batch.pixels).logits, batch.labels)

    def validation(self, model: nn.Module) -> float:
        """Returns the cross entropy of held-out images, in nats."""
        with evaluating(model):
            parts = torch.split(self._held_out.pixels, VALIDATION_BATCH)
            logits = torch.cat([model(pixel_values=part).logits for part in parts])
        return float(nn.functional.cross_entropy(logits, self._held_out.labels))


@functools.lru_cache(maxsize=64)  # One epoch of up to 64 workers.
def _order(seed: int, worker: int, epoch: int, images: int) -> NDArray[np.int64]:
    return generator(seed, ORDER, worker, epoch).permutation(images)
