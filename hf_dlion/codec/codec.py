"""The seam between a step and its backends: the protocol of a codec, and the jobs it takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from hf_dlion.codec.layout import Run, Shard
from hf_dlion.codec.rule import StepRule, TensorRule, Verdict


class EncodeJob(NamedTuple):
    """The arguments of `Codec.encode`, and of `Codec.preview` but for the scale."""

    grad: Tensor
    exp_avg: Tensor
    words: Tensor
    active: Tensor
    rule: TensorRule
    run: Run | None = None


class AdvanceJob(NamedTuple):
    """The arguments of `Codec.advance`."""

    grad: Tensor
    exp_avg: Tensor
    rule: TensorRule
    run: Run | None = None


class ApplyJob(NamedTuple):
    """The arguments of `Codec.apply`."""

    param: Tensor
    verdict: Verdict
    rule: TensorRule


class AloneJob(NamedTuple):
    """The arguments of `Codec.step_alone`."""

    param: Tensor
    grad: Tensor
    exp_avg: Tensor
    rule: TensorRule
    run: Run | None = None


class Codec(Protocol):
    """What every backend does; see `hf_dlion.codec.eager` for the shortest one.

    In a step a rank encodes its votes, the exchange carries them to whoever counts them, and all
    ranks apply the verdict. A call on many tensors, of one device and one step, does what a call on
    each would. A backend for which a call costs more than a small tensor's work overrides those.
    """

    def encode_all(self, jobs: Sequence[EncodeJob]) -> None:
        """Does `encode` on each."""
        for job in jobs:
            self.encode(*job)

    def preview_all(self, jobs: Sequence[EncodeJob], scale: float) -> list[bool]:
        """Does `preview` on each, and returns what each returns."""
        return [self.preview(*job[:5], scale, job.run) for job in jobs]

    def advance_all(self, jobs: Sequence[AdvanceJob]) -> None:
        """Does `advance` on each."""
        for job in jobs:
            self.advance(*job)

    def apply_all(self, jobs: Sequence[ApplyJob]) -> None:
        """Does `apply` on each."""
        for job in jobs:
            self.apply(*job)

    def step_alone_all(self, jobs: Sequence[AloneJob]) -> None:
        """Does `step_alone` on each."""
        for job in jobs:
            self.step_alone(*job)

    def encode(
        self,
        grad: Tensor,
        exp_avg: Tensor,
        words: Tensor,
        active: Tensor,
        rule: TensorRule,
        run: Run | None = None,
    ) -> None:
        """Writes a parameter's votes and advances its momentum.

        Args:
            grad: Gradient, the parameter's shape, dense; of a stretch, shape (numel,).
            exp_avg: Momentum, same shape; advanced in place.
            words: int64, shape (bits * ceil(numel / 64),); receives the votes.
            active: bool, shape (rows,); receives which rows vote. Of a row that lies only partly
                in the stretch, whether that part does.
            rule: The step's constants for this parameter.
            run: The stretch of the parameter that these are, or None for the whole of it; not with
                levels that are relative to the tensor.
        """

    def preview(
        self,
        grad: Tensor,
        exp_avg: Tensor,
        words: Tensor,
        active: Tensor,
        rule: TensorRule,
        scale: float,
        run: Run | None = None,
    ) -> bool:
        """Writes a parameter's votes as `encode` does, and leaves its momentum as it is.

        Args:
            grad: As for `encode`.
            exp_avg: Momentum, same shape; not changed.
            words: As for `encode`.
            active: As for `encode`.
            rule: The step's constants for this parameter.
            scale: The direction is that of fl(scale * grad), in the dtype of the computation.
            run: As for `encode`.

        Returns:
            True if fl(scale * grad) is known to be finite; False if it is not, or unknown.
        """

    def advance(
        self, grad: Tensor, exp_avg: Tensor, rule: TensorRule, run: Run | None = None
    ) -> None:
        """Advances a parameter's momentum as `encode` does, and writes no votes.

        Args:
            grad: As for `encode`.
            exp_avg: Momentum, same shape; advanced in place.
            rule: The step's constants for this parameter.
            run: As for `encode`.
        """

    def count(
        self,
        votes: Tensor,
        active: Tensor,
        shard: Shard,
        row_numels: Tensor,
        rule: StepRule,
        out: Tensor | None = None,
    ) -> Verdict:
        """Returns the verdict on a shard (design S3 to S6).

        Args:
            votes: int64, shape (N, bits * shard.words), rows contiguous: every rank's votes; 0 in
                a row that abstains.
            active: bool, shape (N, shard.rows), the rows on which each rank votes.
            shard: Which words and rows these are.
            row_numels: `shard.row_numels`.
            rule: The step's constants.
            out: int64, shape (planes, shard.words), receives the verdict's planes; else a new
                tensor.
        """

    def apply(self, param: Tensor, verdict: Verdict, rule: TensorRule) -> None:
        """Moves a parameter by the verdict, in place (design S7).

        Args:
            param: The parameter.
            verdict: What all ranks apply to it.
            rule: The step's constants for this parameter.
        """

    def step_alone(
        self,
        param: Tensor,
        grad: Tensor,
        exp_avg: Tensor,
        rule: TensorRule,
        run: Run | None = None,
    ) -> None:
        """Takes one step of plain Lion, in place: what a single rank does (design S9).

        Args:
            param: The parameter; of a stretch, shape (numel,).
            grad: Gradient, same shape, dense.
            exp_avg: Momentum, same shape; advanced in place.
            rule: The step's constants for this parameter.
            run: The stretch of the parameter that these are, or None for the whole of it.
        """
