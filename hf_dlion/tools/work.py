"""One step's work of a rank on a set of tensors, without the wire."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hf_dlion.codec import ApplyJob, Codec, EncodeJob, codec_for
from hf_dlion.codec.layout import MessageLayout
from hf_dlion.codec.rule import StepRule, TensorRule, Verdict, verdict_planes
from hf_dlion.codec.tally import Segments, Tally


def step_rule(step: int = 1, rank: int = 0, world_size: int = 1, bits: int = 1) -> StepRule:
    """Returns a step's constants under the default options."""
    return StepRule(
        step=step, rank=rank, world_size=world_size, aggregation="majority", ties="alternate",
        stochastic_rounding=True, seed=0, bits=bits,
    )  # fmt: skip


def tensor_rule(rule: StepRule, index: int) -> TensorRule:
    """Returns a parameter's constants with usual hyperparameters."""
    return TensorRule(step_rule=rule, index=index, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.1)


class Work:
    """Encoding, counting and applying, as jobs that can be done again and again.

    Attributes:
        words: int64 words that hold one bit per element.

    Args:
        params: Parameters with gradients, on one device; `apply` moves them.
        world_size: Number of ranks whose votes are counted; all but this rank's are random.
        bits: Of a vote.
    """

    def __init__(self, params: Sequence[Tensor], world_size: int, bits: int = 1) -> None:
        """Makes momenta, votes and a verdict."""
        device = params[0].device
        layout = MessageLayout.of([(index, param.shape) for index, param in enumerate(params)])
        self.words = layout.words
        self._rule = step_rule(world_size=world_size, bits=bits)
        planes = verdict_planes("majority", "alternate", world_size)
        self._segments = segments = Segments.of(layout, 1, 0, bits, planes, world_size)
        self._tallies: dict[type[Codec], Tally] = {}
        shape = (world_size, segments.vote_words)
        # All ones: every rank votes on every row.
        self._received = torch.full(shape, -1, dtype=torch.int64, device=device)
        votes = self._received[:, : bits * layout.words]
        votes.random_(-(2**62), 2**62)
        active = torch.ones(layout.rows, dtype=torch.bool, device=device)
        verdict = self.count(codec_for(device))
        self._encoding, self._applying = [], []
        for slot, param in zip(layout.slots, params, strict=True):
            assert param.grad is not None, "made with the parameter"
            words = slice(slot.word, slot.word + slot.words)
            rows = slice(slot.row, slot.row + slot.rows)
            own = votes[0, bits * words.start : bits * words.stop], active[rows]
            rule = tensor_rule(self._rule, slot.index)
            self._encoding.append(EncodeJob(param.grad, torch.zeros_like(param), *own, rule))
            part = Verdict(verdict.planes[:, words], verdict.counts[rows])
            self._applying.append(ApplyJob(param, part, rule))

    def encode(self, codec: Codec) -> None:
        """Encodes all gradients."""
        codec.encode_all(self._encoding)

    def apply(self, codec: Codec) -> None:
        """Applies a verdict to all parameters."""
        codec.apply_all(self._applying)

    def count(self, codec: Codec) -> Verdict:
        """Counts all ranks' votes."""
        if type(codec) not in self._tallies:
            self._tallies[type(codec)] = codec.tally(self._segments, self._received.device)
        return self._tallies[type(codec)].count(self._received, self._rule)
