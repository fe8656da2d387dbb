"""A momentum file per rank: resumed runs are bit-equal, and all ranks raise together."""

from __future__ import annotations

import errno
import gc
import json
import os
import pickle
import re
import resource
import shutil
import signal
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from hf_dlion import CheckpointError, DistributedLion, load_momentum, save_momentum
from hf_dlion.checkpoint import find_lion, momentum_file
from hf_dlion.ranks.header import Disagreement
from tests.support.spawn import RankPools, RanksFailedError, on_ranks
from tests.support.training import (
    check_error,
    error_of,
    everyones,
    filled,
    is_equal_everywhere,
    replicas_of_shards,
    same,
    warned,
)

multiproc = pytest.mark.multiproc
NOT_SAVED = "momenta were not saved, or the save was interrupted (then load an earlier one)"


class Gated(nn.Linear):
    """A layer whose first input decides which outputs are used, so rows have no gradient."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return out * (x[0, : out.shape[1]] > 0.3)


def model_of(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(Gated(64, 10), nn.Linear(10, 3))


def file_of(folder: str | Path, rank: int, world_size: int) -> Path:
    return Path(folder, f"dlion_momentum_{rank}_of_{world_size}.safetensors")


class Run:
    """A loop on one rank, whose batches follow the optimizer's count of steps."""

    def __init__(
        self,
        rank: int,
        model: nn.Module | None = None,
        *,
        steps: int = 0,
        ddp: bool = False,
        **options: Any,
    ) -> None:
        self.rank = rank
        self.model = self.trained = model_of() if model is None else model
        # The momentum remembers two steps.
        options = {"lr": 0.01, "weight_decay": 0.1, "betas": (0.9, 0.5), **options}
        self.lion = DistributedLion(self.model.named_parameters(), **options)
        if ddp:
            self.trained = DistributedDataParallel(self.model)
            self.lion.attach(self.trained)
        self.train(steps)

    def close(self) -> None:
        self.lion.detach()
        self.trained = self.model
        gc.collect()

    def train(self, steps: int) -> list[Tensor]:
        """Returns the weights after some more steps."""
        dtype = next(self.model.parameters()).dtype
        for step in range(self.lion.steps, self.lion.steps + steps):
            self.lion.zero_grad()
            x = torch.randn(4, 64, generator=torch.Generator().manual_seed(100 * step + self.rank))
            self.trained(x.to(dtype)).square().sum().backward()
            self.lion.step()
        return self.weights

    @property
    def weights(self) -> list[Tensor]:
        return [p.detach().clone() for p in self.model.parameters()]

    @property
    def momenta(self) -> list[Tensor]:
        states = (self.lion.state[p] for p in self.model.parameters())
        return [state["exp_avg"].clone() for state in states if state]

    def save(self, folder: str | Path, **more: Any) -> None:
        """Saves what a loop saves, rank 0's common state first."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        self.lion.exchange_now()
        if self.rank == 0:
            state = {"model": self.model.state_dict(), "optimizer": self.lion.state_dict()}
            torch.save(state, f"{folder}/state.bin")
        save_momentum(self.lion, folder, **more)

    def load_common(self, folder: str | Path) -> None:
        state = torch.load(f"{folder}/state.bin", weights_only=True)
        self.model.load_state_dict(state["model"])
        self.lion.load_state_dict(state["optimizer"])

    def load(self, folder: str | Path) -> dict[str, Any] | None:
        self.load_common(folder)
        return load_momentum(self.lion, folder)


def without_gradient(parameter: nn.Parameter) -> None:
    """Leaves a parameter's use to the other ranks."""
    parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))


