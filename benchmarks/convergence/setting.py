"""What one run is: everything that its result depends on."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from dataclasses import dataclass
from typing import Any, Self

from benchmarks.methods import Hyper

WARMUP = 0.05
# Left out of a run's identity at these values, since older records don't have them.
_LATER = {"clip": 0.0, "warmup": WARMUP, "lr_factors": ()}


@dataclass(frozen=True, kw_only=True)
class Setting(Hyper):
    """One run.

    Attributes:
        scene: Task, a name in `scenes.SCENES`.
        method: Name of a method.
        workers: Number of ranks.
        batch: Sequences or images per rank and step.
        sequence: Tokens of a sequence.
        hidden: Width of the model.
        layers: Depth of the model.
        evaluations: How often the validation loss is computed, the end included.
        base_steps: Steps of AdamW that made the base of a fine-tuning; 0 in other scenes.
        real: Whether the ranks are processes.
        clip: Norm that gradients are clipped to: a rank's own if it votes on them, else their mean;
            0 doesn't clip.
        warmup: Share of the steps in which the learning rate rises.
        folder: Folder of caches, which doesn't identify the run.
    """

    scene: str
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
    folder: str = dataclasses.field(default=".", compare=False)

    def identity(self) -> dict[str, Any]:
        """Returns what decides on the result, as JSON keeps it."""
        values = dataclasses.asdict(self)
        del values["folder"]
        values["schedule"] = "cosine"  # Older records had a choice.
        kept = {k: v for k, v in values.items() if k not in _LATER or v != _LATER[k]}
        found: dict[str, Any] = json.loads(json.dumps(kept))
        return found

    @property
    def key(self) -> str:
        """A hash of the identity."""
        text = json.dumps(self.identity(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def replace(self, **changes: Any) -> Self:
        """Returns a setting with other values."""
        return dataclasses.replace(self, **changes)

    def lr_at(self, step: int) -> float:
        """Returns the learning rate of a step, counted from 0: linear warm-up, then a cosine."""
        warmup = math.ceil(self.warmup * self.steps)
        if step < warmup:
            return self.lr * (step + 1) / (warmup + 1)
        left = 1.0 - (step - warmup) / max(1, self.steps - warmup)
        return self.lr * math.sin(math.pi * left / 2) ** 2

    def evaluated_after(self) -> list[int]:
        """Returns the steps after which the validation loss is computed."""
        parts = min(self.evaluations, self.steps)
        return sorted({self.steps * part // parts for part in range(1, parts + 1)})
