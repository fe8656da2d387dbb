"""What all ranks must agree on before any vote is sent, and what they say if they do not.

Headers come first, so a rank with another layout is found before messages of different sizes meet
in a collective, where they would hang (rule S12).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hf_dlion.exchange.wire import Wire
from hf_dlion.options import Options
from hf_dlion.options.groups import Groups, agreed_values, names_of, option_values, trainable
from hf_dlion.options.parts import held_in_parts, told_shape
from hf_dlion.options.treatment import Treatment
from hf_dlion.ranks.fingerprint import digest, fingerprints
from hf_dlion.ranks.header import WIRE_VERSION, Header
from hf_dlion.ranks.which import Which

FEWER_BATCHES = (
    "if a rank left the training loop earlier, because it has fewer batches, train inside `with "
    "torch.distributed.algorithms.Join([optimizer]):`, or give every rank as many; if it skipped a "
    "step (`if not isfinite(norm): continue`) or stopped early, decide that by a number that all "
    "ranks share (docs/coming_from_ddp.md)"
)
# Characters of a failure's text that other ranks hear.
MOST_TOLD = 4000

# Names of parameters and hashes of their values.
Values = list[tuple[str, int]]


CROSSED = (
    "ranks call step() of different optimizers, which would take one another's votes: with several "
    "DistributedLions, make and step them in the same order on every rank (the order of a set is "
    "each process's own), and make new ones on all ranks together"
)


class Disagreement(RuntimeError):
    """Raised on every rank when the ranks would otherwise drift apart or wait for one another."""


class Crossed(Disagreement):
    """Ranks step different optimizers: what has left of one's votes no other rank waits for."""


@dataclass(frozen=True)
class Details:
    """What a rank can say of itself in an error message; each is called only when needed.

    Attributes:
        layout: Returns a list with one line per trainable parameter.
        options: Returns the options by name.
        groups: Returns one dictionary per parameter group.
        parameters: Returns (name, hash) of every trainable parameter's values, or of the part of
            them that this rank holds.
        unsharded: Returns those of the pairs whose parameters every rank holds whole.
        failure: Returns what failed, or None.
        doing: What it failed in.
    """

    layout: Callable[[], list[str]]
    options: Callable[[], dict[str, Any]]
    groups: Callable[[], list[dict[str, Any]]]
    parameters: Callable[[], Values]
    unsharded: Callable[[Values], Values]
    failure: Callable[[], str | None]
    doing: str = "the step"


def layout_lines(groups: Groups, treatment: Treatment) -> list[str]:
    """Returns a line with name, shape and dtype for every trainable parameter."""
    names = names_of(groups)
    # Without the number of the device, which differs between ranks that agree.
    return [
        f"{names[index]}: {told_shape(p)} {p.dtype} on {p.device.type}{treatment.told(index)}"
        for index, p in trainable(groups)
    ]


def details_of(
    groups: Groups,
    options: Options,
    failure: Exception | None,
    treatment: Treatment | None = None,
    beside: Sequence[dict[str, Any]] = (),
) -> Details:
    """Returns what a rank can say of itself should the ranks disagree.

    Args:
        groups: The parameter groups.
        options: The options.
        failure: What failed on this rank, or None.
        treatment: What is exchanged of each parameter besides votes.
        beside: What ranks have in common like the values of their groups.
    """

    def parameters() -> Values:
        names, held = names_of(groups), trainable(groups)
        hashes = fingerprints([param for _, param in held])
        return [(names[index], value) for (index, _), value in zip(held, hashes, strict=True)]

    def unsharded(pairs: Values) -> Values:
        held = trainable(groups)
        return [pair for pair, (_, p) in zip(pairs, held, strict=True) if not held_in_parts(p)]

    return Details(
        layout=lambda: layout_lines(groups, treatment or Treatment()),
        options=lambda: option_values(options),
        groups=lambda: [*agreed_values(groups), *beside],
        parameters=parameters,
        unsharded=unsharded,
        failure=lambda: None if failure is None else told(failure),
    )


