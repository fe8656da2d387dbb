"""The exchange that runs while backward does (docs/rule.md, "When it travels").

    backward:  .. gradients of message 0 ready -> votes 0 leave
               .. gradients of message 1 ready -> votes 1 leave      (0 is on the wire)
    step():    the rest leaves; headers; momenta; verdicts are applied as they arrive

What leaves is fixed beforehand: from the step after the ranks agreed on messages and their order,
every rank hands exactly these messages, in this order, to a process group of their own, whatever
happens on it. A thread counts votes and sends verdicts in another one, in the same order (on NCCL
backward's own thread does, `_new_wires`). What
backward did not deliver (a parameter that was not used, a backward that never ran) leaves in
`step()`. So no rank can wait for a message that another one never sends.

The momentum is advanced in `step()` from the gradient as the loop left it. The direction is needed
before the loop has clipped or unscaled this gradient, so it takes the factor by which the last
step's gradients were scaled between backward and `step()`.

Verdicts are provisional until the headers say that every rank was finite and its votes still hold;
otherwise all ranks discard them and exchange again in the step.
"""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from hf_dlion.backward.background import Background, InLine
from hf_dlion.backward.flight import Flight
from hf_dlion.backward.gradient_scale import GradientScale
from hf_dlion.backward.grounded import GROUNDED, Grounded
from hf_dlion.backward.streams import Streams
from hf_dlion.exchange import Wire
from hf_dlion.momentum.store import MomentumStore
from hf_dlion.options.groups import trainable
from hf_dlion.options.warn_once import warn_once
from hf_dlion.ranks.agreement import raise_together
from hf_dlion.ranks.group_counts import check_group_counts, group_counts
from hf_dlion.ranks.header import Header
from hf_dlion.step.early import Sent, delivery_of
from hf_dlion.step.engine import Engine
from hf_dlion.step.message import Message
from hf_dlion.step.plan import Plan, ReadyOrder

# After so many stale steps in a row the ranks give up exchanging during backward, and after so many
# incomplete ones they put the parameters that were missing last.
PATIENCE = 3

CHANGED = (
    f"overlap=True does not pay here: in {PATIENCE} steps in a row gradients changed after their "
    f"votes had left, or other parameters had one than in the step before. Run all but the last "
    f"backward of an accumulation under the DDP wrapper's no_sync(), or FSDP's "
    f"set_requires_gradient_sync(False), do not step() after several backward passes without it, "
    f"clip gradients by their norm (not their values) if at all, and freeze the same parameters in "
    f"each step"
)


MIXED = (
    "overlap=True does not work where NCCL sends the votes of some parameters and another backend "
    "those of others: on NCCL all must leave from one thread, elsewhere that would hold up backward"
)


