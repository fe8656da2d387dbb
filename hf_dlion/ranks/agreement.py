"""Meetings, in which all ranks agree before any of them moves, or all raise.

A meeting begins with one gather of headers. It finds ranks whose messages have different sizes,
before a later collective would hang or mix their bytes. All branches of a meeting depend on that
gather alone, so all ranks take the same ones.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import cast

import torch.distributed as dist
from torch import Tensor

from hf_dlion.core.layout import Layout
from hf_dlion.core.slot import Signature
from hf_dlion.ranks.compare import compare_parameters
from hf_dlion.ranks.header import (
    ABSTAINED_AT,
    FINITE,
    Disagreement,
    Kind,
    gather_bools,
    gather_headers,
    pack_bools,
    raise_kinds,
)
from hf_dlion.ranks.wire import Wire, digest

# Options, hyperparameters of groups, and counts of calls, by name.
Values = Mapping[str, object]
# Names of two of them: names, and a hash.
FROZEN = "frozen parameters"
HISTORY = "lr or weight decay of a step since the last exchange"

_START_EQUAL = (
    "Replicas must start equal: pass the parameters in the same order, wrap the model in "
    "DistributedDataParallel or load the same weights on every rank, and with vote_every load the "
    "model before the optimizer's state. If it is wrapped, its weights were changed since then: "
    "don't load weights on some ranks only, and set max_norm=None in nn.Embedding, which changes "
    "other rows on each rank"
)
_SAME_STEPS = (
    "Take the same number of steps on every rank, and load the same checkpoint on all ranks"
)
_SAME_FROZEN = "Freeze and unfreeze the same parameters on every rank, before the same step"
_SAME_VALUES = (
    "Give groups the same values on every rank, and step a scheduler on all ranks together, with "
    "the same metric"
)
# What to do if `Values` differ, by patterns of their names; the first counts.
_REMEDIES = {
    "calls of load_state_dict": "Load the same checkpoint on all ranks",
    "calls of attach and detach": "Call attach() and detach() on all ranks",
    "exchanges": _SAME_STEPS,
    "steps since *": _SAME_STEPS,
    FROZEN: _SAME_FROZEN,
    "group * parameters": "Make and add the same parameter groups on every rank",
    "group *": _SAME_VALUES,
    "lr*": _SAME_VALUES,
    "*": "Create the optimizer with the same options on every rank",
}

# Returns name and this rank's part of every parameter, frozen ones included.
Parameters = Callable[[], Sequence[tuple[str, Tensor]]]
# Largest number of frozen parameters that an error names.
_MOST_NAMES = 4


@dataclass(frozen=True)
class Period:
    """The local steps since the last exchange, from `abstained` of which this rank abstained."""

    steps: int = 0
    abstained: int = 0

    def and_a_step(self, *, abstains: bool) -> Period:
        """Returns the period with one more step."""
        return Period(self.steps + 1, self.abstained + abstains)


@dataclass(eq=False)
class Report:
    """What this rank brings to a meeting. All but the kind may differ between ranks.

    Attributes:
        kind: What the ranks do.
        present: Whether each trainable parameter has a gradient; empty if the ranks don't step. In
            an exchange, whether it had one in the period.
        finite: Whether all gradients are finite.
        abstains: Whether this rank has a NaN or an Inf in the step, or no gradient at all.
        period: The period of local steps, with the step that begins.
        failure: What failed on this rank.
    """

    kind: Kind
    present: list[bool] = field(default_factory=list)
    finite: bool = True
    abstains: bool = False
    period: Period = Period()
    failure: BaseException | None = None

    @property
    def has_header(self) -> bool:
        """Whether all ranks meet; in a local step without header, a failure is this rank's own."""
        return self.kind is not Kind.LOCAL_STEP

    @property
    def abstained(self) -> int:
        """In an exchange, number of the period's steps from which this rank abstained."""
        return self.period.abstained if self.kind is Kind.EXCHANGE else 0


