"""DistributedLion in Accelerate loops: steps, saved states, FSDP2 and what is refused."""

from __future__ import annotations

import contextlib
import copy
import datetime
import gc
import pickle
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import (
    DistributedType,
    FullyShardedDataParallelPlugin,
    InitProcessGroupKwargs,
    ProjectConfiguration,
)
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from hf_dlion import DistributedLion
from hf_dlion.accelerate import attach, parallelism_config
from tests.support.gpus import as_if_on_gpus
from tests.support.spawn import LASTING, on_ranks, run_command
from tests.support.training import (
    agree,
    check_error,
    error_of,
    is_equal_everywhere,
    same,
    warned,
)

multiproc = pytest.mark.multiproc


class Loop:
    """What a user writes: make, prepare, attach, iterate."""

    def __init__(
        self,
        *,
        accumulate: int = 1,
        project: Any = None,
        attached: bool = True,
        handlers: Sequence[Any] = (),
        **options: Any,
    ) -> None:
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
        self.lion = DistributedLion(self.model.parameters(), lr=1e-2, **options)
        data = TensorDataset(torch.randn(64, 6), torch.randn(64, 3))
        self.accelerator = Accelerator(
            cpu=True,
            gradient_accumulation_steps=accumulate,
            project_config=project,
            kwargs_handlers=list(handlers),
        )
        schedule = torch.optim.lr_scheduler.LinearLR(self.lion, total_iters=20)
        self.wrapped, self.optimizer, self.loader, self.schedule = self.accelerator.prepare(
            self.model, self.lion, DataLoader(data, batch_size=4), schedule
        )
        if attached:
            attach(self.accelerator, self.wrapped)

    def train(self, batches: int) -> list[Tensor]:
        for _, (x, y) in zip(range(batches), self.loader, strict=False):
            with self.accelerator.accumulate(self.wrapped):
                loss = nn.functional.mse_loss(self.wrapped(x), y)
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.wrapped.parameters(), 1.0)
                self.optimizer.step()
                self.schedule.step()
                self.optimizer.zero_grad()
        return [p.detach().clone() for p in self.model.parameters()]

    def common(self) -> list[Tensor]:
        with self.lion.common_weights():
            return [p.detach().clone() for p in self.model.parameters()]

    def seen(self) -> list[list[Tensor]]:
        """Returns momenta and common weights, and both and the weights after three steps."""
        before = [self.momenta(), self.common()]
        return [*before, self.train(3), self.momenta(), self.common()]

    def momenta(self) -> list[Tensor]:
        return [self.lion.state[p]["exp_avg"].clone() for p in self.model.parameters()]

    def close(self) -> None:
        """Frees the wrapper, or gloo aborts a process that ends with it."""
        self.lion.detach()
        self.accelerator.free_memory()
        del self.wrapped
        gc.collect()


@pytest.mark.parametrize("accumulate", [1, 3])
@on_ranks(2)
def test_a_loop_steps_once_per_accumulation(accumulate: int) -> None:
    loop = Loop(accumulate=accumulate, full_precision="0.*")  # by the model's names
    assert all(map(is_equal_everywhere, loop.train(6)))
    assert loop.lion.steps == loop.lion.wire.exchanges == 6 // accumulate
    loop.close()


@pytest.mark.parametrize("clip", [False, True])
@on_ranks(2)
def test_a_wrapped_optimizer_steps_with_a_scaler(rank: int, clip: bool) -> None:
    """Rank 1 overflows in step 1; an unscaled optimizer of the same gradients goes along."""
    Loop().close()  # AcceleratedOptimizer needs an Accelerator.
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    plain = copy.deepcopy(model)
    lion, other = (DistributedLion(own.named_parameters(), lr=0.01) for own in (model, plain))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = AcceleratedOptimizer(lion, scaler=scaler)
    scales = []
    for step in range(3):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))
        scaler.scale(model(x).square().sum()).backward()
        plain(x).square().sum().backward()
        if rank == 1 and step == 1:
            for own in (model, plain):
                own.weight.grad[0, 0] = torch.inf  # type: ignore[index]
        if clip:
            scaler.unscale_(lion)
        optimizer.step()
        other.step()
        # A schedule that follows it then takes as many steps on every rank.
        assert not optimizer.step_was_skipped
        optimizer.zero_grad()
        other.zero_grad()
        scales.append(scaler.get_scale())
        assert same(list(model.parameters()), list(plain.parameters()))
    assert scales == ([1024.0] * 3 if rank == 0 else [1024.0, 512.0, 512.0])


