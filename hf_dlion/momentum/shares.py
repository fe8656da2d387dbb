"""Which stretch of every parameter's momentum a rank holds, and how stretches change hands.

Where a node votes as one, each of its ranks keeps the momentum of the words that it votes on. The
stretches follow from the messages, so they move when a parameter is frozen, thawed or added,
or when a state of another kind is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_dlion.exchange import Wire
from hf_dlion.options.warn_once import warn_once

Range = tuple[int, int]
Momenta = Mapping[int, Tensor]


class Shares:
    """What this rank holds of the momenta.

    Attributes:
        held: Start and stop, in elements in row-major order, of each momentum that is a stretch,
            by parameter index: a 1-D tensor. The others are whole, in the parameter's shape.
        members: The ranks of each node when the stretches were cut; empty if never.
        shapes: Shape of each parameter when its momentum was last looked at, by index: a stretch
            does not show it.
        has_gap: Whether a part of the momentum was lost and is zero.
    """

    def __init__(self) -> None:
        """Holds whole momenta."""
        self.held: dict[int, Range] = {}
        self.members: tuple[tuple[int, ...], ...] = ()
        self.shapes: dict[int, torch.Size] = {}
        self.has_gap = False

    @staticmethod
    def loaded(entry: Mapping[str, Any] | None, params: Sequence[Tensor]) -> Shares:
        """Returns what a state dict's `entry` describes; None stands for whole momenta."""
        shares = Shares()
        if entry is not None:
            shares.held = {index: (start, stop) for index, (start, stop) in entry["ranges"].items()}
            shares.members = tuple(map(tuple, entry["members"]))
            shares.shapes = {index: params[index].shape for index in shares.held}
        return shares

    def entry(self, momenta: Momenta) -> dict[str, Any]:
        """Returns plain values for a state dict or a file: who shared, and what is held."""
        held = {index: list(held) for index, held in self.held.items() if index in momenta}
        return {"members": [list(ranks) for ranks in self.members], "ranges": held}

    def begin(self, index: int, param: Tensor, owned: Mapping[int, Range]) -> Sequence[int]:
        """Returns the shape of a momentum that is made anew: a stretch if this rank owns one."""
        self.shapes[index] = param.shape
        if index not in owned:
            return param.shape
        start, stop = self.held[index] = owned[index]
        return (stop - start,)

    def misfit(self, index: int, param: Tensor, momentum: Tensor) -> str | None:
        """Returns what is wrong with the shape of what is held of a momentum, or None."""
        shape, held = momentum.shape, self.held.get(index)
        if held is None:
            self.shapes[index] = shape
        elif shape != (held[1] - held[0],):
            return (
                f"of shape {tuple(shape)}, this rank's share of it has {held[1] - held[0]} elements"
            )
        before = self.shapes.setdefault(index, param.shape)
        if before == param.shape:
            return None
        return f"of shape {tuple(before)}, the parameter of shape {tuple(param.shape)}"

    def ranges(self, momenta: Momenta) -> dict[int, Range]:
        """Returns start and stop of what is held of each momentum, by parameter index."""
        return {i: self.held.get(i, (0, momentum.numel())) for i, momentum in momenta.items()}

    def stretch(self, index: int, momentum: Tensor, wanted: Range) -> Tensor | None:
        """Returns a stretch of a momentum, 1-D, a view; None if this rank does not hold all of it.

        Args:
            index: Of the parameter.
            momentum: What this rank holds.
            wanted: Start and stop, not the same.
        """
        start, stop = self.held.get(index, (0, momentum.numel()))
        if not _contains((start, stop), wanted):
            return None
        return momentum.view(-1)[wanted[0] - start : wanted[1] - start]

    def displaced(self, momenta: Momenta, owned: Mapping[int, Range]) -> bool:
        """Returns whether this rank lacks a part of what it must own.

        Args:
            momenta: What it holds, by parameter index.
            owned: What it must own of each parameter that takes part.
        """
        ranges = self.ranges(momenta)
        return any(
            not _contains(ranges[index], wanted)
            for index, wanted in owned.items()
            if index in ranges
        )

    def cut(self, momenta: Momenta, owned: Mapping[int, Range]) -> dict[int, Tensor]:
        """Returns what this rank owns of the momenta, where it holds at least that.

        Args:
            momenta: What it holds, by parameter index.
            owned: What it must own; another momentum stays as it is.
        """
        ranges = self.ranges(momenta)
        found = dict(momenta)
        for index in momenta.keys() & owned.keys():
            (start, _), wanted = ranges[index], owned[index]
            if self.held.get(index) != wanted:
                self.held[index] = wanted
                # A copy, so the rest of the memory is let go.
                found[index] = (
                    momenta[index].view(-1)[wanted[0] - start : wanted[1] - start].clone()
                )
        return found

    def shared_out(
        self,
        momenta: Momenta,
        owners: Sequence[Mapping[int, Range]],
        params: Sequence[Tensor],
        dtype: torch.dtype | None,
        wire: Wire,
    ) -> dict[int, Tensor]:
        """Returns the momenta after every rank of the node got what it must own.

        Every rank of the node must call this, if one of them is `displaced`. Bytes: as
        `exchange_shards`.

        Args:
            momenta: What this rank holds, by parameter index.
            owners: What each rank must own.
            params: All parameters.
            dtype: The momenta's dtype, None for each parameter's own.
            wire: The ranks of the node.
        """
        found = exchange_shards(momenta, self.ranges(momenta), owners, params, dtype, wire)
        self.held.update({index: owners[wire.rank][index] for index in found})
        return {**momenta, **found}

    def made_whole(
        self, momenta: Momenta, params: Sequence[Tensor], dtype: torch.dtype | None, wire: Wire
    ) -> dict[int, Tensor]:
        """Returns the node's momenta as wholes; its ranks all call this. Bytes: as `shared_out`."""
        whole = {index: (0, param.numel()) for index, param in enumerate(params)}
        found = self.shared_out(momenta, [whole] * wire.world_size, params, dtype, wire)
        self.held = {}
        return {index: momentum.view(params[index].shape) for index, momentum in found.items()}

    def filled_up(self, momenta: Momenta, params: Sequence[Tensor]) -> dict[int, Tensor]:
        """Returns whole momenta, with zeros for what other ranks held; nothing is sent."""
        found = dict(momenta)
        for index in self.held.keys() & momenta.keys():
            whole, gap = assemble([(self.held[index], momenta[index])], params[index].numel())
            found[index] = whole.view(params[index].shape)
            self.has_gap |= gap
        self.held, self.members = {}, ()
        return found

    def warn_of_gap(self) -> None:
        """Warns, once per process, if a part of the momentum was lost."""
        if self.has_gap:
            self.has_gap = False
            _warn_of_gap()


