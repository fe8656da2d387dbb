"""What all ranks must agree on before any of them moves, and the error that all raise if not.

A meeting begins with one gather of headers. Ranks whose messages have different sizes are found
there, before they would hang or mix their bytes in a later collective. Everything that decides how
a meeting goes on is read from that gather, so all ranks take the same branches.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from hf_dlion.exchange.wire import Wire, named_ranks
from hf_dlion.ranks.fingerprint import digest
from hf_dlion.ranks.header import (
    FAILED,
    FINITE,
    FLAGS_AT,
    WIRE_VERSION,
    Header,
    Kind,
    pack_bools,
    unpack_bools,
)

# Characters of an error's text that other ranks show.
_MOST_TOLD = 4000

_DOING: dict[int, tuple[str, str]] = {
    Kind.STEP: ("steps", "step"),
    Kind.SAVE: ("saves", "save"),
    Kind.LOAD: ("loads", "load"),
    Kind.WEIGHTS: ("saves the model", "save"),
    Kind.REPLICATE: ("has replicate=", "have replicate="),
    Kind.EXCHANGE: ("exchanges", "exchange"),
}
_ELSEWHERE = (
    "a rank is at another point of its program: let every rank take the same number of steps, and "
    "step, save, and load in the same order"
)
_OTHER_OPTIMIZER = (
    "ranks use different optimizers: make and step several DistributedLions in the same order on "
    "every rank, and make new ones on all ranks together"
)


class Disagreement(RuntimeError):
    """Raised on every rank if the ranks would otherwise drift apart or wait for one another."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """What this rank says about itself at a meeting.

    Attributes:
        kind: What the rank is about to do.
        step: Number of the last step that it took; must be equal.
        options: Options by name; must be equal.
        groups: lr, betas, weight decay, and number of parameters of each group; must be equal.
        layout: One line per trainable parameter: name, shape, dtype, strides, device type, and
            whether its gradient is averaged; must be equal.
        present: Whether each trainable parameter has a gradient.
        values: Returns name and hash of every parameter, frozen ones included; called only if the
            layout is new.
        finite: Whether all gradients are finite.
        failure: What failed on this rank, or None.
    """

    kind: Kind
    step: int
    options: Mapping[str, object]
    groups: Sequence[Mapping[str, object]]
    layout: Sequence[tuple[object, ...]]
    present: Sequence[bool]
    values: Callable[[], list[tuple[str, int]]]
    finite: bool = True
    failure: BaseException | None = None


@dataclass(frozen=True)
class Agreed:
    """What a meeting found.

    Attributes:
        finite: Whether each rank's gradients are finite.
        present: By rank, whether each trainable parameter has a gradient; don't change the lists.
    """

    finite: list[bool]
    present: list[list[bool]]

    def has_gradient(self, index: int) -> list[bool]:
        """Returns which ranks have a finite gradient of a parameter."""
        pairs = zip(self.finite, self.present, strict=True)
        return [finite and present[index] for finite, present in pairs]

    @functools.cached_property
    def moves(self) -> list[bool]:
        """By parameter, whether some rank has a finite gradient of it."""
        rows = [row for finite, row in zip(self.finite, self.present, strict=True) if finite]
        return [any(column) for column in zip(*rows, strict=True)]

    def by_voter(self, voter_of_rank: Sequence[int]) -> Agreed:
        """Returns the same by voter, which has what all of its ranks have.

        Args:
            voter_of_rank: Number of each rank's voter.
        """
        voters: list[list[int]] = [[] for _ in range(max(voter_of_rank) + 1)]
        for rank, voter in enumerate(voter_of_rank):
            voters[voter].append(rank)
        return Agreed(
            [all(self.finite[rank] for rank in ranks) for ranks in voters],
            [
                [all(own) for own in zip(*(self.present[rank] for rank in ranks), strict=True)]
                for ranks in voters
            ],
        )


@dataclass
class _Optimizers:
    """Optimizers of one process group that have met those of the other ranks.

    Attributes:
        made: Counts the optimizers that this rank made.
        count: Optimizers that have met, the same number on every rank.
        twins: By layout and values, each optimizer's number among those made, by rank.
    """

    made: itertools.count[int] = field(default_factory=lambda: itertools.count(1))
    count: int = 0
    twins: dict[tuple[int, ...], list[list[int]]] = field(default_factory=dict)


_met: weakref.WeakKeyDictionary[dist.ProcessGroup, _Optimizers] = weakref.WeakKeyDictionary()


class Abstentions:
    """Counts steps in which ranks abstained, the same counts on every rank."""

    def __init__(self, most: int) -> None:
        """Begins with none.

        Args:
            most: Steps in a row that are too many.
        """
        self._most = most
        self._in_a_row: list[int] = []

    def count(self, finite: Sequence[bool]) -> int:
        """Returns how many ranks abstain in this step.

        Args:
            finite: By rank, whether its gradients are finite.
        """
        missing = list(finite).count(False)
        # Voters where ranks meet, ranks in local steps.
        same = len(self._in_a_row) == len(finite)
        before = self._in_a_row if same else [0] * len(finite)
        self._in_a_row = [0 if ok else n + 1 for ok, n in zip(finite, before, strict=True)]
        return missing

    def check(self) -> None:
        """Raises if a rank abstained too often in a row.

        Raises:
            RuntimeError: Naming the rank.
        """
        most = max(self._in_a_row, default=0)
        if most >= self._most:
            ranks = [rank for rank, count in enumerate(self._in_a_row) if count == most]
            raise RuntimeError(
                f"gradients of {named_ranks(ranks)} held a NaN or an Inf in {most} steps in a row: "
                f"lower the learning rate, check that rank's data, or raise max_abstained_steps "
                f"({self._most})"
            )


class Meetings:
    """Meetings of one optimizer with the same optimizer on the other ranks."""

    def __init__(self, wire: Wire, alike: Sequence[Sequence[int]] | None = None) -> None:
        """Communicates nothing.

        Args:
            wire: All ranks that meet.
            alike: Groups of ranks that hold the same parts of sharded parameters (default: all
                ranks hold whole parameters).
        """
        self._wire, self._alike = wire, alike or [range(wire.world_size)]
        self._met = _met.setdefault(wire.group, _Optimizers())
        self._made = next(self._met.made)
        self._number = 0
        self._layout: int | None = None
        # The last layout's lines, and which gradients were there, with their hashes: mostly those
        # of the next step.
        self._lines: tuple[Sequence[tuple[object, ...]], int] = ([], digest([]))
        self._present: tuple[list[bool], int] = ([], digest(pack_bools([])))

    def compare_again(self) -> None:
        """Makes the next meeting compare values; between two meetings all ranks call this."""
        self._layout = None

    def meet(self, report: Report) -> Agreed:
        """Checks that all ranks agree; every rank must call this.

        Bytes per rank: 64 * (N - 1); where gradients are present on some ranks only,
        8 * (N - 1) * ceil(P / 64) more for P trainable parameters; at a new layout 24 * (N - 1)
        more.

        Raises:
            Disagreement: On every rank, if ranks disagree or something failed on another rank.
            BaseException: The report's own failure.
            LostRank: If a rank does not come.
        """
        failure, header = report.failure, None
        if failure is None:
            try:
                header = self._header(report)
            except Exception as error:  # The other ranks wait for a header.
                failure = error
        table = self._gather(header or self._failed(report))
        if header is not None and header.layout == self._layout and _all_equal(table):
            finite = table[0][FLAGS_AT] == FINITE
            return Agreed([finite] * len(table), [self._present[0]] * len(table))
        headers = [Header.unpacked(words) for words in table]
        if any(header.kind == Kind.REPLICATE for header in headers):
            # Those ranks are in `Topology.form`, where nobody hears of a failure.
            if failure is not None:
                raise failure
            check_kinds([header.kind for header in headers])
        if any(header.failed for header in headers):
            raise_together(failure, self._wire, _DOING[report.kind][1])
        assert header is not None  # Its rank would have failed.
        check_kinds([header.kind for header in headers])
        if len({header.optimizer for header in headers}) > 1:
            raise Disagreement(_OTHER_OPTIMIZER)
        if len({header.step for header in headers}) > 1:
            steps = _by_value([header.step for header in headers])
            raise Disagreement(
                f"ranks are at different steps: {steps}. Load the same checkpoint on every rank"
            )
        if len({header.options for header in headers}) > 1:
            self._raise_options(report)
        if len({header.layout for header in headers}) > 1:
            self._raise_layouts(report)
        if header.layout != self._layout:
            self._begin(header.layout, report)
        return Agreed([header.finite for header in headers], self._presence(headers, report))

    def _failed(self, report: Report) -> Header:
        return Header(
            kind=report.kind, optimizer=self._number, step=report.step, finite=False, failed=True
        )

    def _header(self, report: Report) -> Header:
        if report.layout is not self._lines[0] and report.layout != self._lines[0]:
            self._lines = report.layout, digest(_lines(report.layout))
        if report.present != self._present[0]:
            self._present = list(report.present), digest(pack_bools(report.present))
        return Header(
            kind=report.kind,
            optimizer=self._number,
            step=report.step,
            finite=report.finite,
            failed=False,
            options=digest([report.options, report.groups]),
            layout=self._lines[1],
            presence=self._present[1],
        )

    def _gather(self, header: Header) -> list[list[int]]:
        """Returns every rank's header, all of this version."""
        table: list[list[int]] = self._wire.gather_words(header.packed(), "a header").tolist()
        versions = [words[0] for words in table]
        if versions != [WIRE_VERSION] * len(table):
            raise Disagreement(
                f"ranks have different versions of the wire format, {_by_value(versions)}: install "
                f"the same hf_dlion everywhere. Or {_ELSEWHERE}"
            )
        return table

    def _raise_options(self, report: Report) -> None:
        difference = _first_difference("options", self._wire.gather_objects(_settings(report)))
        raise Disagreement(
            f"{difference}. Make the optimizer with the same options on every rank, and step its "
            f"scheduler on all ranks together"
        )

    def _raise_layouts(self, report: Report) -> None:
        tables = self._wire.gather_objects(dict(_numbered(_lines(report.layout))))
        raise Disagreement(
            f"{_first_difference('trainable parameters', tables)}. Every rank must hold the same "
            f"parameters, in the same order and on the same type of device; FSDP1, DeepSpeed, and "
            f"ZeRO are not supported"
        )

    def _begin(self, layout: int, report: Report) -> None:
        """Compares parameters, which must start equal, and numbers a new optimizer."""
        values, failure = [], None
        try:
            values = report.values()
        except Exception as error:  # The other ranks wait for a hash.
            failure = error
        words = [failure is not None, digest(values), self._made]
        failed, hashes, made = self._wire.gather_words(words, "a layout").t().tolist()
        if any(failed):
            raise_together(failure, self._wire, "the comparison of parameters")
        for ranks in self._alike:
            if len({hashes[rank] for rank in ranks}) > 1:
                self._raise_values(values)
        if not self._number:
            self._check_order(made, (layout, *hashes))
            self._met.count += 1
            self._number = self._met.count
        self._layout = layout

    def _check_order(self, made: list[int], twin: tuple[int, ...]) -> None:
        """Checks that optimizers that nothing else tells apart were made in one order."""
        earlier = self._met.twins.setdefault(twin, [])
        for other in earlier:
            later = [mine > theirs for mine, theirs in zip(made, other, strict=True)]
            if any(later) != all(later):
                raise Disagreement(_OTHER_OPTIMIZER)
        earlier.append(made)

    def _raise_values(self, values: list[tuple[str, int]]) -> None:
        everyone = self._wire.gather_objects(values)
        names = [dict(_numbered([name for name, _ in pairs])) for pairs in everyone]
        if any(own != names[0] for own in names):
            difference = _first_difference("names of parameters", names)
            raise Disagreement(f"{difference}. Pass the parameters in the same order on every rank")
        tables = [dict(pairs) for pairs in everyone]
        for ranks in self._alike:
            if any(tables[rank] != tables[ranks[0]] for rank in ranks):
                own = [tables[rank] for rank in ranks]
                difference = _first_difference("hashes of parameter values", own, ranks)
                break
        raise Disagreement(
            f"{difference}. Replicas must start equal: wrap the model in DistributedDataParallel, "
            f"or load the same weights or set the same seed on every rank before you build it. "
            f"With vote_every, load the model, too, before you load the optimizer's state"
        )

    def _presence(self, headers: list[Header], report: Report) -> list[list[bool]]:
        own = self._present[0]
        if len({header.presence for header in headers}) == 1:
            return [own] * len(headers)
        table = self._wire.gather_words(pack_bools(own), "which parameters have a gradient")
        return [unpack_bools(words, len(own)) for words in table.tolist()]


