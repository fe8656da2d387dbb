"""What an optimizer holds on this rank, and what it reports to the other ranks.

It holds parameter groups, momenta, and the plan of its tensors.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping, MutableMapping, Sequence, Set
from dataclasses import dataclass, field, fields
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

import hf_dlion.fsdp as fsdp
from hf_dlion.exchange.wire import Wire, WireStats
from hf_dlion.options import Options, check_group
from hf_dlion.ranks.agreement import (
    FROZEN,
    HISTORY,
    Abstentions,
    Agreed,
    Meetings,
    Report,
    agree_in_node,
)
from hf_dlion.ranks.meeting import Disagreement, Kind
from hf_dlion.ranks.topology import Topology
from hf_dlion.vote import groups, tensors
from hf_dlion.vote.idle_rows import AGE, old_rows
from hf_dlion.vote.local_steps import LocalSteps, Period
from hf_dlion.vote.message import Shape
from hf_dlion.vote.tensors import Plan, Trainable
from hf_dlion.vote.update import Scratch

# Attribute of an exception that all ranks have, because a meeting raised it.
_MET = "_hf_dlion_met"

# Numbers of the optimizers that this process creates.
_numbers = itertools.count(1)


@dataclass
class Mine:
    """This rank's part of what all ranks do together, and what they agreed on.

    Attributes:
        period: Local steps since the last exchange with this step; None if there is no step.
        failure: What failed on this rank.
        ranks: The groups of ranks; None for one rank.
        agreed: What every rank has, or in a step every voter.
    """

    kind: Kind = Kind.STEP
    trainable: Trainable = field(default_factory=Trainable)
    period: Period | None = None
    failure: BaseException | None = None
    ranks: Topology | None = None
    agreed: Agreed = field(default_factory=lambda: Agreed([], []))


class LionState(torch.optim.Optimizer):
    """Parameter groups and momenta as torch keeps them, and the state of this process."""

    wire: WireStats
    """Counts of the bytes that this rank sent and received."""

    def _begin(
        self,
        options: Options,
        process_group: dist.ProcessGroup | None,
        replicate: dist.ProcessGroup | None,
    ) -> None:
        """Sets the state of this process, which isn't copied with an optimizer."""
        self.options = options
        self.process_group = process_group
        self.wire = WireStats()
        self._replicate = replicate
        self._created = next(_numbers)
        self._ranks: Topology | None = None
        self._meetings: Meetings | None = None
        self._plan = Plan()
        self._checked_plan: Plan | None = None  # the plan for which `attach` was checked
        self._fsdp_models: list[nn.Module] = []
        # Names in models. Groups don't get them, because torch refuses to add a group without names
        # to groups that have names.
        self._names: MutableMapping[Tensor, str] = WeakTensorKeyDictionary()
        self._named_models = 0
        self._local = LocalSteps()
        self._meets_next = True  # Whether the ranks send headers in the next local step.
        self._loads = self._compared_loads = self._attaches = 0
        self._compared_attaches = -1
        self._scratch = Scratch()
        self._abstentions = Abstentions(options.max_abstained_steps)
        # A function has another text in every process.
        self._option_texts = {
            field.name: str(value)
            for field in fields(options)
            if not callable(value := getattr(options, field.name))
        }

    @property
    def steps(self) -> int:
        """Number of the last step that was counted (see `step`), resumed runs included."""
        return int(self.param_groups[0]["step"])

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
        group["step"] = self.steps
        try:
            if len(set(group["params"])) < len(group["params"]):
                raise ValueError("a parameter is in its group twice: pass each one once")
            for param in group["params"]:
                if param.dtype not in tensors.DTYPES:
                    raise TypeError(
                        f"parameters must be floats of 16, 32, or 64 bits (got {param.dtype}): "
                        f"pass only those that train, without a quantized base"
                    )
                tensors.flat_view(fsdp.local_part(param.detach()))
        except Exception:
            self.param_groups.pop()
            raise

    def _name_parameters(self, model: nn.Module) -> None:
        """Names parameters as `model` does, except those that were passed with names.

        `attach` calls this. If an earlier model has one of the names, they begin with "model 2: ".

        Raises:
            ValueError: If all parameters have names now, and one that an option needs is missing.
        """
        found = groups.names_in(model)
        if all(p in self._names for p in found):
            return
        self._named_models += 1
        if {self._names[p] for p in self._names if p not in found} & set(found.values()):
            found = {p: f"model {self._named_models}: {name}" for p, name in found.items()}
        self._names.update(found)
        self._plan = Plan()  # The old one has the old names.
        self._check_selections()

    def _check_selections(self) -> None:
        """Checks options that select by name if all names are known."""
        if all(groups.are_named(self.param_groups, self._names)):
            self._selected("full_precision")
            self._selected("momentum_sync")

    def _named(self) -> list[tuple[str, Tensor]]:
        """Returns names and all parameters, frozen ones included."""
        return groups.named(self.param_groups, self._names)

    def _selected(self, option: str) -> list[bool]:
        """Returns which of all parameters an option selects."""
        return groups.selection(self.param_groups, self._names, self.options, option)

    def momentum_divergence(self) -> dict[str, float]:
        """Returns how far the ranks' momenta differ, by parameter name.

        The values are those of the last measurement for `momentum_sync="auto"`: 0 if all ranks
        have the same momentum, about 1 - 1/N if the N momenta are independent. The dictionary is
        empty before the first measurement.
        """
        return {
            name: float(self.state[p]["divergence"])
            for name, p in self._named()
            if "divergence" in self.state.get(p, {})
        }

    def _trainable(self) -> Trainable:
        """Returns the trainable parameters, and makes a plan if some were added or (un)frozen.

        A parameter that was frozen during local steps counts as trainable until the next exchange.
        With FSDP2 this frees gathered parameters, so the next forward gathers what is written.
        Anchors get what was written into the model while it shows them.
        """
        fsdp.reshard(self._fsdp_models)
        numbered = groups.trainable(self.param_groups, self._local.moved)
        params = [p for _, p in numbered]
        parts = [fsdp.local_part(p.detach()) for p in params]
        # Every step compares this, so it must be cheap.
        key = [(g, id(p), p.dtype, p.device, p.shape, p.stride()) for g, p in numbered]
        if self._plan.key != key:
            self._plan = self._make_plan(key, numbered)
            self._meets_next = True
            for p in self._local.anchors.keys() - set(params):  # Removed parameters.
                with torch.no_grad():
                    self._local.drop(p, tensors.flat_view(fsdp.local_part(p.detach())))
        found = Trainable(self._plan, params, [tensors.flat_view(part) for part in parts])
        if self._local.shown:
            with torch.no_grad():
                self._local.take_in_writes(found)
        return found

    def _make_plan(self, key: object, numbered: Sequence[tuple[int, Tensor]]) -> Plan:
        averaged, named = self._selected("full_precision"), self._named()
        trainable = {p for _, p in numbered}
        kept = [k for k, (_, p) in enumerate(named) if p in trainable]
        chosen = [named[k] for k in kept]
        fsdp.check_sharding(chosen, self._replicate)
        shapes = [Shape.of(fsdp.local_part(p.detach()), g) for g, p in numbered]
        return Plan.of(key, shapes, chosen, [averaged[k] for k in kept])

    def _collect(self) -> Trainable:
        """Returns the tensors of a step; unscales gradients that GradScaler left scaled."""
        found = self._trainable()
        grads: list[Tensor | None] = [None] * len(found.params)
        for k, p in enumerate(found.params):
            if p.grad is not None and p.requires_grad:
                name, grad = str(found.plan.lines[k][0]), fsdp.local_part(p.grad.detach())
                grads[k] = tensors.flat_gradient(name, grad, fsdp.local_part(p.detach()))
        found.zero_rows = [None] * len(grads)
        found.finite = self._unscale([grad for grad in grads if grad is not None])
        if found.finite:
            found.finite, found.zero_rows = tensors.survey(grads, found.plan.shapes)
        if not self.state and not any([float(group["lr"]) for group in self.param_groups]):
            # torch.distributed.checkpoint takes such a step, on gradients of zero, to create the
            # state. Without gradients no rank votes, and the step isn't counted.
            for k, p in enumerate(found.params):
                self._momentum(p)
                if (flat := grads[k]) is not None and not flat.any():
                    grads[k] = None
        found.grads, found.present = grads, [grad is not None for grad in grads]
        found.momenta = [
            self._flat_momentum(p) if has_gradient else None
            for p, has_gradient in zip(found.params, found.present, strict=True)
        ]
        return found

    def _unscale(self, grads: list[Tensor]) -> bool:
        """Unscales gradients that GradScaler left scaled; returns False if it found an Inf."""
        scale, found = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if scale is not None:  # GradScaler would multiply it into the next one if the step fails.
            self.grad_scale = 1.0
        if found is not None and float(found) > 0:
            return False
        if scale is not None and any(grad.dtype == torch.float16 for grad in grads):
            raise ValueError(
                "GradScaler scaled float16 gradients, which can't hold small numbers once they are "
                "unscaled: load the model with dtype=torch.float32 or torch.bfloat16"
            )
        if scale is not None and grads:
            torch._foreach_mul_(grads, 1.0 / float(scale))
        return True

    def _momentum(self, param: Tensor) -> Tensor:
        """Returns a parameter's momentum, in the parameter's memory layout.

        It is created as zeros at the first call, and copied if its strides differ.
        """
        state = self.state[param]
        param = param.detach()
        if "exp_avg" not in state:
            dtype = self.options.momentum_dtype or param.dtype
            state["exp_avg"] = torch.zeros_like(param, dtype=dtype)
        momentum: Tensor = state["exp_avg"]
        if momentum.shape != param.shape:
            raise RuntimeError(
                f"a momentum of shape {tuple(momentum.shape)} does not fit its parameter of shape "
                f"{tuple(param.shape)}: load the optimizer state of this model"
            )
        if momentum.stride() != param.stride():
            momentum = torch.empty_like(param, dtype=momentum.dtype).copy_(momentum)
            state["exp_avg"] = momentum
        return momentum

    def _old_rows(self, found: Trainable, left_out: Set[int] = frozenset()) -> list[Tensor | None]:
        """Counts the updates of momenta in this step; returns the rows with u = 0."""
        grads = [None if k in left_out else grad for k, grad in enumerate(found.grads)]
        states = [self.state.get(p, {}) for p in found.params]
        betas2 = [self.param_groups[shape.group]["betas"][1] for shape in found.plan.shapes]
        return old_rows(states, grads, found.zero_rows, betas2)

    def _flat_momentum(self, param: Tensor) -> Tensor:
        """Returns this rank's part of a parameter's momentum, flat."""
        return tensors.flat_view(fsdp.local_part(self._momentum(param)))

    def _common_parts(self) -> list[tuple[str, Tensor]]:
        """Returns name and this rank's part of every parameter, with anchors for own weights.

        These are the weights that must be equal on all ranks.
        """
        found = []
        for name, param in self._named():
            part = fsdp.local_part(param.detach())
            if (anchor := self._local.anchors.get(param)) is not None:
                part = anchor.as_strided(part.size(), part.stride())
            found.append((name, part))
        return found

    def _world_size(self) -> int:
        if not (dist.is_available() and dist.is_initialized()):
            return 1
        return dist.get_world_size(self.process_group)

    def _topology(self) -> Topology:
        """Returns the groups of ranks. With `replicate`, the first call is a collective."""
        if self._ranks is None:
            ranks = Topology(
                self.process_group,
                self.options.local_group,
                self.wire,
                replicate=self._replicate,
                device=next((p.device for _, p in self._named()), None),
            )
            if self._replicate is not None:
                ranks.form()  # A collective.
            self._meetings = Meetings(ranks.everyone, self._created, ranks.same_parts)
            self._ranks = ranks
        return self._ranks

    @contextlib.contextmanager
    def together(self, kind: Kind, *, can_meet: bool = True) -> Iterator[Mine]:
        """Runs a `with` block on all ranks; what fails in it on one rank is raised on all of them.

        Every rank must enter it. The block may complete what it is given. If it raises what an
        earlier meeting raised, all ranks have it, and don't meet again. Bytes: see `Meetings.meet`.

        Args:
            kind: What the ranks do.
            can_meet: Whether the other ranks reach the end of the block if this one fails. If not,
                only this rank raises.

        Raises:
            Disagreement: On every rank, if the ranks differ, or something failed on another rank.
            BaseException: What the block raised.
            LostRank: If another rank ended or stalled.
        """
        if self._world_size() > 1:
            self._topology()  # With `replicate` a collective, so it can't fail on one rank alone.
        with self.held(can_meet=can_meet) as mine:
            mine.kind = kind
            yield mine
        try:
            self._agree(mine)
        except BaseException as error:
            setattr(error, _MET, mine.kind is not Kind.LOCAL_STEP)
            raise

    @contextlib.contextmanager
    def held(self, *, can_meet: bool = True) -> Iterator[Mine]:
        """Runs a `with` block whose failure waits in `failure` for the next meeting.

        It is raised at once on one rank alone, if an earlier meeting raised it, and unless
        `can_meet`.
        """
        mine = Mine()
        try:
            yield mine
        except BaseException as error:
            if self._world_size() == 1 or not can_meet or getattr(error, _MET, False):
                raise
            mine.failure = error
            fsdp.reshard(self._fsdp_models)  # As on the other ranks, for the next forward.

    def _agree(self, mine: Mine) -> None:
        """Completes `mine` with what all ranks have, or raises on all of them."""
        trainable, mine.ranks = mine.trainable, self._ranks
        if mine.ranks is None:
            mine.agreed = Agreed([trainable.finite], [trainable.present])
            return
        present, period = trainable.present, self._local.period
        if self.options.vote_every > 1:
            self._abstain_in_node(mine, mine.ranks.node)
            if mine.kind is Kind.LOCAL_STEP:  # The ranks send nothing until the next meeting.
                if mine.failure is not None:
                    raise mine.failure
                return
            if mine.kind is Kind.EXCHANGE:
                period = mine.period or period
                grads = trainable.grads or [None] * len(trainable.params)
                pairs = zip(trainable.params, grads, strict=True)
                present = [p in self._local.used or grad is not None for p, grad in pairs]
        options: dict[str, object] = {}
        try:
            if not trainable.params:
                self._trainable()  # Sees new parameters, and reshards.
            options = self._equal_values(period)
        except Exception as error:  # The other ranks wait for a header.
            mine.failure = mine.failure or error
        assert self._meetings is not None
        report = Report(
            kind=mine.kind,
            step=self.steps,
            finite=trainable.finite or mine.kind is not Kind.STEP,
            failure=mine.failure,
            options=options,
            layout=self._plan.lines,
            present=present,
            parameters=self._common_parts,
        )
        mine.agreed = self._meetings.meet(report)
        mine.ranks.form()  # At first a collective, which needs the options that were compared.
        if mine.kind is Kind.STEP and mine.ranks.voters is not mine.ranks.everyone:
            mine.agreed = mine.agreed.by_voter(mine.ranks.voter_of_rank)

    def _abstain_in_node(self, mine: Mine, node: Wire | None) -> None:
        """Drops gradients of which another rank of the node has none, before any header.

        All ranks do this in every step, exchange, save, and load of a run with local steps, so no
        rank of a node waits for another that is somewhere else. Ranks that do different things
        raise what failed, or Disagreement.
        """
        own = mine.trainable
        finite, present = own.finite and mine.failure is None and bool(own.present), own.present
        if node is not None:
            try:
                finite, present = agree_in_node(node, mine.kind, finite, present)
            except Disagreement as error:
                raise mine.failure or error from None
        own.abstain(finite, present)

    def _equal_values(self, period: Period) -> dict[str, object]:
        """Returns what must be equal on all ranks, by name."""
        # If only some ranks loaded, all raise here, before they would compare momenta.
        equal: dict[str, object] = {
            **self._option_texts,
            "calls of load_state_dict": self._loads,
            "calls of attach and detach": self._attaches,
        }
        if self.options.vote_every > 1:
            equal["exchanges"] = self._local.exchanges
            equal["steps since the last exchange"] = period.steps
            equal[FROZEN] = sorted(n for n, p in self._named() if not p.requires_grad)
        equal |= groups.hyperparameters(self.param_groups)
        if self.options.vote_every > 1:  # Last, because an error names the first difference.
            equal["lr of each group, summed since the last exchange"] = list(period.paths)
            equal[HISTORY] = period.history
        if callable(self.options.momentum_sync):
            equal["choices of momentum_sync"] = self._selected("momentum_sync")
        if self.options.momentum_sync == "auto":
            equal["divergences of momenta"] = list(self.momentum_divergence().values())
        return equal

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads what `state_dict` returned, on every rank.

        Momenta get the dtype of `momentum_dtype`, or of their parameters. Parameters keep the names
        that they have here.

        Args:
            state_dict: Return value of `state_dict`; not changed.

        Raises:
            ValueError: If the state is another optimizer's, or if the numbers of groups or
                parameters differ.
        """
        if any("step" not in group for group in state_dict["param_groups"]):
            raise ValueError(
                "the state dict is another optimizer's (its groups have no 'step'), which "
                "DistributedLion can't load: load the model's weights only, and start with a new "
                "optimizer"
            )
        names = [group.get("param_names") for group in self.param_groups]
        super().load_state_dict(dict(state_dict))
        for group, passed in zip(self.param_groups, names, strict=True):
            group.pop("param_names", None)
            if passed is not None:
                group["param_names"] = passed
        # torch.distributed.checkpoint writes names where `state_dict` has numbers.
        keys = [key for group in state_dict["param_groups"] for key in group["params"]]
        params = [p for group in self.param_groups for p in group["params"]]
        for key, param in zip(keys, params, strict=True):
            saved, momentum_dtype = state_dict["state"].get(key, {}), self.options.momentum_dtype
            # torch casts both to the parameter's dtype, which loses bits.
            for name, dtype in (("exp_avg", momentum_dtype or param.dtype), (AGE, torch.int32)):
                if name in saved:
                    tensor = saved[name].to(device=param.device, dtype=dtype, copy=True)
                    self.state[param][name] = tensor
            if fsdp.is_sharded(param):  # Rows of another shard, unless its momentum file is loaded.
                self.state[param].pop(AGE, None)
        self._plan = Plan()
        self._local = LocalSteps(shown=self._local.shown)
        self._loads += 1
        if self._meetings is not None and self.options.vote_every > 1:
            # If the model wasn't loaded too, it still holds this rank's own weights.
            self._meetings.compare_again()
        self._abstentions = Abstentions(self.options.max_abstained_steps)

    def __getstate__(self) -> dict[str, Any]:
        """Returns what pickle and deepcopy copy.

        Raises:
            TypeError: If the optimizer has a process group of its own, which can't be copied.
        """
        if self.process_group is not None or self._replicate is not None:
            raise TypeError(
                "a DistributedLion with process_group or replicate can't be copied or pickled: "
                "create another one, and load state_dict() into it"
            )
        return {**super().__getstate__(), "options": self.options}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restores a pickled or copied optimizer, or torch's part of a loaded state."""
        torch_state = dict(state)
        options = torch_state.pop("options", None)
        super().__setstate__(torch_state)
        if options is not None:
            self._begin(options, None, None)
