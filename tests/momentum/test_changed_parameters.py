"""A loop that changes parameters or momenta between steps: `param.data = ...`, `state[p] = ...`."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_dlion import DistributedLion
from hf_dlion.codec.native import library as native_library
from tests.support.messages import message_numel
from tests.support.oracle import bits_of
from tests.support.random_training import backward, normal, random_param, take_steps
from tests.support.spawn import RankPools

SHAPE = (12, 8, 3, 3)

OPTIONS: dict[str, tuple[int, dict[str, Any]]] = {
    "alone": (1, {}),
    "overlap": (2, {"overlap": True}),
    "nodes": (4, {"local_group": 2}),
    "node": (2, {"local_group": 2}),
    "votes": (2, {}),
    "narrow": (2, {"momentum_dtype": torch.bfloat16}),
    "levels": (2, {"bits": 4, "exchange": "two_phase"}),
    "synchronised": (2, {"momentum_sync_every": 2}),
    "averaged": (2, {"warmup_full_steps": 100}),
}


def with_options(*quick: str, alone: bool = True) -> pytest.MarkDecorator:
    """Runs a test with all options; with those that are not `quick` in the full tier."""
    cases = [case for case, (world_size, _) in OPTIONS.items() if alone or world_size > 1]
    marked = [pytest.param(case, marks=[] if case in quick else pytest.mark.full) for case in cases]
    return pytest.mark.parametrize("case", marked)


with_codec = pytest.mark.parametrize("native", [True, False], ids=["native", "torch"])


def new_params() -> list[nn.Parameter]:
    return [random_param(*SHAPE, seed=1), random_param(130, seed=2)]


def optimizer_of(params: list[nn.Parameter], options: dict[str, Any]) -> DistributedLion:
    return DistributedLion(zip(("first", "second"), params, strict=True), lr=0.01, **options)


def trained(rank: int, options: dict[str, Any]) -> tuple[list[nn.Parameter], DistributedLion]:
    """Returns two parameters and their optimizer after three steps."""
    params = new_params()
    optimizer = optimizer_of(params, options)
    take_steps(optimizer, params, range(100 * rank, 100 * rank + 3))
    return params, optimizer


def go_on(rank: int, params: list[nn.Parameter], optimizer: DistributedLion) -> list[bytes]:
    """Takes three steps more, and returns the bits of parameters and momenta."""
    before = optimizer.wire.overlapped
    take_steps(optimizer, params, range(100 * rank + 3, 100 * rank + 6))
    if optimizer.options.overlap and optimizer.world_size > 1:
        # All but the first, in which the ranks may have agreed on messages.
        assert optimizer.wire.overlapped >= before + 2
    return [bits_of(tensor) for p in params for tensor in (p, optimizer.state[p]["exp_avg"])]


def go_on_from_state(
    rank: int, params: list[nn.Parameter], optimizer: DistributedLion
) -> list[bytes]:
    """Does the same with a new optimizer that loads the state of this one."""
    copies = [nn.Parameter(p.detach().clone()) for p in params]
    options = {**vars(optimizer.options)}
    twin = optimizer_of(copies, options)
    twin.load_state_dict(pickle.loads(pickle.dumps(optimizer.state_dict())))
    return go_on(rank, copies, twin)


def attempt(call: Callable[[], Any], params: list[nn.Parameter]) -> str:
    """Returns what a call raised; it must have left the parameters as they were."""
    before = [bits_of(p) for p in params]
    try:
        call()
    except Exception as error:
        assert before == [bits_of(p) for p in params], "something moved"
        return f"{type(error).__name__}: {error}"
    return "accepted"


@contextlib.contextmanager
def codec(native: bool) -> Iterator[None]:
    """Has plans take the compiled codec, or the one in torch."""
    with pytest.MonkeyPatch.context() as patch:
        if not native:
            patch.setattr(native_library, "library", lambda: None)
        yield


def turned(tensor: Tensor) -> Tensor:
    """Returns the same values with another order in memory."""
    return tensor.transpose(0, -1).contiguous().transpose(0, -1)


def apart(tensor: Tensor) -> Tensor:
    """Returns the same values with something else between them."""
    return torch.stack([tensor, torch.full_like(tensor, 9.0)], dim=-1)[..., 0]


def channels_last(tensor: Tensor) -> Tensor:
    return tensor.to(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor


def expanded(tensor: Tensor) -> Tensor:
    """Returns the first column's values, as often as there are columns."""
    return tensor[:, :1].expand(tensor.shape) if tensor.dim() > 1 else tensor