@pytest.mark.oldest
@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.smoke), 4])
@on_ranks(2)
def test_a_loaded_state_equals_that_of_each_rank(rank: int, tmp_path: Path, every: int) -> None:
    loop, scale = Loop(vote_every=every), 2.0 ** (3 + rank)
    loop.train(3)
    loop.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    loop.accelerator.scaler.scale(torch.ones(()))
    loop.accelerator.save_state(tmp_path)
    assert torch.load(tmp_path / "optimizer.bin")["state"] == {}  # Ranks have files for momenta.
    loop.accelerator.scaler = None
    assert all(map(is_equal_everywhere, loop.train(0)))  # The save has ended the period.
    momenta, common, own, _, end = saved = loop.seen()
    assert not is_equal_everywhere(momenta[0])
    assert all(map(is_equal_everywhere, own)) == (every == 1)
    assert all(map(is_equal_everywhere, [*common, *end]))
    loop.close()
    loop = Loop(vote_every=every)
    loop.accelerator.scaler = torch.amp.GradScaler("cpu")
    with warned() as texts:
        loop.accelerator.load_state(tmp_path)
    assert not [text for text in texts if "ranks" in text]
    assert loop.accelerator.scaler.state_dict()["scale"] == scale
    loop.accelerator.scaler = None
    assert all(map(same, saved, loop.seen()))
    loop.accelerator.load_state(tmp_path)  # In the midst of a run.
    assert all(map(same, saved, loop.seen()))
    loop.close()


def test_a_process_alone_warns_and_takes_the_models_names() -> None:
    with pytest.warns(UserWarning, match="this process trains alone"):
        loop = Loop(full_precision="0.*")
    loop.train(1)  # Without names, it would raise.
    assert loop.lion.steps == 1


@on_ranks(2)
def test_ranks_evaluate_the_same_model_within_a_period() -> None:
    loop = Loop(vote_every=2)

    def evaluated() -> float:
        return float(nn.functional.mse_loss(loop.wrapped(torch.ones(8, 6)), torch.zeros(8, 3)))

    kept = loop.train(3)
    with loop.lion.common_weights():
        between = evaluated()
        with pytest.raises(RuntimeError, match=r"leave the block before you step"):
            loop.train(1)
    assert same(kept, loop.train(0))
    loop.lion.exchange_now()  # The wrapper has none.
    end = evaluated()
    loop.close()
    assert agree((between, end))
    assert between != end


@on_ranks(2)
def test_automatic_names_and_limits_work_and_survive_failures(rank: int, tmp_path: Path) -> None:
    project = ProjectConfiguration(
        project_dir=str(tmp_path), automatic_checkpoint_naming=True, total_limit=2
    )
    loop = Loop(project=project)
    for _ in range(3):
        loop.train(2)
        loop.accelerator.save_state()
    saved, sent = loop.momenta(), loop.lion.wire.bytes_sent
    loop.accelerator.wait_for_everyone()
    assert loop.lion.wire.bytes_sent == sent  # Only a save meets the optimizer's ranks there.
    loop.train(1)
    loop.accelerator.load_state()
    assert same(saved, loop.momenta())
    # A failure on one rank, before and after Accelerate's barrier, and while momenta are written.
    for place, own in (
        ("accelerate.accelerator.shutil.rmtree", "OSError: broken"),
        ("torch.save", "OSError: broken"),
        ("hf_dlion.checkpoint.momentum_file.save_file", "CheckpointError: .*broken"),
    ):
        fails = mock.patch(place, side_effect=OSError("broken"))
        with fails if rank == 0 else contextlib.nullcontext():
            error = error_of(loop.accelerator.save_state)
        assert re.match(own if rank == 0 else "Disagreement: .*rank 0: .*broken", error), error
    loop.accelerator.save_state()
    loop.accelerator.load_state()
    loop.close()
    folders = sorted(tmp_path.glob("checkpoints/*"))
    assert len(folders) == 2
    momenta = {path.name for path in folders[-1].glob("dlion*")}
    assert momenta == {f"dlion_momentum_{other}_of_2.safetensors" for other in range(2)}


