"""Trainer and its relatives on two ranks: the ways in which people use it."""

from __future__ import annotations

import math
import os
import warnings
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer, TrainerCallback, set_seed

import hf_dlion
from hf_dlion.trainer import optimizer_cls_and_kwargs
from tests.support.spawn import RankPools
from tests.support.tiny import (
    VOCABULARY,
    tiny_args,
    tiny_data,
    tiny_llama,
    tiny_trainer,
    weights_digest,
)

pytestmark = pytest.mark.multiproc


def outcome(trainer):
    """Returns what the tests look at: weights, entries with a loss, the optimizer's wire."""
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]
    return weights_digest(trainer.model), entries, trainer.optimizer.optimizer.wire


def train(rank, world_size, folder, changes):
    hf_dlion.register()
    trainer = tiny_trainer(tiny_args(folder, **changes))
    trainer.train()
    return outcome(trainer)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"ddp_find_unused_parameters": True},
        {"gradient_accumulation_steps": 3},
        {"max_grad_norm": 0.0},
        {"max_grad_norm": 0.01},
        {"gradient_checkpointing": True},
        {"bf16": True},
        {"ddp_static_graph": True},
        {"torch_compile": True, "torch_compile_backend": "eager"},
        {"optim_args": "exchange=two_phase,aggregation=average"},
        {"optim_args": "exchange=gather,ties=zero,momentum_dtype=bfloat16"},
        {"lr_scheduler_type": "cosine", "warmup_steps": 2},
    ],
    ids=lambda changes: ",".join(map(str, changes.values())) or "plain",
)
def test_replicas_stay_equal(ranks: RankPools, tmp_path, changes):
    (left, entries, wire), (right, _, _) = ranks(2).run(train, str(tmp_path), changes)
    assert left == right
    assert wire.exchanges >= 4
    assert len(entries) == 4


def test_the_log_says_what_the_wire_says(ranks, tmp_path):
    for _, entries, wire in ranks(2).run(train, str(tmp_path), {"logging_steps": 2}):
        assert len(entries) == 2
        sent = sum(2 * entry["dlion/wire_mb_per_step"] for entry in entries)
        assert math.isclose(sent * 1e6, wire.bytes_sent)
        for part in ("encode", "exchange", "apply"):
            spent = sum(2 * entry[f"dlion/{part}_ms"] for entry in entries)
            assert math.isclose(spent, 1e3 * getattr(wire, f"{part}_s"))
        # One bit per parameter, rows' activity and a header: far below the 16 of a bf16 gradient.
        parameters = sum(p.numel() for p in tiny_llama().parameters())
        assert parameters / 8 < wire.last_bytes_sent < parameters
        for entry in entries:
            assert 0.0 < entry["dlion/agreement"] <= 1.0
            assert entry["dlion/abstained"] == 0.0


def train_in_phases(rank, world_size, folder):
    hf_dlion.register()
    trainer = tiny_trainer(tiny_args(folder, max_steps=2))
    trainer.train()
    lion = trainer.optimizer.optimizer
    model, alive, digests = trainer.model, [trainer], []
    alive.append(tiny_trainer(tiny_args(folder, max_steps=2, optim="adamw_torch"), model=model))
    alive[-1].train()
    digests.append(weights_digest(model))
    sent = lion.wire.bytes_sent
    trainer.train()
    digests.append(weights_digest(model))
    return digests, sent, trainer.optimizer.optimizer.wire.last_bytes_sent


def test_trainers_with_other_optimizers_take_turns_on_one_model(ranks, tmp_path):
    left, right = ranks(2).run(train_in_phases, str(tmp_path))
    assert left[0] == right[0]
    assert left[0][0] != left[0][1]
    assert left[2] > 0


CLOSER = (
    "full_precision=*norm*,warmup_full_steps=1,momentum_sync_every=2,momentum_sync=auto,"
    "momentum_sync_budget=500"
)


def test_the_log_says_where_momenta_differ(ranks, tmp_path):
    (left, entries, _), (right, others, _) = ranks(2).run(
        train, str(tmp_path), {"optim_args": CLOSER}
    )
    assert left == right
    # Nothing is voted on in the warm-up, and what is in full precision does not differ.
    prefix = "dlion/momentum_divergence/"
    assert not any(key.startswith(prefix) for key in entries[0])
    for entry, other in zip(entries[1:], others[1:], strict=True):
        found = {key: value for key, value in entry.items() if key.startswith(prefix)}
        assert found == {key: other[key] for key in found}
        assert prefix + "model.layers.*.mlp.up_proj.weight" in found
        assert not any("norm" in key for key in found)
        assert 0.0 < found[prefix + "mean"] <= found[prefix + "max"] < 1.0


