"""The seam between a step and its backends: the protocol of a codec, and the jobs it takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from hf_dlion.codec.edges import Edges, Ends
from hf_dlion.codec.layout import Run
from hf_dlion.codec.rule import TensorRule, Verdict
from hf_dlion.codec.tally import Segments, Tally


class EncodeJob(NamedTuple):
    """A parameter, or a stretch of it, on which this rank votes.

    Attributes:
        grad: Gradient, the parameter's shape, dense; of a stretch, shape (numel,).
        exp_avg: Momentum, same shape, contiguous.
        words: int64, shape (bits * ceil(numel / 64),); receives the votes.
        active: bool, shape (rows,); receives which rows vote. A row that stretches of several jobs
            of a call share, at one place in memory, votes if any of its parts there does.
        rule: The step's constants for this parameter.
        run: The stretch of the parameter that these are, or None for the whole of it; not with
            levels that are relative to the tensor.
    """

    grad: Tensor
    exp_avg: Tensor
    words: Tensor
    active: Tensor
    rule: TensorRule
    run: Run | None = None


class AdvanceJob(NamedTuple):
    """A parameter whose momentum follows the gradient; fields as in `EncodeJob`."""

    grad: Tensor
    exp_avg: Tensor
    rule: TensorRule
    run: Run | None = None


class ApplyJob(NamedTuple):
    """A parameter, and what all ranks apply to it, or to a stretch of it.

    Attributes:
        param: The whole parameter.
        verdict: On the stretch.
        rule: The step's constants for this parameter.
        run: The stretch, or None for the whole of it.
    """

    param: Tensor
    verdict: Verdict
    rule: TensorRule
    run: Run | None = None


class AloneJob(NamedTuple):
    """A parameter, or a stretch of shape (numel,), that this rank moves by itself."""

    param: Tensor
    grad: Tensor
    exp_avg: Tensor
    rule: TensorRule
    run: Run | None = None


# So many elements of a gradient are looked at to tell by how much it is scaled.
PROBED = 128

# Pairs: the places of some gradients among those given, and float64 numbers, one for each.
Magnitudes = list[tuple[list[int], Tensor]]


class Codec(Protocol):
    """What every backend does; see `hf_dlion.codec.eager` for the shortest one.

    In a step a rank encodes its votes, the exchange carries them to whoever counts them, and all
    ranks apply the verdict. The jobs of one call are of one device and one step; tensors without
    elements may be among them.
    """

    def encode_all(self, jobs: Sequence[EncodeJob]) -> None:
        """Writes votes and advances momenta, in place (rule S1 to S3)."""

    def preview_all(self, jobs: Sequence[EncodeJob], scale: float) -> list[bool]:
        """Writes votes as `encode_all` does, and leaves momenta as they are.

        Args:
            jobs: As for `encode_all`.
            scale: The direction is that of fl(scale * grad), in the dtype of the computation.

        Returns:
            For each job, True if its scaled gradient is known to be finite; False if it is not, or
            unknown.
        """

    def all_finite(self, grads: Sequence[Tensor], scale: Tensor | None = None) -> Tensor:
        """Returns whether no gradient holds a NaN or an Inf: bool, 0-D, on their device.

        Args:
            grads: Dense, of any floating dtypes, at least one.
            scale: One element: they are divided by it first, in place. None leaves them alone.
        """

    def magnitudes(self, grads: Sequence[Tensor]) -> Magnitudes:
        """Returns the sums of the magnitudes of some elements of each gradient, none of them empty.

        The elements x are every k-th in row-major order, at most `PROBED` of them, and count as
        |x| + x / 2: a sum grows as its gradient is scaled, and changes if a sign does.
        """

    def advance_all(self, jobs: Sequence[AdvanceJob]) -> None:
        """Advances momenta as `encode_all` does, in place, and writes no votes."""

    def tally(self, segments: Segments, device: torch.device) -> Tally:
        """Returns what packs and counts a message's votes, and packs and unpacks verdicts on them.

        Args:
            segments: The places of the message's shards.
            device: Where the segments lie.
        """

    def edges(self, ends: Sequence[Ends], device: torch.device) -> Edges:
        """Returns what completes the votes on rows that the shards of a node cut.

        Args:
            ends: Of this rank's shard of each message, at least one.
            device: Where its votes are.
        """

    def apply_all(self, jobs: Sequence[ApplyJob]) -> None:
        """Moves parameters by their verdicts, in place (rule S7)."""

    def step_alone_all(self, jobs: Sequence[AloneJob]) -> None:
        """Takes a step of plain Lion, in place: what a single rank does (rule S9)."""

    def rehearse(self, work: Callable[[], None]) -> None:
        """Compiles what some calls of this codec and its tallies need, without their effect.

        Where nothing is compiled, nothing is called.

        Args:
            work: Makes the calls.
        """

    # The same for one tensor, given by the fields of its job.

    def encode(self, *job: Any) -> None:
        """Does `encode_all` on one tensor."""
        self.encode_all([EncodeJob(*job)])

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
        """Does `preview_all` on one tensor."""
        job = EncodeJob(grad, exp_avg, words, active, rule, run)
        return self.preview_all([job], scale)[0]

    def advance(self, *job: Any) -> None:
        """Does `advance_all` on one tensor."""
        self.advance_all([AdvanceJob(*job)])

    def apply(self, *job: Any) -> None:
        """Does `apply_all` on one tensor."""
        self.apply_all([ApplyJob(*job)])

    def step_alone(self, *job: Any) -> None:
        """Does `step_alone_all` on one tensor."""
        self.step_alone_all([AloneJob(*job)])
