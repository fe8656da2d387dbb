"""A model with every kind of parameter that the rule treats specially, and its training loop.

The loop runs on every rank and records what each step saw and made, so that a test can replay it
with the oracle: `train(...)` on the ranks, `replay(...)` in the test.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from tests.support.messages import message_numel
from tests.support.oracle import OracleGroup, OracleLion, bits_of, widen

# Rows of the embedding that no rank ever looks up.
UNSEEN_ROWS = [3, 13, 14, 15]
# Steps at which the last rank, or all of them, have a gradient that is not finite.
ONE_NAN_STEP, ALL_INF_STEP = 6, 9
# The step from which on the learning rate of the second group is halved.
LR_STEP = 12

GROUPS: list[dict[str, Any]] = [
    {"lr": 1e-2, "betas": (0.9, 0.99), "weight_decay": 0.1},
    {"lr": 3e-3, "betas": (0.8, 0.95), "weight_decay": 0.0},
    # Steps far below what the smallest subnormal bfloat16 and float16 resolve.
    {"lr": 1e-42, "betas": (0.9, 0.99), "weight_decay": 0.1},
    {"lr": 1e-9, "betas": (0.9, 0.99), "weight_decay": 0.1},
]


class Zoo(nn.Module):
    """Float32, bfloat16, float16 and float64; unseen rows, LoRA, tied, empty, 0-D, unused."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)

        def normal(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
            return nn.Parameter((torch.randn(shape, generator=generator) / 2).to(dtype))

        self.embedding = normal(16, 6)
        self.frozen = nn.Parameter(normal(8, 6).detach(), requires_grad=False)
        self.lora_a = normal(4, 6)
        self.lora_b = nn.Parameter(torch.zeros(8, 4))
        self.bf16 = normal(9, 8, dtype=torch.bfloat16)
        self.bf16_small = nn.Parameter((normal(130).detach() * 1e-38).to(torch.bfloat16))
        self.fp16 = normal(7, 9, dtype=torch.float16)
        self.fp16_small = nn.Parameter((normal(65).detach() * 1e-6).half())
        self.fp64 = normal(5, 7, dtype=torch.float64)
        self.tied = normal(8, 8)
        self.transposed = nn.Parameter(normal(6, 11).detach().t())
        self.channels_last = nn.Parameter(
            normal(2, 3, 4, 5).detach().to(memory_format=torch.channels_last)
        )
        self.scalar = normal()
        self.one = normal(1)
        self.empty = normal(0)
        self.empty_rows = normal(3, 0)
        self.word = normal(64)
        self.long = normal(129)
        self.not_on_last_rank = normal(33)
        self.sometimes = normal(5, 3)
        self.never = normal(4)

    def groups(self) -> list[list[nn.Parameter]]:
        """Returns the parameters of each of GROUPS."""
        small = [self.bf16_small, self.fp16_small]
        rest = [p for p in self.parameters() if p.requires_grad and all(p is not q for q in small)]
        matrices = [p for p in rest if p.dim() >= 2]
        return [matrices, [p for p in rest if p.dim() < 2], [small[0]], [small[1]]]

    def forward(
        self, tokens: Tensor, use_last: bool, use_sometimes: bool, use_never: bool = False
    ) -> Tensor:
        x = self.embedding[tokens]
        x = functional.linear(x, self.frozen + self.lora_b @ self.lora_a)
        x = torch.tanh(functional.linear(functional.linear(x, self.tied), self.tied))
        x = functional.linear(x.bfloat16(), self.bf16)
        x = functional.linear(x.half(), self.fp16)
        x = functional.linear(x.double(), self.fp64)
        loss = x.square().mean() * self.scalar
        wave = torch.sin(torch.arange(130.0) + float(tokens.sum()))
        loss = loss + (self.bf16_small * wave.bfloat16()).sum()
        loss = loss + (self.fp16_small * wave[:65].half()).sum()
        loss = loss + (self.transposed * wave[:66].view(11, 6)).sum()
        loss = loss + (self.channels_last * wave[:120].view(2, 3, 4, 5)).sum()
        # relu leaves exact zeros in a row that is active.
        loss = loss + (self.word * functional.relu(wave[:64])).sum() + self.one.square().sum()
        loss = loss + (self.long * wave[:129]).square().sum()
        loss = loss + self.empty.sum() + self.empty_rows.sum()
        if use_last:
            loss = loss + (self.not_on_last_rank * wave[:33]).sum()
        if use_sometimes:
            loss = loss + (self.sometimes * wave[:15].view(5, 3)).sum()
        if use_never:
            loss = loss + (self.never * wave[:4]).sum()
        return loss


ORACLE_OPTIONS = (
    *("aggregation", "ties", "bits", "level_scale", "stochastic_rounding"),
    *("momentum_dtype", "seed"),
    *("max_abstained_steps", "momentum_sync_every", "momentum_sync_dtype", "warmup_full_steps"),
)


@dataclass
class Record:
    """What one rank saw and made in one step; lists in the order of the flattened groups."""

    grads: list[Tensor | None]
    params: list[bytes]
    exp_avg: list[Tensor | None]
    steps: int
    agreement: float
    bytes_sent: int
    # With overlap: the gradients times the scale on which votes left during backward, if they held.
    foreseen: dict[int, Any]
    grads_after: list[Tensor | None]
    ranges: dict[int, list[int]]
    node_bytes_sent: int


def uses(rank: int, world_size: int, t: int) -> tuple[bool, bool]:
    """Returns whether a rank uses `not_on_last_rank` and `sometimes` in its t-th step."""
    return world_size == 1 or rank < world_size - 1, (t + rank) % 3 == 0


def batch(rank: int, t: int) -> Tensor:
    """Returns tokens; row 10 is seen by rank 0 only, row 11 by all in the first steps only."""
    generator = torch.Generator().manual_seed(1000 * rank + t)
    tokens = torch.randint(0, 10, (6,), generator=generator)
    tokens[tokens == 3] = 4
    if rank == 0:
        tokens[0] = 10
    if t < 3:
        tokens[1] = 11
    return tokens


def train(
    rank: int,
    world_size: int,
    steps: int,
    options: dict[str, Any],
    *,
    model: nn.Module | None = None,
    wrap: Callable[[nn.Module], nn.Module] | None = None,
    everything: bool = False,
    full_groups: Sequence[int] = (),
) -> list[Record]:
    """Trains a Zoo with DistributedLion for some steps; a rank function by itself.

    Args:
        rank: The rank in the optimizer's process group.
        world_size: The size of that group.
        steps: How many steps.
        options: Of DistributedLion.
        model: The Zoo, if not a new one.
        wrap: Makes the module that is called out of the Zoo (DDP).
        everything: Whether every step uses every parameter.
        full_groups: The positions of groups that are exchanged in full precision.
    """
    from hf_dlion import DistributedLion

    zoo = model or Zoo()
    assert isinstance(zoo, Zoo)
    called = wrap(zoo) if wrap else zoo
    names = {id(p): name for name, p in zoo.named_parameters()}
    groups: list[dict[str, Any]] = [
        {"params": [(names[id(p)], p) for p in members], **group}
        for members, group in zip(zoo.groups(), GROUPS, strict=True)
    ]
    for position in full_groups:
        groups[position]["exchange"] = "full"
    optimizer = DistributedLion(groups, **options)
    params = [p for group in zoo.groups() for p in group]
    records = []
    for t in range(steps):
        if t == LR_STEP:
            optimizer.param_groups[1]["lr"] *= 0.5
        use_last, use_sometimes = uses(rank, world_size, t)
        use_last, use_sometimes = use_last or everything, use_sometimes or everything
        called(batch(rank, t), use_last, use_sometimes, everything).backward()
        foreseen = foreseen_of(optimizer, params)
        # Clipping changes local gradients between backward and step, as every loop does.
        used = [p for p in params if p.grad is not None and p.dtype == torch.float32]
        norm = nn.utils.clip_grad_norm_(used, 1.0)
        for p in params:
            if p.grad is not None and p.dtype != torch.float32:
                p.grad.mul_(float((1.0 / (norm + 1e-6)).clamp(max=1.0)))
        assert zoo.word.grad is not None
        if t == ONE_NAN_STEP and rank == world_size - 1:
            zoo.word.grad[5] = float("nan")
        if t == ALL_INF_STEP:
            zoo.word.grad[rank] = float("-inf")
        unused = set() if everything else {id(zoo.never)}
        unused |= set() if use_last else {id(zoo.not_on_last_rank)}
        unused |= set() if use_sometimes else {id(zoo.sometimes)}
        grads = [None if id(p) in unused or p.grad is None else p.grad.clone() for p in params]
        assert sum(grad is None for grad in grads) == len(unused)
        overlapped = optimizer.wire.overlapped
        optimizer.step()
        records.append(
            Record(
                grads=grads,
                params=[bits_of(p) for p in params],
                exp_avg=[
                    optimizer.state[p]["exp_avg"].clone() if optimizer.state.get(p) else None
                    for p in params
                ],
                steps=optimizer.steps,
                agreement=optimizer.wire.agreement,
                bytes_sent=optimizer.wire.last_bytes_sent,
                foreseen=foreseen if optimizer.wire.overlapped > overlapped else {},
                grads_after=[None if p.grad is None else p.grad.clone() for p in params],
                ranges=optimizer.state_dict()["dlion"].get("shard", {}).get("ranges", {}),
                node_bytes_sent=optimizer.wire.last_node_bytes_sent,
            )
        )
        # False leaves zeros where a rank later has no gradient: absent all the same (S11).
        optimizer.zero_grad(set_to_none=t % 2 == 0)
    return records


def foreseen_of(optimizer: Any, params: Sequence[Tensor]) -> dict[int, Any]:
    """Returns fl(scale * gradient) of the parameters whose votes have left, by index."""
    flight = getattr(optimizer._engine.early, "_flight", None)
    if flight is None or not flight.began:
        return {}
    left = [index for m in flight.messages[: flight._sent] for index, _ in m.params]
    seen = {index: widen(params[index].grad) for index in left}
    return {
        index: grad * grad.dtype.type(flight._gradient_scale.scale) for index, grad in seen.items()
    }


def train_ddp(
    rank: int,
    world_size: int,
    steps: int,
    options: dict[str, Any],
    ddp: dict[str, Any],
    everything: bool = False,
) -> list[Record]:
    """Trains as `train`, inside DistributedDataParallel; a rank function."""
    return train(
        rank,
        world_size,
        steps,
        options,
        wrap=lambda zoo: nn.parallel.DistributedDataParallel(zoo, **ddp),
        everything=everything,
    )


def train_in_subgroups(
    rank: int, world_size: int, steps: int, options: dict[str, Any], members: list[list[int]]
) -> list[Record]:
    """Trains as `train`, each list of global ranks in a process group of its own."""
    groups = [dist.new_group(ranks) for ranks in members]
    mine = next(group for group, ranks in zip(groups, members, strict=True) if rank in ranks)
    options = {**options, "process_group": mine}
    return train(dist.get_rank(mine), dist.get_world_size(mine), steps, options)


def train_full(
    rank: int, world_size: int, steps: int, options: dict[str, Any], full_groups: Sequence[int]
) -> list[Record]:
    """Trains as `train`, some groups in full precision; a rank function."""
    return train(rank, world_size, steps, options, full_groups=full_groups)


def replay(
    ranks: Sequence[list[Record]], options: dict[str, Any], full_groups: Sequence[int] = ()
) -> OracleLion:
    """Takes the recorded steps with the oracle and holds every rank to it, after every step."""
    oracle_options = {k: v for k, v in options.items() if k in ORACLE_OPTIONS}
    zoo = Zoo()
    names = {id(p): name for name, p in zoo.named_parameters()}
    params = [p for group in zoo.groups() for p in group]
    groups = [
        OracleGroup([p.detach() for p in members], **group)
        for members, group in zip(zoo.groups(), GROUPS, strict=True)
    ]
    places = [place for place, members in enumerate(zoo.groups()) for _ in members]
    full = {index for index, place in enumerate(places) if place in full_groups}
    full |= _named(options.get("full_precision", ""), [names[id(p)] for p in params])
    if "momentum_sync" in options:
        oracle_options["synced"] = _named(options["momentum_sync"], [names[id(p)] for p in params])
    oracle = OracleLion(groups, len(ranks), full=full, **oracle_options)
    for t, records in enumerate(zip(*ranks, strict=True)):
        if t == LR_STEP:
            oracle.groups[1].lr *= 0.5
        oracle.step([record.grads for record in records], [record.foreseen for record in records])
        for rank, record in enumerate(records):
            assert record.steps == oracle.steps, f"rank {rank}, step {t}"
            for k, p in enumerate(params):
                where = f"{names[id(p)]} on rank {rank} in step {t}"
                assert record.params[k] == records[0].params[k], f"replicas differ: {where}"
                assert record.params[k] == bits_of(oracle.params[k]), f"not the rule: {where}"
                exp_avg, expected = record.exp_avg[k], oracle.exp_avg[rank][k]
                if exp_avg is None:
                    assert not expected.any(), f"no momentum: {where}"
                else:
                    assert exp_avg.dtype == expected.dtype, f"dtype of the momentum: {where}"
                    assert exp_avg.shape == expected.shape
                    assert bits_of(exp_avg) == bits_of(expected), f"momentum: {where}"
            voted = oracle.steps > oracle.warmup_full_steps and len(full) < len(params)
            if len(ranks) > 1 and t not in (ALL_INF_STEP,) and voted:
                assert abs(record.agreement - oracle.agreement) < 1e-6, f"agreement in step {t}"
    return oracle


def _named(pattern: str, names: Sequence[str]) -> set[int]:
    return {k for k, name in enumerate(names) if fnmatch(name, pattern)}


def as_nodes(
    ranks: Sequence[list[Record]], members: Sequence[Sequence[int]], *, averaged: bool = False
) -> list[list[Record]]:
    """Returns a list of records per node, as if each were one rank, for `replay`.

    Args:
        ranks: The records of every rank.
        members: The ranks of each node.
        averaged: Whether the recorded gradients are the node's already (DDP averaged them).
    """
    return [
        [_as_one(records, averaged) for records in zip(*(ranks[r] for r in node), strict=True)]
        for node in members
    ]


def _as_one(records: Sequence[Record], averaged: bool) -> Record:
    first = records[0]
    for record in records:
        assert record.params == first.params, "replicas differ inside a node"
        assert (record.steps, record.agreement) == (first.steps, first.agreement) or (
            first.agreement != first.agreement
        )
    grads, momenta = [], []
    for k in range(len(first.params)):
        grads.append(_mean_grad(records, k, averaged))
        pieces = [(r.ranges.get(k), r.exp_avg[k]) for r in records if r.exp_avg[k] is not None]
        momenta.append(_joined(pieces, Zoo().groups(), k) if pieces else None)
    return replace(first, grads=grads, exp_avg=momenta)


def _mean_grad(records: Sequence[Record], k: int, averaged: bool) -> Tensor | None:
    own = [record.grads[k] for record in records]
    present = [grad for grad in own if grad is not None]
    if not present:
        return None
    if averaged:
        # What a rank's loop wrote into the gradient afterwards (a NaN) is the node's too.
        bad = [grad for grad in present if not bool(grad.isfinite().all())]
        if not bad:
            assert all(bits_of(grad) == bits_of(present[0]) for grad in present)
        return bad[0] if bad else present[0]
    # With two ranks there is one way to add; with more the sum depends on the order, which is not
    # ours: what the step made of it must be close, and the same on all ranks.
    mean = torch.stack([grad / len(records) for grad in present]).double().sum(dim=0)
    after = [record.grads_after[k] for record in records]
    if len(records) == 2 or mean.numel() == 0 or not bool(mean.isfinite().all()):
        exact = sum((grad / len(records) for grad in present[1:]), present[0] / len(records))
        assert isinstance(exact, Tensor)
        return exact
    if all(grad is not None and bits_of(grad) == bits_of(after[0]) for grad in after):
        assert after[0] is not None
        unit = float(torch.finfo(after[0].dtype).eps) * float(mean.abs().max())
        assert float((after[0].double() - mean).abs().max()) <= 4 * unit + 1e-7
        return after[0]
    # A node that abstains averages nothing.
    return mean.to(present[0].dtype)


def _joined(
    pieces: Sequence[tuple[list[int] | None, Tensor | None]], groups: Any, k: int
) -> Tensor:
    shape = [p.shape for group in groups for p in group][k]
    filled = [piece for piece in pieces if piece[0] is not None]
    assert len(filled) == len(pieces), "a node's ranks hold stretches"
    parts = [tensor for _, tensor in sorted(filled, key=lambda piece: piece[0] or [])]
    whole = torch.cat([part for part in parts if part is not None])
    assert whole.numel() == shape.numel(), "the stretches are the whole, without overlaps"
    return whole.view(shape)


# With a message per parameter or two, several of them are on their way at once.
SHORT = 100


@contextlib.contextmanager
def short_messages() -> Any:
    with message_numel(SHORT):
        yield


def train_zoo(
    rank: int, world_size: int, steps: int, options: dict[str, Any], ddp: dict[str, Any] | None
) -> list[Record]:
    with short_messages():
        if ddp is None:
            return train(rank, world_size, steps, options)
        return train_ddp(rank, world_size, steps, options, ddp)
