"""`optim="dlion"` and what surrounds it, in one process: the first hour of a new user."""

from __future__ import annotations

import gc
import importlib
import pickle
import sys
import types
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from transformers import HfArgumentParser, Trainer, TrainerCallback, TrainingArguments
from transformers.training_args import OptimizerNames

import hf_dlion
from hf_dlion import DistributedLion
from hf_dlion.trainer import patches, registration
from hf_dlion.trainer.registration import optimizer_cls_and_kwargs
from tests.support.tiny import (
    At,
    logged,
    tiny_args,
    tiny_llama,
    tiny_trainer,
    trained,
    weights_digest,
)


@pytest.fixture(autouse=True)
def _registered() -> None:
    hf_dlion.register()


@pytest.fixture
def warned() -> Iterator[list[str]]:
    with logged() as texts:
        yield texts


def test_the_name_survives_a_second_register_parser_pickle_and_json(tmp_path: Path) -> None:
    before = list(OptimizerNames), vars(Trainer)["_save_rng_state"]
    hf_dlion.register()
    assert (list(OptimizerNames), vars(Trainer)["_save_rng_state"]) == before
    assert OptimizerNames["DLION"] is OptimizerNames("dlion")
    words = ["--output_dir", str(tmp_path), "--optim", "dlion", "--use_cpu", "True"]
    (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(words)
    assert args.optim is pickle.loads(pickle.dumps(args.optim)) is OptimizerNames("dlion")
    assert args.to_dict()["optim"] == "dlion"


@pytest.mark.parametrize(
    "optim_args",
    [
        "bits=2, momentum_dtype=bf16,betas=0.8;0.9,full_precision=*norm*;*embed*,local_group=none",
        {
            "bits": 2,
            "momentum_dtype": torch.bfloat16,
            "betas": [0.8, 0.9],
            "full_precision": ["*norm*", "*embed*"],
            "local_group": None,
        },
    ],
    ids=["text", "dict"],
)
def test_optim_args_reach_the_optimizer_by_model_names(tmp_path: Path, optim_args: Any) -> None:
    trainer = trained(tiny_args(tmp_path, optim_args=optim_args, learning_rate=3e-4))
    lion = trainer.optimizer.optimizer
    assert lion.options.bits == 2
    assert lion.options.momentum_dtype is torch.bfloat16
    assert lion.options.full_precision == "*norm*;*embed*"
    assert lion.options.check_replicas_every == 100
    assert {tuple(group["betas"]) for group in lion.param_groups} == {(0.8, 0.9)}
    decayed = trainer.get_decay_parameter_names(trainer.model)
    decays = {p: group["weight_decay"] for group in lion.param_groups for p in group["params"]}
    assert decays == {p: 0.1 * (n in decayed) for n, p in trainer.model.named_parameters()}
    full = {slot.name for slot in lion.params.fresh_layout().slots if slot.full_precision}
    names = [name for name, _ in trainer.model.named_parameters()]
    assert full == {name for name in names if "norm" in name or "embed" in name}


@pytest.mark.parametrize(
    ("changes", "options", "name", "value"),
    [
        # Replicas are compared about every 100 steps.
        ({"optim_args": "vote_every=16"}, {}, "check_replicas_every", 6),
        ({}, {"vote_every": 300}, "check_replicas_every", 1),
        ({"optim_args": "check_replicas_every=0"}, {}, "check_replicas_every", 0),
        # Betas are Lion's unless they were chosen.
        ({}, {}, "betas", (0.9, 0.98)),
        ({"adam_beta2": 0.95}, {}, "betas", (0.9, 0.95)),
        (
            {"adam_beta1": 0.8, "adam_beta2": 0.95, "optim_args": "beta2=0.999"},
            {},
            "betas",
            (0.8, 0.999),
        ),
    ],
)
def test_defaults_are_those_of_lion_and_of_trainer(
    tmp_path: Path, changes: dict[str, Any], options: dict[str, Any], name: str, value: Any
) -> None:
    args = tiny_args(tmp_path, **changes)
    with mock.patch.object(registration.logger, "warning_once") as told:
        assert optimizer_cls_and_kwargs(args, **options)[1][name] == value
    # Recipes of AdamW set its betas, which mean something else in Lion.
    asked = {word for word in changes if word.startswith("adam_")}
    asked -= {"adam_beta2"} if "beta2=" in changes.get("optim_args", "") else set()
    assert {call.args[0].partition("=")[0] for call in told.call_args_list} == asked


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("aggregation", "'aggregation' is not name=value"),
        ("aggregation=sum", "aggregation must be one of 'majority', 'average'"),
        ("agregation=average", "no option 'agregation', did you mean 'aggregation'?"),
        ("beta1=2", "beta1=2 must be at least 0 and below 1"),
        ("bits=x", "bits=x must be an integer"),
        ("local_group=nodes", 'local_group must be "node" or an int'),
        ("lr=1", "set TrainingArguments(learning_rate=...)"),
        ("momentum_dtype=float7", "is not a dtype"),
        ("bits=2,bits=4", "bits is set twice"),
    ],
)
def test_bad_optim_args_are_refused_at_once(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ValueError, match=r"^optim_args") as caught:
        tiny_args(tmp_path, optim_args=text)
    assert words in str(caught.value)
    args = tiny_args(tmp_path, optim="adamw_torch")
    args = args.set_optimizer(name="dlion", learning_rate=1e-3, args=text)
    with pytest.raises(ValueError, match=r"^optim_args"):
        tiny_trainer(args).train()