@on_ranks(2)
def test_an_error_on_one_rank_is_raised_on_all(rank: int, tmp_path: Path) -> None:
    loop = Loop()
    assert "ValueError: Tried to find" in error_of(loop.accelerator.load_state, "/nonexistent")
    loop.train(2)
    for folder in (tmp_path, tmp_path / "first"):
        loop.accelerator.save_state(folder)
    kept = loop.momenta()
    error = error_of(loop.accelerator.save_state, f"{tmp_path}/{rank}")
    assert re.match("CheckpointError: .*different folders", error), error
    assert agree(error)
    assert same(kept, loop.momenta())
    # What a save leaves that ends before its momenta doesn't load with older ones.
    with mock.patch("torch.save", side_effect=KeyboardInterrupt("stop")):
        error = error_of(loop.accelerator.save_state, tmp_path)
    assert "KeyboardInterrupt: stop" in error
    remedy = "earlier one). Call hf_dlion.accelerate.attach before accelerator.save"
    assert remedy in error_of(loop.accelerator.load_state, str(tmp_path))
    assert "saved without momenta" in error_of(loop.train, 1)
    loop.accelerator.load_state(str(tmp_path / "first"))
    assert same(kept, loop.momenta())
    loop.accelerator.save_state(tmp_path)
    loop.train(1)
    loop.accelerator.save_state(tmp_path / "later")
    own = f"dlion_momentum_{rank}_of_2.safetensors"
    shutil.copy(tmp_path / own, tmp_path / "later" / own)
    remedy = "step 3. The folder mixes two saves: load another one, or copy"
    assert remedy in error_of(loop.accelerator.load_state, str(tmp_path / "later"))
    loop.accelerator.load_state(str(tmp_path))
    if rank == 0:
        (tmp_path / "dlion_momentum_1_of_2.safetensors").unlink()
    loop.accelerator.wait_for_everyone()
    missing = "CheckpointError: .*dlion_momentum_1_of_2.safetensors, the momentum of rank 1, is m"
    nowhere = "ValueError: Tried to find /nonexistent"
    for place, own in ((tmp_path, missing), ("/nonexistent", nowhere)):
        error = error_of(loop.accelerator.load_state, str(place if rank == 1 else tmp_path))
        check_error(error, "{named}" + own, rank)
        # Accelerate has loaded the common state, which has no momenta.
        assert not any("exp_avg" in state for state in loop.lion.state.values())
    loop.close()


@on_ranks(2)
def test_a_timeout_that_accelerate_drops_is_named(rank: int) -> None:
    for seconds, warns in ((15, True), (180, False)):  # The group has 180.
        handler = InitProcessGroupKwargs(timeout=datetime.timedelta(seconds=seconds))
        with warned() as texts:
            Loop(handlers=[handler]).close()
        texts = [text for text in texts if "has no effect" in text]
        assert len(texts) == (warns and rank == 0)
        for text in texts:
            assert text.startswith("InitProcessGroupKwargs: timeout=15 has no effect: the process")
            assert "init_process_group('gloo', timeout=datetime.timedelta(seconds=15))" in text


@on_ranks(2)
def test_several_optimizers_have_files_of_their_own(rank: int, tmp_path: Path) -> None:
    loop = Loop()
    other = nn.Linear(2, 2)
    lion = DistributedLion(other.named_parameters(), lr=1e-2)
    sgd = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1)
    # Prepared in this order, after the loop's own: files 0 and 2 are ours.
    loop.accelerator.prepare(sgd)
    wrapped, second = loop.accelerator.prepare(other, lion)
    attach(loop.accelerator, wrapped)
    loop.accelerator.prepare(lion)  # Once more, which adds no files.
    loop.train(2)
    loop.accelerator.backward(wrapped(torch.full((1, 2), rank + 1.0)).sum())
    second.step()
    before = lion.state[other.weight]["exp_avg"].clone()
    loop.accelerator.save_state(tmp_path)
    lion.state[other.weight]["exp_avg"].zero_()
    loop.accelerator.load_state(tmp_path)
    assert torch.equal(before, lion.state[other.weight]["exp_avg"])
    lion.detach()
    del wrapped
    loop.close()
    files = {f"dlion_momentum_{own}_of_2.safetensors" for own in ("0", "1", "2_0", "2_1")}
    assert {path.name for path in tmp_path.glob("*momentum*")} == files


def sharding(kind: str, **options: Any) -> tuple[Accelerator, Any, DistributedLion]:
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="NO_WRAP",
        cpu_ram_efficient_loading=False,
        state_dict_type=kind,
    )
    config = parallelism_config(dp_replicate_size=2, dp_shard_size=2)
    accelerator = Accelerator(fsdp_plugin=plugin, parallelism_config=config)
    mesh = accelerator.torch_device_mesh
    for own in (mesh, mesh["dp_shard_cp"]):
        LASTING.update(own.get_all_groups())  # torch takes equal meshes for one and the same.
    torch.manual_seed(0)
    alone = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
    options["replicate"] = mesh["dp_replicate"]
    lion = DistributedLion(alone.named_parameters(), lr=1e-2, **options)
    model, _ = accelerator.prepare(alone, lion)
    attach(accelerator, model)
    return accelerator, model, lion


