"""What is exchanged of each parameter besides its votes, or instead of them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from hf_dlion.options.groups import Groups
from hf_dlion.options.options import SYNC_WORDS, Options
from hf_dlion.options.selection import check_matches, selected


@dataclass(frozen=True)
class Treatment:
    """The parameters of which more than votes is exchanged, by index; the same on all ranks.

    Attributes:
        full: Their gradients are averaged, instead of a vote.
        synced: Their momenta are averaged every now and then, or may be.
    """

    full: frozenset[int] = frozenset()
    synced: frozenset[int] = frozenset()

    def plain(self) -> tuple[list[int], list[int]]:
        """Returns the indices as plain values that ranks can compare."""
        return sorted(self.full), sorted(self.synced)

    def told(self, index: int) -> str:
        """Returns what an error message adds to a parameter's description."""
        full = ", in full precision" if index in self.full else ""
        return full + (", momentum synchronised" if index in self.synced else "")

    def of_step(
        self, groups: Groups, options: Options, step: int, indices: Collection[int]
    ) -> Treatment:
        """Returns the treatment in one step, in which groups or a warm-up may ask for more.

        Args:
            groups: The parameter groups.
            options: The options.
            step: Number of the step.
            indices: Of the trainable parameters.

        Raises:
            NotImplementedError: If a group is exchanged in full together with `local_group`.
        """
        if step <= options.warmup_full_steps:
            return Treatment(frozenset(indices))
        exchanges = [group.get("exchange") for group in groups for _ in group["params"]]
        by_group = {index for index, exchange in enumerate(exchanges) if exchange == "full"}
        if by_group and options.local_group not in (None, 1):
            raise NotImplementedError(
                f"a parameter group with 'exchange': 'full' does not go with "
                f"local_group={options.local_group!r}: gradients are averaged inside a node only"
            )
        full = (self.full | by_group).intersection(indices)
        # Gradients that are averaged leave all ranks with one momentum.
        return Treatment(full, self.synced.intersection(indices) - full)


def treatment_by_name(options: Options, groups: Groups, *, complete: bool) -> Treatment:
    """Returns the treatment that the options select by name.

    Args:
        options: The options.
        groups: The parameter groups.
        complete: Whether all groups are there, so a pattern without a match is an error.

    Raises:
        ValueError: If parameters are selected by name and have none, or a pattern matches none.
    """
    full: frozenset[int] = frozenset()
    synced: frozenset[int] = frozenset()
    if options.full_precision is not None:
        full = selected("full_precision", options.full_precision, groups)
        if complete:
            check_matches("full_precision", options.full_precision, groups, ())
    if options.momentum_sync_every == 0:
        return Treatment(full)
    if options.momentum_sync in SYNC_WORDS:
        synced = frozenset(range(sum(len(group["params"]) for group in groups)))
    else:
        synced = selected("momentum_sync", options.momentum_sync, groups)
        if complete:
            check_matches("momentum_sync", options.momentum_sync, groups, SYNC_WORDS)
    return Treatment(full, synced)
