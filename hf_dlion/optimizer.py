"""`DistributedLion`: a torch optimizer whose ranks exchange signs instead of gradients."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast, overload

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from hf_dlion.backward import search as comm_hook
from hf_dlion.backward.flight import Flight
from hf_dlion.backward.overlap import Overlap
from hf_dlion.codec.rule import StepRule
from hf_dlion.exchange import LostRank, Wire, WireStats
from hf_dlion.exchange.mean import average_over_ranks
from hf_dlion.momentum.group_entry import with_entry_in_groups
from hf_dlion.momentum.loading import checked_loading
from hf_dlion.momentum.origin import MomentumOrigin
from hf_dlion.momentum.shares import Range, Shards
from hf_dlion.momentum.slices import Held
from hf_dlion.momentum.state_dict import check_distinct, check_trainable, restore_momentum
from hf_dlion.momentum.store import Momenta
from hf_dlion.momentum.sync import MomentumSync
from hf_dlion.options import (
    Aggregation,
    CheckpointMode,
    ExchangeName,
    LevelScale,
    NodeName,
    OnDivergence,
    Options,
    Ties,
    check_group,
)
from hf_dlion.options.naming import with_names
from hf_dlion.options.routes import Routes, routes_by_name
from hf_dlion.options.selection import Selection
from hf_dlion.ranks.abstention import Abstentions
from hf_dlion.ranks.group import Ranks, plain
from hf_dlion.ranks.groups import details_of, flat_params, names_of, tensor_rules, trainable
from hf_dlion.ranks.header import Disagreement, Header, votes_on
from hf_dlion.ranks.join import JoinableOptimizer
from hf_dlion.ranks.node import Node
from hf_dlion.ranks.replicas import check_replicas
from hf_dlion.step.apply import ballot_of, move
from hf_dlion.step.full_precision import momenta_differ
from hf_dlion.step.message import Message
from hf_dlion.step.node_gradients import average_gradients
from hf_dlion.step.node_plan import make_plan
from hf_dlion.step.own_header import Scaling, agreed, completed, own_header
from hf_dlion.step.plan import Plan
from hf_dlion.step.presence import Presence

STATE_VERSION = 1

Params = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]


class DistributedLion(Optimizer, JoinableOptimizer):
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
    Ranks with different numbers of batches train inside `torch.distributed.algorithms.Join`, given
    the optimizer and not the model.

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
        bits: Of a vote, per element. With 2, 4 or 8 a rank sends how large u is, too: relative to
            a, a mean of |u| which is not sent (see `level_scale`). With 4 and 8 bits that is
            q = round(u / a * L / 2), cut to -L and L (7 or 127); with 2 bits -3, -1, 1 or 3, for
            |u| above 1.5 a or not. The verdict is the sign of the sum of the q, and a sum of 0 is
            a tie: with 4 and 8 bits also where all ranks round a small u to 0.
            Two-phase sends (bits + 1) (N - 1) / N bits per parameter. Not with
            aggregation="average".
        level_scale: With 2, 4 or 8 bits, what a is the mean over: each "word" of 64 elements, those
            of them that are not zero, or the whole "tensor", its rows that are not zero (Lion
            Cub's). Rows that are small beside others of their tensor, such as those of rare tokens,
            would all have the lowest level with the latter, which also reads gradients and momenta
            twice, and does not go with `local_group` yet.
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
        momentum_sync_every: In every so many steps the ranks average the selected momenta once, an
            equal part of them in each step (Lion Cub, arXiv 2411.16462); 0 never does.
        momentum_sync: Which momenta: "all", "auto" (those that differ most between the ranks, as
            many as `momentum_sync_budget` allows), patterns of parameter names ("*.bias;*norm*" or
            a sequence; as `fnmatch`), or a function of name and parameter (one that can be
            imported, if the optimizer is to be pickled).
        momentum_sync_dtype: How they travel: torch.bfloat16 or torch.float32.
        momentum_sync_budget: For "auto": the most bytes that a rank sends for them in a step; None
            stands for one bit per parameter.
        full_precision: Parameters whose gradients are averaged over the ranks instead of a vote, by
            name as for `momentum_sync`; a parameter group with "exchange": "full" is the same.
        warmup_full_steps: So many steps at the start are plain Lion on the mean gradient.

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
        bits: int = 1,
        level_scale: LevelScale = "word",
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
        momentum_sync_every: int = 0,
        momentum_sync: Selection = "all",
        momentum_sync_dtype: torch.dtype = torch.bfloat16,
        momentum_sync_budget: int | None = None,
        full_precision: Selection | None = None,
        warmup_full_steps: int = 0,
    ) -> None:
        """See the class."""
        self.options = Options(
            aggregation=aggregation,
            ties=ties,
            bits=bits,
            level_scale=level_scale,
            exchange=exchange,
            overlap=overlap,
            stochastic_rounding=stochastic_rounding,
            momentum_dtype=momentum_dtype,
            seed=seed,
            max_abstained_steps=max_abstained_steps,
            checkpoint=checkpoint,
            local_group=plain(local_group),
            check_replicas_every=check_replicas_every,
            on_divergence=on_divergence,
            momentum_sync_every=momentum_sync_every,
            momentum_sync=momentum_sync,
            momentum_sync_dtype=momentum_sync_dtype,
            momentum_sync_budget=momentum_sync_budget,
            full_precision=full_precision,
            warmup_full_steps=warmup_full_steps,
        )
        self._ranks = Ranks(process_group, local_group, max_abstained_steps)
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay}
        check_group(defaults)
        self._shards = Shards()
        self._sync = MomentumSync()
        self._routes = Routes()
        self.steps = 0
        self._begin()
        super().__init__(cast(Any, with_names(params)), defaults)
        routes_by_name(self.options, self.param_groups, complete=True)
        comm_hook.watch(self)

    def _begin(self) -> None:
        """Makes what belongs to this process and is neither copied nor saved."""
        self.leave_join()
        self.wire = WireStats()
        self._sent_inside = 0
        self._origin = MomentumOrigin()
        self._plan: Plan | None = None
        self._common: frozenset[int] = frozenset()
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

    @property
    def abstentions(self) -> Abstentions:
        """Who abstained from whole steps, by rank, or by node where nodes vote as one."""
        return self._ranks.abstentions

    def group(self) -> dist.ProcessGroup | None:
        """Returns the process group in use, or None where torch.distributed is not initialised."""
        wire = self._resolved()
        return None if wire is None else wire.group

    @property
    def join_device(self) -> torch.device:
        """Where the number lies in which `Join` counts the ranks that still have data."""
        wire = self._resolved()
        return torch.device("cpu") if wire is None else wire.control_device

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

    def meet_to_save(self, failure: Exception | None = None) -> None:
        """Meets all ranks in the course of a save; every rank must call this.

        It is a header, as a step begins with, so that a rank that takes a step meanwhile, because
        it was not told to save, is found. Bytes per rank: `ranks.header.header_wire_bytes`.

        Args:
            failure: What went wrong on this rank.

        Raises:
            Disagreement: On every rank, if something failed on one, or they do not all save after
                the same step.
        """
        wire = self._others()
        if wire is not None:
            groups, options = self.param_groups, self.options
            self._ranks.meet_to_save(wire, groups, options, self.steps, failure)

    def _resolved(self) -> Wire | None:
        """Returns the wire, looked up late: an optimizer may be built before the process group."""
        wire, new = self._ranks.look_up(self.param_groups, self.wire)
        if new:
            if self._overlap is not None:
                self._overlap.reset()
            comm_hook.watch(self)
        return wire

    def _others(self) -> Wire | None:
        """Returns the wire, or None where this rank is alone."""
        wire = self._resolved()
        return None if wire is None or wire.world_size == 1 else wire

    def join_node(self) -> Node | None:
        """Returns this rank's node, or None where every rank votes.

        Every rank must call this at the same point of its program. The first time, with
        `local_group`, the ranks agree on who shares a node and make process groups; later nothing
        is sent.

        Raises:
            Disagreement: On every rank, if the ranks cannot be divided into equal nodes.
        """
        wire = self._resolved()
        return self._ranks.join(wire, self.param_groups, self.options, self.steps, self.wire)

    @property
    def node(self) -> Node | None:
        """Who votes together with this rank, as far as `join_node` has found out."""
        return self._ranks.node

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
            ValueError: If a value of the group is out of its range or would be ignored, or it holds
                a parameter twice.
            TypeError: If one has the wrong type, or a parameter's dtype is not floating.
            NotImplementedError: If a parameter is sharded.
        """
        check_group({**self.defaults, **param_group})
        super().add_param_group(param_group)
        try:
            check_distinct(self.param_groups[-1]["params"])
            for param in self.param_groups[-1]["params"]:
                check_trainable(param)
            self._routes = routes_by_name(self.options, self.param_groups, complete=False)
            self._routes.of_step(self.param_groups, self.options, self.steps + 1, ())
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

        Bytes per rank: `ranks.header.header_wire_bytes` and, for each message, what the
        exchange's `wire_bytes` says; with `check_replicas_every=k`, in every k-th step those of
        `ranks.replicas.check_replicas`; with `momentum_sync_every` those of
        `momentum.sync.MomentumSync.after_step`; for gradients that are averaged those of
        `step.full_precision.step_in_full`. A rank whose gradients hold a NaN or an Inf abstains
        and keeps its momentum; if all do, nothing changes and the step is not counted.

        Args:
            closure: Reevaluates the model and returns the loss; optional.

        Returns:
            What the closure returned, or None.

        Raises:
            Disagreement: On every rank, if the ranks differ in what must be equal, and on the
                others if one failed; that one raises what failed.
            LostRank: If another rank ended or stalled.
            RuntimeError: On every rank, if one abstained `max_abstained_steps` times in a row.
        """
        Join.notify_join_context(self)
        wire, steps_before, plan_before = self._others(), self.steps, self._plan
        sent, sent_inside = self.wire.bytes_sent, self._sent_inside
        loss: float | None = None
        failure: Exception | None = None
        try:
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            node = self.join_node()
            header = self._header(wire, node)
        except (Disagreement, LostRank):
            raise  # On every rank that is left.
        except Exception as error:
            if wire is None:
                raise
            failure, header, node = error, Header.of_failure(self.steps), self.node
        flight = None
        if self._overlap is not None and wire is not None:
            header, flight, failure = completed(
                header, failure, self.param_groups, self._plan, self._overlap
            )
            sent = sent if flight is None else flight.bytes_before
        try:
            headers = [header] if wire is None else self._agreed(header, wire, failure, flight)
        except Exception:
            # This rank alone may have made another; the step can be taken once it is mended.
            self._plan = plan_before
            raise
        if flight is not None and any(h.stale or not h.finite for h in headers):
            flight.discard()
            flight = None
        voice = self.rank
        if node is not None:
            headers, voice = node.heard(headers), node.index
        finite = [other.finite for other in headers]
        abstained = self._ranks.abstentions.note(finite, voice, tells=self.rank == 0)
        self.wire.abstentions += abstained
        votes = votes_on(headers)
        if bool(votes.any()):
            if wire is not None and any(other.uncommon for other in headers):
                self._make_common(wire)
            self._move(wire, node, votes, headers[voice], header.present, flight)
            self.steps += 1
        elif flight is not None:
            flight.discard()
        self._end_step(headers, wire, node, moved=self.steps > steps_before)
        self.wire.last_bytes_sent = self.wire.bytes_sent - sent
        self.wire.last_node_bytes_sent = self.wire.node_bytes_sent - sent_inside
        self._sent_inside = self.wire.node_bytes_sent
        return loss

    def _header(self, wire: Wire | None, node: Node | None) -> Header:
        """Returns what this rank says of itself, after all that can fail on it alone."""
        for group in self.param_groups:
            check_group(group)
        momenta = self._momenta()
        if node is None:
            momenta.fill_up()
        self._shards.warn_of_gap()
        params = trainable(self.param_groups)
        indices = [index for index, _ in params]
        routes = self._routes.of_step(self.param_groups, self.options, self.steps + 1, indices)
        if self._plan is None or not self._plan.fits(params, wire, routes):
            self._plan = None
            self._plan = make_plan(params, wire, self.options, node, routes=routes)
        scaling = Scaling(getattr(self, "grad_scale", None), getattr(self, "found_inf", None))
        return own_header(
            momenta,
            self.options,
            self.steps,
            self._plan,
            self._presence,
            node,
            self._overlap,
            scaling,
            self._common,
            self._sync,
        )

    def _agreed(
        self, mine: Header, wire: Wire, failure: Exception | None, flight: Flight | None
    ) -> list[Header]:
        """Returns all ranks' headers once they fit; a rank that failed raises its own error."""
        routes = None if self._plan is None else self._plan.routes
        details = details_of(self.param_groups, self.options, failure, routes, self._sync.agreed())
        headers = agreed(mine, wire, self._ranks.agreement, details, failure, flight)
        self._origin.warn_if_foreign(wire.rank)
        return headers

    def _move(
        self,
        wire: Wire | None,
        node: Node | None,
        votes: Tensor,
        mine: Header,
        present: Tensor,
        flight: Flight | None,
    ) -> None:
        """Exchanges votes and applies the verdict to the parameters that any rank votes on.

        Args:
            wire: The process group, or None where this rank is alone.
            node: Who votes together with this rank.
            votes: int64, shape (P,), how many ranks vote on each parameter.
            mine: What this rank, or its node, said of itself.
            present: bool, shape (P,), the parameters that this rank itself has.
            flight: The messages that left already, or None.
        """
        assert self._plan is not None, "the header made the plan"
        params, momenta = trainable(self.param_groups), self._momenta()
        if node is not None:
            momenta.share_out(self._plan.owners, node, mine.displaced)
            if mine.unaveraged and mine.finite:
                members = [param for _, param in params]
                flags = self._presence.unaveraged(members, present.tolist())
                average_gradients(members, torch.tensor(flags), node)
        ballot = ballot_of(momenta, self._plan, votes, mine, self.step_rule())
        move(ballot, self._plan, params, wire, flight, self.wire)

    def _make_common(self, wire: Wire) -> None:
        """Gives all ranks one momentum of the parameters whose gradients are averaged.

        What was voted on before, or loaded, may differ. Every rank must call this. Bytes per rank:
        8 * (N - 1), and if momenta differ those of `synchronize_momentum` for them.
        """
        assert self._plan is not None, "the header made the plan"
        full, momenta = self._plan.routes.full, self._momenta()
        # Also of parameters that this rank did not use: all must send the same.
        held = {
            index: momenta.of(param, index, {})
            for index, param in trainable(self.param_groups)
            if index in full
        }
        if momenta_differ(held, wire):
            average_over_ranks(list(held.values()), wire)
        self._common = full

    def _end_step(
        self, headers: Sequence[Header], wire: Wire | None, node: Node | None, moved: bool
    ) -> None:
        """Makes ready for the next step, and looks after momenta and replicas."""
        comm_hook.after_step(self, self._presence.seen(flat_params(self.param_groups)))
        self._presence.clear()
        if wire is not None and moved:
            self._synchronize_some(wire if node is None else node.peers)
        # Last but for comparisons: where it fails the step has been taken, on every rank.
        if self._overlap is not None and wire is not None:
            self._prepare(self._overlap, headers, wire)
        if wire is not None and moved:
            self._check_replicas(wire, node)

    def _prepare(self, overlap: Overlap, headers: Sequence[Header], wire: Wire) -> None:
        """Makes the next step's messages, and gives momenta to the ranks that vote on them."""
        assert self._plan is not None, "the header made the plan"
        before, node = self._plan, self.node
        self._plan = overlap.prepare(headers, before, trainable(self.param_groups), wire)
        if node is not None and self._plan is not before:
            self._momenta().share_out(self._plan.owners, node, displaced=True)

    def _synchronize_some(self, wire: Wire) -> None:
        """Averages the momenta that are due; what is averaged in full has nothing to average."""
        assert self._plan is not None, "the header made the plan"
        plan, momenta = self._plan, self._momenta()
        self._common &= plan.routes.full
        if not plan.routes.synced or wire.world_size == 1:
            return
        rule = dataclasses.replace(self.step_rule(), step=self.steps)
        held = [
            Held(index, momenta.of(param, index, plan.owned), plan.owned.get(index, (0, 0))[0])
            for index, param in trainable(self.param_groups)
            if index in plan.routes.synced
        ]
        rules = tensor_rules(self.param_groups, {piece.index for piece in held}, rule)
        self._sync.after_step(held, rules, self.steps, self.options, wire)

    @property
    def momentum_divergence(self) -> dict[str, float]:
        """How far each parameter's momenta differ between ranks, by name; `momentum_sync="auto"`.

        As last measured, the variance across the ranks over the mean square: 0 where they are
        equal, 1 - 1/N where they have nothing in common. Empty before the first measurement.
        """
        names = names_of(self.param_groups)
        return {names[index]: value for index, value in self._sync.divergence.items()}

    def momentum_report(self) -> str:
        """Returns a table of the momenta that differ most, and how often each was synchronised."""
        return self._sync.report(names_of(self.param_groups))

    def _check_replicas(self, wire: Wire, node: Node | None) -> None:
        """Compares the ranks' parameters when it is time to."""
        every = self.options.check_replicas_every
        if every == 0 or self.steps % every:
            return
        near = () if node is None else node.members[node.index]
        check_replicas(self.param_groups, wire, self.steps, self.options.on_divergence, near)

    def stretch_of(self, param: Tensor, index: int, wanted: Range) -> Tensor | None:
        """Returns a stretch of a parameter's momentum, or None if this rank does not hold it."""
        owned = {} if self._plan is None else self._plan.owned
        momentum = self._momenta().of(param, index, owned)
        return self._shards.stretch(index, momentum, wanted)

    def _momenta(self) -> Momenta:
        dtype = self.options.momentum_dtype
        return Momenta(self.state, self.param_groups, self._shards, dtype)

    def step_rule(self) -> StepRule:
        """Returns the constants of the coming step."""
        wire, node = self._resolved(), self.node
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
            # Of the messages that are there, should somebody have changed the options since.
            bits=self.options.bits if self._plan is None else self._plan.bits,
            level_scale=self.options.level_scale,
        )

    def synchronize_momentum(self) -> None:
        """Replaces every momentum by its mean over the ranks; every rank must call this.

        The state dict of any rank is then that of all: the way to save one file by hand. With
        `local_group` it is the mean over the nodes, and every rank holds the whole of it until the
        next step. Bytes per rank: 8 * (N - 1) / N per element; with `local_group` of this rank's
        share among the N nodes, and inside the node those of `momentum.shares.exchange_shards`.

        Raises:
            Disagreement: On every rank, if they have momenta of different parameters.
        """
        wire, node = self._others(), self.join_node()
        if wire is None:
            self._origin.averaged(self.steps)
            return
        momenta = self._momenta()
        momenta.check_alike(wire, node)
        self._disturb()
        momenta.average(wire, node)
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
        if self.options.momentum_sync_every and self.options.momentum_sync == "auto":
            count = len(flat_params(self.param_groups))
            state_dict["dlion"]["divergence"] = self._sync.entry(count)
        if self._shards.held:
            state_dict["dlion"]["shard"] = self._shards.entry()
        return with_entry_in_groups(state_dict)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads what `state_dict` returned; momenta keep this optimizer's dtype.

        Args:
            state_dict: From `state_dict()`; an empty state needs no entry "dlion".

        Raises:
            ValueError: If it is of another optimizer or version, or does not fit the parameters;
                nothing is changed then.
        """
        with checked_loading(self, STATE_VERSION, self._restore):
            super().load_state_dict(dict(state_dict))
        self._disturb()
        # Accelerate loads a state whenever it prepares: a new DDP wrapper may be at hand.
        comm_hook.watch(self)

    def _restore(self, state_dict: Mapping[str, Any], own: Mapping[str, Any] | None) -> None:
        """Takes what torch's loading leaves out: dtypes, stretches, and our entry."""
        restore_momentum(self, state_dict, self.options.momentum_dtype)
        self._shards = Shards.loaded((own or {}).get("shard"))
        self._sync = MomentumSync.loaded((own or {}).get("divergence"))
        self._common = frozenset()
        if self.options.local_group is None:
            self._momenta().fill_up()
        if own is not None:
            self.steps = own["steps"]
            if state_dict["state"]:
                self._origin.loaded(own)
            self.options = dataclasses.replace(self.options, seed=own["seed"])

    def __getstate__(self) -> dict[str, Any]:
        """Returns what pickle and deepcopy carry: never the process group."""
        return {
            **super().__getstate__(),
            "options": self.options,
            "steps": self.steps,
            "_shards": self._shards,
            "_sync": self._sync,
            "_routes": self._routes,
            "_ranks": self._ranks.carried(),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restores a pickled or copied optimizer, or torch's part of a loaded state."""
        super().__setstate__(state)
        if "_presence" not in self.__dict__:
            self._begin()
            self._presence.watch(flat_params(self.param_groups))
            comm_hook.watch(self)
