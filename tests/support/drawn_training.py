"""Whole training runs that hypothesis draws: what they are, how a rank runs one, what must come.

A `Case` is a plain description that prints as it is written, so that a failing example can be
pasted into a test. Every rank builds the same run from it (`train`), the test builds it once more
for the oracle (`replay`); nothing but the description passes between them.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.support import zoo
from tests.support.messages import message_numel
from tests.support.option_cases import needed
from tests.support.oracle import OracleGroup, OracleLion, bits_of
from tests.support.rule_cases import bytes_of_words, rows_of_words

KINDS = (
    *("normal", "signs", "zeros", "negative zeros", "zero rows", "holes", "tiny", "huge"),
    *("nan", "inf", "absent"),
)
BAD = ("nan", "inf")
HOWS = ("backward", "assigned", "transposed", "sliced", "expanded")


@dataclass(frozen=True)
class Param:
    """A parameter; `layout` is that of its memory, `frozen` the steps in which it is not trained.

    Attributes:
        shape: Its shape.
        dtype: Of torch, by name.
        layout: "plain", "transposed" or "sliced".
        frozen: In these steps it does not require a gradient.
    """

    shape: tuple[int, ...] = ()
    dtype: str = "float32"
    layout: str = "plain"
    frozen: tuple[int, ...] = ()


@dataclass(frozen=True)
class Group:
    """A parameter group, which joins the optimizer before step `joins`; `full` if not voted on."""

    params: tuple[Param, ...]
    lr: float = 0.01
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.0
    joins: int = 0
    full: bool = False


@dataclass(frozen=True)
class Odd:
    """The gradient of one parameter on one rank, where it is not as the step says."""

    rank: int
    param: int
    kind: str = "absent"
    how: str = "backward"


@dataclass(frozen=True)
class Step:
    """What happens around one step.

    Attributes:
        kind: Of all gradients, one of KINDS.
        odd: Those that are otherwise.
        passes: Backward passes whose gradients are accumulated.
        scale: Factor of the gradients between backward and step, as of clipping.
        sets: Group, name and value of hyperparameters that change before it.
        reload: Whether a new optimizer goes on from the state dict.
    """

    kind: str = "normal"
    odd: tuple[Odd, ...] = ()
    passes: int = 1
    scale: float = 1.0
    sets: tuple[tuple[int, str, Any], ...] = ()
    reload: bool = False


@dataclass(frozen=True)
class Case:
    """A training run on `world_size` ranks."""

    world_size: int
    groups: tuple[Group, ...]
    steps: tuple[Step, ...]
    options: dict[str, Any] = field(default_factory=dict)
    message_numel: int | None = None
    set_to_none: bool = True
    seed: int = 0

    @property
    def params(self) -> list[Param]:
        """All parameters, in the order of the flattened groups."""
        return [param for group in self.groups for param in group.params]

    @property
    def full(self) -> list[int]:
        """The indices of the parameters whose gradients are averaged in full precision."""
        held = [group.full for group in self.groups for _ in group.params]
        return [k for k, full in enumerate(held) if full]

    def trained(self, t: int) -> list[int]:
        """The indices of the parameters that require a gradient in step t."""
        joins = [group.joins for group in self.groups for _ in group.params]
        return [k for k, p in enumerate(self.params) if t not in p.frozen and joins[k] <= t]


LENGTHS = (0, 1, 2, 63, 64, 65, 127, 128, 129)
MATRICES = (
    (0, 3),
    (3, 0),
    (1, 64),
    (1, 70),
    (2, 32),
    (3, 65),
    (5, 13),
    (64, 1),
    (65, 1),
    (2, 3, 5),
)

params = st.builds(
    Param,
    shape=st.sampled_from(((), *((n,) for n in LENGTHS), *MATRICES)),
    dtype=st.sampled_from(("float32", "bfloat16", "float16", "float64")),
    layout=st.sampled_from(("plain", "transposed", "sliced")),
    frozen=st.lists(st.integers(0, 4), max_size=2, unique=True).map(sorted).map(tuple)
    | st.just(()),
)
lrs = st.sampled_from((0.01, 0.0, 0.3, 1e-3, 1e-6, 1e-42))
betas = st.sampled_from(((0.9, 0.99), (0.0, 0.0), (0.95, 0.98), (0.0, 0.9), (0.99, 0.5)))
decays = st.sampled_from((0.0, 0.1, 3.0))

# Options that do not go together: with the first go none of the others.
APART = {
    "aggregation": ("bits",),
    "local_group": ("level_scale", "warmup_full_steps", "momentum_sync_every"),
}


@st.composite
def cases(draw: st.DrawFn, world_size: int) -> Case:
    """Draws a case of `world_size` ranks."""
    joins = [0, *sorted(draw(st.lists(st.integers(0, 3), max_size=2)))]
    groups = tuple(
        Group(
            params=tuple(draw(st.lists(params, min_size=1, max_size=4))),
            lr=draw(lrs),
            betas=draw(betas),
            weight_decay=draw(decays),
            joins=step,
        )
        for step in joins
    )
    count = sum(len(group.params) for group in groups)
    odd = st.builds(
        Odd,
        rank=st.integers(0, world_size - 1),
        param=st.integers(0, count - 1),
        kind=st.sampled_from(KINDS),
        how=st.sampled_from(HOWS),
    )
    change = st.one_of(
        *(
            st.tuples(st.integers(0, len(groups) - 1), st.just(name), values)
            for name, values in (("lr", lrs), ("betas", betas), ("weight_decay", decays))
        )
    )
    step = st.builds(
        Step,
        kind=st.sampled_from(KINDS[:6]),
        odd=st.lists(odd, max_size=5).map(tuple),
        passes=st.sampled_from((1, 1, 1, 2)),
        scale=st.sampled_from((1.0, 0.5, 0.3)),
        sets=st.lists(change, max_size=1).map(tuple),
        reload=st.sampled_from((False, False, False, True)),
    )
    options: dict[str, Any] = {
        "aggregation": st.just("average"),
        "ties": st.just("zero"),
        "exchange": st.sampled_from(("gather", "two_phase")),
        "overlap": st.just(True),
        "stochastic_rounding": st.just(False),
        "momentum_dtype": st.sampled_from((torch.float32, torch.bfloat16, torch.float16)),
        "seed": st.sampled_from((1, 2**40 + 3, 2**64 - 1)),
        "max_abstained_steps": st.sampled_from((1, 2)),
        "check_replicas_every": st.integers(1, 3),
        "bits": st.sampled_from((2, 4, 8)),
        "level_scale": st.just("tensor"),
        "momentum_sync_every": st.integers(1, 3),
        "momentum_sync_dtype": st.just(torch.float32),
        "warmup_full_steps": st.integers(1, 2),
    }
    # The mean of two gradients does not depend on the order in which they are added.
    if world_size % 2 == 0:
        options["local_group"] = st.just(2)
    chosen = draw(st.fixed_dictionaries({}, optional=options))
    for pair in (("aggregation", "ties"), ("local_group", "overlap")):
        if chosen.keys() >= set(pair):
            del chosen[draw(st.sampled_from(pair))]
    for name, others in APART.items():
        for other in others if name in chosen else ():
            chosen.pop(other, None)
    chosen = {name: chosen[name] for name in chosen if chosen.keys() >= needed(name).keys()}
    full = [False] * len(groups)
    if "local_group" not in chosen:
        full = draw(st.lists(st.sampled_from((False, False, True)), min_size=3, max_size=3))
    return Case(
        world_size=world_size,
        groups=tuple(
            dataclasses.replace(group, full=f) for group, f in zip(groups, full, strict=False)
        ),
        steps=tuple(draw(st.lists(step, min_size=1, max_size=5))),
        options=chosen,
        message_numel=draw(st.sampled_from((None, 100, 1))),
        set_to_none=draw(st.booleans()),
        seed=draw(st.integers(0, 3)),
    )


def gradient(case: Case, t: int, rank: int, index: int) -> tuple[Tensor | None, str]:
    """Returns what a rank does about a parameter's gradient in step t: the gradient, and how."""
    step, param = case.steps[t], case.params[index]
    mine = (odd for odd in step.odd if (odd.rank, odd.param) == (rank, index))
    odd = next(mine, Odd(rank, index, step.kind))
    if index not in case.trained(t) or odd.kind == "absent":
        return None, odd.how
    if odd.how != "backward":
        return _drawn(case, (t, rank, index, 0), param, odd.kind), odd.how
    total: Tensor | None = None
    for number in range(step.passes):
        once = _drawn(case, (t, rank, index, number), param, odd.kind)
        total = once if total is None else total + once
    assert total is not None
    return total * step.scale, odd.how


