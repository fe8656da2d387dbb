r"""Steps that a rank takes by itself between two exchanges (`vote_every`; docs/rule.md, section 9).

    own weights p    p - p - p - p \                                / p - ...   rank 0
    anchor x         x ------------- w = x - p, a few bits of each -- x - ...   equal on all ranks
    own weights p    p - p - p - p /                                \ p - ...   rank 1

The part of w that a message leaves out stays in p and is in the next message (error feedback). A
parameter of 32 or 64 bits keeps p and x, and one of 16 bits also its displacement c = w.

    plain step    a header, votes, and a verdict by which all ranks move alike       step.py
    local step    no header: p = p - lr * sign(u)                                    step
    exchange      a header, a local step, then votes on w, and weight decay of x     displacement.py

After an attach, a load, or a change of what is trained, a local step begins with a header.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from hf_dlion.exchange.wire import Wire, digest
from hf_dlion.options import Groups, Options, hyperparameters
from hf_dlion.ranks.agreement import HISTORY, Agreed, agree_in_node
from hf_dlion.ranks.fingerprint import numbers
from hf_dlion.ranks.meeting import Disagreement, Kind
from hf_dlion.ranks.topology import Topology
from hf_dlion.vote import on_gpu
from hf_dlion.vote.displacement import DETACH, REMEDY, average, round_own
from hf_dlion.vote.layout import INTEGERS, LOW_PRECISION, Kept, Layout, Slot, form_of
from hf_dlion.vote.rounding import DISPLACEMENTS, PARAMETERS
from hf_dlion.vote.step import Host, Mine, Schedule, Turn, direction

# `vote_every_for` aims at this share of the time for exchanges, and proposes at most so many steps,
# the largest number that was tried in more than one period (docs/results.md).
LOCAL_SHARE, MOST_STEPS = 0.1, 64


def vote_every_for(step_s: float, exchange_s: float) -> int:
    """Returns the smallest power of two k for which an exchange takes at most 10% of k steps.

    It is at most 64. `step_s` is the time of a step without exchange.
    """
    steps = exchange_s / (LOCAL_SHARE * step_s)
    return min(1 << math.ceil(math.log2(max(steps, 1.0))), MOST_STEPS)


@dataclass(frozen=True)
class Period:
    """The steps since the last exchange, the same on every rank.

    By parameter group, `decays` has the product D of 1 - lr * weight_decay, and `paths` the sum of
    lr. `history` is a hash of every step's lr, betas and weight decay.
    """

    steps: int = 0
    decays: tuple[float, ...] = ()
    paths: tuple[float, ...] = ()
    history: int = 0

    def and_a_step(self, groups: Groups) -> Period:
        """Returns the period with one more step."""
        lrs = [float(group["lr"]) for group in groups]
        shrink = [1 - lr * float(g["weight_decay"]) for lr, g in zip(lrs, groups, strict=True)]
        return Period(
            self.steps + 1,
            tuple(decay * own for decay, own in zip(self.decays, shrink, strict=True)),
            tuple(path + lr for path, lr in zip(self.paths, lrs, strict=True)),
            digest([self.history, hyperparameters(groups)]),
        )


def schedule_of(options: Options) -> Schedule:
    """Returns the schedule of `vote_every`."""
    return LocalSteps(options) if options.vote_every > 1 else Schedule()


class LocalSteps(Schedule):
    """The schedule of `vote_every` above 1, and what a rank keeps between two exchanges.

    Attributes:
        options: Options of the optimizer.
        period: Steps since the last exchange; `next_period` has the step that begins, too.
        exchanges: Number of exchanges.
        used: Parameters of which this rank had a finite gradient since the last exchange.
        moved: Parameters that were in a local step, also without a gradient. One that is frozen
            leaves them in the next exchange, and then has the common weights.
        kept: Anchors, displacements, and limits by parameter.
        shown: Whether the model holds the anchors, as between `eval()` and `train()`.
        layout: Layout in which own weights of 16 bits were last rounded; None for that of the next
            rounding. Random bits depend on the layout, so a later one would give other weights.
        heads: The first parameters of the period's groups, by which they are known.
    """

    def __init__(self, options: Options, *, exchanges: int = 0, shown: bool = False) -> None:
        """Begins with a period without steps."""
        self.options = options
        self.period = self.next_period = Period()
        self.exchanges, self.shown = exchanges, shown
        self.used: set[Tensor] = set()
        self.moved: set[Tensor] = set()
        self.kept: dict[Tensor, Kept] = {}
        self.layout: Layout | None = None
        self.heads: list[Tensor | None] = []

    has_own_weights = True

    # The schedule.

    @property
    def steps_since_exchange(self) -> int:
        """Number of steps since the last exchange."""
        return self.period.steps

    def renewed(self, *, exchanges: int = 0, shown: bool = False) -> LocalSteps:
        """Returns local steps in a new period, with nothing that was kept."""
        return LocalSteps(self.options, exchanges=exchanges, shown=shown)

    def next_kind(self, layout: Callable[[], Layout]) -> Kind:
        """Returns what all ranks do next: `STEP` at a new layout is a header, then a local step."""
        if self.period.steps + 1 >= self.options.vote_every:
            return Kind.EXCHANGE
        # `take` notes that they have met, so a voter that is alone takes a plain step every time.
        return Kind.LOCAL_STEP if layout().has_met else Kind.STEP

    def begin(self, layout: Layout, last_turn: Turn) -> None:
        """Prepares a step.

        Raises:
            RuntimeError: If `eval` was called without `train`, or as `check`.
            ValueError: If two parameters share memory.
        """
        # Without anchors and gradients, torch.distributed.checkpoint creates the state.
        if self.shown and (self.kept or any([slot.grad is not None for slot in layout.slots])):
            raise RuntimeError(
                "step() after optimizer.eval() or in common_weights(), which put common weights "
                "into the model: call optimizer.train() before you train"
            )
        if not layout.has_met:
            _check_memory(layout)
        self.check(layout, last_turn)
        self.follow(last_turn.groups)
        self.next_period = self.period.and_a_step(last_turn.groups)

    def follow(self, groups: Groups) -> None:
        """Gives new groups a decay and a path, also if others were removed before them."""
        pairs = zip(self.period.decays, self.period.paths, strict=True)
        kept = dict(zip(self.heads, pairs, strict=False))  # Of no group after an exchange.
        self.heads = [next(iter(group["params"]), None) for group in groups]
        found = [kept.get(head, (1.0, 0.0)) for head in self.heads]
        decays, paths = tuple(decay for decay, _ in found), tuple(path for _, path in found)
        self.period = replace(self.period, decays=decays, paths=paths)

    def settle(self, mine: Mine, node: Wire | None) -> None:
        """Drops gradients that aren't finite, or that another rank of the node doesn't have.

        All ranks do this in every step, exchange, save, and load, before any header, so no rank of
        a node waits for another that is somewhere else. Ranks that do different things raise what
        failed, or Disagreement.
        """
        finite, present = mine.finite and mine.failure is None and bool(mine.present), mine.present
        if node is not None:
            try:
                finite, present = agree_in_node(node, mine.kind, finite, present)
            except Disagreement as error:
                raise mine.failure or error from None
        if mine.present:
            mine.layout.abstain(finite, present)

    def presence(self, mine: Mine) -> list[bool]:
        """Returns which tensors have a gradient, in an exchange one since the last exchange."""
        if mine.kind is Kind.EXCHANGE:
            slots = mine.layout.slots
            return [slot.param in self.used or slot.grad is not None for slot in slots]
        return mine.present

    def equal_values(self, kind: Kind) -> dict[str, object]:
        """Returns what must be equal on all ranks, by name."""
        period = self.next_period if kind is Kind.EXCHANGE else self.period
        return {
            "exchanges": self.exchanges,
            "steps since the last exchange": period.steps,
        }

    def equal_history(self, kind: Kind) -> dict[str, object]:
        """Returns what must have been equal in each step, by name."""
        period = self.next_period if kind is Kind.EXCHANGE else self.period
        return {
            "lr of each group, summed since the last exchange": list(period.paths),
            HISTORY: period.history,
        }

    def is_own_step(self, kind: Kind, agreed: Agreed, ranks: Topology | None) -> bool:
        """Returns whether a step moves own weights: if there are several voters, and one moves."""
        if ranks is None or ranks.voters.world_size == 1:
            return False
        return kind is not Kind.STEP or any(agreed.counts)

    def take(self, mine: Mine, turn: Turn, ranks: Topology) -> tuple[int, list[str]]:
        """Takes a step of this rank's own, and exchanges if it is its turn; see `exchange`."""
        stats, device = ranks.voters.stats, mine.layout.device
        stats.lap("", device)
        self.step(mine.layout, turn)
        stats.lap("apply_s", device)
        self.period = self.next_period
        for group in turn.groups:
            group["step"] = turn.step
        mine.layout.has_met = True
        if mine.kind is not Kind.EXCHANGE:
            return 0, []
        return self.exchange(mine.layout, mine.agreed.counts, turn, ranks)

    def exchange_now(self, lion: Host) -> list[str]:
        """Exchanges the steps of this period, whatever the model holds; returns warnings."""
        with lion.peers.together(Kind.EXCHANGE) as mine:
            mine.layout, last_turn = lion._refreshed_layout(), lion._turn(0)
            self.follow(last_turn.groups)
            self.next_period = self.period
            self.check(mine.layout, last_turn)
        ranks = lion.peers.ranks
        if not self.is_own_step(mine.kind, mine.agreed, ranks):
            return []
        shown = self.shown
        self.show(lion, own=True)
        try:
            layout, turn = lion._refreshed_layout(), lion._turn(0)
            number, texts = self.exchange(layout, mine.agreed.counts, turn, ranks)
            lion._run_periodic_tasks(number)
        finally:
            if shown:
                self.show(lion, own=False)
            mine.layout.release()
        return texts

    # Steps and exchanges.

    def step(self, layout: Layout, turn: Turn) -> None:
        """Takes a step on this rank's gradients, without communication.

        It makes anchors after a header, which has found equal weights on all ranks.
        """
        for slot in layout.slots:
            self.moved.add(slot.param)
            if not layout.has_met:
                self.add_anchor(slot)
            if slot.grad is not None:
                self.used.add(slot.param)
            slot.target = slot.p
        turn.age_rows(layout.slots)
        pieces = layout.pieces
        if any([piece.device.type != "cpu" for piece in pieces]):
            own_step = partial(on_gpu.own_step, turn=turn)
            others = on_gpu.each_device([*layout.messages, *layout.full], own_step)
            pieces = [piece for message in others for piece in message.pieces]
        for piece in pieces:
            if piece.has("grad"):
                # lr * sign(u) is exact, so a fused add rounds as two operations do.
                sign, lr = direction(piece, turn).sign_(), float(turn.groups[piece.group]["lr"])
                if piece.is_low:
                    c = piece.read("c", turn.scratch).add_(sign, alpha=lr)
                    random = partial(turn.random, DISPLACEMENTS + turn.voter)
                    piece.write("c", c, random, without_infs=True)
                else:
                    p = piece.read("target", turn.scratch).add_(sign, alpha=-lr)
                    piece.write("target", p, partial(turn.random, PARAMETERS))
            if piece.is_low:
                round_own(piece, turn)
        self._note_rounded(layout)

    def exchange(
        self, layout: Layout, counts: Sequence[int], turn: Turn, ranks: Topology
    ) -> tuple[int, list[str]]:
        """Averages how far the ranks were moved; every rank must call this.

        It returns the number of the exchange, 0 if no rank was moved, and warnings: parameters that
        weren't finite on this rank are reset to the anchor. `counts` has how many ranks used
        each parameter. Bytes for P trainable parameters and V voters: scales 8 (V - 1) P, a check
        of weights 8 (N - 1), or 16 (N - 1) with nodes, those of `exchange.routes`, and of
        `full_precision.set_means`.

        Raises:
            Disagreement: On every rank, before anchors move, if weights were replaced on one.
        """
        if not any(counts):
            self.period = Period()
            return 0, []
        ranks.voters.stats.lap("", layout.device)
        if self.layout is not None and self.layout is not layout:  # It changed since the step.
            self.layout = None
            self._round(layout, turn)
        for slot, count in zip(layout.slots, counts, strict=True):
            slot.target = slot.p if count else None
        # Votes, and the rounding of what moves, depend on the number of the exchange.
        turn = replace(turn, step=self.exchanges + 1)
        texts = average(layout, self.period.decays, self.period.paths, turn, ranks)
        for slot in layout.slots:
            slot.mean = None
            if not slot.param.requires_grad:
                self.drop(slot.param, slot.p)
                layout.has_met = False  # If it trains in the next step, it needs an anchor.
        self._note_rounded(layout)
        self.used, self.period = set(), Period()
        self.exchanges += 1
        ranks.voters.stats.exchanges += 1
        return self.exchanges, texts

    # Own weights and common ones.

    def check(self, layout: Layout, last_turn: Turn) -> None:
        """Refuses changes to parameters that a step would undo or mix up.

        Raises:
            RuntimeError: If a parameter has another dtype or memory layout than its anchor, or a
                parameter of 16 bits has other values than after the last step.
        """
        _check_forms(layout)
        if self.shown:
            return
        # A version also counts writes that change no value, so the values are compared then.
        written = {
            slot: slot.p.clone()
            for slot in layout.slots
            if slot.kept and slot.kept.version not in (None, slot.param._version)
        }
        if written:
            self._round(layout, last_turn, {slot.param for slot in written})
            if changed := _different([(slot, slot.p, values) for slot, values in written.items()]):
                for slot, values in written.items():
                    slot.p.copy_(values)
                raise _changed(changed[0], f"values were changed between two steps. {REMEDY}")
            self._note_rounded(self.layout)

    def show(self, lion: Host, *, own: bool) -> None:
        """Puts this rank's own weights into the model, or the common ones."""
        if self.shown != own:
            return
        layout, last_turn = lion._refreshed_layout(), lion._turn(0)
        if own:
            for slot in layout.slots:
                if slot.kept and slot.kept.aside is not None:
                    slot.p.copy_(slot.kept.aside)
                    slot.kept.aside = None
            self._round(layout, last_turn)
            self._note_rounded(self.layout)
        else:
            self.check(layout, last_turn)
            for slot in layout.slots:
                if slot.kept:
                    is_low = slot.kept.displacement is not None
                    slot.kept.aside = None if is_low else slot.p.clone()
                    slot.p.copy_(slot.kept.anchor)
        layout.release()
        self.shown = not own

    def take_in_writes(self, layout: Layout) -> None:
        """Moves anchors and own weights by what was written into the model while it shows anchors.

        The displacements x - p stay, as do the bits of elements that weren't written.

        Raises:
            RuntimeError: As `check`.
        """
        _check_forms(layout)
        shown = [(slot, slot.p, slot.kept.anchor) for slot in layout.slots if slot.kept]
        for slot in _different(shown):
            assert slot.kept is not None
            anchor, own = slot.kept.anchor, slot.kept.aside
            if own is not None:
                same = _bits(slot.p) == _bits(anchor)
                slot.kept.aside = torch.where(same, own, slot.p - (anchor - own))
            anchor.copy_(slot.p)

    def add_anchor(self, slot: Slot) -> None:
        """Copies a parameter to its anchor, unless it has one."""
        if slot.kept is None:
            c = torch.zeros_like(slot.p) if slot.dtype in LOW_PRECISION else None
            slot.kept = self.kept[slot.param] = Kept(slot.p.clone(), c, form_of(slot.param))

    def drop(self, param: Tensor, flat: Tensor) -> None:
        """Puts a parameter's anchor into it, and forgets the parameter."""
        kept = self.kept.pop(param, None)
        if kept is not None and not self.shown and kept.anchor.numel() == flat.numel():
            flat.copy_(kept.anchor)
        self.used.discard(param)
        self.moved.discard(param)

    def _round(self, layout: Layout, turn: Turn, chosen: Collection[Tensor] | None = None) -> None:
        """Sets own weights of 16 bits to x - c, rounded to the same bits as the last time."""
        if self.layout is None:
            self.layout = layout
        now = {slot.param: slot for slot in layout.slots}
        for then in self.layout.slots:
            slot = now.get(then.param)  # None if it isn't trainable any more.
            then.target, then.kept = None, self.kept.get(then.param)
            if slot is not None and then.kept and (chosen is None or then.param in chosen):
                then.target = slot.p
        for piece in self.layout.pieces:
            if piece.is_low:
                round_own(piece, turn)

    def _note_rounded(self, layout: Layout | None) -> None:
        self.layout = layout
        for param, kept in self.kept.items():
            if kept.displacement is not None:
                kept.version = param._version


