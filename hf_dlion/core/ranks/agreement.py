"""All ranks meet, say what must be equal, and go on or raise together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from hf_dlion.core.exchange.wire import Wire
from hf_dlion.core.ranks.fingerprint import digest
from hf_dlion.core.ranks.header import ANEW, DOING, FAILED, FINITE, WIRE_VERSION, Header, Kind

__all__ = ["Agreed", "Disagreement", "Kind", "Meetings", "Report"]

MOST_TOLD = 2000
# How many optimizers have met in each process group so far.
_met: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()


class Disagreement(RuntimeError):
    """Raised on every rank, before anything moves, if ranks differ in what must be equal."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """What this rank tells the others.

    Attributes:
        kind: Why it is here.
        step: Number of the step to be taken.
        finite: Whether its gradients hold no NaN and no Inf.
        failure: What failed on it, or None.
        options: The options by name, equal on all ranks.
        groups: Hyperparameters of the parameter groups, equal on all ranks.
        layout: A line per trainable parameter, equal on all ranks.
        present: By trainable parameter, whether it has a gradient here.
        values: Returns name and hash of every parameter; called if the layout is new.
    """

    kind: Kind
    step: int
    finite: bool = True
    failure: BaseException | None = None
    options: Mapping[str, object]
    groups: Sequence[Mapping[str, object]]
    layout: Sequence[tuple[object, ...]]
    present: Sequence[bool]
    values: Callable[[], list[tuple[str, int]]]


@dataclass(frozen=True)
class Agreed:
    """What all ranks know after a meeting.

    A voter (a rank, a node, a replica of shards) has what all of its ranks have.

    Attributes:
        finite: By voter, whether its gradients are finite.
        present: By voter and trainable parameter, whether it has a gradient.
    """

    finite: list[bool]
    present: list[list[bool]]

    def votes(self, index: int) -> list[bool]:
        """Returns which voters have a finite gradient of a parameter."""
        pairs = zip(self.finite, self.present, strict=True)
        return [finite and present[index] for finite, present in pairs]


class Meetings:
    """The meetings of one optimizer.

    Args:
        wire: All ranks.
        voters: By rank, the number of its voter; None if every rank votes.
        places: By rank, a number that ranks holding the same values share; None if all do.
    """

    def __init__(
        self, wire: Wire, voters: Sequence[int] | None = None, places: Sequence[int] | None = None
    ) -> None:
        """Meets nobody yet."""
        self._wire = wire
        self._voters = list(range(wire.world_size)) if voters is None else list(voters)
        self._count = max(self._voters) + 1
        self._places = [0] * wire.world_size if places is None else list(places)
        self._optimizer = -1
        self._layout: object = None
        self._layout_hash = 0

    def meet(self, report: Report) -> Agreed:
        """Returns what all ranks know, after checking that they agree.

        Every rank must call this at the same point of its program. Bytes per rank: 64 (N - 1); if
        presence differs also 8 (N - 1) ceil(P / 64) for P trainable parameters; at a new layout
        those of `Wire.gather_objects`.

        Raises:
            Disagreement: On every rank, the same text, naming the first difference. A rank with a
                failure raises that instead.
        """
        mine = self._header(report)
        headers, alike = self._gather(mine)
        if alike and mine.flags == FINITE:
            return Agreed([True] * self._count, [list(report.present)] * self._count)
        self._check_failures(headers, report)
        self._check_point(headers)
        if len({own.settings for own in headers}) > 1:
            self._raise_settings(report)
        if len({own.layout for own in headers}) > 1 or any(own.flags & ANEW for own in headers):
            self._agree_on_layout(report, headers)
        if len({own.step for own in headers}) > 1:
            steps = [own.step for own in headers]
            raise Disagreement(
                f"ranks are at different steps, {steps} in rank order: load the same checkpoint "
                f"on every rank"
            )
        finite = [bool(own.flags & FINITE) for own in headers]
        present = [list(report.present)] * len(headers)
        if len({own.presence for own in headers}) > 1:
            present = self._gather_presence(report.present)
        groups: list[list[int]] = [[] for _ in range(self._count)]
        for rank, voter in enumerate(self._voters):
            groups[voter].append(rank)
        return Agreed(
            [all(finite[rank] for rank in ranks) for ranks in groups],
            [
                [all(present[rank][k] for rank in ranks) for k in range(len(report.present))]
                for ranks in groups
            ],
        )

    def _header(self, report: Report) -> Header:
        if report.layout is not self._layout:
            self._layout_hash = digest(list(report.layout))
        anew = report.layout is not self._layout and report.failure is None
        flags = FINITE * report.finite | FAILED * (report.failure is not None) | ANEW * anew
        return Header(
            WIRE_VERSION,
            report.kind,
            self._optimizer,
            report.step,
            flags,
            digest((dict(report.options), [dict(group) for group in report.groups])),
            self._layout_hash,
            digest(list(report.present)),
        )

    def _gather(self, mine: Header) -> tuple[list[Header], bool]:
        """Returns every rank's header, and whether all are equal."""
        table = self._wire.gather_words(list(mine.words()), "a header").tolist()
        if table.count(table[0]) == len(table):
            return [mine] * len(table), True
        versions = [row[0] for row in table]
        if any(version != WIRE_VERSION for version in versions):
            raise Disagreement(
                f"ranks speak different versions of the wire format, {versions} in rank order: "
                f"install the same hf_dlion everywhere. If these aren't versions, a rank is at "
                f"another point of its program: all ranks need the same number of steps"
            )
        return [Header(*row) for row in table], False

    def _check_failures(self, headers: Sequence[Header], report: Report) -> None:
        if not any(own.flags & FAILED for own in headers):
            return
        told = None if report.failure is None else describe(report.failure)
        failures = self._wire.gather_objects(told)
        if report.failure is not None:
            raise report.failure
        failed = {rank: text for rank, text in enumerate(failures) if text is not None}
        named = "; ".join(f"rank {rank}: {text}" for rank, text in failed.items())
        raise Disagreement(
            f"{DOING[report.kind]} failed on {len(failed)} of {len(headers)} ranks: {named}"
        )

    def _check_point(self, headers: Sequence[Header]) -> None:
        """Raises if ranks do different things, or the same with different optimizers."""
        if len({own.kind for own in headers}) > 1:
            doing = ", ".join(
                f"rank {rank}: {DOING[Kind(own.kind)]}" for rank, own in enumerate(headers)
            )
            raise Disagreement(f"ranks must do the same at the same time, but {doing}")
        if len({own.optimizer for own in headers}) > 1:
            raise Disagreement(
                "ranks step different optimizers: call step() of several optimizers in the same "
                "order on every rank"
            )

    def _raise_settings(self, report: Report) -> None:
        options = self._wire.gather_objects({name: repr(v) for name, v in report.options.items()})
        difference = first_difference("options", options)
        if difference is None:
            groups = self._wire.gather_objects(
                {
                    f"group {number} {name}": value
                    for number, group in enumerate(report.groups)
                    for name, value in group.items()
                }
            )
            difference = first_difference("parameter groups", groups)
        raise Disagreement(
            f"{difference}; use the same values on every rank, and step schedulers on all of them "
            f"with a metric that is reduced over the ranks"
        )

    def _agree_on_layout(self, report: Report, headers: Sequence[Header]) -> None:
        """Compares the lines of the parameters, then names and values, which must start equal."""
        if len({own.layout for own in headers}) > 1:
            lines = self._wire.gather_objects([repr(line) for line in report.layout])
            tables = [dict(enumerate(own)) for own in lines]
            raise Disagreement(
                f"{first_difference('trainable parameters', tables)}; pass the same parameters in "
                f"the same order on every rank, and freeze them on all ranks together"
            )
        values = report.values()
        hashes = self._wire.gather_words([digest(values)], "hashes of parameters").view(-1)
        pairs = set(zip(self._places, hashes.tolist(), strict=True))
        if len(pairs) > len(set(self._places)):
            everyone = self._wire.gather_objects(values)
            # Of the first ranks that should hold the same and don't.
            place = next(p for p in self._places if len({h for q, h in pairs if q == p}) > 1)
            ranks = [rank for rank, own in enumerate(self._places) if own == place]
            everyone = [everyone[rank] for rank in ranks]
            names = [dict(enumerate(name for name, _ in own)) for own in everyone]
            difference = first_difference("parameter names", names, ranks)
            if difference is not None:
                raise Disagreement(f"{difference}; pass parameters in the same order on every rank")
            difference = first_difference(
                "parameter values", [dict(own) for own in everyone], ranks
            )
            raise Disagreement(
                f"{difference} (hashes): replicas must start equal. Wrap the model in "
                f"DistributedDataParallel, or load the same weights or set the same seed on every "
                f"rank before building it"
            )
        self._layout = report.layout
        if self._optimizer < 0:
            self._optimizer = _met.get(self._wire.group, 0)
            _met[self._wire.group] = self._optimizer + 1

    def _gather_presence(self, present: Sequence[bool]) -> list[list[bool]]:
        """Returns every rank's bits, one per trainable parameter."""
        bits = sum(1 << k for k, own in enumerate(present) if own)
        count = -(-len(present) // 64)
        words = [bits >> 64 * k & (1 << 64) - 1 for k in range(count)]
        signed = [word - (1 << 64) if word >> 63 else word for word in words]
        table = self._wire.gather_words(signed, "presence").tolist()
        return [[bool(row[k // 64] >> k % 64 & 1) for k in range(len(present))] for row in table]


def describe(failure: BaseException) -> str:
    """Returns what other ranks print about a failure: text that can be sent and read."""
    kind = type(failure).__name__
    try:
        text = f"{kind}: {failure}"
    except Exception as error:
        text = f"{kind}, which can't be printed ({type(error).__name__})"
    if len(text) > MOST_TOLD:
        text = f"{text[:MOST_TOLD]} ... ({len(text)} characters)"
    return text.encode(errors="backslashreplace").decode()


def first_difference(
    what: str, tables: Sequence[dict[Any, Any]], ranks: Sequence[int] | None = None
) -> str | None:
    """Returns a sentence that names the first key on which the ranks' tables differ, or None."""
    for key in dict.fromkeys(key for table in tables for key in table):
        values = [table.get(key, "missing") for table in tables]
        if any(value != values[0] for value in values):
            pairs = zip(ranks or range(len(tables)), values, strict=True)
            told = ", ".join(f"rank {rank}: {value!r}" for rank, value in pairs)
            return f"ranks differ in {what}, first in {key!r}: {told}"
    return None
