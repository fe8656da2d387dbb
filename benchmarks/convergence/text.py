"""Tasks with a small Llama: bytes of the source of Python's standard library, or text files."""

from __future__ import annotations

import ast
import functools
import os
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from benchmarks.command import track
from benchmarks.convergence.setting import WARMUP, Setting
from benchmarks.convergence.tasks import Task, evaluating, generator, seeded, with_lora

Tokens = NDArray[np.integer[Any]]
HELD_OUT = ("argparse.py", "json/decoder.py", "statistics.py", "tarfile.py", "textwrap.py")
BASE_SEED, BASE_LR, BASE_BATCH = 1_000_003, 3e-3, 16
HEAD = 32  # Elements of an attention head.


class Pretraining(Task):
    """Trains from random weights on the source of the standard library."""

    validation_sequences, validation_batch = 256, 32

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._train, held_out = self._texts()
        length = setting.sequence
        whole = held_out[: len(held_out) // length * length].reshape(-1, length)
        count = min(self.validation_sequences, len(whole))
        spread = whole[np.arange(count) * len(whole) // max(count, 1)].astype(np.int64)
        self._held_out = torch.split(torch.from_numpy(spread), self.validation_batch)

    def _texts(self) -> tuple[Tokens, Tokens]:
        """Returns the training text and the held-out text."""
        return corpus((0, 1), Path.read_bytes)

    def model(self, seed: int) -> nn.Module:
        """Returns a new Llama, whose tokens are bytes unless the setting has a vocabulary."""
        from transformers import LlamaConfig, LlamaForCausalLM

        hidden = self.setting.hidden
        heads = max(hidden // HEAD, 1)
        if hidden % (2 * heads):
            raise ValueError(
                f"--hidden must be a multiple of {HEAD}, or even and below {HEAD} (got {hidden})"
            )
        config = LlamaConfig(
            vocab_size=self.setting.vocabulary or 256, hidden_size=hidden,
            intermediate_size=3 * hidden, num_hidden_layers=self.setting.layers,
            num_attention_heads=heads, max_position_embeddings=self.setting.sequence,
            tie_word_embeddings=not self.setting.untied,
            bos_token_id=None, eos_token_id=None, pad_token_id=0, use_cache=False,
        )  # fmt: skip
        with seeded(seed):
            return LlamaForCausalLM(config)

    def batch(self, worker: int, step: int, seed: int) -> Tensor:
        """Returns random pieces of the text as int64 tokens, shape (batch, sequence)."""
        rng = generator(seed, worker, step)
        return _sequences(self._train, self.setting.batch, self.setting.sequence, rng)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        loss: Tensor = model(input_ids=batch, labels=batch).loss
        return loss

    def validation(self, model: nn.Module) -> float:
        """Returns nats per token of the held-out text."""
        with evaluating(model):
            total = sum(float(self.loss(model, part)) * len(part) for part in self._held_out)
        return total / sum(map(len, self._held_out))


class FineTuning(Pretraining):
    """Trains a base, which AdamW has trained on library code, on the prose of docstrings."""

    def _texts(self) -> tuple[Tokens, Tokens]:
        return corpus((1,), docstrings)  # From files that the base was not trained on.

    def _base_text(self) -> Tokens:
        return corpus((0,), Path.read_bytes)[0]

    def prepare(self) -> None:
        """Trains the base, unless the folder already has it."""
        path = self._path
        if path.exists():
            return
        setting, text = self.setting, self._base_text()
        model = Pretraining.model(self, BASE_SEED)
        optimizer = torch.optim.AdamW(model.parameters(), lr=BASE_LR, weight_decay=0.1)
        # Use only those values of the setting that are in the file's name.
        schedule = setting.replace(lr=BASE_LR, steps=setting.base_steps, warmup=WARMUP)
        for step in track(range(setting.base_steps), "training the base"):
            optimizer.param_groups[0]["lr"] = schedule.lr_at(step)
            tokens = _sequences(text, BASE_BATCH, setting.sequence, generator(BASE_SEED, 0, step))
            self.loss(model, tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}")  # Another process must not find a partial file.
        torch.save(model.state_dict(), part)
        part.replace(path)

    def model(self, seed: int) -> nn.Module:
        """Returns the base, the same for every seed."""
        self.prepare()
        model = super().model(BASE_SEED)
        model.load_state_dict(torch.load(self._path))
        return model

    @property
    def _path(self) -> Path:
        s = self.setting
        name = f"base-{s.hidden}x{s.layers}-{s.sequence}-{s.base_steps}"
        name += f"-{s.text}-{s.vocabulary}" * bool(s.text) + "-untied" * s.untied + ".pt"
        return Path(s.folder) / name


class LowRank(FineTuning):
    """Trains LoRA factors on the task of `FineTuning`."""

    grids: ClassVar[dict[str, tuple[float, ...]]] = {
        "adamw": (3e-3, 1e-2, 3e-2),
        "lion": (1e-3, 3e-3, 1e-2),
    }

    def model(self, seed: int) -> nn.Module:
        return with_lora(super().model(seed), seed)


@functools.cache
def corpus(halves: tuple[int, ...], text_of: Callable[[Path], bytes]) -> tuple[Tokens, Tokens]:
    """Returns a training text of every other file (or of all files), and a held-out text."""
    root = Path(sysconfig.get_path("stdlib"))
    found = [*root.glob("*.py"), *(root / "json").glob("*.py"), *(root / "email").glob("*.py")]
    train, held_out = [], []
    for number, path in enumerate(sorted(found)):
        if path.relative_to(root).as_posix() in HELD_OUT:
            held_out.append(text_of(path))
        elif number % 2 in halves:
            train.append(text_of(path))
    train_bytes, held_out_bytes = (
        np.frombuffer(b"".join(part), np.uint8) for part in (train, held_out)
    )
    return train_bytes, held_out_bytes


def docstrings(path: Path) -> bytes:
    """Returns the docstrings of a file."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = (n for n in ast.walk(ast.parse(path.read_bytes())) if isinstance(n, documented))
    texts = [text for node in nodes if (text := ast.get_docstring(node))]
    return "".join(f"{text}\n\n" for text in texts).encode()


def _sequences(text: Tokens, count: int, length: int, rng: np.random.Generator) -> Tensor:
    """Returns random pieces of a text, int64, shape (count, length)."""
    starts = rng.integers(0, len(text) - length + 1, count)
    return torch.from_numpy(text[starts[:, None] + np.arange(length)].astype(np.int64))
