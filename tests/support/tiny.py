"""A language model that trains in milliseconds, and Trainers around it, for several modules."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

VOCABULARY = 64
WORDS = VOCABULARY - 2
SEQUENCE = 12


def tiny_llama(**changes: Any) -> LlamaForCausalLM:
    """Returns the same small Llama on every call and rank; it has dropout, so that RNG matters."""
    config = LlamaConfig(
        **{
            "vocab_size": VOCABULARY,
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "max_position_embeddings": 32,
            "attention_dropout": 0.1,
            **changes,
        }
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config)


def tiny_tokenizer(**changes: Any) -> PreTrainedTokenizerFast:
    """Returns a tokenizer of the words w0 to w61, for the tiny model."""
    words = {f"w{index}": index for index in range(WORDS)} | {"<eos>": WORDS, "<pad>": WORDS + 1}
    inner = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<eos>", pad_token="<pad>", **changes
    )


def tiny_data(length: int = 48) -> list[dict[str, torch.Tensor]]:
    """Returns `length` sequences of random tokens, the same on every call."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCABULARY, (length, SEQUENCE), generator=generator)
    return [{"input_ids": row, "labels": row} for row in tokens]


def tiny_args(
    folder: str | Path, cls: type[TrainingArguments] = TrainingArguments, **changes: Any
) -> Any:
    """Returns arguments for a silent, short CPU run with optim="dlion", which it registers.

    `save_every` and `eval_every` are steps between two checkpoints and between two evaluations.
    """
    if changes.get("optim", "dlion") == "dlion":
        import hf_dlion

        hf_dlion.register()
    for kind in ("save", "eval"):
        if every := changes.pop(f"{kind}_every", None):
            changes |= {f"{kind}_strategy": "steps", f"{kind}_steps": every}
    return cls(
        **{
            "output_dir": str(folder),
            "optim": "dlion",
            "learning_rate": 2e-3,
            "weight_decay": 0.1,
            "per_device_train_batch_size": 4,
            "max_steps": 4,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
            "use_cpu": True,
            "ddp_find_unused_parameters": False,
            **changes,
        }
    )


def tiny_trainer(args: TrainingArguments, cls: type[Trainer] = Trainer, **changes: Any) -> Trainer:
    """Returns a Trainer of the tiny model on the tiny data."""
    arguments = {"model": tiny_llama(), "train_dataset": tiny_data(), **changes}
    return cls(args=args, **arguments)


def trained(
    args: TrainingArguments, cls: type[Trainer] = Trainer, *, resume: Any = None, **changes: Any
) -> Trainer:
    """Returns a Trainer of the tiny model after its training."""
    trainer = tiny_trainer(args, cls, **changes)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def outcome(trainer: Trainer) -> tuple[str, list[dict[str, Any]], Any]:
    """Returns a hash of the weights, the log entries with a loss, and the optimizer's wire."""
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]
    return weights_digest(trainer.model), entries, trainer.optimizer.optimizer.wire


@contextlib.contextmanager
def logged() -> Iterator[list[str]]:
    """Yields a list that gets the warnings that the integration logs."""
    texts: list[str] = []
    with contextlib.ExitStack() as stack:
        for name in ("callback", "patches", "attach"):
            logger = importlib.import_module(f"hf_dlion.trainer.{name}").logger
            for method in ("warning", "warning_once"):
                stack.enter_context(mock.patch.object(logger, method, texts.append))
        yield texts


def weights_digest(model: torch.nn.Module) -> str:
    """Returns a hash of all parameters' bits."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        digest.update(name.encode())
        flat = parameter.detach().contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()


class At(TrainerCallback):
    """Calls a function when a step has ended, with what callbacks get by name."""

    def __init__(self, step: int, call: Callable[..., Any]) -> None:
        self.step, self.call = step, call

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            self.call(control=control, **kwargs)