class PoisonRankOne(TrainerCallback):
    """Puts a NaN into the gradient of rank 1 in three steps, and of rank 0 in another one."""

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        if state.global_step in {1: (3, 4, 5), 0: (1,)}[dist.get_rank()]:
            next(model.parameters()).grad.view(-1)[0] = math.nan


def train_with_a_nan(rank, world_size, folder):
    hf_dlion.register()
    args = tiny_args(folder, max_steps=8, logging_steps=2)
    trainer = tiny_trainer(args, callbacks=[PoisonRankOne()])
    trainer.train()
    return outcome(trainer)


def test_the_log_names_the_rank_that_abstained(ranks, tmp_path):
    (left, entries, _), (right, others, _) = ranks(2).run(train_with_a_nan, str(tmp_path))
    assert left == right
    for seen in (entries, others):
        figures = [
            [entry.get(f"dlion/abstained{name}") for name in ("", "_rank", "_in_a_row")]
            for entry in seen
        ]
        # Rank 0 in step 2 of the first entry; rank 1 from step 2 of the second one on.
        assert figures == [[1.0, 0.0, 1.0], [1.0, 1.0, 1.0], [2.0, 1.0, 3.0], [0.0, None, None]]


def train_for_tensorboard(rank, world_size, folder):
    # Here, because the ranks may have been started before this test, without its environment.
    with mock.patch.dict(os.environ, TENSORBOARD_LOGGING_DIR=os.path.join(folder, "board")):
        return trained_for_tensorboard(folder)


def trained_for_tensorboard(folder):
    hf_dlion.register()
    args = tiny_args(
        folder, max_steps=8, logging_steps=2, report_to="tensorboard", optim_args=CLOSER
    )
    trainer = tiny_trainer(args, callbacks=[PoisonRankOne()])
    trainer.train()
    return outcome(trainer)


def test_tensorboard_has_every_figure_of_the_log(ranks, tmp_path):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    (_, entries, _), _ = ranks(2).run(train_for_tensorboard, str(tmp_path))
    board = events.EventAccumulator(str(tmp_path / "board")).Reload()
    found = {
        tag.removeprefix("train/"): [(event.step, event.value) for event in board.Scalars(tag)]
        for tag in board.Tags()["scalars"]
        if tag.startswith("train/dlion/")
    }
    logged: dict[str, list[tuple[int, float]]] = {}
    for entry in entries:
        for name in entry:
            if name.startswith("dlion/"):
                logged.setdefault(name, []).append((entry["step"], pytest.approx(entry[name])))
    assert found == logged
    assert {name for name in found if "divergence" not in name} == {
        *("dlion/wire_mb_per_step", "dlion/agreement"),
        *("dlion/encode_ms", "dlion/exchange_ms", "dlion/apply_ms"),
        *("dlion/abstained", "dlion/abstained_rank", "dlion/abstained_in_a_row"),
    }
    assert {"dlion/momentum_divergence/mean", "dlion/momentum_divergence/max"} <= found.keys()


class NormsOfRank(TrainerCallback):
    """Notes this rank's own norms, and stops where the one that is logged is not finite."""

    def __init__(self):
        self.norms = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        self.norms.append(float(torch.nn.utils.get_total_norm(grads)))

    def on_log(self, args, state, control, logs=None, **kwargs):
        if not math.isfinite(logs.get("grad_norm", 0.0)):
            control.should_training_stop = True


class NaNLoss(Trainer):
    """Has a loss of NaN on rank 1 in the third step."""

    def compute_loss(self, *args, **kwargs):
        loss = super().compute_loss(*args, **kwargs)
        bad = dist.get_rank() == 1 and self.state.global_step == 2
        return loss * math.nan if bad else loss


def train_with_norms(rank, world_size, folder, cls):
    hf_dlion.register()
    callback = NormsOfRank()
    # Too high to clip anything.
    args = tiny_args(folder, max_steps=5, max_grad_norm=1e6)
    trainer = tiny_trainer(args, cls, callbacks=[callback])
    trainer.train()
    return callback.norms, [entry["grad_norm"] for entry in outcome(trainer)[1]]


