"""What the file of one rank keeps of local steps: this rank's own weights, and their period.

Own weights of 16 bits are kept as displacements, which lose no bits (`vote.local_steps`).
Parameters are numbered as in the file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

import hf_dlion.fsdp as fsdp
from hf_dlion.options import Groups, Options, numbered
from hf_dlion.ranks.fingerprint import fingerprints
from hf_dlion.vote.layout import LOW_PRECISION, Kept, Layout, flat_view, form_of
from hf_dlion.vote.local_steps import LocalSteps, Period
from hf_dlion.vote.step import Schedule


def to_save(local: Schedule, groups: Groups) -> tuple[dict[str, Any] | None, dict[int, Tensor]]:
    """Returns values for JSON, and own weights by number; nothing with `vote_every=1`.

    `bits` decides what the limits mean. Pairs take the place of keys that aren't strings, which
    JSON doesn't have.
    """
    if not isinstance(local, LocalSteps):
        return None, {}
    local.follow(groups)
    params = numbered(groups)
    number_of, own, anchors = {param: k for k, param in enumerate(params)}, {}, {}
    for param, kept in local.kept.items():
        part = fsdp.local_part(param.detach())
        flat = kept.aside if kept.displacement is None else kept.displacement
        own[number_of[param]] = (
            part if flat is None else flat.as_strided(part.size(), part.stride())
        )
        anchors[number_of[param]] = kept.anchor.as_strided(part.size(), part.stride())
    laid_out = local.layout.slots if local.layout else ()
    values = {
        "anchors": dict(zip(anchors, fingerprints([*anchors.values()]), strict=True)),
        "bits": local.options.bits,
        "exchanges": local.exchanges,
        "period": asdict(local.period),
        "used": sorted(number_of[param] for param in local.used),
        "moved": sorted(number_of[param] for param in local.moved),
        "limits": sorted(
            (number_of[param], kept.limit)
            for param, kept in local.kept.items()
            if kept.limit is not None
        ),
        # Without removed ones, so what was rounded before the removal may be rounded otherwise.
        "layout": [number_of[s.param] for s in laid_out if s.param in number_of],
    }
    return values, dict(sorted(own.items()))


def from_json(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values of `to_save` that went through JSON.

    Raises:
        KeyError, TypeError, ValueError: If they are others.
    """
    period, anchors = values["period"], values["anchors"]
    period |= {name: tuple(map(float, period[name])) for name in ("decays", "paths")}
    return {
        **values,
        "period": Period(**period),
        "anchors": {int(number): int(anchors[number]) for number in anchors},
    }


def check(values: Mapping[str, Any], own: Mapping[int, Tensor], groups: Groups) -> None:
    """Refuses a period of other common weights than the model holds, or of other groups.

    Raises:
        ValueError: If so; the text begins with a verb.
    """
    if own.keys() != values["anchors"].keys():
        raise ValueError(
            f"holds own weights of parameters {sorted(own)}, but should hold those of "
            f"{sorted(values['anchors'])}: load an older checkpoint"
        )
    if len(values["period"].decays) not in (0, len(groups)):
        raise ValueError(
            f"was saved between two exchanges with {len(values['period'].decays)} parameter "
            f"groups, but the optimizer has {len(groups)}: add groups after the load"
        )
    params = numbered(groups)
    anchors = values["anchors"]
    found = fingerprints([fsdp.local_part(params[number].detach()) for number in anchors])
    if different := [k for k, own in zip(anchors, found, strict=True) if anchors[k] != own]:
        raise ValueError(
            f"belongs to other weights than the model holds, first in parameter {different[0]}: "
            f"load the model of the same checkpoint first. To continue with other weights, load no "
            f"momenta"
        )


def loaded(
    options: Options,
    values: Mapping[str, Any],
    own: Mapping[int, Tensor],
    groups: Groups,
    layout_of: Callable[[Collection[Tensor]], Layout],
) -> LocalSteps:
    """Returns local steps as after `eval()`, with the model's weights as anchors.

    Args:
        options: Options of this run.
        values: Values of `to_save`, which `check` accepts.
        own: Own weights of `to_save`.
        groups: The parameter groups.
        layout_of: Function that returns the layout of some parameters.
    """
    local = LocalSteps(options, exchanges=values["exchanges"], shown=True)
    params = numbered(groups)
    limits = dict(values["limits"])
    # With 8 bits a limit is one of the largest displacement, otherwise one of a sum.
    comparable = (values["bits"] == 8) == (options.bits == 8)
    for number, weights in own.items():
        param, part = params[number], fsdp.local_part(params[number].detach())
        flat = flat_view(torch.empty_like(part).copy_(weights))
        kept = Kept(flat_view(part).clone(), None, form_of(param))
        if param.dtype in LOW_PRECISION:
            kept.displacement = flat
        else:
            kept.aside = flat
        if number in limits:
            kept.limit = limits[number] if comparable else math.inf
        local.kept[param] = kept
    if any(kept.displacement is not None for kept in local.kept.values()):
        # Which the run that saved had rounded in this layout.
        local.layout = layout_of({params[number] for number in values["layout"]})
    local.period = local.next_period = values["period"]
    local.heads = [next(iter(group["params"]), None) for group in groups]
    local.used = {params[number] for number in values["used"]}
    local.moved = {params[number] for number in values["moved"]}
    return local
