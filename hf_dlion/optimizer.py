"""Distributed Lion: the optimizer, whose `step()` is the whole method."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal, overload

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import hf_dlion.ddp as ddp
import hf_dlion.fsdp as fsdp
from hf_dlion.exchange.rule import Average, Majority, Rule
from hf_dlion.options import (
    Aggregation,
    ExchangeName,
    LevelScale,
    Options,
    Selection,
    Ties,
    check_group,
)
from hf_dlion.ranks.agreement import Agreed, Meetings, Report, agree_in_node
from hf_dlion.ranks.equal_ranks import AVERAGED_GRADIENTS, COPIED_MOMENTA, all_ranks_have
from hf_dlion.ranks.header import Kind
from hf_dlion.ranks.replicas import compare_replicas
from hf_dlion.ranks.topology import Topology
from hf_dlion.state import LionState
from hf_dlion.vote import groups
from hf_dlion.vote.full_precision import step_in_full
from hf_dlion.vote.local import Tensors
from hf_dlion.vote.local_steps import LocalSteps, Period
from hf_dlion.vote.momentum_sync import Momentum, average_whole, synchronize
from hf_dlion.vote.update import Turn, plain_lion, step_by_votes


class DistributedLion(LionState):
    r"""Lion with votes instead of averaged gradients (Liu et al. 2024, arXiv 2404.00438, Alg. 1).

    On every rank, with its own gradient g and momentum m, for each element:

    .. code-block:: text

        u = beta1 * m + (1 - beta1) * g
        m = beta2 * m + (1 - beta2) * g
        v = sign(sum over ranks of sign(u))          one bit per rank and element
        p = p * (1 - lr * weight_decay) - lr * v     equal on all ranks, bit for bit

    Start with a third of AdamW's learning rate and three times its weight decay. All ranks must
    call `step()` together.

    Args:
        params: Parameters, named parameters or parameter groups, in the same order on all ranks.
        lr: Learning rate; every step moves an element by at most lr (default: 1e-4).
        betas: Shares of the momentum in the vote and in the next momentum (default: 0.9, 0.99).
        weight_decay: Decoupled weight decay (default: 0).
        process_group: The ranks; None stands for all of them (default).
        replicate: With FSDP2, the ranks that hold the same shards: `mesh["replicate"]`, or its
            process group (default: None).
        bits: Bits of a vote (default: 1). 1 sends the sign of u; 2, 4 and 8 also send how large u
            is, relative to a mean of |u| (see `level_scale`). Of more than 1, only local steps can
            take the average.
        vote_every: Steps in which ranks exchange once (default: 1). Above 1, a rank takes steps of
            its own on its own gradients, and then sends `bits` for how far it moved each element.
            It evaluates and saves common weights, which all ranks have, after `eval()`.
        aggregation: What all ranks apply: "majority", the sign of the sum of the votes, or
            "average", their mean. None stands for "majority", and for "average" with
            `vote_every` above 1 (default).
        ties: What a tied majority does: "alternate" +1 and -1 over elements and steps (default),
            or "zero", which doesn't move and sends a second bit back.
        level_scale: What a vote of 2, 4 or 8 bits is relative to: the mean of |u| in each "word"
            of 64 elements (default), or in the whole "tensor" (Lion Cub).
        exchange: How votes travel: "gather", "two_phase", or "auto", which uses the one that sends
            fewer bytes (default).
        local_group: Ranks that cast one vote together: "node" (as many as LOCAL_WORLD_SIZE says)
            or their number. None: every rank votes (default).
        full_precision: Parameters whose gradients are averaged over the ranks instead of a vote:
            patterns of names (`"*norm*;*bias"`) or a function of name and parameter. None selects
            none (default).
        momentum_sync_every: Number of steps in which the ranks average the selected momenta once,
            an equal part of them in each step; 0 never does (default).
        momentum_sync: Which momenta: "all" (default), "auto" (those that differ most), patterns of
            names, or a function of name and parameter.
        momentum_sync_budget: For "auto", the most bytes that a rank sends for them in a step; None
            stands for one bit per parameter (default).
        momentum_dtype: dtype of the momentum: torch.float32, torch.bfloat16 or torch.float16; None
            uses each parameter's own (default).
        seed: Seed of the stochastic rounding, the same on every rank (default: 0).
        max_abstained_steps: Steps in a row in which a rank may abstain because its gradients hold a
            NaN or an Inf, before all ranks raise (default: 20).
        check_replicas_every: Number of steps after which the ranks compare a hash of all
            parameters; 0 never does (default). Like `momentum_sync_every`, it counts exchanges
            where `vote_every` is above 1.

    Example:
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = DistributedLion(model.named_parameters(), lr=2e-5, weight_decay=0.1)
        >>> model(torch.ones(1, 4)).sum().backward()
        >>> optimizer.step()
        >>> optimizer.steps
        1
    """

    # GradScaler then leaves it to step() what an Inf means, on every rank alike.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        process_group: dist.ProcessGroup | None = None,
        replicate: DeviceMesh | dist.ProcessGroup | None = None,
        bits: int = 1,
        vote_every: int = 1,
        aggregation: Aggregation | None = None,
        ties: Ties = "alternate",
        level_scale: LevelScale = "word",
        exchange: ExchangeName = "auto",
        local_group: Literal["node"] | int | None = None,
        full_precision: Selection | None = None,
        momentum_sync_every: int = 0,
        momentum_sync: Selection = "all",
        momentum_sync_budget: int | None = None,
        momentum_dtype: torch.dtype | None = None,
        seed: int = 0,
        max_abstained_steps: int = 20,
        check_replicas_every: int = 0,
    ) -> None:
        """See the class."""
        given = locals()
        options = Options(**{name: given[name] for name in Options.__dataclass_fields__})
        if isinstance(params, nn.Module):
            raise TypeError(
                "params must be parameters, not a module: use "
                "DistributedLion(model.named_parameters(), ...)"
            )
        self._begin(options, process_group, fsdp.replicate_group(replicate))
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "step": 0}
        check_group(defaults)
        super().__init__(params, defaults)
        ddp.introduce(self)
        if all("param_names" in group for group in self.param_groups):
            # Without names these raise in the first step, because Trainer gives names until then.
            groups.selection(self.param_groups, self.options, "full_precision")
            groups.selection(self.param_groups, self.options, "momentum_sync")

    @property
    def node_group(self) -> dist.ProcessGroup | None:
        """The ranks whose gradients DDP's hook averages; None: every rank votes for itself."""
        if self.options.local_group is None or self._world_size() == 1:
            return None
        node = self._topology().node  # Formed by all ranks at `attach`, also for nodes of one.
        return None if node is None else node.group

    def attach(self, model: nn.Module) -> None:
        """Keeps a DDP wrapper from averaging gradients; every rank must call this.

        With FSDP2, pass the model that `fully_shard` was called on: `step()` then frees gathered
        parameters before it writes. See `hf_dlion.ddp.attach` for what is refused.
        """
        if self.options.local_group is not None and self._world_size() > 1:
            self._topology().form()  # Before what may be refused on one rank alone.
        if fsdp.is_fsdp(model):
            self._fsdp_model = model
        else:
            self._check_wrapper(model)
            ddp.attach(model, self)
        self._compare_again()

    def _compare_again(self) -> None:
        """Has the next step compare weights, which may have changed on a rank."""
        self._attaches += 1
        self._meets_next = True
        if self._meetings is not None:
            self._meetings.compare_again()

    def _check_wrapper(self, model: nn.Module) -> None:
        """Refuses a wrapper that was made amid local steps.

        Raises:
            RuntimeError: If it isn't the attached one: DDP gave all ranks rank 0's own weights.
        """
        other = ddp.attached_wrapper(self) is not getattr(model, "_orig_mod", model)
        if self._local.anchors and not self._local.swapped and other:
            raise RuntimeError(
                "attach() of another DDP wrapper after local steps: DDP gives every rank the own "
                "weights of rank 0. Call optimizer.detach() before you wrap the model, and "
                "optimizer.attach(model) before you load momenta"
            )

    def detach(self) -> None:
        """Lets the attached DDP wrappers average gradients again; call it on every rank.

        With `vote_every` above 1 the model then holds the weights of the last exchange, and what
        this rank was moved since then is lost; `exchange_now` before it keeps that.
        """
        ddp.detach(self)
        self._compare_again()
        if self._local.anchors:
            self._show_anchors()
        self._local = LocalSteps(self.options.bits, exchanges=self._local.exchanges)

    def eval(self) -> None:
        """Puts the weights that all ranks have into the model, to evaluate or save them.

        They are those of the last exchange. Communicates nothing, so ranks may call it by
        themselves. With `vote_every=1` a model always holds them, and this does nothing.
        """
        if self.options.vote_every > 1:
            self._show_anchors()

    def train(self) -> None:
        """Puts this rank's own weights back after `eval`, bit for bit; call it before training."""
        self._show_own()

    @contextlib.contextmanager
    def common_weights(self) -> Iterator[None]:
        """Between `eval` and `train`, whichever of them was called before."""
        swapped = self._local.swapped
        if self.options.vote_every > 1:
            self._show_anchors()
        try:
            yield
        finally:
            if not swapped:
                self._show_own()

    @torch.no_grad()
    def exchange_now(self) -> None:
        """Exchanges what the ranks were moved since the last exchange; every rank must call this.

        Call it before `eval()` where training ends, so that nothing of it is lost. With
        `vote_every=1` there is nothing to exchange. Bytes: those of an exchange, or of a header if
        no rank has moved.

        Raises:
            Disagreement: On every rank, if another rank takes a step, or the ranks differ.
            LostRank: If another rank ended or stalled.
        """
        if self.options.vote_every == 1 or self._world_size() == 1:
            return
        ranks, failure, used = self._topology(), None, Tensors()
        try:
            plan, whole, params = self._flat()
            used = self._used(whole)
            self._local.check(whole, params, plan, self._last_turn())
        except Exception as error:  # The other ranks wait for a header.
            failure = error
        if self._stepped and ranks.node is not None:
            # Not fine: a rank that exchanges in a step describes its gradients no further.
            agree_in_node(ranks.node, Kind.EXCHANGE, False, [])
        agreed = self._meet(Kind.EXCHANGE, failure, used)
        ranks.form()
        if ranks.voters.world_size > 1:
            swapped = self._local.swapped
            self._show_own()
            texts = self._exchange(agreed.moves, ranks)
            if swapped:
                self._show_anchors()
            for text in texts:
                warnings.warn(text, stacklevel=2)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Takes one step, together with all ranks of the process group.

        A rank whose gradients hold a NaN or an Inf abstains and keeps its momentum; if all do,
        nothing changes and the step is not counted (but local steps are). Bytes: see
        `exchange.routes`, and 64 (N - 1) for the header.

        Args:
            closure: Reevaluates the model and returns the loss.

        Returns:
            What the closure returned, or None.

        Raises:
            Disagreement: On every rank, before anything moves, if the ranks differ in what must be
                equal, or one of them failed; that one raises its own error. With local steps, at
                the next exchange.
            LostRank: If another rank ended or stalled.
            RuntimeError: On every rank, if one abstained `max_abstained_steps` times in a row;
                or after `eval()`, without `train()`.
        """
        kind = self._kind()
        loss, failure, tensors, period = None, None, Tensors(), self._local.period
        sent, sent_in_node = self.wire.bytes_sent, self.wire.node_bytes_sent
        several = self._world_size() > 1
        if several:
            # Before anything can fail on one rank alone: with `replicate` it is a meeting, too.
            self._topology()
        try:
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            if not self._stepped:
                self._check_attached()
            tensors = self._collect()
            if self.options.vote_every > 1:
                period = self._next_period(kind)
        except BaseException as error:  # Told to all ranks, which wait for this one.
            if not several:
                raise
            failure = error
        agreed = None
        if kind is Kind.STEP:
            agreed = self._agree(tensors, failure)
            failure = None
        if agreed is None or (self._takes_local_steps() and any(agreed.moves)):
            self._step_locally(kind, tensors, failure, period)
        else:
            self.wire.abstentions += self._abstentions.count(agreed.finite)
            self._abstentions.check()
            if any(agreed.moves):
                self._update(tensors, agreed)
        self.wire.last_bytes_sent = self.wire.bytes_sent - sent
        self.wire.last_node_bytes_sent = self.wire.node_bytes_sent - sent_in_node
        return loss

    def _check_attached(self) -> None:
        """Refuses a step that would be wrong without `attach`.

        Raises:
            RuntimeError: If nodes vote as one, or parameters are sharded, and nothing is attached.
        """
        params = groups.trainable(self.param_groups)
        if self._fsdp_model is None and any(fsdp.is_sharded(p) for p in params):
            raise RuntimeError(
                "call optimizer.attach(model) with the model that fully_shard was called on: "
                "step() must free its gathered parameters before it writes"
            )
        nodes = self.options.local_group not in (None, 1) and self._world_size() > 1
        if nodes and ddp.attached_wrapper(self) is None:
            raise RuntimeError(
                f"local_group={self.options.local_group!r} needs optimizer.attach(ddp_model): its "
                f"hook averages gradients inside each node"
            )

    def _kind(self) -> Kind | None:
        """Returns what this rank does in this step with all others; None in a local step."""
        if self.options.vote_every == 1:
            return Kind.STEP
        if self._local.period.steps + 1 >= self.options.vote_every:
            return Kind.EXCHANGE
        if not self._meets_next:
            self._planned()  # The ranks also meet at a new layout.
        return Kind.STEP if self._meets_next else None

    def _takes_local_steps(self) -> bool:
        """Whether several voters take steps of their own; known after the first meeting."""
        if self.options.vote_every == 1 or self._ranks is None:
            return False
        return self._ranks.voters.world_size > 1

    def _agree(self, tensors: Tensors, failure: BaseException | None) -> Agreed:
        """Exchanges headers with all ranks; raises on all of them if they don't agree."""
        if self._world_size() == 1:
            return Agreed([tensors.finite], [tensors.present])
        ranks = self._topology()
        agreed = self._meet(Kind.STEP, failure, tensors)
        if not self._stepped:
            ranks.form()  # On all ranks together, since their options are equal.
        voter_of_rank = ranks.voter_of_rank
        return agreed if voter_of_rank is None else agreed.by_voter(voter_of_rank)

    def _update(self, tensors: Tensors, agreed: Agreed) -> None:
        """Votes, hears the verdict and moves, then does what is due after this step."""
        plan, ranks, turn = self._plan, self._ranks, self._turn()
        assert plan is not None
        suspicions = [] if ranks is None else self._suspicions(tensors, ranks)
        tensors.abstain(agreed.finite[turn.voter], agreed.present[turn.voter])
        params = [p if own else None for p, own in zip(tensors.params, agreed.moves, strict=True)]
        fsdp.reshard(self._fsdp_model)
        if ranks is None or ranks.voters.world_size == 1:
            for message in [*plan.messages, *plan.full]:
                plain_lion(message, params, tensors.grads, tensors.momenta, turn)
        else:
            step_by_votes(
                plan.messages,
                params,
                tensors.grads,
                tensors.momenta,
                turn,
                self._rule(ranks),
                ranks,
            )
            if plan.full:
                whole = groups.trainable(self.param_groups)
                momenta = [
                    self._flat_momentum(p) if k in plan.full_set else None
                    for k, p in enumerate(whole)
                ]
                step_in_full(plan, params, tensors.grads, momenta, agreed, ranks.voters, turn)
        for group in self.param_groups:
            group["step"] = turn.step
        self._stepped = True
        if ranks is not None:
            self._after(turn.step, ranks)
        for text in suspicions:  # Last, because a warning may be an error, and ranks would wait.
            warnings.warn(text, stacklevel=4)

    def _next_period(self, kind: Kind | None) -> Period:
        """Returns the period with this step.

        Raises:
            RuntimeError: If `eval()` was called; if weights were changed as local steps can't
                follow; or, where all ranks meet, if gradients were not finite for too long.
        """
        if self._local.swapped:
            raise RuntimeError(
                "step() after optimizer.eval() or in common_weights(), which put common weights "
                "into the model: call optimizer.train() before you train"
            )
        plan, whole, params = self._flat()
        self._local.check(whole, params, plan, self._last_turn())
        if kind is not None:  # In a local step nobody would hear of it.
            self._abstentions.check()
        return self._local.period.and_a_step(self.param_groups)

    def _step_locally(
        self, kind: Kind | None, tensors: Tensors, failure: BaseException | None, period: Period
    ) -> None:
        """Takes a step of this rank's own, and exchanges if it is time."""
        ranks = self._topology()
        finite, present = tensors.finite, tensors.present
        if ranks.node is not None:
            fine = finite and failure is None
            finite, present = agree_in_node(ranks.node, kind or Kind.STEP, fine, present)
        tensors.abstain(finite, present)
        used_anywhere: list[bool] = []
        if kind is Kind.EXCHANGE:
            used = self._used(groups.trainable(self.param_groups), tensors)
            used_anywhere = self._meet(kind, failure, used, period).moves
        elif failure is not None:
            raise failure
        everyone = range(ranks.everyone.world_size)
        own = [tensors.finite or rank != ranks.everyone.rank for rank in everyone]
        self.wire.abstentions += self._abstentions.count(own)
        texts = [] if kind is None else self._suspicions(tensors, ranks)
        plan, whole, _ = self._flat()
        turn, now = self._turn(), time.perf_counter()
        self._local.step(whole, tensors, plan, turn)
        self.wire.add("apply_s", now)
        self._local.period = period
        for group in self.param_groups:
            group["step"] = turn.step
        self._stepped, self._meets_next = True, False
        if used_anywhere:
            texts += self._exchange(used_anywhere, ranks)
        for text in texts:
            warnings.warn(text, stacklevel=4)

    def _exchange(self, used_anywhere: Sequence[bool], ranks: Topology) -> list[str]:
        """Exchanges what the ranks were moved; returns warnings."""
        if not any(used_anywhere):
            self._local.period = Period()
            return []
        plan, whole, params = self._flat()
        lost = self._local.exchange(whole, params, plan, used_anywhere, self._last_turn(), ranks)
        self._after(self._local.exchanges, ranks)
        return [
            f"the weights of {plan.lines[k][0]!r} were not finite on rank {ranks.everyone.rank}, "
            f"which continues with those of the last exchange"
            for k in lost
        ]

    def _used(self, whole: Sequence[Tensor], tensors: Tensors | None = None) -> Tensors:
        """Returns which parameters this rank used in this period, and uses in this step."""
        grads = [None] * len(whole) if tensors is None else tensors.grads
        pairs = zip(whole, grads, strict=False)
        return Tensors(present=[p in self._local.used or g is not None for p, g in pairs])

    def _show_anchors(self) -> None:
        """Puts anchors into the model."""
        if not self._local.swapped:
            plan, whole, params = self._flat()
            self._local.check(whole, params, plan, self._last_turn())
            with torch.no_grad():
                self._local.show_anchors(whole, params)

    def _show_own(self) -> None:
        """Puts this rank's own weights into the model."""
        if self._local.swapped:
            plan, whole, params = self._flat()
            with torch.no_grad():
                self._local.show_own(whole, params, plan, self._last_turn())

    def _continue_from(self, local: LocalSteps) -> None:
        """Takes local steps up where they were saved; the model holds the weights of all ranks.

        Args:
            local: As after `eval`, with own weights in the place of anchors.
        """
        swapped = self._local.swapped
        self._local = local
        if not swapped:
            self._show_own()

    def _after(self, count: int, ranks: Topology) -> None:
        """Averages the momenta that are due, and compares replicas if it is their turn.

        Args:
            count: Number of the step, or of the exchange with local steps.
            ranks: Who is where.
        """
        if self.options.momentum_sync_every and ranks.voters.world_size > 1:
            chosen = groups.selection(self.param_groups, self.options, "momentum_sync")
            full = groups.selection(self.param_groups, self.options, "full_precision")
            momenta = [
                Momentum(self._flat_momentum(p), self.state[p])
                for k, (_, p) in enumerate(groups.named(self.param_groups))
                if p.requires_grad and chosen[k] and not full[k]
            ]
            synchronize(momenta, self.options, ranks, count)
        every = self.options.check_replicas_every
        if every and count % every == 0:
            compare_replicas(self._named(), ranks.everyone, self.steps, ranks.alike)

    def synchronize_momentum(self) -> None:
        """Replaces every momentum by its mean over the voters; every rank must call this.

        The state dict of any rank is then that of all. Bytes per rank: 8 (N - 1) / N an element.
        """
        if self._world_size() > 1:
            momenta = [self._flat_momentum(p) for p in groups.trainable(self.param_groups)]
            average_whole(momenta, self._topology().voters)

    def _suspicions(self, tensors: Tensors, ranks: Topology) -> list[str]:
        """Returns what rank 0 warns of: equal gradients at first, equal momenta after a load."""
        found = []
        if not self._stepped:
            grads = [grad for grad in tensors.grads if grad is not None]
            if all_ranks_have(grads, ranks.voters, "hashes of gradients"):
                found.append(AVERAGED_GRADIENTS)
        if self._loads != self._compared_loads:
            self._compared_loads = self._loads
            momenta = [
                self._flat_momentum(p)
                for p in groups.trainable(self.param_groups)
                if "exp_avg" in self.state.get(p, {})
            ]
            if all_ranks_have(momenta, ranks.voters, "hashes of momenta"):
                found.append(COPIED_MOMENTA)
        return found if ranks.everyone.rank == 0 else []

    def _topology(self) -> Topology:
        """Returns who meets whom. With `replicate` the first call is a meeting of all ranks."""
        if self._ranks is None:
            self._ranks = Topology(
                self.process_group,
                self.options.local_group,
                self.wire,
                replicate=self._replicate,
                device=groups.named(self.param_groups)[0][1].device,
            )
            self._meetings = Meetings(self._ranks.everyone, self._ranks.alike)
        return self._ranks

    def meet(self, kind: Kind, failure: BaseException | None) -> Topology | None:
        """Lets all ranks find that they save or load together, or raise together.

        Every rank must call this, also a rank where something failed. Bytes: `Meetings.meet`.

        Args:
            kind: What the ranks do.
            failure: What failed on this rank, or None.

        Returns:
            Who is where; None for one rank alone.

        Raises:
            Disagreement: On every rank, if the ranks differ, or something failed on another rank.
            BaseException: `failure`.
        """
        if self._world_size() == 1:
            if failure is not None:
                raise failure
            return None
        ranks = self._topology()
        if failure is None:
            try:
                self._planned()
            except Exception as error:
                failure = error
        self._meet(kind, failure, Tensors())
        ranks.form()
        return ranks

    def _meet(
        self,
        kind: Kind,
        failure: BaseException | None,
        tensors: Tensors,
        period: Period | None = None,
    ) -> Agreed:
        assert self._meetings is not None
        # After a load, momenta are compared: if some ranks didn't load, all must raise before it.
        options: dict[str, object] = {
            **self._compared,
            "calls of load_state_dict": self._loads,
            "calls of attach and detach": self._attaches,
        }
        if self.options.vote_every > 1:
            period = period or self._local.period
            options["exchanges"] = self._local.exchanges
            options["steps since the last exchange"] = period.steps
            options["lr, betas and weight decay since the last exchange"] = period.history
        hyperparameters: list[dict[str, object]] = []
        try:
            hyperparameters = groups.hyperparameters(self.param_groups)
            if self.options.momentum_sync == "auto":
                options["divergences of momenta"] = list(self.momentum_divergence().values())
        except Exception as error:  # The other ranks wait for a header.
            failure = failure or error
        report = Report(
            kind=kind,
            step=self.steps,
            finite=tensors.finite,
            failure=failure,
            options=options,
            groups=hyperparameters,
            layout=self._plan.lines if self._plan is not None else [],
            present=tensors.present,
            values=self._hashes,
        )
        return self._meetings.meet(report)

    def _rule(self, ranks: Topology) -> Rule:
        if self.options.aggregation == "average":
            return Average(ranks.voters.world_size, self.options.bits)
        return Majority(self.options.ties)

    def _turn(self) -> Turn:
        return Turn(
            step=self.steps + 1,
            voter=0 if self._ranks is None else self._ranks.voter,
            seed=self.options.seed,
            bits=self.options.bits,
            level_scale=self.options.level_scale,
            exchange=self.options.exchange,
            groups=self.param_groups,
            scratch=self._scratch,
        )

    def _last_turn(self) -> Turn:
        return replace(self._turn(), step=self.steps)
