"""The Distributed Lion optimizer. `DistributedLion.step` shows the order of everything."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, overload

import torch
import torch.distributed as dist
from torch import nn
from torch._compile import _disable_dynamo
from torch.distributed.device_mesh import DeviceMesh

import hf_dlion.ddp as ddp
import hf_dlion.fsdp as fsdp
from hf_dlion.core.context import StepContext
from hf_dlion.core.flat import check_param, unscale
from hf_dlion.core.layout import Layout, Scratch
from hf_dlion.gpu.form import plain_lion
from hf_dlion.gpu.warm_up import warm_up
from hf_dlion.guards import Guards
from hf_dlion.options import (
    BETAS,
    Aggregation,
    LevelScale,
    Options,
    Route,
    Selection,
    Ties,
    check_group,
)
from hf_dlion.params import Params
from hf_dlion.peers import Peers
from hf_dlion.ranks.agreement import Agreed, Report
from hf_dlion.ranks.header import Kind, gather_bools
from hf_dlion.ranks.stats import WireStats
from hf_dlion.ranks.topology import Topology
from hf_dlion.state_dict import Loading
from hf_dlion.steps.every_step import vote
from hf_dlion.steps.full_precision import step_in_full_precision
from hf_dlion.steps.local import LocalSteps
from hf_dlion.steps.means import average_whole
from hf_dlion.steps.momentum_sync import synchronize
from hf_dlion.user_warning import TRAINS_ALONE, warn_deferred, warn_user


class DistributedLion(torch.optim.Optimizer):
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
            (default: (0.9, 0.98)).
        weight_decay: Decoupled weight decay coefficient (default: 0.0).
        process_group: Process group of the ranks that train one model (default: None, which means
            all ranks).
        replicate: Ranks that hold the same FSDP2 shards, as `mesh["replicate"]` or its process
            group (default: None, which means that the model isn't sharded).
        bits: Bits per vote: 1 sends the sign of u, and 2, 4, or 8 also its size (default: None,
            which means 1, and 4 with `vote_every` above 1). Values above 1 need
            `aggregation="majority"` or `vote_every` above 1.
        vote_every: Number of steps per exchange (default: 1). Above 1, each rank moves its own
            weights by sign(u), and the exchange sends how far each element was moved. Call
            `exchange_now` on every rank before you evaluate or save the model, and at the end.
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
            an equal slice per step, as bfloat16 (default: 0, which means never). With `vote_every`
            above 1, number of exchanges, in the last of which they are averaged, in 4 bits.
        momentum_sync: Momenta that are averaged: "all", patterns of names, or a function of name
            and parameter (default: "all").
        momentum_dtype: dtype of the momentum: torch.float32, torch.bfloat16, or torch.float16
            (default: None, which means each parameter's dtype).
        seed: Seed of the stochastic rounding, equal on every rank (default: 0).
        max_abstained_steps: Number of steps in a row from which a rank may abstain before all ranks
            raise (default: 20). A rank abstains if its gradients hold a NaN or an Inf, or if it has
            none while another rank has some; in local steps, whenever it has none.
        check_replicas_every: Number of steps between comparisons of a hash of all parameters
            (default: 0, which means never). Like `momentum_sync_every`, it counts exchanges if
            `vote_every` is above 1.

    Raises:
        ValueError: If a value isn't allowed, or has no effect with the other options.
        TypeError: If a value has the wrong type, or `params` is a module.

    Example:
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = DistributedLion(model.named_parameters(), lr=2e-5, weight_decay=0.1)
        >>> model(torch.ones(1, 4)).sum().backward()
        >>> optimizer.step()
        >>> optimizer.steps
        1
    """

    wire: WireStats
    """Counts of the bytes that this rank sent."""

    # Makes GradScaler call step() also after an Inf, so every rank takes part in the vote.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        betas: tuple[float, float] = BETAS,
        weight_decay: float = 0.0,
        *,
        process_group: dist.ProcessGroup | None = None,
        replicate: DeviceMesh | dist.ProcessGroup | None = None,
        bits: int | None = None,
        vote_every: int = 1,
        aggregation: Aggregation | None = None,
        ties: Ties = "alternate",
        level_scale: LevelScale = "word",
        exchange: Route = "auto",
        local_group: Literal["node"] | int | None = None,
        full_precision: Selection | None = None,
        momentum_sync_every: int = 0,
        momentum_sync: Selection = "all",
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
        check_group({"lr": lr, "betas": betas, "weight_decay": weight_decay})
        self._begin(options, process_group, fsdp.replicate_group(replicate))
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "step": 0}
        super().__init__(params, defaults)
        ddp.introduce(self)
        self.params.check_selections()

    def _begin(
        self,
        options: Options,
        process_group: dist.ProcessGroup | None,
        replicate: dist.ProcessGroup | None,
    ) -> None:
        """Sets the state of this process, which isn't copied with an optimizer."""
        self.options, self.process_group = options, process_group
        self.local = LocalSteps(options.vote_every)
        self.params = Params(self, options, replicate, self.local.states)
        self.peers = Peers(self.params, self.local, options, process_group, replicate)
        self.wire = self.peers.stats
        self.guards = Guards(self, self.params, options, self.wire)
        self._scratch = Scratch()
        self._warm: tuple[Layout | None, int] = None, 0  # A layout and voters of which kernels ran.

    @property
    def steps(self) -> int:
        """Number of the last step that was counted (see `step`), resumed runs included."""
        return self.params.steps

    @property
    def node_group(self) -> dist.ProcessGroup | None:
        """The ranks that average gradients in DDP's hook; None if every rank votes by itself."""
        ranks = self.peers.ranks  # `attach` formed the nodes on all ranks.
        return None if ranks is None or ranks.node is None else ranks.node.group

    def attach(self, model: nn.Module) -> None:
        """Stops a DDP wrapper from averaging gradients; every rank must call this.

        With FSDP2, pass the model that `fully_shard` was called on: `step` then frees gathered
        parameters before it writes. Parameters that were passed without names get those of the
        model.

        Args:
            model: A `DistributedDataParallel` or an FSDP2 model, or a module that has exactly one
                in it, such as what `torch.compile`, `Fabric.setup`, `accelerator.prepare`, or Ray's
                `prepare_model` returns.

        Raises:
            TypeError: If `model` isn't a DDP wrapper or an FSDP2 model.
            ValueError: If the wrapper has none of the optimizer's parameters, or averages over
                other ranks; or if an option selects by a name that no parameter has.
            RuntimeError: If trainable parameters belong to no optimizer, if the wrapper reduces
                gradients in a way that a hook can't replace, or if it was made during local steps.
        """
        if self.options.local_group is not None and self.peers.world_size > 1:
            self.peers.topology().form()  # A collective, so it comes before checks that may raise.
        fsdp.reshard([model])  # A forward leaves gathered parameters, which are other objects.
        wrapper, sharded = ddp.wrapper_in(model), fsdp.sharded_model(model)
        inner = model if wrapper is None else wrapper.module
        self.params.name_as(inner)
        if sharded is not None:
            ddp.refuse_unowned(sharded, self)
            if sharded not in self.params.fsdp_models:
                self.params.fsdp_models.append(sharded)
        else:
            if self.local.states and not self.local.shows_anchors():
                self.guards.check_wrapper(wrapper)
            ddp.attach(model, self)
        self.guards.watch_saves(inner, self.local)
        self.params.forget_layout()
        self.peers.note_attach()
        # Last: a warning may be an error.
        self.guards.warn_about_waits(wrapper, self.peers.ranks)
        if sharded is None and self.peers.world_size == 1:
            warn_user(
                TRAINS_ALONE + "Start all ranks with torchrun, on several nodes with --nnodes"
            )

    def detach(self) -> None:
        """Lets the attached DDP wrappers average gradients again; every rank must call this.

        With `vote_every` above 1, the model then holds the weights of the last exchange. Call
        `exchange_now` first to keep the steps since then. FSDP2 models are forgotten, so `step`
        needs `attach` again.
        """
        fsdp.reshard(self.params.fsdp_models)  # So the next forward gathers what is written.
        self.params.fsdp_models.clear()
        ddp.detach(self)
        self.guards.forget_saves()
        self.params.forget_layout()
        self.peers.note_attach()
        for param, state in self.local.states.items():
            state.restore_anchor(fsdp.local_part(param.detach()))
        self.local.reset(self.local.exchanges)

    @torch.inference_mode(False)  # Buffers that are made here serve later steps, too.
    @torch.no_grad()
    def exchange_now(self) -> None:
        """Ends a period of local steps; every rank must call this before you look at weights.

        Call it before you evaluate or save the model, and at the end of training. The model then
        holds the same weights on every rank, and training goes on by itself: the next exchange
        comes after `vote_every` steps. With `vote_every=1` it has no effect. Bytes: an exchange, or
        a header if no rank has moved.

        Raises:
            Disagreement: On every rank, if another rank takes a step, or the ranks differ.
            LostRank: If another rank ended or stalled.
        """
        local = self.local
        if self.options.vote_every == 1:
            return
        if self.peers.world_size == 1:
            if local.states:
                raise RuntimeError(
                    "the process group was destroyed within a period of local steps: call "
                    "optimizer.exchange_now() on every rank before destroy_process_group()"
                )
            return
        report, layout = Report(Kind.EXCHANGE), Layout()
        try:
            with self.peers.all_or_none(report):
                layout, report.period = self.params.fresh_layout(), local.period
                local.hide(layout)
                self.guards.abstentions.check(self.peers.ranks)
            agreed = self.peers.agree(report, layout)
            if (ranks := self.peers.ranks) is not None and self.peers.voter_count > 1:
                context = self._context(local.exchanges + 1)
                number = local.exchange(layout, agreed, context, ranks)
                self._run_periodic_tasks(number, layout)
        except Exception as error:
            warn_deferred(error)
            raise
        finally:
            layout.release()
            self._scratch.release()
        warn_deferred()

    @contextlib.contextmanager
    def common_weights(self) -> Iterator[None]:
        """Shows the weights with which the period began, in the body of a `with` statement.

        For one rank alone, or a callback, between two exchanges of local steps. They are equal on
        all ranks, and lag up to `vote_every` - 1 steps behind. There is no communication, but with
        FSDP2 every rank must enter. Afterwards the model has the bits from before. If you write x'
        over a common weight x, this rank's own weight p becomes p + (x' - x), so write the same
        values on every rank. Has no effect after `exchange_now`.

        Example:
            >>> optimizer = DistributedLion([torch.nn.Parameter(torch.ones(64))])
            >>> with optimizer.common_weights():
            ...     pass  # evaluate the model
        """
        local = self.local
        if not local.states or local.shows_anchors():
            try:
                yield
            finally:
                fsdp.reshard(self.params.fsdp_models)  # A forward leaves the root gathered.
            return
        try:
            with self._period_layout() as layout:
                local.show(layout)
            yield
        finally:
            if local.shows_anchors():  # An exchange in the block would have ended the period.
                with self._period_layout() as layout:
                    local.hide(layout)

    @contextlib.contextmanager
    def _period_layout(self) -> Iterator[Layout]:
        with torch.inference_mode(False), torch.no_grad():
            layout = self.params.fresh_layout()
            yield layout
            layout.release()

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @_disable_dynamo  # As torch's optimizers: NumPy and collectives can't be compiled.
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Takes one step; all ranks of the process group must call this together.

        A rank whose gradients hold a NaN or an Inf (`idle_rows.survey`) abstains and keeps its
        momenta, but not those of `full_precision`. If all abstain, only a local step is counted.
        Bytes: a header (`ranks.agreement`), votes (`ranks.routes`), `full_precision`,
        `momentum_sync`, comparisons (`guards`). A local step has those of `agree_in_node` only.

        Args:
            closure: Function that reevaluates the model and returns the loss (default: None).

        Returns:
            Return value of `closure`, or None.

        Raises:
            Disagreement: On every rank, before anything moves, if the ranks differ in what must be
                equal, or if one failed; that rank raises its own error. With local steps, at the
                next exchange. After the step, if `check_replicas_every` finds that replicas differ;
                and after the local step of an exchange, if weights were replaced.
            LostRank: If another rank ended or stalled.
            RuntimeError: On every rank, if a rank abstained in `max_abstained_steps` consecutive
                steps; or on this rank, in `common_weights` between two exchanges.
        """
        loss = None
        sent, sent_in_node = self.wire.bytes_sent, self.wire.node_bytes_sent
        report, layout = Report(Kind.STEP), Layout()
        try:
            with self.peers.all_or_none(report):  # What fails in here waits for the header.
                scale, found_inf = self.params.take_scale()
                layout = self.params.fresh_layout()
                # Before a closure can fail, so ranks meet anyway.
                report.kind = self.local.next_kind(layout)
                if closure is not None:
                    with torch.enable_grad():
                        loss = closure()
                    layout = self.params.fresh_layout()
                report.finite = self.params.collect(layout, scale, found_inf)
                report.present = [slot.grad is not None for slot in layout.slots]
                has_none = bool(report.present) and not any(report.present)
                report.abstains = has_none or not report.finite
                self.guards.check(layout, report, self.peers.ranks)
                report.period = self.local.period_with_step(abstains=report.abstains)
                self._warm_up(layout)
            # All ranks continue, or all raise; a local step has no header, and raises alone.
            agreed = self.peers.agree(report, layout)
            unscale([slot.grad for slot in layout.slots if slot.grad is not None], scale)
            self._take(report, layout, agreed)
        except Exception as error:
            warn_deferred(error)
            raise
        finally:
            layout.release()
            self._scratch.release()
        self.wire.last_bytes_sent = self.wire.bytes_sent - sent
        self.wire.last_node_bytes_sent = self.wire.node_bytes_sent - sent_in_node
        warn_deferred()
        return loss

    def _take(self, report: Report, layout: Layout, agreed: Agreed) -> None:
        """Takes the step on which the ranks agreed.

        vote_every > 1 and several voters    a local step, which an exchange may follow
        else, a rank has a finite gradient   a vote, or plain Lion for one voter
        else                                 nothing, and no step is counted
        """
        ranks, number = self.peers.ranks, 0
        have_gradients = any(agreed.gradient_counts)
        # The first step that is counted needs a gradient, which tells what is trained.
        is_local = self.options.vote_every > 1 and (have_gradients or self.steps > 0)
        self.guards.note_comparisons(self.peers.comparisons)
        self.guards.note_step()
        if ranks is not None and have_gradients and report.has_header:
            self.guards.compare_after_changes(layout, ranks)
        if ranks is not None and is_local and self.peers.voter_count > 1:
            self.guards.abstentions.count_local(report.abstains, ranks)
            number = self._local_step(ranks, report, layout, agreed)
        else:
            self.guards.abstentions.count(agreed, ranks)
            if have_gradients:
                number = self._vote(layout, agreed)
        self._run_periodic_tasks(number, layout)

    def _local_step(self, ranks: Topology, report: Report, layout: Layout, agreed: Agreed) -> int:
        """Takes a step of this rank's own; returns the number of an exchange, or 0."""
        context = self._context(self.steps + 1)
        self.wire.lap("", layout.device)
        self.local.step(layout, context, report.period)
        self.wire.lap("apply_s", layout.device)
        self._count_step(context.number)
        if report.kind is not Kind.EXCHANGE:
            return 0
        exchange = self._context(self.local.exchanges + 1)
        return self.local.exchange(layout, agreed, exchange, ranks)

    def _vote(self, layout: Layout, agreed: Agreed) -> int:
        """Moves by the verdict of all voters; returns the number of the step."""
        context, ranks = self._context(self.steps + 1), self.peers.ranks
        layout.drop_gradients(agreed.finite[context.voter], agreed.present[context.voter])
        for slot, count in zip(layout.slots, agreed.gradient_counts, strict=True):
            slot.moves = count > 0
        if ranks is None or self.peers.voter_count == 1:
            context.age_rows(layout.slots)
            plain_lion(layout.all_messages, context)
        else:
            context.age_rows(slot for slot in layout.slots if not slot.full_precision)
            vote(layout, context, ranks)
            if layout.averaged_messages:
                # On all voters, because these momenta follow the mean gradient.
                for slot in layout.slots:
                    if slot.full_precision:
                        slot.momentum = self.params.flat_momentum(slot.param)
                equal = self.guards.momenta_equal
                step_in_full_precision(layout, agreed, ranks, context, equal=equal)
                self.guards.momenta_equal = True
        self._count_step(context.number)
        return context.number

    def _count_step(self, step: int) -> None:
        for group in self.param_groups:
            group["step"] = step

    def _run_periodic_tasks(self, number: int, layout: Layout) -> None:
        """Averages the momenta that are due, and compares replicas if it is their turn.

        `number` is that of the step, or with local steps of the exchange; 0 if none is done.
        """
        options, ranks = self.options, self.peers.ranks
        if not number or ranks is None:
            return
        if options.momentum_sync_every and self.peers.voter_count > 1:
            synced = [slot for slot in layout.slots if slot.synced and slot.param.requires_grad]
            for slot in synced:
                slot.momentum = self.params.flat_momentum(slot.param)
            synchronize(synced, self._context(number), ranks)
        if options.check_replicas_every and number % options.check_replicas_every == 0:
            self.guards.compare_replicas(ranks)

    def _warm_up(self, layout: Layout) -> None:
        """Compiles the kernels that a new layout's steps launch."""
        if self._warm != (layout, self.peers.voter_count):
            warm_up(layout, self.options, self.peers.voter_count)
            self._warm = layout, self.peers.voter_count

    @torch.inference_mode(False)
    def synchronize_momentum(self) -> None:
        """Replaces every momentum by its mean over the voters; every rank must call this.

        Those of frozen parameters are averaged, too. The state dict of any rank then fits all
        ranks. Bytes per rank: a header, 8 (N - 1) ceil(P / 64) for all P parameters, and
        those of `means.average_whole`.

        Raises:
            Disagreement: On every rank, if another rank does something else, or the ranks differ.
            LostRank: If another rank ended or stalled.
        """
        params = [p for _, p in self.params.named()]
        with self.peers.together(Kind.MOMENTA):
            has_momentum = ["exp_avg" in self.state.get(p, {}) for p in params]
        if (ranks := self.peers.ranks) is not None:
            what = "which parameters have a momentum"
            by_rank = gather_bools(ranks.everyone, has_momentum, what)
            with_momentum = [p for p, *have in zip(params, *by_rank, strict=True) if any(have)]
            average_whole([self.params.flat_momentum(p) for p in with_momentum], ranks)

    @torch.no_grad()
    def check_replicas(self) -> None:
        """Checks that all ranks hold the same parameters; every rank must call this.

        It does once what `check_replicas_every` does in steps. With `vote_every` above 1, call
        `exchange_now` before. Bytes per rank: a header, and 16 (N - 1).

        Raises:
            RuntimeError: On every rank, in a period of local steps, where ranks hold their own.
            Disagreement: On every rank, if replicas differ, or another rank does something else.
            LostRank: If another rank ended or stalled.
        """
        with self.peers.together(Kind.REPLICAS):
            if self.local.period.steps:
                raise RuntimeError(
                    "check_replicas() between two exchanges of local steps, where ranks hold their "
                    "own weights: call optimizer.exchange_now() on every rank before"
                )
        if (ranks := self.peers.ranks) is not None:
            self.guards.compare_replicas(ranks)

    def _context(self, number: int) -> StepContext:
        """Returns the context of a step or an exchange of this number."""
        return StepContext(
            number=number, voter=self.peers.voter, voters=self.peers.voter_count,
            options=self.options, groups=self.param_groups, scratch=self._scratch,
            ages=self.params.ages,
        )  # fmt: skip

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a parameter group; every rank must add the same one.

        Raises:
            ValueError: If a value is out of its range or would be ignored, or a parameter is in two
                places.
            TypeError: If a value has the wrong type, or a parameter isn't a real float.
            NotImplementedError: If a parameter has gaps in memory.
        """
        check_group({**self.defaults, **param_group})
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        # Not that of another optimizer, whose groups may have been passed.
        group["step"] = self.steps if len(self.param_groups) > 1 else 0
        try:
            if len(set(group["params"])) < len(group["params"]):
                raise ValueError("a parameter is in its group twice: pass each one once")
            for param in group["params"]:
                check_param(fsdp.local_part(param.detach()))
        except Exception:
            self.param_groups.pop()
            raise

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads what `state_dict` returned, on every rank.

        Momenta get the dtype of `momentum_dtype`, or of their parameters. Parameters keep the names
        that they have here. A period of local steps, the number of exchanges, ages of rows, and
        abstentions are forgotten; the model keeps what it holds. `load_momentum` brings each rank's
        own momentum, and ages of rows, from its files.

        Args:
            state_dict: Return value of `state_dict`; not changed.

        Raises:
            ValueError: If the state is another optimizer's, if the numbers of groups or parameters
                differ, or if only one of a momentum and its parameter is sharded.
        """
        loading = Loading(self.param_groups, self.options.momentum_dtype)
        hooks = (  # The last one before torch's load, and the first one after it.
            self.register_load_state_dict_pre_hook(loading.check),
            self.register_load_state_dict_post_hook(loading.complete, prepend=True),
        )
        try:
            super().load_state_dict(dict(state_dict))
        finally:
            for hook in hooks:
                hook.remove()
        self.params.forget_layout()
        self.params.ages.clear()
        self.local.reset()
        self.peers.note_load()
        self.guards.note_load(lacks_momenta=loading.lacks_momenta)

    def __getstate__(self) -> dict[str, Any]:
        """Returns what pickle and deepcopy copy.

        Raises:
            TypeError: If the optimizer has a process group of its own, which can't be copied.
        """
        if self.process_group is not None or self.peers.replicate is not None:
            raise TypeError(
                "a DistributedLion with process_group or replicate can't be copied or pickled: "
                "create another one, and load state_dict() into it"
            )
        return {**super().__getstate__(), "options": self.options, "ages": self.params.ages}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restores a pickled or copied optimizer, or torch's part of a loaded state."""
        torch_state = dict(state)
        options, ages = (torch_state.pop(name, None) for name in ("options", "ages"))
        super().__setstate__(torch_state)
        if options is not None:
            self._begin(options, None, None)
            self.params.ages = ages
            ddp.introduce(self)