def _drawn(case: Case, place: tuple[int, int, int, int], param: Param, kind: str) -> Tensor:
    values = _values(case, place, param, kind)
    # Added to the zeros that zero_grad left, a negative zero is none.
    return values if case.set_to_none else values + 0.0


def _values(case: Case, place: tuple[int, int, int, int], param: Param, kind: str) -> Tensor:
    t, rank, index, number = place
    seed = 1 + case.seed + 10 * number + 100 * index + 10_000 * rank + 1_000_000 * t
    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, param.dtype)
    values = torch.randn(param.shape, generator=generator)
    first = (param.shape[0] if len(param.shape) > 1 else 1,)
    rows = torch.randint(2, first, generator=generator, dtype=torch.bool)
    limits = torch.finfo(dtype)
    if kind == "signs":
        values = values.sign() * (values.abs() > 0.5)
    elif kind in ("zeros", "negative zeros"):
        values = torch.zeros(param.shape) * (1 if kind == "zeros" else -1)
    elif kind == "zero rows" and values.dim() > 1:
        values[rows] = 0
    elif kind == "zero rows":
        values = values * rows.squeeze()
    elif kind == "holes":
        values = values * (values > 0)
    elif kind == "tiny":
        return values.to(dtype) * (limits.tiny / 4)
    elif kind == "huge":
        return values.clamp(-1, 1).to(dtype) * limits.max
    elif kind in BAD and values.numel():
        values.view(-1)[int(rows.sum()) % values.numel()] = float(kind)
    return values.to(dtype)


