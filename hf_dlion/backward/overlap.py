"""The exchange that runs while backward does (design section 5).

    backward:  .. gradients of message 0 ready -> votes 0 leave
               .. gradients of message 1 ready -> votes 1 leave      (0 is on the wire)
    step():    the rest leaves; headers; momenta; verdicts are applied as they arrive

What leaves is fixed beforehand: from the step after the ranks agreed on messages and their order,
every rank hands exactly these messages, in this order, to a process group of their own, whatever
happens on it. A thread counts votes and sends verdicts in another one, in the same order. What
backward did not deliver (a parameter that was not used, a backward that never ran) leaves in
`step()`. So no rank can wait for a message that another one never sends.

Where a node votes as one, its gradient is there once DDP has averaged a bucket inside it. A thread
waits for that, sends votes from the bucket, and lets DDP go on: backward returns after the last
vote has left. Of a wrapper that finds unused parameters a node learns only later which gradients it
has, and then votes leave in the step.

The momentum is advanced in `step()` from the gradient as the loop left it. The direction is needed
before the loop has clipped or unscaled this gradient, so that it takes the factor by which the last
step's gradients were scaled between backward and `step()`.

Verdicts are provisional until the headers say that every rank was finite and its votes still hold;
otherwise all ranks discard them and exchange again in the step.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future

import torch
import torch.distributed as dist
from torch import Tensor

from hf_dlion.backward.background import Background
from hf_dlion.backward.flight import Flight, Owner
from hf_dlion.backward.gradient_scale import ScaleProbes
from hf_dlion.exchange import Wire
from hf_dlion.options.warn_once import warn_once
from hf_dlion.ranks.group_counts import check_group_counts, group_counts
from hf_dlion.ranks.header import Header, raise_together
from hf_dlion.ranks.node import Node
from hf_dlion.step.message import Message
from hf_dlion.step.node_plan import make_plan
from hf_dlion.step.plan import Plan, ReadyOrder

# After so many stale steps in a row the ranks give up exchanging during backward, and after so many
# incomplete ones they put the parameters that were missing last.
PATIENCE = 3

CHANGED = (
    f"overlap=True does not pay here: in {PATIENCE} steps in a row gradients changed after their "
    f"votes had left. Run all but the last backward of an accumulation under the DDP wrapper's "
    f"no_sync(), and do not step() after several backward passes without it"
)
UNAVERAGED = (
    "overlap=True with local_group needs gradients that a DDP wrapper averages in every backward "
    "pass, and here it does not, or not all of them. Wrap the whole model in "
    "DistributedDataParallel with find_unused_parameters=False and static_graph=False (in Trainer: "
    "ddp_find_unused_parameters=False), or leave out overlap"
)


class Overlap:
    """Lets one optimizer's messages leave during backward."""

    def __init__(self, owner: Owner) -> None:
        """Holds the optimizer weakly: the parameters' hooks hold this."""
        self._owner = weakref.ref(owner)
        # With parameters on several devices autograd calls hooks from several threads.
        self._lock = threading.Lock()
        self._counter = Background("hf_dlion_count")
        self._sender = Background("hf_dlion_send")
        self._sending: list[Future[None]] = []
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self.reset()

    def reset(self) -> None:
        """Forgets what was agreed: the process group is another one."""
        self._gave_up = False
        self._probes = ScaleProbes()
        self._sync = True
        self._stale_in_a_row = self._incomplete_in_a_row = self._unaveraged_in_a_row = 0
        self._wires: tuple[Wire, Wire] | None = None
        self._inside: Wire | None = None
        self._order: list[int] = []
        self._late: set[int] = set()
        self._new_late: set[int] = set()
        self._messages: Sequence[Message] = ()
        self._flight: Flight | None = None
        self._ready: dict[int, None] = {}
        self._in_buckets: set[int] = set()

    @property
    def scale(self) -> float:
        """Factor by which the last gradients were scaled between backward and step."""
        return self._probes.scale

    def note_forward(self, sync: bool) -> None:
        """Takes note of a forward pass; `sync` is False under no_sync()."""
        self._sync = sync

    def note_gradient(self, param: Tensor) -> None:
        """Takes note that the gradient of a parameter is ready; called during backward."""
        owner = self._owner()
        if owner is None or self._gave_up or owner.world_size == 1:
            return
        with self._lock:
            if self._flight is None and not self._sync:
                return
            if not self._messages:
                self._ready[id(param)] = None
            if owner.node is not None:
                # This rank's own gradient; the node's comes in a bucket.
                self._probes.forget(param)
                return
            self._probes.before(param)
            if not self._messages:
                return
            if self._flight is None:
                self._flight = Flight(
                    self._messages, owner, self.scale, self._counter, self._streams
                )
            self._flight.note(param)

    def note_bucket(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        averaged: torch.futures.Future[Tensor],
    ) -> torch.futures.Future[Tensor]:
        """Takes note of gradients that a wrapper is averaging in the node.

        Args:
            params: Of a bucket, all of which the wrapper averages in every backward pass.
            grads: Views of the bucket, in the shapes of the parameters.
            averaged: Completed with the bucket.

        Returns:
            What the wrapper waits for: completed with the bucket once votes have left.
        """
        owner = self._owner()
        if owner is None or self._gave_up:
            return averaged
        with self._lock:
            self._in_buckets.update(map(id, params))
            if self._flight is None and self._messages:
                self._flight = Flight(
                    self._messages, owner, self.scale, self._counter, self._streams
                )
        device = grads[0].device
        done: torch.futures.Future[Tensor] = torch.futures.Future(
            devices=None if device.type == "cpu" else [device]
        )
        send = functools.partial(
            self._send_bucket, owner, self._flight, params, grads, averaged, done
        )
        self._sending.append(self._sender.submit(send))
        return done

    def _send_bucket(
        self,
        owner: Owner,
        flight: Flight | None,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        averaged: torch.futures.Future[Tensor],
        done: torch.futures.Future[Tensor],
    ) -> None:
        """Sends what a bucket completes; on the sender's thread, in the order of the buckets."""
        device = grads[0].device
        # A new thread has another current device than the one that runs backward.
        current = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
        with torch.no_grad(), current:
            try:
                bucket = averaged.wait()
            except Exception as error:
                done.set_exception(error)  # type: ignore[arg-type]
                return
            try:
                for param, grad in zip(params, grads, strict=True):
                    self._probes.before(param, grad)
                if flight is not None:
                    flight.note_bucket(params, grads)
            except Exception as error:
                if flight is None:
                    done.set_exception(error)  # type: ignore[arg-type]
                    return
                flight.failure = error
            done.set_result(bucket)

    def _all_sent(self) -> None:
        """Waits for the sender, as backward did unless it failed."""
        for sending in self._sending:
            sending.result()
        self._sending.clear()

    def disturb(self) -> None:
        """Takes note that momenta changed: votes that left do not hold any more."""
        if self._flight is not None:
            self._flight.stale = True

    def unknown(self, params: Sequence[Tensor]) -> list[Tensor]:
        """Returns those of the parameters whose gradients are not known to be finite.

        A gradient that was finite when its vote left need not be read once more, unless the loop
        has touched any since: an in-place change through `.data` leaves no other trace.
        """
        self._all_sent()
        flight = self._flight
        if flight is None or self._probes.after() != 1.0:
            return list(params)
        return [param for param in params if not flight.known_finite(param)]

    def complete(self, present: Mapping[int, bool]) -> Flight | None:
        """Sends what backward did not; every rank calls this, and before its header leaves.

        Args:
            present: By parameter index, whether this rank votes on it; empty if it failed.

        Returns:
            The step's messages, or None where votes leave in the step.
        """
        self._all_sent()
        owner = self._owner()
        if owner is None or not self._messages:
            return None
        began = self._flight is not None
        flight = self._flight or Flight(
            self._messages, owner, self.scale, self._counter, self._streams
        )
        self._flight = None
        self._probes.after()
        flight.complete(present, self._probes.odd)
        if began and owner.node is None:
            self._note_missing(flight)
        return flight

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
        ready on rank 0, and put last what was often missing; nodes do so only if wrappers average
        all gradients in every backward pass. Bytes per rank: `Wire.gather_objects` then, else none.

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
        owner = self._owner()
        assert owner is not None, "it is the owner that calls"
        self._probes.after()
        ready, self._ready = self._ready, {}
        self._probes.odd = set()
        averaged = all(id(param) in self._in_buckets for _, param in params if param.numel())
        self._in_buckets.clear()
        # A rank that is not finite has nothing to say of its votes.
        if all(header.finite for header in headers):
            stale = any(header.stale for header in headers)
            self._stale_in_a_row = self._stale_in_a_row + 1 if stale else 0
        if self._stale_in_a_row >= PATIENCE:
            self._give_up(CHANGED)
        if self._gave_up or all(header.ordered for header in headers):
            return plan
        node = owner.node
        if node is not None and node.peers.world_size == 1:
            return plan  # One node exchanges no votes.
        index_of = {id(param): index for index, param in params}
        if ready:
            self._order = [index_of[key] for key in ready if key in index_of]
        late = sorted(self._new_late) if self.wants_order else []
        answers = wire.gather_objects((self._order, late, averaged, group_counts()))
        self._order = answers[0][0]
        if node is not None and not all(theirs for _, _, theirs, _ in answers):
            self._messages = ()
            self._unaveraged_in_a_row += 1
            if self._unaveraged_in_a_row >= PATIENCE:
                self._give_up(UNAVERAGED)
            return plan
        self._unaveraged_in_a_row = 0
        self._late.update(*(their_late for _, their_late, _, _ in answers))
        self._new_late.clear()
        self._incomplete_in_a_row = 0
        if self._wires is None:
            self._wires = self._new_wires(wire, node, [counts for *_, counts in answers])
        order = ReadyOrder(self._order, sorted(self._late), self._wires, self._inside)
        failure: Exception | None = None
        try:
            plan = make_plan(params, wire, owner.options, node, order, plan.treatment)
        except Exception as error:  # Memory, say; the others would send what this one does not.
            failure = error
        raise_together(failure, wire, "preparing the next step")
        self._messages = plan.messages
        return plan

    def _new_wires(
        self, wire: Wire, node: Node | None, counts: Sequence[tuple[int, int]]
    ) -> tuple[Wire, Wire]:
        """Returns wires for votes and for verdicts, and makes that inside the node.

        Raises:
            Disagreement: On every rank, if torch cannot make their process groups.
        """
        if node is None:
            of_all = wire.group is dist.group.WORLD
            check_group_counts(counts, [range(wire.world_size)], of_all=of_all)
        else:
            check_group_counts(counts, (*node.members, *node.places))
            # First those inside nodes, then those between them, on every rank.
            self._inside = node.local.sibling()
        votes = wire if node is None else node.peers
        wires = votes.sibling(), votes.sibling()
        for fresh in (*wires, *([self._inside] if self._inside else ())):
            fresh.meet()
        return wires

    def _give_up(self, why: str) -> None:
        self._gave_up = True
        self._messages = ()
        warn_once("overlap", f"{why}. Votes go in the step from now on")
