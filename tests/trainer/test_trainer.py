"""`optim="dlion"` and the optimizer factory, on one rank and in one process."""

from __future__ import annotations

import ast
import pickle
import re
import sys
import warnings
from pathlib import Path

import pytest
import torch
import transformers
from transformers import HfArgumentParser, Trainer, TrainerCallback, TrainingArguments
from transformers.training_args import OptimizerNames

import hf_dlion
from hf_dlion import DistributedLion
from hf_dlion.checkpoint.access import lion_in
from hf_dlion.options import warn_once
from hf_dlion.trainer import DistributedLionCallback, optimizer_cls_and_kwargs, seams
from hf_dlion.trainer.arguments import lion_kwargs
from tests.support.tiny import tiny_args, tiny_llama, tiny_trainer, weights_digest


@pytest.fixture(autouse=True)
def registered():
    hf_dlion.register()


def optimizer_of(trainer: Trainer) -> DistributedLion:
    lion = lion_in(trainer.create_optimizer())
    assert lion is not None
    return lion


def test_registering_twice_changes_nothing():
    before = list(OptimizerNames), vars(Trainer)["_save_rng_state"]
    hf_dlion.register()
    assert (list(OptimizerNames), vars(Trainer)["_save_rng_state"]) == before
    assert [member.value for member in OptimizerNames].count("dlion") == 1
    assert OptimizerNames.DLION is OptimizerNames("dlion") is OptimizerNames["DLION"]


