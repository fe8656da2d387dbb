"""Steps from which ranks abstain, of which too many in a row are an error on all ranks."""

from __future__ import annotations

from collections.abc import Sequence

from hf_dlion.options import Options
from hf_dlion.ranks.agreement import Agreed
from hf_dlion.ranks.stats import WireStats
from hf_dlion.ranks.topology import Topology
from hf_dlion.ranks.wire import named_ranks


class Abstentions:
    """How often ranks abstained in the last steps."""

    def __init__(self, options: Options, stats: WireStats) -> None:
        """`stats` gets the number of ranks that abstained, summed over steps."""
        self._options, self._stats = options, stats
        self._in_a_row: list[int] = []  # Consecutive steps, by rank, up to the limit.

    def forget(self) -> None:
        """Begins to count anew."""
        self._in_a_row = []

    def count(self, agreed: Agreed, ranks: Topology | None) -> None:
        """Counts the ranks that abstain from a step, or have no gradient while others have.

        Raises:
            RuntimeError: On every rank, as `check`.
        """
        voter_of_rank = [0] if ranks is None else ranks.voter_of_rank
        votes = [agreed.votes[voter] for voter in voter_of_rank]
        self._stats.abstentions += votes.count(False)
        self._add(votes)
        if self._options.vote_every == 1:  # Otherwise, counts may differ between ranks.
            self.check(ranks)

    def count_local(self, abstains: bool, ranks: Topology) -> None:
        """Counts whether this rank abstains from a local step, in which ranks don't communicate.

        A later step or exchange checks the count, and the exchange adds those of all ranks to the
        number of ranks that abstained.
        """
        votes = [True] * ranks.everyone.world_size
        votes[ranks.everyone.rank] = not abstains
        self._add(votes)

    def check(self, ranks: Topology | None) -> None:
        """Refuses a rank that abstained in as many consecutive steps as the limit.

        Raises:
            RuntimeError: Which names the rank.
        """
        longest, limit = max(self._in_a_row, default=0), self._options.max_abstained_steps
        if longest >= limit:
            abstaining = [rank for rank, count in enumerate(self._in_a_row) if count == longest]
            named = named_ranks(abstaining) if ranks is None else ranks.everyone.named(abstaining)
            self.forget()
            raise RuntimeError(
                f"gradients of {named} held a NaN or an Inf in {longest} steps in a row, or were "
                f"all missing: lower the learning rate, check that rank's data, or raise "
                f"max_abstained_steps ({limit})"
            )

    def _add(self, votes: Sequence[bool]) -> None:
        if len(self._in_a_row) != len(votes):  # Steps before had one rank.
            self._in_a_row = [0] * len(votes)
        # A count at the limit stays until it is checked.
        limit = self._options.max_abstained_steps
        self._in_a_row = [
            n if n >= limit else 0 if ok else n + 1
            for ok, n in zip(votes, self._in_a_row, strict=True)
        ]