def assemble(pieces: Sequence[tuple[Range, Tensor]], numel: int) -> tuple[Tensor, bool]:
    """Returns a whole momentum made of stretches, 0 where none is, and whether there is a gap.

    Args:
        pieces: Start and stop, and the elements, 1-D; at least one. Later ones win.
        numel: Elements of the parameter.
    """
    whole = torch.zeros(numel, dtype=pieces[0][1].dtype, device=pieces[0][1].device)
    reached = 0
    for (start, stop), piece in sorted(pieces, key=lambda pair: pair[0]):
        whole[start:stop] = piece.view(-1)
        if start <= reached:
            reached = max(reached, stop)
    return whole, reached < numel


def _warn_of_gap() -> None:
    """Warns, once per process, that a part of the momentum starts at zero."""
    warn_once(
        "shards",
        "the loaded state holds one rank's share of its node's momentum only, the rest starts at "
        "zero: call hf_dlion.load_momentum after load_state_dict, use hf_dlion.register() or "
        "hf_dlion.accelerate.attach, or call synchronize_momentum() before saving",
    )


def exchange_shards(
    momenta: Momenta,
    ranges: Mapping[int, Range],
    wanted: Sequence[Mapping[int, Range]],
    params: Sequence[Tensor],
    dtype: torch.dtype | None,
    wire: Wire,
) -> dict[int, Tensor]:
    """Returns what this rank is to hold, 1-D, of the momenta of which some rank lacks a part.

    Every rank of the node must call this. Bytes inside the node, per rank: those of a
    `gather_objects` of the ranges, and L - 1 times the longest stretch of each such momentum.

    Args:
        momenta: What this rank holds, by parameter index.
        ranges: Start and stop of each of them.
        wanted: What each rank of the node is to hold.
        params: The parameters.
        dtype: The momenta's dtype, None for each parameter's own.
        wire: The ranks of the node.
    """
    tables: list[dict[int, Range]] = wire.gather_objects(dict(ranges))
    indices = sorted(
        index
        for index in set().union(*tables)
        if any(
            index in owned and not _contains(table.get(index, (0, 0)), owned[index])
            for table, owned in zip(tables, wanted, strict=True)
        )
    )
    found: dict[int, Tensor] = {}
    for index in indices:
        held = {rank: table[index] for rank, table in enumerate(tables) if index in table}
        size = max(stop - start for start, stop in held.values())
        param = params[index]
        send = torch.zeros(size, dtype=dtype or param.dtype, device=wire.device_for(param.device))
        if index in momenta:
            send[: momenta[index].numel()] = momenta[index].view(-1)
        received = torch.empty((wire.world_size, size), dtype=send.dtype, device=send.device)
        wire.all_gather(received.view(torch.uint8), send.view(torch.uint8), "momenta").wait()
        pieces = [((a, b), received[rank, : b - a]) for rank, (a, b) in held.items()]
        whole, gap = assemble(pieces, param.numel())
        if gap:
            _warn_of_gap()
        start, stop = wanted[wire.rank][index]
        found[index] = whole[start:stop].to(param.device, copy=True)
    return found


def _contains(held: Range, wanted: Range) -> bool:
    return wanted[0] == wanted[1] or (held[0] <= wanted[0] and wanted[1] <= held[1])