def test_the_name_survives_parser_pickle_and_json(tmp_path):
    words = ["--output_dir", str(tmp_path), "--optim", "dlion", "--use_cpu", "True"]
    (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(words)
    assert args.optim is OptimizerNames("dlion")
    assert pickle.loads(pickle.dumps(args.optim)) is args.optim
    assert args.to_dict()["optim"] == "dlion"


@pytest.mark.parametrize(
    "name", ["_save_rng_state", "_load_optimizer_and_scheduler", "_get_output_dir"]
)
def test_a_transformers_without_a_seam_is_refused_by_name(monkeypatch, name):
    monkeypatch.delattr(Trainer, seams._INSTALLED)
    monkeypatch.delattr(Trainer, name)
    with pytest.raises(RuntimeError, match=rf"Trainer.{name}.*{transformers.__version__}"):
        seams.install_seams()


@pytest.mark.parametrize(
    "name",
    ["trainer_utils.sort_checkpoints", "trainer.rotate_checkpoints", "trainer.TRAINER_STATE_NAME"],
)
def test_a_transformers_without_an_internal_is_refused_by_name(monkeypatch, name):
    monkeypatch.delattr(Trainer, seams._INSTALLED)
    monkeypatch.delattr(f"transformers.{name}")
    with pytest.raises(RuntimeError, match=rf"transformers.{name}.*{transformers.__version__}"):
        seams.install_seams()


def test_a_transformers_that_names_its_files_otherwise_is_refused(monkeypatch):
    monkeypatch.delattr(Trainer, seams._INSTALLED)
    monkeypatch.setattr("transformers.trainer_utils.PREFIX_CHECKPOINT_DIR", "saved")
    with pytest.raises(RuntimeError, match=r"trainer_utils.PREFIX_CHECKPOINT_DIR = 'checkpoint'"):
        seams.install_seams()


def test_a_trainer_without_an_attribute_is_refused_before_it_trains(tmp_path):
    trainer = tiny_trainer(tiny_args(tmp_path))
    del trainer.is_deepspeed_enabled
    with pytest.raises(RuntimeError, match=r"hf_dlion needs Trainer\(\).is_deepspeed_enabled"):
        trainer.train()


# What transformers documents; the rest is looked up where its absence can be told.
DOCUMENTED = {"Trainer", "TrainerCallback", "TrainerState", "TrainingArguments", "logging"}


def test_importing_the_integration_takes_only_what_transformers_documents():
    for path in Path(seams.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("transformers"):
                names = {alias.name for alias in node.names}
                assert names <= DOCUMENTED, f"{path.name} imports {names - DOCUMENTED}"


def test_a_seam_with_other_parameters_is_refused(monkeypatch):
    monkeypatch.delattr(Trainer, seams._INSTALLED)
    monkeypatch.setattr(Trainer, "_save_rng_state", lambda self, folder: None)
    with pytest.raises(RuntimeError, match=r"Trainer._save_rng_state\(output_dir\)"):
        seams.install_seams()


def test_a_transformers_without_a_table_of_handlers_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers.trainer_optimizer", None)
    with pytest.raises(RuntimeError, match="_OPTIMIZER_HANDLERS"):
        hf_dlion.register()


def test_options_reach_the_optimizer(tmp_path):
    text = "aggregation=average,exchange=gather,stochastic_rounding=false,seed=5"
    trainer = tiny_trainer(tiny_args(tmp_path, optim_args=text, learning_rate=3e-4))
    lion = optimizer_of(trainer)
    assert lion.options == hf_dlion.Options(
        aggregation="average",
        exchange="gather",
        stochastic_rounding=False,
        seed=5,
        check_replicas_every=100,
    )
    assert {group["lr"] for group in lion.param_groups} == {3e-4}


@pytest.mark.parametrize(
    ("changes", "betas"),
    [
        ({}, (0.9, 0.99)),
        ({"adam_beta2": 0.95}, (0.9, 0.95)),
        ({"adam_beta1": 0.8, "adam_beta2": 0.999}, (0.8, 0.99)),
        ({"adam_beta1": 0.8, "adam_beta2": 0.95, "optim_args": "beta2=0.999"}, (0.8, 0.999)),
        ({"optim_args": "betas=0.85;0.97"}, (0.85, 0.97)),
    ],
)
def test_betas_are_lions_unless_somebody_chose_them(tmp_path, changes, betas):
    assert lion_kwargs(tiny_args(tmp_path, **changes))["betas"] == betas


def test_the_change_of_beta2_is_logged(tmp_path, caplog, monkeypatch):
    logger = transformers.utils.logging.get_logger("hf_dlion.trainer.arguments")
    monkeypatch.setattr(logger, "propagate", True)
    with caplog.at_level("INFO", logger=logger.name):
        lion_kwargs(tiny_args(tmp_path))
    assert "adam_beta2=0.999 is AdamW's default; dlion uses beta2=0.99" in caplog.text


def decay_by_name(lion):
    return {
        name: group["weight_decay"] for group in lion.param_groups for name in group["param_names"]
    }


def routes(folder):
    """Yields a Trainer for each way to the optimizer."""
    # One after the other: each sets the seed of what follows it.
    yield tiny_trainer(tiny_args(folder))
    args = tiny_args(folder, optim="adamw_torch")
    yield tiny_trainer(args, optimizer_cls_and_kwargs=optimizer_cls_and_kwargs(args))


def test_both_routes_have_trainers_decay_groups_and_names(tmp_path):
    for trainer in routes(tmp_path):
        decayed = trainer.get_decay_parameter_names(trainer.model)
        names = [name for name, _ in trainer.model.named_parameters()]
        expected = {name: 0.1 if name in decayed else 0.0 for name in names}
        assert decay_by_name(optimizer_of(trainer)) == expected
        assert set(expected.values()) == {0.0, 0.1}


def test_both_routes_train_alike(tmp_path):
    digests = []
    for trainer in routes(tmp_path):
        trainer.train()
        digests.append(weights_digest(trainer.model))
        assert "dlion/wire_mb_per_step" in trainer.state.log_history[0]
    assert digests[0] == digests[1]


def test_the_factory_takes_options_that_win(tmp_path):
    args = tiny_args(tmp_path, optim="adamw_torch", optim_args="beta2=0.5,seed=1")
    cls, kwargs = optimizer_cls_and_kwargs(args, seed=2, betas=(0.8, 0.9), lr=0.5)
    assert cls is DistributedLion
    checked = {"check_replicas_every": 100}
    assert kwargs == {"lr": 0.5, "betas": (0.8, 0.9), "seed": 2, **checked}


def test_replicas_are_compared_every_100_steps_unless_the_user_says_otherwise(tmp_path):
    assert lion_kwargs(tiny_args(tmp_path))["check_replicas_every"] == 100
    args = tiny_args(tmp_path, optim_args="check_replicas_every=0")
    assert lion_kwargs(args)["check_replicas_every"] == 0
    assert optimizer_cls_and_kwargs(args, check_replicas_every=7)[1]["check_replicas_every"] == 7


def test_what_goes_together_is_checked_of_defaults_text_and_arguments_as_one(tmp_path):
    factory = {"optim": "adamw_torch"}  # With "dlion" the text has to do by itself.
    args = tiny_args(tmp_path, **factory, optim_args="on_divergence=repair")
    assert lion_kwargs(args)["on_divergence"] == "repair"
    with pytest.raises(ValueError, match=r"on_divergence='repair' would have no effect"):
        optimizer_cls_and_kwargs(args, check_replicas_every=0)
    args = tiny_args(tmp_path, **factory, optim_args="level_scale=tensor")
    assert optimizer_cls_and_kwargs(args, bits=4)[1]["level_scale"] == "tensor"
    with pytest.raises(ValueError, match=r"^optim_args='level_scale=tensor': level_scale="):
        optimizer_cls_and_kwargs(args)
    # Of an option given twice the argument holds, and is what the others have to go with.
    for text, chosen in (
        ("aggregation=average", {"aggregation": "majority", "ties": "zero"}),
        ("bits=4", {"bits": 1, "aggregation": "average"}),
        ("check_replicas_every=0", {"check_replicas_every": 5, "on_divergence": "repair"}),
    ):
        args = tiny_args(tmp_path, **factory, optim_args=text)
        kwargs = optimizer_cls_and_kwargs(args, **chosen)[1]
        assert chosen.items() <= kwargs.items()
    # Nobody is told of a text that was not given.
    with pytest.raises(ValueError, match=r"^bits=3 is unknown"):
        optimizer_cls_and_kwargs(tiny_args(tmp_path), bits=3)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tie": "zero"}, "did you mean 'ties'"),
        ({"ties": "coin"}, "ties='coin' is unknown; choose one of alternate, zero"),
        ({"weight_decay": 0.1}, "set TrainingArguments(weight_decay=...)"),
    ],
)
def test_the_factory_checks_options_when_it_is_called(tmp_path, options, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        optimizer_cls_and_kwargs(tiny_args(tmp_path), **options)


class OwnGroups(Trainer):
    """Overrides what people override, with groups of their own."""

    def create_optimizer(self, model=None):
        cls, kwargs = self.get_optimizer_cls_and_kwargs(self.args, self.model)
        embedding, *others = self.model.parameters()
        self.optimizer = cls([{"params": [embedding], "lr": 0.0}, {"params": others}], **kwargs)
        return self.optimizer


def test_a_trainer_with_groups_of_its_own_works(tmp_path):
    trainer = tiny_trainer(tiny_args(tmp_path, learning_rate=1e-3), OwnGroups)
    before = tiny_llama().model.embed_tokens.weight
    trainer.train()
    assert torch.equal(trainer.model.model.embed_tokens.weight, before)
    assert "dlion/abstained" in trainer.state.log_history[0]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("aggregation", "'aggregation' is not of the form option=value"),
        ("aggregation=sum", "aggregation='sum' is unknown; choose one of majority, average"),
        ("agregation=average", "did you mean 'aggregation'"),
        ("beta1=2", "beta1=2 must be at least 0 and below 1"),
    ],
)
def test_bad_optim_args_are_refused_where_the_arguments_are_made(tmp_path, text, words):
    with pytest.raises(ValueError, match=r"^optim_args") as caught:
        tiny_args(tmp_path, optim_args=text)
    assert words in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None or caught.value.__suppress_context__


