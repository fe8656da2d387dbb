"""A small Llama on text files, of which a run sees no piece twice."""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from benchmarks.convergence.chat import Chat
from benchmarks.convergence.setting import Setting
from benchmarks.convergence.tasks import evaluating, generator
from benchmarks.convergence.text import FineTuning, Pretraining, Tokens

# The text has this many blocks, and each that follows HELD_OUT others is held out.
BLOCKS, HELD_OUT = 640, 31
PIECE = 1 << 20  # Characters that are turned into tokens at a time.
# A token is rare if a run has it in less than one of so many steps.
RARE_STEPS = 100


class Files(FineTuning):
    """Trains on `--text`, from a base that was trained on `--base-text`, or from random weights.

    Each rank and step has pieces of its own. Held-out text is in blocks of hundreds of pieces.
    """

    validation_sequences = 1024

    def __init__(self, setting: Setting) -> None:
        if not setting.files[1]:
            raise ValueError('the task "text" has no text; pass --text FILE ...')
        super().__init__(setting)
        length, self._needed = setting.sequence, setting.steps * setting.workers * setting.batch
        count = len(self._train) // length
        if self._needed > count or not self._held_out:
            raise ValueError(
                f"--text has {count:,} training sequences of {length} tokens, but {setting.steps} "
                f"steps of {setting.workers} ranks need {self._needed:,}; pass more text, or fewer "
                "--steps"
            )
        self._pieces = self._train[: count * length].reshape(count, length)

    def _texts(self) -> tuple[Tokens, Tokens]:
        blocks = np.array_split(self._tokens()[1], BLOCKS)
        held_out = range(HELD_OUT, BLOCKS, HELD_OUT + 1)
        train = [block for number, block in enumerate(blocks) if number not in held_out]
        return np.concatenate(train), np.concatenate([blocks[number] for number in held_out])

    def _base_text(self) -> Tokens:
        return self._tokens()[0]

    def _tokens(self) -> tuple[Tokens, Tokens]:
        setting = self.setting
        path = Path(setting.folder) / f"tokens-{setting.text}-{setting.vocabulary}.npz"
        if not path.exists():
            self._write_tokens(path)
        return _read_tokens(path)

    def _write_tokens(self, path: Path) -> None:
        texts = [
            "".join(Path(name).read_text("utf-8", "replace") for name in part)
            for part in self.setting.files
        ]
        pieces = [
            [text[start : start + PIECE] for start in range(0, len(text), PIECE)] for text in texts
        ]
        encode = self._encoder([piece for part in pieces for piece in part])
        base, text = (
            np.array([token for piece in part for token in encode(piece)], np.int32)
            for part in pieces
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}.npz")  # No process may find a partial file.
        np.savez(part, base=base, text=text)
        part.replace(path)

    def _encoder(self, pieces: list[str]) -> Callable[[str], list[int]]:
        """Returns a byte-level BPE that is trained on all pieces of text."""
        from tokenizers import ByteLevelBPETokenizer

        tokenizer = ByteLevelBPETokenizer()
        tokenizer.train_from_iterator(pieces, self.setting.vocabulary, show_progress=False)
        return lambda piece: tokenizer.encode(piece).ids

    def prepare(self) -> None:
        if self.setting.base_steps:
            super().prepare()

    def model(self, seed: int) -> nn.Module:
        """Returns the base, the same for every seed, or a new model."""
        if self.setting.base_steps:
            return super().model(seed)
        return Pretraining.model(self, seed)

    def batch(self, worker: int, step: int, seed: int) -> Tensor:
        """Returns pieces that no other rank or step of the run has."""
        place = (step * self.setting.workers + worker) * self.setting.batch
        chosen = _order(seed, len(self._pieces))[place : place + self.setting.batch]
        return torch.from_numpy(self._pieces[chosen].astype(np.int64))

    def details(self, model: nn.Module) -> dict[str, Any]:
        """Returns the held-out loss of rare tokens, of those that follow one, and of the rest."""
        setting = self.setting
        used = _order(setting.seed, len(self._pieces))[: self._needed]
        counts = np.bincount(self._pieces[used].ravel(), minlength=setting.vocabulary)
        rare = torch.from_numpy(counts < setting.steps / RARE_STEPS)
        losses, kinds = [], []
        with evaluating(model):
            for batch in self._held_out:
                logits = model(input_ids=batch).logits[:, :-1].flatten(0, 1).float()
                labels, before = batch[:, 1:].flatten(), batch[:, :-1].flatten()
                losses.append(nn.functional.cross_entropy(logits, labels, reduction="none"))
                kinds.append(torch.stack([rare[labels], rare[before]]))
        loss, (on, after) = torch.cat(losses), torch.cat(kinds, dim=1)
        parts = {"rare": on, "after_rare": after & ~on, "rest": ~(on | after)}
        return {
            name: {
                "loss": float(loss[part].mean()) if part.any() else None,
                "tokens": int(part.sum()),
            }
            for name, part in parts.items()
        }


class SmolLM2(Files):
    """Trains SmolLM2-135M-Instruct on `--text`."""

    grids = Chat.grids
    validation_sequences, validation_batch = 256, 8

    def __init__(self, setting: Setting) -> None:
        self._chat = Chat(setting)
        super().__init__(setting)

    def prepare(self) -> None:
        self._chat.prepare()

    def model(self, seed: int) -> nn.Module:
        return self._chat.model(seed)

    def _encoder(self, pieces: list[str]) -> Callable[[str], list[int]]:
        tokenizer = self._chat.tokenizer()
        return lambda piece: tokenizer(piece, add_special_tokens=False).input_ids

    def details(self, model: nn.Module) -> dict[str, Any]:
        return {}


def digest(files: Sequence[Sequence[str]]) -> str:
    """Returns a hash of the contents of the files of the base and of the run."""
    hashes = [
        [hashlib.sha256(Path(name).read_bytes()).hexdigest() for name in part] for part in files
    ]
    return hashlib.sha256(repr(hashes).encode()).hexdigest()[:16]


@functools.lru_cache(maxsize=1)
def _read_tokens(path: Path) -> tuple[Tokens, Tokens]:
    with np.load(path) as read:
        return read["base"], read["text"]


@functools.lru_cache(maxsize=1)
def _order(seed: int, pieces: int) -> NDArray[np.int64]:
    return generator(seed).permutation(pieces)