class Agreement:
    """Exchanges headers and raises on every rank together when they do not fit.

    Attributes:
        parameters: Number of presence bits in the header: the trainable parameters at the last
            agreement on a layout. It changes only on all ranks together, so headers always
            have one size.
        alike: Groups of ranks that hold the same parameters, or the same part of each; None where
            all ranks do. The ranks of a replica hold other parts, cut into other messages.
        anew: Whether on this rank other parameters have come into the places of some, so that all
            ranks compare them once more.
    """

    def __init__(self, number: int) -> None:
        """Starts without an agreed layout; the first step agrees on one.

        Args:
            number: Of the optimizer, from `which.new_number`.
        """
        self.parameters = 0
        self.alike: Sequence[Sequence[int]] | None = None
        self.anew = False
        self._layouts: list[int] = []
        self._which = Which(number)

    def agree(self, mine: Header, wire: Wire, details: Details) -> list[Header]:
        """Returns every rank's header, in rank order, after checking that they fit together.

        Every rank must call this at the same point of its program. Bytes per rank:
        `header_wire_bytes`; once per layout also 32 * (N - 1), 48 where parameters are sharded, and
        a header with room for the parameters of the layout before (none at the first step).

        Raises:
            Disagreement: On every rank, if something failed on one, or they differ in wire
                version, layout, parameters (when a layout is new), options, groups or step, in
                the batches that they went through since the last step, or in the optimizer.
        """
        headers = self.agree_on_options(mine, wire, details)
        # First, since a rank that skips a step often skips its scheduler, too.
        _check_batches(headers)
        if [header.layout for header in headers] != list(map(self._which.marked, self._layouts)):
            self._agree_on_layout(mine, wire, details)
            headers = self._gather(mine, wire)
        if any(header.groups != mine.groups for header in headers):
            groups = wire.gather_objects(details.groups())
            raise Disagreement(
                _first_difference("parameter groups", [_flat(group) for group in groups])
                + "; parameters must be divided into groups, and schedulers stepped, alike on "
                "every rank: with a metric that is reduced over the ranks, for example; inside "
                "Join, where a rank without data makes no loop, by "
                "optimizer.register_step_post_hook(lambda *_: scheduler.step())"
            )
        if any(header.step != mine.step for header in headers):
            raise Disagreement(
                f"ranks are at different steps, {[header.step for header in headers]} in rank "
                f"order: load the same checkpoint on every rank"
            )
        return headers

    def agree_on_options(self, mine: Header, wire: Wire, details: Details) -> list[Header]:
        """Returns every rank's header after checking that none failed and that options agree.

        It is how `agree` begins, so ranks may meet in either.

        Raises:
            Disagreement: On every rank, as `agree`.
        """
        headers = self._gather(mine, wire)
        if any(header.failed for header in headers):
            _raise_failure(wire.gather_objects(details.failure()), details.doing)
        if any(header.options != mine.options for header in headers):
            options = wire.gather_objects(details.options())
            raise Disagreement(_first_difference("options", options))
        return headers

    def _gather(self, mine: Header, wire: Wire) -> list[Header]:
        try:
            sent = dataclasses.replace(mine, layout=self._which.marked(mine.layout) ^ self.anew)
            table = wire.gather_words(sent.packed(self.parameters), "a header")
        except RuntimeError as error:
            # It is here that ranks with different numbers of batches miss one another.
            error.add_note(FEWER_BATCHES)
            raise
        versions = table[:, 0].tolist()
        if any(version != WIRE_VERSION for version in versions):
            raise Disagreement(
                f"ranks speak different versions of the wire format, {versions} in rank order: "
                f"install the same hf_dlion everywhere. Or these are no headers: {FEWER_BATCHES}"
            )
        return [Header.unpacked(row, self.parameters) for row in table]

    def _agree_on_layout(self, mine: Header, wire: Wire, details: Details) -> None:
        """Compares layouts, and parameters' names and values, which must start equal."""
        values = details.parameters()
        words = [mine.layout, digest(values), self._which.number, self._which.met]
        layouts, hashes, numbers, met = wire.gather_words(words, "a layout").t().tolist()
        if len(set(met)) > 1:
            raise Crossed(CROSSED)
        kinds, common = [0] * len(layouts), [0] * len(layouts)
        if self.alike is not None:
            # What all ranks have in common whichever parts they hold.
            told = [digest(details.layout()), digest(details.unsharded(values))]
            kinds, common = wire.gather_words(told, "a layout").t().tolist()
        if self._differ(layouts) or len(set(kinds)) > 1:
            lines = wire.gather_objects(details.layout())
            described = [dict(enumerate(rank_lines)) for rank_lines in lines]
            raise Disagreement(
                _first_difference("trainable parameters", described)
                + "; ranks hold the same parameters, alike and on the same kinds of device, whole "
                "or as FSDP2 shards them inside each replica; FSDP1, DeepSpeed and ZeRO are not "
                "supported"
            )
        if self._differ(hashes) or len(set(common)) > 1:
            self._raise_values(wire.gather_objects((values, details.unsharded(values))))
        if not self._which.meet(numbers, (*layouts, *hashes), wire.group):
            raise Crossed(CROSSED)
        self._layouts, self.anew = layouts, False
        self.parameters = mine.present.numel()

    def _differ(self, values: Sequence[int]) -> bool:
        """Returns whether ranks that hold the same have different values."""
        groups = self.alike or [range(len(values))]
        return any(len({values[rank] for rank in ranks}) > 1 for ranks in groups)

    def _raise_values(self, told: Sequence[tuple[Values, Values]]) -> None:
        """Raises for names or values that differ: each rank's, and those of whole parameters."""
        everyone = range(len(told))
        orders = [dict(enumerate(name for name, _ in pairs)) for pairs, _ in told]
        if any(order != orders[0] for order in orders):
            raise Disagreement(
                _first_difference("names of trainable parameters", orders)
                + "; pass the parameters in the same order on every rank"
            )
        # Of the first ranks that hold the same and differ.
        tables = [{r: dict(told[r][0]) for r in ranks} for ranks in self.alike or [everyone]]
        tables.append({rank: dict(whole) for rank, (_, whole) in enumerate(told)})
        own = next(own for own in tables if len({repr(table) for table in own.values()}) > 1)
        difference = _first_difference("parameter values", list(own.values()), list(own))
        raise Disagreement(
            f"{difference} (hashes): replicas must start equal; wrap the model in "
            f"DistributedDataParallel, or load the same weights or set the same seed on "
            f"every rank before building it"
        )


