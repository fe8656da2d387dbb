"""One vote per node equals the simulation with as many workers as nodes, bit for bit."""

from __future__ import annotations

import contextlib
import itertools
import math
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hf_dlion import DistributedLion
from hf_dlion.codec.layout import MessageLayout, shards_of
from hf_dlion.exchange.node import RowEdges
from tests.support import ddp_training, zoo
from tests.support.messages import message_numel
from tests.support.nodes import environment, nodes_of
from tests.support.oracle import OracleGroup, OracleLion, bits_of
from tests.support.rule_cases import bytes_of_words, planes_of, rows_of_words
from tests.support.spawn import RankPools, run_ranks

STEPS = 15

CASES: dict[str, dict[str, Any]] = {
    "default": {},
    "gather": {"exchange": "gather", "momentum_dtype": torch.bfloat16},
    "two_phase": {"exchange": "two_phase", "momentum_dtype": torch.float32, "seed": 2**40 + 3},
    "gather-zero": {"exchange": "gather", "ties": "zero", "momentum_dtype": torch.float16},
    "two_phase-average": {"exchange": "two_phase", "aggregation": "average"},
    "gather-average": {"exchange": "gather", "aggregation": "average"},
    "nearest": {"stochastic_rounding": False, "momentum_dtype": torch.bfloat16},
    "gather-2-bits": {"exchange": "gather", "bits": 2},
    "two_phase-4-bits": {"exchange": "two_phase", "bits": 4, "momentum_dtype": torch.bfloat16},
    "two_phase-8-bits-zero": {"exchange": "two_phase", "bits": 8, "ties": "zero"},
}


SHORT = ("default", "two_phase-average", "two_phase-4-bits")


def of_four_ranks(case: str) -> Any:
    # Of the plain tier two: one bit, and more.
    marks = [] if case in ("default", "two_phase-4-bits") else pytest.mark.full
    return pytest.param(2, 2, case, marks=marks)


def of_six_ranks(nodes: int, size: int, case: str) -> Any:
    """A case of nodes that take long on a few cores; some of them stand for the others."""
    return pytest.param(
        nodes, size, case, marks=pytest.mark.full if case in SHORT else pytest.mark.long
    )


@pytest.mark.parametrize(
    ("nodes", "size", "case"),
    [
        *map(of_four_ranks, CASES),
        *(of_six_ranks(*nodes, case) for nodes in ((2, 3), (3, 2)) for case in CASES),
    ],
)
def test_training_equals_the_simulation_with_a_worker_per_node(
    ranks: RankPools, nodes: int, size: int, case: str
) -> None:
    options = {**CASES[case], "local_group": size}
    records = ranks(nodes * size).run(zoo.train, STEPS, options)
    zoo.replay(zoo.as_nodes(records, nodes_of(nodes, size)), options)


@pytest.mark.multiproc
@pytest.mark.parametrize(
    "ddp",
    [
        pytest.param({}, id="default"),
        pytest.param({"gradient_as_bucket_view": True}, id="bucket_view", marks=pytest.mark.full),
        pytest.param({"bucket_cap_mb": 1e-4}, id="many_buckets", marks=pytest.mark.full),
    ],
)
@pytest.mark.parametrize(
    ("nodes", "size"), [pytest.param(2, 2, marks=pytest.mark.smoke), (2, 3), (1, 2)]
)
def test_ddp_averages_inside_the_node_and_training_equals_the_simulation(
    ranks: RankPools, nodes: int, size: int, ddp: dict[str, Any]
) -> None:
    options = {"local_group": size}
    wrapped = {"find_unused_parameters": True, **ddp}
    records = ranks(nodes * size).run(zoo.train_ddp, STEPS, options, wrapped)
    zoo.replay(zoo.as_nodes(records, nodes_of(nodes, size), averaged=True), options)


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.full)])
@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_one_node_alone_is_plain_lion_on_its_mean_gradient(
    ranks: RankPools, size: int, dtype: torch.dtype | None
) -> None:
    options = {"local_group": size, "momentum_dtype": dtype}
    records = ranks(size).run(zoo.train, STEPS, options)
    zoo.replay(zoo.as_nodes(records, nodes_of(1, size)), options)
    assert all(record.bytes_sent == 0 for own in records for record in own)


