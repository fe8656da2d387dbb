"""DDP's communication hook: keeps gradients on their rank, or averages them inside a node.

A DDP wrapper accepts one communication hook and keeps it forever. `attach` registers the hook, and
the wrapper lists the optimizers that own its parameters. While the list is empty, the hook averages
gradients over all ranks, as DDP does without a hook.

While every rank votes with its own gradients, `ddp_buckets` frees the wrapper's buckets.
"""

# No "from __future__ import annotations", because DDP compares a hook's annotations with types.
import functools
import weakref
from collections.abc import Iterable
from typing import Any, Protocol, TypeVar, cast
from weakref import WeakKeyDictionary, WeakSet

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

import hf_dlion.ddp_buckets as ddp_buckets

M = TypeVar("M", bound=nn.Module)

# Name of the wrapper's attribute that keeps its owners.
_OWNERS = "_hf_dlion_owners"


class Owner(Protocol):
    """An optimizer for which `attach` changes a wrapper's gradients, such as `DistributedLion`."""

    param_groups: list[dict[str, Any]]

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The ranks that train one model; None for the default group."""

    @property
    def node_group(self) -> dist.ProcessGroup | None:
        """The ranks that average gradients; None if every rank votes for itself."""


class _Owners(list[Owner]):
    """The owners in a wrapper's attribute; a copied or unpickled wrapper has none.

    A wrapper keeps its owners alive until `detach`. If they ended with the user's last reference,
    each rank would notice when Python collects its garbage. They aren't in the hook's state, which
    the reducer refers to in a way that Python's collector can't follow.
    """

    def __reduce__(self) -> tuple[type["_Owners"], tuple[()]]:
        return _Owners, ()


class WrapperState:
    """The hook's state. A copied or unpickled one has no wrapper, so a copied wrapper averages.

    Attributes:
        ddp: Weak reference to the wrapper.
        averaged: Parameters in the buckets. Until the first backward, those that are trainable.
        buckets_checked: Whether all parameters in the wrapper's buckets were found to have owners.
        calls: Number of calls of the hook.
    """

    def __init__(self, ddp: DistributedDataParallel | None = None) -> None:
        self.ddp = (lambda: None) if ddp is None else weakref.ref(ddp)
        self.averaged: set[Tensor] = set() if ddp is None else set(_trainable(ddp))
        if ddp is not None:
            vars(ddp)[_OWNERS] = _Owners()
        self.buckets_checked, self.calls = False, 0
        # What the wrapper had in its buckets, while they are freed.
        self._reduced: set[Tensor] = set()

    def __reduce__(self) -> tuple[type["WrapperState"], tuple[()]]:
        return WrapperState, ()

    @property
    def owners(self) -> list[Owner]:
        """The attached optimizers, the latest last, which counts for a parameter that two have."""
        return [] if (ddp := self.ddp()) is None else [*vars(ddp)[_OWNERS]]

    def set_owners(self, owners: Iterable[Owner]) -> None:
        """Replaces the owners of a wrapper."""
        before, kept = self.owners, vars(self.ddp())[_OWNERS]
        kept[:] = owners
        try:
            self.set_synchronization()
            self._fit_buckets()
        except Exception:  # Such as too little memory for buckets: the call can be repeated.
            kept[:] = before
            self.set_synchronization()
            raise

    def set_synchronization(self) -> None:
        """Turns off DDP's synchronization, as `no_sync()` does, if gradients stay on their rank.

        DDP then doesn't copy gradients into buckets, and doesn't communicate. Synchronization stays
        on for averages inside a node, for parameters without an owner, which the hook refuses, for
        buffers that are part of the model's state, and for the first iteration of a static graph,
        in which DDP counts the backward passes without synchronization.
        """
        ddp, owners = self.ddp(), self.owners
        if ddp is None:
            return
        new_graph = ddp.static_graph and not ddp._static_graph_delay_allreduce_enqueued
        votes_alone = bool(owners) and owners[-1].node_group is None
        local = votes_alone and _owner_of(owners).keys() >= set(_trainable(ddp))
        local = local and not new_graph and not broadcasts_state(ddp)
        ddp.require_backward_grad_sync = cast(bool, _Off(self)) if local else True
        ddp.require_forward_param_sync = not local

    def _fit_buckets(self) -> None:
        """Frees DDP's buckets if gradients stay on their rank, or makes them again."""
        ddp = self.ddp()
        if ddp is None or not ddp_buckets.can_be_freed(ddp):
            return
        frees = isinstance(ddp.require_backward_grad_sync, _Off)
        if frees and not self._reduced:
            self._reduced = ddp_buckets.free(ddp)
            _register_hook(ddp, self)
        elif not frees and self._reduced:
            ddp_buckets.restore(ddp, self._reduced)
            _register_hook(ddp, self)
            self._reduced = set()


