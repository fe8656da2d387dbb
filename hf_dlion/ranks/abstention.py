"""How often each rank has abstained in a row, because its gradients held a NaN or an Inf."""

from __future__ import annotations

from collections.abc import Sequence

from hf_dlion.exchange.wire import named_ranks


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
