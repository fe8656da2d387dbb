"""What one run of the study is: all that its result depends on."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal, Self

Schedule = Literal["cosine", "linear", "constant"]
SCHEDULES: tuple[Schedule, ...] = ("cosine", "linear", "constant")
WARMUP = 0.05
# Left out of a run's identity where they have these values, as in records that were made before
# there was a choice.
_LATER = {"clip": 0.0, "warmup": WARMUP, "lr_factors": ()}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One run.

    Attributes:
        scene: What is learned, a name in `scenes.SCENES`.
        method: How, a name in `recipes.METHODS`.
        workers: Number of ranks.
        batch: Sequences, or images, per worker and step.
        sequence: Tokens in each.
        hidden: Width of the model.
        layers: Depth of the model.
        steps: Length of the run.
        lr: Peak learning rate.
        weight_decay: Decoupled, multiplied by the learning rate.
        betas: Lion's; AdamW has torch's.
        schedule: Of the learning rate, after a linear warm-up unless it is constant.
        seed: Of weights and batches; the optimizer's own, too.
        evaluations: How often the validation loss is taken, the end included.
        base_steps: Steps with AdamW that made the base of a fine-tuning; 0 in other scenes.
        real: Whether the ranks were processes.
        clip: Norm to which gradients are clipped before a step, where each lies: a rank's own, or
            their mean; 0 does not clip.
        warmup: Share of the steps in which the learning rate rises.
        lr_factors: Patterns of parameters' names and what their learning rate is multiplied by; the
            first that matches counts.
        folder: Where caches lie; no part of the run's identity.
    """

    scene: str
    method: str
    workers: int
    batch: int
    sequence: int
    hidden: int
    layers: int
    steps: int
    lr: float
    weight_decay: float
    betas: tuple[float, float]
    schedule: Schedule
    seed: int
    evaluations: int
    base_steps: int = 0
    real: bool = False
    clip: float = 0.0
    warmup: float = WARMUP
    lr_factors: tuple[tuple[str, float], ...] = ()
    folder: str = dataclasses.field(default=".", compare=False)

    def identity(self) -> dict[str, Any]:
        """Returns what decides on the result, as JSON has it."""
        values = dataclasses.asdict(self)
        del values["folder"]
        for name, usual in _LATER.items():
            if values[name] == usual:
                del values[name]
        # With lists for tuples, as it will be read.
        found: dict[str, Any] = json.loads(json.dumps(values))
        return found

    @classmethod
    def of(cls, identity: dict[str, Any]) -> Self:
        """Returns the setting with this `identity()`."""
        tuples = {
            "betas": tuple(identity["betas"]),
            "lr_factors": tuple(map(tuple, identity.get("lr_factors", ()))),
        }
        return cls(**{**identity, **tuples})

    @property
    def key(self) -> str:
        """A hash of the identity."""
        text = json.dumps(self.identity(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def replace(self, **changes: Any) -> Self:
        """Returns a setting with other values."""
        return dataclasses.replace(self, **changes)

    def lr_at(self, step: int) -> float:
        """Returns the learning rate of a step, which is counted from 0."""
        if self.schedule == "constant":
            return self.lr
        warmup = math.ceil(self.warmup * self.steps)
        if step < warmup:
            return self.lr * (step + 1) / (warmup + 1)
        left = 1.0 - (step - warmup) / max(1, self.steps - warmup)
        share = left if self.schedule == "linear" else math.sin(math.pi * left / 2) ** 2
        return self.lr * share

    def lr_factor(self, name: str) -> float:
        """Returns what the learning rate of a parameter is multiplied by."""
        return next((k for pattern, k in self.lr_factors if fnmatchcase(name, pattern)), 1.0)

    def evaluated_after(self) -> list[int]:
        """Returns after how many steps the validation loss is taken."""
        parts = min(self.evaluations, self.steps)
        return sorted({self.steps * part // parts for part in range(1, parts + 1)})