def test_nodes_of_one_rank_are_no_nodes(ranks: RankPools) -> None:
    zoo.replay(ranks(2).run(zoo.train, STEPS, {"local_group": 1}), {})


@pytest.mark.multiproc
@pytest.mark.parametrize("case", [name for name in ddp_training.CASES if name != "clipping"])
def test_a_wrapper_makes_no_difference(ranks: RankPools, case: str) -> None:
    wrap, ddp_options, loop = ddp_training.CASES[case]
    loop = {**loop, "options": {"local_group": 2}}
    wrapped = ranks(4).run(ddp_training.train, wrap, ddp_options, loop)
    bare = ranks(4).run(ddp_training.train, "bare", {}, {**loop, "set_to_none": True})
    for (bits, sent), (bare_bits, bare_sent) in zip(wrapped, bare, strict=True):
        assert all(map(torch.equal, bits, wrapped[0][0]))
        assert all(map(torch.equal, bits, bare_bits))
        assert sent == bare_sent


def train_as_launched(rank: int, world_size: int, size: int, how: str) -> list[zoo.Record]:
    """Trains as torchrun with `size` processes per node starts it, or with groups of the user's."""
    options: dict[str, Any] = {"local_group": "node"}
    if how == "interleaved":
        nodes = [list(range(first, world_size, size)) for first in range(size)]
        groups = [dist.new_group(members) for members in nodes]
        options["local_group"] = groups[rank % size]
    if how == "subgroup":
        # Rank 0 takes no part, and trains alone.
        groups = [dist.new_group([0]), dist.new_group(list(range(1, world_size)))]
        options = {"process_group": groups[min(rank, 1)], "local_group": size if rank else None}
        mine = options["process_group"]
        return zoo.train(dist.get_rank(mine), dist.get_world_size(mine), STEPS, options)
    with environment(LOCAL_WORLD_SIZE=str(size), LOCAL_RANK=str(rank % size)):
        return zoo.train(rank, world_size, STEPS, options)


@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("how", "world_size", "nodes"),
    [
        ("torchrun", 4, [[0, 1], [2, 3]]),
        ("interleaved", 4, [[0, 2], [1, 3]]),
        ("subgroup", 5, [[1, 2], [3, 4]]),
    ],
)
def test_nodes_are_found_however_they_are_given(
    ranks: RankPools, how: str, world_size: int, nodes: list[list[int]]
) -> None:
    records = ranks(world_size).run(train_as_launched, 2, how)
    zoo.replay(zoo.as_nodes(records, nodes), {})
    if how == "subgroup":
        zoo.replay([records[0]], {})


# Rows that the shards cut, at every place; a word is 64 elements.
SHAPES = [(5, 40), (3, 200), (2, 7), (1, 300), (33,), (4, 64), (9, 31), ()]


def cut_grads(node: int, t: int, dtype: torch.dtype) -> list[Tensor]:
    """A node's gradients, with zeros in stretches that begin and end anywhere."""
    generator = torch.Generator().manual_seed(1000 * node + t)
    grads = []
    for shape in SHAPES:
        numel = math.prod(shape)
        values = 6 * torch.randint(-3, 4, (numel,), generator=generator).to(dtype)
        a, b = sorted(torch.randint(0, numel + 1, (2,), generator=generator).tolist())
        if t % 2:
            values[:a] = values[b:] = 0
        else:
            values[a:b] = 0
        grads.append(values.view(shape))
    return grads