@dataclass(frozen=True)
class Agreed:
    """What a rank knows of gradients: after a header those of all ranks or voters, else its own.

    `present` tells by rank whether each trainable parameter has a gradient. Don't change its lists.
    `abstained` is the sum of `Report.abstained`.
    """

    finite: list[bool]
    present: list[list[bool]]
    abstained: int = 0

    @functools.cached_property
    def gradient_counts(self) -> list[int]:
        """How many ranks have a finite gradient of each parameter, which moves if one has it."""
        ranks = zip(self.finite, self.present, strict=True)
        of_finite = [present for finite, present in ranks if finite]
        return [sum(have_gradient) for have_gradient in zip(*of_finite, strict=True)]

    @functools.cached_property
    def votes(self) -> list[bool]:
        """Whether each rank votes: its gradients are finite, and it has one, unless none has."""
        has_some = [any(has_gradient) for has_gradient in self.present]
        return [
            finite and (has_one or not any(has_some))
            for finite, has_one in zip(self.finite, has_some, strict=True)
        ]

    def by_voter(self, voter_of_rank: Sequence[int]) -> Agreed:
        """Returns the result by voter, which has a gradient if all of its ranks have it."""
        voters: list[list[int]] = [[] for _ in range(max(voter_of_rank) + 1)]
        for rank, voter in enumerate(voter_of_rank):
            voters[voter].append(rank)
        return replace(
            self,
            finite=[all(self.finite[rank] for rank in ranks) for ranks in voters],
            present=[
                [all(have) for have in zip(*(self.present[rank] for rank in ranks), strict=True)]
                for ranks in voters
            ],
        )


# Number of optimizers that have met in a process group, equal on every rank.
_met: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


class Meetings:
    """Meetings of one optimizer with the same optimizer on the other ranks.

    Attributes:
        comparisons: Number of meetings in which the ranks compared their parameters.
    """

    def __init__(self, wire: Wire, same_parts: Sequence[Sequence[int]]) -> None:
        """Doesn't communicate; `same_parts` is that of the topology."""
        self._wire, self._same_parts = wire, same_parts
        self.comparisons = 0
        self._number = 0  # among the optimizers that have met; 0 before the first meeting
        # Hash of the signatures at which the parameters were compared.
        self._compared_signatures: int | None = None
        # Signatures of the last meeting with their hash, which mostly stay the same.
        self._signatures: tuple[Sequence[Signature], int] = ([], digest([]))

    def compare_again(self) -> None:
        """Makes the next meeting compare parameters; all ranks must call this before it."""
        self._compared_signatures = None

    def agree(
        self, report: Report, step: int, values: Values, signatures: Sequence[Signature],
        parameters: Parameters,
    ) -> Agreed:  # fmt: skip
        """Returns what all ranks have, or raises on all of them; every rank must call this.

        `step` is the number of the last one that was counted, and `values` has by name what else
        must be equal.

        Bytes per rank: 64 * (N - 1) for the header (`ranks.header` has its words). If presence
        differs between ranks, 8 * (N - 1) * ceil(P / 64) more for P trainable parameters. In the
        first step at new signatures in which a rank has a gradient, and in another kind of meeting
        at them, 16 * (N - 1) more for a hash of `parameters`.

        Raises:
            Disagreement: On every rank, if ranks differ or something failed on another rank.
            BaseException: The report's own failure.
            LostRank: If another rank ended or stalled.
        """
        hashes = self._hashes(report, values, signatures)
        flags, numbers, steps, value_hashes, signature_hashes, presence = gather_headers(
            self._wire, report.kind, [self._number, step, *hashes],
            # In an exchange, what counts is whether a rank moved.
            finite=report.finite or report.kind is not Kind.STEP, failure=report.failure,
            abstained=report.abstained,
        )  # fmt: skip
        if len(set(numbers)) > 1:
            raise Disagreement(
                "ranks use different optimizers: step several DistributedLions in the same order "
                "on every rank, and create new ones on all ranks together"
            )
        if len(set(steps)) > 1:
            raise Disagreement(
                f"ranks are at different steps: {self._wire.by_value(steps)}. {_SAME_STEPS}"
            )
        if len(set(value_hashes)) > 1:
            self._raise_values(values)
        if len(set(signature_hashes)) > 1:
            self._raise_signatures(signatures)
        present = self._presence(report.present, presence)
        # Until there is a gradient, weights may still be loaded.
        is_early = report.kind is Kind.STEP and not any(map(any, present))
        if signature_hashes[0] != self._compared_signatures and not is_early:
            self._compare_parameters(signature_hashes[0], parameters)
        finite = [bool(word & FINITE) for word in flags]
        return Agreed(finite, present, sum([word >> ABSTAINED_AT for word in flags]))

    def _hashes(self, report: Report, values: Values, signatures: Sequence[Signature]) -> list[int]:
        """Returns hashes of values, signatures, and presence."""
        if signatures is not self._signatures[0] and signatures != self._signatures[0]:
            self._signatures = signatures, digest(_texts(signatures))
        return [digest(values), self._signatures[1], digest(pack_bools(report.present))]

    def _raise_values(self, values: Values) -> None:
        tables = self._wire.gather_objects(values)
        key, by_rank = _first_difference(tables, self._wire)
        remedy = next(text for name, text in _REMEDIES.items() if fnmatchcase(key, name))
        if key == HISTORY:
            raise Disagreement(f"ranks differ in {HISTORY}, not in those of now. {remedy}")
        raise Disagreement(f"ranks differ, first in {key!r}: {by_rank}. {remedy}")

    def _raise_signatures(self, signatures: Sequence[Signature]) -> None:
        names = [str(name) for name, *_ in signatures]
        names_by_rank = self._wire.gather_objects(names)
        lines = enumerate(_texts(signatures))
        tables = self._wire.gather_objects({f"parameter {number}": line for number, line in lines})
        what = "ranks differ in trainable parameters"
        key, values = _first_difference(tables, self._wire)
        if any(set(other) != set(names) for other in names_by_rank):
            remedy = f"{_SAME_FROZEN}, and train the same model"
        elif any(other != names for other in names_by_rank):
            what = "ranks have the same trainable parameters in different orders"
            remedy = "Pass the parameters in the same order on every rank, not as a set"
        else:
            remedy = (
                "Load them with the same shapes and dtypes on every rank, on the same type of "
                "device, and select the same ones with full_precision; FSDP1, DeepSpeed, and ZeRO "
                "are not supported"
            )
        raise Disagreement(f"{what}, first in {key!r}: {values}. {remedy}")

    def _compare_parameters(self, signatures: int, parameters: Parameters) -> None:
        """Checks that parameters are equal at new signatures, and numbers a new optimizer."""
        compare_parameters(parameters, self._wire, self._same_parts, _START_EQUAL)
        self.comparisons += 1
        if not self._number:
            self._number = _met[self._wire.group] = _met.get(self._wire.group, 0) + 1
        self._compared_signatures = signatures

    def _presence(self, present: list[bool], hashes: Sequence[int]) -> list[list[bool]]:
        """Returns which trainable parameters have a gradient, by rank."""
        if len(set(hashes)) == 1:
            return [present] * len(hashes)
        return gather_bools(self._wire, present, "which parameters have a gradient")


