"""Just-in-time checkpoints: all ranks save after the same step, whichever was asked and when.

`TrainingArguments(enable_jit_checkpoint=True)` has a rank save soon after a SIGTERM. Ranks hear of
it milliseconds apart, or one machine alone does: one rank would save while another takes a step. So
the ranks tell one another at the end of each step who was asked, and all save there.
"""

from __future__ import annotations

from typing import Any

from transformers import Trainer, TrainerCallback

from hf_dlion.checkpoint.access import gather_numbers, lion_in
from hf_dlion.trainer.internals import missing_seam


class SameStep(TrainerCallback):
    """Stands between the signal and Trainer's callback that saves, which comes after it.

    Attributes:
        manager: transformers' `CheckpointManager`, which remembers that this rank is to save.
    """

    def __init__(self, manager: Any) -> None:
        """Has the manager tell this callback instead of remembering by itself.

        Raises:
            RuntimeError: If this transformers has another kind of manager.
        """
        for name in ("_enable_checkpoint", "is_checkpoint_requested"):
            if not hasattr(manager, name):
                raise missing_seam(f"CheckpointManager().{name}")
        self.manager, self._asked = manager, False
        manager._enable_checkpoint = self._ask

    def _ask(self) -> None:
        self._asked = True

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Forgets what an earlier training was asked."""
        self._asked = False

    def on_step_end(self, *_: Any, optimizer: Any = None, **__: Any) -> None:
        """Has all ranks save now if any was asked. Bytes per rank: 8 * (N - 1)."""
        lion = lion_in(optimizer)
        self.manager.is_checkpoint_requested = (
            self._asked if lion is None else any(gather_numbers(lion, float(self._asked)))
        )


def save_at_the_same_step(trainer: Trainer) -> None:
    """Does so for each just-in-time callback of a Trainer; does nothing where there is none.

    Raises:
        RuntimeError: If this transformers has another kind of callback.
    """
    callbacks = trainer.callback_handler.callbacks
    known = [callback.manager for callback in callbacks if isinstance(callback, SameStep)]
    managers = [getattr(callback, "jit_manager", None) for callback in callbacks]
    for manager in managers:
        if manager is not None and manager not in known:
            callbacks.insert(0, SameStep(manager))
