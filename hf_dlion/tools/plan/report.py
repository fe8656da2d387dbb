"""What a plan prints: the verdict in words, and the tables."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from hf_dlion.tools.names import BF16, DLION, FP32, NONE, POWER
from hf_dlion.tools.plan.cost import Link
from hf_dlion.tools.plan.methods import (
    ALL_REDUCES,
    BF16_NATIVE,
    NODE_VOTES,
    OVERLAPPED,
    PARTS,
    PUBLIC,
    Case,
    Prediction,
)

Predictions = Mapping[str, Prediction]

# Below this gain over the best all-reduce the advice is to stay with it: the model is no better.
WORTH = 1.10
# An all-reduce that exposes less of its step than this is hidden: what another optimizer saves on
# its own work, or DDP's copies (`gradient_as_bucket_view` saves those too), is no matter of bits.
HIDDEN = 0.05
# The smallest factor that is not printed as 1.00.
_MORE = 1.005

# What the rows and the columns of a plan are.
EXPLAINED = {
    "method": "the rows; where all is relative to no communication, that is 1",
    "bytes sent": "by a rank in a step; to other nodes, where those of a node vote together",
    "predicted ms": "the step: the sum of the parts that follow",
    "x no comm.": "relative to the step without communication",
    "compute": "forward and backward, and DDP's copies into its buckets and back",
    "encode": "making votes, or PowerSGD's factors",
    "count": "counting all ranks' votes",
    "wire": "waiting for the network: what no other work hides",
    "apply": "moving the parameters as the votes say",
    "optimizer": "the step of AdamW, or all own work of the public distributed-lion",
    NONE: "DDP that sends nothing: what a step takes without a network",
    FP32: "DDP's all-reduce of float32 gradients",
    BF16: "torch's bf16_compress_hook: the gradients travel as bfloat16",
    BF16_NATIVE: "DDP's all-reduce of gradients that are bfloat16 (--dtype)",
    POWER: "torch's powerSGD_hook, in one bucket",
    PUBLIC: "kyleliang919/distributed-lion-pytorch: 8 bits, a gather per tensor",
    DLION: "this package: votes travel after backward",
    NODE_VOTES: 'local_group="node": the ranks of a node average inside it and vote as one',
    OVERLAPPED: "overlap=True, if sending cost backward nothing: a bound",
}


def best_all_reduce(predictions: Predictions) -> Prediction:
    """Returns the fastest of the gradient all-reduces."""
    found = [predictions[name] for name in ALL_REDUCES if name in predictions]
    return min(found, key=lambda prediction: prediction.step_s)


def names_of_ours(predictions: Predictions) -> list[str]:
    """Returns the rows of DistributedLion."""
    return [name for name in (DLION, NODE_VOTES, OVERLAPPED) if name in predictions]


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
    return max(gain(predictions, name) for name in names_of_ours(predictions)) >= WORTH


def verdict(case: Case, predictions: Predictions) -> str:
    """Returns in words whether the exchange of votes pays, with the predicted ratios."""
    rival, cluster = best_all_reduce(predictions), case.cluster
    gains = {name: gain(predictions, name) for name in names_of_ours(predictions)}
    overlapped = gains.pop(OVERLAPPED)
    own = max(gains, key=lambda name: gains[name])
    ours = DLION if own == DLION else f'{DLION} with local_group="node"'
    step = gains[own]
    best, at_most = max(step, overlapped), f"at most {overlapped:.2f} times"
    where = f"at {rate(case.link)} with {cluster.ranks} ranks on {cluster.nodes} nodes {rival.name}"
    waits = f"waits {1e3 * rival.parts['wire']:,.0f} ms of {1e3 * rival.step_s:,.0f} for the wire"
    predicted = f"{ours} is predicted to {_compared(step)}"
    if is_hidden(rival):
        text = f"does not pay: {where} hides its all-reduce behind backward. Use AdamW. "
        text += f"{DLION} is predicted to {_compared(best)}"
        if best >= _MORE:
            text += (
                ", but not for its bits: it saves AdamW's work, and DDP's copies, which "
                "gradient_as_bucket_view=True saves with AdamW, too"
            )
    elif not pays(predictions):
        told = _compared(best).replace("be ", "be only ")
        text = f"does not pay: {where} {waits}, but {DLION} is predicted to {told}. Use AdamW"
    elif step < WORTH:
        text = (
            f"pays with overlap=True only: {where} {waits}; {DLION} is predicted to be {at_most} "
            f"as fast with it, and to {_compared(gains[DLION])} without"
        )
    elif overlapped >= _MORE * step:
        instead = "" if own == DLION else " instead"
        text = f"pays: {where} {waits}; {predicted}, {at_most} with overlap=True{instead}"
    else:
        text = f"pays: {where} {waits}; {predicted}; overlap=True gains nothing"
    return f"{case.bits}-bit exchange {text}{_of_power_sgd(predictions, own, best)}."


def _of_power_sgd(predictions: Predictions, own: str, best: float) -> str:
    """Returns what is to be said of PowerSGD, nothing where it is not clearly faster.

    Args:
        predictions: The predictions.
        own: Our fastest row, but for the bound of overlapping.
        best: The gain over the best all-reduce, with that bound.
    """
    rival = best_all_reduce(predictions)
    others = [("", rival.name, rival.step_s)]
    if pays(predictions):
        others = [
            ("faster still: ", DLION, rival.step_s / best),
            ("", f"{own} without overlap=True", predictions[own].step_s),
        ]
    power = predictions[POWER].step_s if POWER in predictions else math.inf
    for still, name, other_s in others:
        if power * WORTH < other_s:
            return (
                f". PowerSGD is predicted to be {still}{other_s / power:.2f} times as fast as "
                f"{name}, if its low rank trains your model"
            )
    return ""


def _compared(gain: float) -> str:
    """Returns a gain as the end of "is predicted to"; no factor is below 1."""
    if gain >= _MORE:
        return f"be {gain:.2f} times as fast"
    return f"take {1 / gain:.2f} times as long" if 1 / gain >= _MORE else "take as long"


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
