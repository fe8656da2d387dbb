"""A header: every rank sends eight int64 words, and then all ranks continue, or all raise.

word   all headers                  those of `Meetings.agree`
0      version of the wire format
1      kind: what the ranks do
2, 3   the caller's                 number of the optimizer, and of its last step
4      finite, failed, abstained
5-7    the caller's                 hashes of options and the like, signatures, and presence

A step with votes (`DistributedLion.step`) and an exchange begin to send with one, and what ranks do
in a `peers.together` block, such as a save, ends with one. A local step has none. What fails on a
rank waits for its next header (`peers.all_or_none`), which raises on all ranks.

Headers take gloo, where a rank that ended, or waits elsewhere until the timeout, is an error on the
others. If it is in a collective of another size, gloo ends a process. A group without gloo, such as
Trainer's on GPUs with NCCL only, gets a gloo group after its first header (`Topology.form`).
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import numpy as np

from hf_dlion.ranks.wire import Wire

# Version of all that is sent, hashed, and rounded.
WIRE_VERSION = 19
HEADER_WORDS = 8
HEADER_BYTES = 8 * HEADER_WORDS
# Headers of other versions have at most this number; a larger one is other data.
_LARGEST_VERSION = 1000
# Bits of word 4: the rank's gradients are finite; something failed on it. From this bit on, it has
# the number of steps from which the rank abstained.
FINITE = 1
FAILED = 2
ABSTAINED_AT = 2
# Length of the longest error text that other ranks show, in characters.
_LONGEST_TEXT = 4000
_ELSEWHERE = (
    "a rank is at another point of its program: let every rank take the same number of steps, and "
    "step, save, load, attach, and freeze or add parameters in the same order"
)


class Kind(enum.IntEnum):
    """What the ranks do together. The values are part of the wire format.

    A STEP of several voters is a vote, or with `vote_every` above 1 a local step that begins with a
    header. A LOCAL_STEP has none.
    """

    STEP = 1
    SAVE = 2
    LOAD = 3
    REPLICATE = 4
    WEIGHTS = 5
    EXCHANGE = 6
    LOCAL_STEP = 7
    NODES = 8
    MOMENTA = 9
    REPLICAS = 10
    GLOO = 11


# What one rank and what several ranks do, for error messages.
_VERBS: dict[int, tuple[str, str]] = {
    Kind.STEP: ("steps", "step"),
    Kind.SAVE: ("saves", "save"),
    Kind.LOAD: ("loads", "load"),
    Kind.WEIGHTS: ("saves the model", "save"),
    Kind.REPLICATE: ("has replicate=", "have replicate="),
    Kind.EXCHANGE: ("exchanges", "exchange"),
    Kind.LOCAL_STEP: ("takes a local step", "take a local step"),
    Kind.NODES: ("has local_group=", "have local_group="),
    Kind.MOMENTA: ("synchronizes momenta", "synchronize momenta"),
    Kind.REPLICAS: ("checks replicas", "check replicas"),
    Kind.GLOO: ("joins a gloo group", "join a gloo group"),
}
# What a rank waits for, if it isn't "a header".
_AWAITED = {
    Kind.REPLICATE: "the replicas", Kind.NODES: "the nodes", Kind.GLOO: "a gloo group"
}  # fmt: skip


class Disagreement(RuntimeError):
    """Raised on every rank if the ranks differ in what must be equal, or if one of them failed.

    Without this error, weights would become different, or ranks would wait for each other forever.
    """


def gather_headers(
    wire: Wire,
    kind: Kind,
    words: Sequence[int],
    *,
    finite: bool = True,
    abstained: int = 0,
    failure: BaseException | None = None,
    what: str = "",
) -> list[list[int]]:
    """Returns the flags of all ranks in rank order, then each of their words.

    Every rank must call this, also one that failed. All meetings begin with equally many bytes, so
    ranks that do different things find that out: 64 (N - 1).

    Args:
        wire: The ranks that meet.
        kind: What this rank does.
        words: Two to five words of this rank.
        finite: Whether its gradients are finite.
        abstained: Number of steps from which it abstained since the last exchange.
        failure: What failed on it.
        what: Name of what may fail, for other ranks (default: what the ranks do).

    Raises:
        Disagreement: On every rank, if they do different things, or one failed.
        BaseException: `failure`.
        LostRank: If another rank ended or stalled.
    """
    flags = FINITE * finite + (abstained << ABSTAINED_AT) if failure is None else FAILED
    sent = [WIRE_VERSION, kind, *words[:2], flags, *words[2:]]
    sent += [0] * (HEADER_WORDS - len(sent))
    columns = wire.gather_words(sent, _AWAITED.get(kind, "a header")).t().tolist()
    versions, kinds, first, second, all_flags, *others = columns
    if versions.count(WIRE_VERSION) < len(versions):
        elsewhere = [rank for rank, v in enumerate(versions) if not 0 < v <= _LARGEST_VERSION]
        if elsewhere:
            raise Disagreement(
                f"{wire.named(elsewhere)} sent other data than a header, so {_ELSEWHERE}. If your "
                f"code calls collectives, call them on all ranks in the same order"
            )
        raise Disagreement(
            f"ranks have different versions of the wire format, {wire.by_value(versions)}: install "
            f"the same hf_dlion everywhere. Or {_ELSEWHERE}"
        )
    # A rank that forms groups waits for others that do, whatever has failed on them elsewhere.
    if FAILED in all_flags and (_AWAITED.keys().isdisjoint(kinds) or len(set(kinds)) == 1):
        raise_together(failure, wire, what or _VERBS[kind][1])
    if failure is not None:
        raise failure
    if kinds.count(kind) < len(kinds):
        raise_kinds(kinds, wire)
    return [all_flags, first, second, *others]


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
        named = "; ".join(f"{wire.named([rank])}: {text}" for rank, text in failed.items())
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


def raise_kinds(kinds: Sequence[int], wire: Wire) -> None:
    """Raises Disagreement with what each rank does, of which `kinds` has the `Kind`."""
    ranks_of = {
        kind: [r for r, k in enumerate(kinds) if k == kind] for kind in dict.fromkeys(kinds)
    }
    clauses = []
    for kind, ranks in sorted(ranks_of.items(), key=lambda item: (len(item[1]), -item[1][0])):
        verbs = _VERBS.get(kind, ("does something else",) * 2)
        clauses.append(f"{wire.named(ranks)} {verbs[len(ranks) > 1]}")
    raise Disagreement(f"{' while '.join(clauses)}: {_ELSEWHERE}")


def gather_bools(wire: Wire, values: Sequence[bool], what: str) -> list[list[bool]]:
    """Returns every rank's P values, in rank order. Bytes per rank: 8 (N - 1) ceil(P / 64)."""
    table = wire.gather_words(pack_bools(values), what).tolist()
    return [unpack_bools(words, len(values)) for words in table]


def pack_bools(values: Sequence[bool]) -> list[int]:
    """Returns ceil(P/64) int64 words with one bit per value, the first in the lowest bit."""
    data = np.packbits(np.array(values, dtype=bool), bitorder="little").tobytes()
    padded = data + bytes(-len(data) % 8)
    words: list[int] = np.frombuffer(padded, dtype="<i8").tolist()
    return words


def unpack_bools(words: Sequence[int], count: int) -> list[bool]:
    """Returns the first `count` values that `pack_bools` packed."""
    data = np.array(words, dtype="<i8").view(np.uint8)
    values: list[bool] = np.unpackbits(data, count=count, bitorder="little").astype(bool).tolist()
    return values
