"""The setting of a run: everything that its result depends on."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from benchmarks.methods import ADAMW_BETAS, BETAS, Hyper, method_of

WARMUP = 0.05
# Values that a run's identity leaves out, since older records don't have them.
_LATER = {
    "clip": 0.0, "warmup": WARMUP, "lr_factors": (), "text": "", "vocabulary": 0, "untied": False,
    "bf16": False, "bf16_weights": False, "adamw_betas": ADAMW_BETAS,
}  # fmt: skip
# Where a run finds its files. Its result doesn't depend on them.
_PLACES = ("folder", "files")


@dataclass(frozen=True, kw_only=True)
class Setting(Hyper):
    """One run.

    Attributes:
        task: Name of a task in `tasks.TASKS`.
        method: Name of a method.
        workers: Number of ranks.
        batch: Sequences per rank and step.
        sequence: Tokens of a sequence.
        hidden: Width of the model.
        layers: Depth of the model.
        evaluations: Number of validation losses, including that at the end.
        base_steps: Steps of AdamW that trained the base of a fine-tuning; 0 in other tasks.
        real: Whether each rank is a process.
        clip: Norm that gradients are clipped to, those that DDP has averaged, or each rank's own; 0
            disables clipping.
        warmup: Share of the steps in which the learning rate rises.
        text: Hash of the contents of `files`, in the task "text".
        vocabulary: Number of tokens that the task "text" trains a tokenizer for.
        untied: Whether the head has weights of its own, in the task "text".
        bf16: Whether the forward pass computes in bfloat16, by autocast.
        bf16_weights: Whether weights, gradients, and the optimizer's state are bfloat16.
        folder: Folder of caches. It doesn't identify the run.
        files: Text files of the base, and those of the run. Their contents identify the run.
    """

    task: str
    method: str
    workers: int
    batch: int
    sequence: int
    hidden: int
    layers: int
    evaluations: int
    base_steps: int = 0
    real: bool = False
    clip: float = 0.0
    warmup: float = WARMUP
    text: str = ""
    vocabulary: int = 0
    untied: bool = False
    bf16: bool = False
    bf16_weights: bool = False
    folder: str = dataclasses.field(default=".", compare=False)
    files: tuple[tuple[str, ...], ...] = dataclasses.field(default=((), ()), compare=False)

    def identity(self) -> dict[str, Any]:
        """Returns everything that the result depends on, as plain JSON data.

        Records are found by a hash of it, so its keys and values must not change.
        """
        values = dataclasses.asdict(self)
        for place in _PLACES:
            del values[place]
        values["scene"] = values.pop("task")  # The name of a task in all records.
        values["schedule"] = "cosine"  # Older records had a choice.
        del values["betas" if method_of(self.method).family == "adamw" else "adamw_betas"]
        kept = {k: v for k, v in values.items() if k not in _LATER or v != _LATER[k]}
        found: dict[str, Any] = json.loads(json.dumps(kept))
        return found

    @classmethod
    def of(cls, identity: Mapping[str, Any]) -> Self:
        """Returns the setting of a record, without the places of its files."""
        values = {name: value for name, value in identity.items() if name != "schedule"}
        values["task"] = values.pop("scene")
        values["lr_factors"] = tuple(map(tuple, values.get("lr_factors", ())))
        for name, default in (("betas", BETAS), ("adamw_betas", ADAMW_BETAS)):
            values[name] = tuple(values.get(name, default))
        return cls(**values)

    @property
    def key(self) -> str:
        """Hash of the identity."""
        text = json.dumps(self.identity(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def replace(self, **changes: Any) -> Self:
        """Returns a copy with some values changed."""
        return dataclasses.replace(self, **changes)

    def lr_at(self, step: int) -> float:
        """Returns the learning rate of a step (from 0): a linear warm-up, then a cosine."""
        warmup = math.ceil(self.warmup * self.steps)
        if step < warmup:
            return self.lr * (step + 1) / (warmup + 1)
        left = 1.0 - (step - warmup) / max(1, self.steps - warmup)
        return self.lr * math.sin(math.pi * left / 2) ** 2

    def evaluated_after(self) -> list[int]:
        """Returns the steps after which the validation loss is computed."""
        parts = min(self.evaluations, self.steps)
        return sorted({self.steps * part // parts for part in range(1, parts + 1)})