class Overlap:
    """Lets one optimizer's messages leave during backward."""

    def __init__(self, engine: Engine) -> None:
        """Holds the optimizer's engine weakly: the parameters' hooks hold this."""
        self._engine = weakref.ref(engine)
        # With parameters on several devices autograd calls hooks from several threads.
        self._lock = threading.Lock()
        self._sender = Background("hf_dlion_send")
        self._counter = Background("hf_dlion_count")
        self._streams = Streams()
        self.reset()

    def reset(self) -> None:
        """Forgets what was agreed: the process group is another one."""
        self._gave_up = False
        self._gradient_scale = GradientScale()
        self._sync = True
        self._stale_in_a_row = self._incomplete_in_a_row = 0
        self._wires: tuple[Wire, Wire] | None = None
        self._in_line = False
        self._order: list[int] = []
        self._late: set[int] = set()
        self._new_late: set[int] = set()
        self._messages: Sequence[Message] = ()
        self._flight: Flight | Grounded = GROUNDED
        self._ready: dict[int, None] = {}

    @property
    def scale(self) -> float:
        """Factor by which the last gradients were scaled between backward and step."""
        return self._gradient_scale.scale

    def note_forward(self, sync: bool) -> None:
        """Takes note of a forward pass; `sync` is False under no_sync()."""
        self._sync = sync

    def note_gradient(self, param: Tensor) -> None:
        """Takes note that the gradient of a parameter is ready; called during backward."""
        engine = self._engine()
        if engine is None or not engine.alive or self._gave_up or engine.world_size == 1:
            return
        with self._lock:
            if not self._sync and not self._flight.began:
                return
            if not self._messages:
                self._gradient_scale.before_one(param)
                self._ready[id(param)] = None
                return
            flight = self._flight = self._flight.begun(lambda: self._begin(engine))
            flight.note(param)

    def _begin(self, engine: Engine) -> Flight:
        carried = engine.momenta(), engine.rule(), engine.stats, self._gradient_scale
        counter = InLine() if self._in_line else self._counter
        return Flight(self._messages, *carried, self._sender, counter, self._streams)

    def disturb(self) -> None:
        """Takes note that momenta changed: votes that left do not hold any more."""
        self._flight.disturb()

    def unknown(self, params: Sequence[Tensor]) -> list[Tensor]:
        """Returns those of the parameters whose gradients are not known to be finite."""
        return self._flight.unknown(params)

    def complete(
        self,
        header: Header,
        failure: Exception | None,
        plan: Plan | None,
        momenta: MomentumStore,
        bytes_before: int,
    ) -> Sent:
        """Sends what backward did not; see `EarlyVotes.complete`."""
        engine = self._engine()
        assert engine is not None, "it is the engine that calls"
        ordered = plan is not None and plan.ordered
        # Messages may be left from a process group that has been destroyed since.
        if not self._messages or engine.wire_if_several() is None:
            header = dataclasses.replace(header, ordered=ordered and not self.wants_order)
            return Sent(header, failure, delivery_of(plan), bytes_before)
        rule = engine.rule()
        began, flight = self._flight.began, self._flight.begun(lambda: self._begin(engine))
        self._flight = GROUNDED
        self._gradient_scale.compare()
        # By index, whether this rank votes now; on a rank that failed, or is not finite, it does
        # not.
        votes = header.present.tolist() if header.finite else []
        params = trainable(momenta.groups)
        present = {index: has for (index, _), has in zip(params, votes, strict=False)}
        flight.complete(present, self._gradient_scale.rescaled_oddly, momenta, rule)
        if began:
            self._note_missing(flight)
        if flight.failure is not None and failure is None:
            failure, header = flight.failure, Header.of_failure(header.step)
        stale = flight.stale or plan is None or flight.messages is not plan.messages
        header = dataclasses.replace(header, stale=stale, ordered=ordered and not self.wants_order)
        return Sent(header, failure, flight, flight.bytes_before)

    def _note_missing(self, flight: Flight) -> None:
        pairs = [pair for message in flight.messages for pair in message.params]
        missing = {index for index, param in pairs if id(param) in flight.missing} - self._late
        self._incomplete_in_a_row = self._incomplete_in_a_row + 1 if missing else 0
        self._new_late |= missing
        if not missing:
            self._new_late.clear()

    @property
    def wants_order(self) -> bool:
        """Whether parameters were missing so often that they had better come last."""
        return self._incomplete_in_a_row >= PATIENCE

    def prepare(
        self,
        headers: Sequence[Header],
        plan: Plan,
        params: Sequence[tuple[int, Tensor]],
        wire: Wire,
    ) -> Plan:
        """Returns the plan of the next step; every rank calls this with the same headers.

        Unless all ranks are content with an agreed order, they take that in which gradients became
        ready on rank 0, and put last what was often missing. Bytes per rank: `Wire.gather_objects`
        then, and the first time `Wire.meet`; else none.

        Args:
            headers: Of this step.
            plan: Of this step.
            params: Pairs of parameter index and parameter, those with requires_grad.
            wire: The ranks.

        Raises:
            Disagreement: On every rank, if torch cannot make their process groups, or if making
                the plan failed on another one; one on which it failed raises what failed. The plan
                before still holds.
        """
        engine = self._engine()
        assert engine is not None, "it is the engine that calls"
        self._streams.note_training({param.device for _, param in params})
        self._gradient_scale.compare()
        ready, self._ready = self._ready, {}
        self._gradient_scale.rescaled_oddly = set()
        # A rank that is not finite has nothing to say of its votes.
        if all(header.finite for header in headers):
            stale = any(header.stale for header in headers)
            self._stale_in_a_row = self._stale_in_a_row + 1 if stale else 0
        if self._stale_in_a_row >= PATIENCE:
            self._give_up(CHANGED)
        if self._gave_up or all(header.ordered for header in headers):
            return plan
        index_of = {id(param): index for index, param in params}
        if ready:
            self._order = [index_of[key] for key in ready if key in index_of]
        late = sorted(self._new_late) if self.wants_order else []
        between = plan.voters.between
        assert between is not None, "there are several ranks"
        senders = sorted({between.backend_for(param.device) for _, param in params})
        answers = wire.gather_objects((self._order, late, group_counts(), senders))
        self._order = answers[0][0]
        self._late.update(*(their_late for _, their_late, *_ in answers))
        self._new_late.clear()
        self._incomplete_in_a_row = 0
        everywhere = {name for *_, names in answers for name in names}
        if "nccl" in everywhere and len(everywhere) > 1:
            self._give_up(MIXED)
            return plan
        in_line = everywhere == {"nccl"}
        if self._wires is None or in_line != self._in_line:
            self._in_line = in_line
            self._wires = self._new_wires(plan, [counts for *_, counts, _ in answers])
        order = ReadyOrder(self._order, sorted(self._late), self._wires)
        failure: Exception | None = None
        try:
            plan = Plan(
                params,
                plan.voters,
                engine.options,
                plan.treatment,
                message_numel=engine.message_numel,
                order=order,
            )
        except Exception as error:  # Memory, say; the others would send what this one does not.
            failure = error
        raise_together(failure, wire, "preparing the next step")
        self._messages = plan.messages
        return plan

    def _new_wires(self, plan: Plan, counts: Sequence[tuple[int, int]]) -> tuple[Wire, Wire]:
        """Returns wires for votes and for verdicts: on NCCL one for both.

        NCCL asks for one order of all collectives on a device. There no rank waits for another
        before it counts, so the thread that runs backward sends all, in an order that is fixed.

        Raises:
            Disagreement: On every rank, if torch cannot make their process groups.
        """
        between = plan.voters.between
        assert between is not None, "there are several ranks"
        of_all = between.group is dist.group.WORLD
        check_group_counts(counts, plan.voters.alike, of_all=of_all)
        up = between.sibling()
        wires = up, up if self._in_line else between.sibling()
        longest = max((message.wire_bytes for message in plan.messages), default=0)
        for fresh in dict.fromkeys(wires):
            fresh.meet(-(-longest // (8 * up.world_size)) if self._in_line else 0)
        return wires

    def _give_up(self, why: str) -> None:
        self._gave_up = True
        self._messages = ()
        warn_once("overlap", f"{why}. Votes go in the step from now on")
