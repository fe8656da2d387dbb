"""What a plan says in words: first what doesn't fit into memory, then whether the exchange pays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from hf_dlion.cli.plan.methods import DLION, NODE, NONE, POWER, Case, Prediction

Predictions = Mapping[str, Prediction]

# Below this gain over the best all-reduce the advice is AdamW: the model is no more exact.
WORTH = 1.10
# An all-reduce of which less than this share of a step is exposed is hidden. What another optimizer
# then saves is its own work, or DDP's copies, which gradient_as_bucket_view saves, too.
HIDDEN = 0.05
# How far measurements may differ, and what share of the cores others may use, without a warning.
SPREAD, BUSY = 1.25, 0.2


class _Verdict(NamedTuple):
    pays: bool
    best: str
    why: str


def advice(case: Case, measured: Sequence[Predictions], others: float = 0.0) -> str:
    """Returns whether the exchange of votes pays, in a sentence or two.

    Args:
        case: The case.
        measured: Predictions by the shortest times, and by the longest if this machine was
            measured.
        others: Share of this machine's cores that other processes used meanwhile.
    """
    predictions, verdicts = measured[0], [_verdict(own) for own in measured]
    pays, best, why = verdicts[0]
    if verdicts[-1].pays != pays:
        told = (
            f"Cannot tell whether {DLION} pays, because measurements of this machine differ. By "
            f"the shortest times, {why}. By the longest times, {verdicts[-1].why}"
        )
    elif not pays and others > BUSY:
        # What slows a rank's own work hides the network, even from the shortest times.
        told = (
            f"Cannot tell whether {DLION} pays, because other work slows this machine down. By "
            f"the shortest times, {why}"
        )
    else:
        told = why if pays else f"{why}. Use {best}"
        if POWER in predictions:
            factor = predictions[best].step_s / predictions[POWER].step_s
            if factor >= WORTH:
                told += (
                    f". {POWER} {_compared(factor)} as {best}, if its low rank trains your model"
                )
            best = POWER if factor >= WORTH else best
        local = next(name for name in predictions if "vote_every" in name)
        factor = predictions[best].step_s / predictions[local].step_s
        if factor >= WORTH:
            told += f". {local} {_compared(factor)} as {best}"
    return f"{_memory(case, predictions)}{told}."


def warning(measured: Sequence[Predictions], others: float) -> str:
    """Returns what to say if other processes disturbed the measurement, or ""."""
    times = [own[DLION].step_s - own[DLION].parts["network"] for own in measured]
    short, long = times[0], times[-1]
    if long <= SPREAD * short and others <= BUSY:
        return ""
    return (
        f"Warning: other work seems to use this machine's cores: a rank's own work per step was "
        f"measured between {_ms(short)} and {_ms(long)}. Run this command again when the machine "
        f"is idle, or pass --step-ms or --gpu."
    )


def _verdict(predictions: Predictions) -> _Verdict:
    reduced = [n for n in predictions if n.startswith(("AdamW with DDP", "AdamW with FSDP2"))]
    baseline = min(reduced, key=lambda name: predictions[name].step_s)
    ours = min((n for n in (DLION, NODE) if n in predictions), key=lambda n: predictions[n].step_s)
    rival = predictions[baseline]
    gain = rival.step_s / predictions[ours].step_s
    waits = rival.parts["network"]
    where = f"{_ms(waits)} of {_ms(rival.step_s)} per step of {baseline} wait for the network"
    if waits < HIDDEN * rival.step_s:
        why = f"{DLION} does not pay: {baseline} hides its traffic behind backward"
        return _Verdict(False, baseline, why)
    if gain < WORTH:
        why = f"{DLION} does not pay: {where}, but {ours} {_compared(gain)}"
        return _Verdict(False, baseline, why)
    return _Verdict(True, ours, f"{ours} pays: {where}, and {ours} {_compared(gain)}")


def _memory(case: Case, predictions: Predictions) -> str:
    """Returns what doesn't fit, as the begin of the advice, or ""."""
    has, needed = case.machine.memory_bytes, predictions[DLION].memory_bytes
    adamw = predictions[NONE].memory_bytes
    if adamw <= has:
        return ""
    each = f"{_gb(adamw)} with AdamW and {_gb(needed)} with {DLION}, before activations"
    where = f"and each {case.machine.name} has {_gb(has)}"
    if needed <= has:
        return f"AdamW does not fit into memory: a rank needs {each}, {where}. "
    remedy = "pass a larger --shard" if case.shard > 1 else "pass --shard L to shard it with FSDP2"
    return (
        f"The model does not fit into memory: a rank needs {each}, {where}; {remedy}, or use a "
        f"smaller model. If it did fit: "
    )


def _compared(gain: float) -> str:
    """Returns a gain in words, never a factor below 1."""
    if gain >= 1.005:
        return f"is predicted to be {gain:.2f} times as fast"
    slower = f"{1 / gain:.2f} times as long" if gain <= 0.995 else "as long"
    return f"is predicted to take {slower}"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.0f} ms"


def _gb(size: float) -> str:
    return f"{size / 1e9:,.1f} GB" if size < 1e10 else f"{size / 1e9:,.0f} GB"