class _Off:
    """False while a wrapper has owners, also if `no_sync()` puts it back afterwards.

    It copies and pickles as True, so a copied wrapper averages.
    """

    def __init__(self, state: WrapperState) -> None:
        self._state = state

    def __bool__(self) -> bool:
        return not self._state.owners

    def __reduce__(self) -> tuple[type[bool], tuple[bool]]:
        return bool, (True,)


_states: WeakKeyDictionary[DistributedDataParallel, WrapperState] = WeakKeyDictionary()
_introduced: WeakSet[Owner] = WeakSet()


def lion_hook(
    state: WrapperState,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> Future[Tensor]:
    """Returns the bucket's gradients: unchanged, averaged in the node, or averaged as by DDP.

    Without owners it averages over all ranks of the wrapper. An average is one all-reduce of the
    bucket, which all ranks of the group must call.

    Args:
        state: State of the wrapper's hook.
        bucket: DDP's bucket of gradients.

    Raises:
        RuntimeError: In `ddp.join()`, or if a parameter of the bucket has no owner.
    """
    ddp, owners = state.ddp(), state.owners
    assert ddp is not None  # The wrapper's reducer calls this function.
    state.calls += 1
    if not owners:
        return allreduce_hook(ddp.process_group, bucket)
    _refuse_join(ddp)
    if not state.buckets_checked:
        if bucket.index() == 0:
            state.averaged = set()
        state.averaged.update(bucket.parameters())
        _refuse_unowned((p for p in bucket.parameters() if p.requires_grad), owners)
        if bucket.is_last():
            state.buckets_checked = True
            state.set_synchronization()
    group = owners[-1].node_group
    return noop_hook(None, bucket) if group is None else allreduce_hook(group, bucket)


def introduce(owner: Owner) -> None:
    """Makes parameters of `owner` known, so `attach` accepts them before `owner` is attached."""
    _introduced.add(owner)


def attach(model: nn.Module, owner: Owner) -> None:
    """Makes an optimizer the owner of a wrapper's parameters, so DDP stops averaging gradients.

    An earlier owner loses the parameters that both optimizers have. All ranks must call this at the
    same point, outside of `no_sync()`.

    Args:
        model: A `DistributedDataParallel`, or a module that has one in it.
        owner: The optimizer.

    Raises:
        TypeError: If `model` isn't a wrapper.
        ValueError: If `owner` has none of the wrapper's parameters, or uses other groups of ranks;
            or if there are several wrappers.
        RuntimeError: If trainable parameters have no owner, or the wrapper reduces gradients in a
            way that a hook can't replace.
    """
    ddp = wrapper_in(model)
    if ddp is None:
        raise TypeError(
            "attach() needs a DistributedDataParallel, or a module with one in it (got "
            f"{type(model).__name__}): wrap the model first"
        )
    _refuse_other_reductions(ddp)
    trainable = _trainable(ddp)
    if _owner_of([owner]).keys().isdisjoint(trainable):
        raise ValueError(
            f"the optimizer holds none of the {len(trainable)} trainable parameters of the DDP "
            f"wrapper of {type(ddp.module).__name__}: attach the wrapper of the model that the "
            "optimizer was created for"
        )
    ddp_ranks = dist.get_process_group_ranks(ddp.process_group)
    # torch 2.6 doesn't take None.
    owner_ranks = dist.get_process_group_ranks(owner.process_group or dist.group.WORLD)
    if ddp_ranks != owner_ranks:
        raise ValueError(
            f"the DDP wrapper averages over ranks {ddp_ranks}, but the optimizer votes among ranks "
            f"{owner_ranks}: pass the same process_group to both"
        )
    state = _states.get(ddp)
    earlier = [other for other in (state.owners if state else []) if other is not owner]
    owner_of = _owner_of([*earlier, owner])
    earlier = [o for o in earlier if any(owner_of.get(param) is o for param in trainable)]
    if any(other.node_group is not owner.node_group for other in earlier):
        raise ValueError(
            "the optimizers of one DDP wrapper average gradients among different ranks: use one "
            "local_group for all of them"
        )
    _refuse_unowned(trainable, [*_introduced, *earlier, owner])

    if state is None:
        state = _states[ddp] = _register(ddp)
    # DDP broadcasts the order of buckets after its first backward: now, not in a later forward.
    ddp.reducer._rebuild_buckets()
    state.set_owners([*earlier, owner])
    _watch_steps()


def detach(owner: Owner) -> None:
    """Removes an owner from its wrappers; all ranks must call this.

    A wrapper without owners averages gradients again.
    """
    for state in _states.values():
        if owner in state.owners:
            state.set_owners(other for other in state.owners if other is not owner)
            state.buckets_checked = False


def wrapper_in(model: nn.Module) -> DistributedDataParallel | None:
    """Returns the wrapper that `model` is, or the only one in it; None without one.

    torch.compile, Fabric, and Accelerate put a wrapper into other modules.

    Raises:
        ValueError: If there are several.
    """
    return only_one(model, DistributedDataParallel)


def only_one(model: nn.Module, kind: type[M]) -> M | None:
    """Returns the module of a class that `model` is, or the only outermost one in it.

    Raises:
        ValueError: If there are several.
    """
    matches = [module for module in model.modules() if isinstance(module, kind)]
    inner = {part for module in matches for part in module.modules() if part is not module}
    outermost = [module for module in matches if module not in inner]
    if len(outermost) > 1:
        raise ValueError(
            f"{type(model).__name__} has {len(outermost)} modules of class {kind.__name__}, none "
            f"in another: call attach() with each of them"
        )
    return outermost[0] if outermost else None


def hook_states(owner: Owner) -> dict[DistributedDataParallel, WrapperState]:
    """Returns the wrappers that `owner` is attached to, with the states of their hooks."""
    return {ddp: state for ddp, state in _states.items() if owner in state.owners}


def _register(ddp: DistributedDataParallel) -> WrapperState:
    state = WrapperState(ddp)
    try:
        _register_hook(ddp, state)
    except RuntimeError as error:  # One of DDP's built-in hooks, which `_comm_hooks` doesn't list.
        ddp._comm_hooks.clear()
        raise RuntimeError(f"the DDP wrapper already has a communication hook: {error}") from error
    return state


def _register_hook(ddp: DistributedDataParallel, state: WrapperState) -> None:
    # The wrapper lists our hook if it is a copy or had another reducer, but this one has none.
    ddp._comm_hooks.clear()
    ddp.register_comm_hook(state, lion_hook)


def _trainable(ddp: DistributedDataParallel) -> list[nn.Parameter]:
    named, ignored = ddp.module.named_parameters(), ddp.parameters_to_ignore
    return [param for name, param in named if param.requires_grad and name not in ignored]


def _owner_of(owners: Iterable[Owner]) -> dict[Tensor, Owner]:
    return {param: o for o in owners for group in o.param_groups for param in group["params"]}


def broadcasts_state(ddp: DistributedDataParallel) -> bool:
    """Returns whether DDP broadcasts buffers of the state dict before each forward.

    Each rank's data may change them, as with batch norm. Other buffers, such as the frequencies of
    rotary embeddings, follow from the model's config.
    """
    state = (
        f"{prefix}.{name}".lstrip(".")
        for prefix, module in ddp.module.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    )
    return bool(ddp.broadcast_buffers) and not ddp.parameters_to_ignore.issuperset(state)


def asks_who_uses_parameters(ddp: DistributedDataParallel) -> bool:
    """Returns whether DDP asks all of its ranks in each backward which parameters are used."""
    return bool(ddp.find_unused_parameters) and not ddp.static_graph


def _refuse_other_reductions(ddp: DistributedDataParallel) -> None:
    if ddp._use_python_reducer:
        raise RuntimeError(
            'torch._dynamo.config.optimize_ddp = "python_reducer" calls no communication hook: set '
            "it to True before you wrap the model"
        )
    if delayed := len(ddp._delay_all_reduce_params):
        raise RuntimeError(
            f"the DDP wrapper averages {delayed} parameters without a communication hook: wrap the "
            "model without delay_all_reduce_named_params"
        )
    if hooks := [hook for hook, _ in ddp._comm_hooks if hook is not lion_hook]:
        raise RuntimeError(
            f"the DDP wrapper already has the communication hook {hooks[0].__qualname__!r} and "
            "accepts only one: wrap the model without registering that hook"
        )
    _refuse_join(ddp)


def refuse_unowned(model: nn.Module, owner: Owner) -> None:
    """Refuses an FSDP2 model with trainable parameters that no DistributedLion has.

    Raises:
        RuntimeError: If there are some, because FSDP2 doesn't average between replicas.
    """
    params = [param for param in model.parameters() if param.requires_grad]
    _refuse_unowned(params, [*_introduced, owner], "FSDP2 model")


def _refuse_unowned(
    params: Iterable[Tensor], owners: Iterable[Owner], what: str = "DDP wrapper"
) -> None:
    owned = _owner_of(owners)
    if count := sum(param not in owned for param in params):
        raise RuntimeError(
            f"{count} trainable parameters of the {what} belong to no attached optimizer, so "
            "nothing would average their gradients: add them to the optimizer, attach the "
            "DistributedLion that has them, or freeze them before you wrap the model"
        )


def _refuse_join(ddp: DistributedDataParallel) -> None:
    if ddp._join_config.enable:  # It stays True after the first `join`.
        raise RuntimeError(
            "DistributedLion does not work in ddp.join(), because a rank without data cannot vote: "
            "use the same number of batches on every rank, and a wrapper that never joined"
        )


@functools.cache
def _watch_steps() -> None:
    """Checks the steps of all optimizers from now on; the first `attach` of a process calls it."""
    register_optimizer_step_pre_hook(_check_step)


def _check_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    """Refuses a step on parameters that another attached optimizer owns.

    An optimizer around it, such as Lookahead or SAM, calls its step.
    """
    inner = getattr(optimizer, "optimizer", getattr(optimizer, "base_optimizer", None))
    for ddp, state in _states.items():
        owners = state.owners
        if inner in owners:
            continue
        if optimizer in owners and ddp._join_config.enable:
            _refuse_join(ddp)  # The hook isn't called if DDP's synchronization is off.
        if not owners or owners == [optimizer]:
            continue
        owner_of, attached = _owner_of(owners), set(_trainable(ddp))
        for param in (param for group in optimizer.param_groups for param in group["params"]):
            if param in attached and owner_of.get(param) is not optimizer:
                raise RuntimeError(
                    f"{type(optimizer).__name__} would step gradients that DDP did not average, "
                    "because another optimizer is attached to the wrapper of its parameters: "
                    "attach this one too, or call detach() on the other one"
                )
