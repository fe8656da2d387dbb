"""Parameters whose gradients are averaged instead of voted on: plain Lion on the mean.

    g = mean of the gradients of the ranks that have a finite one      by `exchange.mean.average`
    u = b1 * m + (1 - b1) * g;  p = p * (1 - lr * wd) - lr * sign(u);  m = b2 * m + (1 - b2) * g

The mean has the same bits on all ranks, and so has the momentum, on a rank without a gradient too.
"""

from __future__ import annotations

import dataclasses
import operator
import time
from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import Tensor

from hf_dlion.codec import AloneJob, codec_for
from hf_dlion.exchange import Wire, WireStats
from hf_dlion.exchange.batches import by_kind, in_batches
from hf_dlion.exchange.mean import average
from hf_dlion.ranks.fingerprint import digest, fingerprints
from hf_dlion.step.delivery import Moving

Batch = list[tuple[int, Tensor]]


def split_alike(params: Sequence[tuple[int, Tensor]], limit: int) -> list[Batch]:
    """Returns runs of parameters of one device and dtype with at most `limit` elements each.

    A larger parameter is a batch of its own; a parameter without elements is left out.

    Args:
        params: Pairs of parameter index and parameter.
        limit: Elements per batch.
    """
    tensor_of, kind_of = operator.itemgetter(1), operator.attrgetter("device", "dtype")
    return in_batches(by_kind(params, tensor_of, kind_of), limit, tensor_of, kind_of)


def step_in_full(batches: Sequence[Batch], what: Moving, wire: Wire, stats: WireStats) -> None:
    """Takes a step of plain Lion on the mean gradients; every rank of the group must call this.

    Bytes per rank: those of `average` for each batch, as far as any rank has a gradient.

    Args:
        batches: Parameters of one device and dtype each.
        what: What moves.
        wire: The process group.
        stats: Receives the times.
    """
    begin, exchanging = time.perf_counter(), 0.0
    # The momentum is that of all ranks, and is rounded alike on all of them.
    rule = dataclasses.replace(what.rule, rank=0)
    for batch in batches:
        moving = [(index, param) for index, param in batch if index in what.full]
        if not moving:
            continue
        flat = torch.cat([_sent(index, param, what) for index, param in moving])
        counts = None
        if any(what.full[index][1] != wire.world_size for index, _ in moving):
            counts = torch.cat(
                [
                    torch.full((param.numel(),), what.full[index][1], dtype=torch.int32)
                    for index, param in moving
                ]
            )
        before = time.perf_counter()
        mean = average(flat, wire, "gradients", counts)
        exchanging += time.perf_counter() - before
        jobs, start = [], 0
        for index, param in moving:
            grad = mean[start : start + param.numel()].view(param.shape)
            start += param.numel()
            own = dataclasses.replace(what.rules[index], step_rule=rule)
            jobs.append(AloneJob(param, grad, what.full[index][0], own))
        codec_for(flat.device).step_alone_all(jobs)
    stats.exchange_s += exchanging
    stats.apply_s += time.perf_counter() - begin - exchanging


def _sent(index: int, param: Tensor, what: Moving) -> Tensor:
    """Returns what this rank adds to the sum: its gradient, or zeros if it has none."""
    if index in what.voting:
        # Which may be of another dtype (`grad_dtype`), and is not on every rank.
        return cast(Tensor, param.grad).reshape(-1).to(param.dtype)
    return torch.zeros(param.numel(), dtype=param.dtype, device=param.device)


def momenta_differ(momenta: Mapping[int, Tensor], wire: Wire) -> bool:
    """Returns, on all ranks alike, whether they hold other momenta; every rank must call this.

    Bytes per rank: 8 * (N - 1).

    Args:
        momenta: By parameter index.
        wire: The process group.
    """
    hashes = fingerprints(list(momenta.values()))
    mine = digest(list(zip(momenta, hashes, strict=True)))
    everyone = wire.gather_words([mine], "hashes of the momenta")
    return len(set(everyone.view(-1).tolist())) > 1