def raise_together(failure: BaseException | None, wire: Wire, what: str) -> None:
    """Raises on every rank if something failed on any; every rank must call this.

    Bytes per rank: `Wire.gather_objects`.

    Args:
        failure: What failed on this rank, or None.
        wire: The ranks.
        what: Name of what they did.

    Raises:
        BaseException: This rank's failure.
        Disagreement: On ranks where nothing failed, naming the others.
    """
    texts = wire.gather_objects(None if failure is None else failure_text(failure))
    if failure is not None:
        raise failure
    failed = {rank: text for rank, text in enumerate(texts) if text is not None}
    if failed:
        named = "; ".join(f"rank {rank}: {text}" for rank, text in failed.items())
        raise Disagreement(f"{what} failed on {len(failed)} of {len(texts)} ranks: {named}")


def agree_in_node(
    node: Wire, kind: Kind, finite: bool, present: Sequence[bool]
) -> tuple[bool, list[bool]]:
    """Returns whether all ranks of a node have finite gradients, and which ones all of them have.

    All ranks of the node must call this. Bytes to its other ranks: 24 (L - 1), and
    8 (L - 1) ceil(P / 64) if their presence differs.

    Raises:
        Disagreement: On every rank of the node, if one exchanges and another doesn't.
    """
    packed = pack_bools(present)
    words = [kind, finite, digest(packed)]
    kinds, fine, hashes = node.gather_words(words, "the gradients of a node").t().tolist()
    check_kinds(kinds)
    if not all(fine) or len(set(hashes)) == 1:
        return all(fine), list(present)
    table = node.gather_words(packed, "which parameters have a gradient").tolist()
    rows = [unpack_bools(own, len(present)) for own in table]
    return True, [all(column) for column in zip(*rows, strict=True)]


