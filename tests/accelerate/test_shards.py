"""Accelerate's FSDP2 inside replicas; there are no GPUs, which Accelerate is told there are."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import pickle
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.utils import FullyShardedDataParallelPlugin
from torch import Tensor, nn

import hf_dlion
from accelerate import Accelerator, DistributedType
from hf_dlion import DistributedLion, last_whole_checkpoint
from hf_dlion.accelerate import parallelism_config
from hf_dlion.checkpoint import save
from hf_dlion.checkpoint.momentum_file import CheckpointError
from hf_dlion.checkpoint.whole import problems_in
from tests.support.fsdp2 import as_if_on_gpus, keep_groups, two_by_two
from tests.support.oracle import same_bits
from tests.support.sharded_training import (
    DECAY,
    LR,
    TinyModel,
    full_params,
    grid,
    new_model,
    optimizer_of,
    sharded,
    tokens_of,
)
from tests.support.spawn import RankPools

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "fsdp2.md"


@pytest.fixture(scope="module")
def pools() -> Iterator[RankPools]:
    made = RankPools()
    yield made
    made.close()


def all_used() -> TinyModel:
    """Torch's distributed checkpoints do not load the state of a parameter that was never used."""
    model = new_model()
    del model.unused
    return model


def begin(kind: str, **options: Any) -> tuple[Accelerator, Any, DistributedLion]:
    """What a user writes, but for the stub around it."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="NO_WRAP",
        cpu_ram_efficient_loading=False,
        state_dict_type=kind,
    )
    accelerator = Accelerator(fsdp_plugin=plugin, parallelism_config=two_by_two())
    keep_groups(accelerator)
    alone = all_used()
    replicate = accelerator.torch_device_mesh["dp_replicate"]
    options = {"lr": LR, "weight_decay": DECAY, "replicate": replicate, **options}
    lion = DistributedLion(alone.named_parameters(), **options)
    model, _ = accelerator.prepare(alone, lion)
    hf_dlion.accelerate.attach(accelerator)
    return accelerator, model, lion


def train(rank: int, model: nn.Module, lion: DistributedLion, steps: range) -> list[Tensor]:
    for step in steps:
        model(tokens_of(rank, step)).backward()
        lion.step()
        lion.zero_grad()
    return full_params(model)


def by_hand(rank: int, world_size: int) -> list[Tensor]:
    model = sharded(all_used(), grid(world_size))
    return train(rank, model, optimizer_of(model, grid(world_size)), range(2))


def save_and_resume(
    rank: int, world_size: int, folder: str, kind: str, checkpoint: str
) -> list[list[Tensor]]:
    """Returns the parameters after two steps, after four, and after four with a resumption."""
    with as_if_on_gpus():
        accelerator, model, lion = begin(kind, checkpoint=checkpoint)
        found = [train(rank, model, lion, range(2))]
        accelerator.save_state(folder)
        found.append(train(rank, model, lion, range(2, 4)))
    with as_if_on_gpus(), warnings.catch_warnings():
        warnings.filterwarnings("error", module="hf_dlion")
        accelerator, resumed, fresh = begin(kind, checkpoint=checkpoint)
        accelerator.load_state(folder)
        found.append(train(rank, resumed, fresh, range(2, 4)))
    return found


@pytest.mark.full
@pytest.mark.parametrize("checkpoint", ["per_rank", "mean"])
@pytest.mark.parametrize(
    "kind", ["SHARDED_STATE_DICT", pytest.param("FULL_STATE_DICT", marks=pytest.mark.long)]
)
def test_accelerate_shards_inside_replicas_and_what_it_saved_resumes(
    pools: RankPools, tmp_path: Path, kind: str, checkpoint: str
) -> None:
    prepared = pools(4).run(save_and_resume, str(tmp_path), kind, checkpoint)
    for (first, straight, resumed), wanted in zip(prepared, pools(4).run(by_hand), strict=True):
        assert all(map(same_bits, first, wanted))
        assert all(map(same_bits, straight, resumed))
    assert bool(list(tmp_path.glob("dlion_momentum*"))) == (checkpoint == "per_rank")


def fail_amid_collectives(rank: int, world_size: int, folder: str) -> list[Any]:
    """Fails where Accelerate saves and loads parts; returns what was raised, and the meetings."""
    said: list[Any] = []
    with as_if_on_gpus():
        accelerator, model, lion = begin("SHARDED_STATE_DICT")
        train(rank, model, lion, range(2))
        accelerator.save_state(folder)
        met = mock.patch("hf_dlion.checkpoint.save.meet_to_save", wraps=save.meet_to_save)
        for name, call in (
            ("save_fsdp_model", accelerator.save_state),
            ("load_fsdp_model", accelerator.load_state),
        ):
            failing = mock.patch(f"accelerate.accelerator.{name}", side_effect=OSError("full"))
            with met as meetings, failing:
                try:
                    call(folder if name.startswith("load") else f"{folder}/other")
                except Exception as error:
                    said += [type(error).__name__, meetings.call_count]
    return said


@pytest.mark.full
def test_a_rank_that_fails_amid_fsdps_collectives_meets_nobody(
    pools: RankPools, tmp_path: Path
) -> None:
    for said in pools(4).run(fail_amid_collectives, str(tmp_path)):
        # The two meetings are before anything is written, and after the mark is.
        assert said == ["OSError", 2, "OSError", 0]


def load_of_one_rank(rank: int, world_size: int, folder: str, kind: str) -> str:
    with as_if_on_gpus():
        accelerator, model, lion = begin(kind, checkpoint="mean")
        train(rank, model, lion, range(2))
        # As Accelerate alone would: what it writes is one rank's momentum of each part.
        lion._engine.options = dataclasses.replace(lion.options, checkpoint="per_rank")
        accelerator.save_state(folder)
    if rank == 0:
        for path in Path(folder).glob("dlion_momentum*"):
            path.unlink()
    with as_if_on_gpus():
        accelerator, _, _ = begin(kind, checkpoint="mean")
        try:
            accelerator.load_state(folder)
        except CheckpointError as error:
            return str(error)
    return "nobody noticed"


@pytest.mark.full
def test_a_momentum_of_one_rank_is_not_taken_for_the_mean(pools: RankPools, tmp_path: Path) -> None:
    for said in pools(4).run(load_of_one_rank, str(tmp_path), "SHARDED_STATE_DICT"):
        assert "no momentum of any rank" in said


def saves_and_ends(
    rank: int, world_size: int, folder: str, dies: bool
) -> tuple[str | None, list[str]]:
    """Saves twice into one folder; the second save may end while Accelerate writes weights."""
    with as_if_on_gpus():
        accelerator, model, lion = begin("SHARDED_STATE_DICT")
        accelerator.save_state(f"{folder}/checkpoint_0")
        train(rank, model, lion, range(2))
        write = mock.patch("accelerate.accelerator.save_fsdp_optimizer", side_effect=SystemExit)
        with write if dies else contextlib.nullcontext(), contextlib.suppress(SystemExit):
            accelerator.save_state(f"{folder}/checkpoint_0")
        dist.barrier()
        found = problems_in(f"{folder}/checkpoint_0")
        return last_whole_checkpoint(folder) if not found else None, found


@pytest.mark.full
@pytest.mark.parametrize("dies", [False, True])
def test_a_save_that_ends_while_weights_are_written_is_not_taken_for_whole(
    pools: RankPools, tmp_path: Path, dies: bool
) -> None:
    for whole, problems in pools(4).run(saves_and_ends, str(tmp_path), dies):
        assert problems == (["its saving did not end"] if dies else [])
        assert whole == (None if dies else f"{tmp_path}/checkpoint_0")


def test_fsdp_takes_the_ranks_of_a_replica_alone() -> None:
    config = parallelism_config(dp_replicate_size=2, dp_shard_size=2)
    assert config.fsdp_dim_names == ["dp_shard_cp"]
    assert config.dp_replicate_size == 2


def test_other_kinds_of_parallelism_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="tp_size=2"):
        parallelism_config(dp_replicate_size=2, dp_shard_size=2, tp_size=2)


def test_the_configuration_goes_through_pickle() -> None:
    for copied in (pickle.loads(pickle.dumps(two_by_two())), copy.deepcopy(two_by_two())):
        assert copied.fsdp_dim_names == ["dp_shard_cp"]
        assert (copied.dp_replicate_size, copied.dp_shard_size) == (2, 2)


@pytest.mark.parametrize("sizes", [{"dp_replicate_size": 2}, {"dp_shard_size": 2}])
def test_replicas_and_shards_are_two_at_least(sizes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="votes between replicas need two of them"):
        parallelism_config(**sizes)


def test_accelerate_knows_what_the_file_of_the_guide_says(tmp_path: Path) -> None:
    (text,) = re.findall(r"^```yaml\n(.*?)^```$", GUIDE.read_text(), re.MULTILINE | re.DOTALL)
    file = tmp_path / "machine.yaml"
    file.write_text(text)
    config = load_config_from_file(str(file))  # It refuses keys of its own that it does not know.
    assert (config.distributed_type, config.num_processes) == (DistributedType.FSDP, 16)
    fields = {field.name for field in dataclasses.fields(FullyShardedDataParallelPlugin)}
    assert {f"fsdp_{name.removeprefix('fsdp_')}" for name in fields} >= set(config.fsdp_config)
