"""Fine-tuning of SmolLM2 on questions that have one right answer, which a script makes."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.convergence.chat import IGNORED, VALIDATION_BATCH, Chat, Turns
from benchmarks.convergence.tasks import evaluating, generator

# One question in so many is held out, by its hash.
HELD_OUT = 16
LOSS_ROWS, ANSWERED_ROWS = 96, 768


def _sum(rng: np.random.Generator) -> tuple[str, str]:
    first, second = map(int, rng.integers(100, 1000, 2))
    return f"What is {first} plus {second}?", f"{first + second}"


def _product(rng: np.random.Generator) -> tuple[str, str]:
    first, second = int(rng.integers(100, 1000)), int(rng.integers(3, 10))
    return f"What is {first} times {second}?", f"{first * second}"


def _order(rng: np.random.Generator) -> tuple[str, str]:
    numbers = list(map(int, rng.choice(np.arange(10, 100), 5, replace=False)))
    asked, answer = (" ".join(map(str, order)) for order in (numbers, sorted(numbers)))
    return f"Sort {asked}.", answer


KINDS: dict[str, Callable[[np.random.Generator], tuple[str, str]]] = {
    "sum": _sum,
    "product": _product,
    "order": _order,
}


class Answers(Chat):
    """Trains all parameters of SmolLM2-135M-Instruct on sums, products, and orders.

    Questions of the training split are drawn anew in each step. Held-out questions never are.
    """

    def _train(self, rng: np.random.Generator) -> list[Turns]:
        kinds = rng.choice(list(KINDS), self.setting.batch)
        return [_turns(_drawn(rng, kind, held_out=False)) for kind in kinds]

    def _tokens(self, turns: Turns, prompt: bool) -> list[int]:
        # Without the chat template, whose system prompt is longer than question and answer.
        tokenizer, (question, *answer) = self.tokenizer(), (turn["content"] for turn in turns)
        text = f"{question}\n" + "".join(answer) + (tokenizer.eos_token if answer else "")
        tokens: list[int] = tokenizer(text, add_special_tokens=False).input_ids
        return tokens

    def _held_out(self) -> list[Turns]:
        return self._questions()[:LOSS_ROWS]

    def _questions(self) -> list[Turns]:
        """Returns held-out questions of all kinds in turns, the same in every run."""
        rng, kinds = generator(0), list(KINDS)
        chosen = (kinds[row % len(kinds)] for row in range(ANSWERED_ROWS))
        return [_turns(_drawn(rng, kind, held_out=True)) for kind in chosen]

    def details(self, model: nn.Module) -> dict[str, Any]:
        """Returns the share of held-out questions that the model answers right, by kind.

        An answer is right if greedy decoding gives its tokens: if each of them is the likeliest
        after the question and the right tokens before it.
        """
        rows, right = self._questions(), []
        with evaluating(model):
            for first in range(0, len(rows), VALIDATION_BATCH):
                batch = self._batch_of(rows[first : first + VALIDATION_BATCH])
                right += _right(model, batch).tolist()
        by_kind = {
            kind: sum(right[place :: len(KINDS)]) / len(right[place :: len(KINDS)])
            for place, kind in enumerate(KINDS)
        }
        return {"exact": sum(right) / len(right), **by_kind}


def _drawn(rng: np.random.Generator, kind: str, *, held_out: bool) -> tuple[str, str]:
    while True:
        question, answer = KINDS[kind](rng)
        if (zlib.crc32(question.encode()) % HELD_OUT == 0) == held_out:
            return question, answer


def _turns(pair: tuple[str, str]) -> Turns:
    question, answer = pair
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _right(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Returns whether all tokens of an answer are the likeliest, bool, shape (rows,)."""
    labels = batch["labels"][:, 1:]
    logits = model(**{name: batch[name] for name in ("input_ids", "attention_mask")}).logits
    found: Tensor = torch.where(labels == IGNORED, labels, logits[:, :-1].argmax(dim=-1)) == labels
    return found.all(dim=1)
