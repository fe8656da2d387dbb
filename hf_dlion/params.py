"""An optimizer's parameters: their names, which options select them, and what a step collects.

`Params` reads groups and states of a torch optimizer, whose `load_state_dict` replaces them. The
layout (`core.layout`) has this rank's local parts of what FSDP2 shards.
"""

from __future__ import annotations

import difflib
import weakref
from collections.abc import Collection, Mapping, MutableMapping, Sequence
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

import hf_dlion.fsdp as fsdp
from hf_dlion.core.flat import check_unscalable, flat_gradient, flat_view, momentum_of, numbers
from hf_dlion.core.idle_rows import survey
from hf_dlion.core.layout import Layout
from hf_dlion.core.slot import LocalState, Slot
from hf_dlion.options import ALL, Options, Selection, patterns


class Params:
    """The parameters of an optimizer.

    Names are those that were passed, then those of models. Groups don't get names of models,
    because torch refuses to add a group without names to groups that have names.

    Attributes:
        ages: Ages of rows (`core.idle_rows`), by parameter; each rank has its own.
        fsdp_models: The attached FSDP2 models.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        options: Options,
        replicate: dist.ProcessGroup | None,
        local_states: dict[Tensor, LocalState],
    ) -> None:
        """Begins without models.

        `replicate` is the group of ranks with the same FSDP2 shards. `local_states` has what a
        period of local steps keeps, by parameter; one that leaves its group leaves it, too.
        """
        self._optimizer: Any = weakref.proxy(optimizer)  # Not a cycle.
        self._options, self._replicate = options, replicate
        self._in_models: MutableMapping[Tensor, str] = WeakTensorKeyDictionary()
        self._models, self._layout = 0, Layout()
        self._local_states = local_states
        self.ages: dict[Tensor, Tensor] = {}
        self.fsdp_models: list[nn.Module] = []

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The parameter groups."""
        groups: list[dict[str, Any]] = self._optimizer.param_groups
        return groups

    @property
    def state(self) -> dict[Tensor, dict[str, Any]]:
        """The optimizer's state by parameter."""
        state: dict[Tensor, dict[str, Any]] = self._optimizer.state
        return state

    @property
    def steps(self) -> int:
        """Number of the last step that was counted."""
        return int(self.groups[0]["step"])

    # Names.

    def named(self) -> list[tuple[str, Tensor]]:
        """Returns names and all parameters, frozen ones included.

        A parameter without a name is called "group 0 parameter 1".
        """
        return [
            (name or f"group {g} parameter {k}", p)
            for g, group in enumerate(self.groups)
            for k, (name, p) in enumerate(self._of_group(group))
        ]

    def name_as(self, model: nn.Module) -> None:
        """Names parameters as a model does, except those that were passed with names.

        Names are those without what `torch.compile` adds. If an earlier model has one of them, they
        begin with "model 2: ".

        Raises:
            ValueError: If all parameters have names now, and one that an option needs is missing.
        """
        names: dict[Tensor, str] = {
            param: ".".join(part for part in name.split(".") if part != "_orig_mod")
            for name, param in model.named_parameters()
        }
        if not all(p in self._in_models for p in names):
            self._models += 1
            others = {name for p, name in self._in_models.items() if p not in names}
            if others & set(names.values()):
                names = {p: f"model {self._models}: {name}" for p, name in names.items()}
            self._in_models.update(names)
            self.forget_layout()  # It has the old names.
        self.check_selections()

    def check_selections(self) -> None:
        """Checks the options that select by name if all names are known.

        Raises:
            ValueError: If a pattern or a function selects nothing, or momenta would be averaged
                that are equal anyway.
        """
        if all(name is not None for group in self.groups for name, _ in self._of_group(group)):
            self.selected("full_precision")
            chosen = any(self.selected("momentum_sync"))
            averages = chosen and self._options.momentum_sync_every
            if averages and not any(self._synchronized()):
                raise ValueError(
                    "momentum_sync would have no effect: full_precision keeps all selected "
                    "momenta equal on all ranks. Leave out momentum_sync_every"
                )

    def selected(self, option: str) -> list[bool]:
        """Returns which of all parameters an option selects.

        Raises:
            ValueError: If the option selects by name and no parameter has a name, or if a pattern
                matches no name.
        """
        value = getattr(self._options, option)
        is_all = option == "momentum_sync" and value == ALL
        if value is None or is_all:
            return [is_all for group in self.groups for _ in group["params"]]
        if not any(name for group in self.groups for name, _ in self._of_group(group)):
            raise ValueError(
                f"{option}={value!r} selects parameters by name, but the parameters have no names: "
                f"use DistributedLion(model.named_parameters()), or call optimizer.attach(model) "
                f"before the first step"
            )
        return matched(option, value, self.named())

    def _synchronized(self) -> list[bool]:
        """Returns of which parameters the ranks average momenta that differ, as `momentum_sync`."""
        chosen = self.selected("momentum_sync")
        if self._options.vote_every > 1:  # In local steps, momenta of `full_precision` differ, too.
            return chosen
        averaged = self.selected("full_precision")  # Their momenta are equal.
        return [synced and not equal for synced, equal in zip(chosen, averaged, strict=True)]

    def _of_group(self, group: Mapping[str, Any]) -> list[tuple[str | None, Tensor]]:
        passed = group.get("param_names") or [None] * len(group["params"])
        pairs = zip(passed, group["params"], strict=True)
        return [(self._in_models.get(p) if name is None else name, p) for name, p in pairs]

    # What a step collects.

    def forget_layout(self) -> None:
        """Makes the next step lay out the parameters anew."""
        self._layout = Layout()

    def fresh_layout(self) -> Layout:
        """Returns the layout without gradients, a new one if parameters were added or (un)frozen.

        It is the same object as long as it is the same layout, by which others know that they have
        checked or compiled for it. A parameter with a local state counts as trainable, also if it
        is frozen. One that was removed from the groups gets its anchor. With FSDP2 this frees
        gathered parameters, so the next forward gathers what is written.

        Raises:
            ValueError: If two parameters share memory.
        """
        states = self._local_states
        fsdp.reshard(self.fsdp_models)
        trained = [
            (g, p)
            for g, group in enumerate(self.groups)
            for p in group["params"]
            if p.requires_grad or p in states
        ]
        # Every step compares this, so it must be cheap.
        key = [(g, id(p), p.dtype, p.device, p.shape, p.stride()) for g, p in trained]
        with torch.no_grad():
            if self._layout.key != key:
                self._layout = self._laid_out(key, {p for _, p in trained})
                for p in states.keys() - {p for _, p in trained}:
                    states.pop(p).restore_anchor(fsdp.local_part(p.detach()))
            for slot in self._layout.slots:
                slot.part = fsdp.local_part(slot.param.detach())
                slot.p = flat_view(slot.part)
                slot.grad = slot.momentum = None
                if (state := states.get(slot.param)) is not None:
                    state.fit(slot.name, slot.part)
                slot.local = state
        return self._layout

    def _laid_out(self, key: object, trained: Collection[Tensor]) -> Layout:
        averaged, synced = self.selected("full_precision"), self._synchronized()
        group_of = [g for g, group in enumerate(self.groups) for _ in group["params"]]
        slots: list[Slot] = []
        for k, (name, p) in enumerate(self.named()):
            if p in trained:
                slots.append(slot := Slot.of(p, group_of[k], fsdp.local_part(p.detach())))
                slot.full_precision = averaged[k]
                slot.synced = synced[k]
                slot.name = name
        fsdp.check_sharding([(slot.name, slot.param) for slot in slots], self._replicate)
        _check_memory(slots)
        return Layout(key, slots)

    def take_scale(self) -> tuple[float, bool]:
        """Returns what GradScaler left for this step, its scale and whether it found an Inf.

        A step that raises takes them, too: GradScaler multiplies a scale that it finds.
        """
        optimizer = self._optimizer
        scale = getattr(optimizer, "grad_scale", None)
        found_inf = getattr(optimizer, "found_inf", None)
        if scale is not None or found_inf is not None:
            optimizer.grad_scale, optimizer.found_inf = 1.0, None
        number = 1.0 if scale is None else float(scale)
        return number, found_inf is not None and float(found_inf) > 0

    def collect(self, layout: Layout, scale: float, found_inf: bool) -> bool:
        """Fills the layout with gradients and momenta; returns whether gradients are finite.

        They stay scaled until all ranks agree, so `GradScaler.step` can be called again if a step
        fails before that.
        """
        slots = layout.slots
        for slot in slots:
            p = slot.param
            if p.grad is not None and p.requires_grad:
                grad = fsdp.local_part(p.grad.detach())
                slot.grad = flat_gradient(slot.name, grad, slot.part)
        if scale != 1:
            check_unscalable([slot.grad for slot in slots if slot.grad is not None])
        is_finite = not found_inf and survey(slots)  # No NaN, and no Inf.
        if self._only_creates_state(slots):
            # Without gradients no rank votes, and no step is counted.
            for slot in slots:
                self.flat_momentum(slot.param)
                slot.grad = None
        for slot in slots:
            if slot.grad is not None:
                slot.momentum = self.flat_momentum(slot.param)
        return is_finite

    def _only_creates_state(self, slots: Sequence[Slot]) -> bool:
        """Returns whether this is the step of torch.distributed.checkpoint's `_init_optim_state`.

        It takes one with a learning rate and gradients of zero, before there is a state.
        """
        if self.state or any([float(group["lr"]) for group in self.groups]):
            return False
        grads = [slot.grad for slot in slots if slot.grad is not None]
        return not any(numbers([grad.any() for grad in grads]))

    def flat_momentum(self, param: Tensor) -> Tensor:
        """Returns this rank's part of a parameter's momentum, flat; zeros at the first call."""
        state, dtype = self.state[param], self._options.momentum_dtype
        return flat_view(fsdp.local_part(momentum_of(state, param.detach(), dtype)))

    def common_parts(self) -> list[tuple[str, Tensor]]:
        """Returns name and this rank's part of every parameter, within a period its anchor.

        These are the weights that must be equal on all ranks.
        """
        parts = []
        for name, param in self.named():
            state = self._local_states.get(param)
            parts.append((name, fsdp.local_part(param.detach()) if state is None else state.anchor))
        return parts


