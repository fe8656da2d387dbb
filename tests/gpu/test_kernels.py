"""Kernels in Triton's interpreter, and the machine code that its compiler makes of them."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature

from hf_dlion import DistributedLion
from hf_dlion.core.context import StepContext
from hf_dlion.core.layout import Scratch, messages_of
from hf_dlion.core.lion import apply_verdict, plain_lion
from hf_dlion.core.rule import Average, Majority
from hf_dlion.core.slot import LocalState, Slot
from hf_dlion.gpu import kernels, launches, tables
from hf_dlion.gpu.form import refusal
from hf_dlion.gpu.warm_up import trial_refusal
from hf_dlion.options import Options
from hf_dlion.ranks.routes import Verdict
from tests.support import definition
from tests.support.definition import Layout
from tests.support.fake_gpu import NAME
from tests.support.forms import DEVICE, form
from tests.support.spawn import on_ranks
from tests.support.steps import bits_of

pytestmark = pytest.mark.gpu
in_the_interpreter = pytest.mark.skipif(DEVICE != NAME, reason="watches Triton's interpreter")
SHAPES = [(130, 128), (5,), (7, 192), (3, 70)]


def context_of(lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.99)) -> StepContext:
    groups = [{"lr": lr, "weight_decay": 0.1, "betas": betas}]
    return StepContext(
        number=1, voter=0, voters=2, options=Options(), groups=groups, scratch=Scratch(),
    )  # fmt: skip


def slots_of(shapes: list[tuple[int, ...]], dtype: torch.dtype = torch.float32) -> list[Slot]:
    return [Slot.of(torch.empty(shape, device=DEVICE, dtype=dtype), 0) for shape in shapes]


@on_ranks(1)
def test_counts_of_any_number_of_ranks_equal_the_definition() -> None:
    """Counts words from the middle of a message, as two_phase and nodes do, and silences rows."""
    random, layout = np.random.default_rng(0), Layout(SHAPES)
    with form("kernels"):
        rows, words = messages_of(slots_of(SHAPES))[0].rows, int(layout.starts[-1]) // 64
        for ranks in (*range(1, 10), 127):
            codes = random.integers(0, 2, (ranks, 64 * words))
            if ranks > 2:
                codes[1::2] = 1 - codes[: ranks // 2 * 2 : 2]  # ties
            active = random.random((ranks, len(rows))) < 0.6
            codes *= active[:, layout.row_of_element]
            planes, packed = (
                torch.from_numpy(np.packbits(own, axis=1, bitorder="little"))
                for own in (codes, np.pad(active, [(0, 0), (0, -len(rows) % 64)]))
            )
            planes, packed = (own.view(torch.int64).to(DEVICE) for own in (planes, packed))
            votes = torch.full((words,), -1, device=DEVICE)
            marks = torch.from_numpy(active[0].astype("i1")).to(DEVICE)
            launches.abstain(rows, votes, marks)
            voted = active[0][layout.row_of_element[::64]]
            assert np.array_equal(votes.cpu().numpy(), np.where(voted, -1, 0))
            first = int(random.integers(words))
            size = int(random.integers(1, words - first + 1))
            for rule, count in (("alternate", 1), ("zero", 2), ("average", ranks.bit_length())):
                verdict = torch.full((count, size + 3), -1, device=DEVICE)
                voters = torch.empty(len(rows), dtype=torch.int32, device=DEVICE)
                launches.launch_count_votes(
                    rows, planes[:, first:], packed, verdict, voters,
                    first=first, size=size, tie=0x5555555555555555, rule=rule,
                )  # fmt: skip
                assert np.array_equal(voters.cpu().numpy(), active.sum(axis=0))
                bits = np.unpackbits(
                    verdict.cpu().numpy().view(np.uint8), axis=1, bitorder="little"
                )
                assert not bits[:, 64 * size :].any()
                chosen = slice(64 * first, 64 * (first + size))
                if rule == "average":
                    found = sum(own.astype(int) << j for j, own in enumerate(bits))
                    expected = codes.sum(axis=0)
                else:
                    v = definition.verdict(codes, active, layout, phase=2, ties=rule)
                    # Bits of a row without voters don't count.
                    silent = ~active.any(axis=0)[layout.row_of_element]
                    found = np.where(bits[0], 1, -1)
                    if rule == "zero":
                        found = np.where(bits[1], 0, found)
                    found = np.where(silent[chosen], 0, found[: 64 * size])
                    expected = v
                assert np.array_equal(found[: 64 * size], expected[chosen]), (ranks, rule)


@on_ranks(1)
def test_means_of_any_number_of_ranks_are_rounded_once() -> None:
    random = np.random.default_rng(0)
    with form("kernels"):
        for ranks in (2, 3, 9, 64, 127):
            [slot] = slots_of([(5, 64)])
            start = torch.from_numpy(random.standard_normal(slot.size, np.float32))
            slot.p, slot.moves = start.to(DEVICE), True
            sums, voters = (
                random.integers(0, ranks + 1, slot.size),
                random.integers(1, ranks + 1, 5),
            )
            digits = sums >> np.arange(ranks.bit_length())[:, None] & 1
            planes = np.packbits(digits.astype("u1"), axis=1, bitorder="little").view("i8")
            verdict = Verdict(*(torch.from_numpy(own).to(DEVICE) for own in (planes, voters)))
            [message] = messages_of([slot])
            launches.KernelVote(message, context_of()).move(verdict, Average(ranks, 1))
            means = (2 * sums - voters.repeat(64)) / ranks
            moved = definition.apply_verdict(start.numpy(), means, lr=1e-3, weight_decay=0.1)
            assert np.array_equal(slot.p.cpu().numpy(), moved), ranks


# Numbers of which votes, rounding, and clamping must take care.
SPECIAL = [0.0, -0.0, 1e-45, -1e-45, 2.0**-126, -(2.0**-126), -1.18e-38, 3.38e38, -3.38e38, 1.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@on_ranks(1)
def test_special_numbers_equal_the_definition(dtype: torch.dtype) -> None:
    """Takes gradient and momentum from the same numbers, so the direction is one, too."""
    random = np.random.default_rng(0)
    u = random.choice(np.array(SPECIAL, "f4"), size=64 * 40 + 5)
    u[128:192], u[192:256] = 0.0, np.nan
    own = torch.from_numpy(u).to(dtype)
    with form("kernels"):
        [slot] = slots_of([(len(u),)], dtype)
        grad = own.float()
        grad.view(torch.int32)[192:256] = 0x7FFFFFFF  # The NaN that a GPU computes.
        slot.grad, slot.momentum = grad.to(DEVICE), own.nan_to_num(nan=1.0).to(DEVICE)
        [message] = messages_of([slot])
        votes = launches.KernelVote(message, context_of()).encode()
        found = np.unpackbits(votes.planes.cpu().numpy().view(np.uint8), bitorder="little")
        wide, rounds = torch.lerp(own.float(), own.float(), 0.1).numpy(), dtype == torch.bfloat16
        layout = Layout([(len(u),)])
        with np.errstate(invalid="ignore"):
            codes, _ = definition.codes_of(layout.flat([wide], np.float32), layout, phase=1)
        assert np.array_equal(found, codes)
        largest = torch.finfo(dtype).max if rounds else np.inf
        bits = definition.random_bits(len(u), 0, 1, 0, 1)
        kept = definition.rounded(wide.clip(-largest, largest), dtype, bits) if rounds else wide
        momentum, numbers = slot.momentum.cpu().float().numpy(), ~np.isnan(wide)
        assert np.array_equal(momentum[numbers].view("i4"), kept[numbers].view("i4"))
        assert np.isnan(momentum[~numbers]).all()


@pytest.mark.parametrize("beta", [0.0, 0.25, 0.5, 0.75])
@on_ranks(1)
def test_momenta_are_interpolated_from_the_end_that_torch_takes(beta: float) -> None:
    """The difference is rounded, and nothing else on the way from the nearer end."""
    g, m = torch.tensor([[3.0, 2.0**25], [2.0**25, 3.0]]).repeat(1, 32)
    with form("kernels"):
        [slot] = slots_of([(64,)])
        slot.grad, slot.momentum = g.to(DEVICE), m.to(DEVICE)
        launches.KernelVote(messages_of([slot])[0], context_of(betas=(0.9, beta))).encode()
        assert torch.equal(slot.momentum.cpu(), torch.lerp(m, g, 1 - beta))


@pytest.mark.parametrize("name", ["eager", "kernels"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@on_ranks(1)
def test_a_rate_of_zero_moves_by_a_signed_zero(dtype: torch.dtype, name: str) -> None:
    """-0.0 - 0 * -1 is 0.0, and -0.0 - 0 * 1 is -0.0: the first step of a warmup."""

    def bits(sign: float) -> bytes:
        return bits_of(torch.full((64,), sign * 0.0, dtype=dtype))

    for vote in (-1, 1):
        moved = bits(definition.apply_verdict(np.float32([-0.0]), np.float32([vote]), 0.0, 0.1)[0])
        with form(name):
            [slot] = slots_of([(64,)], dtype)
            grad = torch.full((64,), float(vote), dtype=dtype).to(DEVICE)
            [message], voters = messages_of([slot]), torch.ones(1, dtype=torch.int32, device=DEVICE)
            for ties in ("alternate", "zero", None):
                slot.p, slot.moves = torch.full((64,), -0.0, dtype=dtype).to(DEVICE), True
                slot.grad = slot.momentum = None
                if ties is None:
                    slot.grad, slot.momentum = grad, torch.zeros_like(grad)
                    plain_lion([message], context_of(lr=0.0))
                else:
                    planes = torch.zeros(1 + (ties == "zero"), 1, dtype=torch.int64, device=DEVICE)
                    planes[0] = -1 if vote > 0 else 0
                    verdict, context = Verdict(planes, voters), context_of(lr=0.0)
                    if name == "kernels":
                        launches.KernelVote(message, context).move(verdict, Majority(ties))
                    else:
                        apply_verdict(message, verdict, Majority(ties), context)
                assert bits_of(slot.p) == moved, (vote, ties)


@on_ranks(1)
def test_autograd_sees_what_kernels_write() -> None:
    for name in ("eager", "kernels"):
        with form(name):
            param = torch.ones(64, device=DEVICE).requires_grad_()
            optimizer = DistributedLion([param], lr=0.1)
            loss = param.square().sum()
            loss.backward(retain_graph=True)
            optimizer.step()
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()


@pytest.mark.parametrize("sign", [1, -1])
@on_ranks(1)
def test_what_overflows_becomes_the_largest_bfloat16(sign: int) -> None:
    """Overflows momentum and weights, in a local step; the compensation has the rest."""
    most = sign * torch.finfo(torch.bfloat16).max
    with form("kernels"):
        [slot] = slots_of([(64,)], torch.bfloat16)
        p, g, m, x, c = (
            torch.full((64,), own, dtype=torch.bfloat16, device=DEVICE)
            for own in (most, -most, -most, 0.0, 0.0)
        )
        slot.p, slot.moves = p, True
        slot.grad, slot.momentum, slot.local = g, m, LocalState(x, c)
        [message] = messages_of([slot])
        launches.local_step([message], context_of(lr=1e38))
        assert [own.unique().tolist() for own in (m, p, c)] == [[-most], [most], [0.0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@on_ranks(1)
def test_nothing_is_written_after_the_end(dtype: torch.dtype) -> None:
    """All memory is longer than kernels are told, and no two tensors have equal elements there."""
    dtypes = [*[dtype] * 5, *[torch.int64] * 3, torch.int32, torch.int8]
    with form("kernels"):
        [slot], context = slots_of([(17, 64)], dtype), context_of(1.0)
        *tensors, planes, packed, verdict, voters, rows = (
            torch.full((4096,), k, dtype=own, device=DEVICE) for k, own in enumerate(dtypes, 1)
        )
        p, g, m, x, c = (own[: slot.size] for own in tensors)
        slot.p, slot.moves = p, True
        slot.grad, slot.momentum = g, m
        slot.local = LocalState(x, c if dtype == torch.bfloat16 else None)
        [message] = messages_of([slot])
        step = launches.KernelVote(message, context)
        verdicts: dict[str, Any] = {"planes": planes, "by_row": voters, "voters": 2}
        launches.each_tile("encode", step._encode, planes=planes, by_row=rows)
        launches.each_tile("move", step._move, **verdicts, rule="zero")
        launches.plain_lion([message], context)
        launches.local_step([message], context)
        five = Verdict(planes[:17].expand(5, 17), voters)
        launches.end_period(message, five, Average(2, 4), lambda _: 1.0, context)
        spans = message.rows
        launches.abstain(spans, planes[:17], rows[:17])
        for rule in ("zero", "average"):
            launches.launch_count_votes(
                spans, planes[:17].expand(2, 17), packed[:1].expand(2, 1),
                verdict[:34].view(2, 17), voters[:17], first=0, size=17, tie=0, rule=rule,
            )  # fmt: skip
        ends = [own[slot.size :] for own in tensors]
        ends += [planes[17:], packed[1:], verdict[34:], voters[17:], rows[17:]]
        assert [end.unique().tolist() for end in ends] == [[k + 1] for k in range(len(ends))]


def test_the_interpreter_is_kept_from_a_gpus_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda", 0)
    for text, interpreted in (("1", True), ("True", True), ("off", False), ("0", False)):
        monkeypatch.setenv("TRITON_INTERPRET", text)
        assert ("interpreter" in refusal(device)) == knobs.runtime.interpret == interpreted


@in_the_interpreter
@on_ranks(1)
def test_an_address_that_is_no_multiple_of_16_is_not_taken_for_one() -> None:
    def checked(address: Any, divisor: int) -> Any:
        assert address.handle.data % divisor == 0
        return address

    with form("kernels"):
        for odd in range(5):
            [slot] = slots_of([(16, 64)], torch.bfloat16)
            longer = torch.ones(5, slot.size + 8, dtype=torch.bfloat16, device=DEVICE)
            p, g, m, x, c = (own[int(k == odd) :][: slot.size] for k, own in enumerate(longer))
            slot.p, slot.moves = p, True
            slot.grad, slot.momentum, slot.local = g, m, LocalState(x, c)
            launches.local_step(
                messages_of([slot]), context_of()
            )  # The first one patches the interpreter.
            with pytest.MonkeyPatch.context() as monkeypatch:
                monkeypatch.setattr(tl, "multiple_of", checked)
                launches.local_step(messages_of([slot]), context_of())


def test_no_part_of_a_tensor_has_two_keys_of_random_bits() -> None:
    slot = Slot.of(torch.empty(2**26 + 2, 128, device="meta"), 0)
    parts = [part for message in messages_of([slot]) for part in launches.slot_lines(message)]
    sizes = [part.place.size for part in parts]
    assert sum(sizes) == slot.size
    assert all(
        own.number >> 33 == (own.number + size - 1) >> 33
        for own, size in zip(parts, sizes, strict=True)
    )
    # The last two are in one message.
    assert [64 * own.place.skipped for own in parts[-2:]] == [0, sizes[-2]]


class Accesses:
    """Counts the bytes of the addresses that a kernel reads and writes, each call's once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from triton.runtime.interpreter import InterpreterBuilder

        self.bytes, self._patch = 0, monkeypatch
        for name in ("create_masked_load", "create_masked_store"):
            self._count(InterpreterBuilder, name, at=1 if name.endswith("load") else 2)

    def _count(self, builder: Any, name: str, at: int) -> None:
        original = getattr(builder, name)

        def counting(own: Any, pointers: Any, *args: Any) -> Any:
            if pointers.data.size > 1:  # A table's line stays in the cache.
                used = np.unique(pointers.data[args[at - 1].data.astype(bool)])
                size = pointers.get_element_ty().primitive_bitwidth // 8
                self.bytes += size * used.size
            return original(own, pointers, *args)

        self._patch.setattr(builder, name, counting)