def train_on_cut_rows(
    rank: int, world_size: int, size: int, steps: int, dtype: torch.dtype, options: dict[str, Any]
) -> list[tuple[list[bytes], float]]:
    params = [nn.Parameter(torch.full(shape, 0.5, dtype=dtype)) for shape in SHAPES]
    optimizer = DistributedLion(params, lr=0.01, betas=(0.0, 0.0), local_group=size, **options)
    found = []
    for t in range(steps):
        # Multiples of 6, whose mean over 2 or 3 ranks is exact, in any order.
        generator = torch.Generator().manual_seed(t)
        for p, grad in zip(params, cut_grads(rank // size, t, dtype), strict=True):
            shift = 6 * torch.randint(-2, 3, grad.shape, generator=generator)
            weight = {0: 1, 1: -1}.get(rank % size, 0)
            p.grad = grad + weight * shift.to(dtype)
        optimizer.step()
        found.append(([bits_of(p) for p in params], optimizer.wire.agreement))
    return found


@pytest.mark.parametrize(
    ("nodes", "size", "dtype"),
    [
        *((2, 2, dtype) for dtype in (torch.float32, torch.bfloat16)),
        *(pytest.param(2, 2, d, marks=pytest.mark.full) for d in (torch.float16, torch.float64)),
        *(pytest.param(2, 3, d, marks=pytest.mark.full) for d in (torch.float32, torch.bfloat16)),
        *(pytest.param(2, 3, d, marks=pytest.mark.long) for d in (torch.float16, torch.float64)),
    ],
)
@pytest.mark.parametrize(
    "options",
    [{}, {"aggregation": "average"}, {"ties": "zero"}, {"bits": 2}, {"bits": 4}, {"bits": 8}],
    ids=str,
)
def test_rows_that_the_shards_cut_vote_as_whole_rows(
    ranks: RankPools, nodes: int, size: int, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    steps = 12
    results = ranks(nodes * size).run(train_on_cut_rows, size, steps, dtype, options)
    params = [torch.full(shape, 0.5, dtype=dtype) for shape in SHAPES]
    oracle = OracleLion([OracleGroup(params, lr=0.01, betas=(0.0, 0.0))], nodes, **options)
    for t in range(steps):
        oracle.step([cut_grads(node, t, dtype) for node in range(nodes)])
        for result in results:
            assert result[t][0] == [bits_of(p) for p in oracle.params], f"step {t}"
            assert result[t][1] == pytest.approx(oracle.agreement)


def test_the_cut_rows_are_worth_a_test() -> None:
    layout = MessageLayout.of(list(enumerate(map(torch.Size, SHAPES))))
    for size in (2, 3):
        assert RowEdges.wire_bytes(shards_of(layout, size)) == 2 * (size - 1)


@pytest.mark.parametrize(
    ("exchange", "aggregation", "ties", "bits"),
    [
        ("gather", "majority", "alternate", 1),
        pytest.param("two_phase", "majority", "zero", 1, marks=pytest.mark.full),
        pytest.param("two_phase", "average", "alternate", 1, marks=pytest.mark.full),
        pytest.param("gather", "majority", "alternate", 2, marks=pytest.mark.full),
        ("two_phase", "majority", "zero", 4),
    ],
)
@pytest.mark.parametrize(
    ("nodes", "size"),
    [(2, 2), *(pytest.param(*n, marks=pytest.mark.full) for n in ((2, 3), (3, 2)))],
)
def test_bytes_are_the_documented_formula(
    ranks: RankPools, nodes: int, size: int, exchange: str, aggregation: str, ties: str, bits: int
) -> None:
    options = {"exchange": exchange, "aggregation": aggregation, "ties": ties, "bits": bits}
    world_size = nodes * size
    results = ranks(world_size).run(zoo.train, 12, {**options, "local_group": size})
    shapes = [p.shape for group in zoo.Zoo().groups() for p in group]
    of_words = rows_of_words(shapes)
    share = -(-len(of_words) // size)
    shards = [of_words[first : first + share] for first in range(0, size * share, share)]
    touched = [set().union(*shard) for shard in shards]
    per_element, per_row = planes_of(nodes, aggregation, ties)
    activity = -(-max(map(len, touched)) // 64)
    sums = 1 if bits == 1 else 2
    inside = 8 * (size - 1) * (per_element * share + per_row * activity + sums)
    if any(a & b for a, b in itertools.pairwise(touched)):
        inside += 2 * (size - 1)
    words = -(-len(shapes) // 64)
    for rank, records in enumerate(results):
        outside = bytes_of_words(shards[rank % size], nodes, exchange, aggregation, ties, bits)
        out, within = 8 * (world_size - size) * (6 + words), 8 * (size - 1) * (6 + words)
        for t in range(1, 12):
            if t == zoo.ALL_INF_STEP:
                assert (records[t].bytes_sent, records[t].node_bytes_sent) == (out, within)
                continue
            assert records[t].bytes_sent == out + outside, f"step {t}"
            gradients = 0
            if not (t == zoo.ONE_NAN_STEP and rank // size == nodes - 1):
                node = results[rank - rank % size : rank - rank % size + size]
                grads = [
                    next((grad for grad in same if grad is not None), None)
                    for same in zip(*(own[t].grads for own in node), strict=True)
                ]
                gradients = 8 * (size - 1) * words + averaged_bytes(grads, size)
            assert records[t].node_bytes_sent == within + inside + gradients, f"step {t}"


def averaged_bytes(grads: list[Tensor | None], size: int) -> int:
    """A ring all-reduce for each stretch of gradients of one dtype that a rank of the node has."""
    batches: list[tuple[torch.dtype, int]] = []
    for grad in grads:
        if grad is None or grad.numel() == 0:
            continue
        if batches and batches[-1][0] == grad.dtype:
            batches[-1] = (grad.dtype, batches[-1][1] + grad.numel())
        else:
            batches.append((grad.dtype, grad.numel()))
    return sum(2 * (size - 1) * -(-n // size) * dtype.itemsize for dtype, n in batches)


def say_why(call: Any) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def fail_to_find_nodes(rank: int, world_size: int, what: str) -> str:
    variables: dict[str, str | None] = {"LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": str(rank % 2)}
    local_group: Any = "node"
    if what == "missing" and rank == 1:
        variables["LOCAL_WORLD_SIZE"] = None
    if what == "no_number" and rank == 1:
        variables["LOCAL_WORLD_SIZE"] = "two"
    if what == "different":
        variables["LOCAL_WORLD_SIZE"] = "4" if rank == 3 else "2"
    if what == "not_consecutive":
        variables["LOCAL_RANK"] = str(rank // 2)
    if what == "not_divisible":
        local_group = 3
    if what == "one_without":
        local_group = None if rank == 2 else 2
    if what == "other_size":
        local_group = 4 if rank == 1 else 2
    if what == "group_and_number":
        groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        local_group = groups[0] if rank == 1 else 2
    if what == "not_a_member":
        groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        local_group = groups[0]
    if what == "unequal":
        groups = [dist.new_group([0, 1, 2]), dist.new_group([3])]
        local_group = groups[rank // 3]
    if what == "overlapping":
        groups = [dist.new_group([0, 1]), dist.new_group([1, 2]), dist.new_group([0, 3])]
        local_group = groups[[0, 0, 1, 2][rank]]
    if what == "too_large":
        process_group = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
        local_group = dist.new_group([0, 1, 2, 3])
    param = nn.Parameter(torch.ones(70))
    param.grad = torch.ones(70)
    with environment(**variables):
        options = {"process_group": process_group} if what == "too_large" else {}
        optimizer = DistributedLion([param], local_group=local_group, **options)
        return say_why(optimizer.step)


@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("missing", "rank 1: ValueError: local_group='node' reads LOCAL_WORLD_SIZE, which is not"),
        ("no_number", "rank 1: ValueError: LOCAL_WORLD_SIZE='two' must be a number"),
        ("different", "LOCAL_WORLD_SIZE is [2, 2, 2, 4] in rank order"),
        ("not_consecutive", "LOCAL_RANK is [0, 0, 1, 1] in rank order"),
        ("not_divisible", "4 ranks cannot be divided into nodes of 3"),
        ("one_without", "ranks differ in options, first in 'local_group': rank 0: 2"),
        ("other_size", "first in 'local_group': rank 0: 2, rank 1: 4, rank 2: 2, rank 3: 2"),
        ("group_and_number", "local_group must hold the rank that passes it, got by rank [(), (0"),
        ("not_a_member", "local_group is a process group of which this rank is not a member"),
        ("unequal", "first in 'local_group': rank 0: 3, rank 1: 3, rank 2: 3, rank 3: 1"),
        ("overlapping", "the local groups must share out the ranks [0, 1, 2, 3]"),
        ("too_large", "the local groups must share out the ranks"),
    ],
)
def test_nodes_that_do_not_fit_are_refused_on_every_rank(
    ranks: RankPools, what: str, message: str
) -> None:
    for said in ranks(4).run(fail_to_find_nodes, what):
        assert said.startswith("Disagreement")
        assert message in said


def find_nodes_beside_other_groups(rank: int, world_size: int) -> list[str]:
    """Finds nodes of two again and again while some ranks alone join more groups."""

    def join(*members: int) -> None:
        dist.new_group(list(members), use_local_synchronization=True)

    def train(local_group: Any, process_group: dist.ProcessGroup | None = None) -> str:
        param = nn.Parameter(torch.zeros(70))
        param.grad = torch.full((70,), 1.0 - rank % 2 * 3)
        options = {"local_group": local_group, "process_group": process_group}
        said = say_why(DistributedLion([param], lr=0.5, betas=(0.0, 0.0), **options).step)
        return f"{said} {param[0].item():g}"

    given = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    everyone = [dist.new_group(list(range(world_size))) for _ in range(3)]
    found = [train(2, everyone[0])]
    if rank == 0:
        join(0)
    found.append(train(2, everyone[0]))  # The groups of that process group exist.
    found.append(train(2))
    found.append(train(given))
    if rank == 2:
        join(2)
    found.append(train(2))
    found.append(train(given))  # Peers count alike, neighbours do not.
    if rank in (1, 3):
        join(rank)
    if rank in (0, 1):
        join(0, 1)
    found.append(train(2, everyone[1]))
    found.append(train(given, everyone[1]))
    if rank in (2, 3):
        join(2, 3)
    found.append(train(2, everyone[2]))
    return found


@pytest.mark.multiproc
def test_nodes_are_found_wherever_torch_can_make_their_groups_and_refused_elsewhere() -> None:
    refused = "Disagreement: ranks are members of different numbers of process groups, [{}] in rank"
    counts = ["8, 7, 7, 7", "8, 7, 7, 7", "8, 7, 8, 7", "10, 10, 9, 9", "10, 10, 9, 9"]
    outcomes = [None, None, 0, 1, 2, None, 3, 4, None]
    # In processes of its own: the numbers stay different.
    for said in run_ranks(4, find_nodes_beside_other_groups):
        for step, (text, outcome) in enumerate(zip(said, outcomes, strict=True)):
            expected = "accepted" if outcome is None else refused.format(counts[outcome])
            assert text.startswith(expected), (step, said)
            assert text.endswith(" 0" if outcome is not None else " 0.5"), (step, said)


def fail_in_the_first_forward(rank: int, world_size: int) -> str:
    model = ddp_training.new_model()
    optimizer = ddp_training.optimizer_of(model, local_group="node")
    holder = [DistributedDataParallel(model)]
    with (
        ddp_training.released(holder),
        environment(LOCAL_WORLD_SIZE="2" if rank else None, LOCAL_RANK=None),
    ):
        said = say_why(lambda: holder[0](torch.zeros(1, 1, dtype=torch.int64)))
    assert optimizer.steps == 0
    return said


@pytest.mark.multiproc
def test_a_wrapper_finds_the_nodes_or_fails_on_every_rank(ranks: RankPools) -> None:
    for said in ranks(2).run(fail_in_the_first_forward):
        assert "rank 0: ValueError: local_group='node' reads LOCAL_WORLD_SIZE" in said


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "nodes", [0, 1]])
def test_a_bad_value_is_refused_at_construction(value: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="local_group="):
        DistributedLion([nn.Parameter(torch.ones(2))], local_group=value)


def differ_inside_a_node(rank: int, world_size: int, what: str) -> list[Any]:
    """One rank's gradients went another way than its node's."""
    model = ddp_training.new_model()
    optimizer = ddp_training.optimizer_of(model, local_group=2)
    holder = [DistributedDataParallel(model)]
    with ddp_training.released(holder):
        for step, (tokens,) in enumerate(ddp_training.batches(rank, 1)):
            holder[0](tokens).backward()
            if step == 1 and rank == 1:
                if what == "dropped":
                    model.first.weight.grad = None
                elif what == "model":
                    model.zero_grad()
                elif what.startswith("optimizer"):
                    optimizer.zero_grad(set_to_none=what == "optimizer")
                elif what == "more_backward":
                    model(tokens).backward()
                elif what == "replaced":
                    model.second.weight.grad = torch.ones_like(model.second.weight)
            optimizer.step()
            optimizer.zero_grad()
    return [ddp_training.bits_of(model), optimizer.wire.exchanges]


@pytest.mark.multiproc
@pytest.mark.parametrize("what", ["dropped", "model", "optimizer", "more_backward", "replaced"])
def test_a_difference_inside_a_node_neither_hangs_nor_diverges(ranks: RankPools, what: str) -> None:
    results = ranks(4).run(differ_inside_a_node, what)
    for bits, exchanges in results:
        assert exchanges == ddp_training.STEPS
        assert all(map(torch.equal, bits, results[0][0]))


@pytest.mark.multiproc
def test_a_rank_drops_its_nodes_gradients_alike_however_it_does(ranks: RankPools) -> None:
    """None or zeros: its share of the momentum must not see a gradient that its node's does not."""
    pools = ranks(4)
    found = [
        pools.run(differ_inside_a_node, what)[0][0]
        for what in ("model", "optimizer", "optimizer to zeros")
    ]
    assert all(map(torch.equal, found[0], found[1]))
    assert all(map(torch.equal, found[0], found[2]))


def overflow(rank: int, world_size: int, wrapped: bool) -> dict[str, Any]:
    """Rank 1's loss overflows in step 1; its node has ranks 0 and 1."""
    model = ddp_training.new_model()
    optimizer = ddp_training.optimizer_of(model, local_group=2)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
    holder: list[Any] = [DistributedDataParallel(model) if wrapped else model]
    momenta = []
    with ddp_training.released(holder), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step, (tokens,) in enumerate(ddp_training.batches(rank, 1)):
            loss = holder[0](tokens)
            if rank == 1 and step == 1:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            if step % 2:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            momenta.append([s["exp_avg"].clone() for s in optimizer.state.values()])
    return {
        "bits": ddp_training.bits_of(model),
        "scale": scaler.get_scale(),
        "kept": all(map(torch.equal, momenta[0], momenta[1])),
        "abstentions": optimizer.wire.abstentions,
    }


@pytest.mark.parametrize("wrapped", [False, pytest.param(True, marks=pytest.mark.multiproc)])
def test_a_node_with_an_overflow_abstains_as_one(ranks: RankPools, wrapped: bool) -> None:
    results = ranks(4).run(overflow, wrapped)
    for rank, result in enumerate(results):
        assert all(map(torch.equal, result["bits"], results[0]["bits"]))
        assert result["abstentions"] == 1
        assert result["kept"] == (rank < 2)
    # The wrapper hands the Inf to the whole node, so that its ranks keep one scale.
    scales = [result["scale"] for result in results]
    assert scales == ([512.0, 512.0] if wrapped else [1024.0, 512.0]) + [1024.0, 1024.0]


def overflow_for_ever(rank: int, world_size: int) -> str:
    param = nn.Parameter(torch.ones(70))
    optimizer = DistributedLion([param], local_group=2, max_abstained_steps=3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(3):
            param.grad = torch.full((70,), torch.nan if rank == 3 else 1.0)
            said = say_why(optimizer.step)
    return said


def test_a_node_that_always_abstains_is_named_on_every_rank(ranks: RankPools) -> None:
    for said in ranks(4).run(overflow_for_ever):
        assert "gradients of node 1 held a NaN or an Inf in 3 steps in a row" in said


def see_the_gradient(rank: int, world_size: int, micro_steps: int) -> tuple[Tensor, Tensor, float]:
    """The gradient that a loop clips and logs, this rank's own, and how often all were sent."""
    model, alone = ddp_training.new_model(), ddp_training.new_model()
    optimizer = ddp_training.optimizer_of(model, local_group=2)
    holder = [DistributedDataParallel(model)]
    with ddp_training.released(holder):
        micro_batches = ddp_training.batches(rank, micro_steps)[0]
        for number, tokens in enumerate(micro_batches):
            last = number == len(micro_batches) - 1
            with contextlib.nullcontext() if last else holder[0].no_sync():
                holder[0](tokens).backward()
            alone(tokens).backward()
        seen = model.first.weight.grad.clone()
        optimizer.step()
    # With two ranks a ring sends as many bytes as there are.
    total = sum(p.numel() * p.element_size() for p in model.parameters())
    return seen, alone.first.weight.grad, optimizer.wire.last_node_bytes_sent / total


@pytest.mark.multiproc
@pytest.mark.parametrize("micro_steps", [1, 3])
def test_the_loop_sees_the_nodes_gradient(ranks: RankPools, micro_steps: int) -> None:
    results = ranks(4).run(see_the_gradient, micro_steps)
    for first in (0, 2):
        (seen, own, sent), (other_seen, other_own, _) = results[first : first + 2]
        assert 1.0 <= sent < 1.5, "averaged once"
        assert torch.equal(seen, other_seen)
        assert torch.equal(seen, own / 2 + other_own / 2)
    assert not torch.equal(results[0][0], results[2][0])


def train_with_gradients_of_other_dtypes(rank: int, world_size: int, on_rank_1: str) -> list[float]:
    """Of a node of two ranks, float32 on the first; its node's signs decide, so the mean's."""
    param = nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
    param.grad_dtype = None if on_rank_1 == "bfloat16" else torch.float32
    optimizer = DistributedLion([param], lr=0.5, local_group=2)
    if rank == 0:
        param.grad = torch.tensor([3.0, -3.0, 1.0, -1.0])
    elif on_rank_1 == "bfloat16":
        param.grad = torch.tensor([-1.0, 1.0, -2.0, 2.0]).bfloat16()
    optimizer.step()
    return param.tolist()


@pytest.mark.parametrize("on_rank_1", ["nothing", "bfloat16"])
def test_gradients_of_other_dtypes_are_averaged_in_one(ranks: RankPools, on_rank_1: str) -> None:
    last = 0.5 if on_rank_1 == "bfloat16" else -0.5
    for found in ranks(2).run(train_with_gradients_of_other_dtypes, on_rank_1):
        assert found == [-0.5, 0.5, last, -last]


def share_a_wrapper(rank: int, world_size: int, second: int | None) -> str:
    models = nn.ModuleList([ddp_training.new_model(), ddp_training.new_model()])

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.models = models

        def forward(self, tokens: Tensor) -> Tensor:
            return self.models[0](tokens) + self.models[1](tokens)

    optimizers = [
        ddp_training.optimizer_of(model, local_group=size)
        for model, size in zip(models, (2, second), strict=True)
    ]
    holder = [DistributedDataParallel(Both())]
    with ddp_training.released(holder):
        tokens = ddp_training.batches(rank, 1)[0][0]
        said = say_why(lambda: holder[0](tokens).backward())
        if said == "accepted":
            for optimizer in optimizers:
                optimizer.step()
    return said


@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("second", "message"),
    [(2, "accepted"), (None, "RuntimeError: the optimizers of this DDP wrapper have different")],
)
def test_optimizers_that_share_a_wrapper_must_share_nodes(
    ranks: RankPools, second: int | None, message: str
) -> None:
    for said in ranks(4).run(share_a_wrapper, second):
        assert said.startswith(message)


def test_the_option_is_reachable_from_optim_args() -> None:
    from hf_dlion.options.optim_args import parse_optim_args

    assert parse_optim_args("local_group=node") == {"local_group": "node"}
    assert parse_optim_args("local_group=4") == {"local_group": 4}
    assert parse_optim_args("local_group=none") == {"local_group": None}
    for bad in ("0", "nodes", "-2"):
        with pytest.raises(ValueError, match="local_group"):
            parse_optim_args(f"local_group={bad}")


def train_with_small_messages(rank: int, world_size: int, size: int) -> list[zoo.Record]:
    with message_numel(150):
        return zoo.train(rank, world_size, STEPS, {"local_group": size})


@pytest.mark.parametrize(
    ("nodes", "size"), [(2, 2), pytest.param(2, 3, marks=pytest.mark.full), (1, 2)]
)
def test_many_messages_train_as_one(ranks: RankPools, nodes: int, size: int) -> None:
    records = ranks(nodes * size).run(train_with_small_messages, size)
    zoo.replay(zoo.as_nodes(records, nodes_of(nodes, size)), {})
