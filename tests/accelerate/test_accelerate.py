"""A plain Accelerate loop, and a momentum per rank in its checkpoints."""

from __future__ import annotations

import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DistributedType, ProjectConfiguration

import accelerate
import hf_dlion
from accelerate import Accelerator
from hf_dlion import DistributedLion
from hf_dlion.checkpoint.momentum_file import CheckpointError
from tests.support.accelerate_training import Loop
from tests.support.spawn import RankPools, run_script

pytestmark = pytest.mark.multiproc


def same(left, right):
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def plain_loop(rank, world_size, accumulate):
    with warnings.catch_warnings():
        # Nothing is to be said of Accelerate's load_state_dict with an empty state.
        warnings.simplefilter("error")
        loop = Loop(attach=False, accumulate=accumulate)
        loop.train(6)
    return loop.digest(), loop.lion.steps, loop.lion.wire, bool(loop.wrapped._comm_hooks)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_prepare_is_all_that_a_loop_needs(ranks: RankPools, accumulate):
    results = ranks(2).run(plain_loop, accumulate)
    for digest, steps, wire, hooked in results:
        assert digest == results[0][0]
        assert steps == 6 // accumulate
        assert wire.bytes_sent > 0
        assert hooked


def change_to_adamw(rank, world_size):
    """The Accelerator keeps the first optimizer alive."""
    loop = Loop(attach=False)
    loop.train(2)
    errors = []
    for detach in (False, True):
        if detach:
            loop.train(1)
            loop.lion.detach()
        lion, loop.optimizer = (
            loop.optimizer,
            loop.accelerator.prepare(torch.optim.AdamW(loop.model.parameters(), lr=1e-2)),
        )
        before = loop.digest()
        try:
            loop.train(2)
        except RuntimeError as error:
            errors.append((str(error), loop.digest() == before))
        loop.optimizer = lion
    return errors, loop.digest()


def test_another_optimizer_of_one_accelerator_is_told_to_detach_the_first(ranks: RankPools):
    results = ranks(2).run(change_to_adamw)
    for errors, digest in results:
        ((message, untouched),) = errors
        assert "AdamW.step(): DDP has not averaged these gradients" in message
        assert untouched
        assert digest == results[0][1]