KINDS = "encode", "move", "step", "local step", "end of period"


@on_ranks(1)
def test_a_trial_launches_every_kernel() -> None:
    with (
        form("kernels"),
        mock.patch.object(launches, "each_tile", wraps=launches.each_tile) as launch,
    ):
        assert trial_refusal(torch.device(DEVICE, 0)) == ""
        assert {call.args[0] for call in launch.call_args_list} == set(KINDS)


@in_the_interpreter
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@on_ranks(1, timeout=300)
def test_every_byte_is_read_and_written_once(dtype: torch.dtype) -> None:
    """Compares the addresses that a kernel uses with the bytes of which plan computes times."""
    with form("kernels"), pytest.MonkeyPatch.context() as monkeypatch:
        count, [slot] = Accesses(monkeypatch), slots_of([(96, 1024)], dtype)
        p, g, m, x, c = (torch.ones(slot.size, dtype=dtype, device=DEVICE) for _ in range(5))
        slot.p, slot.moves = p, True
        slot.grad, slot.momentum = g, m
        slot.local = LocalState(x, c if dtype == torch.bfloat16 else None)
        [message], voters = (
            messages_of([slot]),
            torch.full((96,), 2, dtype=torch.int32, device=DEVICE),
        )
        step = launches.KernelVote(message, context_of())
        votes = step.encode()
        one = Verdict(votes.planes, voters)
        five = Verdict(torch.cat([votes.planes] * 5), voters)
        works = (
            step.encode,
            lambda: step.move(one, Majority("alternate")),
            lambda: launches.plain_lion([message], context_of()),
            lambda: launches.local_step([message], context_of()),
            lambda: launches.end_period(message, five, Average(2, 4), lambda _: 1.0, context_of()),
        )
        for kind, work in zip(KINDS, works, strict=True):
            count.bytes = 0
            work()
            expected = launches.moved_bytes(kind, dtype)
            assert count.bytes / slot.size == pytest.approx(expected, rel=0.01), kind


