r"""Local steps (`vote_every`; docs/rule.md, section 9): a period of own steps ends in an exchange.

    rank 0    x - p - p - p \                         / x - p - ...
                             x - p, a few bits of each
    rank 1    x - p - p - p /                         \ x - p - ...       x: equal on all ranks

Between two periods all ranks hold the same weights, in the model, and nothing else differs but
momenta. A period begins with the first local step, which keeps the weights as the anchor x.

    plain step    a header, then votes, by whose verdict all ranks move alike        every_step.py
    local step    no header: p = p - lr * sign(u)                                    step
    exchange      a header, a local step, then the mean of x - p, and weight decay   displacement.py

After an attach, a load, or a change of what is trained, a local step begins with a header.
"""

from __future__ import annotations

from torch import Tensor

from hf_dlion.core.context import StepContext
from hf_dlion.core.layout import Layout
from hf_dlion.core.slot import LocalState
from hf_dlion.gpu import form
from hf_dlion.ranks.agreement import Agreed, Period
from hf_dlion.ranks.header import Kind
from hf_dlion.ranks.topology import Topology
from hf_dlion.steps.displacement import average_displacements


class LocalSteps:
    """Local steps of `vote_every` above 1, and what a rank keeps in a period; else it has none.

    Attributes:
        period: Steps since the last exchange.
        exchanges: Number of exchanges that ended a period.
        states: What the period keeps, by parameter; empty between two periods. A parameter that is
            frozen stays there until the next exchange.
    """

    def __init__(self, vote_every: int) -> None:
        """Begins before the first period."""
        self._vote_every = vote_every
        self.states: dict[Tensor, LocalState] = {}
        # The layout of the last local step. At another one, a local step begins with a header.
        self._known: Layout | None = None
        self.reset()

    def reset(self, exchanges: int = 0) -> None:
        """Forgets the period; the model keeps what it holds."""
        self.period = Period()
        self.states.clear()
        self.exchanges = exchanges

    def shows_anchors(self) -> bool:
        """Returns whether the model holds anchors, in `common_weights`."""
        return any([state.own is not None for state in self.states.values()])

    def next_kind(self, layout: Layout) -> Kind:
        """Returns what all ranks do next; at a new layout, a local step begins with a header."""
        if self._vote_every > 1 and self.period.steps + 1 >= self._vote_every:
            return Kind.EXCHANGE
        # After plain steps, which a single voter takes, too, no layout is known.
        return Kind.LOCAL_STEP if layout is self._known else Kind.STEP

    def period_with_step(self, *, abstains: bool) -> Period:
        """Returns the period with the step that begins, from which this rank may abstain.

        Without local steps there is none.

        Raises:
            RuntimeError: If the model shows common weights.
        """
        if self._vote_every == 1:
            return self.period
        if self.shows_anchors():
            raise RuntimeError(
                "step() in `with optimizer.common_weights():`, where the model doesn't hold the "
                "weights that train: leave the block before you step"
            )
        return self.period.and_a_step(abstains=abstains)

    def step(self, layout: Layout, context: StepContext, period: Period) -> None:
        """Takes a step on this rank's gradients, without communication.

        `period` has the step, too. The first step of a period keeps anchors. A parameter that is
        unfrozen later gets its anchor in a step with a header, which compares weights. If no rank
        had a gradient then, the next header compares them.
        """
        for slot in layout.slots:
            if slot.param not in self.states:
                self.states[slot.param] = LocalState.of(slot.part)
            slot.local, slot.moves = self.states[slot.param], slot.grad is not None
        context.age_rows(layout.slots)
        form.local_step(layout.all_messages, context)
        # Last: if a step without a header fails above and is taken again, it must decay once.
        for slot in layout.slots:
            state, rates = self.states[slot.param], context.rates[slot.group]
            state.used |= slot.moves
            state.decay *= rates.decay
            state.path += rates.lr
        self.period, self._known = period, layout

    def exchange(
        self,
        layout: Layout,
        agreed: Agreed,
        context: StepContext,
        ranks: Topology,
    ) -> int:
        """Ends the period; every rank must call this. Bytes: see `displacement`.

        `agreed` has how many ranks used each parameter. Votes, and the rounding of what moves,
        depend on the number of the exchange, which `context` has. It returns this number, or 0
        without a step since the last one.

        Raises:
            Disagreement: On every rank, before a parameter moves, if weights were replaced on one.
        """
        if not self.states:
            self.reset(self.exchanges)
            return 0
        stats = ranks.voters.stats
        stats.lap("", layout.device)
        for slot in layout.slots:
            slot.moves = slot.local is not None
        average_displacements(layout, agreed.gradient_counts, context, ranks)
        stats.exchanges += 1
        stats.abstentions += agreed.abstained
        self.reset(context.number)
        for slot in layout.slots:
            slot.local = slot.mean = None  # Frees anchors and means before momenta are averaged.
        return context.number

    # What the model shows.

    def show(self, layout: Layout) -> None:
        """Puts the anchors into the model, and keeps this rank's weights."""
        for slot in layout.slots:
            if slot.local is not None:
                slot.local.show(slot.part)

    def hide(self, layout: Layout) -> None:
        """Puts this rank's weights back, and moves them with what was written into the anchors."""
        for slot in layout.slots:
            if slot.local is not None:
                slot.local.hide(slot.part)
