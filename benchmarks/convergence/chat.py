"""Fine-tuning of a pretrained LLM, SmolLM2, on descriptions of library functions."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.convergence.setting import Setting
from benchmarks.convergence.tasks import Task, evaluating, generator, seeded, with_lora
from examples import smollm2

VALIDATION_ROWS, VALIDATION_BATCH = 64, 16
Turns = list[dict[str, str]]
IGNORED = -100  # A label that the losses of transformers leave out.


class Chat(Task):
    """Trains all parameters of SmolLM2-135M-Instruct on the tokens of answers."""

    grids: ClassVar[dict[str, tuple[float, ...]]] = {
        "adamw": (3e-5, 1e-4, 3e-4),
        "lion": (3e-5, 1e-4, 3e-4),
    }

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._base, self._tokenizer = Path(setting.folder) / "smollm2", None

    def prepare(self) -> None:
        """Writes the base, unless the folder already has it."""
        if self._base.exists():
            return
        smollm2.require_package()
        part = self._base.with_name(f"{self._base.name}.{os.getpid()}")
        smollm2.write_base(part, small=False)
        try:
            part.rename(self._base)
        except OSError:  # Another process was faster.
            shutil.rmtree(part)

    def model(self, seed: int) -> nn.Module:
        """Returns the base, the same for every seed."""
        from transformers import AutoModelForCausalLM

        self.prepare()
        with seeded(seed):  # transformers draws weights that the file lacks.
            made = AutoModelForCausalLM.from_pretrained(self._base, dtype=torch.float32)
        model: nn.Module = made
        return model

    def batch(self, worker: int, step: int, seed: int) -> dict[str, Tensor]:
        """Returns tokens, mask and labels, int64, shape (batch, tokens of the longest)."""
        return self._batch_of(self._train(generator(seed, worker, step)))

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        loss: Tensor = model(**batch).loss
        return loss

    def _train(self, rng: np.random.Generator) -> list[Turns]:
        """Returns the conversations of a batch."""
        rows = smollm2.standard_library()["train"]
        chosen = rng.integers(0, len(rows), self.setting.batch)
        return [rows[int(index)]["messages"] for index in chosen]

    def _held_out(self) -> list[Turns]:
        """Returns conversations about modules that are not in the training split."""
        return _spread(smollm2.standard_library()["validation"]["messages"], VALIDATION_ROWS)

    def validation(self, model: nn.Module) -> float:
        """Returns nats per token of held-out answers."""
        rows = self._held_out()
        total, tokens = 0.0, 0
        with evaluating(model):
            for first in range(0, len(rows), VALIDATION_BATCH):
                batch = self._batch_of(rows[first : first + VALIDATION_BATCH])
                # Each token predicts the next label.
                count = int((batch["labels"][:, 1:] != IGNORED).sum())
                total += float(self.loss(model, batch)) * count
                tokens += count
        return total / tokens

    def tokenizer(self) -> Any:
        """Returns the base's tokenizer."""
        if self._tokenizer is None:
            from transformers import AutoTokenizer

            self.prepare()
            self._tokenizer = AutoTokenizer.from_pretrained(self._base)
        return self._tokenizer

    def _tokens(self, turns: Turns, prompt: bool) -> list[int]:
        tokenizer = self.tokenizer()
        text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=prompt)
        tokens: list[int] = tokenizer(text, add_special_tokens=False).input_ids
        return tokens

    def _batch_of(self, rows: list[Turns]) -> dict[str, Tensor]:
        length = self.setting.sequence
        whole = [self._tokens(turns, prompt=False)[:length] for turns in rows]
        asked = [len(self._tokens(turns[:1], prompt=True)) for turns in rows]
        if not any(start < len(tokens) for tokens, start in zip(whole, asked, strict=True)):
            raise ValueError(f"--sequence {length} leaves no room for an answer; pass a larger one")
        shape = len(rows), max(map(len, whole))
        ids, labels = torch.zeros(shape, dtype=torch.int64), torch.full(shape, IGNORED)
        mask = torch.zeros_like(ids)
        for row, (tokens, start) in enumerate(zip(whole, asked, strict=True)):
            ids[row, : len(tokens)] = torch.tensor(tokens)
            labels[row, start : len(tokens)] = torch.tensor(tokens[start:])
            mask[row, : len(tokens)] = 1
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}


class ChatLoRA(Chat):
    """Trains LoRA factors of all linear layers of SmolLM2-135M-Instruct."""

    grids: ClassVar[dict[str, tuple[float, ...]]] = {
        "adamw": (3e-4, 1e-3, 3e-3),
        "lion": (1e-4, 3e-4, 1e-3),
    }

    def model(self, seed: int) -> nn.Module:
        return with_lora(super().model(seed), seed)


def _spread(rows: Any, count: int) -> list[Any]:
    """Returns `count` evenly spaced rows, or all rows if there are fewer."""
    rows = list(rows)
    return [rows[index * len(rows) // count] for index in range(min(count, len(rows)))]