def new_params(case: Case) -> list[nn.Parameter]:
    """Returns the parameters of a run as they are before the first step."""
    made = []
    for index, param in enumerate(case.params):
        values = _drawn(case, (0, 0, index, 9), param, "normal")
        made.append(nn.Parameter(_laid_out(values, param.layout), 0 not in param.frozen))
    return made


def _laid_out(values: Tensor, layout: str) -> Tensor:
    """Returns the same values in other memory."""
    if layout == "transposed":
        return values.t().contiguous().t() if values.dim() == 2 else values
    if layout == "sliced" and values.dim():
        return torch.stack([values, values + 1], dim=-1)[..., 0]
    if layout == "expanded" and values.dim():
        return values[..., :1].expand(values.shape)
    return values


@dataclass
class Seen:
    """What one rank had after one step; lists in the order of the flattened groups."""

    params: list[bytes]
    exp_avg: list[Tensor | None]
    ranges: dict[int, list[int]]
    foreseen: dict[int, Any]
    steps: int
    abstentions: int
    bytes_sent: int | None
    agreement: float
    raised: str


@contextmanager
def messages_of(numel: int | None) -> Iterator[None]:
    """Has messages of `numel` elements made."""
    with message_numel(numel):
        yield


def train(rank: int, world_size: int, case: Case) -> list[Seen]:
    """Runs a case; a rank function."""
    with messages_of(case.message_numel):
        return _train(rank, case)