# Machine code


@pytest.mark.parametrize("kernel", [kernels.each_tile, kernels.abstain, kernels.count_votes])
def test_one_variant_serves_all_numbers_and_addresses(kernel: Any) -> None:
    backend = make_backend(GPUTarget("cuda", 90, 32))
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    runtime = [param for param in kernel.params if not param.is_constexpr]
    given = dict.fromkeys([own.name for own in kernel.params if own.is_constexpr], "")
    variants = {
        str(bind(*[number] * len(runtime), **given)[1]) for number in (0, 1, 8, 16, 17, 1 << 40)
    }
    assert len(variants) == 1


def compiled(kernel: Any, arch: int, folder: Path, **given: Any) -> tuple[str, str]:
    """Returns the PTX of a kernel as it is launched, and how much it uses of a multiprocessor."""
    types = {name: own.removeprefix("tl.") for name, own in kernel.fn.__annotations__.items()}
    signature = {
        name: "constexpr" if name in given else types[name].replace("int", "i")
        for name in kernel.arg_names
    }
    constants = {(k,): given[name] for k, name in enumerate(kernel.arg_names) if name in given}
    made = triton.compile(
        ASTSource(kernel, signature, constants, {}),
        target=GPUTarget("cuda", arch, 32),
        options=tables.OPTIONS,
    )
    (folder / "cubin").write_bytes(made.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    command = [tool, "-res-usage", folder / "cubin"]
    return made.asm["ptx"], subprocess.run(command, capture_output=True, text=True).stdout


# Kind, rule, and letters for the dtypes of gradient, momentum, and parameter.
EQUAL_AND_MIXED = "fff bbb bfb fbf"
VARIANTS = [
    ("encode", "", EQUAL_AND_MIXED), ("step", "", EQUAL_AND_MIXED),
    ("local step", "", EQUAL_AND_MIXED),
    *(("move", rule, "--f --b") for rule in ("alternate", "zero", "average")),
    ("end of period", "", "--f --b"),
]  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize(
    ("kind", "rule", "types"),
    [(kind, rule, types) for kind, rule, several in VARIANTS for types in several.split()],
)
def test_machine_code_rounds_as_the_rule_says(
    kind: str, rule: str, types: str, arch: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Finds no flush to zero, no fused operation but in `_lerp`, no spill, and 128-bit accesses.

    Means of three ranks are divided.
    """
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    known = {"f": torch.float32, "b": torch.bfloat16}
    names = {"-": None, "f": tl.float32, "b": tl.bfloat16}
    chosen = {name: names[letter] for name, letter in zip("GMP", types, strict=True)}
    given = {"KIND": kind, **chosen, "N": 3, "RULE": rule, "TOP": 1}
    ptx, usage = compiled(kernels.each_tile, arch, tmp_path, **given)
    assert ".ftz" not in ptx
    divisions = {"div.rn.f32"} if rule == "average" or kind == "end of period" else set()
    assert set(re.findall(r"\b(?:div|rcp)\.[\w.]*f32", ptx)) == divisions
    # Two for each of 8 elements of a thread, in whole tiles and in others.
    assert len(re.findall(r"\bfma\.", ptx)) == (0 if types.startswith("-") else 32)
    assert re.search(r"STACK:0 .*LOCAL:0 ", usage), usage
    # A thread moves 8 elements of a whole tile, by 16 bytes.
    moved = int(launches.moved_bytes(kind, dtype := known[types[2]]))
    if types[0] != "-":
        moved += sum(known[own].itemsize - dtype.itemsize for own in types[0] + 2 * types[1])
    accesses = len(re.findall(r"\b(?:ld|st)\.global[\w.:]*\.v4\.b32", ptx))
    assert accesses == moved * 8 / 16


@pytest.mark.full
@pytest.mark.parametrize("arch", [80, 90])
def test_counting_spills_nothing(
    arch: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    counts = [{"N": 2, "RULE": "zero"}, {"N": 9, "RULE": "average"}]
    works = [(kernels.abstain, {}), *((kernels.count_votes, own) for own in counts)]
    for kernel, given in works:
        assert re.search(r"STACK:0 .*LOCAL:0 ", compiled(kernel, arch, tmp_path, **given)[1])
