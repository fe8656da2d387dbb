"""Distributed Lion: the optimizer, whose `step()` is the whole method."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, replace
from typing import Any, Literal, overload

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import hf_dlion.ddp as ddp
import hf_dlion.fsdp as fsdp
from hf_dlion.exchange import exchange
from hf_dlion.exchange.rule import Average, Majority, Rule
from hf_dlion.exchange.wire import WireStats
from hf_dlion.options import (
    SYNC_WORDS,
    Aggregation,
    ExchangeName,
    LevelScale,
    Options,
    Selection,
    Ties,
    check_group,
    selected,
)
from hf_dlion.ranks.agreement import Agreed, Meetings, Report
from hf_dlion.ranks.fingerprint import digest, fingerprints
from hf_dlion.ranks.header import Kind
from hf_dlion.ranks.replicas import compare_replicas
from hf_dlion.ranks.topology import Topology
from hf_dlion.vote import local
from hf_dlion.vote.full_precision import step_in_full
from hf_dlion.vote.local import Plan
from hf_dlion.vote.momentum_sync import average_momenta, slice_of
from hf_dlion.vote.update import (
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
        replicate: With FSDP2, the ranks that hold the same shards: `mesh["replicate"]`, or its
            process group (default: None).
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
        replicate: DeviceMesh | dist.ProcessGroup | None = None,
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
        options = Options(**{name: given[name] for name in Options.__dataclass_fields__})
        if momentum_sync == "auto":
            raise NotImplementedError("momentum_sync='auto' is still in the old core")
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
            self._selected("full_precision")
            self._selected("momentum_sync")

    def _begin(
        self,
        options: Options,
        process_group: dist.ProcessGroup | None,
        replicate: dist.ProcessGroup | None,
    ) -> None:
        """Sets what belongs to this process, and isn't copied with an optimizer."""
        self.options = options
        self.process_group = process_group
        self.wire = WireStats()
        self._replicate = replicate
        self._ranks: Topology | None = None
        self._meetings: Meetings | None = None
        self._plan: Plan | None = None
        self._equal_plan: Plan | None = None  # whose averaged tensors have equal momenta
        self._fsdp_model: nn.Module | None = None
        self._compared_gradients = False
        self._loads = 0
        self._bytes_before = (0, 0)
        self._scratch = Scratch()
        self._abstained: list[int] = []

    @property
    def steps(self) -> int:
        """Number of the last step that moved anything."""
        return int(self.param_groups[0]["step"])

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
        if fsdp.is_fsdp(model):
            self._fsdp_model = model
            return
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
                local.flat_view(fsdp.local_part(param.detach()))
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
        if self._world_size() > 1:
            # Before anything can fail on one rank alone: with `replicate` it is a meeting, too.
            self._topology()
        try:
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            tensors = self._collect()
        except BaseException as error:
            if self._world_size() == 1:
                raise
            failure = error
        agreed = self._agree(tensors, failure)
        self._count_abstentions(agreed)
        voters = zip(agreed.finite, agreed.present, strict=True)
        if any(finite and any(present) for finite, present in voters):
            self._update(tensors, agreed)
        return loss

    def _update(self, tensors: _Tensors, agreed: Agreed) -> None:
        """Votes, hears the verdict and moves: steps 3 and 4 of a step."""
        plan, ranks = self._plan, self._ranks
        assert plan is not None
        turn = self._turn()
        params = tensors.moved(agreed)
        fsdp.reshard(self._fsdp_model)
        if ranks is None or ranks.voters.world_size == 1:
            tensors.abstain(agreed.finite[turn.rank], agreed.present[turn.rank])
            for message in [*plan.messages, *plan.full]:
                plain_lion(message, params, tensors.grads, tensors.momenta, turn)
        else:
            self._warn_if_averaged(tensors)
            tensors.abstain(agreed.finite[turn.rank], agreed.present[turn.rank])
            self._vote(plan, ranks, tensors, params, turn)
            self._average(plan, ranks, tensors, params, agreed, turn)
        for group in self.param_groups:
            group["step"] = turn.step
        if ranks is not None:
            self._synchronize(ranks, turn.step)
        before, now = self._bytes_before, (self.wire.bytes_sent, self.wire.node_bytes_sent)
        self.wire.last_bytes_sent, self.wire.last_node_bytes_sent = (
            after - earlier for earlier, after in zip(before, now, strict=True)
        )
        self._bytes_before = now

    def _vote(
        self, plan: Plan, ranks: Topology, tensors: _Tensors, params: Flat, turn: Turn
    ) -> None:
        """Encodes and sends every message, then counts, then moves."""
        rule, name = self._rule(ranks.voters.world_size), self.options.exchange
        started = time.perf_counter()
        means: Flat = ()
        if self.options.bits > 1 and self.options.level_scale == "tensor":
            means = tensor_means(plan.messages, tensors.grads, tensors.momenta, turn)
        under_way: list[exchange.Exchange] = []
        for message in plan.messages:
            votes = encode(message, tensors.grads, tensors.momenta, turn, means)
            if ranks.node is None:
                under_way.append(exchange.start(votes, name, ranks.voters, rule, turn.step))
            else:
                under_way.append(
                    exchange.InNode(votes, name, ranks.voters, ranks.node, rule, turn.step)
                )
        before = time.perf_counter()
        self.wire.encode_s += before - started
        for message, verdict in zip(plan.messages, exchange.complete(under_way), strict=True):
            counted = time.perf_counter()
            self.wire.exchange_s += counted - before
            move(message, params, verdict.planes, verdict.voters, rule, turn)
            before = time.perf_counter()
            self.wire.apply_s += before - counted
        self.wire.exchanges += 1

    def _average(
        self,
        plan: Plan,
        ranks: Topology,
        tensors: _Tensors,
        params: Flat,
        agreed: Agreed,
        turn: Turn,
    ) -> None:
        """Takes plain Lion's step on mean gradients of the parameters of `full_precision`."""
        if not plan.full:
            return
        trainable = self._trainable()
        momenta: list[Tensor | None] = [
            self._flat_momentum(p) if k in plan.full_set and params[k] is not None else None
            for k, p in enumerate(trainable)
        ]
        if self._equal_plan is not plan:
            self._equalize([self._flat_momentum(trainable[k]) for k in sorted(plan.full_set)])
            self._equal_plan = plan
        # One random stream on all voters, whose momenta stay equal.
        alike = replace(turn, rank=0)
        step_in_full(plan.full, params, tensors.grads, momenta, agreed, ranks.voters, alike)

    def _equalize(self, momenta: list[Tensor]) -> None:
        """Averages momenta over the voters if they differ: after a load, for example."""
        assert self._ranks is not None
        voters = self._ranks.voters
        hashes = voters.gather_words([digest(fingerprints(momenta))], "hashes of momenta")
        if len(set(hashes.view(-1).tolist())) > 1:
            self._mean_of_voters(momenta)

    def _mean_of_voters(self, momenta: list[Tensor]) -> None:
        assert self._ranks is not None
        voters = self._ranks.voters
        for momentum in momenta:
            total = momentum.to(voters.device_for(momentum.device), torch.float32, copy=True)
            voters.all_reduce(total, "momenta").wait()
            momentum.copy_(total.div_(voters.world_size))

    def synchronize_momentum(self) -> None:
        """Replaces every momentum by its mean over the voters; every rank must call this.

        The state dict of any rank is then that of all. Bytes per rank: 8 (N - 1) / N an element.
        """
        if self._world_size() == 1:
            return
        self._topology()
        self._mean_of_voters([self._flat_momentum(p) for p in self._trainable()])

    def _synchronize(self, ranks: Topology, step: int) -> None:
        """Averages this step's slice of the selected momenta, and compares replicas if asked."""
        every = self.options.momentum_sync_every
        if every:
            chosen = self._selected("momentum_sync")
            full = self._selected("full_precision")
            momenta = [
                self._flat_momentum(p)
                for k, (_, p) in enumerate(self._all_named())
                if p.requires_grad and chosen[k] and not full[k]
            ]
            total = sum(momentum.numel() for momentum in momenta)
            average_momenta(momenta, ranks.voters, *slice_of(total, every, step))
        every = self.options.check_replicas_every
        if every and step % every == 0:
            compare_replicas(self._named(), ranks.everyone, step, ranks.alike)

    def _collect(self) -> _Tensors:
        """Returns this rank's flat tensors; unscales gradients if GradScaler left that to us."""
        whole = self._trainable()
        plan, params = self._planned()
        self._check_attached(whole)
        names = [str(line[0]) for line in plan.lines]
        grads: list[Tensor | None] = [None] * len(params)
        for k, (name, p) in enumerate(zip(names, whole, strict=True)):
            if p.grad is not None:
                local.check_gradient(name, p.grad, p)
                grads[k] = local.flat_like(fsdp.local_part(p.grad.detach()), params[k])
        present = [grad is not None for grad in grads]
        here = [grad for grad in grads if grad is not None and grad.numel()]
        finite = self._unscale(here)
        if not self.state and all(float(group["lr"]) == 0 for group in self.param_groups):
            # torch.distributed.checkpoint takes such a step, with zeros for gradients, to have the
            # state made. Nobody votes in it, so it changes and counts nothing.
            for k, p in enumerate(whole):
                self._momentum(p)
                grad = grads[k]
                if grad is not None and not grad.any():
                    grads[k], present[k] = None, False
        momenta = [
            self._flat_momentum(p) if own else None for p, own in zip(whole, present, strict=True)
        ]
        tensors = _Tensors([local.flat_view(p) for p in params], grads, momenta, present, finite)
        if not finite:
            tensors.abstain(False, [])
        return tensors

    def _planned(self) -> tuple[Plan, list[Tensor]]:
        """Returns the plan, made anew if tensors have changed, and the trainable local tensors."""
        params = [fsdp.local_part(p.detach()) for p in self._trainable()]
        shapes = local.shapes_of(params, self.param_groups)
        if self._plan is None or self._plan.shapes != shapes:
            fsdp.check_sharding(
                [(n, p) for n, p in self._all_named() if p.requires_grad], self._replicate
            )
            full = self._selected("full_precision")
            trainable = [p.requires_grad for _, p in self._all_named()]
            self._plan = Plan.of(
                params, self.param_groups, [f for f, t in zip(full, trainable, strict=True) if t]
            )
        return self._plan, params

    def _check_attached(self, params: list[Tensor]) -> None:
        """Refuses a step that would be wrong without `attach`.

        Raises:
            RuntimeError: If nodes vote as one, or parameters are sharded, and nothing is attached.
        """
        if self.steps:
            return
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
        param = param.detach()
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

    def _warn_if_averaged(self, tensors: _Tensors) -> None:
        """Warns at the first step if all ranks have equal gradients: DDP may have averaged them.

        Every rank calls this. Bytes per rank: 16 (N - 1).
        """
        ranks = self._ranks
        if ranks is None or self._compared_gradients:
            return
        self._compared_gradients = True
        grads = [grad for grad in tensors.grads if grad is not None]
        words = [digest(fingerprints(grads)), int(any(bool(grad.any()) for grad in grads))]
        table = ranks.voters.gather_words(words, "hashes of gradients").tolist()
        equal = all(row == table[0] for row in table) and table[0][1] == 1
        if equal and len(table) > 1 and ranks.everyone.rank == 0:
            warnings.warn(
                "all ranks have equal gradients. If the model is wrapped in "
                "DistributedDataParallel, add optimizer.attach(ddp_model): DDP still averages "
                "gradients, so training is right, but at full traffic. If it isn't, all ranks "
                "train on the same data: check the sampler",
                stacklevel=4,
            )

    def _flat_momentum(self, param: Tensor) -> Tensor:
        """Returns this rank's part of a parameter's momentum, flat."""
        return local.flat_view(fsdp.local_part(self._momentum(param)))

    def _topology(self) -> Topology:
        """Returns who meets whom; the first call is a meeting of all ranks."""
        if self._ranks is None:
            self._ranks = Topology(
                self.process_group, self.options.local_group, self.wire, replicate=self._replicate
            )
            self._meetings = Meetings(self._ranks.everyone, self._ranks.alike)
        return self._ranks

    def _agree(self, tensors: _Tensors, failure: BaseException | None) -> Agreed:
        """Exchanges headers with all ranks; raises on all of them if they don't agree."""
        if self._world_size() == 1:
            return Agreed([tensors.finite], [tensors.present])
        ranks = self._topology()
        agreed = self._meet(Kind.STEP, failure, {}, tensors)
        _ = ranks.voters  # Made on all ranks together: their options are equal.
        if ranks.local_size == 1 and ranks.alike is None:
            return agreed
        return agreed.by_voter(self._voter_of_rank(ranks))

    def meet(
        self, kind: Kind, failure: BaseException | None, also: Mapping[str, object]
    ) -> Topology | None:
        """Lets all ranks find that they save or load together, or raise together.

        Every rank must call this, also a rank where something failed. Bytes: `Meetings.meet`.

        Args:
            kind: What the ranks do.
            failure: What failed on this rank, or None.
            also: What must be equal on all ranks besides the options, by name.

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
        self._meet(kind, failure, also, _Tensors.none())
        _ = ranks.voters
        return ranks

    def _meet(
        self,
        kind: Kind,
        failure: BaseException | None,
        also: Mapping[str, object],
        tensors: _Tensors,
    ) -> Agreed:
        assert self._meetings is not None
        kept = ("lr", "betas", "weight_decay")
        report = Report(
            kind=kind,
            step=self.steps,
            finite=tensors.finite,
            failure=failure,
            options={
                **{name: str(value) for name, value in asdict(self.options).items()},
                # A load is followed by a meeting of its own, which a rank alone would wait in.
                "calls of load_state_dict": self._loads,
                **also,
            },
            groups=[
                {**{name: _plain(group[name]) for name in kept}, "parameters": len(group["params"])}
                for group in self.param_groups
            ],
            layout=self._plan.lines if self._plan is not None else [],
            present=tensors.present,
            values=self._hashes,
        )
        return self._meetings.meet(report)

    @property
    def run_id(self) -> int:
        """A random number that all ranks drew together at their first meeting."""
        return 0 if self._meetings is None else self._meetings.run_id

    def _voter_of_rank(self, ranks: Topology) -> list[int]:
        """Returns the number of each rank's voter: its node, or its replica of shards."""
        if ranks.alike is None:
            return [rank // ranks.local_size for rank in range(ranks.everyone.world_size)]
        number = {rank: own for column in ranks.alike for own, rank in enumerate(column)}
        return [number[rank] for rank in range(ranks.everyone.world_size)]

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
            rank=self._voter,
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

    @property
    def _voter(self) -> int:
        ranks = self._ranks
        return 0 if ranks is None else self._voter_of_rank(ranks)[ranks.everyone.rank]

    def _trainable(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"] if p.requires_grad]

    def _all_named(self) -> list[tuple[str, Tensor]]:
        """Returns all parameters of the groups with their names, frozen ones too."""
        return [
            (group["param_names"][k] if "param_names" in group else f"group {g} parameter {k}", p)
            for g, group in enumerate(self.param_groups)
            for k, p in enumerate(group["params"])
        ]

    def _named(self) -> list[tuple[str, Tensor]]:
        """Returns this rank's parts of all parameters, with their names."""
        return [(name, fsdp.local_part(p.detach())) for name, p in self._all_named()]

    def _hashes(self) -> list[tuple[str, int]]:
        """Returns name and hash of this rank's part of every parameter."""
        named = self._named()
        hashes = fingerprints([p for _, p in named])
        return [(name, value) for (name, _), value in zip(named, hashes, strict=True)]

    def _selected(self, option: str) -> list[bool]:
        """Returns which of all parameters an option selects by name."""
        selection = getattr(self.options, option)
        named = self._all_named()
        if selection is None or (isinstance(selection, str) and selection in SYNC_WORDS):
            return [selection is not None] * len(named)
        if any("param_names" not in group for group in self.param_groups):
            raise ValueError(
                f"{option}={selection!r} selects parameters by name, and they have none: use "
                f"DistributedLion(model.named_parameters())"
            )
        return selected(option, selection, named)

    def _world_size(self) -> int:
        if not (dist.is_available() and dist.is_initialized()):
            return 1
        return dist.get_world_size(self.process_group)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads what `state_dict` returned; momenta keep the dtype that they were saved with.

        Raises:
            ValueError: If it is another optimizer's, or has other groups or numbers of parameters.
        """
        if any("step" not in group for group in state_dict["param_groups"]):
            raise ValueError(
                "the state dict is another optimizer's (its groups have no 'step'), which "
                "DistributedLion can't load: load the model's weights only, and start with a new "
                "optimizer"
            )
        super().load_state_dict(dict(state_dict))
        # torch.distributed.checkpoint writes names where `state_dict` has numbers.
        keys = [key for group in state_dict["param_groups"] for key in group["params"]]
        params = [p for group in self.param_groups for p in group["params"]]
        for key, param in zip(keys, params, strict=True):
            if "exp_avg" in (saved := state_dict["state"].get(key, {})):
                dtype = self.options.momentum_dtype or param.dtype
                # torch casts a momentum to its parameter's dtype, which loses bits.
                momentum = saved["exp_avg"].to(device=param.device, dtype=dtype, copy=True)
                self.state[param]["exp_avg"] = momentum
        self._plan = None
        self._loads += 1
        self._abstained = []

    def __getstate__(self) -> dict[str, Any]:
        """Returns what pickle and deepcopy carry: never the process group."""
        return {**super().__getstate__(), "options": self.options}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restores a pickled or copied optimizer, or torch's part of a loaded state."""
        own = dict(state)
        options = own.pop("options", None)
        super().__setstate__(own)
        if options is not None:
            self._begin(options, None, None)


class _Tensors:
    """This rank's flat tensors in one step, by index of the trainable parameter."""

    def __init__(
        self,
        params: list[Tensor],
        grads: list[Tensor | None],
        momenta: list[Tensor | None],
        present: list[bool],
        finite: bool,
    ) -> None:
        self.params, self.grads, self.momenta = params, grads, momenta
        self.present, self.finite = present, finite

    @classmethod
    def none(cls) -> _Tensors:
        """Returns what a rank has that failed before it could look."""
        return cls([], [], [], [], True)

    def abstain(self, finite: bool, present: list[bool]) -> None:
        """Drops what this rank's voter doesn't vote on; momenta of it stay."""
        for k in range(len(self.grads)):
            if not (finite and present[k]):
                self.grads[k] = self.momenta[k] = None

    def moved(self, agreed: Agreed) -> Flat:
        """Returns the parameters that some rank with finite gradients has a gradient for."""
        return [param if any(agreed.votes(k)) else None for k, param in enumerate(self.params)]


def _plain(value: Any) -> object:
    """Returns a hyperparameter as ranks can compare it."""
    if isinstance(value, (tuple, list)):
        return tuple(float(own) for own in value)
    return float(value)
