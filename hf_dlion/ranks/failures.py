"""Errors that all ranks raise together."""

from __future__ import annotations

from collections.abc import Sequence

from hf_dlion.exchange.wire import Wire, named_ranks
from hf_dlion.ranks.header import Kind

# Length of the longest error text that other ranks show, in characters.
_LONGEST_TEXT = 4000

# What one rank and what several ranks do, for error messages.
VERBS: dict[int, tuple[str, str]] = {
    Kind.STEP: ("steps", "step"),
    Kind.SAVE: ("saves", "save"),
    Kind.LOAD: ("loads", "load"),
    Kind.WEIGHTS: ("saves the model", "save"),
    Kind.REPLICATE: ("has replicate=", "have replicate="),
    Kind.EXCHANGE: ("exchanges", "exchange"),
    Kind.LOCAL_STEP: ("takes a local step", "take a local step"),
    Kind.NODES: ("has local_group=", "have local_group="),
}
ELSEWHERE = (
    "a rank is at another point of its program: let every rank take the same number of steps, and "
    "step, save, and load in the same order"
)


class Disagreement(RuntimeError):
    """Raised on every rank if the ranks differ in what must be equal, or if one of them failed.

    Without this error, weights would become different, or ranks would wait for each other forever.
    """


def raise_together(failure: BaseException | None, wire: Wire, what: str) -> None:
    """Raises on every rank if something failed on any; every rank must call this.

    `what` names what the ranks did. Bytes per rank: `Wire.gather_objects`.

    Raises:
        BaseException: This rank's failure.
        Disagreement: On the other ranks, with the text of each failure.
    """
    texts = wire.gather_objects(None if failure is None else _text(failure))
    if failure is not None:
        raise failure
    failed = {rank: text for rank, text in enumerate(texts) if text is not None}
    if failed:
        named = "; ".join(f"rank {rank}: {text}" for rank, text in failed.items())
        raise Disagreement(f"{what} failed on {len(failed)} of {len(texts)} ranks: {named}")


def _text(failure: BaseException) -> str:
    """Returns a failure's text for other ranks; it can't raise, because they wait for the text."""
    kind = type(failure).__name__
    try:
        text = f"{kind}: {failure}"
    except Exception as error:
        text = f"{kind} (its text raised {type(error).__name__})"
    if len(text) > _LONGEST_TEXT:
        text = f"{text[:_LONGEST_TEXT]} ... ({len(text)} characters)"
    return text.encode(errors="backslashreplace").decode()


def check_kinds(kinds: Sequence[int]) -> None:
    """Verifies that all ranks do the same; every caller passes the `Kind` of each rank.

    Raises:
        Disagreement: On every rank, with what each rank does.
    """
    if len(set(kinds)) == 1:
        return
    ranks_of = {
        kind: [r for r, k in enumerate(kinds) if k == kind] for kind in dict.fromkeys(kinds)
    }
    clauses = []
    for kind, ranks in sorted(ranks_of.items(), key=lambda item: (len(item[1]), -item[1][0])):
        verbs = VERBS[Kind(kind)] if kind in VERBS else ("does something else",) * 2
        clauses.append(f"{named_ranks(ranks)} {verbs[len(ranks) > 1]}")
    raise Disagreement(f"{' while '.join(clauses)}: {ELSEWHERE}")