def test_the_norm_in_the_log_is_that_of_all_ranks(ranks, tmp_path):
    (left, logged), (right, others) = ranks(2).run(train_with_norms, str(tmp_path), Trainer)
    assert left != right
    assert logged == others
    assert logged == pytest.approx(
        [math.sqrt((a * a + b * b) / 2) for a, b in zip(left, right, strict=True)]
    )


def test_stopping_at_a_norm_ends_all_ranks(ranks, tmp_path):
    results = ranks(2).run(train_with_norms, str(tmp_path), NaNLoss, timeout=40)
    assert [len(logged) for _, logged in results] == [3, 3]


def train_by_factory(rank, world_size, folder):
    args = tiny_args(folder, optim="adamw_torch", save_strategy="steps", save_steps=2)
    chosen = optimizer_cls_and_kwargs(args, ties="zero")
    first = tiny_trainer(args, optimizer_cls_and_kwargs=chosen)
    first.train()
    second = tiny_trainer(args, optimizer_cls_and_kwargs=chosen)
    second.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
    return outcome(first), outcome(second)


@pytest.mark.smoke
def test_the_factory_trains_logs_saves_and_resumes(ranks, tmp_path):
    results = ranks(2).run(train_by_factory, str(tmp_path))
    for (first, entries, _), (second, _, _) in results:
        assert first == second == results[0][0][0]
        assert "dlion/agreement" in entries[0]


def evaluate_first(rank, world_size, folder, first):
    hf_dlion.register()
    trainer = tiny_trainer(tiny_args(folder), eval_dataset=tiny_data(8))
    if first:
        trainer.evaluate()
    # The evaluation drew random numbers.
    set_seed(0)
    trainer.train()
    wrapped = isinstance(trainer.model_wrapped, DistributedDataParallel)
    return outcome(trainer), wrapped


def test_evaluation_before_training_leaves_no_ddp_and_trains_alike(ranks, tmp_path):
    results = ranks(2).run(evaluate_first, str(tmp_path), True)
    plain = ranks(2).run(evaluate_first, str(tmp_path), False)
    for (digest, _, wire), wrapped in results:
        assert not wrapped
        assert wire.exchanges > 0
        assert digest == plain[0][0][0]
    assert all(wrapped for _, wrapped in plain)


def train_twice(rank, world_size, folder):
    hf_dlion.register()
    trainer = tiny_trainer(tiny_args(folder))
    trainer.train()
    first, _, wire = outcome(trainer)
    sent = wire.bytes_sent
    trainer.train()
    second, entries, wire = outcome(trainer)
    return first, second, sent, wire.bytes_sent, entries


def test_a_second_training_goes_on(ranks, tmp_path):
    results = ranks(2).run(train_twice, str(tmp_path))
    for first, second, sent, sent_after, entries in results:
        assert first != second
        assert second == results[0][1]
        assert sent_after > sent
        # The log counts from the beginning of its own training.
        logged = sum(entry["dlion/wire_mb_per_step"] for entry in entries) * 1e6
        assert math.isclose(logged, sent_after - sent)


class OutOfMemoryOnce(Trainer):
    """Fails on its first step as a GPU does that is too small for the batch."""

    failed = False

    def training_step(self, *args, **kwargs):
        if not self.failed and self.state.global_step == 1:
            self.failed = True
            raise RuntimeError("CUDA out of memory. Tried to allocate 8 GiB")
        return super().training_step(*args, **kwargs)


def find_batch_size(rank, world_size, folder):
    hf_dlion.register()
    trainer = tiny_trainer(tiny_args(folder, auto_find_batch_size=True), OutOfMemoryOnce)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.train()
    averaged = [str(w.message) for w in caught if "averaged" in str(w.message)]
    hooked = bool(trainer.model_wrapped._comm_hooks)
    return outcome(trainer), hooked, averaged, trainer._train_batch_size


def test_a_new_ddp_around_the_model_is_found(ranks, tmp_path):
    results = ranks(2).run(find_batch_size, str(tmp_path))
    for (digest, _, wire), hooked, averaged, batch_size in results:
        assert digest == results[0][0][0]
        assert hooked
        assert not averaged
        assert wire.exchanges > 0
        assert batch_size < 4


def bad_options(rank, world_size, folder, text):
    hf_dlion.register()
    with pytest.raises(ValueError, match="optim_args"):
        tiny_args(folder, optim_args=text)