@pytest.mark.parametrize(
    ("optim_args", "words"),
    [
        (["bits=2"], "must be text such as 'bits=2,ties=zero', or a dict"),
        (5, "must be text such as"),
        ({"full_precision": "*norm*,*embed*"}, r"full_precision='\*norm\*,\*embed\*' must not"),
        ({"full_precision": ["a b"]}, "full_precision=.* must not contain"),
        ({"full_precision": lambda name, param: True}, "full_precision can't be a function"),
    ],
)
def test_optim_args_of_another_type_are_refused(
    tmp_path: Path, optim_args: Any, words: str
) -> None:
    with pytest.raises((TypeError, ValueError), match=f"^optim_args.*{words}"):
        tiny_args(tmp_path, optim_args=optim_args)


@pytest.mark.oldest
def test_the_class_route_trains_as_the_name_does_and_its_options_win(tmp_path: Path) -> None:
    named = trained(tiny_args(tmp_path, optim_args="bits=2"))
    args = tiny_args(tmp_path, optim="adamw_torch", optim_args="bits=4,beta2=0.5")
    chosen = optimizer_cls_and_kwargs(args, bits=2, betas=(0.9, 0.98))
    by_class = trained(args, optimizer_cls_and_kwargs=chosen)
    assert weights_digest(named.model) == weights_digest(by_class.model)
    assert "dlion/abstained" in by_class.state.log_history[0]
    for options, words in (
        ({"tie": "zero"}, "did you mean 'ties'"),
        ({"bits": 3}, "bits must be 1, 2, 4, or 8"),
        ({"weight_decay": 0.1}, r"set TrainingArguments\(weight_decay"),
    ):
        with pytest.raises(ValueError, match=words):
            optimizer_cls_and_kwargs(args, **options)


class OwnGroups(Trainer):
    """Makes groups of its own, as several training frameworks do."""

    def create_optimizer(self, model=None):
        cls, kwargs = self.get_optimizer_cls_and_kwargs(self.args, self.model)
        embedding, *others = self.model.parameters()
        self.optimizer = cls([{"params": [embedding], "lr": 0.0}, {"params": others}], **kwargs)
        return self.optimizer


class OwnOptimizer(Trainer):
    """Makes its optimizer itself."""

    def create_optimizer(self, model=None):
        self.optimizer = DistributedLion(self.model.parameters(), lr=1e-3)
        return self.optimizer


def names_after_training(args: TrainingArguments, cls: type[Trainer], **changes: Any) -> list[str]:
    """Returns the names by which ranks compare parameters; the run is logged and saved."""
    trainer = trained(args, cls, **changes)
    assert "dlion/abstained" in trainer.state.log_history[0]
    assert Path(args.output_dir, "checkpoint-4", "dlion_momentum_0_of_1.safetensors").is_file()
    return [slot.name for slot in trainer.optimizer.optimizer.params.fresh_layout().slots]


