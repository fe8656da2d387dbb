"""Distributed Lion: the optimizer, whose `step()` is the whole method."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from typing import Any, Literal, overload

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hf_dlion.core import ddp
from hf_dlion.core.exchange import exchange
from hf_dlion.core.exchange.rule import Average, Majority, Rule
from hf_dlion.core.exchange.wire import Wire, WireStats
from hf_dlion.core.options import (
    Aggregation,
    ExchangeName,
    LevelScale,
    Options,
    Selection,
    Ties,
    check_group,
)
from hf_dlion.core.ranks.agreement import Agreed, Kind, Meetings, Report
from hf_dlion.core.ranks.fingerprint import fingerprints
from hf_dlion.core.ranks.replicas import compare_replicas
from hf_dlion.core.vote import local
from hf_dlion.core.vote.local import Plan
from hf_dlion.core.vote.update import (
    Flat,
    Scratch,
    Turn,
    encode,
    move,
    plain_lion,
    tensor_means,
)


class DistributedLion(torch.optim.Optimizer):
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
        bits: See `Options`, as all arguments that follow.

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
        bits: int = 1,
        aggregation: Aggregation = "majority",
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
        self.options = Options(**{name: given[name] for name in Options.__dataclass_fields__})
        if local_group not in (None, 1) or full_precision is not None or momentum_sync_every:
            raise NotImplementedError(
                "local_group, full_precision and momentum_sync_every are still in the old core"
            )
        self.process_group = process_group
        self.wire = WireStats()
        self._everyone: Wire | None = None
        self._meetings: Meetings | None = None
        self._plan: Plan | None = None
        self._scratch = Scratch()
        self._abstained: list[int] = []
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "step": 0}
        check_group(defaults)
        super().__init__(params, defaults)

    @property
    def steps(self) -> int:
        """Number of the last step that moved anything."""
        return int(self.param_groups[0]["step"])

    @property
    def node_group(self) -> dist.ProcessGroup | None:
        """The ranks whose gradients DDP's hook averages; None: every rank votes for itself."""
        return None

    def attach(self, model: nn.Module) -> None:
        """Keeps a DDP wrapper from averaging gradients; see `hf_dlion.core.ddp.attach`."""
        ddp.attach(model, self)

    def detach(self) -> None:
        """Lets the attached DDP wrappers average gradients again; call it on every rank."""
        ddp.detach(self)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a parameter group; every rank must add the same one.

        Raises:
            ValueError: If a value is out of its range or would be ignored.
            TypeError: If a value has the wrong type, or a parameter is complex or no float.
        """
        check_group({**self.defaults, **param_group})
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        group["step"] = self.steps
        try:
            for param in group["params"]:
                if not param.is_floating_point():
                    raise TypeError(f"parameters must be real floats (got {param.dtype})")
                local.flat_view(param)
        except Exception:
            self.param_groups.pop()
            raise

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Takes one step, together with all ranks of the process group.

        A rank whose gradients hold a NaN or an Inf abstains and keeps its momentum; if all do,
        nothing changes and the step is not counted. Bytes: see `exchange.exchange`, and 64 (N - 1)
        for the header.

        Args:
            closure: Reevaluates the model and returns the loss.

        Returns:
            What the closure returned, or None.

        Raises:
            Disagreement: On every rank, before anything moves, if the ranks differ in what must be
                equal, or one of them failed; that one raises its own error.
            LostRank: If another rank ended or stalled.
            RuntimeError: On every rank, if one abstained `max_abstained_steps` times in a row.
        """
        loss, failure, tensors = None, None, _Tensors.none()
        try:
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            tensors = self._collect()
        except BaseException as error:
            if self._world_size() == 1:
                raise
            failure = error
        if tensors.only_makes_state:
            return loss
        agreed = self._agree(tensors, failure)
        self._count_abstentions(agreed)
        if any(agreed.finite):
            self._update(tensors, agreed)
        return loss

    def _update(self, tensors: _Tensors, agreed: Agreed) -> None:
        """Votes, hears the verdict and moves: steps 3 and 4 of a step."""
        plan, wire = self._plan, self._everyone
        assert plan is not None
        turn = self._turn()
        params = tensors.moved(agreed)
        if wire is None:
            for message in plan.messages:
                plain_lion(message, params, tensors.grads, tensors.momenta, turn)
        else:
            self._vote(plan, wire, tensors, params, turn)
        for group in self.param_groups:
            group["step"] = turn.step
        every = self.options.check_replicas_every
        if wire is not None and every and turn.step % every == 0:
            compare_replicas(self._named(), wire, turn.step)
        self.wire.end_step()

    def _vote(self, plan: Plan, wire: Wire, tensors: _Tensors, params: Flat, turn: Turn) -> None:
        """Encodes and sends every message, then counts, then moves."""
        rule, name = self._rule(wire.world_size), self.options.exchange
        started = time.perf_counter()
        means: Flat = ()
        if self.options.bits > 1 and self.options.level_scale == "tensor":
            means = tensor_means(plan.messages, tensors.grads, tensors.momenta, turn)
        under_way = []
        for message in plan.messages:
            votes = encode(message, tensors.grads, tensors.momenta, turn, means)
            under_way.append(exchange.start(votes, name, wire, rule, turn.step))
        encoded = time.perf_counter()
        for own in under_way:
            own.count()
        self.wire.encode_s += encoded - started
        for message, own in zip(plan.messages, under_way, strict=True):
            verdict = own.finish()
            counted = time.perf_counter()
            self.wire.exchange_s += counted - encoded
            move(message, params, verdict.planes, verdict.voters, rule, turn)
            encoded = time.perf_counter()
            self.wire.apply_s += encoded - counted
        self.wire.exchanges += 1

    def _collect(self) -> _Tensors:
        """Returns this rank's flat tensors; unscales gradients if GradScaler left that to us."""
        params = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
        shapes = local.shapes_of(params, self.param_groups)
        if self._plan is None or self._plan.shapes != shapes:
            self._plan = Plan.of(params, self.param_groups, [False] * len(params))
        names = [str(line[0]) for line in self._plan.lines]
        for name, param in zip(names, params, strict=True):
            if param.grad is not None:
                local.check_gradient(name, param.grad, param)
        present = [param.grad is not None for param in params]
        grads = [None if p.grad is None else local.flat_like(p.grad.detach(), p) for p in params]
        here = [grad for grad in grads if grad is not None and grad.numel()]
        finite = self._unscale(here)
        if not self.state and all(float(group["lr"]) == 0 for group in self.param_groups):
            # torch.distributed.checkpoint takes such a step to have the state made.
            if not any(bool(grad.any()) for grad in here):
                for param in params:
                    self._momentum(param)
                return _Tensors([], [], [], present, finite, only_makes_state=True)
        momenta = [
            local.flat_view(self._momentum(p)) if own and finite else None
            for p, own in zip(params, present, strict=True)
        ]
        if not finite:
            grads = [None] * len(params)
        return _Tensors([local.flat_view(p) for p in params], grads, momenta, present, finite)

    def _unscale(self, grads: list[Tensor]) -> bool:
        """Unscales gradients if GradScaler left that to us; returns whether all are finite."""
        scale, found = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if found is not None and float(found) > 0:
            return False
        if scale is not None:
            torch._foreach_mul_(grads, 1.0 / float(scale))
        return local.all_finite(grads)

    def _momentum(self, param: Tensor) -> Tensor:
        """Returns a parameter's momentum in its memory layout, made or laid out if need be.

        Raises:
            RuntimeError: If its shape is not the parameter's.
        """
        state = self.state[param]
        if "exp_avg" not in state:
            dtype = self.options.momentum_dtype or param.dtype
            state["exp_avg"] = torch.zeros_like(param, dtype=dtype)
        momentum: Tensor = state["exp_avg"]
        if momentum.shape != param.shape:
            raise RuntimeError(
                f"a momentum of shape {tuple(momentum.shape)} is not its parameter's, which has "
                f"{tuple(param.shape)}: load the state of this model"
            )
        if momentum.stride() != param.stride():
            momentum = torch.empty_like(param, dtype=momentum.dtype).copy_(momentum)
            state["exp_avg"] = momentum
        return momentum

    def _agree(self, tensors: _Tensors, failure: BaseException | None) -> Agreed:
        """Exchanges headers with all ranks; raises on all of them if they don't agree."""
        if self._world_size() == 1:
            return Agreed([tensors.finite], [tensors.present])
        if self._meetings is None:
            self._everyone = Wire(self.process_group or dist.group.WORLD, self.wire)
            self._meetings = Meetings(self._everyone)
        kept = ("lr", "betas", "weight_decay")
        report = Report(
            kind=Kind.STEP,
            step=self.steps + 1,
            finite=tensors.finite,
            failure=failure,
            options={name: str(value) for name, value in asdict(self.options).items()},
            groups=[
                {**{name: _plain(group[name]) for name in kept}, "parameters": len(group["params"])}
                for group in self.param_groups
            ],
            layout=self._plan.lines if self._plan is not None else [],
            present=tensors.present,
            values=lambda: [
                (name, value)
                for (name, _), value in zip(
                    self._named(), fingerprints([p for _, p in self._named()]), strict=True
                )
            ],
        )
        return self._meetings.meet(report)

    def _count_abstentions(self, agreed: Agreed) -> None:
        """Raises on every rank if one has abstained too often in a row."""
        counts = self._abstained or [0] * len(agreed.finite)
        self._abstained = [0 if ok else n + 1 for n, ok in zip(counts, agreed.finite, strict=True)]
        self.wire.abstentions += agreed.finite.count(False)
        most = max(self._abstained)
        if most >= self.options.max_abstained_steps:
            ranks = [str(r) for r, count in enumerate(self._abstained) if count == most]
            raise RuntimeError(
                f"gradients of rank {', '.join(ranks)} held a NaN or an Inf in {most} steps in a "
                f"row: lower the learning rate, check that rank's data, or raise "
                f"max_abstained_steps ({self.options.max_abstained_steps})"
            )

    def _turn(self) -> Turn:
        return Turn(
            step=self.steps + 1,
            rank=0 if self._everyone is None else self._everyone.rank,
            seed=self.options.seed,
            bits=self.options.bits,
            level_scale=self.options.level_scale,
            groups=self.param_groups,
            scratch=self._scratch,
        )

    def _rule(self, voters: int) -> Rule:
        if self.options.aggregation == "average":
            return Average(voters, self.options.bits)
        return Majority(self.options.ties)

    def _named(self) -> list[tuple[str, Tensor]]:
        """Returns all parameters of the groups with their names, frozen ones too."""
        return [
            (group["param_names"][k] if "param_names" in group else f"group {g} parameter {k}", p)
            for g, group in enumerate(self.param_groups)
            for k, p in enumerate(group["params"])
        ]

    def _world_size(self) -> int:
        if not (dist.is_available() and dist.is_initialized()):
            return 1
        return dist.get_world_size(self.process_group)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads what `state_dict` returned; momenta keep the dtype that they were saved with."""
        super().load_state_dict(dict(state_dict))
        saved = state_dict["state"]
        order = [p for group in self.param_groups for p in group["params"]]
        for number, state in saved.items():
            dtype = self.options.momentum_dtype or order[number].dtype
            # torch casts a momentum to its parameter's dtype, which loses bits.
            momentum = state["exp_avg"].to(device=order[number].device, dtype=dtype, copy=True)
            self.state[order[number]]["exp_avg"] = momentum
        self._plan = None
        self._abstained = []


class _Tensors:
    """This rank's flat tensors in one step, by index of the trainable parameter."""

    def __init__(
        self,
        params: list[Tensor],
        grads: list[Tensor | None],
        momenta: list[Tensor | None],
        present: list[bool],
        finite: bool,
        *,
        only_makes_state: bool = False,
    ) -> None:
        self.params, self.grads, self.momenta = params, grads, momenta
        self.present, self.finite, self.only_makes_state = present, finite, only_makes_state

    @classmethod
    def none(cls) -> _Tensors:
        """Returns what a rank has that failed before it could look."""
        return cls([], [], [], [], True)

    def moved(self, agreed: Agreed) -> Flat:
        """Returns the parameters that some rank with finite gradients has a gradient for."""
        voters = [own for own, ok in zip(agreed.present, agreed.finite, strict=True) if ok]
        return [
            param if any(own[k] for own in voters) else None for k, param in enumerate(self.params)
        ]


def _plain(value: Any) -> object:
    """Returns a hyperparameter as ranks can compare it."""
    if isinstance(value, (tuple, list)):
        return tuple(float(own) for own in value)
    return float(value)
