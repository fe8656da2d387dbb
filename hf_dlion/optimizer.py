"""`DistributedLion`: a torch optimizer whose ranks exchange signs instead of gradients."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast, overload

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from hf_dlion import comm_hook
from hf_dlion.abstention import Abstentions, all_finite, unscale
from hf_dlion.codec import AloneJob, codec_for
from hf_dlion.exchange import Wire, WireStats
from hf_dlion.flight import Flight
from hf_dlion.groups import (
    details_of,
    flat_params,
    group_values,
    option_values,
    tensor_rules,
    trainable,
)
from hf_dlion.header import Agreement, Disagreement, Header, digest
from hf_dlion.messages import Message, Plan, exchange_all
from hf_dlion.momentum_origin import MomentumOrigin
from hf_dlion.momentum_sync import average_over_ranks
from hf_dlion.node import LocalGroup, Node, find_node
from hf_dlion.node_gradients import average_gradients
from hf_dlion.node_messages import NodePlan, step_alone_in_node
from hf_dlion.options import (
    Aggregation,
    CheckpointMode,
    ExchangeName,
    NodeName,
    OnDivergence,
    Options,
    Ties,
    check_group,
)
from hf_dlion.overlap import Overlap
from hf_dlion.presence import Presence
from hf_dlion.replicas import check_replicas
from hf_dlion.shards import Range, Shards
from hf_dlion.state import (
    check_gradient,
    check_state,
    check_trainable,
    restore_momentum,
)
from hf_dlion.verdict import StepRule

STATE_VERSION = 1

Params = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]


class DistributedLion(Optimizer):
    r"""Lion for data-parallel training in which every rank sends one bit per parameter.

    Rank r of N keeps a momentum m of its own and never reduces its gradient g:

        u = b1 * m + (1 - b1) * g                 direction
        s = sign(u)                               what the rank sends: its vote
        v = sign(sum of s)   or   (sum of s) / N  majority or average: the verdict, on every rank
        p = p * (1 - lr * wd) - lr * v
        m = b2 * m + (1 - b2) * g

    This is Distributed Lion (Liu et al., NeurIPS 2024, arXiv 2404.00438, Algorithm 1) on Lion
    (Chen et al., 2023, arXiv 2302.06675, Algorithm 2). A row (a slice along the first dimension)
    whose u is exactly zero abstains, so that an embedding row that no rank has seen stays where
    it is. Replicas are bitwise equal after every step. On one rank it is plain Lion.

    Coming from AdamW: every element moves by lr in every step, so start at a third to a tenth of
    AdamW's learning rate, and raise weight_decay by the same factor, to keep lr * weight_decay.

    The optimizer finds the DDP wrapper of its parameters by itself at the wrapper's first forward
    and keeps it from reducing gradients. Gradients may be accumulated under `no_sync()` and
    clipped as usual: they are this rank's own until `step()`. A parameter takes part on a rank
    where autograd gave it a gradient, or where one that is not all zeros was assigned. Every rank
    must call `step()` together; what fails on one rank before the header is raised on all of them.

    Example:
        >>> import torch
        >>> from hf_dlion import DistributedLion
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = DistributedLion(model.named_parameters(), lr=1e-3, weight_decay=0.1)
        >>> model(torch.ones(3, 4)).sum().backward()
        >>> optimizer.step()
        >>> optimizer.steps
        1

    Args:
        params: Parameters, named parameters, or parameter groups with their own "lr", "betas" and
            "weight_decay": float64, float32, bfloat16 or float16, mixed as you like.
        lr: Learning rate: how far each element moves in a step; a float or a 0-D tensor.
        betas: Decay factors of the direction and of the momentum.
        weight_decay: Decoupled weight decay.
        aggregation: "majority" or "average" of the votes.
        ties: A tied majority: "alternate" (+1 and -1 in turns over elements and steps, one bit on
            the way down) or "zero" (no move, two bits).
        exchange: "gather", "two_phase", or "auto", which takes the one that sends fewer bytes.
        overlap: Exchange votes during backward, as gradients become ready, from the second step
            on. The momentum is advanced in `step()`, from the gradient as the loop left it; the
            direction takes the factor by which the gradients of the step before were scaled
            between backward and `step()` (by clipping or GradScaler), since that of this step is
            not known yet. Costs one more pass over gradients and momenta. With `local_group` it
            takes a DDP wrapper of the whole model, made with find_unused_parameters=False and
            static_graph=False; otherwise votes go in the step, with a warning.
        stochastic_rounding: Round bfloat16 and float16 parameters and momenta stochastically, the
            parameters with the same random bits on every rank. Nearest rounding loses every
            update smaller than half a unit in the last place: most steps of a fine-tuning.
        momentum_dtype: dtype of the momentum: torch.float32, torch.bfloat16 or torch.float16;
            None keeps each parameter's own.
        process_group: The ranks that vote; None is the default group, taken at first use.
        seed: Seed of the stochastic rounding, the same on every rank.
        max_abstained_steps: A rank whose gradients hold a NaN or an Inf abstains from the step;
            when one does so this many steps in a row, all ranks raise.
        checkpoint: "per_rank" has the integrations save every rank's momentum; "mean" has them
            average the momenta before rank 0 saves.
        local_group: Ranks that cast one vote together, because fast links join them: "node" (as
            many as LOCAL_WORLD_SIZE says, ranks of a node following one another), their number,
            or the process group of this rank's node. Gradients are averaged in full precision
            inside a node, by DDP's backward or else in `step()`, and the momentum is shared out
            among its ranks; in the rule above N is then the number of nodes. None: every rank
            votes.
        check_replicas_every: After every so many steps the ranks compare a hash of all
            parameters of the groups, frozen ones too; 0 never does.
        on_divergence: What to do should they differ: "raise" an error on every rank that names
            the first such parameter, or "repair": warn, and give all ranks the values that most
            of them have.

    Attributes:
        state: `state[p]["exp_avg"]`, shape of p, is this rank's momentum; with `local_group` its
            share of the node's, 1-D.
        options: The options, as `Options`.
        steps: Number of the last step that moved anything.
        wire: Bytes, times and agreement, as `WireStats`.

    Raises:
        ValueError: If an option or a group's value is out of its range.
        TypeError: If one has the wrong type, or a parameter's dtype is not floating.
        NotImplementedError: If parameters are sharded (FSDP, DeepSpeed ZeRO-3, tensor parallel).
    """

    # GradScaler then calls step() on every rank and only says whether it found an Inf; without
    # it the overflowing rank alone would skip the step, and the others would wait for ever.
    _step_supports_amp_scaling = True
    grad_scale: Tensor | None
    found_inf: Tensor | None

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        aggregation: Aggregation = "majority",
        ties: Ties = "alternate",
        exchange: ExchangeName = "auto",
        overlap: bool = False,
        stochastic_rounding: bool = True,
        momentum_dtype: torch.dtype | None = None,
        process_group: dist.ProcessGroup | None = None,
        seed: int = 0,
        max_abstained_steps: int = 20,
        checkpoint: CheckpointMode = "per_rank",
        local_group: NodeName | int | dist.ProcessGroup | None = None,
        check_replicas_every: int = 0,
        on_divergence: OnDivergence = "raise",
    ) -> None:
        """See the class."""
        self._local_group: LocalGroup = local_group
        self.options = Options(
            aggregation=aggregation,
            ties=ties,
            exchange=exchange,
            overlap=overlap,
            stochastic_rounding=stochastic_rounding,
            momentum_dtype=momentum_dtype,
            seed=seed,
            max_abstained_steps=max_abstained_steps,
            checkpoint=checkpoint,
            local_group=_plain(local_group),
            check_replicas_every=check_replicas_every,
            on_divergence=on_divergence,
        )
        if process_group is not None and not isinstance(process_group, dist.ProcessGroup):
            raise TypeError(
                f"process_group={process_group!r} must be a torch.distributed process group of "
                f"which this rank is a member, or None"
            )
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay}
        check_group(defaults)
        self._process_group = process_group
        self._lost_group = False
        self._shards = Shards()
        self.steps = 0
        self._begin()
        super().__init__(cast(Any, params), defaults)
        comm_hook.watch(self)

    def _begin(self) -> None:
        """Makes what belongs to this process and is neither copied nor saved."""
        self.wire = WireStats()
        self._sent_inside = 0
        self._wire: Wire | None = None
        self._node: Node | None = None
        self._joined = False
        self._agreement = Agreement()
        self._abstentions = Abstentions(1, self.options.max_abstained_steps)
        self._origin = MomentumOrigin()
        self._plan: Plan | None = None
        self._overlap = Overlap(self) if self.options.overlap else None
        self._presence = Presence(None if self._overlap is None else self._overlap.note_gradient)
        self._presence.remove_with(self)

    @property
    def rank(self) -> int:
        """This rank in the process group, 0 without one."""
        wire = self._resolved()
        return 0 if wire is None else wire.rank

    @property
    def world_size(self) -> int:
        """Number of ranks in the process group, 1 without one."""
        wire = self._resolved()
        return 1 if wire is None else wire.world_size

    def group(self) -> dist.ProcessGroup | None:
        """Returns the process group in use, or None where torch.distributed is not initialised."""
        wire = self._resolved()
        return None if wire is None else wire.group

    @property
    def messages(self) -> Sequence[Message]:
        """The messages of the coming step as far as they are known, in the order they leave."""
        return () if self._plan is None else self._plan.messages

    def gather_objects(self, value: Any) -> list[Any]:
        """Returns every rank's `value`, in rank order; every rank must call this.

        Args:
            value: A small, plain, picklable object.
        """
        wire = self._resolved()
        return [value] if wire is None else wire.gather_objects(value)

    def _resolved(self) -> Wire | None:
        """Returns the wire, looked up late: an optimizer may be built before the process group."""
        if not (dist.is_available() and dist.is_initialized()):
            self._wire = None
            return None
        if self._lost_group:
            raise RuntimeError(
                "this DistributedLion was copied or unpickled from one with a process group of its "
                "own, which a copy does not carry: make a new one with process_group=... (or "
                "local_group=...) and load the state dict into it"
            )
        group = self._process_group or dist.group.WORLD
        assert group is not None, "an initialised torch.distributed has a default group"
        if self._wire is None or self._wire.group is not group:
            params = flat_params(self.param_groups)
            device = params[0].device if params else torch.device("cpu")
            self._wire = Wire(group, self.wire, device)
            self._node, self._joined = None, False
            self._agreement = Agreement()
            if self._overlap is not None:
                self._overlap.reset()
            limit = self.options.max_abstained_steps
            self._abstentions = Abstentions(self._wire.world_size, limit)
            comm_hook.watch(self)
        return self._wire

    def join_node(self) -> Node | None:
        """Returns this rank's node, or None where every rank votes.

        Every rank must call this at the same point of its program. The first time, with
        `local_group`, the ranks agree on who shares a node and make process groups; later nothing
        is sent.

        Raises:
            Disagreement: On every rank, if the ranks cannot be divided into equal nodes.
        """
        wire = self._resolved()
        if wire is None or wire.world_size == 1 or self.options.local_group in (None, 1):
            return None
        if not self._joined:
            self._node, self._joined = self._found_node(wire), True
        return self._node

    @property
    def node(self) -> Node | None:
        """Who votes together with this rank, as far as `join_node` has found out."""
        return self._node

    def _found_node(self, wire: Wire) -> Node | None:
        params = flat_params(self.param_groups)
        device = params[0].device if params else torch.device("cpu")

        def agree(failure: Exception | None) -> None:
            header = dataclasses.replace(
                Header.of_failure(self.steps),
                failed=failure is not None,
                options=digest(option_values(self.options)),
            )
            # As a step begins, so that a rank without local_group, which is there, hears of it.
            details = details_of(self.param_groups, self.options, failure)
            self._agreement.agree_on_options(header, wire, details)

        node = find_node(self._local_group, wire, agree, self.wire, device)
        if node is not None:
            limit = self.options.max_abstained_steps
            self._abstentions = Abstentions(len(node.members), limit, "node")
        return node

    def note_reduced(self, params: Iterable[Tensor]) -> None:
        """Remembers the parameters whose gradients a wrapper has just averaged in the node."""
        self._presence.note_reduced(params)

    def note_bucket(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        averaged: torch.futures.Future[Tensor],
    ) -> torch.futures.Future[Tensor]:
        """Returns what a wrapper waits for: the averaging of a bucket, and votes on it to leave."""
        if self._overlap is None:
            return averaged
        return self._overlap.note_bucket(params, grads, averaged)

    def attach(self, ddp_model: nn.Module) -> None:
        """Keeps a DDP wrapper from reducing gradients; done automatically at its first forward.

        Args:
            ddp_model: A DistributedDataParallel, or torch.compile's wrapper of one.

        Raises:
            TypeError: If it is neither.
            ValueError: If it holds none of this optimizer's parameters.
            RuntimeError: If it has another comm hook, another process group, or trainable
                parameters that no DistributedLion owns.
        """
        ddp = comm_hook.unwrapped_ddp(ddp_model)
        if not isinstance(ddp, DistributedDataParallel):
            raise TypeError(
                f"attach() takes a DistributedDataParallel, got {type(ddp_model).__name__}; a "
                f"model without a wrapper needs no attaching, its gradients are local already"
            )
        mine = {id(param) for param in flat_params(self.param_groups)}
        if not any(id(param) in mine for param in ddp.module.parameters()):
            raise ValueError("the DDP wrapper holds none of this optimizer's parameters")
        comm_hook.attach(ddp)

    def note_forward(self, sync: bool) -> None:
        """Takes note of a DDP wrapper's forward pass; `sync` is False under no_sync()."""
        if self._overlap is not None:
            self._overlap.note_forward(sync)

    def watch_gradients(self) -> None:
        """Begins to watch parameters that were frozen before; called at each attachment."""
        self._presence.watch(flat_params(self.param_groups))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a parameter group, on every rank alike; see `torch.optim.Optimizer`.

        Raises:
            ValueError: If a value of the group is out of its range.
            TypeError: If one has the wrong type, or a parameter's dtype is not floating.
            NotImplementedError: If a parameter is sharded.
        """
        check_group({**self.defaults, **param_group})
        super().add_param_group(param_group)
        try:
            for param in self.param_groups[-1]["params"]:
                check_trainable(param)
        except Exception:
            self.param_groups.pop()
            raise
        self._presence.watch(self.param_groups[-1]["params"])

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Resets the gradients; see `torch.optim.Optimizer`."""
        super().zero_grad(set_to_none)
        self._presence.clear()
        self._presence.note_zeros(flat_params(self.param_groups))

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Takes one step, together with all ranks of the process group.

        Bytes per rank: `hf_dlion.header.header_wire_bytes` and, for each message, what the
        exchange's `wire_bytes` says; with `check_replicas_every=k`, in every k-th step those of
        `hf_dlion.replicas.check_replicas`. A rank whose gradients hold a NaN or an Inf abstains and
        keeps its momentum; if all do, nothing changes and the step is not counted.

        Args:
            closure: Reevaluates the model and returns the loss; optional.

        Returns:
            What the closure returned, or None.

        Raises:
            Disagreement: On every rank, if the ranks differ in what must be equal, and on the
                others if one failed; that one raises what failed.
            RuntimeError: On every rank, if one abstained `max_abstained_steps` times in a row.
        """
        wire, steps_before = self._resolved(), self.steps
        sent, sent_inside = self.wire.bytes_sent, self._sent_inside
        loss: float | None = None
        failure: Exception | None = None
        try:
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            node = self.join_node()
            header = self._header(wire, node)
        except Disagreement:
            raise  # On every rank together.
        except Exception as error:
            if wire is None or wire.world_size == 1:
                raise
            failure, header, node = error, Header.of_failure(self.steps), self._node
        flight = None
        if self._overlap is not None and wire is not None and wire.world_size > 1:
            header, flight, failure = self._completed(header, failure)
            sent = sent if flight is None else flight.bytes_before
        headers = [header] if wire is None else self._agreed(header, wire, failure, flight)
        if flight is not None and any(h.stale or not h.finite for h in headers):
            flight.discard()
            flight = None
        voice = self.rank
        if node is not None:
            headers, voice = node.heard(headers), node.index
        finite = [other.finite for other in headers]
        self.wire.abstentions += self._abstentions.note(finite, voice)
        heard = [other.present for other in headers if other.finite]
        voters = torch.stack(heard).any(dim=0) if heard else torch.zeros(0)
        if bool(voters.any()):
            self._move(wire, node, voters, headers[voice], header.present, flight)
            self.steps += 1
        elif flight is not None:
            flight.discard()
        if self._overlap is not None and wire is not None and wire.world_size > 1:
            assert self._plan is not None, "the header made the plan"
            self._prepare(self._overlap, self._plan, headers, wire)
        comm_hook.after_step(self, self._presence.seen(flat_params(self.param_groups)))
        self._presence.clear()
        if wire is not None and wire.world_size > 1 and self.steps > steps_before:
            self._check_replicas(wire, node)
        self.wire.last_bytes_sent = self.wire.bytes_sent - sent
        self.wire.last_node_bytes_sent = self.wire.node_bytes_sent - sent_inside
        self._sent_inside = self.wire.node_bytes_sent
        return loss

    def _prepare(self, overlap: Overlap, plan: Plan, headers: Sequence[Header], wire: Wire) -> None:
        """Makes the next step's messages, and gives momenta to the ranks that vote on them."""
        self._plan = overlap.prepare(headers, plan, trainable(self.param_groups), wire)
        if self._node is not None and self._plan is not plan:
            assert isinstance(self._plan, NodePlan), "a node's ranks have a plan of shards"
            self._share_out(self._plan, self._node, displaced=True)

    def _check_replicas(self, wire: Wire, node: Node | None) -> None:
        """Compares the ranks' parameters when it is time to."""
        every = self.options.check_replicas_every
        if every == 0 or self.steps % every:
            return
        near = () if node is None else node.members[node.index]
        check_replicas(self.param_groups, wire, self.steps, self.options.on_divergence, near)

    def _completed(
        self, header: Header, failure: Exception | None
    ) -> tuple[Header, Flight | None, Exception | None]:
        """Sends the votes that did not leave during backward, and says so in the header."""
        assert self._overlap is not None, "asked for by the options"
        params = trainable(self.param_groups)
        votes = header.present.tolist() if header.finite else []
        present = {index: has for (index, _), has in zip(params, votes, strict=False)}
        flight = self._overlap.complete(present)
        if flight is not None and flight.failure is not None and failure is None:
            failure, header = flight.failure, Header.of_failure(self.steps)
        ordered = self._plan is not None and self._plan.ordered and not self._overlap.wants_order
        stale = flight is not None and (
            flight.stale
            or header.unaveraged
            or self._plan is None
            or flight.messages is not self._plan.messages
        )
        return dataclasses.replace(header, stale=stale, ordered=ordered), flight, failure

    def _agreed(
        self, mine: Header, wire: Wire, failure: Exception | None, flight: Flight | None
    ) -> list[Header]:
        """Returns all ranks' headers once they fit; a rank that failed raises its own error."""
        if wire.world_size == 1:
            return [mine]
        details = details_of(self.param_groups, self.options, failure)
        try:
            headers = self._agreement.agree(mine, wire, details)
        except Disagreement:
            if flight is not None:
                flight.discard()
            if failure is not None:
                raise failure from None
            raise
        self._origin.warn_if_foreign(wire.rank)
        return headers

    def _header(self, wire: Wire | None, node: Node | None) -> Header:
        """Returns what this rank says of itself, after all that can fail on it alone."""
        for group in self.param_groups:
            check_group(group)
        if node is None and self._shards.held:
            self._hold(self._shards.filled_up(self._momenta(), flat_params(self.param_groups)))
        self._shards.warn_of_gap()
        params = trainable(self.param_groups)
        if self._plan is None or not self._plan.fits(params, wire):
            self._plan = None
            if node is None or wire is None:
                self._plan = Plan(params, wire, self.options)
            else:
                self._plan = NodePlan(params, wire, self.options, node)
        for _, param in params:
            check_gradient(param)
        present = self._presence.of([param for _, param in params])
        self._presence.watch(param for _, param in params)
        for (index, param), has in zip(params, present, strict=True):
            if has:
                self.momentum_of(param, index)
        # A wrapper gives the node's gradient also to a rank that did not use the parameter.
        voting = [
            param
            for (_, param), has in zip(params, present, strict=True)
            if has or (node is not None and self._presence.reduced(param))
        ]
        grads = [cast(Tensor, param.grad) for param in voting]
        unaveraged = displaced = False
        if node is not None:
            unaveraged = any(self._presence.unaveraged([param for _, param in params], present))
            displaced = self._shards.displaced(self._momenta(), self._owned())
        scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        finite = unscale(grads, scale, found_inf)
        if self._overlap is not None:
            voting = self._overlap.unknown(voting)
        return Header(
            finite=finite and all_finite([cast(Tensor, param.grad) for param in voting]),
            failed=False,
            step=self.steps,
            layout=self._plan.layout,
            options=digest(option_values(self.options)),
            groups=digest(group_values(self.param_groups)),
            present=torch.tensor(present, dtype=torch.bool),
            unaveraged=unaveraged,
            displaced=displaced,
        )

    def momentum_of(self, param: Tensor, index: int = -1) -> Tensor:
        """Returns the parameter's momentum, or this rank's share of it, made at its first use."""
        state = self.state[param]
        if "exp_avg" not in state:
            dtype = self.options.momentum_dtype or param.dtype
            shape: Sequence[int] = param.shape
            if index in (owned := self._owned()):
                self._shards.held[index] = owned[index]
                shape = (owned[index][1] - owned[index][0],)
            state["exp_avg"] = torch.zeros(shape, dtype=dtype, device=param.device)
        return cast(Tensor, state["exp_avg"])

    def stretch_of(self, param: Tensor, index: int, wanted: Range) -> Tensor | None:
        """Returns a stretch of a parameter's momentum, or None if this rank does not hold it."""
        return self._shards.stretch(index, self.momentum_of(param, index), wanted)

    def _momenta(self) -> dict[int, Tensor]:
        """Returns what this rank holds of each momentum, by parameter index."""
        return {
            index: cast(Tensor, self.state[param]["exp_avg"])
            for index, param in enumerate(flat_params(self.param_groups))
            if "exp_avg" in self.state.get(param, {})
        }

    def _owned(self) -> dict[int, Range]:
        """Returns the stretch of each parameter that this rank owns; none where it has all."""
        if isinstance(self._plan, NodePlan) and self._node is not None:
            return self._plan.owners[self._node.local.rank]
        return {}

    def _hold(self, momenta: Mapping[int, Tensor]) -> None:
        """Keeps momenta, by parameter index."""
        params = flat_params(self.param_groups)
        for index, momentum in momenta.items():
            self.state[params[index]]["exp_avg"] = momentum

    def _share_out(self, plan: NodePlan, node: Node, displaced: bool) -> None:
        """Gives every rank of the node the momentum that it owns."""
        momenta, shards = self._momenta(), self._shards
        if displaced:
            params, dtype = flat_params(self.param_groups), self.options.momentum_dtype
            momenta = shards.shared_out(momenta, plan.owners, params, dtype, node.local)
        self._hold(shards.cut(momenta, plan.owners[node.local.rank]))
        shards.members = node.members

    def _move(
        self,
        wire: Wire | None,
        node: Node | None,
        voters: Tensor,
        mine: Header,
        present: Tensor,
        flight: Flight | None,
    ) -> None:
        """Exchanges votes and applies the verdict to the parameters that any rank votes on.

        Args:
            wire: The process group.
            node: Who votes together with this rank.
            voters: bool, shape (P,), the parameters on which any rank votes.
            mine: What this rank, or its node, said of itself.
            present: bool, shape (P,), the parameters that this rank itself has.
            flight: The messages that left already, or None.
        """
        params = trainable(self.param_groups)
        if node is not None:
            assert isinstance(self._plan, NodePlan), "a node's ranks have a plan of shards"
            self._share_out(self._plan, node, mine.displaced)
            if mine.unaveraged and mine.finite:
                members = [param for _, param in params]
                flags = self._presence.unaveraged(members, present.tolist())
                average_gradients(members, torch.tensor(flags), node)
        voted = {
            index for (index, _), any_rank in zip(params, voters.tolist(), strict=True) if any_rank
        }
        rule = self.step_rule()
        rules = tensor_rules(self.param_groups, voted, rule)
        voting: dict[int, Tensor] = {}
        for (index, param), votes in zip(params, mine.present.tolist(), strict=True):
            if index not in voted:
                continue
            # Also where this rank does not vote: the state has the same entries on all ranks.
            momentum = self.momentum_of(param, index)
            if votes and mine.finite:
                voting[index] = momentum
        assert self._plan is not None, "the header made the plan"
        if isinstance(self._plan, NodePlan) and self._plan.alone:
            step_alone_in_node(self._plan.alone, voting, rules, self.wire)
            return
        if wire is not None and wire.world_size > 1:
            if flight is not None:
                flight.land(voting, rules, rule)
                return
            exchange_all(self._plan.messages, voting, rules, rule, self.wire)
            return
        start = time.perf_counter()
        jobs: dict[torch.device, list[AloneJob]] = {}
        for index, param in params:
            if index in voting:
                job = AloneJob(param, cast(Tensor, param.grad), voting[index], rules[index])
                jobs.setdefault(param.device, []).append(job)
        for device, of_device in jobs.items():
            codec_for(device).step_alone_all(of_device)
        self.wire.apply_s += time.perf_counter() - start

    def step_rule(self) -> StepRule:
        """Returns the constants of the coming step."""
        wire, node = self._resolved(), self._node
        rank, voters = (0, 1) if wire is None else (wire.rank, wire.world_size)
        if node is not None:
            rank, voters = node.index, len(node.members)
        return StepRule(
            step=self.steps + 1,
            rank=rank,
            world_size=voters,
            aggregation=self.options.aggregation,
            ties=self.options.ties,
            stochastic_rounding=self.options.stochastic_rounding,
            seed=self.options.seed,
        )

    def synchronize_momentum(self) -> None:
        """Replaces every momentum by its mean over the ranks; every rank must call this.

        The state dict of any rank is then that of all: the way to save one file by hand. With
        `local_group` it is the mean over the nodes, and every rank holds the whole of it until the
        next step. Bytes per rank: 8 * (N - 1) / N per element; with `local_group` of this rank's
        share among the N nodes, and inside the node those of `hf_dlion.shards.exchange_shards`.

        Raises:
            Disagreement: On every rank, if they have momenta of different parameters.
        """
        wire, node = self._resolved(), self.join_node()
        if wire is None or wire.world_size == 1:
            self._origin.averaged(self.steps)
            return
        held = self._momenta()
        told = wire.gather_objects((list(held), digest(self._shards.ranges(held))))
        # The ranks of a node hold different shares, those with one place on all nodes the same.
        places = (range(wire.world_size),) if node is None else zip(*node.members, strict=True)
        if len({repr(indices) for indices, _ in told}) > 1 or any(
            len({told[rank][1] for rank in ranks}) > 1 for ranks in places
        ):
            raise Disagreement(
                "ranks hold momenta of different parameters: load the same checkpoint on every rank"
            )
        self._disturb()
        average_over_ranks(list(held.values()), wire if node is None else node.peers)
        if node is not None:
            params, dtype = flat_params(self.param_groups), self.options.momentum_dtype
            self._hold(self._shards.made_whole(held, params, dtype, node.local))
        self._origin.averaged(self.steps)

    def _disturb(self) -> None:
        if self._overlap is not None:
            self._overlap.disturb()

    def state_dict(self) -> dict[str, Any]:
        """Returns torch's state dict with an entry "dlion"; it holds this rank's momentum only.

        Never communicates. `synchronize_momentum()` before it makes all ranks' equal.
        """
        state_dict = super().state_dict()
        state_dict["dlion"] = {
            "version": STATE_VERSION,
            "steps": self.steps,
            "seed": self.options.seed,
            "checkpoint": self.options.checkpoint,
            **self._origin.entry(self.steps, self.rank, self.world_size),
        }
        if self._shards.held:
            state_dict["dlion"]["shard"] = self._shards.entry()
        return state_dict

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads what `state_dict` returned; momenta keep this optimizer's dtype.

        Args:
            state_dict: From `state_dict()`; an empty state needs no entry "dlion".

        Raises:
            ValueError: If it is of another optimizer or version, or does not fit the parameters;
                nothing is changed then.
        """
        found: dict[str, Any] = {}

        def check(_: Optimizer, hooked: dict[str, Any]) -> None:
            own = check_state(hooked, self.param_groups, STATE_VERSION)
            found.update(state_dict=hooked, own=own)

        def restore(_: Optimizer) -> None:
            restore_momentum(self, found["state_dict"], self.options.momentum_dtype)
            self._shards = Shards.loaded((found["own"] or {}).get("shard"))
            if self.options.local_group is None:
                params = flat_params(self.param_groups)
                self._hold(self._shards.filled_up(self._momenta(), params))
            if found["own"] is not None:
                self.steps = found["own"]["steps"]
                if found["state_dict"]["state"]:
                    self._origin.loaded(found["own"])
                self.options = dataclasses.replace(self.options, seed=found["own"]["seed"])

        # As hooks, so that what the user's own hooks return is checked and restored.
        before = self.register_load_state_dict_pre_hook(check)
        after = self.register_load_state_dict_post_hook(restore, prepend=True)
        try:
            super().load_state_dict(dict(state_dict))
        finally:
            before.remove()
            after.remove()
        self._disturb()
        # Accelerate loads a state whenever it prepares: a new DDP wrapper may be at hand.
        comm_hook.watch(self)

    def __getstate__(self) -> dict[str, Any]:
        """Returns what pickle and deepcopy carry: never the process group."""
        return {
            **super().__getstate__(),
            "options": self.options,
            "steps": self.steps,
            "_shards": self._shards,
            "_local_group": _plain(self._local_group),
            "_lost_group": self._lost_group
            or self._process_group is not None
            or isinstance(self._local_group, dist.ProcessGroup),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restores a pickled or copied optimizer, or torch's part of a loaded state."""
        super().__setstate__(state)
        if "_presence" not in self.__dict__:
            self._process_group = None
            self._begin()
            self._presence.watch(flat_params(self.param_groups))
            comm_hook.watch(self)


def _plain(local_group: LocalGroup) -> NodeName | int | None:
    """Returns `local_group` as ranks can compare it: of a process group its size."""
    if isinstance(local_group, dist.ProcessGroup):
        return dist.get_world_size(local_group)
    if local_group == dist.GroupMember.NON_GROUP_MEMBER:
        return 2  # Refused on all ranks together, at the first use.
    return cast("NodeName | int | None", local_group)
