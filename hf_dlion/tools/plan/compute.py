"""How long forward and backward take on one rank, without DDP."""

from __future__ import annotations

import statistics
import time

import torch
from torch import nn

from hf_dlion.tools.bench.model import llama, vocabulary
from hf_dlion.tools.plan.model import UnknownModelError, build, load_config, parse_count

STAND_IN = 29_500_000
REPEATS = 3


def of_stand_in(parameters: int, batch: int, sequence: int, device: torch.device) -> float:
    """Returns the seconds that the benchmark's Llama takes here, scaled by the parameters.

    Args:
        parameters: Of the model that is meant.
        batch: Sequences per rank and step.
        sequence: Tokens in each.
        device: Where it runs.
    """
    model = llama(min(STAND_IN, parameters)).to(device)
    size = sum(param.numel() for param in model.parameters())
    return _seconds(model, vocabulary(model), batch, sequence) * parameters / size


def of_model(
    name: str, dtype: torch.dtype, batch: int, sequence: int, device: torch.device
) -> float:
    """Returns the seconds that the model itself takes, with random weights.

    Args:
        name: Folder or hub name of a language model.
        dtype: Of its parameters.
        batch: Sequences per rank and step.
        sequence: Tokens in each.
        device: Where it runs.

    Raises:
        UnknownModelError: If it is only a count, or has no vocabulary and loss.
    """
    if parse_count(name) is not None:
        raise UnknownModelError(
            f"--step-ms measure needs a model, and {name} is only a count: give a folder with a "
            f"config.json, or the time in ms"
        )
    model = build(load_config(name)).to(device, dtype)
    tokens = getattr(getattr(model, "config", None), "vocab_size", None)
    if tokens is None or model.get_output_embeddings() is None:  # type: ignore[operator]
        raise UnknownModelError(
            f"--step-ms measure knows only models that predict tokens, and {name} is a "
            f"{type(model).__name__}: give the time in ms"
        )
    return _seconds(model, int(tokens), batch, sequence)


def _seconds(model: nn.Module, tokens: int, batch: int, sequence: int) -> float:
    device = next(model.parameters()).device
    data = torch.randint(tokens, (batch, sequence), device=device)
    times = []
    for turn in range(REPEATS + 1):
        begin = _now(device)
        model(input_ids=data, labels=data).loss.backward()
        if turn:
            times.append(_now(device) - begin)
        model.zero_grad()
    return statistics.median(times)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
