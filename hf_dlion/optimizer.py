"""`DistributedLion`: a torch optimizer whose ranks exchange signs instead of gradients."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast, overload

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from hf_dlion.backward import search
from hf_dlion.backward.hooks import OptimizerHooks
from hf_dlion.backward.overlap import Overlap
from hf_dlion.backward.refused import refuse_replicated
from hf_dlion.exchange import WireStats
from hf_dlion.exchange.wire import RankGroup
from hf_dlion.momentum.part_states import part_entry
from hf_dlion.momentum.shares import Shares
from hf_dlion.momentum.state_dict import (
    checked_loading,
    restore_momentum,
    with_entry_in_groups,
)
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
from hf_dlion.options.described import describes_options
from hf_dlion.options.groups import flat_params, names_of
from hf_dlion.options.naming import with_names
from hf_dlion.options.parallelism import given_replicas
from hf_dlion.options.params import check_distinct, check_trainable
from hf_dlion.options.selection import Selection
from hf_dlion.options.treatment import treatment_by_name
from hf_dlion.ranks.abstention import Abstentions
from hf_dlion.ranks.group import Ranks, plain
from hf_dlion.ranks.join import JoinableOptimizer
from hf_dlion.step.early import NoEarlyVotes
from hf_dlion.step.engine import Engine
from hf_dlion.step.step import Scaling, Step

STATE_VERSION = 1

Params = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]


@describes_options
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
    whose u is exactly zero abstains, so an embedding row that no rank has seen stays where it is.
    Replicas are bitwise equal after every step. On one rank it is plain Lion. docs/rule.md says
    exactly what is computed and sent.

    Coming from AdamW: every element moves by lr in every step, so start at a third of AdamW's
    learning rate (at the whole of it in a run of a few dozen steps), and raise weight_decay by the
    same factor, to keep lr * weight_decay.

    The optimizer finds the DDP wrapper of its parameters by itself at the wrapper's first forward
    and keeps it from reducing gradients. Gradients may be accumulated under `no_sync()` and
    clipped as usual: they are this rank's own until `step()`. A parameter takes part on a rank
    where autograd gave it a gradient, or where one that is not all zeros was assigned. Every rank
    must call `step()` together; what fails on one rank before the header is raised on all of them.
    Ranks with different numbers of batches train inside `torch.distributed.algorithms.Join`, given
    the optimizer and not the model.

    Examples:
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
        process_group: The ranks that vote; None is the default group, taken at first use.
        replicate: The same as a mesh of one dimension, for parameters that FSDP2 shards inside
            each replica (`mesh["replicate"]`, docs/guides/fsdp2.md): all ranks of all replicas
            then step together, and those that hold the same parts vote.
        ...: The fields of `hf_dlion.Options`; `help()` lists them here.

    Attributes:
        state: `state[p]["exp_avg"]`, shape of p, is this rank's momentum, a DTensor where p is one;
            with `local_group` its share of the node's, 1-D.
        options: The options, as `Options`.
        steps: Number of the last step that moved anything.
        wire: Bytes, times and agreement, as `WireStats`.

    Raises:
        ValueError: If an option or a group's value is out of its range.
        TypeError: If one has the wrong type, or a parameter's dtype is not floating.
        NotImplementedError: If parameters are sharded otherwise than by FSDP2 inside each replica
            (FSDP1, HSDP, DeepSpeed ZeRO-3, tensor parallel).
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
        process_group: RankGroup | None = None,
        replicate: DeviceMesh | None = None,
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
        options = Options(
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
        replicate = replicate or given_replicas()
        ranks = Ranks(process_group, local_group, max_abstained_steps, replicate=replicate)
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay}
        check_group(defaults)
        self._begin(Engine(self, options, ranks))
        super().__init__(cast(Any, with_names(params)), defaults)
        treatment_by_name(options, self.param_groups, complete=True)
        self._engine.hooks.claim()
        self._engine.hooks.search()

    def _begin(self, engine: Engine) -> None:
        """Takes an engine, and makes what belongs to this process and is never copied."""
        self._leave_join()
        self._engine = engine
        engine.early = Overlap(engine) if engine.options.overlap else NoEarlyVotes()
        engine.hooks = OptimizerHooks(engine)

    @property
    def options(self) -> Options:
        """The options."""
        return self._engine.options

    @property
    def steps(self) -> int:
        """Number of the last step that moved anything."""
        return self._engine.steps

    @property
    def wire(self) -> WireStats:
        """Bytes, times and agreement so far."""
        return self._engine.stats

    @property
    def rank(self) -> int:
        """This rank in the process group, 0 without one."""
        return self._bound.rank

    @property
    def world_size(self) -> int:
        """Number of ranks in the process group, 1 without one."""
        return self._bound.world_size

    @property
    def abstentions(self) -> Abstentions:
        """Who abstained from whole steps, by rank, or by node where nodes vote as one."""
        return self._engine.ranks.abstentions

    @property
    def momentum_divergence(self) -> dict[str, float]:
        """How far each parameter's momenta differ between ranks, by name; `momentum_sync="auto"`.

        As last measured, the variance across the ranks over the mean square: 0 where they are
        equal, 1 - 1/N where they have nothing in common. Empty before the first measurement.
        """
        names = names_of(self.param_groups)
        return {names[index]: value for index, value in self._engine.sync.divergence.items()}

    def momentum_report(self) -> str:
        """Returns a table of the momenta that differ most, and how often each was synchronised."""
        return self._engine.sync.report(names_of(self.param_groups))

    @property
    def _bound(self) -> Engine:
        """The engine, after a look at whether parameters are sharded: loops may do that late.

        It decides who all ranks are, so whatever asks for them from outside a step comes by here.
        """
        self._engine.ranks.bind(self.param_groups)
        return self._engine

    @property
    def _sharded(self) -> bool:
        return self._bound.ranks.sharded

    @property
    def join_device(self) -> torch.device:
        """Where the number lies in which `Join` counts the ranks that still have data."""
        return self._bound.control_device

    @property
    def join_process_group(self) -> Any:
        """The process group in which `Join` counts the ranks that still have data."""
        return self._bound.group()

    def attach(self, ddp_model: nn.Module) -> None:
        """Keeps a DDP wrapper from reducing gradients; done automatically at its first forward.

        Args:
            ddp_model: A DistributedDataParallel, or torch.compile's wrapper of one.

        Raises:
            TypeError: If it is neither.
            ValueError: If it holds none of this optimizer's parameters.
            RuntimeError: If it has another comm hook, another process group, or trainable
                parameters that no DistributedLion owns.
            NotImplementedError: If its gradients do not go through DDP's comm hooks.
        """
        refuse_replicated(ddp_model)
        ddp = search.unwrapped_ddp(ddp_model)
        if not isinstance(ddp, DistributedDataParallel):
            raise TypeError(
                f"attach() takes a DistributedDataParallel, got {type(ddp_model).__name__}; a "
                f"model without a wrapper needs no attaching, its gradients are local already"
            )
        mine = {id(param) for param in flat_params(self.param_groups)}
        if not any(id(param) in mine for param in ddp.module.parameters()):
            raise ValueError("the DDP wrapper holds none of this optimizer's parameters")
        self._engine.hooks.claim()
        search.attach(ddp)

    def detach(self) -> None:
        """Has DDP wrappers average this optimizer's gradients again, from their next forward on.

        Call it, on every rank, before another optimizer trains the same parameters; deleting this
        one is not enough, because the ranks' garbage collectors run at different times. `attach()`
        and `step()` take the gradients back.
        """
        self._engine.hooks.release()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a parameter group, on every rank alike; see `torch.optim.Optimizer`.

        Raises:
            ValueError: If a value of the group is out of its range or would be ignored, or it holds
                a parameter twice.
            TypeError: If one has the wrong type, or a parameter's dtype is not floating.
            NotImplementedError: If a parameter is sharded otherwise than FSDP2 does inside each
                replica.
        """
        check_group({**self.defaults, **param_group})
        super().add_param_group(param_group)
        try:
            check_distinct(self.param_groups[-1]["params"])
            for param in self.param_groups[-1]["params"]:
                check_trainable(param)
            self._engine.ranks.bind(self.param_groups)
            self._engine.ranks.check(self.param_groups, self.options)
            treatment = treatment_by_name(self.options, self.param_groups, complete=False)
            self._engine.treatment = treatment
            treatment.of_step(self.param_groups, self.options, self.steps + 1, ())
        except Exception:
            self.param_groups.pop()
            raise
        self._engine.hooks.added(self.param_groups[-1]["params"])

    @_disable_dynamo
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Resets the gradients; see `torch.optim.Optimizer`."""
        super().zero_grad(set_to_none)
        self._engine.presence.note_reset(flat_params(self._bound.local_groups))

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    # Inside torch.compile, too: tracing a step would compile codecs and header, or fail at them.
    @_disable_dynamo
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
            RuntimeError: On every rank, if one abstained `max_abstained_steps` times in a row; or
                if a CUDA graph is being captured.
        """
        scaling = Scaling(getattr(self, "grad_scale", None), getattr(self, "found_inf", None))
        try:
            _refuse_capture()
            Join.notify_join_context(self)
            return Step(self._engine, scaling).take(closure)
        except BaseException:
            # GradScaler takes them away after a step, but not after one that raised.
            vars(self).pop("grad_scale", None)
            vars(self).pop("found_inf", None)
            raise

    def synchronize_momentum(self) -> None:
        """Replaces every momentum by its mean over the ranks; every rank must call this.

        The state dict of any rank is then that of all: the way to save one file by hand. With
        `local_group` it is the mean over the nodes, and every rank holds the whole of it until the
        next step. Bytes per rank: 8 * (N - 1) / N per element; with `local_group` of this rank's
        share among the N nodes, and inside the node those of `momentum.shares.exchange_shards`.

        Raises:
            Disagreement: On every rank, if they have momenta of different parameters.
        """
        engine = self._bound
        wire = engine.wire_if_several()
        if wire is not None:
            voters, momenta = engine.voters(), engine.momenta()
            momenta.check_alike(wire, voters.alike, "synchronize_momentum()")
            engine.early.disturb()
            voters.average_momenta(momenta)
        engine.origin.averaged(self.steps)

    def state_dict(self) -> dict[str, Any]:
        """Returns torch's state dict with an entry "dlion"; it holds this rank's momentum only.

        Never communicates. `synchronize_momentum()` before it makes all ranks' equal.
        """
        engine, options = self._bound, self.options
        state_dict = super().state_dict()
        state_dict["dlion"] = {
            "version": STATE_VERSION,
            "steps": self.steps,
            "seed": options.seed,
            "checkpoint": options.checkpoint,
            **engine.origin.entry(self.steps, self.rank, self.world_size),
        }
        if options.momentum_sync_every and options.momentum_sync == "auto":
            count = len(flat_params(self.param_groups))
            state_dict["dlion"]["divergence"] = engine.sync.entry(count)
        if (part := part_entry(flat_params(self.param_groups))) is not None:
            state_dict["dlion"]["part"] = part
        if engine.shares.held:
            state_dict["dlion"]["shard"] = engine.shares.entry(engine.momenta().held())
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
        self._engine.early.disturb()
        # Accelerate loads a state whenever it prepares: a new DDP wrapper may be at hand.
        self._engine.hooks.claim()
        self._engine.hooks.search()

    def _restore(self, state_dict: Mapping[str, Any], own: Mapping[str, Any] | None) -> None:
        """Takes what torch's loading leaves out: dtypes, shares, and our entry."""
        engine = self._engine
        restore_momentum(self, state_dict, self.options.momentum_dtype)
        engine.shares = Shares.loaded((own or {}).get("shard"), flat_params(self.param_groups))
        engine.sync = MomentumSync.loaded((own or {}).get("divergence"))
        engine.shared_momenta = frozenset()
        if self.options.local_group in (None, 1):
            engine.momenta().fill_up()
        if own is not None:
            engine.steps = own["steps"]
            if state_dict["state"]:
                engine.origin.loaded(own)
            engine.options = dataclasses.replace(self.options, seed=own["seed"])

    def __getstate__(self) -> dict[str, Any]:
        """Returns what pickle and deepcopy carry: never the process group."""
        return {**super().__getstate__(), "engine": self._engine.carried()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restores a pickled or copied optimizer, or torch's part of a loaded state."""
        own = dict(state)  # The caller's stays as it is.
        carried = own.pop("engine", None)
        super().__setstate__(own)
        if carried is not None:
            self._begin(Engine.restored(self, carried))
            self._engine.hooks.watch_gradients(flat_params(self.param_groups))
            # A copy may have the original's parameters, which it takes with its first step.
            self._engine.hooks.claim_free()
            self._engine.hooks.search()


def _refuse_capture() -> None:
    """Raises where a CUDA graph is being captured: what others say decides on what a step does."""
    # Where CUDA was never used, nothing is captured.
    used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if used and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "step() cannot be captured in a CUDA graph: it hears from other ranks what to do, and "
            "a replay would not. Capture forward and backward, and call step() after the replay"
        )
