"""The Distributed Lion optimizer. `DistributedLion.step` shows the order of everything."""

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
from torch._compile import _disable_dynamo
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
from hf_dlion.ranks.agreement import Agreed
from hf_dlion.ranks.meeting import Kind
from hf_dlion.ranks.replicas import (
    AVERAGED_GRADIENTS,
    CHANGED_PARAMETERS,
    COPIED_MOMENTA,
    all_ranks_have,
    compare_parameters,
)
from hf_dlion.ranks.topology import Topology
from hf_dlion.state import LionState, Mine
from hf_dlion.vote.full_precision import step_in_full
from hf_dlion.vote.local_steps import LocalSteps, Period
from hf_dlion.vote.momentum_sync import Momentum, average_whole, synchronize
from hf_dlion.vote.tensors import Trainable
from hf_dlion.vote.update import Turn, plain_lion, step_by_votes


class DistributedLion(LionState):
    r"""Lion that exchanges 1-bit votes between ranks instead of gradients.

    Implements Distributed Lion with majority vote (Liu et al., NeurIPS 2024, arXiv 2404.00438,
    Algorithm 1) on top of Lion (Chen et al. 2023, arXiv 2302.06675, Algorithm 2). Every rank keeps
    its own momentum m and computes with its own gradient g, for each element:

    .. code-block:: text

        u = beta1 * m + (1 - beta1) * g
        m = beta2 * m + (1 - beta2) * g
        v = sign(sum over ranks of sign(u))          1 bit per element and rank
        p = p * (1 - lr * weight_decay) - lr * v     bitwise equal on all ranks

    To switch from AdamW, start with 1/3 of its learning rate and 3x its weight decay. With
    DistributedDataParallel, call `attach` so DDP stops averaging gradients. All ranks must call
    `step` together.

    Args:
        params: Parameters, named parameters, or parameter groups, in the same order on every rank.
            Groups may set their own `lr`, `betas`, and `weight_decay`. Parameters without names
            get those of the attached model, by which ranks compare them and options select.
        lr: Learning rate, which is how far a step moves an element (default: 1e-4).
        betas: Momentum coefficients (beta1, beta2), of the vote and of the next momentum
            (default: (0.9, 0.99)).
        weight_decay: Decoupled weight decay coefficient (default: 0.0).
        process_group: Process group of the ranks that train one model (default: None, which means
            all ranks).
        replicate: Ranks that hold the same FSDP2 shards, as `mesh["replicate"]` or its process
            group (default: None, which means that the model isn't sharded).
        bits: Bits per vote: 1 sends the sign of u, and 2, 4, or 8 also its size (default: 1).
            Values above 1 need `aggregation="majority"` or `vote_every` above 1.
        vote_every: Number of steps per exchange (default: 1). Above 1, each rank moves its own
            weights by sign(u), and the exchange sends how far each element was moved. Call
            `exchange_now` and `eval` before you evaluate, `eval` before you save, and `train` after
            both.
        aggregation: Rule that turns votes into v: "majority", the sign of their sum, or "average",
            their mean (default: None, which means "majority", and "average" with `vote_every`
            above 1).
        ties: Value of v if the vote is tied: "alternate" applies +1 and -1 in turns over elements
            and steps, and "zero" doesn't move the element, which costs a second bit with
            exchange="two_phase" (default: "alternate").
        level_scale: Scope of the mean of |u| to which votes of 2, 4, or 8 bits are relative: each
            "word" of 64 elements, or the "tensor" as in Lion Cub, Ishikawa et al. 2024, arXiv
            2411.16462 (default: "word").
        exchange: Route of the votes: "gather", "two_phase", or "auto", which chooses the route that
            sends fewer bytes (default: "auto").
        local_group: Ranks that average their gradients and vote as one: their number, or "node"
            for LOCAL_WORLD_SIZE (default: None, which means that every rank votes).
        full_precision: Parameters whose gradients are averaged instead of voted on: patterns of
            names such as `"*norm*;*bias"`, or a function of name and parameter (default: None).
        momentum_sync_every: Number of steps in which the ranks average the selected momenta once,
            an equal slice per step (default: 0, which means never).
        momentum_sync: Momenta that are averaged: "all", "auto" for those that differ most, patterns
            of names, or a function of name and parameter (default: "all").
        momentum_sync_budget: Largest number of bytes that a rank sends per step for
            `momentum_sync="auto"` (default: None, which means 1 bit per parameter).
        momentum_dtype: dtype of the momentum: torch.float32, torch.bfloat16, or torch.float16
            (default: None, which means each parameter's dtype).
        seed: Seed of the stochastic rounding, equal on every rank (default: 0).
        max_abstained_steps: Number of consecutive steps with a NaN or an Inf in a rank's gradients
            after which all ranks raise; until then the rank abstains (default: 20).
        check_replicas_every: Number of steps between comparisons of a hash of all parameters
            (default: 0, which means never). Like `momentum_sync_every`, it counts exchanges if
            `vote_every` is above 1.

    Raises:
        ValueError: If a value isn't allowed, or has no effect with the other options.
        TypeError: If a value has the wrong type, or `params` is a module.
        NotImplementedError: If options don't work together yet.

    Example:
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = DistributedLion(model.named_parameters(), lr=2e-5, weight_decay=0.1)
        >>> model(torch.ones(1, 4)).sum().backward()
        >>> optimizer.step()
        >>> optimizer.steps
        1
    """

    # Makes GradScaler call step() also after an Inf, so every rank takes part in the vote.
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
        arguments = locals()
        options = Options(**{name: arguments[name] for name in Options.__dataclass_fields__})
        if isinstance(params, nn.Module):
            raise TypeError(
                "params must be parameters, not a module: use "
                "DistributedLion(model.named_parameters(), ...)"
            )
        if local_group is not None and replicate is not None:
            raise ValueError(
                "local_group can't be combined with replicate: with FSDP2, the ranks of a replica "
                "already vote as one"
            )
        self._begin(options, process_group, fsdp.replicate_group(replicate))
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "step": 0}
        check_group(defaults)
        super().__init__(params, defaults)
        ddp.introduce(self)
        self._check_selections()

    @property
    def node_group(self) -> dist.ProcessGroup | None:
        """The ranks that average gradients in DDP's hook; None if every rank votes by itself."""
        ranks = self._ranks  # `attach` formed the nodes on all ranks.
        return None if ranks is None or ranks.node is None else ranks.node.group

    def attach(self, model: nn.Module) -> None:
        """Stops a DDP wrapper from averaging gradients; every rank must call this.

        With FSDP2, pass the model that `fully_shard` was called on: `step` then frees gathered
        parameters before it writes. Parameters that were passed without names get those of the
        model.

        Args:
            model: A `DistributedDataParallel` or an FSDP2 model, or what `torch.compile` returns
                for one.

        Raises:
            TypeError: If `model` isn't a DDP wrapper or an FSDP2 model.
            ValueError: If the wrapper has none of the optimizer's parameters, or averages over
                other ranks; or if an option selects by a name that no parameter has.
            RuntimeError: If trainable parameters belong to no optimizer, if the wrapper reduces
                gradients in a way that a hook can't replace, or if it was made during local steps.
        """
        if self.options.local_group is not None and self._world_size() > 1:
            self._topology().form()  # A collective, so it comes before checks that may raise.
        wrapper = ddp.wrapper_in(model)
        self._name_parameters(model if wrapper is None else wrapper.module)
        if (sharded := fsdp.sharded_model(model)) is not None:
            if sharded not in self._fsdp_models:
                self._fsdp_models.append(sharded)
        else:
            self._check_wrapper(model)
            ddp.attach(model, self)
        self._count_attach()

    def _check_wrapper(self, model: nn.Module) -> None:
        """Refuses a wrapper that was made during local steps.

        Raises:
            RuntimeError: If it isn't the attached one, since DDP copied rank 0's own weights.
        """
        is_other = ddp.wrapper_in(model) not in ddp.attached_wrappers(self)
        if self._local.anchors and not self._local.shown and is_other:
            raise RuntimeError(
                "attach() got a DDP wrapper that was made during local steps, so it holds rank 0's "
                "own weights on every rank. Call optimizer.detach() before you wrap the model, and "
                "optimizer.attach(model) before you load momenta"
            )

    def _count_attach(self) -> None:
        """Counts an attach or detach, so the next step compares the ranks and their weights."""
        self._attaches += 1
        self._checked_plan, self._meets_next = None, True
        if self._meetings is not None:
            self._meetings.compare_again()

    def detach(self) -> None:
        """Lets the attached DDP wrappers average gradients again; every rank must call this.

        With `vote_every` above 1, the model then holds the weights of the last exchange. Call
        `exchange_now` first to keep the steps since then.
        """
        ddp.detach(self)
        self._count_attach()
        try:
            if self._local.anchors:
                self._show(own=False)
        finally:
            self._local = LocalSteps(exchanges=self._local.exchanges)

    def eval(self) -> None:
        """Puts the common weights into the model, to evaluate or save it.

        These are the weights of the last exchange, equal on all ranks. The call doesn't
        communicate, so a single rank may make it. Before an evaluation, call `exchange_now` on
        every rank: otherwise the weights lag up to `vote_every` - 1 steps behind, which misleads
        early stopping and plateau schedulers. With `vote_every=1` it has no effect.

        What is written into the model before `train` replaces the common weights and moves this
        rank's own, so write the same values on every rank.
        """
        self._show(own=False)

    def train(self) -> None:
        """Puts this rank's own weights back after `eval`; call it before training.

        They have the same bits as before. Elements that were written since `eval` keep their
        distance from the common weights: if x was replaced by x', p becomes x' - (x - p).
        """
        self._show(own=True)

    @contextlib.contextmanager
    def common_weights(self) -> Iterator[None]:
        """Calls `eval` for the body of a `with` statement, and then restores what the model held.

        Example:
            >>> optimizer = DistributedLion([torch.nn.Parameter(torch.ones(64))])
            >>> with optimizer.common_weights():
            ...     pass  # evaluate the model
        """
        shown = self._local.shown
        self._show(own=False)
        try:
            yield
        finally:
            if not shown:
                self._show(own=True)

    @torch.inference_mode(False)  # Buffers that are made here serve later steps, too.
    @torch.no_grad()
    def exchange_now(self) -> None:
        """Exchanges the local steps since the last exchange; every rank must call this.

        Call it before `eval` in evaluations, so they have all steps, and at the end of training, so
        the last steps aren't lost. The next exchange then comes after `vote_every` steps. With
        `vote_every=1` it has no effect. Bytes: those of an exchange, or of a header if no rank has
        moved.

        Raises:
            Disagreement: On every rank, if another rank takes a step, or the ranks differ.
            LostRank: If another rank ended or stalled.
        """
        if self.options.vote_every == 1 or self._world_size() == 1:
            return
        with self.together(Kind.EXCHANGE) as mine:
            mine.trainable = self._trainable()
            self._local.check(mine.trainable, self._last_turn())
        if self._takes_local_steps():
            shown, texts = self._local.shown, []
            self._show(own=True)
            try:
                texts = self._exchange(self._trainable(), mine.agreed.moves)
            finally:
                if shown:
                    self._show(own=False)
            for text in texts:
                warnings.warn(text, stacklevel=4)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @_disable_dynamo  # As torch's optimizers: NumPy and collectives can't be compiled.
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Takes one step; all ranks of the process group must call this together.

        A rank whose gradients hold a NaN or an Inf abstains and keeps its momentum. If all ranks
        abstain, the step changes nothing and isn't counted. A local step is counted anyway.
        Bytes: 64 (N - 1) for the header, and those of `exchange.routes`.

        Args:
            closure: Function that reevaluates the model and returns the loss (default: None).

        Returns:
            Return value of `closure`, or None.

        Raises:
            Disagreement: On every rank, before anything moves, if the ranks differ in what must be
                equal, or if one failed; that rank raises its own error. With local steps, at the
                next exchange.
            LostRank: If another rank ended or stalled.
            RuntimeError: On every rank, if a rank abstained in `max_abstained_steps` consecutive
                steps; or on this rank, after `eval` without `train`.
        """
        loss, sent, in_node = None, self.wire.bytes_sent, self.wire.node_bytes_sent
        with self.together(Kind.STEP) as mine:
            mine.kind = self._kind()
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            mine.trainable = self._collect()
            self._check_attached(mine.trainable)
            if self.options.vote_every > 1:
                mine.period = self._next_period(mine.kind)
        if self._takes_local_steps() and (mine.kind is not Kind.STEP or any(mine.agreed.moves)):
            texts = self._step_locally(mine)
        else:
            texts = self._step_together(mine.trainable, mine.agreed)
        self.wire.last_bytes_sent = self.wire.bytes_sent - sent
        self.wire.last_node_bytes_sent = self.wire.node_bytes_sent - in_node
        for text in texts:  # Last, because a warning may be an error, and ranks would wait.
            warnings.warn(text, stacklevel=6)  # The caller, beyond the wrappers of torch.
        return loss

    def _check_attached(self, trainable: Trainable) -> None:
        """Refuses a step that would be wrong without `attach`; looks once at each layout.

        Raises:
            RuntimeError: If parameters are sharded, or nodes vote, and no model was attached; or if
                no hook averages a parameter's gradient in the node.
        """
        if self._checked_plan is trainable.plan:
            return
        attached = {p for model in self._fsdp_models for p in model.parameters()}
        for name, param in self._named():
            if param.requires_grad and fsdp.is_sharded(param) and param not in attached:
                raise RuntimeError(
                    f"{name!r} belongs to no attached model: call optimizer.attach(model) with "
                    f"each model that fully_shard was called on, because step() must free its "
                    f"gathered parameters before it writes"
                )
        if self.options.local_group not in (None, 1) and self._world_size() > 1:
            self._check_hooks()
        # In its first backward, a hook notes which gradients it averages.
        self._checked_plan = trainable.plan if any(trainable.present) else None

    def _check_hooks(self) -> None:
        """Refuses a step of nodes whose gradients no hook averages; see `_check_attached`."""
        if not ddp.attached_wrappers(self):
            raise RuntimeError(
                f"local_group={self.options.local_group!r} needs optimizer.attach(ddp_model), "
                f"whose hook averages gradients inside each node"
            )
        if self.node_group is None:  # Every node has one rank.
            return
        averaged = ddp.averaged_parameters(self)
        for name, param in self._named():
            if param.requires_grad and param not in averaged:
                raise RuntimeError(
                    f"DDP doesn't average the gradient of {name!r} inside a node, as "
                    f"local_group={self.options.local_group!r} needs: it was unfrozen after the "
                    f"model was wrapped, or is outside of the wrapper. Wrap the model in "
                    f"DistributedDataParallel again, and call optimizer.attach(ddp_model)"
                )

    def _kind(self) -> Kind:
        """Returns what all ranks do in this step."""
        if self.options.vote_every == 1:
            return Kind.STEP
        if self._local.period.steps + 1 >= self.options.vote_every:
            return Kind.EXCHANGE
        if not self._meets_next:
            self._trainable()  # Sets `_meets_next` if the layout is new.
        return Kind.STEP if self._meets_next else Kind.LOCAL_STEP

    def _takes_local_steps(self) -> bool:
        """Returns whether several voters take local steps; known after the first meeting."""
        if self.options.vote_every == 1 or self._ranks is None:
            return False
        return self._ranks.voters.world_size > 1

    def _step_together(self, trainable: Trainable, agreed: Agreed) -> list[str]:
        """Votes and moves by the verdict, and runs periodic tasks; returns warnings."""
        plan, ranks, turn = trainable.plan, self._ranks, self._turn()
        voter_of_rank = [0] if ranks is None else ranks.voter_of_rank
        finite = [agreed.finite[voter] for voter in voter_of_rank]
        self.wire.abstentions += self._abstentions.count(finite)
        self._abstentions.check()
        if not any(agreed.moves):
            return []
        texts = [] if ranks is None else self._warnings(trainable, ranks)
        trainable.abstain(agreed.finite[turn.voter], agreed.present[turn.voter])
        grads, momenta = trainable.grads, trainable.momenta
        params = [p if m else None for p, m in zip(trainable.flat, agreed.moves, strict=True)]
        if ranks is None or ranks.voters.world_size == 1:
            turn = replace(turn, old_rows=self._old_rows(trainable))
            for message in [*plan.messages, *plan.full]:
                plain_lion(message, params, grads, momenta, turn)
        else:
            rule: Rule = Majority(self.options.ties)
            if self.options.aggregation == "average":
                rule = Average(ranks.voters.world_size, self.options.bits)
            turn = replace(turn, old_rows=self._old_rows(trainable, plan.full_set))
            step_by_votes(plan.messages, params, grads, momenta, turn, rule, ranks)
            if plan.full:
                # On all voters, because these momenta follow the mean gradient.
                momenta = [
                    self._flat_momentum(p) if k in plan.full_set else None
                    for k, p in enumerate(trainable.params)
                ]
                states = [self.state.get(p, {}) for p in trainable.params]
                step_in_full(plan, params, grads, momenta, states, agreed, ranks.voters, turn)
        for group in self.param_groups:
            group["step"] = turn.step
        if ranks is not None:
            self._run_periodic_tasks(turn.step, ranks)
        return texts

    def _next_period(self, kind: Kind) -> Period:
        """Returns the period with this step.

        Raises:
            RuntimeError: If `eval` was called without `train`; if weights were changed since the
                last step; or, if all ranks meet in this step, after too many abstained steps.
        """
        if self._local.shown:
            raise RuntimeError(
                "step() after optimizer.eval() or in common_weights(), which put common weights "
                "into the model: call optimizer.train() before you train"
            )
        self._local.check(self._trainable(), self._last_turn())
        if kind is not Kind.LOCAL_STEP:  # In which the other ranks wouldn't raise.
            self._abstentions.check()
        return self._local.period.and_a_step(self.param_groups)

    def _step_locally(self, mine: Mine) -> list[str]:
        """Takes a step of this rank's own, and exchanges if it is its turn; returns warnings."""
        ranks, trainable, turn = self._topology(), mine.trainable, self._turn()
        # A rank counts only its own abstentions, because local steps don't communicate.
        this_rank, everyone = ranks.everyone.rank, range(ranks.everyone.world_size)
        self.wire.abstentions += self._abstentions.count(
            [trainable.finite or rank != this_rank for rank in everyone]
        )
        texts = [] if mine.kind is Kind.LOCAL_STEP else self._warnings(trainable, ranks)
        now, turn = time.perf_counter(), replace(turn, old_rows=self._old_rows(trainable))
        self._local.step(trainable, turn)
        self.wire.add("apply_s", now)
        assert mine.period is not None
        self._local.period = mine.period
        for group in self.param_groups:
            group["step"] = turn.step
        self._meets_next = False
        if mine.kind is Kind.EXCHANGE:
            texts += self._exchange(trainable, mine.agreed.moves)
        return texts

    def _exchange(self, trainable: Trainable, used_anywhere: Sequence[bool]) -> list[str]:
        """Averages how far the ranks were moved, and runs periodic tasks; returns warnings."""
        if not any(used_anywhere):
            self._local.period = Period()
            return []
        ranks = self._topology()
        reset = self._local.exchange(trainable, used_anywhere, self._last_turn(), ranks)
        self._run_periodic_tasks(self._local.exchanges, ranks)
        return [
            f"the weights of {trainable.plan.lines[k][0]!r} were not finite on rank "
            f"{ranks.everyone.rank}, which continues with those of the last exchange"
            for k in reset
        ]

    def _show(self, *, own: bool) -> None:
        """Puts this rank's own weights into the model, or the common ones."""
        if self.options.vote_every > 1 and self._local.shown == own:
            with torch.no_grad():
                show = self._local.show_own if own else self._local.show_common
                show(self._trainable(), self._last_turn())

    def _run_periodic_tasks(self, count: int, ranks: Topology) -> None:
        """Averages the momenta that are due, and compares replicas if it is their turn.

        Args:
            count: Number of the step, or of the exchange with local steps.
            ranks: The groups of ranks.
        """
        if self.options.momentum_sync_every and ranks.voters.world_size > 1:
            chosen = self._selected("momentum_sync")
            full = self._selected("full_precision")
            momenta = [
                Momentum(self._flat_momentum(p), fsdp.largest_part(p), self.state[p])
                for k, (_, p) in enumerate(self._named())
                if p.requires_grad and chosen[k] and not full[k]
            ]
            synchronize(momenta, self.options, ranks, count)
        every = self.options.check_replicas_every
        if every and count % every == 0:
            compare_parameters(
                self._common_parts, ranks.everyone, ranks.same_parts, CHANGED_PARAMETERS,
                when=f" after step {self.steps}",
            )  # fmt: skip

    @torch.inference_mode(False)
    def synchronize_momentum(self) -> None:
        """Replaces every momentum by its mean over the voters; every rank must call this.

        The state dict of any rank then fits all ranks. Bytes per rank: 8 (N - 1) / N per element.
        """
        if self._world_size() > 1:
            ranks = self._topology()
            ranks.form()
            average_whole([self._flat_momentum(p) for p in self._trainable().params], ranks.voters)

    def _warnings(self, trainable: Trainable, ranks: Topology) -> list[str]:
        """Returns the warnings of rank 0: equal gradients, or momenta after a load.

        Every voter must call this in the same step.
        """
        texts = []
        if self._attaches != self._compared_attaches:
            self._compared_attaches = self._attaches
            # DDP may still average one of two models, so each side is compared by itself.
            wrapped = {p for model in ddp.attached_wrappers(self) for p in model.parameters()}
            sides: dict[bool, list[Tensor]] = {True: [], False: []}
            for p, grad in zip(trainable.params, trainable.grads, strict=True):
                if grad is not None:
                    sides[p in wrapped].append(grad)
            what = "hashes of gradients"
            if any([all_ranks_have(grads, ranks.voters, what) for grads in sides.values()]):
                texts.append(AVERAGED_GRADIENTS)
        if self._loads != self._compared_loads:
            self._compared_loads = self._loads
            momenta = [
                self._flat_momentum(p)
                for p in trainable.params
                if "exp_avg" in self.state.get(p, {})
            ]
            if all_ranks_have(momenta, ranks.voters, "hashes of momenta"):
                texts.append(COPIED_MOMENTA)
        return texts if ranks.everyone.rank == 0 else []

    def _turn(self) -> Turn:
        return Turn(
            step=self.steps + 1,
            voter=0 if self._ranks is None else self._ranks.voter,
            options=self.options,
            groups=self.param_groups,
            scratch=self._scratch,
        )

    def _last_turn(self) -> Turn:
        return replace(self._turn(), step=self.steps)