def failure_text(failure: BaseException) -> str:
    """Returns what other ranks show of a failure; cannot fail, because they wait for it."""
    kind = type(failure).__name__
    try:
        text = f"{kind}: {failure}"
    except Exception as error:
        text = f"{kind} (its text raised {type(error).__name__})"
    if len(text) > _MOST_TOLD:
        text = f"{text[:_MOST_TOLD]} ... ({len(text)} characters)"
    return text.encode(errors="backslashreplace").decode()


def _all_equal(table: list[list[int]]) -> bool:
    """Returns whether all ranks sent one header, and nothing failed."""
    return table.count(table[0]) == len(table) and not table[0][FLAGS_AT] & FAILED


def check_kinds(kinds: Sequence[int]) -> None:
    """Raises on every rank if the ranks do different things.

    Raises:
        Disagreement: Naming who does what.
    """
    if len(set(kinds)) == 1:
        return
    ranks_of = {
        kind: [r for r, k in enumerate(kinds) if k == kind] for kind in dict.fromkeys(kinds)
    }
    clauses = []
    for kind, ranks in sorted(ranks_of.items(), key=lambda item: (len(item[1]), -item[1][0])):
        verbs = _DOING[Kind(kind)] if kind in _DOING else ("does something else",) * 2
        clauses.append(f"{named_ranks(ranks)} {verbs[len(ranks) > 1]}")
    raise Disagreement(f"{' while '.join(clauses)}: {_ELSEWHERE}")


