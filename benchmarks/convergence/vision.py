"""Tasks with images: the Distributed Lion paper's vision transformer, and a smaller one.

The task "cifar10" is the paper's setting: 6 layers, 8 heads, 512 wide, 200 epochs, cosine, 32
images per worker, learning rate in {5e-5, 1e-3, 5e-3, 1e-2}, weight decay in {5e-4, 1e-3, 5e-3}.
The paper does not name the patch size. Patches of 4 x 4 pixels and an MLP as wide as the model are
usual in small transformers for these images. With 4 workers, 200 epochs of 50,000 images are 78,125
steps:

    python -m benchmarks.convergence --tasks cifar10 --workers 4 --batch 32 --hidden 512 \
        --layers 6 --steps 78125 --weight-decay 1e-3

The task "vision" uses the 1797 images of 8 x 8 pixels that come with scikit-learn.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

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


class Images(NamedTuple):
    """A data set in memory; `patch` is the side of a patch in pixels."""

    train: Batch
    held_out: Batch
    patch: int


@functools.lru_cache(maxsize=1)
def digits() -> Images:
    """Returns scikit-learn's handwritten digits; every fifth is held out."""
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
    parts = (Batch(pixels[chosen], labels[chosen]) for chosen in (~held_out, held_out))
    return Images(*parts, patch=2)


@functools.lru_cache(maxsize=1)
def cifar10() -> Images:
    """Returns CIFAR-10 from the hub or its cache; its test images are held out."""
    from datasets import load_dataset

    try:
        data = load_dataset("uoft-cs/cifar10")
    except OSError as error:
        raise ConnectionError(
            'the task "cifar10" cannot load "uoft-cs/cifar10". Run it once with access to the '
            'Hugging Face hub, or use the task "vision", whose images come with scikit-learn.'
        ) from error
    parts = []
    for split in ("train", "test"):
        rows = data[split].with_format("numpy")
        pixels = torch.from_numpy(np.asarray(rows["img"][:])).permute(0, 3, 1, 2)
        labels = torch.from_numpy(np.asarray(rows["label"][:])).long()
        parts.append(Batch(pixels.float() / 127.5 - 1.0, labels))
    return Images(*parts, patch=4)


class Digits(Task):
    """The paper's vision setting with handwritten digits, at a size for a CPU."""

    source: ClassVar[Callable[[], Images]] = staticmethod(digits)
    grids: ClassVar[dict[str, tuple[float, ...]]] = {**Task.grids, "sgd": (1e-2, 3e-2, 1e-1, 3e-1)}

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._images = type(self).source()

    def model(self, seed: int) -> nn.Module:
        """Returns a new vision transformer with 8 heads, without dropout."""
        from transformers import ViTConfig, ViTForImageClassification

        images, hidden = self._images, self.setting.hidden
        if hidden % HEADS:
            raise ValueError(
                f"--hidden must be a multiple of {HEADS}, the number of heads (got {hidden})"
            )
        config = ViTConfig(
            image_size=images.train.pixels.shape[-1], num_channels=images.train.pixels.shape[1],
            patch_size=images.patch, hidden_size=hidden, intermediate_size=hidden,
            num_hidden_layers=self.setting.layers, num_attention_heads=HEADS,
        )  # fmt: skip
        config.num_labels = CLASSES
        with seeded(seed):
            return ViTForImageClassification(config)

    def batch(self, worker: int, step: int, seed: int) -> Batch:
        """Returns a worker's images. Each worker sees all images once per epoch, in a new order."""
        size, images = self.setting.batch, len(self._images.train.labels)
        chosen = [
            _order(seed, worker, place // images, images)[place % images]
            for place in range(step * size, (step + 1) * size)
        ]
        pixels, labels = (part[chosen] for part in self._images.train)
        return Batch(self.augmented(pixels, generator(seed, worker, step)), labels)

    def augmented(self, pixels: Tensor, rng: np.random.Generator) -> Tensor:
        return pixels

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(model(pixel_values=batch.pixels).logits, batch.labels)

    def validation(self, model: nn.Module) -> float:
        """Returns the cross entropy of held-out images, in nats."""
        logits, labels = self._held_out_logits(model), self._images.held_out.labels
        return float(nn.functional.cross_entropy(logits, labels))

    def metrics(self, model: nn.Module) -> dict[str, float]:
        """Returns the share of held-out images that are classified correctly."""
        right = self._held_out_logits(model).argmax(-1) == self._images.held_out.labels
        return {"accuracy": float(right.float().mean())}

    def _held_out_logits(self, model: nn.Module) -> Tensor:
        with evaluating(model):
            parts = torch.split(self._images.held_out.pixels, VALIDATION_BATCH)
            return torch.cat([model(pixel_values=part).logits for part in parts])


class Cifar10(Digits):
    """The paper's vision setting with CIFAR-10."""

    source: ClassVar[Callable[[], Images]] = staticmethod(cifar10)
    grids: ClassVar[dict[str, tuple[float, ...]]] = dict.fromkeys(
        ("adamw", "lion", "sgd"), (5e-5, 1e-3, 5e-3, 1e-2)
    )

    def augmented(self, pixels: Tensor, rng: np.random.Generator) -> Tensor:
        """Returns the images shifted by up to 4 pixels, and mirrored with probability 1/2."""
        side, moved = pixels.shape[-1], []
        moves, mirrored = rng.integers(9, size=(len(pixels), 2)), rng.integers(2, size=len(pixels))
        padded = nn.functional.pad(pixels, (4, 4, 4, 4))
        for image, (top, left), flip in zip(padded, moves, mirrored, strict=True):
            part = image[:, top : top + side, left : left + side]
            moved.append(part.flip(-1) if flip else part)
        return torch.stack(moved)


@functools.lru_cache(maxsize=64)  # One epoch of up to 64 workers.
def _order(seed: int, worker: int, epoch: int, images: int) -> NDArray[np.int64]:
    return generator(seed, ORDER, worker, epoch).permutation(images)