def agree_in_node(
    node: Wire, kind: Kind, finite: bool, present: Sequence[bool]
) -> tuple[bool, list[bool]]:
    """Returns whether all ranks of a node have finite gradients, and of which parameters all do.

    All ranks of the node must call this. A rank whose step failed passes `finite=False`. If the
    ranks do different things, it returns False, and the next header raises on all nodes. Bytes per
    rank: 24 (L - 1), and 8 (L - 1) ceil(P / 64) more if presence differs and all gradients are
    finite.

    Raises:
        Disagreement: On every rank of the node, if one takes a local step, which has no header, and
            another does something else.
    """
    words = [kind, finite, digest(pack_bools(present))]
    kinds, all_finite, hashes = node.gather_words(words, "the gradients of a node").t().tolist()
    if len(set(kinds)) > 1:
        if Kind.LOCAL_STEP in kinds:
            raise_kinds(kinds, node)
        return False, list(present)
    if not all(all_finite) or len(set(hashes)) == 1:
        return all(all_finite), list(present)
    by_rank = gather_bools(node, present, "which parameters have a gradient")
    return True, [all(have_gradient) for have_gradient in zip(*by_rank, strict=True)]


def agree_on_gradients(report: Report, layout: Layout | None, node: Wire | None) -> None:
    """Drops gradients that aren't finite, or that another rank of the node doesn't have.

    The ranks of a node must call this together. With local steps they do in every step, exchange,
    save, and load, before any header, so no rank of a node waits for another that is somewhere
    else. If one of them takes a local step and another doesn't, they raise what failed, or
    Disagreement.
    """
    present = report.present
    finite = report.finite and report.failure is None and bool(present)
    if node is not None:
        try:
            finite, present = agree_in_node(node, report.kind, finite, present)
        except Disagreement as error:
            raise report.failure or error from None
    if layout is not None and report.present:
        layout.drop_gradients(finite, present)


def _texts(signatures: Sequence[Signature]) -> list[str]:
    return [" ".join(map(str, signature)) for signature in signatures]


def _first_difference(tables: Sequence[Mapping[str, object]], wire: Wire) -> tuple[str, str]:
    """Returns the first key on which the ranks' tables differ, and the values by rank.

    Of frozen parameters, the values are the first names that not all ranks have.
    """
    keys = dict.fromkeys(key for table in tables for key in table)
    by_key = {key: [table.get(key, "missing") for table in tables] for key in keys}
    key, by_rank = next(
        (key, by_rank) for key, by_rank in by_key.items() if len(set(map(repr, by_rank))) > 1
    )
    if key == FROZEN:
        sets = [set(names) for names in cast("list[list[str]]", by_rank)]
        by_rank = [sorted(names - sets[0].intersection(*sets))[:_MOST_NAMES] for names in sets]
    return key, wire.by_value(by_rank)