def train_relaid(
    rank: int, world_size: int, options: dict[str, Any], native: bool
) -> dict[str, list[bytes]]:
    found = {}
    with codec(native):
        for how in (None, turned, apart, channels_last, Tensor.double):
            for what in ("momentum", "parameter")[: 1 if how in (None, Tensor.double) else 2]:
                params, optimizer = trained(rank, options)
                for p in params if how else ():
                    if what == "parameter":
                        p.data = how(p.data)
                    else:
                        optimizer.state[p]["exp_avg"] = how(optimizer.state[p]["exp_avg"])
                name = f"{what} {how.__name__}" if how else "as it was"
                found[name] = go_on(rank, params, optimizer)
    return found


@with_codec
@with_options("alone", "overlap")
def test_equal_values_laid_out_otherwise_train_alike(
    ranks: RankPools, case: str, native: bool
) -> None:
    world_size, options = OPTIONS[case]
    for found in ranks(world_size).run(train_relaid, options, native):
        expected = found.pop("as it was")
        assert [how for how, bits in found.items() if bits != expected] == []


def test_a_momentum_whose_elements_share_memory_gets_memory_of_its_own() -> None:
    found = []
    for shared in (False, True):
        param = random_param(40, 30)
        optimizer = DistributedLion([param], lr=0.01)
        if shared:
            optimizer.state[param]["exp_avg"] = torch.zeros(()).expand(param.shape)
        take_steps(optimizer, [param], range(3))
        found.append([bits_of(param), bits_of(optimizer.state[param]["exp_avg"])])
    assert found[0] == found[1]


def train_with_strides(
    rank: int, world_size: int, options: dict[str, Any], native: bool
) -> dict[str, list[list[bytes]]]:
    """Steps with gradients and parameters laid out otherwise, and with contiguous ones."""
    found = {}
    with codec(native):
        for of_grad in (turned, apart, channels_last, expanded):
            for of_param in (None, turned, apart, channels_last):
                both = []
                for relaid in (True, False):
                    params = new_params()
                    for p in params if of_param and relaid else ():
                        p.data = of_param(p.data)
                    optimizer = optimizer_of(params, options)
                    for seed in range(100 * rank, 100 * rank + 3):
                        for p in params:
                            grad = of_grad(normal(*p.shape, seed=seed))
                            p.grad = grad if relaid else grad.contiguous()
                        optimizer.step()
                    both.append(go_on(rank, params, optimizer))
                found[f"{of_grad.__name__} {of_param}"] = both
    return found


@with_codec
@with_options("alone")
def test_strides_of_gradients_and_parameters_change_no_bit(
    ranks: RankPools, case: str, native: bool
) -> None:
    world_size, options = OPTIONS[case]
    for found in ranks(world_size).run(train_with_strides, options, native):
        assert [how for how, (one, other) in found.items() if one != other] == []


RESHAPED: dict[str, Callable[[Tensor], Tensor]] = {
    "grown": lambda tensor: torch.cat([tensor, tensor, tensor[:5]]),
    "shrunk": lambda tensor: tensor[:-3].clone(),
    "transposed": lambda tensor: tensor.transpose(0, 1).contiguous(),
    "flat": lambda tensor: tensor.reshape(-1).clone(),
}
OF_SHAPE = "RuntimeError: the momentum of 'first' is of shape (12, 8, 3, 3), the parameter of shape"


