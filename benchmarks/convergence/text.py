"""Scenes of text that every Python has: the source of its standard library, and the prose in it.

A small byte-level Llama from random weights, and fine-tuned from a base.
"""

from __future__ import annotations

import ast
import copy
import functools
import os
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from hf_dlion.tools.report import track
from numpy.typing import NDArray
from torch import Tensor, nn

from benchmarks.convergence.scenes import Scene, evaluating, generator, seeded, with_lora
from benchmarks.convergence.setting import WARMUP, Setting

Bytes = NDArray[np.uint8]
# Files that are kept for validation.
HELD_OUT = ("argparse.py", "json/decoder.py", "statistics.py", "tarfile.py", "textwrap.py")
VALIDATION_SEQUENCES, VALIDATION_BATCH = 256, 32
BASE_SEED, BASE_LR, BASE_BATCH = 1_000_003, 3e-3, 16
# Elements of an attention head.
HEAD = 32


def byte_llama(hidden: int, layers: int, sequence: int, seed: int) -> nn.Module:
    """Returns a new Llama whose tokens are bytes; the embedding is tied."""
    from transformers import LlamaConfig, LlamaForCausalLM

    heads = max(hidden // HEAD, 1)
    if hidden % (2 * heads):
        raise ValueError(f"hidden={hidden} must be a multiple of {HEAD}, or even and below it")
    config = LlamaConfig(
        vocab_size=256, hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers,
        num_attention_heads=heads, max_position_embeddings=sequence,
        tie_word_embeddings=True, bos_token_id=None, eos_token_id=None, pad_token_id=0,
        use_cache=False,
    )  # fmt: skip
    with seeded(seed):
        return LlamaForCausalLM(config)


class Pretraining(Scene):
    """From random weights, on the source of the standard library."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._train, held_out = self._texts()
        # Pieces that are evenly spread.
        length = setting.sequence
        whole = held_out[: len(held_out) // length * length].reshape(-1, length)
        count = min(VALIDATION_SEQUENCES, len(whole))
        pieces = whole[np.arange(count) * len(whole) // max(count, 1)].astype(np.int64)
        self._held_out = torch.split(torch.from_numpy(pieces), VALIDATION_BATCH)

    def _texts(self) -> tuple[Bytes, Bytes]:
        return corpus((0, 1), Path.read_bytes)

    def model(self, seed: int) -> nn.Module:
        """Returns a new Llama."""
        setting = self.setting
        return byte_llama(setting.hidden, setting.layers, setting.sequence, seed)

    def batch(self, worker: int, step: int, seed: int) -> Tensor:
        """Returns int64 tokens, shape (batch, sequence), from anywhere in the text."""
        rng = generator(seed, worker, step)
        return _sequences(self._train, self.setting.batch, self.setting.sequence, rng)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Returns nats per byte."""
        loss: Tensor = model(input_ids=batch, labels=batch).loss
        return loss

    def validation(self, model: nn.Module) -> float:
        """Returns nats per byte of held-out files."""
        with evaluating(model):
            total = sum(float(self.loss(model, part)) * len(part) for part in self._held_out)
        return total / sum(map(len, self._held_out))


class FineTuning(Pretraining):
    """A base that AdamW trained once on library code learns the prose of docstrings."""

    _base: nn.Module | None = None

    def _texts(self) -> tuple[Bytes, Bytes]:
        # Of the files that the base has not seen.
        return corpus((1,), docstrings)

    def prepare(self, folder: Path) -> None:
        """Trains the base, unless the folder has it."""
        path = self._path(folder)
        if path.exists():
            return
        model = self._trained_base()
        path.parent.mkdir(parents=True, exist_ok=True)
        # Another process finds all of the file or none of it.
        part = path.with_suffix(f".{os.getpid()}")
        torch.save(model.state_dict(), part)
        part.replace(path)

    def model(self, seed: int) -> nn.Module:
        """Returns the base; every seed begins with the same."""
        if self._base is None:
            self.prepare(Path(self.setting.folder))
            self._base = super().model(BASE_SEED)
            self._base.load_state_dict(torch.load(self._path(Path(self.setting.folder))))
        return copy.deepcopy(self._base)

    def _path(self, folder: Path) -> Path:
        own = self.setting
        return folder / f"base-{own.hidden}x{own.layers}-{own.sequence}-{own.base_steps}.pt"

    def _trained_base(self) -> nn.Module:
        setting = self.setting
        text = corpus((0,), Path.read_bytes)[0]
        model = super().model(BASE_SEED)
        optimizer = torch.optim.AdamW(model.parameters(), lr=BASE_LR, weight_decay=0.1)
        # Of the setting only what the file's name holds.
        schedule = setting.replace(
            lr=BASE_LR, steps=setting.base_steps, schedule="cosine", warmup=WARMUP
        )
        for step in track(range(setting.base_steps), "training the base"):
            optimizer.param_groups[0]["lr"] = schedule.lr_at(step)
            tokens = _sequences(text, BASE_BATCH, setting.sequence, generator(BASE_SEED, 0, step))
            self.loss(model, tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
        return model


class LowRank(FineTuning):
    """The same with LoRA: of the linear layers only two thin factors are trained."""

    grids: ClassVar[dict[str, tuple[float, ...]]] = {
        "adamw": (3e-3, 1e-2, 3e-2),
        "lion": (1e-3, 3e-3, 1e-2),
        "sgd": (1e-1, 3e-1, 1e0),
    }

    def model(self, seed: int) -> nn.Module:
        """Returns the base with new factors."""
        return with_lora(super().model(seed), seed)


@functools.cache
def corpus(halves: tuple[int, ...], text_of: Callable[[Path], bytes]) -> tuple[Bytes, Bytes]:
    """Returns a text to learn from, of every other file or of all, and one to be tested on."""
    root = Path(sysconfig.get_path("stdlib"))
    found = [*root.glob("*.py"), *(root / "json").glob("*.py"), *(root / "email").glob("*.py")]
    train, held_out = [], []
    for number, path in enumerate(sorted(found)):
        if path.relative_to(root).as_posix() in HELD_OUT:
            held_out.append(text_of(path))
        elif number % 2 in halves:
            train.append(text_of(path))
    return tuple(np.frombuffer(b"".join(part), np.uint8) for part in (train, held_out))


def docstrings(path: Path) -> bytes:
    """Returns the docstrings of a file."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = (n for n in ast.walk(ast.parse(path.read_bytes())) if isinstance(n, documented))
    texts = [text for node in nodes if (text := ast.get_docstring(node))]
    return "".join(f"{text}\n\n" for text in texts).encode()


def _sequences(text: Bytes, count: int, length: int, rng: np.random.Generator) -> Tensor:
    """Returns `count` pieces of a text, int64, shape (count, length)."""
    starts = rng.integers(0, len(text) - length + 1, count)
    return torch.from_numpy(text[starts[:, None] + np.arange(length)].astype(np.int64))