def test_optim_args_that_were_set_later_are_refused_where_the_trainer_is_made(tmp_path):
    args = tiny_args(tmp_path, optim="adamw_torch")
    args = args.set_optimizer(name="dlion", learning_rate=1e-3, args="aggregation")
    with pytest.raises(ValueError, match=r"^optim_args='aggregation': "):
        tiny_trainer(args)
    with pytest.raises(ValueError, match=r"^optim_args='aggregation': "):
        Trainer(tiny_llama(), args)


def test_the_text_of_another_optimizer_is_not_looked_at(tmp_path):
    args = tiny_args(tmp_path, optim="sgd", optim_args="momentum=0.9")
    assert tiny_trainer(args).args.optim_args == "momentum=0.9"


def test_a_misspelt_name_is_told_in_one_line(tmp_path):
    with pytest.raises(ValueError, match=r"^optim='dlino' is unknown, did you mean 'dlion'\?$"):
        tiny_args(tmp_path, optim="dlino")
    for other in ("adamw_torhc", "lion"):
        with pytest.raises(ValueError, match="lion_32bit"):  # What transformers says of others.
            tiny_args(tmp_path, optim=other)


def test_our_options_are_not_lost_on_another_optimizer_silently(tmp_path, monkeypatch):
    monkeypatch.setattr(warn_once, "_given", set())
    args = tiny_args(tmp_path, optim="adamw_torch", optim_args="bits=4, overlap=true")
    with pytest.warns(
        UserWarning, match=r"^optim='adamw_torch' .* has bits, overlap.* optim='dlion'"
    ):
        tiny_trainer(args)
    monkeypatch.setattr(warn_once, "_given", set())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # Here DistributedLion trains, whatever the name says.
        model, ours = tiny_llama(), optimizer_cls_and_kwargs(args)
        Trainer(model, args, optimizer_cls_and_kwargs=ours)
        Trainer(model, args, optimizers=(DistributedLion(model.parameters(), lr=1e-3), None))
        other = tiny_args(tmp_path, optim="adamw_anyprecision")
        other.optim_args = "momentum_dtype=bfloat16"
        tiny_trainer(other)