EARLY = r"""
import torch, hf_dlion
model = torch.nn.Linear(4, 3)
torch.nn.init.constant_(model.weight, 0.5)
optimizer = hf_dlion.DistributedLion(model.named_parameters(), lr=0.25)
assert optimizer.world_size == 1
from accelerate import Accelerator
accelerator = Accelerator(cpu=True)
wrapped, prepared = accelerator.prepare(model, optimizer)
accelerator.backward(wrapped(torch.ones(2, 4)).sum())
prepared.step()
seen = (optimizer.world_size, optimizer.wire.exchanges, *model.weight.unique().tolist())
print(f"{seen}\n", end="", flush=True)
# gloo may abort a process whose group outlives Python.
import gc
accelerator.free_memory()
del wrapped, prepared
gc.collect()
torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_an_optimizer_may_be_built_before_the_accelerator(tmp_path):
    (tmp_path / "early.py").write_text(EARLY)
    done = run_script(2, [str(tmp_path / "early.py")])
    assert done.stdout.split("\n") == ["(2, 1, 0.25)", "(2, 1, 0.25)", ""]


def save(rank, world_size, folder, **options):
    loop = Loop(**options)
    loop.train(3)
    loop.accelerator.save_state(folder)
    saved = loop.momenta()
    loop.train(4)
    return saved, loop.digest(), loop.momenta()


def load(rank, world_size, folder, **options):
    loop = Loop(**options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loop.accelerator.load_state(folder)
        loaded = loop.momenta()
        loop.train(4)
    said = [str(w.message) for w in caught if "moment" in str(w.message)]
    return loaded, loop.digest(), loop.momenta(), said


@pytest.mark.smoke
def test_load_state_gives_every_rank_its_momentum(ranks, tmp_path):
    saved = ranks(2).run(save, str(tmp_path))
    loaded = ranks(2).run(load, str(tmp_path))
    assert not same(saved[0][0], saved[1][0])
    for rank in range(2):
        assert same(saved[rank][0], loaded[rank][0])
        assert saved[rank][1] == loaded[rank][1] == saved[0][1]
        assert same(saved[rank][2], loaded[rank][2])
        assert not loaded[rank][3]


def test_one_rank_loads_the_mean_of_two(ranks, tmp_path):
    saved = ranks(2).run(save, str(tmp_path))
    ((loaded, _, _, said),) = ranks(1).run(load, str(tmp_path))
    assert same(loaded, [(a + b) / 2 for a, b in zip(saved[0][0], saved[1][0], strict=True)])
    assert len(said) == 1


def save_mean(rank, world_size, folder):
    return save(rank, world_size, folder, checkpoint="mean")


def load_mean(rank, world_size, folder):
    return load(rank, world_size, folder, checkpoint="mean")


def test_the_mean_needs_one_file(ranks, tmp_path):
    saved = ranks(2).run(save_mean, str(tmp_path))
    loaded = ranks(2).run(load_mean, str(tmp_path))
    assert not list(tmp_path.glob("*momentum*"))
    for rank in range(2):
        assert same(saved[0][0], loaded[rank][0])
        assert saved[0][1] == loaded[rank][1]


def lose_a_file(rank, world_size, folder):
    loop = Loop()
    with pytest.raises(CheckpointError, match=r"dlion_momentum_1_of_2\.pt is missing"):
        loop.accelerator.load_state(folder)


def test_a_missing_file_is_refused_on_every_rank(ranks, tmp_path):
    ranks(2).run(save, str(tmp_path))
    Path(tmp_path, "dlion_momentum_1_of_2.pt").unlink()
    ranks(2).run(lose_a_file, str(tmp_path))


def fail_on_one_rank(rank, world_size, folder):
    loop = Loop()
    with pytest.raises(CheckpointError, match="rank 1: there is no /nonexistent"):
        loop.accelerator.load_state(folder if rank == 0 else "/nonexistent")


def test_what_fails_on_one_rank_is_raised_on_all(ranks, tmp_path):
    ranks(2).run(save, str(tmp_path))
    ranks(2).run(fail_on_one_rank, str(tmp_path))


def forget_to_attach(rank, world_size, folder):
    loop = Loop(attach=False)
    loop.train(2)
    loop.accelerator.save_state(folder)
    loop.accelerator.wait_for_everyone()
    with pytest.raises(CheckpointError, match="no momentum of any rank"):
        Loop().accelerator.load_state(folder)


def test_a_state_that_was_saved_without_attach_is_refused(ranks, tmp_path):
    ranks(2).run(forget_to_attach, str(tmp_path))


def automatic(rank, world_size, folder):
    project = ProjectConfiguration(project_dir=folder, automatic_checkpoint_naming=True)
    loop = Loop(project=project)
    for _ in range(2):
        loop.train(2)
        loop.accelerator.save_state()
    saved = loop.momenta()
    loop.train(1)
    loop.accelerator.load_state()
    return same(saved, loop.momenta())


def test_automatic_checkpoint_names_work(ranks, tmp_path):
    assert ranks(2).run(automatic, str(tmp_path)) == [True, True]
    assert len(list(tmp_path.rglob("dlion_momentum_*_of_2.pt"))) == 4


def two_optimizers(rank, world_size, folder):
    loop = Loop()
    other = torch.nn.Linear(2, 2)
    lion = DistributedLion(other.parameters(), lr=1e-2)
    sgd = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1)
    # Prepared in this order, after the loop's own: files 0 and 2 are ours.
    loop.accelerator.prepare(sgd)
    wrapped, second = loop.accelerator.prepare(other, lion)
    hf_dlion.accelerate.attach(loop.accelerator)
    loop.train(2)
    loop.accelerator.backward(wrapped(torch.full((1, 2), rank + 1.0)).sum())
    second.step()
    before = lion.state[other.weight]["exp_avg"].clone()
    loop.accelerator.save_state(folder)
    loop.accelerator.wait_for_everyone()
    lion.state[other.weight]["exp_avg"].zero_()
    loop.accelerator.load_state(folder)
    return torch.equal(before, lion.state[other.weight]["exp_avg"]), before


def test_several_optimizers_have_files_of_their_own(ranks, tmp_path):
    (left, one), (right, two) = ranks(2).run(two_optimizers, str(tmp_path))
    assert left
    assert right
    assert not torch.equal(one, two)
    names = sorted(path.name for path in tmp_path.glob("*momentum*"))
    assert names == [
        "dlion_momentum_0_of_2.pt",
        "dlion_momentum_1_of_2.pt",
        "dlion_momentum_2_0_of_2.pt",
        "dlion_momentum_2_1_of_2.pt",
    ]


def own_scalers(rank, world_size, folder):
    loop = Loop()
    loop.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** (3 + rank))
    loop.accelerator.scaler.scale(torch.ones(()))
    loop.train(1)
    loop.accelerator.save_state(folder)
    loop.accelerator.wait_for_everyone()
    loop.accelerator.scaler = torch.amp.GradScaler("cpu")
    loop.accelerator.load_state(folder)
    return loop.accelerator.scaler.state_dict()["scale"]


def test_every_rank_gets_its_own_scaler_back(ranks, tmp_path):
    assert ranks(2).run(own_scalers, str(tmp_path)) == [8.0, 16.0]


@pytest.mark.parametrize("kind", ["FSDP", "DEEPSPEED", "MEGATRON_LM", "XLA"])
def test_sharding_is_refused_by_name(kind):
    accelerator = SimpleNamespace(distributed_type=DistributedType(kind))
    with pytest.raises(NotImplementedError, match="does not work with") as caught:
        hf_dlion.accelerate.attach(accelerator)
    assert "Use plain data parallelism" in str(caught.value)


def test_tensor_parallelism_is_refused():
    parallel = SimpleNamespace(tp_size=2)
    accelerator = SimpleNamespace(
        distributed_type=DistributedType.MULTI_GPU, parallelism_config=parallel
    )
    with pytest.raises(NotImplementedError, match="tp_size > 1"):
        hf_dlion.accelerate.attach(accelerator)


def lonely_accelerator():
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    return Accelerator(cpu=True)


def forget_to_say_cpu(rank, world_size, cpu):
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    accelerator = Accelerator(cpu=cpu)
    model = torch.nn.Linear(2, 1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        wrapped, optimizer = accelerator.prepare(model, DistributedLion(model.parameters()))
        for _ in range(2):
            accelerator.backward(wrapped(torch.ones(1, 2)).sum())
            optimizer.step()
    return [str(w.message) for w in caught]


def test_a_loop_whose_accelerator_does_not_know_of_the_ranks_is_told_once(ranks: RankPools):
    for said in ranks(2).run(forget_to_say_cpu, False):
        assert len(said) == 1
        assert "torch.distributed has 2 ranks, but the Accelerator knows of 1" in said[0]
        assert "Accelerator(cpu=True)" in said[0]
    assert ranks(2).run(forget_to_say_cpu, True) == [[], []]


def test_ranks_that_the_accelerator_does_not_know_of_are_refused(monkeypatch):
    accelerator = lonely_accelerator()
    monkeypatch.setenv("WORLD_SIZE", "2")
    words = r"WORLD_SIZE=2, but the Accelerator knows of 1.*Accelerator\(cpu=True\)"
    with pytest.raises(RuntimeError, match=words):
        hf_dlion.accelerate.attach(accelerator)


@pytest.mark.parametrize("name", ["_optimizers", "scaler"])
def test_an_accelerate_without_an_internal_is_refused_by_name(name):
    accelerator = lonely_accelerator()
    delattr(accelerator, name)
    with pytest.raises(RuntimeError, match=rf"Accelerator\(\).{name}.*{accelerate.__version__}"):
        hf_dlion.accelerate.attach(accelerator)


def test_an_accelerator_without_a_lion_saves_as_it_did(tmp_path):
    accelerator = lonely_accelerator()
    hf_dlion.accelerate.attach(accelerator)
    model = torch.nn.Linear(2, 1)
    accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.save_state(str(tmp_path))
    accelerator.load_state(str(tmp_path))
    assert not list(tmp_path.glob("checkpoint-is-*"))