def train(rank: int, model: nn.Module, lion: DistributedLion, steps: range) -> list[Tensor]:
    for step in steps:
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))
        model(x).square().sum().backward()
        lion.step()
        lion.zero_grad()
    return [p.full_tensor().clone() for p in model.parameters()]  # type: ignore[operator]


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("kind", ["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
@on_ranks(4)
def test_fsdp2_inside_replicas_resumes(rank: int, tmp_path: Path, kind: str, every: int) -> None:
    with as_if_on_gpus():
        accelerator, model, lion = sharding(kind, vote_every=every)
        train(rank, model, lion, range(1 + every))
        accelerator.save_state(tmp_path)
        kept = train(rank, model, lion, range(0))
        straight = train(rank, model, lion, range(1 + every, 3 + every))
        with pytest.raises(NotImplementedError, match="SGD doesn't work with"):
            accelerator.prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    with as_if_on_gpus():
        accelerator, model, lion = sharding(kind, vote_every=every)
        accelerator.load_state(tmp_path)
        assert same(kept, train(rank, model, lion, range(0)))
        assert same(straight, train(rank, model, lion, range(1 + every, 3 + every)))


@on_ranks(4)
def test_fsdp2_without_replicas_is_refused() -> None:
    text = "FSDP2 inside each replica with hf_dlion.accelerate.parallelism_config"
    with as_if_on_gpus():
        accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
        with pytest.raises(NotImplementedError, match=text):
            attach(accelerator, nn.Linear(1, 1))


def test_fsdp_uses_the_ranks_of_one_replica() -> None:
    config = parallelism_config(dp_replicate_size=2, dp_shard_size=2)
    for own in (config, pickle.loads(pickle.dumps(config)), copy.deepcopy(config)):
        assert own.fsdp_dim_names == ["dp_shard_cp"]
        assert (own.dp_replicate_size, own.dp_shard_size) == (2, 2)


@pytest.mark.parametrize("name", ["dp_replicate_size", "dp_shard_size"])
def test_replicas_and_shards_are_two_at_least(name: str) -> None:
    with pytest.raises(ValueError, match=rf"{name} must be at least 2 \(got 1\)"):
        parallelism_config(**{"dp_replicate_size": 2, "dp_shard_size": 2, name: 1})


OTHER_WAY = "doesn't work with .* Use DDP"


@pytest.mark.parametrize(
    ("kind", "tensors", "said"),
    [
        *((kind, 1, OTHER_WAY) for kind in ("FSDP", "DEEPSPEED", "MEGATRON_LM", "XLA")),
        ("MULTI_GPU", 2, "tp_size=2 in a ParallelismConfig"),
    ],
)
def test_other_ways_to_train_are_refused(kind: str, tensors: int, said: str) -> None:
    config = SimpleNamespace(tp_size=tensors)
    accelerator = SimpleNamespace(distributed_type=DistributedType(kind), parallelism_config=config)
    with pytest.raises(NotImplementedError, match=said):
        attach(accelerator, nn.Linear(1, 1))  # type: ignore[arg-type]


@pytest.fixture
def loop() -> Loop:
    return Loop(attached=False)


def test_a_model_without_a_lion_is_refused(loop: Loop) -> None:
    with pytest.raises(ValueError, match="has no DistributedLion with parameters of this model"):
        attach(loop.accelerator, nn.Linear(1, 1))


SAME_RESULTS = "same results on one CPU or distributed setup with batch split"


@multiproc
@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "optimizers", "said"),
    [
        # One process of the whole batch, two, two with split batches, bf16, fp16; two samplers.
        (["test_script"], 10, SAME_RESULTS),
        (["test_sync", "replicas"], 2, ""),
    ],
)
def test_accelerates_own_checks_pass(words: list[str], optimizers: int, said: str) -> None:
    script = Path(__file__).parent / "support/launched_lion.py"
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu"]
    # Port 0 lets the system choose.
    launcher += ["--num_processes=2", "--num_machines=1", "--main_process_port=0"]
    launcher += ["--mixed_precision=no", "--dynamo_backend=no"]
    on_cpu = {"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}
    output = run_command([*launcher, str(script), *words], env=on_cpu, timeout=200).stdout
    votes = f"{optimizers} of {optimizers} optimizers exchanged votes"
    found = sorted(line for line in output.splitlines() if "exchanged votes" in line)
    assert found == [f"rank {rank}: {votes}" for rank in (0, 1)]
    assert said in output