def _train(rank: int, case: Case) -> list[Seen]:
    from hf_dlion import DistributedLion

    params = new_params(case)
    places = iter(params)
    groups = [
        {
            "params": [next(places) for _ in group.params],
            "lr": group.lr,
            "betas": group.betas,
            "weight_decay": group.weight_decay,
            **({"exchange": "full"} if group.full else {}),
        }
        for group in case.groups
    ]
    first = [g for g, group in zip(groups, case.groups, strict=True) if group.joins == 0]
    optimizer = DistributedLion(first, **case.options)
    seen, counted = [], 0
    for t, step in enumerate(case.steps):
        for param, drawn in zip(params, case.params, strict=True):
            param.requires_grad_(t not in drawn.frozen)
        for group, values in zip(case.groups, groups, strict=True):
            if 0 < group.joins == t:
                optimizer.add_param_group(values)
        for place, name, value in step.sets:
            if place < len(optimizer.param_groups):
                optimizer.param_groups[place][name] = value
        if step.reload:
            counted += optimizer.wire.abstentions
            state = copy.deepcopy(optimizer.state_dict())
            fresh = [
                {name: group[name] for name in ("params", "exchange") if name in group}
                for group in optimizer.param_groups
            ]
            optimizer = DistributedLion(fresh, **{**case.options, "seed": 99})
            optimizer.load_state_dict(state)
            for param in params:
                param.grad = None
        joined = [p for group in optimizer.param_groups for p in group["params"]]
        given = [gradient(case, t, rank, index) for index in range(len(joined))]
        for number in range(step.passes):
            _backward(case, (t, rank, number), joined, given)
        foreseen = zoo.foreseen_of(optimizer, joined)
        for param, (grad, how) in zip(joined, given, strict=True):
            if grad is not None and how == "backward":
                assert param.grad is not None
                param.grad.mul_(step.scale)
            elif grad is not None:
                param.grad = _laid_out(grad, how)
        overlapped = optimizer.wire.overlapped
        raised = ""
        try:
            optimizer.step()
        except RuntimeError as error:
            raised = str(error)
            if "in a row" not in raised:
                raise
        state = optimizer.state_dict()
        seen.append(
            Seen(
                params=[bits_of(p) for p in params],
                exp_avg=[
                    optimizer.state[p]["exp_avg"].clone() if p in optimizer.state else None
                    for p in params
                ],
                ranges=state["dlion"].get("shard", {}).get("ranges", {}),
                foreseen=foreseen if optimizer.wire.overlapped > overlapped else {},
                steps=optimizer.steps,
                abstentions=counted + optimizer.wire.abstentions,
                bytes_sent=None if raised else optimizer.wire.last_bytes_sent,
                agreement=optimizer.wire.agreement,
                raised=raised,
            )
        )
        for param, (_, how) in zip(joined, given, strict=True):
            if how == "expanded":
                param.grad = None  # nothing can be accumulated into it
        optimizer.zero_grad(set_to_none=case.set_to_none)
    return seen


def _backward(
    case: Case,
    place: tuple[int, int, int],
    params: Sequence[nn.Parameter],
    given: Sequence[tuple[Tensor | None, str]],
) -> None:
    """Runs one backward pass that leaves, or adds, the drawn gradients."""
    t, rank, number = place
    losses = []
    for index, (param, (grad, how)) in enumerate(zip(params, given, strict=True)):
        if grad is not None and how == "backward":
            mine = (o for o in case.steps[t].odd if (o.rank, o.param) == (rank, index))
            kind = next(mine, Odd(rank, index, case.steps[t].kind)).kind
            once = _drawn(case, (t, rank, index, number), case.params[index], kind)
            losses.append((param * once).sum().double())
    if losses:
        torch.stack(losses).sum().backward()


def replay(case: Case, ranks: Sequence[list[Seen]]) -> None:
    """Takes the steps of a case with the oracle and holds every rank to it after every step."""
    Replay(case).hold(ranks)