NAMES = {name for name, _ in tiny_llama().named_parameters()}


@pytest.mark.parametrize(("optim", "cls"), [("dlion", OwnGroups), ("adamw_torch", OwnOptimizer)])
def test_an_optimizer_of_a_subclass_is_named_logged_and_saved(
    tmp_path: Path, optim: str, cls: type[Trainer]
) -> None:
    args = tiny_args(tmp_path, optim=optim, save_every=4)
    assert set(names_after_training(args, cls)) == NAMES


def test_a_passed_optimizer_with_a_late_group_is_named_and_saved(tmp_path: Path) -> None:
    model = tiny_llama()
    late = model.model.norm.weight.requires_grad_(False)

    def unfreeze(optimizer: Any, lr_scheduler: Any, **_: Any) -> None:
        late.requires_grad_(True)
        optimizer.add_param_group({"params": [late], "lr": 0.01})
        lr_scheduler.base_lrs.append(0.01)
        lr_scheduler.lr_lambdas *= 2

    outside = torch.nn.Parameter(torch.ones(2))
    lion = DistributedLion([outside, *(p for p in model.parameters() if p is not late)], lr=1e-3)
    changes = {"model": model, "optimizers": (lion, None), "callbacks": [At(2, unfreeze)]}
    args = tiny_args(tmp_path, optim="adamw_torch", save_every=4)
    first, *others = names_after_training(args, Trainer, **changes)
    assert first == "group 0 parameter 0"
    assert others[-1] == "model.norm.weight"
    assert set(others) == NAMES


def test_other_optimizers_train_as_before_with_a_warning(tmp_path: Path, warned: list[str]) -> None:
    options = "momentum=0.9,bits=2"
    trainer = trained(tiny_args(tmp_path, optim="sgd", optim_args=options, save_every=4))
    assert type(trainer.optimizer.optimizer) is torch.optim.SGD
    assert not list(tmp_path.rglob("*momentum*"))
    assert "dlion/abstained" not in trainer.state.log_history[0]
    (text,) = warned
    assert "ignores bits in optim_args='momentum=0.9,bits=2'. To use DistributedLion, set" in text
    args = tiny_args(tmp_path, optim="adamw_torch", optim_args={"any": "a,b"})
    assert args.optim_args == {"any": "a,b"}


def test_one_process_warns_that_it_exchanges_nothing(tmp_path: Path, warned: list[str]) -> None:
    tiny_trainer(tiny_args(tmp_path)).train()
    assert [text.partition(". ")[0] for text in warned] == [
        "DistributedLion exchanges nothing between nodes and is plain Lion, because one process "
        "trains alone"
    ]


@pytest.mark.parametrize(
    ("rate", "optim", "cls", "count"),
    [
        (5e-5, "dlion", Trainer, 1),
        (5e-5, "dlion", OwnOptimizer, 0),  # It has another rate.
        (5e-5, "sgd", Trainer, 0),
        (2e-5, "dlion", Trainer, 0),
    ],
)
def test_the_default_learning_rate_warns_with_where_to_start(
    tmp_path: Path, warned: list[str], rate: float, optim: str, cls: type[Trainer], count: int
) -> None:
    tiny_trainer(tiny_args(tmp_path, optim=optim, learning_rate=rate, max_steps=1), cls).train()
    hints = [text for text in warned if "learning_rate=5e-5 is Trainer's default" in text]
    assert ["start with a third of your AdamW" in text for text in hints] == [True] * count


def test_true_resumes_from_the_newest_checkpoint_that_a_save_completed(tmp_path: Path) -> None:
    args = tiny_args(tmp_path, max_steps=15, save_every=5)
    uninterrupted = tiny_trainer(args)
    with pytest.raises(ValueError, match="no complete checkpoint"):
        uninterrupted.train(resume_from_checkpoint=True)
    uninterrupted.train()
    (tmp_path / "checkpoint-15" / "trainer_state.json").unlink()
    taken: list[int] = []
    counts = [At(step, lambda step=step, **_: taken.append(step)) for step in (10, 11, 15)]
    resumed = trained(args, resume=True, callbacks=counts)
    assert weights_digest(resumed.model) == weights_digest(uninterrupted.model)
    assert taken == [11, 15]


