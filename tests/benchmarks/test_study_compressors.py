"""The study's TernGrad, GradDrop and DGC do what their papers say, and count what they send."""

from __future__ import annotations

import functools
import math

import pytest
import torch

from benchmarks.convergence.compressors import DGC, GradDrop, Run, TernGrad, Workers

COMPRESSORS = {"terngrad": TernGrad, "graddrop": GradDrop, "dgc": DGC}


def worker_of(compressor, *sizes, rank=0, world_size=1, steps=100, seed=0):
    run = Run(rank=rank, world_size=world_size, sizes=sizes, seed=seed, steps=steps)
    return compressor(run)


def exchanged(worker, gradient):
    """What a single worker sends in a step, as a dense gradient."""
    scale = worker.scale(gradient)
    return worker.send(gradient, scale)


def whole_numbers(step, size=300):
    """Gradients whose sums are exact."""
    generator = torch.Generator().manual_seed(step)
    return torch.randint(-50, 50, (size,), generator=generator).float()


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        # To each of three others; and a ring's all-reduce of each layer's scale.
        ("terngrad", 3 * 2.0 + 6 * 32 / 10_000),
        ("graddrop", 3 * 0.04 * 64),
        ("dgc", 3 * 0.04 * 64),
    ],
)
def test_a_rank_sends_the_bits_and_messages_of_its_method(name, bits):
    workers = Workers(COMPRESSORS[name], 4, [8000, 2000], seed=0, steps=100)
    for _ in range(5):  # DGC's warm-up is over after four
        sent, rounds = workers.bytes_sent, workers.rounds
        mean = workers.mean([torch.randn(10_000) for _ in range(4)])
    assert 8 * (workers.bytes_sent - sent) / 10_000 == pytest.approx(bits, rel=1e-9)
    # A gathering among four, and a ring of scales.
    assert workers.rounds - rounds == (3 + 6 if name == "terngrad" else 3)
    assert mean.shape == (10_000,)


def test_nothing_is_sent_to_oneself():
    for compressor in COMPRESSORS.values():
        workers = Workers(compressor, 1, [50], seed=0, steps=10)
        workers.mean([torch.ones(50)])
        assert workers.bytes_sent == 0


def test_dropped_gradients_are_kept_to_the_last_bit():
    worker = worker_of(GradDrop, 200, 100)
    sent, accumulated = torch.zeros(300), torch.zeros(300)
    for step in range(20):
        gradient = whole_numbers(step)
        accumulated += gradient
        part = exchanged(worker, gradient)
        assert part.count_nonzero() == 12  # 0.04 of 300
        sent += part
        assert torch.equal(sent + worker.residual, accumulated)


def test_the_largest_are_sent_from_wherever_they_are():
    worker = worker_of(functools.partial(GradDrop, density=0.1), 10, 10)
    gradient = torch.cat([torch.arange(1.0, 11.0), torch.arange(-110.0, -100.0)])
    part = exchanged(worker, gradient)
    assert part.nonzero().flatten().tolist() == [10, 11]
    assert part[10:12].tolist() == [-110.0, -109.0]


def test_every_layer_sends_its_own_largest_with_dgc():
    worker = worker_of(functools.partial(DGC, density=0.1, clip=None, warmup=0.0), 10, 10)
    gradient = torch.cat([torch.arange(1.0, 11.0), torch.arange(-110.0, -100.0)])
    assert exchanged(worker, gradient).nonzero().flatten().tolist() == [9, 10]


def test_dgcs_momentum_is_kept_to_the_last_bit():
    # Halves stay exact for the few steps that an element waits.
    worker = worker_of(
        functools.partial(DGC, density=0.25, momentum=0.5, clip=None, warmup=0.0), 200, 100
    )
    for step in range(12):
        gradient = whole_numbers(step)
        velocity = 0.5 * worker.velocity + gradient
        owed = worker.residual + velocity
        sent = exchanged(worker, gradient)
        assert torch.equal(sent + worker.residual, owed)
        # Masking: what was sent has lost its momentum, the rest has kept it.
        assert torch.equal(worker.velocity, torch.where(sent != 0, 0.0, velocity))
        assert sent.count_nonzero() == 75


def test_dgc_corrects_the_momentum_as_computed_by_hand():
    worker = worker_of(functools.partial(DGC, density=0.5, momentum=0.5, clip=None, warmup=0.0), 2)
    for gradient, sent, velocity, residual in (
        ((4.0, 1.0), (4.0, 0.0), (0.0, 1.0), (0.0, 1.0)),
        # The second element's 2.5 is 1 + (0.5 + 1): with its momentum, not 1 + 1.
        ((1.0, 1.0), (0.0, 2.5), (1.0, 0.0), (1.0, 0.0)),
        ((1.0, 0.0), (2.5, 0.0), (0.0, 0.0), (0.0, 0.0)),
        ((1.0, -2.0), (0.0, -2.0), (1.0, 0.0), (1.0, 0.0)),
    ):
        assert exchanged(worker, torch.tensor(gradient)).tolist() == list(sent)
        assert worker.velocity.tolist() == list(velocity)
        assert worker.residual.tolist() == list(residual)