def _check_batches(headers: Sequence[Header]) -> None:
    """Raises if a rank dropped its gradients and took another batch, and not all ranks did.

    Either count may differ by itself: ranks may accumulate more passes than others, and drop some
    of equally many. A rank without a pass, as in Join, is nowhere in its data.
    """
    counts = dict.fromkeys((header.passes, header.dropped) for header in headers if header.passes)
    if not any(a[0] != b[0] and a[1] != b[1] for a, b in itertools.combinations(counts, 2)):
        return
    dropped = [header.dropped for header in headers]
    most = max(dropped)
    ahead = [str(rank) for rank, count in enumerate(dropped) if count == most]
    raise Disagreement(
        f"rank{'s' * (len(ahead) > 1)} {', '.join(ahead)} dropped gradients and went on to another "
        f"batch without step(), and not all ranks did: {dropped} times since the last step in rank "
        f"order. Gradients, their norm and a NaN in them are each rank's own here, not the same on "
        f"all ranks as in DDP, so `if not isfinite(norm): continue` skips a step on one rank "
        f"alone, and leaves it a batch ahead for good. Call step() in every round: a rank whose "
        f"gradients hold a NaN or an Inf abstains by itself, and so does one that called "
        f"zero_grad() just before. Or decide by a number that all ranks share (dist.all_reduce). "
        f"Gradients that are only looked at come from torch.autograd.grad(). See "
        f"docs/coming_from_ddp.md"
    )


def raise_together(failure: Exception | None, wire: Wire, what: str) -> None:
    """Raises on every rank if something failed on one; every rank must call this.

    Bytes per rank: `Wire.gather_objects`.

    Args:
        failure: What failed on this rank, which raises it, or None.
        wire: The ranks.
        what: The name of what they did.

    Raises:
        Disagreement: On the others.
    """
    failures = wire.gather_objects(None if failure is None else told(failure))
    if failure is not None:
        raise failure
    if any(text is not None for text in failures):
        _raise_failure(failures, what)


def told(failure: BaseException) -> str:
    """Returns what other ranks tell of a failure: text that can be sent, printed and read.

    It is made where they wait for it, so nothing that the failure says of itself may fail here.
    """
    kind = type(failure).__name__
    try:
        text = f"{kind}: {failure}"
    except Exception as error:
        text = f"{kind}, which cannot be put into words ({type(error).__name__})"
    if len(text) > MOST_TOLD:
        text = f"{text[:MOST_TOLD]} ... ({len(text)} characters)"
    return text.encode(errors="backslashreplace").decode()


def _raise_failure(failures: Sequence[str | None], what: str) -> None:
    failed = {rank: text for rank, text in enumerate(failures) if text is not None}
    named = "; ".join(f"rank {rank}: {text}" for rank, text in failed.items())
    raise Disagreement(f"{what} failed on {len(failed)} of {len(failures)} ranks: {named}")


def _flat(groups: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        f"group {position} {name}": value
        for position, group in enumerate(groups)
        for name, value in group.items()
    }


def _first_difference(
    what: str, tables: Sequence[dict[Any, Any]], ranks: Sequence[int] | None = None
) -> str:
    """Returns a sentence that names the first key on which tables (of all ranks) differ."""
    ranks = ranks or range(len(tables))
    keys = list(dict.fromkeys(key for table in tables for key in table))
    for key in keys:
        values = [table.get(key, "missing") for table in tables]
        if any(value != values[0] for value in values):
            pairs = zip(ranks, values, strict=True)
            told = ", ".join(f"rank {rank}: {value!r}" for rank, value in pairs)
            return f"ranks differ in {what}, first in {key!r}: {told}"
    return f"ranks differ in {what}"
