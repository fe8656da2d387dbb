"""What a plan prints: the verdict in words, and the tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hf_dlion.tools.bench.methods import DLION, NONE, POWER
from hf_dlion.tools.plan.cost import Link
from hf_dlion.tools.plan.methods import ALL_REDUCES, OVERLAPPED, PARTS, Case, Prediction

Predictions = Mapping[str, Prediction]

# Below this gain over the best all-reduce the advice is to stay with it: the model is no better.
WORTH = 1.10
# An all-reduce that exposes less of its step than this is hidden: what another optimizer saves on
# its own work, or DDP's copies (`gradient_as_bucket_view` saves those too), is no matter of bits.
HIDDEN = 0.05


def best_all_reduce(predictions: Predictions) -> Prediction:
    """Returns the fastest of the gradient all-reduces."""
    found = [predictions[name] for name in ALL_REDUCES if name in predictions]
    return min(found, key=lambda prediction: prediction.step_s)


def gain(predictions: Predictions, ours: str = DLION) -> float:
    """Returns how many times faster than the best all-reduce a step of ours is predicted to be."""
    return best_all_reduce(predictions).step_s / predictions[ours].step_s


def is_hidden(prediction: Prediction) -> bool:
    """Returns whether next to nothing of the step waits for the wire."""
    return prediction.parts["wire"] < HIDDEN * prediction.step_s


def pays(predictions: Predictions) -> bool:
    """Returns whether the exchange of votes is worth another optimizer, overlapped or not."""
    if is_hidden(best_all_reduce(predictions)):
        return False
    return max(gain(predictions), gain(predictions, OVERLAPPED)) >= WORTH


def verdict(case: Case, predictions: Predictions) -> str:
    """Returns in words whether the exchange of votes pays, with the predicted ratios."""
    rival = best_all_reduce(predictions)
    step, overlapped = gain(predictions), gain(predictions, OVERLAPPED)
    state = f"waits {1e3 * rival.parts['wire']:,.0f} ms of {1e3 * rival.step_s:,.0f} for the wire"
    if is_hidden(rival):
        state = "hides its all-reduce behind backward"
    found = f"at {rate(case.link)} with {case.cluster.ranks} ranks {rival.name} {state}"
    if pays(predictions):
        only = "" if step >= WORTH else " with overlap=True only"
        text = (
            f"{case.bits}-bit exchange pays{only}: {found}; DistributedLion is predicted to be "
            f"{step:.2f} times as fast, at most {overlapped:.2f} times with overlap=True."
        )
    else:
        text = (
            f"{case.bits}-bit exchange does not pay: {found}; DistributedLion's step is predicted "
            f"to take {1 / step:.2f} times as long, {1 / overlapped:.2f} times with overlap=True. "
            f"Use AdamW."
        )
    power, own_s = predictions[POWER], predictions[DLION].step_s
    if power.step_s < min(own_s, rival.step_s) / WORTH:
        text += (
            f" PowerSGD is predicted to be faster still, {own_s / power.step_s:.2f} times, if its "
            f"low rank trains your model."
        )
    return text


def rate(link: Link) -> str:
    """Returns the link's nominal rate for people."""
    for unit, size in (("Gbit/s", 1e9), ("Mbit/s", 1e6)):
        if link.bits_per_s >= size:
            return f"{link.bits_per_s / size:.3g} {unit}"
    return f"{link.bits_per_s / 1e3:.3g} kbit/s"


def rows_of(predictions: Predictions) -> list[dict[str, Any]]:
    """Returns the predictions as plain dicts, times in milliseconds."""
    return [
        {
            "name": p.name,
            "bytes_per_step": p.wire_bytes,
            "predicted_ms": 1e3 * p.step_s,
            "ratio": p.step_s / predictions[NONE].step_s,
            **{f"{part}_ms": 1e3 * p.parts[part] for part in PARTS if part in p.parts},
        }
        for p in predictions.values()
    ]