def test_dgc_clips_locally_so_that_the_sum_is_clipped_as_in_the_paper():
    gradients = [torch.tensor([30.0, 40.0, 0.0]), *(torch.tensor([0.0, 0.3, 0.4]) for _ in "123")]
    paper = torch.zeros(3)
    for gradient in gradients:
        own = gradient / 4
        paper += own * min(1.0, 1.0 / math.sqrt(4) / float(own.norm()))
    all_at_once = functools.partial(DGC, density=1.0, clip=1.0, warmup=0.0)
    mean = Workers(all_at_once, 4, [3], seed=0, steps=10).mean(gradients)
    torch.testing.assert_close(mean, paper)
    assert paper.norm() < 1.0


def test_dgc_warms_up_over_four_epochs_by_factors_of_four():
    thousandth = worker_of(functools.partial(DGC, density=0.001), 1000, steps=400)
    densities = [thousandth.density_at(step) for step in range(20)]
    expected = [0.25, 0.0625, 0.015625, 0.00390625, 0.001]
    assert densities == [density for density in expected for _ in range(4)]
    worker = worker_of(DGC, 1000)
    assert [worker.density_at(step) for step in range(5)] == [0.25, 0.0625, 0.04, 0.04, 0.04]
    assert worker_of(functools.partial(DGC, warmup=0.0), 1000).density_at(0) == 0.04
    sent = [exchanged(worker, torch.randn(1000)).count_nonzero().item() for _ in range(4)]
    assert sent == [250, 62, 40, 40]


@pytest.mark.full
def test_terngrad_is_right_in_expectation():
    gradient = torch.cat([torch.linspace(-0.7, 0.9, 37), torch.linspace(-8.0, 8.0, 10)])
    worker = worker_of(TernGrad, 37, 10, seed=3)
    scale = worker.scale(gradient)
    torch.testing.assert_close(scale, torch.tensor([0.9, 8.0]))  # nothing is clipped here
    draws = 4000
    total = torch.zeros(47)
    for _ in range(draws):
        total += worker.send(gradient, scale)
    spread = scale.repeat_interleave(torch.tensor([37, 10]))
    deviation = (spread * gradient.abs() - gradient**2).clamp(min=0.0).sqrt() / math.sqrt(draws)
    assert ((total / draws - gradient).abs() <= 5 * deviation + 1e-4).all()


def test_terngrad_sends_three_levels_of_the_largest_scale_of_all():
    workers = [worker_of(TernGrad, 101, 6, rank=rank, world_size=2) for rank in (0, 1)]
    gradients = [torch.randn(107), 3.0 * torch.randn(107)]
    scales = [w.scale(own) for w, own in zip(workers, gradients, strict=True)]
    scale = torch.maximum(*scales)
    for worker, gradient in zip(workers, gradients, strict=True):
        part = worker.send(gradient, scale)
        assert worker.message_bytes == 27  # 107 elements, four to a byte
        for layer, level in zip(part.split([101, 6]), scale, strict=True):
            assert all(value.abs() in (0.0, level) for value in layer)
        assert (part * gradient >= 0.0).all()


def test_terngrads_mean_is_made_of_the_scale_that_all_share():
    small = torch.linspace(-1.0, 1.0, 101)
    for gradients in ([small, 2 * small], [2 * small, small]):
        mean = Workers(TernGrad, 2, [101], seed=0, steps=1).mean(gradients)
        assert set(mean.tolist()) == {-2.0, -1.0, 0.0, 1.0, 2.0}


def test_terngrad_clips_at_two_and_a_half_deviations():
    layer = torch.cat([torch.tensor([1.0, -1.0]).repeat(50), torch.tensor([30.0, -30.0])])
    bound = 2.5 * float(layer.std(correction=0))
    assert bound < 30.0
    # The largest that remains is sent for certain, with its own value.
    worker = worker_of(TernGrad, 102)
    part = exchanged(worker, layer)
    assert part[100:].tolist() == pytest.approx([bound, -bound])
    # A single element has no deviation to be clipped to.
    assert exchanged(worker_of(TernGrad, 1), torch.tensor([0.5])).tolist() == [0.5]


def test_terngrads_workers_draw_independently():
    gradient = torch.linspace(-1.0, 1.0, 200)
    parts = [exchanged(worker_of(TernGrad, 200, rank=rank), gradient) for rank in (0, 1)]
    assert not torch.equal(*parts)
    again = exchanged(worker_of(TernGrad, 200, rank=1), gradient)
    assert torch.equal(parts[1], again)


@pytest.mark.parametrize("name", COMPRESSORS)
def test_gradients_of_zero_stay_zero(name):
    mean = Workers(COMPRESSORS[name], 2, [7, 1], seed=0, steps=10).mean([torch.zeros(8)] * 2)
    assert (mean == 0.0).all()


def test_an_impossible_density_is_refused():
    with pytest.raises(ValueError, match=r"density=0\.0"):
        worker_of(functools.partial(GradDrop, density=0.0), 5)