def test_other_optimizers_are_left_alone(tmp_path):
    args = tiny_args(tmp_path, optim="sgd", optim_args="momentum=0.9", save_strategy="steps")
    trainer = tiny_trainer(args)
    trainer.train()
    assert type(trainer.optimizer.optimizer) is torch.optim.SGD
    names = [type(callback) for callback in trainer.callback_handler.callbacks]
    assert DistributedLionCallback not in names
    assert not list(tmp_path.rglob("*momentum*"))
    assert "dlion/abstained" not in trainer.state.log_history[0]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"is_deepspeed_enabled": True}, "DeepSpeed"),
        ({"is_fsdp_enabled": True}, "FSDP"),
        ({"is_distributed_loading_by_transformers": True}, "sharded when it is loaded"),
    ],
)
@pytest.mark.parametrize("route", [0, 1])
def test_sharding_is_refused_with_what_works(tmp_path, monkeypatch, change, words, route):
    trainer = list(routes(tmp_path))[route]
    for name, value in change.items():
        monkeypatch.setattr(trainer, name, value, raising=False)  # Not in older transformers.
    with pytest.raises(NotImplementedError, match=words) as caught:
        trainer.train()
    assert "Use plain data parallelism" in str(caught.value)


def test_tensor_parallelism_is_refused(tmp_path, monkeypatch):
    trainer = tiny_trainer(tiny_args(tmp_path))
    monkeypatch.setattr(type(trainer.model), "tp_size", 2)
    with pytest.raises(NotImplementedError, match="tensor parallelism"):
        trainer.train()


def test_ranks_that_the_arguments_do_not_know_of_are_refused(tmp_path, monkeypatch):
    trainer = tiny_trainer(tiny_args(tmp_path))
    # As under torchrun without use_cpu on a machine without GPUs.
    monkeypatch.setenv("WORLD_SIZE", "2")
    words = r"WORLD_SIZE=2, but TrainingArguments knows of 1.*TrainingArguments\(use_cpu=True\)"
    with pytest.raises(RuntimeError, match=words):
        trainer.train()


def test_trainings_side_by_side_under_mpi_are_only_warned(tmp_path, monkeypatch):
    trainer = tiny_trainer(tiny_args(tmp_path))
    monkeypatch.setenv("PMI_SIZE", "2")
    monkeypatch.setattr(warn_once, "_given", set())
    with pytest.warns(UserWarning, match="PMI_SIZE=2.*nothing is exchanged"):
        trainer.train()


def test_several_gpus_in_one_process_are_told_that_nothing_is_exchanged(tmp_path, monkeypatch):
    trainer = tiny_trainer(tiny_args(tmp_path))
    monkeypatch.setattr(trainer.args, "_n_gpu", 2)
    monkeypatch.setattr(warn_once, "_given", set())
    with pytest.warns(UserWarning, match="one process drives 2 GPUs.*nothing is exchanged"):
        seams._check_ranks(trainer)


class Recorder(TrainerCallback):
    """What a reporting integration would see."""

    def __init__(self):
        self.seen = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.seen.append(dict(logs))


def test_figures_reach_other_callbacks_and_the_history(tmp_path):
    recorder = Recorder()
    trainer = tiny_trainer(tiny_args(tmp_path, logging_steps=2), callbacks=[recorder])
    trainer.train()
    assert isinstance(trainer.callback_handler.callbacks[0], DistributedLionCallback)
    for entries in (recorder.seen, trainer.state.log_history):
        losses = [entry for entry in entries if "loss" in entry]
        assert len(losses) == 2
        for entry in losses:
            assert entry["dlion/wire_mb_per_step"] == 0.0
            assert entry["dlion/abstained"] == 0.0
            assert "dlion/agreement" not in entry
        assert not any("dlion/abstained" in entry for entry in entries if "loss" not in entry)


def test_a_callback_that_was_passed_is_used_and_comes_first(tmp_path):
    ours = DistributedLionCallback()
    trainer = tiny_trainer(tiny_args(tmp_path), callbacks=[ours])
    trainer.create_optimizer()
    callbacks = trainer.callback_handler.callbacks
    assert callbacks[0] is ours
    assert sum(isinstance(callback, DistributedLionCallback) for callback in callbacks) == 1


def test_an_optimizer_that_was_passed_gets_it_all(tmp_path):
    model = tiny_llama()
    lion = DistributedLion(model.parameters(), lr=1e-3)
    args = tiny_args(tmp_path, optim="adamw_torch", save_strategy="steps", save_steps=2)
    trainer = tiny_trainer(args, model=model, optimizers=(lion, None))
    trainer.train()
    assert lion.param_groups[0]["param_names"][0] == "model.embed_tokens.weight"
    assert "dlion/abstained" in trainer.state.log_history[0]
    assert (tmp_path / "checkpoint-4" / "dlion_momentum_0_of_1.pt").is_file()


def test_model_init_makes_a_new_optimizer_for_every_model(tmp_path):
    args = tiny_args(tmp_path)
    trainer = tiny_trainer(args, model=None, model_init=lambda trial=None: tiny_llama())
    trainer.train()
    first = weights_digest(trainer.model)
    trainer.train()
    assert weights_digest(trainer.model) == first