@pytest.mark.smoke
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@on_ranks(2)
def test_a_resumed_run_equals_an_uninterrupted_one(
    rank: int, tmp_path: Path, dtype: torch.dtype
) -> None:
    straight = Run(rank, model_of().bfloat16(), momentum_dtype=dtype)
    run = Run(rank, model_of().bfloat16(), momentum_dtype=dtype)
    straight.train(3)
    run.train(3)
    run.save(tmp_path, scaler={"scale": 2.0**rank})
    resumed = Run(rank, model_of(1).bfloat16(), lr=0.5, momentum_dtype=dtype)
    assert resumed.load(tmp_path) == {"scale": 2.0**rank}
    assert same(run.momenta, resumed.momenta)
    assert resumed.momenta[0].dtype is dtype
    assert not is_equal_everywhere(resumed.momenta[0])
    assert same(straight.train(3), resumed.train(3))
    files = [*(file_of("", other, 2).name for other in range(2)), "state.bin"]
    assert sorted(os.listdir(tmp_path)) == files


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"dtype": torch.float32, "vote_every": 3}, marks=pytest.mark.smoke),
        {"dtype": torch.bfloat16, "vote_every": 3, "momentum_dtype": torch.float32},
        {"dtype": torch.float16, "vote_every": 4, "bits": 2, "full_precision": "*bias"},
        {"dtype": torch.float64, "vote_every": 3, "bits": 1, "momentum_sync_every": 2},
    ],
    ids=str,
)
@on_ranks(2)
def test_a_run_resumed_with_local_steps_equals_the_one_that_saved(
    rank: int, tmp_path: Path, options: dict[str, Any]
) -> None:
    """Saves after an exchange, and within a period, which the save ends."""
    dtype, every = options.pop("dtype"), options["vote_every"]

    def made(seed: int) -> Run:
        run = Run(rank, model_of(seed).to(dtype), **options)
        if rank == 1:
            without_gradient(run.model[1].bias)
        return run

    for steps in (every, every + 2):
        run, folder = made(0), f"{tmp_path}/{steps}"
        run.train(steps)
        run.save(folder)
        assert all(map(is_equal_everywhere, run.weights))
        assert not [key for key in load_file(file_of(folder, rank, 2)) if key.startswith("own")]
        resumed = made(1)
        resumed.load(folder)
        for more in (1, every, 1):
            assert same(run.train(more), resumed.train(more))
            assert same(run.momenta, resumed.momenta)


@on_ranks(2)
def test_a_resumed_run_counts_a_step_without_finite_gradients(rank: int, tmp_path: Path) -> None:
    """As the one that saved, which has no header in that step."""
    runs = [Run(rank, steps=4, vote_every=3)]
    runs[0].save(tmp_path)
    runs.append(Run(rank, model_of(1), vote_every=3))
    runs[1].load(tmp_path)
    for run in runs:
        for p in run.model.parameters():
            p.grad = torch.full_like(p, torch.nan)
        run.lion.step()
        assert run.lion.steps == 5
    assert same(runs[0].train(4), runs[1].train(4))


@on_ranks(2)
def test_a_parameter_without_momentum_has_none_after_loading(rank: int, tmp_path: Path) -> None:
    """Saves before any step, and without a gradient of one parameter on rank 1."""
    run = Run(rank)
    if rank == 1:
        without_gradient(run.model[1].bias)
    for steps, count in ((0, 0), (2, 4 - rank)):
        run.train(steps)
        run.save(tmp_path)
        kept = run.momenta
        run.load(tmp_path)
        assert len(kept) == len(run.momenta) == count
        assert all(map(torch.equal, kept, run.momenta))


def saves(rank: int, world_size: int, folder: str, every: int) -> list[list[Tensor]]:
    run = Run(rank, steps=2 + every, vote_every=every)
    run.save(folder, scaler={"scale": 2.0**rank})
    return [run.momenta, run.weights]


def loads(
    rank: int, world_size: int, folder: str, every: int
) -> tuple[list[list[Tensor]], list[str]]:
    run = Run(rank, model_of(1), vote_every=every)
    with warned() as texts:
        assert run.load(folder) is not None
        kept = [run.momenta, run.weights]
        assert run.lion.local.exchanges == 2 * (every > 1)
        run.train(1 + every)
    return kept, [text for text in texts if "loaded" in text]


@multiproc
@pytest.mark.parametrize(
    ("before", "after", "every"), [(2, 1, 1), (2, 1, 3), (2, 3, 1), (2, 3, 3), (1, 2, 1)]
)
def test_another_number_of_ranks_shares_the_files_with_a_warning(
    pools: RankPools, tmp_path: Path, before: int, after: int, every: int
) -> None:
    folder = str(tmp_path)
    saved = pools(before).run(saves, folder, every)
    for rank, (kept, messages) in enumerate(pools(after).run(loads, folder, every)):
        assert all(map(same, kept, saved[rank % before]))
        assert len(messages) == (rank == 0)
        for text in messages:
            assert f"saved by {before} rank{'s' * (before > 1)} and is loaded by {after}" in text
    # A save of another number of ranks leaves no file that a later load could use.
    pools(after).run(saves, folder, every)
    files = [file_of(folder, rank, after) for rank in range(after)]
    assert sorted(tmp_path.glob("*.safetensors")) == files


