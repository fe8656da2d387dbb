"""The advice of a plan: first what doesn't fit into memory, then whether the exchange pays."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch

from hf_dlion.cli.plan.methods import (
    ALONE,
    DLION,
    HOOK,
    LOCAL_SGD,
    NODE,
    NONE,
    POWER,
    WITH_MOMENTA,
    Case,
    Prediction,
)

Predictions = Mapping[str, Prediction]

# Below this gain over AdamW the advice is AdamW: the model is no more exact.
WORTH = 1.10
# An all-reduce counts as hidden if waiting for it takes less than this share of a step. What
# another optimizer then saves is its own work, or DDP's copies, which gradient_as_bucket_view
# saves, too.
HIDDEN = 0.05
# The share of a GPU's memory that is left for activations; they need more with long sequences.
ACTIVATIONS = 0.1
# How far measurements may differ, and what share of the cores other processes may use, without a
# warning.
SPREAD, BUSY = 1.25, 0.2
_LEARNING = (
    "Start with a third of AdamW's learning rate. On text that is new in each step, the loss may "
    "end above AdamW's."
)


class _Verdict(NamedTuple):
    pays: bool
    best: str
    why: str


def advice(case: Case, measured: Sequence[Predictions], busy: float = 0.0) -> str:
    """Returns whether the exchange of votes pays, in a sentence or two.

    `measured` has predictions by the shortest times, and by the longest if this machine was
    measured. `busy` is the share of its cores that other processes used meanwhile.
    """
    memory, cannot = _memory(case, measured[0]), f"Cannot tell whether {DLION} pays, because"
    predictions, longest = (_fitting(case, measured[place]) for place in (0, -1))
    pays, best, why = _verdict(case, predictions)
    in_long = _verdict(case, longest)
    if in_long.pays != pays:
        return (
            f"{memory}{cannot} measurements of this machine differ. By the shortest times, {why}. "
            f"By the longest times, {in_long.why}."
        )
    if not pays and busy > BUSY:
        # What slows a rank's own work hides the network, even from the shortest times.
        return f"{memory}{cannot} other work slows this machine down. By the shortest times, {why}."
    text = f"{memory}{why}." if pays else f"{memory}{why}. Use {best}."
    text += _momenta(case, best)
    ours, fits = best, measured[0][DLION].memory_bytes <= _room(case)
    power = POWER, ", if its low rank trains your model"
    for name, condition in (*((name, "") for name in _local(case, predictions)), power):
        gain = predictions[best].step_s / predictions[name].step_s if name in predictions else 0.0
        if gain >= WORTH:
            text += f" {name} {_compared(gain)} as {best}{condition}.{_momenta(case, name)}"
            best = name
            ours = ours if name == POWER else name
    text += _left_out(case, measured[0], predictions, best)
    if best in (HOOK, POWER):
        text += " Trainer has no argument for this hook."
        adamw = [name for name in (*_reducing(predictions), ALONE) if name != HOOK]
        adamw = [name for name in adamw if name in predictions]
        if adamw and not ours.startswith(DLION):
            votes = [name for name in (DLION, NODE) if name in predictions]
            name = _fastest(predictions, [*votes, *_local(case, predictions)])
            other = _fastest(predictions, adamw)
            gain = predictions[other].step_s / predictions[name].step_s
            text += f" Without it, {name} {_compared(gain)} as {other}."
            if gain >= WORTH:
                text += _momenta(case, name)
                ours = name
    return text + (_to_set(case, ours) if fits else "")


def warning(measured: Sequence[Predictions], busy: float) -> str:
    """Returns a warning if other processes disturbed the measurement, or ""."""
    times = [found[DLION].step_s - found[DLION].parts["network"] for found in measured]
    short, long = times[0], times[-1]
    if long <= SPREAD * short and busy <= BUSY:
        return ""
    return (
        f"Warning: other work seems to use this machine's cores: a rank's own work per step was "
        f"measured between {_ms(short)} and {_ms(long)}. Run this command again when the machine "
        f"is idle, or pass --step-ms or --gpu."
    )


def _fastest(predictions: Predictions, names: Iterable[str]) -> str:
    return min(names, key=lambda name: predictions[name].step_s)


def _verdict(case: Case, predictions: Predictions) -> _Verdict:
    fastest = partial(_fastest, predictions)
    # Votes in every step are preferred, because local steps keep another number per parameter.
    votes = fastest(n for n in (DLION, NODE) if n in predictions)
    ours = [votes, *_local(case, predictions)]
    alone = [ALONE] if ALONE in predictions else []
    adamw = [*_reducing(predictions), *alone]
    if not adamw:
        return _Verdict(True, votes, f"Use {votes}")
    baseline = fastest(_reducing(predictions) or alone)
    step_s, waits_s = predictions[baseline].step_s, predictions[baseline].parts["network"]
    if baseline != ALONE and waits_s < HIDDEN * step_s:
        why = f"{DLION} does not pay: {baseline} hides its traffic behind backward"
        return _Verdict(False, baseline, why)
    other = fastest(adamw)
    if other == ALONE:
        step_s = predictions[ALONE].step_s
        why = f"{ALONE} would take {_ms(step_s)} for the batches of all nodes"
    else:
        why = f"{_ms(waits_s)} of {_ms(step_s)} per step of {baseline} wait for the network"
    compared = {name: _compared(step_s / predictions[name].step_s) for name in ours}
    for name in ours:
        if step_s / predictions[name].step_s >= WORTH:
            return _Verdict(True, name, f"{name} pays: {why}, and {name} {compared[name]}")
    name = fastest(ours)
    return _Verdict(False, other, f"{DLION} does not pay: {why}, but {name} {compared[name]}")


def _local(case: Case, predictions: Predictions) -> list[str]:
    """Returns the name of the local steps that are advised, if they are there."""
    averages = case.averages_momenta
    return [n for n in predictions if "vote_every" in n and n.endswith(WITH_MOMENTA) == averages]


def _reducing(predictions: Predictions) -> list[str]:
    """Returns the names of AdamW with all-reduces of gradients."""
    return [n for n in predictions if n.startswith(("AdamW with DDP", "AdamW with FSDP2"))]


def _fitting(case: Case, predictions: Predictions) -> Predictions:
    """Returns the methods that fit into memory; all of them if `DistributedLion` doesn't."""
    if predictions[DLION].memory_bytes > _room(case):
        return predictions
    return {name: found for name, found in predictions.items() if found.memory_bytes <= _room(case)}