def _check_memory(slots: Sequence[Slot]) -> None:
    """Refuses two parameters in the same memory, of which a step may lose one's move."""
    places = sorted((slot.part.data_ptr(), slot.part.nbytes, slot.name) for slot in slots)
    for (start, size, name), (other, _, other_name) in pairwise(places):
        if other < start + size:
            raise ValueError(
                f"{name!r} and {other_name!r} are two parameters that share memory, and each would "
                f"overwrite what the other writes: tie them by assigning the same Parameter"
            )


def matched(option: str, selection: Selection, named: Sequence[tuple[str, Tensor]]) -> list[bool]:
    """Returns which parameters a selection matches.

    Args:
        option: Name of the option, for error messages.
        selection: Case-sensitive patterns as for `fnmatch`, or a function of name and parameter.
        named: Names and parameters.

    Raises:
        ValueError: If a function chooses nothing, or a pattern matches no name; the message lists
            similar names.
    """
    if callable(selection):
        chosen = [bool(selection(name, param)) for name, param in named]
        if not any(chosen):
            raise ValueError(
                f"{option}={selection!r} chooses none of the {len(named)} parameters, such as "
                f"{named[0][0]!r}"
            )
        return chosen
    wanted = patterns(selection)
    names = [name for name, _ in named]
    for pattern in wanted:
        if not any(fnmatchcase(name, pattern) for name in names):
            bare = pattern.strip("*")
            near = [name for name in names if bare and bare.lower() in name.lower()][:3]
            near += difflib.get_close_matches(bare, names, n=3, cutoff=0.0)
            close = ", ".join(map(repr, list(dict.fromkeys(near))[:4]))
            raise ValueError(
                f"{option}={selection!r}: no parameter's name matches {pattern!r}, where * stands "
                f"for any text. Similar names: {close}"
            )
    return [any(fnmatchcase(name, pattern) for pattern in wanted) for name in names]