def _check_memory(layout: Layout) -> None:
    slots = [slot for slot in layout.slots if slot.size]
    places = sorted((slot.p.data_ptr(), slot.p.nbytes, slot.name) for slot in slots)
    for (start, size, name), (other, _, other_name) in pairwise(places):
        if other < start + size:
            raise ValueError(
                f"{name!r} and {other_name!r} share memory, so each would undo the other's local "
                f"steps: tie them by assigning the same Parameter, or set vote_every=1"
            )


def _check_forms(layout: Layout) -> None:
    for slot in layout.slots:
        if slot.kept and slot.kept.form != form_of(slot.param):
            raise _changed(
                slot, f"device, dtype, or memory layout was changed. Before you do this, {DETACH}"
            )


def _changed(slot: Slot, how: str) -> RuntimeError:
    return RuntimeError(
        f"a {slot.param.dtype} parameter of shape {tuple(slot.param.shape)} has local steps, and "
        f"its {how}"
    )


def _different(found: Sequence[tuple[Slot, Tensor, Tensor]]) -> list[Slot]:
    """Returns the slots whose two flat tensors differ in a bit."""
    differ = numbers([(_bits(left) != _bits(right)).any() for _, left, right in found])
    return [slot for (slot, _, _), differs in zip(found, differ, strict=True) if differs]


def _bits(flat: Tensor) -> Tensor:
    """Returns a view of integers, because a NaN differs from itself, and 0.0 equals -0.0."""
    return flat.view(INTEGERS[flat.element_size()])