@pytest.mark.parametrize("text", ["ties", "ties=coin", "tie=zero", "seed=x"])
def test_bad_options_are_refused_on_every_rank(ranks, tmp_path, text):
    ranks(2).run(bad_options, str(tmp_path), text)


def different_options(rank, world_size, folder):
    hf_dlion.register()
    trainer = tiny_trainer(tiny_args(folder, optim_args=f"seed={rank}"))
    with pytest.raises(hf_dlion.Disagreement, match="seed"):
        trainer.train()


def test_options_that_differ_between_ranks_are_refused_on_both(ranks, tmp_path):
    ranks(2).run(different_options, str(tmp_path))


def lora(rank, world_size, folder):
    hf_dlion.register()
    config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    args = tiny_args(folder, save_strategy="steps", save_steps=2, label_names=["labels"])
    ends = []
    for resume in (None, f"{folder}/checkpoint-2"):
        trainer = tiny_trainer(args, model=get_peft_model(tiny_llama(), config))
        start = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
        trainer.train(resume_from_checkpoint=resume)
        ends.append(outcome(trainer))
    moved = {
        n.rsplit(".", 3)[1] for n, p in trainer.model.named_parameters() if (p != start[n]).any()
    }
    return ends, moved


def test_a_peft_model_trains_saves_and_resumes(ranks, tmp_path):
    results = ranks(2).run(lora, str(tmp_path))
    for ((whole, entries, wire), (resumed, _, _)), moved in results:
        assert whole == resumed == results[0][0][0][0]
        assert moved == {"lora_A", "lora_B"}
        assert "dlion/agreement" in entries[0]
        # Only the adapter's bits travel.
        assert wire.last_bytes_sent < 200


def supervised(rank, world_size, folder):
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    hf_dlion.register()
    words = {f"w{i}": i for i in range(VOCABULARY - 2)} | {"<eos>": 62, "<pad>": 63}
    inner = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<eos>", pad_token="<pad>", model_max_length=32
    )
    texts = [{"text": " ".join(f"w{(i * 7 + k) % 60}" for k in range(10))} for i in range(48)]
    plain = tiny_args(folder, save_strategy="steps", save_steps=2).to_dict()
    names = [
        "output_dir", "optim", "learning_rate", "weight_decay", "per_device_train_batch_size",
        "max_steps", "logging_steps", "save_strategy", "save_steps", "report_to", "disable_tqdm",
        "use_cpu", "ddp_find_unused_parameters",
    ]  # fmt: skip
    args = SFTConfig(**{name: plain[name] for name in names}, max_length=16, bf16=False)
    ends = []
    for resume in (None, f"{folder}/checkpoint-2"):
        trainer = SFTTrainer(
            model=tiny_llama(attention_dropout=0.0),
            args=args,
            train_dataset=Dataset.from_list(texts),
            processing_class=tokenizer,
        )
        trainer.train(resume_from_checkpoint=resume)
        ends.append(outcome(trainer))
    return ends


def test_trls_sft_trainer_trains_saves_and_resumes(ranks, tmp_path):
    results = ranks(2).run(supervised, str(tmp_path), timeout=120)
    for (whole, entries, wire), (resumed, _, _) in results:
        assert whole == resumed == results[0][0][0]
        assert "dlion/agreement" in entries[0]
        assert "mean_token_accuracy" in entries[0]
        assert wire.exchanges > 0


def sharded(rank, world_size, folder):
    hf_dlion.register()
    trainer = tiny_trainer(tiny_args(folder, fsdp="full_shard", ddp_find_unused_parameters=None))
    with pytest.raises(NotImplementedError, match="does not work with FSDP"):
        trainer.train()


def test_fsdp_is_refused_on_every_rank(ranks, tmp_path):
    ranks(2).run(sharded, str(tmp_path))


def different_weights(rank, world_size, folder):
    """Evaluates first, so that no DDP makes the models equal."""
    hf_dlion.register()
    model = tiny_llama()
    torch.nn.init.constant_(model.lm_head.weight, float(rank))
    trainer = tiny_trainer(tiny_args(folder), model=model, eval_dataset=tiny_data(8))
    trainer.evaluate()
    with pytest.raises(hf_dlion.Disagreement, match="lm_head"):
        trainer.train()


def test_models_that_differ_are_refused_by_name(ranks, tmp_path):
    ranks(2).run(different_weights, str(tmp_path))