def reshape(
    rank: int, world_size: int, options: dict[str, Any], who: range
) -> dict[str, tuple[list[str], list[list[bytes]]]]:
    """Returns the errors of steps after a change of shape, and what they do after the remedy."""
    found = {}
    for how, change in RESHAPED.items():
        # The remedy may come at once, and a model have one message or several.
        for steps, numel in ((2, None), (0, 256)):
            with message_numel(numel):
                params, optimizer = trained(rank, options)
                if rank in who:
                    params[0].data = change(params[0].data)
                errors = []
                for seed in range(steps):
                    backward(params, seed)
                    errors.append(attempt(optimizer.step, params))
                gone_on = []
                if len(who) == world_size:
                    del optimizer.state[params[0]]
                    from_state = go_on_from_state(rank, params, optimizer)
                    gone_on = [go_on(rank, params, optimizer), from_state]
                found[f"{how} {steps}"] = errors, gone_on
    return found


@with_options("alone", "overlap", "nodes")
def test_a_parameter_of_another_shape_is_refused_until_its_momentum_is_dropped(
    ranks: RankPools, case: str
) -> None:
    world_size, options = OPTIONS[case]
    results = ranks(world_size).run(reshape, options, range(world_size))
    for how in results[0]:
        for errors, (found, from_state) in (result[how] for result in results):
            assert len(errors) == int(how[-1])
            for error in errors:
                assert error.startswith(OF_SHAPE), error
                assert "del optimizer.state[param]" in error
            assert found == from_state, how
            assert found[::2] == results[0][how][1][0][::2], "replicas differ"


@with_options("overlap", alone=False)
def test_a_shape_that_changes_on_one_rank_is_raised_on_all(ranks: RankPools, case: str) -> None:
    world_size, options = OPTIONS[case]
    results = ranks(world_size).run(reshape, options, range(1, 2))
    for rank, result in enumerate(results):
        # Without a step between there is no error, and these end here.
        for error in (error for errors, _ in result.values() for error in errors):
            if rank != 1:
                assert error.startswith("Disagreement: the step failed on 1 of ")
            assert OF_SHAPE in error


def convert(
    rank: int, world_size: int, options: dict[str, Any]
) -> dict[torch.dtype, list[list[bytes]]]:
    found = {}
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        params, optimizer = trained(rank, options)
        for p in params:
            p.data = p.data.to(dtype)
        from_state = go_on_from_state(rank, params, optimizer)
        found[dtype] = [go_on(rank, params, optimizer), from_state]
        held = {optimizer.state[p]["exp_avg"].dtype for p in params}
        assert held == {options.get("momentum_dtype") or dtype}
    return found


@with_options("alone")
def test_a_model_of_another_dtype_goes_on_as_a_loaded_one_would(
    ranks: RankPools, case: str
) -> None:
    world_size, options = OPTIONS[case]
    for result in ranks(world_size).run(convert, options):
        assert [dtype for dtype, (one, other) in result.items() if one != other] == []


def test_a_momentum_beyond_the_new_dtype_s_range_saturates() -> None:
    param = nn.Parameter(torch.ones(2))
    optimizer = DistributedLion([param], lr=0.5)
    optimizer.state[param]["exp_avg"] = torch.tensor([1e9, -1e9])
    param.data = param.data.half()
    param.grad = torch.zeros(2, dtype=torch.float16)
    optimizer.step()
    assert optimizer.state[param]["exp_avg"].abs().max() < 65504.0
    assert param.tolist() == [0.5, 1.5]


BY_HAND: dict[str, Any] = {
    "none": None,
    "number": 0.0,
    "integers": torch.zeros(SHAPE, dtype=torch.int32),
    "complex": torch.zeros(SHAPE, dtype=torch.complex64),
    "sparse": torch.zeros(SHAPE).to_sparse(),
    "without values": torch.zeros(SHAPE, device="meta"),
    "wrong shape": torch.zeros(12, 8),
}


