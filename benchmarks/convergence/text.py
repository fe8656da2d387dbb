"""Scenes of text: a small byte-level Llama from random weights, and fine-tuned from a base."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.convergence import corpus
from benchmarks.convergence.scenes import Scene, evaluating, generator, seeded
from benchmarks.convergence.setting import WARMUP, Setting
from hf_dlion.tools.report import track

VALIDATION_SEQUENCES = 256
VALIDATION_BATCH = 32
BASE_SEED = 1_000_003
BASE_LR, BASE_BATCH = 3e-3, 16
# Elements of an attention head.
HEAD = 32


def byte_llama(hidden: int, layers: int, sequence: int, seed: int) -> nn.Module:
    """Returns a new Llama whose tokens are bytes; the embedding is tied.

    Args:
        hidden: Width.
        layers: Depth.
        sequence: The most tokens it will see.
        seed: Of the weights.

    Raises:
        ValueError: If the width cannot be shared among heads of 32 and more elements, an even
            number each.
    """
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
        """Reads the source."""
        super().__init__(setting)
        self._text = self._corpus()
        held_out = corpus.blocks(self._text.validation, setting.sequence, VALIDATION_SEQUENCES)
        self._held_out = torch.split(torch.from_numpy(held_out.astype(np.int64)), VALIDATION_BATCH)

    def _corpus(self) -> corpus.Corpus:
        return corpus.code()

    def model(self, seed: int) -> nn.Module:
        """Returns a new Llama."""
        setting = self.setting
        return byte_llama(setting.hidden, setting.layers, setting.sequence, seed)

    def batch(self, worker: int, step: int, seed: int) -> Tensor:
        """Returns int64 tokens, shape (batch, sequence), from anywhere in the text."""
        rng = generator(seed, worker, step)
        return _sequences(self._text.train, self.setting.batch, self.setting.sequence, rng)

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

    def __init__(self, setting: Setting) -> None:
        """Reads the docstrings."""
        super().__init__(setting)
        self._base: nn.Module | None = None

    def _corpus(self) -> corpus.Corpus:
        return corpus.prose()

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

    def untrained(self, seed: int) -> nn.Module:
        """Returns a new Llama."""
        return super().model(seed)

    def _path(self, folder: Path) -> Path:
        own = self.setting
        sizes = f"{own.hidden}x{own.layers}-{own.sequence}-{own.base_steps}"
        return folder / f"base-{sizes}.pt"

    def _trained_base(self) -> nn.Module:
        setting = self.setting
        text = corpus.base_code().train
        model = super().model(BASE_SEED)
        optimizer = torch.optim.AdamW(model.parameters(), lr=BASE_LR, weight_decay=0.1)
        # Of the setting only what the file's name holds.
        schedule = setting.replace(
            lr=BASE_LR, steps=setting.base_steps, schedule="cosine", warmup=WARMUP
        )
        for step in track(range(setting.base_steps), "training the base"):
            optimizer.param_groups[0]["lr"] = schedule.lr_at(step)
            tokens = _sequences(text, BASE_BATCH, setting.sequence, generator(BASE_SEED, 0, step))
            self.loss(model, tokens).backward()  # type: ignore[no-untyped-call]
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
        return _with_factors(super().model(seed), seed)

    def untrained(self, seed: int) -> nn.Module:
        """Returns a new Llama with new factors."""
        return _with_factors(super().untrained(seed), seed)


def _with_factors(base: nn.Module, seed: int) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    with seeded(seed):
        return get_peft_model(base, config)


def _sequences(text: corpus.Bytes, count: int, length: int, rng: np.random.Generator) -> Tensor:
    """Returns `count` pieces of a text, int64, shape (count, length)."""
    starts = rng.integers(0, len(text) - length + 1, count)
    return torch.from_numpy(text[starts[:, None] + np.arange(length)].astype(np.int64))