def momenta_of_nodes(rank: int, world_size: int, folder: str, size: int, saves: bool) -> Any:
    run = Run(rank, steps=2 * saves, ddp=True, local_group=size)
    (run.save if saves else run.load)(folder)
    found = run.momenta
    run.close()
    return found


@multiproc
@pytest.mark.filterwarnings("ignore:.*was saved by")
@pytest.mark.parametrize(
    ("before", "after"), [((2, 1), (4, 2)), ((4, 2), (2, 1)), ((4, 1), (2, 2))]
)
def test_nodes_of_another_size_continue_with_the_momenta_of_all_voters(
    pools: RankPools, tmp_path: Path, before: tuple[int, int], after: tuple[int, int]
) -> None:
    """A pair has the number of ranks and that of each node."""
    (ranks, size), (more, new_size), folder = before, after, str(tmp_path)
    saved = pools(ranks).run(momenta_of_nodes, folder, size, True)
    for rank, found in enumerate(pools(more).run(momenta_of_nodes, folder, new_size, False)):
        assert same(found, saved[rank // new_size % (ranks // size) * size])


Options = dict[str, Any]
LOCAL, LOCAL_NODES = {"vote_every": 3}, {"vote_every": 3, "local_group": 2}


@pytest.mark.parametrize(
    ("ranks", "saving", "loading", "said"),
    [
        (2, LOCAL, {}, ""),
        (2, {}, LOCAL, ""),
        (2, LOCAL, LOCAL_NODES, "2 voters and is loaded by 1"),
        (4, {}, {"local_group": 2}, "by 4 voters and is loaded by 2, with .* Each node continues"),
        (4, {"local_group": 2}, {}, "by 2 voters and is loaded by 4, with .* Each rank continues"),
        (4, LOCAL, LOCAL_NODES, "by 4 voters .* Each node continues"),
        (4, LOCAL_NODES, LOCAL, "by 2 voters .* Each rank continues"),
    ],
)
@on_ranks("ranks")
def test_other_options_continue_with_the_models_weights_and_a_warning(
    rank: int, tmp_path: Path, ranks: int, saving: Options, loading: Options, said: str
) -> None:
    run = Run(rank, steps=5, ddp=True, **saving)
    run.save(tmp_path)
    kept = run.weights
    run.close()
    run = Run(rank, model_of(1), ddp=True, **loading)
    with warned() as texts:
        run.load(tmp_path)
    assert same(kept, run.weights)
    saved = load_file(file_of(tmp_path, rank - rank % loading.get("local_group", 1), ranks))
    assert same([saved[str(k)] for k in range(4)], run.momenta)
    run.train(4)
    run.close()
    found = [text for text in texts if "saved" in text]
    assert len(found) == (rank == 0 and bool(said))
    for text in found:
        assert re.search(said, text), text


@on_ranks(2)
def test_the_optimizers_state_alone_is_refused_within_a_period(rank: int, tmp_path: Path) -> None:
    run = Run(rank, steps=4, vote_every=4)
    run.save(tmp_path)
    state, kept = deepcopy(run.lion.state_dict()), run.train(2)
    with pytest.raises(CheckpointError, match="was saved after step 4, but the optimizer is at"):
        load_momentum(run.lion, tmp_path)
    assert same(kept, run.weights)
    run.lion.load_state_dict(state)
    assert same(kept, run.weights)
    for continue_training in (
        lambda: load_momentum(run.lion, tmp_path),
        lambda: run.train(1),
        run.lion.exchange_now,
    ):
        with pytest.raises(Disagreement, match="with vote_every load the model"):
            continue_training()
    # After an exchange, the optimizer's state may be loaded alone.
    run.load(tmp_path)
    run.lion.exchange_now()
    run.lion.load_state_dict(state)
    run.train(6)


@on_ranks(2)
def test_a_local_step_after_a_load_of_momenta_alone_begins_with_a_header(
    rank: int, tmp_path: Path
) -> None:
    run, sent = Run(rank, steps=6, vote_every=3), []
    for loads in (False, True):
        save_momentum(run.lion, tmp_path)
        if loads:
            load_momentum(run.lion, tmp_path)
        run.train(1)
        sent.append(run.lion.wire.last_bytes_sent)
        run.train(2)
    assert sent == [0, 64]


@on_ranks(2)
def test_momenta_of_other_weights_are_refused(rank: int, tmp_path: Path) -> None:
    """The model was changed, not loaded at all, or saved within a period, alike on all ranks."""
    run = Run(rank, steps=5, vote_every=4)
    own = {name: everyones(p)[0] for name, p in run.model.state_dict().items()}  # rank 0's
    with warned() as texts:
        save_momentum(run.lion, tmp_path)  # Ends the period, so a model saved before is rank 0's.
    assert ["before you save the model" in text for text in texts] == [True] * (rank == 0)
    run.save(tmp_path)
    run = Run(rank, vote_every=4)
    for changes in (True, False, None):
        if changes:
            run.load_common(tmp_path)
            run.model[1].bias.data += 0.5
        else:
            run = Run(rank, model_of(1), vote_every=4)
            if changes is None:
                run.model.load_state_dict(own)
        with pytest.raises(CheckpointError, match="belongs to other weights than the model holds"):
            load_momentum(run.lion, tmp_path)


@on_ranks(2)
def test_rank_0_warns_of_momenta_of_other_weights(rank: int, tmp_path: Path) -> None:
    Run(rank, steps=2).save(tmp_path)
    run = Run(rank, model_of(1))
    with warned() as texts:
        load_momentum(run.lion, tmp_path)
    assert len(texts) == (rank == 0)
    assert all("other weights than the model holds. First load the model" in t for t in texts)
    assert run.lion.steps == 2


@on_ranks(2)
def test_loaded_momenta_fit_their_dtype(rank: int, tmp_path: Path) -> None:
    run = Run(rank, steps=3)
    run.lion.state[run.model[1].bias]["exp_avg"].fill_(1e6)
    run.save(tmp_path)
    assert all(own.keys() == {"exp_avg"} for own in run.lion.state_dict()["state"].values())
    for load in (Run.load, lambda run, folder: load_momentum(run.lion, folder)):
        run = Run(rank, momentum_dtype=torch.float16)
        load(run, tmp_path)
        assert float(run.lion.state[run.model[1].bias]["exp_avg"][0]) == 65504.0
    run.load_common(tmp_path)
    assert float(run.lion.state[run.model[1].bias]["exp_avg"][0]) == 65504.0


@on_ranks(2)
def test_a_parameter_frozen_before_its_first_exchange_resumes(rank: int, tmp_path: Path) -> None:
    """Rank 1 alone has used the parameter."""
    run = Run(rank, vote_every=4)
    if rank == 0:
        without_gradient(run.model[1].bias)
    run.train(1)
    run.model[1].bias.requires_grad_(False)
    run.save(tmp_path)
    run = Run(rank, vote_every=4)
    run.model[1].bias.requires_grad_(False)
    run.load(tmp_path)
    run.train(4)
    assert run.lion.steps == 5


@on_ranks(2)
def test_a_load_gives_no_state_to_a_parameter_that_never_trained(rank: int, tmp_path: Path) -> None:
    """torch.distributed.checkpoint needs the same keys in every save and load."""
    saved, loaded = Run(rank), Run(rank)
    for run in (saved, loaded):
        run.model[1].bias.requires_grad_(False)
    saved.train(1)
    saved.save(tmp_path)
    loaded.load(tmp_path)
    states = [run.lion.state_dict()["state"].keys() for run in (saved, loaded)]
    assert states[0] == states[1]
    assert run.model[1].bias not in run.lion.state


@pytest.mark.parametrize("every", [1, 3])
@on_ranks(4)
def test_a_nodes_ranks_load_its_first_ranks_momentum(rank: int, tmp_path: Path, every: int) -> None:
    """Two nodes of two ranks; the second ranks' own files are lost."""
    run = Run(rank, steps=1 + every, ddp=True, local_group=2, vote_every=every)
    run.save(tmp_path)
    if rank == 0:
        for other in (1, 3):
            file_of(tmp_path, other, 4).unlink()
    straight = run.train(2)
    run.close()
    run = Run(rank, model_of(1), ddp=True, local_group=2, vote_every=every)
    run.load(tmp_path)
    assert same(straight, run.train(2))
    run.close()


def sharded(rank: int, shape: tuple[int, int], **options: Any) -> Run:
    mesh, model = replicas_of_shards(*shape), model_of()
    fully_shard(model, mesh=mesh["shard"])
    run = Run(rank, model, replicate=mesh["replicate"], **options)
    run.lion.attach(model)
    return run


def local_parts(tensors: list[Any]) -> list[Tensor]:
    return [tensor.to_local() for tensor in tensors]


def shards(rank: int, world_size: int, folder: str, every: int) -> None:
    """A new optimizer continues from the momenta and their step; the model is saved by torch."""
    run = sharded(rank, (2, 2), vote_every=every)
    run.train(1 + every)
    save_momentum(run.lion, folder)
    dcp.save({"model": run.model.state_dict()}, checkpoint_id=f"{folder}/model")
    kept, straight = local_parts(run.momenta), local_parts(run.train(2))

    run = sharded(rank, (2, 2), vote_every=every)
    state = {"model": run.model.state_dict()}
    dcp.load(state, checkpoint_id=f"{folder}/model")
    run.model.load_state_dict(state["model"])
    with torch.no_grad():
        run.model(torch.zeros(1, 64))  # Leaves gathered parameters, which are out of date next.
    load_momentum(run.lion, folder)
    assert run.lion.steps == 1 + every
    assert same(kept, local_parts(run.momenta))
    assert same(straight, local_parts(run.train(2)))


def other_shards(rank: int, world_size: int, folder: str, shape: tuple[int, int]) -> str:
    lion = sharded(rank, shape).lion
    with warned() as texts:
        error = error_of(load_momentum, lion, folder)
    assert bool(lion.state) == (not error)
    return error or " ".join(texts)


@on_ranks(2)
def test_rank_0_warns_of_momenta_of_another_shards_weights(rank: int, tmp_path: Path) -> None:
    run = sharded(rank, (1, 2))
    run.train(1)
    save_momentum(run.lion, tmp_path)
    if rank == 1:
        for part in local_parts(list(run.model.parameters())):
            part.detach().add_(1.0)
    with warned() as texts:
        load_momentum(run.lion, tmp_path)
    assert ["other weights than" in text for text in texts] == [True] * (rank == 0)


@multiproc
@pytest.mark.parametrize("every", [1, 3])
def test_shards_of_fsdp2_resume_on_equal_shards(
    pools: RankPools, tmp_path: Path, every: int
) -> None:
    folder = str(tmp_path)
    pools(4).run(shards, folder, every)
    for shape in ((2, 1), (1, 4)):
        for message in pools(shape[0] * shape[1]).run(other_shards, folder, shape):
            assert "holds shard [" in message
            assert "the mesh that they were saved with" in message
    # One replica of as many shards.
    first, _ = pools(2).run(other_shards, folder, (1, 2))
    assert "was saved by 4 ranks and is loaded by 2" in first


@on_ranks(2)
def test_torchs_distributed_checkpoint_keeps_what_is_common(rank: int, tmp_path: Path) -> None:
    """Torch's own state dicts, whose loading takes a step without gradients."""

    def state_of(run: Run) -> dict[str, Any]:
        states = get_state_dict(run.model, run.lion)
        return dict(zip(("model", "optimizer"), states, strict=True))

    run = Run(rank, steps=3)
    dcp.save(state_of(run), checkpoint_id=tmp_path)
    save_momentum(run.lion, tmp_path)
    straight = run.train(3)
    dcp.load({"optimizer": state_of(run)["optimizer"]}, checkpoint_id=tmp_path)
    for with_momentum in (True, False):
        run = Run(rank, model_of(1 + rank), lr=0.5)  # As after to_empty().
        state = state_of(run)
        dcp.load(state, checkpoint_id=tmp_path)
        set_state_dict(
            run.model,
            run.lion,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        assert run.lion.steps == 3
        if with_momentum:
            load_momentum(run.lion, tmp_path)
        assert same(straight, run.train(3)) == with_momentum


@contextmanager
def disk_of(size: int) -> Iterator[None]:
    """Lets this process write files of at most `size` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


Call = Callable[..., Any]


def interrupted(call: Call, optimizer: DistributedLion, folder: Path) -> None:
    # A save has written its temporary file by then.
    where = (os, "fsync") if call is save_momentum else (momentum_file, "safe_open")
    with mock.patch.object(*where, side_effect=KeyboardInterrupt("stop")):
        call(optimizer, folder)


def without_its_file(call: Call, optimizer: DistributedLion, folder: Path) -> None:
    file_of(folder, 1, 2).unlink()
    call(optimizer, folder)


def with_another_saves_file(call: Call, optimizer: DistributedLion, folder: Path) -> None:
    file_of(f"{folder}1", 1, 2).replace(file_of(folder, 1, 2))
    call(optimizer, folder)


FILE = r".*/new/dlion_momentum_1_of_2\.safetensors"
# What rank 1 does while rank 0 saves or loads, and the pattern of the error.
EITHER: dict[str, tuple[Call, str]] = {
    "interrupted": (interrupted, "{named}KeyboardInterrupt: stop$"),
    "failed before": (
        lambda call, *where: call(*where, failure=OSError("no model")),
        "{named}OSError: no model$",
    ),
    "other folders": (
        lambda call, optimizer, folder: call(optimizer, f"{folder}1"),
        r"CheckpointError: .* \(rank 0: '.*/new/dlion_.*', rank 1: '.*/new1/dlion_.*'\)",
    ),
    "no folder": (
        lambda call, optimizer, folder: call(optimizer, None),
        "{named}TypeError: expected str, bytes or os.PathLike object, not NoneType$",
    ),
    "another name": (
        lambda call, *where: call(*where, name="second"),
        r"CheckpointError: .* \(rank 0: '.*/new/dlion_momentum', rank 1: '.*/new/second'\)",
    ),
    "a path as name": (
        lambda call, *where: call(*where, name="first/second"),
        r"{named}ValueError: name must be the beginning of a file's name \(got 'first/second'\)",
    ),
    "alone": (
        lambda call, optimizer, folder: optimizer.step(),
        "Disagreement: rank 1 steps while rank 0 (saves|loads): .* let every rank take the same",
    ),
}
LOADS = EITHER | {
    "missing file": (
        without_its_file,
        f"{{named}}CheckpointError: {FILE}, the momentum of rank 1, is missing: load an older",
    ),
    "file of another save": (
        with_another_saves_file,
        rf"CheckpointError: .* \(rank 0: .*/new/.*; rank 1: {FILE} of save .*\): load an older",
    ),
}


def attempt(
    case: tuple[Call, str], rank: int, call: Call, optimizer: DistributedLion, folder: Path
) -> None:
    instead, pattern = case
    error = error_of(partial(instead, call) if rank == 1 else call, optimizer, folder)
    check_error(error, pattern, rank)


@pytest.mark.parametrize("case", EITHER)
@on_ranks(2)
def test_a_save_that_fails_on_one_rank_fails_on_all(rank: int, tmp_path: Path, case: str) -> None:
    run = Run(rank, steps=2)
    run.save(tmp_path / "old")
    run.train(2)
    kept = run.momenta
    attempt(EITHER[case], rank, save_momentum, run.lion, tmp_path / "new")
    assert same(kept, run.momenta)
    dist.barrier()
    # Rank 0 has written its file if rank 1 fails while it writes.
    files = [path.name for path in tmp_path.glob("new/*")]
    assert files == [file_of("", 0, 2).name] * (case == "interrupted")
    # The older checkpoint still loads, and the next save is complete.
    run.load(tmp_path / "old")
    save_momentum(run.lion, tmp_path / "again")


@pytest.mark.parametrize("case", LOADS)
@on_ranks(2)
def test_a_load_that_fails_on_one_rank_fails_on_all(rank: int, tmp_path: Path, case: str) -> None:
    run = Run(rank, steps=2)
    run.save(tmp_path / "new")
    run.save(tmp_path / "new1")
    run.train(1)
    run.save(tmp_path / "later")
    run.load_common(tmp_path / "new")
    kept = [*run.momenta, *run.weights]
    attempt(LOADS[case], rank, load_momentum, run.lion, tmp_path / "new")
    assert same(kept, [*run.momenta, *run.weights])
    # All ranks continue together.
    run.load(tmp_path / "later")


def dies_in_a_save(rank: int, world_size: int, folder: str) -> None:
    run = Run(rank, steps=2)

    def die(tensors: Any, path: Path, *_: Any) -> None:
        Path(path).write_bytes(b"part")
        os.kill(os.getpid(), signal.SIGKILL)

    with mock.patch.object(momentum_file, "save_file", die if rank == 1 else save_file):
        try:
            save_momentum(run.lion, folder)
        except Exception as error:
            Path(folder, f"message_{rank}").write_text(f"{type(error).__name__}: {error}")


@multiproc
def test_a_rank_dying_in_a_save_leaves_a_temporary_file(pools: RankPools, tmp_path: Path) -> None:
    with pytest.raises(RanksFailedError):
        pools(2).run(dies_in_a_save, str(tmp_path))
    assert re.search("LostRank: .*rank 1", (tmp_path / "message_0").read_text())
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {file_of("", 0, 2).name, f"{file_of('', 1, 2).name}.tmp", "message_0"}


def metadata_of(path: Path) -> dict[str, str]:
    with safe_open(path, framework="pt") as file:
        return file.metadata()


HEADER = "hf_dlion momentum 8"


def rewrite(path: Path, *, tensors: dict[str, Tensor] | None = None, **fields: Any) -> None:
    """Changes tensors of a file, and fields of its header."""
    header = json.loads(metadata_of(path)[HEADER]) | fields
    save_file(load_file(path) | (tensors or {}), path, {HEADER: json.dumps(header)})


class Planted:
    """Fails the test that unpickles it."""

    def __reduce__(self) -> tuple[Callable[[str], Any], tuple[str]]:
        return pytest.fail, ("unpickled",)


DAMAGED = "is damaged .*: load an older checkpoint"
FOREIGN = "is not a momentum file that this hf_dlion can read"
OF_MODEL = "it was saved with another model"
# What happens to a file, and what the error says of it.
DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "cut": (lambda path: path.write_bytes(path.read_bytes()[:-5]), DAMAGED),
    "pickle": (lambda path: path.write_bytes(pickle.dumps(Planted())), DAMAGED),
    "foreign": (lambda path: save_file({}, path), f"{FOREIGN} .*: load an older checkpoint"),
    "unknown field": (partial(rewrite, new=1), rf"{FOREIGN} \(TypeError"),
    "bad field": (partial(rewrite, exchanges="x"), rf"{FOREIGN} \(ValueError"),
    "no weights": (partial(rewrite, weights=None), rf"{FOREIGN} \(TypeError"),
    "renamed": (partial(rewrite, rank=3), "holds the momentum of rank 3 of 1: restore the file's"),
    "step": (
        partial(rewrite, step=3),
        "was saved after step 3, but the .* step 2. First load the optimizer's",
    ),
    "shape": (
        partial(rewrite, tensors={"1": torch.zeros(11)}),
        rf"holds a momentum of \(11,\) torch.float32 for parameter 1, .*: {OF_MODEL}",
    ),
    "dtype": (
        partial(rewrite, tensors={"1": torch.zeros(10, dtype=torch.int64)}),
        rf"holds a momentum of \(10,\) torch.int64 for parameter 1, .*: {OF_MODEL}",
    ),
    "key": (
        partial(rewrite, tensors={"9": torch.zeros(10)}),
        f"holds momenta of other parameters than the optimizer's 4: {OF_MODEL}",
    ),
}


@pytest.mark.parametrize("what", DAMAGES)
def test_a_file_that_does_not_fit_is_refused_and_nothing_changes(tmp_path: Path, what: str) -> None:
    damage, said = DAMAGES[what]
    run = Run(0, steps=2)
    save_momentum(run.lion, tmp_path)
    run.lion.state[run.model[0].weight]["exp_avg"] += 1
    kept = run.momenta
    damage(path := file_of(tmp_path, 0, 1))
    with pytest.raises(CheckpointError, match=f"^{re.escape(str(path))} {said}"):
        load_momentum(run.lion, tmp_path)
    assert same(kept, run.momenta)


def test_momenta_of_another_step_are_refused_where_a_state_was_only_created(tmp_path: Path) -> None:
    """As by torch.distributed.checkpoint, whose load would then replace the momenta."""
    save_momentum(Run(0, steps=2).lion, tmp_path)
    run = Run(0)
    get_state_dict(run.model, run.lion)
    with pytest.raises(CheckpointError, match="after step 2, but the optimizer is at step 0"):
        load_momentum(run.lion, tmp_path)
    assert not any(momentum.any() for momentum in run.momenta)


def test_a_file_system_that_cannot_write_folders_to_the_disk_keeps_momenta(tmp_path: Path) -> None:
    run, fsync = Run(0, steps=2), os.fsync

    def of_files(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        fsync(descriptor)

    with mock.patch.object(os, "fsync", of_files):
        save_momentum(run.lion, tmp_path)
    kept = run.momenta
    load_momentum(run.lion, tmp_path)
    assert same(kept, run.momenta)


def test_a_folder_without_momenta_is_refused(tmp_path: Path) -> None:
    lion, name = Run(0).lion, file_of("", 0, 1)
    for folder, text in (
        (tmp_path / "new", f"there is no folder {tmp_path}/new: check the path"),
        (tmp_path, f"{name}: {NOT_SAVED}. Call hf_dlion.save_momentum on every rank"),
    ):
        with pytest.raises(CheckpointError, match=re.escape(text)):
            load_momentum(lion, folder)


def test_files_of_several_saves_by_other_numbers_of_ranks_are_refused(tmp_path: Path) -> None:
    run = Run(0, steps=2)
    save_momentum(run.lion, tmp_path)
    for count in (3, 2):
        shutil.copy(file_of(tmp_path, 0, 1), file_of(tmp_path, 0, count))
    load_momentum(run.lion, tmp_path)  # Its own number of ranks has a file.
    file_of(tmp_path, 0, 1).unlink()
    with pytest.raises(CheckpointError, match=r"several saves, by \[2, 3\] ranks, and none by 1: "):
        load_momentum(run.lion, tmp_path)


def test_a_load_leaves_nothing_of_the_state_before_it(tmp_path: Path) -> None:
    run = Run(0, steps=1)
    save_momentum(run.lion, tmp_path)
    run.lion.params.ages[run.model[1].bias] = torch.ones(1, dtype=torch.int32)
    load_momentum(run.lion, tmp_path)
    assert run.model[1].bias not in run.lion.params.ages


def test_a_process_alone_saves_and_loads(tmp_path: Path) -> None:
    run, folder = Run(0), tmp_path / "a" / "b"  # The folder needn't exist.
    run.train(2)
    kept, optimizer = run.momenta, run.lion
    held = optimizer.state[run.model[0].weight]["exp_avg"]
    ids = []
    for _ in range(2):
        save_momentum(optimizer, folder)
        ids.append(metadata_of(file_of(folder, 0, 1)))
    assert ids[0] != ids[1]
    held.zero_()
    assert load_momentum(optimizer, folder) is None
    assert same(kept, run.momenta)
    assert not held.any()  # Replaced: other objects may share the old tensor.
    with disk_of(100), pytest.raises(CheckpointError, match=r"rank 0 cannot write .* Free space"):
        save_momentum(optimizer, folder)
    assert load_momentum(optimizer, folder) is None
    assert os.listdir(folder) == [file_of("", 0, 1).name]


def test_the_optimizer_may_be_wrapped_but_must_be_ours(tmp_path: Path) -> None:
    class Wrapper:
        def __init__(self, optimizer: object) -> None:
            self.optimizer = optimizer

    optimizer = Run(0).lion
    assert find_lion(Wrapper(Wrapper(optimizer))) is optimizer
    sgd = torch.optim.SGD(model_of().parameters(), lr=0.1)
    assert find_lion(Wrapper(sgd)) is None
    assert find_lion(mock.MagicMock()) is None
    with pytest.raises(TypeError, match=r"must be a DistributedLion \(got SGD\)"):
        save_momentum(sgd, tmp_path)
    with pytest.raises(TypeError, match=r"must be a DistributedLion \(got SGD\)"):
        load_momentum(sgd, tmp_path)


@on_ranks(2)
def test_momenta_of_averaged_gradients_are_equal_after_a_load(rank: int, tmp_path: Path) -> None:
    """Saves momenta that follow each rank's own gradients, and loads them to be averaged."""
    param = filled(1.0)
    optimizer = DistributedLion([("norm", param)], lr=0.01)
    param.grad = torch.linspace(-1, 1, 128) * (-1) ** rank
    optimizer.step()
    save_momentum(optimizer, tmp_path)
    param = filled(1.0)
    optimizer = DistributedLion([("norm", param)], lr=0.01, full_precision="norm")
    optimizer.step()
    load_momentum(optimizer, tmp_path)
    param.grad = torch.zeros_like(param)
    optimizer.step()
    assert is_equal_everywhere(param)
    assert is_equal_everywhere(optimizer.state[param]["exp_avg"])
