"""Which parameters are selected, and the arithmetic that averages them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from hf_dlion import DistributedLion
from hf_dlion.exchange.mean import mean_of
from hf_dlion.momentum.divergence import _sample, choose, divergence_of
from hf_dlion.momentum.slices import Held, _batches, _slice, slice_wire_bytes, synchronized
from hf_dlion.momentum.sync import KEPT, MomentumSync
from tests.support.oracle import OracleGroup, OracleLion, bits_of
from tests.support.random_training import DTYPES, normal

SMALL = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))


def _named() -> list[tuple[str, nn.Parameter]]:
    return list(SMALL.named_parameters())


@pytest.mark.parametrize(
    ("selection", "names"),
    [
        ("*.bias", ["0.bias", "1.bias"]),
        ("0.*;1.bias", ["0.weight", "0.bias", "1.bias"]),
        (["1.*"], ["1.weight", "1.bias"]),
        (lambda name, p: p.dim() == 2, ["0.weight"]),
    ],
)
@pytest.mark.parametrize("option", ["momentum_sync", "full_precision"])
def test_parameters_are_selected_by_name(option: str, selection: Any, names: list[str]) -> None:
    optimizer = DistributedLion(_named(), momentum_sync_every=2, **{option: selection})
    treatment = optimizer._engine.treatment
    found = treatment.synced if option == "momentum_sync" else treatment.full
    assert [_named()[index][0] for index in sorted(found)] == names


@pytest.mark.parametrize("option", ["momentum_sync", "full_precision"])
@pytest.mark.parametrize(
    ("selection", "words"),
    [
        ("norm", ["no parameter's name matches 'norm'", "close to it"]),
        ("*.bias;*weigth", ["'*weigth'", "'0.weight'"]),
        (["*Bias*"], ["'*Bias*'", "'0.bias'"]),
    ],
)
def test_a_pattern_without_a_match_names_what_is_close(
    option: str, selection: Any, words: list[str]
) -> None:
    with pytest.raises(ValueError, match=option) as caught:
        DistributedLion(_named(), momentum_sync_every=2, **{option: selection})
    for word in words:
        assert word in str(caught.value)


def test_a_misspelt_word_is_named() -> None:
    with pytest.raises(ValueError, match="close to it: 'auto'"):
        DistributedLion(_named(), momentum_sync_every=2, momentum_sync="auot")


@pytest.mark.parametrize("option", ["momentum_sync", "full_precision"])
def test_names_are_asked_for_where_there_are_none(option: str) -> None:
    with pytest.raises(ValueError, match=r"DistributedLion\(model.named_parameters\(\)\)"):
        DistributedLion(SMALL.parameters(), momentum_sync_every=2, **{option: "*.bias"})


def test_all_and_auto_need_no_names() -> None:
    for choice in ("all", "auto"):
        optimizer = DistributedLion(SMALL.parameters(), momentum_sync_every=2, momentum_sync=choice)
        assert optimizer._engine.treatment.synced == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"momentum_sync_every": 1.5}, TypeError, "momentum_sync_every=1.5"),
        ({"momentum_sync": 3}, TypeError, "momentum_sync=3"),
        ({"momentum_sync": []}, ValueError, "empty pattern"),
        ({"full_precision": ["a", ""]}, ValueError, "empty pattern"),
        ({"momentum_sync_dtype": torch.float16}, ValueError, "momentum_sync_dtype=torch.float16"),
        ({"momentum_sync_dtype": "bf16"}, TypeError, "momentum_sync_dtype='bf16'"),
        ({"momentum_sync_budget": -1}, ValueError, "momentum_sync_budget=-1"),
        ({"warmup_full_steps": -1}, ValueError, "warmup_full_steps=-1"),
        ({"warmup_full_steps": 1, "local_group": 2}, NotImplementedError, "local_group=2"),
        ({"full_precision": "*", "local_group": "node"}, NotImplementedError, "full_precision"),
        (
            {"momentum_sync_every": 1, "momentum_sync": "auto", "local_group": 2},
            NotImplementedError,
            "momentum_sync='auto'",
        ),
    ],
)
def test_a_bad_option_is_refused_at_construction(
    options: dict[str, Any], kind: type[Exception], words: str
) -> None:
    with pytest.raises(kind, match=words):
        DistributedLion(_named(), **options)


def test_a_bad_exchange_of_a_group_is_refused() -> None:
    with pytest.raises(ValueError, match="exchange='fulll' is unknown; choose one of vote, full"):
        DistributedLion([{"params": SMALL.parameters(), "exchange": "fulll"}])
    with pytest.raises(NotImplementedError, match="local_group=2"):
        DistributedLion([{"params": SMALL.parameters(), "exchange": "full"}], local_group=2)


def test_added_parameters_are_selected_too() -> None:
    optimizer = DistributedLion(_named(), full_precision="*.bias")
    optimizer.add_param_group({"params": [("new.bias", nn.Parameter(torch.zeros(2)))]})
    assert optimizer._engine.treatment.full == {1, 3, 4}
    with pytest.raises(ValueError, match="without names"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    assert len(optimizer.param_groups) == 2


@pytest.mark.parametrize("damage", [3, {0: 0.5}, [0.5], ["x"] * 4, [float("nan")] * 4])
def test_a_damaged_divergence_is_refused(damage: Any) -> None:
    optimizer = DistributedLion(_named())
    state = optimizer.state_dict()
    state["dlion"]["divergence"] = damage
    with pytest.raises(ValueError, match="divergence"):
        optimizer.load_state_dict(state)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_mean_is_added_in_the_order_of_the_ranks(dtype: torch.dtype) -> None:
    rows = [normal(500, seed=k, dtype=dtype) * 10.0 ** (k - 1) for k in range(3)]
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    total = rows[0].to(wide) + rows[1].to(wide)
    expected = (total + rows[2].to(wide)) / torch.full((500,), 3, dtype=wide)
    assert bits_of(mean_of(rows)) == bits_of(expected.to(dtype))
    assert bits_of(mean_of(rows, torch.ones(500))) != bits_of(mean_of(rows))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_mean_of_finite_numbers_is_finite(dtype: torch.dtype) -> None:
    limit = torch.finfo(dtype).max
    assert mean_of([torch.full((3,), limit, dtype=dtype)] * 3).isfinite().all()


@given(st.integers(1, 5), st.sampled_from([torch.bfloat16, torch.float32]), st.integers(0, 99))
def test_no_part_of_a_momentum_is_lost_by_rounding(
    ranks: int, dtype: torch.dtype, seed: int
) -> None:
    momenta = [normal(64, seed=100 * seed + r) for r in range(ranks)]
    after = synchronized(momenta, dtype)
    if dtype == torch.float32:
        assert all(bits_of(m) == bits_of(mean_of(momenta)) for m in after)
    before, now = (sum(m.double() for m in ms) / ranks for ms in (momenta, after))
    # Of bfloat16 only the rounding of the mean, not that of each rank's own.
    largest = max(float(m.abs().max()) for m in momenta)
    allowed = 0.0 if dtype == torch.float32 else 2.0**-8
    bound = 1.01 * allowed * (before.abs() + 2.0**-8 * largest) + 2.0**-23 * largest * ranks
    assert bool(((now - before).abs() <= bound).all())


def test_bfloat16_does_not_stall_an_average_that_moves_by_less_than_a_unit() -> None:
    momenta = [torch.ones(8), torch.ones(8)]
    for _ in range(100):
        momenta = synchronized([m + 2.0**-12 for m in momenta], torch.bfloat16)
    assert float(momenta[0][0]) == pytest.approx(1 + 100 * 2.0**-12, abs=2.0**-12)


@given(st.lists(st.integers(0, 40), max_size=5), st.integers(1, 7), st.integers(1, 9))
def test_slices_cover_every_element_once_and_evenly(
    numels: list[int], parts: int, batch: int
) -> None:
    held = [Held(k, torch.zeros(n)) for k, n in enumerate(numels)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hf_dlion.momentum.slices.BATCH_NUMEL", batch)
        sizes = []
        for part in range(parts):
            batches = _batches(_slice(held, part, parts))
            lengths = [sum(piece.exp_avg.numel() for piece in pieces) for pieces in batches]
            assert all(length == batch for length in lengths[:-1])
            for piece in (piece for pieces in batches for piece in pieces):
                begin = piece.start
                piece.exp_avg.add_(1)
                whole = held[piece.index].exp_avg
                assert piece.exp_avg.data_ptr() == whole[begin:].data_ptr()
            sizes.append(sum(lengths))
    assert all(bool((h.exp_avg == 1).all()) for h in held)
    assert max(sizes) - min(sizes) <= 1


def test_divergence_is_variance_over_mean_square() -> None:
    tables = [normal(5, 256, seed=r).double() for r in range(3)]
    tables = [table * torch.tensor([1.0, 0.0, 1.0, 1.0, 1.0])[:, None] for table in tables]
    tables = [torch.cat([t[:2], tables[0][2:3], t[3:]]) for t in tables]
    stacked = torch.stack(tables).numpy()
    with np.errstate(invalid="ignore"):
        expected = np.nan_to_num(stacked.var(axis=0).mean(axis=1) / (stacked**2).mean(axis=(0, 2)))
    found = divergence_of(tables)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-12, atol=1e-30)
    assert found[1] == 0.0
    assert found[2] == pytest.approx(0.0, abs=1e-30)
    assert 0.4 < float(found[0]) < 0.9


def test_the_most_divergent_that_fit_are_chosen() -> None:
    divergence = {0: 0.1, 1: 0.9, 2: 0.5, 3: 0.0}
    numels = {0: 5, 1: 20, 2: 90, 3: 1, 4: 1}
    assert choose(divergence, numels, lambda n: n <= 30) == [0, 1]
    assert choose(divergence, numels, lambda n: n <= 10**6) == [0, 1, 2]
    assert choose(divergence, numels, lambda n: False) == []


def test_a_slice_of_many_elements_is_filled_up_batch_by_batch() -> None:
    numel = 3 * ((1 << 22) + 5)
    one = 2 * 2 * -(-(1 << 22) // 3) * 2
    assert slice_wire_bytes(numel, 3, 3, torch.bfloat16) == one + 2 * 2 * 2 * 2


def test_all_in_full_with_equal_gradients_is_one_rank() -> None:
    p0 = normal(70, seed=0)
    many = OracleLion([OracleGroup([p0], lr=0.01)], 4, full=[0])
    one = OracleLion([OracleGroup([p0], lr=0.01)], 1)
    for t in range(10):
        g = normal(70, seed=t + 1)
        many.step([[g]] * 4)
        one.step([[g]])
        assert bits_of(many.params[0]) == bits_of(one.params[0])


@pytest.mark.parametrize("shape", [(256, 64), (4096, 4096), (50304, 768), (1024, 3072), (300,)])
def test_samples_come_from_all_over_a_matrix(shape: tuple[int, ...]) -> None:
    columns = torch.arange(shape[-1]).expand(shape).contiguous()
    rows = torch.arange(shape[0]).view(-1, *[1] * (len(shape) - 1)).expand(shape).contiguous()
    for of_element in (columns, rows):
        assert len(_sample(of_element).unique()) > 30


@pytest.mark.parametrize("numel", [0, 1, 255, 256, 257, 1000])
def test_no_element_is_sampled_twice(numel: int) -> None:
    found = _sample(torch.arange(numel))
    assert len(found.unique()) == len(found) == min(numel, 256)


def test_what_differs_less_because_it_is_synchronised_goes_on_being_so() -> None:
    sync = MomentumSync()
    synced = [Held(1, torch.zeros(3))]
    sync._note({0: 0.3, 1: 0.0, 2: 0.1}, {0: 0.2, 1: 0.5, 2: 0.4}, synced)
    assert sync.divergence == {0: 0.3, 1: KEPT * 0.5, 2: 0.1}
    assert MomentumSync.loaded(sync.entry(4)).divergence == sync.divergence