def _room(case: Case) -> float:
    """Returns the bytes of a rank's memory that activations leave."""
    return (1 - ACTIVATIONS) * case.machine.memory_bytes


def _to_set(case: Case, name: str) -> str:
    """Returns what to set in Trainer, or with FSDP2 in the loop; "" for AdamW."""
    if not name.startswith(DLION):
        return ""
    options = ["local_group=node"] if name.startswith(NODE) else []
    options += re.findall(r"vote_every=\d+", name)
    options += ["momentum_sync_every=1"] if name.endswith(WITH_MOMENTA) else []
    if case.shard > 1:
        arguments = ", ".join(['replicate=mesh["replicate"]', *options])
        return f" With FSDP2 in each node, create DistributedLion(..., {arguments}). {_LEARNING}"
    settings = ['optim="dlion"', *([f'optim_args="{",".join(options)}"'] if options else [])]
    if every := re.search(r"vote_every=(\d+)", name):
        settings += ["average_tokens_across_devices=False", f"logging_steps={every[1]}"]
        settings += ["ddp_find_unused_parameters=False"] if name.startswith(NODE) else []
    return f" {name} in Trainer: {', '.join(settings)}. {_LEARNING}"


def _momenta(case: Case, name: str) -> str:
    """Returns how to average momenta, if the method that is advised does; or ""."""
    if not name.endswith(WITH_MOMENTA):
        return ""
    others = f"{case.nodes} {'ranks' if case.per_node == 1 else 'nodes'}"
    return f" Set momentum_sync_every=1 to average momenta: with {others} it lowers the loss."


def _left_out(case: Case, found: Predictions, fitting: Predictions, best: str) -> str:
    """Returns which methods would be faster than the best one, but don't fit; or ""."""
    limit = found[best].step_s / WORTH
    never = (NONE, LOCAL_SGD)
    advised = [n for n in found if not n.startswith(never) and "vote_every" not in n]
    advised += _local(case, found)
    names = [n for n in advised if n not in fitting and found[n].step_s <= limit]
    if not names:
        return ""
    least = min(found[name].memory_bytes for name in names)
    return (
        f" {' and '.join(names)} would be faster, but {'need' if names[1:] else 'needs'} at least "
        f"{_gb(least)}, and {_has(case)}."
    )


def _memory(case: Case, predictions: Predictions) -> str:
    """Returns the beginning of the advice if something doesn't fit, or ""."""
    has, needed = _room(case), predictions[DLION].memory_bytes
    name = min(_reducing(predictions), key=lambda name: predictions[name].memory_bytes)
    adamw, kind = predictions[name].memory_bytes, " ".join(name.split()[:3])
    if max(adamw, needed) <= has:
        return ""
    needs = (
        f"a rank needs {_gb(adamw)} with {kind} and {_gb(needed)} with {DLION}, and {_has(case)}"
    )
    if needed <= has:
        return f"{kind} does not fit into memory: {needs}. "
    shard = "pass a larger --shard" if case.shard > 1 else "pass --shard L if nodes have L GPUs"
    fits = torch.bfloat16.itemsize * case.work.parameters / case.shard <= has
    all_train = case.work.trainable == case.work.parameters
    lora = " train with LoRA (--trainable)," if all_train and fits else ""
    return (
        f"The model does not fit into memory: {needs}. To fit it, {shard},{lora} or use a smaller "
        f"model. If it did fit: "
    )


def _compared(gain: float) -> str:
    """Returns a gain in words, never a factor below 1."""
    if gain >= 1.005:
        return f"is predicted to be {gain:.2f} times as fast"
    slower = f"{1 / gain:.2f} times as long" if gain <= 0.995 else "as long"
    return f"is predicted to take {slower}"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.0f} ms"


def _has(case: Case) -> str:
    return (
        f"each {case.machine.name} has {_gb(case.machine.memory_bytes)}, of which activations need "
        f"{ACTIVATIONS:.0%} or more"
    )


def _gb(size: float) -> str:
    return f"{size / 1e9:,.1f} GB" if size < 1e10 else f"{size / 1e9:,.0f} GB"
