"""TernGrad, GradDrop, and DGC follow their papers, and count what they send."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from benchmarks.convergence.compressors import DGC, Compressor, GradDrop, TernGrad

COMPRESSORS = {"terngrad": TernGrad, "graddrop": GradDrop, "dgc": DGC}


class HalfDGC(DGC):
    """Halves the momentum, so sums of whole numbers stay exact; neither clips nor warms up."""

    momentum, clip, warmup, density = 0.5, math.inf, 0.0, 0.5


def whole_numbers(step: int, size: int = 300) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(-50, 50, (1, size), generator=generator).float()


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        # To each of three other workers, and a ring's all-reduce of each layer's scale.
        ("terngrad", 3 * 2.0 + 6 * 32 / 10_000),
        ("graddrop", 3 * 0.04 * 64),
        ("dgc", 3 * 0.04 * 64),
    ],
)
def test_a_rank_sends_the_bits_of_its_method(name: str, bits: float) -> None:
    workers = COMPRESSORS[name]([8000, 2000], 4, steps=100)
    for _ in range(5):  # DGC's warm-up ends after four.
        before = workers.bytes_sent
        mean = workers.mean(torch.randn(4, 10_000))
    assert 8 * (workers.bytes_sent - before) / 10_000 == pytest.approx(bits, rel=1e-9)
    assert mean.shape == (10_000,)


@pytest.mark.parametrize("compressor", COMPRESSORS.values())
def test_gradients_of_zero_stay_zero_and_one_worker_sends_nothing(
    compressor: type[Compressor],
) -> None:
    workers = compressor([7, 1], 1)
    assert not workers.mean(torch.zeros(1, 8)).any()
    assert workers.bytes_sent == 0


def test_graddrop_sends_the_largest_of_all_layers_and_keeps_the_rest_to_the_last_bit() -> None:
    worker = GradDrop([200, 100], 1)
    sent, accumulated = torch.zeros(1, 300), torch.zeros(1, 300)
    for step in range(20):
        accumulated += whole_numbers(step)
        owed = worker.residual + whole_numbers(step)
        part = worker.messages(whole_numbers(step))
        assert part.count_nonzero() == 12  # 0.04 of 300
        assert part.abs()[part != 0].min() >= worker.residual.abs().max()
        assert torch.equal(part, torch.where(part != 0, owed, 0.0))
        sent += part
        assert torch.equal(sent + worker.residual, accumulated)


def test_dgc_sends_every_layers_own_largest_with_corrected_and_masked_momentum() -> None:
    worker = HalfDGC([2, 2], 1)
    for gradient, sent, velocity, residual in (
        ((4.0, 1.0), (4.0, 0.0), (0.0, 1.0), (0.0, 1.0)),
        # The second element's 2.5 is 1 + (0.5 + 1): with its momentum, not 1 + 1.
        ((1.0, 1.0), (0.0, 2.5), (1.0, 0.0), (1.0, 0.0)),
        ((1.0, 0.0), (2.5, 0.0), (0.0, 0.0), (0.0, 0.0)),
        ((1.0, -2.0), (0.0, -2.0), (1.0, 0.0), (1.0, 0.0)),
    ):
        # The second layer is a hundred times as large and sends as many.
        both = [*gradient, *(100 * g for g in gradient)]
        assert worker.messages(torch.tensor([both])).tolist() == [[*sent, *(100 * g for g in sent)]]
        assert worker.velocity[0, :2].tolist() == list(velocity)
        assert worker.residual[0, :2].tolist() == list(residual)


def test_dgc_clips_each_workers_gradient_as_the_paper_clips_a_share_of_the_sum() -> None:
    class All(DGC):
        density, warmup = 1.0, 0.0

    gradients = torch.tensor([[30.0, 40.0, 0.0], *([0.0, 0.3, 0.4] for _ in "123")])
    paper = torch.zeros(3)
    for gradient in gradients:
        own = gradient / 4
        paper += own * min(1.0, 1.0 / math.sqrt(4) / float(own.norm()))
    torch.testing.assert_close(All([3], 4).mean(gradients), paper)
    assert paper.norm() < 1.0


def test_dgc_warms_up_over_four_epochs_by_factors_of_four() -> None:
    worker = DGC([1000], 1, steps=100)
    assert [worker.density_at(step) for step in range(5)] == [0.25, 0.0625, 0.04, 0.04, 0.04]
    counts = []
    for _ in range(3):
        before = worker.residual.clone()
        gradient = torch.randn(1, 1000)
        worker.mean(gradient)
        counts.append(int((worker.residual == 0).sum()))
        assert not torch.equal(before, worker.residual)
    assert counts == [250, 62, 40]


def test_terngrad_is_right_in_expectation() -> None:
    row = torch.cat([torch.linspace(-0.7, 0.9, 37), torch.linspace(-8.0, 8.0, 10)])
    draws = 4000
    workers = TernGrad([37, 10], draws, seed=3)
    messages = workers.messages(row.expand(draws, -1))
    spread = torch.tensor([0.9, 8.0]).repeat_interleave(torch.tensor([37, 10]))
    assert ((messages == 0) | (messages.abs() == spread)).all()
    deviation = (spread * row.abs() - row**2).clamp(min=0.0).sqrt() / math.sqrt(draws)
    assert ((messages.mean(dim=0) - row).abs() <= 5 * deviation + 1e-4).all()


def test_terngrads_workers_share_the_largest_scale_and_draw_independently() -> None:
    small = torch.linspace(-1.0, 1.0, 101)
    one, other = TernGrad([101], 2).messages(torch.stack([small, 2 * small]))
    assert set(one.tolist()) == set(other.tolist()) == {-2.0, 0.0, 2.0}
    one, other = TernGrad([101], 2).messages(torch.stack([small, small]))
    assert not torch.equal(one, other)


def test_terngrad_clips_at_two_and_a_half_deviations_but_no_single_element() -> None:
    layer = torch.cat([torch.tensor([1.0, -1.0]).repeat(50), torch.tensor([30.0, -30.0])])
    bound = 2.5 * float(layer.std(correction=0))
    assert bound < 30.0
    # The largest that remains is sent for certain, with its own value.
    part = TernGrad([102, 1], 1).messages(torch.cat([layer, torch.tensor([0.5])])[None])[0]
    assert part[100:].tolist() == pytest.approx([bound, -bound, 0.5])
