"""The models of the benchmarks: a Llama of so many parameters, or what a config describes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

VOCABULARY = 8192
WIDTH, INNER = 512, 1376
LAYER = 4 * WIDTH**2 + 3 * WIDTH * INNER


class UnknownModelError(ValueError):
    """There is no such model; the text says what to give instead."""


def llama(parameters: int) -> nn.Module:
    """Returns the same Llama with random weights on every rank.

    Layers are 512 wide and as many as come closest to `parameters`; below one such layer, a tiny
    model of one layer. The embedding is tied.

    Args:
        parameters: Number of parameters wanted; 29.5 million are 8 layers.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    layers = round((parameters - VOCABULARY * WIDTH) / LAYER)
    tiny = layers < 1
    config = LlamaConfig(
        vocab_size=64 if tiny else VOCABULARY, hidden_size=32 if tiny else WIDTH,
        intermediate_size=48 if tiny else INNER, num_hidden_layers=1 if tiny else layers,
        num_attention_heads=2 if tiny else 8, max_position_embeddings=2048,
        tie_word_embeddings=True, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model: nn.Module = LlamaForCausalLM(config)
    return model


def language_model(name: str) -> nn.Module:
    """Returns a language model with random weights, the same on every rank.

    Args:
        name: A folder with a config.json, or a name on the Hugging Face hub.

    Raises:
        UnknownModelError: If there is none, or it does not predict tokens.
    """
    config = load_config(name)
    config.use_cache = False
    torch.manual_seed(0)
    model = build(config)
    known = getattr(getattr(model, "config", None), "vocab_size", None)
    if known is None or model.get_output_embeddings() is None:  # type: ignore[operator]
        raise UnknownModelError(
            f"only models that predict tokens can be timed, and {name} is a {type(model).__name__}"
        )
    return model


def made(parameters: int, name: str | None) -> nn.Module:
    """Returns `language_model(name)`, or `llama(parameters)` if there is no name."""
    return llama(parameters) if name is None else language_model(name)


def vocabulary(model: nn.Module) -> int:
    """Returns how many tokens the model knows."""
    return int(model.config.vocab_size)  # type: ignore[union-attr, arg-type]


def load_config(model: str) -> Any:
    """Returns the transformers config of a folder or of a name.

    Raises:
        UnknownModelError: If it cannot be read.
    """
    from transformers import AutoConfig

    folder = Path(model)
    looks_local = model.startswith((".", "/", "~")) or model.count("/") > 1 or folder.exists()
    if looks_local and not (folder / "config.json").is_file():
        missing = "has no config.json" if folder.is_dir() else "is no folder"
        raise UnknownModelError(
            f"{model} {missing}: give a folder written by save_pretrained(), a name on the "
            f"Hugging Face hub, or a parameter count such as 7b"
        )
    try:
        return AutoConfig.from_pretrained(model)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().splitlines()[0]
        hint = "" if looks_local else " Without a network, give a folder or a count such as 7b."
        raise UnknownModelError(f"cannot read the config of {model}: {reason}{hint}") from error


def build(config: Any) -> nn.Module:
    """Returns the model of a config, with the head that it was saved with, on torch's device.

    Raises:
        UnknownModelError: If transformers has no class for it.
    """
    import transformers

    model: nn.Module
    for name in config.architectures or ():
        if hasattr(transformers, name):
            model = getattr(transformers, name)(config)
            return model
    try:
        model = transformers.AutoModel.from_config(config)  # type: ignore[no-untyped-call]
    except ValueError as error:
        raise UnknownModelError(f"transformers cannot build {config.model_type!r}") from error
    return model
