"""The model of `bench train`: a Llama of about as many parameters as asked for."""

from __future__ import annotations

import torch
from torch import nn

VOCABULARY = 8192
WIDTH, INNER = 512, 1376
LAYER = 4 * WIDTH**2 + 3 * WIDTH * INNER


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


def sizes_of(parameters: int) -> tuple[int, int]:
    """Returns the parameters that `llama(parameters)` really has, and its number of tokens."""
    with torch.device("meta"):
        model = llama(parameters)
    return sum(param.numel() for param in model.parameters()), vocabulary(model)


def vocabulary(model: nn.Module) -> int:
    """Returns how many tokens the model knows."""
    return int(model.config.vocab_size)  # type: ignore[union-attr, arg-type]
