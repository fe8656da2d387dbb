"""What an optimizer holds on this rank: groups, momenta, and how its tensors are laid out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import hf_dlion.fsdp as fsdp
from hf_dlion.exchange.wire import WireStats
from hf_dlion.options import Options, check_group
from hf_dlion.ranks.agreement import Abstentions, Meetings
from hf_dlion.ranks.fingerprint import fingerprints
from hf_dlion.ranks.topology import Topology
from hf_dlion.vote import groups, local
from hf_dlion.vote.local import Plan, Tensors
from hf_dlion.vote.local_steps import LocalSteps
from hf_dlion.vote.update import Scratch


class LionState(torch.optim.Optimizer):
    """Parameter groups and momenta as torch knows them, and this process's part beside them."""

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
        self._fsdp_model: nn.Module | None = None
        self._local = LocalSteps(options.bits)
        self._stepped = False  # in this process, unlike `steps`
        self._meets_next = True  # where steps are local
        self._loads = self._compared_loads = self._attaches = 0
        self._scratch = Scratch()
        self._abstentions = Abstentions(options.max_abstained_steps)
        self._compared = {name: str(value) for name, value in asdict(options).items()}

    @property
    def steps(self) -> int:
        """Number of the last step that moved anything."""
        return int(self.param_groups[0]["step"])

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

    def momentum_divergence(self) -> dict[str, float]:
        """Returns how far the ranks' momenta differ, by name, as momentum_sync="auto" measured it.

        0: all ranks have one momentum. About 1 - 1/N: they have nothing in common.
        """
        return {
            name: float(self.state[p]["divergence"])
            for name, p in groups.named(self.param_groups)
            if "divergence" in self.state.get(p, {})
        }

    def _collect(self) -> Tensors:
        """Returns this rank's flat tensors; unscales gradients if GradScaler left that to us."""
        plan, whole, params = self._planned()
        grads: list[Tensor | None] = [None] * len(whole)
        for k, p in enumerate(whole):
            if p.grad is not None:
                name, grad = str(plan.lines[k][0]), fsdp.local_part(p.grad.detach())
                grads[k] = local.flat_gradient(name, grad, params[k])
        finite = self._unscale([grad for grad in grads if grad is not None])
        if not self.state and not any([float(group["lr"]) for group in self.param_groups]):
            # torch.distributed.checkpoint takes such a step, with zeros for gradients, to have the
            # state made. Nobody votes in it, so it changes and counts nothing.
            for k, p in enumerate(whole):
                self._momentum(p)
                zeros = grads[k]
                if zeros is not None and not zeros.any():
                    grads[k] = None
        momenta: list[Tensor | None] = [None] * len(whole)
        for k, p in enumerate(whole):
            if grads[k] is not None:
                momenta[k] = self._flat_momentum(p)
        present = [grad is not None for grad in grads]
        return Tensors([local.flat_view(p) for p in params], grads, momenta, present, finite)

    def _planned(self) -> tuple[Plan, list[Tensor], list[Tensor]]:
        """Returns the plan, made anew if tensors have changed, and trainable and local tensors."""
        trainable = groups.trainable(self.param_groups)
        params = [fsdp.local_part(p.detach()) for p in trainable]
        shapes = local.shapes_of(params, self.param_groups)
        identities = list(map(id, trainable))
        if self._plan is None or self._plan.shapes != shapes or self._plan.identities != identities:
            named = [(n, p) for n, p in groups.named(self.param_groups) if p.requires_grad]
            fsdp.check_sharding(named, self._replicate)
            full = groups.selection(self.param_groups, self.options, "full_precision")
            own = [
                f
                for f, (_, p) in zip(full, groups.named(self.param_groups), strict=True)
                if p.requires_grad
            ]
            self._plan = Plan.of(params, self.param_groups, own)
            self._plan.identities, self._meets_next = identities, True
            for p in self._local.anchors.keys() - set(trainable):  # Nobody moves them any more.
                with torch.no_grad():
                    self._local.drop(p, local.flat_view(fsdp.local_part(p.detach())))
        return self._plan, trainable, params

    def _flat(self) -> tuple[Plan, list[Tensor], list[Tensor]]:
        """Returns the plan, and trainable and flat local tensors, which may be written."""
        plan, whole, params = self._planned()
        fsdp.reshard(self._fsdp_model)
        return plan, whole, [local.flat_view(p) for p in params]

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

    def _flat_momentum(self, param: Tensor) -> Tensor:
        """Returns this rank's part of a parameter's momentum, flat."""
        return local.flat_view(fsdp.local_part(self._momentum(param)))

    def _named(self) -> list[tuple[str, Tensor]]:
        """Returns this rank's parts of all parameters, with names: what all ranks have of them."""
        named = [(n, p, fsdp.local_part(p.detach())) for n, p in groups.named(self.param_groups)]
        anchors = {} if self._local.swapped else self._local.anchors
        return [
            (n, anchors[p].as_strided(part.size(), part.stride()) if p in anchors else part)
            for n, p, part in named
        ]

    def _hashes(self) -> list[tuple[str, int]]:
        """Returns name and hash of this rank's part of every parameter."""
        named = self._named()
        hashes = fingerprints([p for _, p in named])
        return [(name, value) for (name, _), value in zip(named, hashes, strict=True)]

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
        self._local = LocalSteps(self.options.bits, swapped=self._local.swapped)
        self._loads += 1
        if self._meetings is not None and self.options.vote_every > 1:
            # Without loading the model, too, each rank goes on with its own weights.
            self._meetings.compare_again()
        self._abstentions = Abstentions(self.options.max_abstained_steps)

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