class Replay:
    """The rule for one case, in this process."""

    def __init__(self, case: Case) -> None:
        places = iter(new_params(case))
        groups = [
            OracleGroup(
                [next(places).detach() for _ in group.params],
                lr=group.lr,
                betas=group.betas,
                weight_decay=group.weight_decay,
            )
            for group in case.groups
        ]
        self.case = case
        self.size = case.options.get("local_group", 1)
        self.voters = case.world_size // self.size
        options = {k: v for k, v in case.options.items() if k in zoo.ORACLE_OPTIONS}
        self.oracle = OracleLion(groups, self.voters, full=case.full, **options)
        self.abstentions = 0
        # What a rank's first backward pass on a parameter finds watched, and the last layout.
        self.watched: set[int] = set()
        self.layout: list[int] | None = None

    def hold(self, ranks: Sequence[list[Seen]]) -> None:
        """Holds all ranks to the rule after every step."""
        for t, seen in enumerate(zip(*ranks, strict=True)):
            raised = self._step(t, seen)
            for rank, mine in enumerate(seen):
                where = f"rank {rank}, step {t}"
                assert bool(mine.raised) == raised, f"{where}: {mine.raised}"
                assert mine.steps == self.oracle.steps, where
                assert mine.abstentions == self.abstentions, where
                for k, (param, expected) in enumerate(zip(mine.params, self.oracle.params)):  # noqa: B905
                    assert param == bits_of(expected), f"not the rule: parameter {k}, {where}"
            for voter in range(self.voters):
                self._hold_momenta(voter, seen[voter * self.size : (voter + 1) * self.size], t)

    def _step(self, t: int, seen: Sequence[Seen]) -> bool:
        """Takes one step; returns whether a rank has abstained too often."""
        case, step = self.case, self.case.steps[t]
        joined = [group for group in case.groups if group.joins <= t]
        for place, name, value in step.sets:
            if place < len(joined):
                setattr(self.oracle.groups[place], name, value)
        trained = case.trained(t)
        # A new optimizer, or group, watches what is trainable when it is made.
        if t == 0 or step.reload:
            self.watched = set(trained)
        joins = [group.joins for group in case.groups for _ in group.params]
        self.watched |= {k for k in trained if joins[k] == t}
        if step.reload:
            self.layout = None
            self.oracle.abstentions = [0] * self.voters
        given = [self._given(t, rank) for rank in range(case.world_size)]
        self.watched |= set(trained)
        heard = [self._heard(given[v * self.size :][: self.size]) for v in range(self.voters)]
        before = self.oracle.steps
        self.oracle.synced = trained
        try:
            self.oracle.step(heard, [mine.foreseen for mine in seen][:: self.size])
        except RuntimeError:
            self.layout = trained
            return True
        self.abstentions += sum(count > 0 for count in self.oracle.abstentions)
        # What averages of gradients send is tested by itself.
        counted = not case.full and not {"overlap", "warmup_full_steps"} & set(case.options)
        if self.size == 1 and counted:
            sent = self._bytes(trained, moved=self.oracle.steps > before)
            assert [mine.bytes_sent for mine in seen] == [sent] * len(seen), f"bytes in step {t}"
        self.layout = trained
        if self.voters > 1 and self.oracle.steps > before:
            for mine in seen:
                assert math.isnan(mine.agreement) or math.isclose(
                    mine.agreement, self.oracle.agreement, abs_tol=1e-6
                ), f"agreement in step {t}"
        return False

    def _given(self, t: int, rank: int) -> list[tuple[Tensor | None, bool]]:
        """A rank's gradients, and which of them count: S11."""
        found: list[tuple[Tensor | None, bool]] = []
        drawn = [gradient(self.case, t, rank, index) for index in range(len(self.case.params))]
        by_autograd = [
            grad is not None and how == "backward" and index in self.watched
            for index, (grad, how) in enumerate(drawn)
        ]
        for (grad, how), watched in zip(drawn, by_autograd, strict=True):
            if grad is not None and how != "backward":
                grad = _laid_out(grad, how).contiguous()
            counts = grad is not None and (watched or not any(by_autograd) or bool(grad.any()))
            found.append((grad, counts))
        return found

    def _heard(self, ranks: Sequence[Sequence[tuple[Tensor | None, bool]]]) -> list[Tensor | None]:
        """The mean gradients of the ranks that vote together."""
        if len(ranks) == 1:
            return [grad if counts else None for grad, counts in ranks[0]]
        means: list[Tensor | None] = []
        for given in zip(*ranks, strict=True):
            one = next((grad for grad, counts in given if counts), None)
            if one is None:
                means.append(None)
                continue
            # One of zeros that does not count is added all the same: of either sign.
            parts = [torch.zeros_like(one) if g is None else g / len(ranks) for g, _ in given]
            means.append(parts[0] + parts[1])
        return means

    def _hold_momenta(self, voter: int, seen: Sequence[Seen], t: int) -> None:
        for k, expected in enumerate(self.oracle.exp_avg[voter]):
            pieces = [mine.exp_avg[k] for mine in seen]
            where = f"momentum of parameter {k}, voter {voter}, step {t}"
            if any(piece is None for piece in pieces):
                # Nobody has moved it yet; a rank with a gradient that abstained has one of zeros.
                assert all(piece is None or not piece.any() for piece in pieces), where
                assert not expected.any(), where
                continue
            if seen[0].ranges.get(k) is not None:
                order = sorted(range(self.size), key=lambda place: seen[place].ranges[k])
                whole = torch.cat([pieces[place] for place in order])
            else:
                whole = pieces[0].contiguous().view(-1)
            assert whole.dtype == expected.dtype, where
            assert bits_of(whole) == bits_of(expected), f"{where}: {whole}, not {expected}"

    def _bytes(self, trained: list[int], *, moved: bool) -> int:
        """What a rank sends in a step, by the formulas of docs/rule.md."""
        others, options = self.case.world_size - 1, self.case.options
        sent = 8 * others * (6 + -(-len(trained) // 64))
        if trained != self.layout:
            sent += others * (32 + 8 * (6 + -(-len(self.layout or []) // 64)))
        every = options.get("check_replicas_every", 0)
        if not moved or not others:
            return sent if others else 0
        if every and self.oracle.steps % every == 0:
            sent += 8 * others
        rule = (options.get("aggregation", "majority"), options.get("ties", "alternate"))
        bits = options.get("bits", 1)
        names = [options["exchange"]] if "exchange" in options else ["gather", "two_phase"]
        totals = [
            sum(
                bytes_of_words(rows_of_words(shapes), self.case.world_size, name, *rule, bits)
                for shapes in self._messages(trained)
            )
            for name in names
        ]
        return sent + min(totals) + self._bytes_of_averages(trained)

    def _bytes_of_averages(self, trained: list[int]) -> int:
        """What a rank sends for the slice of momenta that is due."""
        every, ranks = self.case.options.get("momentum_sync_every", 0), self.case.world_size
        if not every:
            return 0
        numels = [math.prod(self.case.params[k].shape) for k in trained]
        part, n = self.oracle.steps % every, sum(numels)
        due = (part + 1) * n // every - part * n // every
        size = self.case.options.get("momentum_sync_dtype", torch.bfloat16).itemsize
        return 2 * (ranks - 1) * -(-due // ranks) * size

    def _messages(self, trained: list[int]) -> list[list[torch.Size]]:
        """The shapes in each message: runs of at most `message_numel` elements."""
        limit = self.case.message_numel or 1 << 20
        runs: list[list[torch.Size]] = []
        for index in trained:
            shape = torch.Size(self.case.params[index].shape)
            if shape.numel() == 0:
                continue
            if not runs or sum(s.numel() for s in runs[-1]) + shape.numel() > limit:
                runs.append([])
            runs[-1].append(shape)
        return runs