def put_by_hand(rank: int, world_size: int, options: dict[str, Any]) -> dict[str, list[str]]:
    found = {}
    for what, value in BY_HAND.items():
        for present in (True, False):
            params, optimizer = trained(rank, options)
            backward(params, rank)
            if rank == world_size - 1:
                optimizer.state[params[0]]["exp_avg"] = value
                if not present:
                    params[0].grad = None
            calls = optimizer.step, optimizer.synchronize_momentum
            found[f"{what} {present}"] = [attempt(call, params) for call in calls]
    return found


@with_options("overlap", alone=False)
def test_what_is_no_momentum_is_refused_on_all_ranks(ranks: RankPools, case: str) -> None:
    world_size, options = OPTIONS[case]
    *others, last = ranks(world_size).run(put_by_hand, options)
    for what, errors in last.items():
        kind = "RuntimeError: " if what.startswith("wrong shape") else "TypeError: "
        for k, doing in enumerate(("the step", "synchronize_momentum()")):
            assert errors[k].startswith(f"{kind}the momentum of 'first' is "), (what, errors)
            assert "del optimizer.state[param]" in errors[k]
            for other in others:
                assert other[what][k].startswith(f"Disagreement: {doing} failed on 1 of ")
                assert other[what][k].endswith(errors[k])


def average_relaid(rank: int, world_size: int) -> dict[str, list[bytes]]:
    found = {}
    for how in (None, turned, apart, channels_last, Tensor.double):
        params, optimizer = trained(rank, {})
        for p in params if how and rank == 1 else ():
            optimizer.state[p]["exp_avg"] = how(optimizer.state[p]["exp_avg"])
        optimizer.synchronize_momentum()
        name = how.__name__ if how else "as it was"
        found[name] = [bits_of(optimizer.state[p]["exp_avg"]) for p in params]
    return found


def test_momenta_that_one_rank_laid_out_otherwise_are_averaged(ranks: RankPools) -> None:
    for found in ranks(2).run(average_relaid):
        expected = found.pop("as it was")
        assert [how for how, bits in found.items() if bits != expected] == []


def replaced(p: nn.Parameter, data: Tensor) -> None:
    assert p.grad is not None
    p.grad.data = data


GRADIENTS: dict[str, Callable[[nn.Parameter], None]] = {
    "a row more": lambda p: replaced(p, torch.ones(13, *SHAPE[1:])),
    "rows turned": lambda p: replaced(p, torch.ones(SHAPE).transpose(0, 1)),
    "integers": lambda p: replaced(p, torch.ones(SHAPE, dtype=torch.int32)),
    "float64": lambda p: replaced(p, torch.ones(SHAPE, dtype=torch.float64)),
    "of the shape before": lambda p: setattr(p, "data", p.data[:4]),
    "of the dtype before": lambda p: setattr(p, "data", p.data.double()),
}


def step_with_gradient(rank: int, world_size: int, options: dict[str, Any]) -> dict[str, str]:
    found = {}
    for what, change in GRADIENTS.items():
        params, optimizer = trained(rank, options)
        backward(params, rank)
        if rank == world_size - 1:
            change(params[0])
            if what.endswith("before"):
                del optimizer.state[params[0]]
        found[what] = attempt(optimizer.step, params)
    return found


@with_options("alone", "overlap")
def test_a_gradient_that_is_not_of_its_parameter_is_refused_on_all_ranks(
    ranks: RankPools, case: str
) -> None:
    world_size, options = OPTIONS[case]
    *others, last = ranks(world_size).run(step_with_gradient, options)
    for what, error in last.items():
        kind = "RuntimeError" if {"row", "rows", "shape"} & set(what.split()) else "TypeError"
        assert error.startswith(f"{kind}: a gradient of "), (what, error)
        assert "zero_grad()" in error
        for other in others:
            assert other[what].startswith("Disagreement: the step failed on 1 of ")
            assert other[what].endswith(error)
