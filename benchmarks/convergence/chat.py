"""A pretrained LLM, SmolLM2, learns to say what the standard library's functions do."""

from __future__ import annotations

import collections
import os
import shutil
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from benchmarks.convergence.scenes import Scene, evaluating, generator, seeded, with_lora
from benchmarks.convergence.setting import Setting
from examples import smollm2

VALIDATION_ROWS, VALIDATION_BATCH = 64, 16
# Greedy answers to so many held-out questions, and how long they may get.
QUESTIONS, ANSWER_TOKENS = 48, 32
IGNORED = -100  # By the losses of transformers.


class Chat(Scene):
    """All parameters of SmolLM2-135M-Instruct; only the answer's tokens count."""

    grids: ClassVar[dict[str, tuple[float, ...]]] = {
        "adamw": (3e-5, 1e-4, 3e-4),
        "lion": (3e-5, 1e-4, 3e-4),
        "sgd": (1e-2, 1e-1, 1e0),
    }

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._splits, self._base = smollm2.standard_library(), Path(setting.folder) / "smollm2"
        self._tokenizer: Any = None

    def prepare(self) -> None:
        """Writes the base, unless the folder has it."""
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
        with seeded(seed):  # transformers draws what it does not find in the file.
            made = AutoModelForCausalLM.from_pretrained(self._base, dtype=torch.float32)
        model: nn.Module = made
        return model

    def batch(self, worker: int, step: int, seed: int) -> dict[str, Tensor]:
        """Returns tokens, mask and labels, int64, shape (batch, tokens of the longest)."""
        rows = self._splits["train"]
        chosen = generator(seed, worker, step).integers(0, len(rows), self.setting.batch)
        return self._batch_of([rows[int(index)]["messages"] for index in chosen])

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        loss: Tensor = model(**batch).loss
        return loss

    def validation(self, model: nn.Module) -> float:
        """Returns nats per token of the answers about modules that were not trained on."""
        rows = _spread(self._splits["validation"]["messages"], VALIDATION_ROWS)
        total, tokens = 0.0, 0
        with evaluating(model):
            for first in range(0, len(rows), VALIDATION_BATCH):
                batch = self._batch_of(rows[first : first + VALIDATION_BATCH])
                # A label is what the token before it predicts.
                count = int((batch["labels"][:, 1:] != IGNORED).sum())
                total += float(self.loss(model, batch)) * count
                tokens += count
        return total / tokens

    def metrics(self, model: nn.Module) -> dict[str, float]:
        """Returns the F1 of words of greedy answers to test questions, and the share of equal ones.

        F1 is SQuAD's (Rajpurkar et al. 2016, arXiv 1606.05250), but articles count.
        """
        rows = _spread(self._splits["test"]["messages"], QUESTIONS)
        answers = self._answers(model, [row[:1] for row in rows])
        pairs = [(said, row[1]["content"]) for said, row in zip(answers, rows, strict=True)]
        return {
            "f1": sum(f1(said, right) for said, right in pairs) / len(pairs),
            "exact": sum(_words(said) == _words(right) for said, right in pairs) / len(pairs),
        }

    def _tokens(self, turns: list[dict[str, str]], prompt: bool) -> list[int]:
        if self._tokenizer is None:
            from transformers import AutoTokenizer

            self._tokenizer = AutoTokenizer.from_pretrained(self._base, padding_side="left")
        text = self._tokenizer.apply_chat_template(
            turns, tokenize=False, add_generation_prompt=prompt
        )
        tokens: list[int] = self._tokenizer(text, add_special_tokens=False).input_ids
        return tokens

    def _batch_of(self, rows: list[list[dict[str, str]]]) -> dict[str, Tensor]:
        length = self.setting.sequence
        whole = [self._tokens(turns, prompt=False)[:length] for turns in rows]
        asked = [len(self._tokens(turns[:1], prompt=True)) for turns in rows]
        if not any(start < len(tokens) for tokens, start in zip(whole, asked, strict=True)):
            raise ValueError(f"sequences of {length} tokens leave no room for an answer")
        shape = len(rows), max(map(len, whole))
        ids, labels = torch.zeros(shape, dtype=torch.int64), torch.full(shape, IGNORED)
        mask = torch.zeros_like(ids)
        for row, (tokens, start) in enumerate(zip(whole, asked, strict=True)):
            ids[row, : len(tokens)] = torch.tensor(tokens)
            labels[row, start : len(tokens)] = torch.tensor(tokens[start:])
            mask[row, : len(tokens)] = 1
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}

    def _answers(self, model: Any, rows: list[list[dict[str, str]]]) -> list[str]:
        """Returns a greedy answer to each question."""
        answers: list[str] = []
        with evaluating(model):
            for first in range(0, len(rows), VALIDATION_BATCH):
                part = rows[first : first + VALIDATION_BATCH]
                asked = [self._tokens(turns, prompt=True) for turns in part]
                batch = self._tokenizer.pad({"input_ids": asked}, return_tensors="pt")
                pad = self._tokenizer.pad_token_id
                said = model.generate(
                    **batch, max_new_tokens=ANSWER_TOKENS, do_sample=False, pad_token_id=pad
                )
                new = said[:, batch["input_ids"].shape[1] :]
                answers += self._tokenizer.batch_decode(new, skip_special_tokens=True)
        return answers


class ChatLoRA(Chat):
    """The same with LoRA on all linear layers."""

    grids: ClassVar[dict[str, tuple[float, ...]]] = {
        "adamw": (3e-4, 1e-3, 3e-3),
        "lion": (1e-4, 3e-4, 1e-3),
        "sgd": (1e-1, 3e-1, 1e0),
    }

    def model(self, seed: int) -> nn.Module:
        return with_lora(super().model(seed), seed)


def f1(said: str, right: str) -> float:
    """Returns the harmonic mean of precision and recall of words.

    >>> f1("Return the mean.", "return a mean of data")
    0.5
    """
    mine, theirs = _words(said), _words(right)
    common = sum((collections.Counter(mine) & collections.Counter(theirs)).values())
    return 2 * common / (len(mine) + len(theirs)) if common else 0.0


def _words(text: str) -> list[str]:
    return "".join(letter if letter.isalnum() else " " for letter in text.lower()).split()


def _spread(rows: Any, count: int) -> list[Any]:
    """Returns `count` rows from all over, all of them if there are fewer."""
    rows = list(rows)
    return [rows[index * len(rows) // count] for index in range(min(count, len(rows)))]
