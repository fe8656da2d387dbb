"""What `hf-dlion plan` and Trainer's log advise to set (docs/guides/hyperparameters.md)."""

from __future__ import annotations

import math

# `vote_every_for` aims at this share of the time for exchanges, and proposes at most so many steps,
# the largest number that was tried with an LLM (docs/results.md).
LOCAL_SHARE, MOST_STEPS = 0.1, 32
# From so many voters on, averaged momenta are advised.
MOMENTA_FROM = 4
# A run should have so many periods of local steps: with three, an LLM answered fewer questions
# (docs/research/pretrained_llm.md).
FEWEST_PERIODS = 5


def vote_every_for(step_s: float, exchange_s: float) -> int:
    """Returns the smallest power of two k for which an exchange takes at most 10% of k steps.

    It is at most 32. `step_s` is the time of a step without exchange.
    """
    steps = exchange_s / (LOCAL_SHARE * step_s)
    return min(1 << math.ceil(math.log2(max(steps, 1.0))), MOST_STEPS)