def _settings(report: Report) -> dict[str, Any]:
    settings = dict(report.options)
    for number, group in enumerate(report.groups):
        settings |= {f"group {number} {name}": value for name, value in group.items()}
    return settings


def _lines(layout: Sequence[tuple[object, ...]]) -> list[str]:
    return [" ".join(map(str, line)) for line in layout]


def _numbered(values: Sequence[str]) -> list[tuple[str, str]]:
    return [(f"parameter {number}", value) for number, value in enumerate(values)]


def _by_value(values: Sequence[object], ranks: Sequence[int] | None = None) -> str:
    """Returns "rank 0: 3, ranks 1 and 2: 4"."""
    ranks_of: dict[str, list[int]] = {}
    for rank, value in zip(ranks or range(len(values)), values, strict=True):
        ranks_of.setdefault(repr(value), []).append(rank)
    return ", ".join(f"{named_ranks(own)}: {value}" for value, own in ranks_of.items())


def _first_difference(
    what: str, tables: Sequence[Mapping[str, object]], ranks: Sequence[int] | None = None
) -> str:
    """Returns a clause that names the first key on which the ranks' tables differ."""
    for key in dict.fromkeys(key for table in tables for key in table):
        values = [table.get(key, "missing") for table in tables]
        if len({repr(value) for value in values}) > 1:
            return f"ranks differ in {what}, first in {key!r}: {_by_value(values, ranks)}"
    return f"ranks differ in {what}"