@pytest.mark.parametrize(
    ("owner", "name", "value", "words"),
    [
        (lambda trainer: trainer, "is_fsdp_enabled", True, "FSDP"),
        (lambda trainer: trainer.args, "fsdp", "full_shard", "FSDP"),
        (lambda trainer: trainer, "is_distributed_loading_by_transformers", True, "sharded while"),
        (lambda trainer: type(trainer.model), "tp_size", 2, "tensor parallelism"),
        (lambda trainer: trainer.args, "_n_gpu", 2, "one process that drives 2 GPUs"),
    ],
)
def test_a_trainer_whose_ranks_have_no_gradients_of_their_own_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, value: Any, words: str
) -> None:
    trainer = tiny_trainer(tiny_args(tmp_path))
    monkeypatch.setattr(owner(trainer), name, value, raising=False)
    with pytest.raises(NotImplementedError, match=f"doesn't work with.*{words}"):
        trainer.train()


def test_ranks_unknown_to_the_arguments_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for cls in (Trainer, OwnOptimizer):
        trainer = tiny_trainer(tiny_args(tmp_path), cls)
        # As under torchrun without use_cpu on a machine without GPUs.
        monkeypatch.setenv("WORLD_SIZE", "2")
        words = r"2 processes were started, .* of 1 .*use_cpu=True\) or Accelerator\(cpu=True\)"
        with pytest.raises(RuntimeError, match=words):
            trainer.train()
        monkeypatch.delenv("WORLD_SIZE")


def test_a_search_over_arguments_that_were_already_read_is_refused(tmp_path: Path) -> None:
    args = tiny_args(tmp_path)
    trainer = tiny_trainer(args, optimizer_cls_and_kwargs=optimizer_cls_and_kwargs(args))
    trainer.hp_search_backend = "optuna"  # As in `hyperparameter_search`.
    with pytest.raises(ValueError, match="which optimizer_cls_and_kwargs has already read"):
        trainer.train()


@pytest.mark.parametrize("optim", ["dlion", "adamw_torch"])
def test_a_trainer_is_freed_when_it_is_deleted(tmp_path: Path, optim: str) -> None:
    gc.collect()
    gc.disable()
    try:
        trainer = trained(tiny_args(tmp_path, optim=optim, max_steps=1))
        model = weakref.ref(trainer.model)
        del trainer
        assert model() is None
    finally:
        gc.enable()


def test_what_is_set_in_a_trainer_while_it_trains_stays(tmp_path: Path) -> None:
    """A method, and a list of callbacks, in which ours isn't left behind."""

    class Setter(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            handler = trainer.callback_handler
            handler.callbacks = list(handler.callbacks)
            trainer.save_model = own

    def own(*_: Any, **__: Any) -> None:
        pass

    trainer = tiny_trainer(tiny_args(tmp_path), callbacks=[Setter()])
    before = [type(callback) for callback in trainer.callback_handler.callbacks]
    trainer.train()
    assert [type(callback) for callback in trainer.callback_handler.callbacks] == before
    assert vars(trainer)["save_model"] is own
    assert "predict" not in vars(trainer)


@pytest.mark.parametrize("name", ["_save_rng_state", "_load_scaler"])
def test_a_transformers_without_a_wrapped_method_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.delattr(Trainer, patches._INSTALLED)
    monkeypatch.delattr(Trainer, name)
    with pytest.raises(RuntimeError, match=rf"Trainer.{name}.*{transformers.__version__}"):
        patches.install()


def test_a_transformers_without_handlers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers.trainer_optimizer", None)
    with pytest.raises(RuntimeError, match="_OPTIMIZER_HANDLERS"):
        hf_dlion.register()


def test_axolotls_plugin_registers_when_it_is_loaded() -> None:
    base = types.SimpleNamespace(BasePlugin=object)
    axolotl = dict.fromkeys(("axolotl", "axolotl.integrations", "axolotl.integrations.base"), base)
    registers = mock.patch("hf_dlion.trainer.registration.register")
    with mock.patch.dict(sys.modules, axolotl), registers as register:
        module = importlib.import_module("hf_dlion.trainer.axolotl")
        module.DistributedLionPlugin().register({"optimizer": "dlion"})
    register.assert_called_once_with()
