"""What `optim_args` accepts, and what it says otherwise."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from hf_dlion.options import Options
from hf_dlion.options.optim_args import parse_optim_args
from tests.support.option_cases import EXAMPLES, NEEDS, needed


@pytest.mark.parametrize("field", dataclasses.fields(Options), ids=lambda field: field.name)
def test_every_option_is_reachable(field):
    value = EXAMPLES[field.name][1]
    names = [field.name, *needed(field.name)]
    parsed = parse_optim_args(",".join(f"{name}={EXAMPLES[name][0]}" for name in names))
    assert parsed == {field.name: value, **needed(field.name)}
    assert type(parsed[field.name]) is type(value)


@pytest.mark.parametrize("name", [*NEEDS, "ties"])
def test_an_option_without_effect_is_refused(name):
    idle = f"{name}={EXAMPLES[name][0]}" + (",aggregation=average" if name == "ties" else "")
    with pytest.raises(ValueError, match=f"^optim_args='{idle}': {name}=.* would have no effect"):
        parse_optim_args(idle)
    # All that it needs but one.
    for missing in needed(name):
        options = {k: v for k, v in needed(name).items() if k != missing}
        with pytest.raises(ValueError, match="would have no effect"):
            Options(**options, **{name: EXAMPLES[name][1]})


def test_the_default_of_an_option_without_effect_may_be_written_out():
    given = dataclasses.asdict(Options())
    Options(**(given | {"aggregation": "average"}))


@pytest.mark.parametrize("text", [None, "", " "])
def test_nothing_asks_for_nothing(text):
    assert parse_optim_args(text) == {}


def test_options_are_separated_by_commas_and_spaces_do_not_count():
    assert parse_optim_args("seed = 3, ties=zero") == {"seed": 3, "ties": "zero"}


@pytest.mark.parametrize("text", ["beta1=0.8,beta2=0.98", "betas=0.8;0.98"])
def test_betas_come_one_by_one_or_as_a_list(text):
    assert parse_optim_args(text) == {"beta1": 0.8, "beta2": 0.98}


@pytest.mark.parametrize("text", ["momentum_dtype=none", "momentum_dtype=None"])
def test_none_is_a_value_where_the_option_has_it(text):
    assert parse_optim_args(text) == {"momentum_dtype": None}


@pytest.mark.parametrize("text", ["momentum_dtype=float32", "momentum_dtype=torch.float32"])
def test_dtypes_have_torch_names(text):
    assert parse_optim_args(text) == {"momentum_dtype": torch.float32}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("fp32", torch.float32), ("bf16", torch.bfloat16), ("FP16", torch.float16)],
)
def test_dtypes_have_the_names_of_trainers_flags_too(name, dtype):
    assert parse_optim_args(f"momentum_dtype={name}") == {"momentum_dtype": dtype}


@pytest.mark.parametrize(
    ("text", "value"), [("true", True), ("True", True), ("1", True), ("no", False), ("off", False)]
)
def test_booleans_are_written_as_usual(text, value):
    assert parse_optim_args(f"stochastic_rounding={text}") == {"stochastic_rounding": value}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        # How an item looks.
        ("aggregation", ["'aggregation'", "option=value"]),
        ("aggregation:average", ["'aggregation:average'", "option=value"]),
        ("seed=1,", ["''", "option=value"]),
        ("seed=", ["'seed='", "option=value"]),
        ("seed=1=2", ["'seed=1=2'", "option=value"]),
        ("seed=1,seed=2", ["seed", "twice"]),
        ("beta1=0.9,betas=0.9;0.99", ["beta1", "twice"]),
        # What is no option, and what was probably meant.
        ("agregation=average", ["'agregation'", "did you mean 'aggregation'"]),
        ("beta_2=0.9", ["'beta_2'", "did you mean 'beta2'"]),
        ("stochastic=true", ["did you mean 'stochastic_rounding'"]),
        ("lr=1e-3", ["lr", "TrainingArguments(learning_rate=...)"]),
        ("weight_decay=0.1", ["weight_decay", "TrainingArguments(weight_decay=...)"]),
        ("process_group=x", ["process_group", "optimizers="]),
        ("eps=1e-8", ["eps", "no epsilon"]),
        # Values: the option, what it got, what is allowed.
        ("aggregation=mean", ["aggregation='mean'", "majority, average"]),
        ("ties=coin", ["ties='coin'", "alternate, zero"]),
        ("bits=3", ["bits=3", "1, 2, 4, 8"]),
        ("bits=4,aggregation=average", ["aggregation='average'", "bits=4"]),
        ("exchange=ring", ["exchange='ring'", "auto, gather, two_phase"]),
        ("checkpoint=all", ["checkpoint='all'", "per_rank, mean"]),
        ("stochastic_rounding=maybe", ["stochastic_rounding=maybe", "true or false"]),
        ("momentum_dtype=half_float", ["momentum_dtype=half_float", "bf16 (bfloat16)"]),
        ("momentum_dtype=int8", ["momentum_dtype=torch.int8", "bfloat16"]),
        ("seed=one", ["seed=one", "integer"]),
        ("seed=-1", ["seed=-1", "between 0"]),
        ("check_replicas_every=-1", ["check_replicas_every=-1", "between 0"]),
        ("on_divergence=mend", ["on_divergence='mend'", "raise, repair"]),
        ("max_abstained_steps=0", ["max_abstained_steps=0", "between 1"]),
        ("momentum_sync_every=-1", ["momentum_sync_every=-1", "between 0"]),
        ("momentum_sync=a;;b", ["momentum_sync='a;;b'", "empty pattern"]),
        ("momentum_sync_dtype=float16", ["momentum_sync_dtype=torch.float16", "torch.bfloat16"]),
        ("full_precision=;", ["full_precision=';'", "empty pattern"]),
        ("warmup_full_steps=few", ["warmup_full_steps=few", "integer"]),
        ("beta1=high", ["beta1=high", "number"]),
        ("beta2=1", ["beta2=1", "below 1"]),
        ("beta2=nan", ["beta2=nan", "below 1"]),
        ("betas=0.9", ["betas=0.9", "two numbers"]),
    ],
)
def test_a_bad_text_is_refused_with_what_is_allowed(text, words):
    # hf_dlion.launch knows these errors by their first word.
    with pytest.raises(ValueError, match=r"^optim_args") as caught:
        parse_optim_args(text)
    for word in words:
        assert word in str(caught.value)


def test_options_that_do_not_go_together_yet_are_said_to_come_from_here():
    with pytest.raises(NotImplementedError, match=r"optim_args=.*level_scale='tensor' with"):
        parse_optim_args("bits=4,level_scale=tensor,local_group=node")
