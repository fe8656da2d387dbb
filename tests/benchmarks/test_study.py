"""The study: one process equals real ranks, finished runs stay, the best learning rate is taken."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hf_dlion.tools.plan.cost import TCP_EFFICIENCY
from torch import Tensor, nn

from benchmarks.convergence.cli import main
from benchmarks.convergence.methods import (
    METHODS,
    SIMULATED,
    Method,
    RealRank,
    recipe,
    sgd,
    trainable,
)
from benchmarks.convergence.report import Clock
from benchmarks.convergence.results import Records, Result, Trial, best, cells, missing, results
from benchmarks.convergence.scenes import Scene, UnknownNameError, scene_class
from benchmarks.convergence.setting import Setting
from benchmarks.convergence.text import FineTuning, LowRank, Pretraining
from benchmarks.convergence.train import run_real, simulate, train
from tests.support.spawn import RankPools
from tests.support.tiny_study import TINY

VOTING = [name for name, made in METHODS.items() if made.options is not None]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """As real ranks have it: the sums of a matrix product depend on the number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def outcome(setting: Setting, scene: Scene, method: Method) -> tuple[dict[str, Any], list[Tensor]]:
    record = train(setting, scene, method)
    values = [param.detach().clone() for param in trainable(method.places[0][1])]
    return record, values


def of_rank(rank: int, world_size: int, settings: list[Setting]) -> list[Any]:
    found = []
    for setting in settings:
        scene = scene_class(setting.scene)(setting)
        found.append(outcome(setting, scene, RealRank(scene, setting)))
    return found


@pytest.mark.multiproc
@pytest.mark.parametrize("workers", [2, pytest.param(3, marks=pytest.mark.long)])
def test_the_simulation_is_real_ranks_bit_for_bit(ranks: RankPools, workers: int):
    names = ["adamw", *VOTING]
    settings = [TINY.replace(method=name, workers=workers) for name in names]
    settings += [settings[0].replace(lr_factors=(("*embed*", 3.0), ("*norm*", 0.5)), warmup=0.5)]
    real = ranks(workers).run(of_rank, settings)[0]
    scene = Pretraining(TINY)
    for setting, (of_real, expected) in zip(settings, real, strict=True):
        method = recipe(setting.method).workers(scene, setting)
        record, values = outcome(setting, scene, method)
        method.close()
        assert all(map(torch.equal, values, expected)), setting.method
        assert record["loss"] == of_real["loss"]
        for key in ("bytes_per_step", "rounds_per_step"):
            assert record[key] == of_real[key] > 0, (setting.method, key)


@pytest.mark.long
@pytest.mark.multiproc
@pytest.mark.slow
def test_real_ranks_by_flag_make_the_same_record():
    real = run_real(TINY.replace(steps=3, real=True))
    assert real["loss"] == simulate(TINY.replace(steps=3))["loss"]
    assert real["setting"]["real"]


@pytest.mark.full
def test_a_smoke_study_goes_from_the_command_line_to_pictures(tmp_path: Path, capsys: Any):
    words = ["--scale", "smoke", "--steps", "3", "--seeds", "2", "--out", str(tmp_path), "--plot"]
    words += ["--lr-adamw", "1e-3", "--lr-lion", "1e-3", "3e-3", "--workers", "2", "3"]
    assert main(words) == 0
    lines = (tmp_path / "runs.jsonl").read_text().splitlines()
    assert len(lines) == 16
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert {entry["setting"]["method"] for entry in summary} == {"adamw", "lion", "majority"}
    assert all(set(entry["loss"]) == {"0", "1"} for entry in summary)
    pictures = {path.name for path in tmp_path.glob("*.png")}
    assert {
        "curves-pretrain-2x2.png",
        "bits-pretrain-3x2.png",
        "workers-pretrain-2.png",
    } <= pictures
    told = capsys.readouterr().out
    assert "16 runs made" in told
    assert "gap to lion" in told

    assert main(words) == 0
    assert "0 runs made" in capsys.readouterr().out
    assert main([*words, "--report"]) == 0
    assert "gap to lion" in capsys.readouterr().out
    assert (tmp_path / "runs.jsonl").read_text().splitlines() == lines


@pytest.mark.full
# peft asks transformers by an old name.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_fine_tuning_keeps_its_base_and_lora_trains_its_factors_alone(tmp_path: Path):
    words = ["--scale", "smoke", "--steps", "2", "--seeds", "1", "--out", str(tmp_path)]
    words += ["--scenes", "finetune", "lora", "--methods", "majority", "--lr-lion", "1e-3"]
    assert main(words) == 0
    (base,) = tmp_path.glob("base-*.pt")
    made = base.stat().st_mtime_ns
    full, factors = Records(tmp_path / "runs.jsonl").all()
    assert factors["parameters"] < full["parameters"] / 2
    setting = Setting.of(factors["setting"]).replace(folder=str(tmp_path))
    model = LowRank(setting).model(0)
    assert factors["curve"][0] == full["curve"][0]
    assert all("lora" in name for name, p in model.named_parameters() if p.requires_grad)
    assert base.stat().st_mtime_ns == made


@pytest.mark.full
def test_a_folder_has_a_base_of_its_own(tmp_path: Path):
    words = ["--scale", "smoke", "--steps", "1", "--seeds", "1", "--scenes", "finetune"]
    words += ["--methods", "lion", "--lr-lion", "1e-3"]
    one, two = tmp_path / "one", tmp_path / "two"
    assert main([*words, "--out", str(one)]) == 0
    (base,) = one.glob("base-*.pt")
    two.mkdir()
    torch.save({name: 0 * value for name, value in torch.load(base).items()}, two / base.name)
    assert main([*words, "--out", str(two)]) == 0
    (first,), (second,) = (Records(folder / "runs.jsonl").all() for folder in (one, two))
    assert second["curve"][0][1] == pytest.approx(math.log(256))
    assert first["curve"][0][1] != second["curve"][0][1]


def test_a_base_is_what_its_file_s_name_says(tmp_path: Path):
    """And not what the run that happened to make it does besides."""
    made = []
    for number, changes in enumerate(({}, {"warmup": 0.9, "schedule": "linear", "lr": 1.0})):
        setting = TINY.replace(scene="finetune", base_steps=3, **changes)
        FineTuning(setting).prepare(tmp_path / str(number))
        (path,) = (tmp_path / str(number)).iterdir()
        made.append((path.name, torch.load(path)))
    (name, base), (other_name, other) = made
    assert name == other_name
    assert all(torch.equal(value, other[key]) for key, value in base.items())


def test_a_line_that_a_crash_cut_short_is_made_again(tmp_path: Path):
    path = tmp_path / "runs.jsonl"
    first, second = TINY, TINY.replace(seed=4)
    records = Records(path)
    for setting in (first, second):
        records.add({"key": setting.key, "setting": setting.identity(), "loss": 1.0})
    path.write_bytes(path.read_bytes()[:-20])
    again = Records(path)
    assert again.of(first) is not None
    assert again.of(second) is None
    again.add({"key": second.key, "setting": second.identity(), "loss": 2.0})
    assert [record["loss"] for record in Records(path).all()] == [1.0, 2.0]


def test_a_runs_identity_is_all_but_its_folder():
    assert TINY.replace(folder="/elsewhere").key == TINY.key
    others = [TINY.replace(lr=1.0), TINY.replace(real=True), TINY.replace(betas=(0.9, 0.9))]
    assert len({TINY.key, *(other.key for other in others)}) == 4
    assert Setting.of(json.loads(json.dumps(TINY.identity()))) == TINY
    clipped = TINY.replace(clip=1.0)
    assert clipped.key != TINY.key
    assert Setting.of(json.loads(json.dumps(clipped.identity()))) == clipped
    assert not {"clip", "warmup", "lr_factors"} & set(TINY.identity())
    scaled = TINY.replace(warmup=0.1, lr_factors=(("*embed*", 3.0), ("*", 0.5)))
    assert scaled.key != TINY.replace(warmup=0.1).key != TINY.key
    assert Setting.of(json.loads(json.dumps(scaled.identity()))) == scaled


@pytest.mark.parametrize("method", ["adamw", "lion", "majority"])
def test_learning_rates_are_multiplied_by_the_factor_of_the_first_pattern(method: str):
    lr, factors = 2.0**-12, (("*embed*", 4.0), ("*norm*", 0.5), ("*layers*norm*", 9.0))
    setting = TINY.replace(
        method=method, lr=lr, steps=1, schedule="constant", weight_decay=0.0, lr_factors=factors
    )
    scene = Pretraining(setting)
    made = recipe(method).workers(scene, setting)
    train(setting, scene, made)
    moved = {
        name: float((param - old).detach().abs().max()) / lr
        for (name, param), old in zip(
            made.places[0][1].named_parameters(),
            scene.model(setting.seed).parameters(),
            strict=True,
        )
    }
    made.close()
    for name, most in moved.items():
        factor = 4.0 if "embed" in name else 0.5 if "norm" in name else 1.0
        assert most == pytest.approx(factor, rel=1e-3), name


def test_factors_that_would_do_nothing_are_refused(tmp_path: Path, capsys: Any):
    words = ["--scale", "smoke", "--out", str(tmp_path), "--lr-factors"]
    assert main([*words, "*head*=3"]) == 2
    assert "no parameter has a name like *head*" in capsys.readouterr().err
    assert main([*words, "*embed*=3", "--methods", "signmuon"]) == 2
    assert "--lr-factors does not go with signmuon" in capsys.readouterr().err
    for word in ("embed", "=3", "*embed*=0", "*embed*=much"):
        with pytest.raises(SystemExit):
            main([*words, word])
        assert f"{word} is no PATTERN=FACTOR" in capsys.readouterr().err


@pytest.mark.parametrize("method", ["adamw", "majority"])
def test_gradients_are_clipped_where_they_lie(method: str, monkeypatch: pytest.MonkeyPatch):
    norms: list[tuple[float, int]] = []

    def noted(params: list[Tensor], norm: float) -> None:
        norms.append((norm, len(params)))
        for param in params:
            assert param.grad is not None
            param.grad.zero_()

    monkeypatch.setattr(nn.utils, "clip_grad_norm_", noted)
    record = simulate(TINY.replace(method=method, steps=2, clip=0.5, weight_decay=0.0))
    # Of AdamW the sum of both workers' gradients, of votes each worker's own.
    assert [norm for norm, _ in norms] == ([1.0, 1.0] if method == "adamw" else 4 * [0.5])
    # Nothing is left of them, so nothing moved.
    assert record["curve"][0][1] == record["curve"][-1][1]


def test_clipping_is_refused_where_a_compressor_keeps_gradients_apart(capsys: Any):
    assert main(["--methods", "dgc", "--clip", "1"]) == 2
    assert "--clip does not go with dgc" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--methods", "majority", "magic"], "unknown method 'magic': there are adamw, lion"),
        (["--scenes", "dream"], "unknown scene 'dream': there are pretrain"),
        (["--scale", "llm", "--scenes", "finetune"], "makes no base for finetune"),
        (["--hidden", "100"], "hidden=100 must be a multiple of 32"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_runs(
    words: list[str], what: str, tmp_path: Path, capsys: Any
):
    assert main([*words, "--out", str(tmp_path)]) == 2
    assert what in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_file_that_holds_something_else_is_named(tmp_path: Path, capsys: Any):
    path = tmp_path / "runs.jsonl"
    for text in ("{}", "[1]", "no JSON"):
        path.write_text(f'{{"key": "a"}}\n{text}\n')
        assert main(["--out", str(tmp_path)]) == 2
        assert f"{path}, line 2: this is no record" in capsys.readouterr().err


def test_a_single_token_is_refused(capsys: Any):
    with pytest.raises(SystemExit):
        main(["--sequence", "1"])
    assert "leaves no token to predict" in capsys.readouterr().err


def test_a_single_worker_is_refused(capsys: Any):
    with pytest.raises(SystemExit):
        main(["--workers", "1"])
    assert "nobody to vote with" in capsys.readouterr().err


def test_a_method_without_real_ranks_says_so():
    for name in ("terngrad", "signmuon"):
        with pytest.raises(UnknownNameError, match=f"'{name}' runs in one process only"):
            run_real(TINY.replace(method=name, real=True))


def test_the_best_learning_rate_is_taken_and_one_at_the_edge_is_flagged():
    for losses, lr, at_edge in (
        ({1e-3: 2.0, 3e-3: 1.9, 1e-2: math.inf}, 3e-3, False),
        ({1e-3: 2.0, 3e-3: 1.9}, 3e-3, True),
        ({3e-3: 2.0, 1e-3: 2.0}, 1e-3, True),
        ({1e-3: 2.0}, 1e-3, False),
    ):
        assert best(losses) == lr
        assert Result(TINY.replace(lr=lr), losses, {}, []).at_edge == at_edge


def test_other_seeds_wait_for_the_choice_and_gaps_are_paired_by_seed(tmp_path: Path):
    records = Records(tmp_path / "runs.jsonl")
    losses = {("lion", 1e-3): 2.0, ("lion", 3e-3): 1.5, ("majority", 1e-3): 1.75}
    trials = [
        Trial(TINY.replace(method=name, lr=0.0, seed=0), (1e-3, 3e-3), (0, 1, 2))
        for name in ("lion", "majority")
    ]

    def fake(setting: Setting) -> dict[str, Any]:
        # Seeds differ by much, methods of one seed by little.
        loss = losses.get((setting.method, setting.lr))
        return {
            "key": setting.key,
            "setting": setting.identity(),
            "loss": None if loss is None else loss + setting.seed,
            "failure": None if loss else "diverged",
            "curve": [[0, 5.0], [12, 1.0]],
            "metrics": {},
            "parameters": 10,
            "bytes_per_step": 5,
            "rounds_per_step": 1,
            "gradient_ms": 1.0,
        }

    first = list(missing(trials, records))
    assert {(run.method, run.lr, run.seed) for run in first} == {
        (name, lr, 0) for name in ("lion", "majority") for lr in (1e-3, 3e-3)
    }
    for run in first:
        records.add(fake(run))
    rest = list(missing(trials, records))
    assert {(run.method, run.lr, run.seed) for run in rest} == {
        ("lion", 3e-3, 1),
        ("lion", 3e-3, 2),
        ("majority", 1e-3, 1),
        ("majority", 1e-3, 2),
    }
    for run in rest:
        records.add(fake(run))
    assert not list(missing(trials, records))
    lion, majority = results(trials, records)
    assert set(lion.gaps.values()) == {0.0}
    assert majority.gaps == {0: 0.25, 1: 0.25, 2: 0.25}
    assert majority.as_json()["gap_spread"] == 0.0
    assert majority.mean == pytest.approx(2.75)
    assert majority.bits_per_step == 4.0
    assert cells([lion, majority]) == [[lion, majority]]


def test_a_run_that_diverges_is_recorded_as_such():
    record = simulate(TINY.replace(method="adamw", lr=1e30, schedule="constant"))
    assert record["loss"] is None
    assert "training loss" in record["failure"]
    json.dumps(record, allow_nan=False)
    # What it sent is a mean over the steps that it took.
    whole = simulate(TINY.replace(method="adamw"))
    for key in ("bytes_per_step", "rounds_per_step"):
        assert record[key] == whole[key] > 0


def test_weights_that_are_no_numbers_at_the_end_are_a_run_that_diverged():
    record = simulate(TINY.replace(method="signmuon", lr=math.nan))
    assert record["loss"] is None


class OneIsLost(Pretraining):
    """The second worker's loss is no number."""

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        lost = dist.is_initialized() and dist.get_rank() == 1
        return super().loss(model, batch) * (math.nan if lost else 1.0)


def lost_on_one(rank: int, world_size: int) -> Any:
    scene = OneIsLost(TINY)
    return train(TINY, scene, RealRank(scene, TINY))["failure"]


@pytest.mark.multiproc
def test_all_real_ranks_leave_what_one_finds_has_diverged(ranks: RankPools):
    assert ranks(2).run(lost_on_one) == ["the training loss of step 0 is nan"] * 2


@pytest.mark.full
def test_a_study_whose_runs_diverge_still_reports(tmp_path: Path, capsys: Any):
    words = ["--scale", "smoke", "--steps", "4", "--methods", "adamw", "lion", "--plot"]
    words += ["--workers", "2", "3", "--lr-adamw", "1e30", "--lr-lion", "1e-3"]
    assert main([*words, "--schedule", "constant", "--out", str(tmp_path)]) == 0
    assert "diverged" in capsys.readouterr().out
    entries = json.loads((tmp_path / "summary.json").read_text())
    assert [entry["mean"] is None for entry in entries] == [True, False] * 2


def test_learning_rates_rise_and_fall():
    cosine = TINY.replace(steps=100, lr=1.0)
    assert [cosine.lr_at(step) for step in range(5)] == [k / 6 for k in range(1, 6)]
    assert cosine.lr_at(5) == 1.0
    assert 0 < cosine.lr_at(99) < 1e-3
    assert TINY.replace(schedule="constant").lr_at(0) == TINY.lr
    longer = TINY.replace(steps=100, lr=1.0, warmup=0.1)
    assert [longer.lr_at(step) for step in (0, 9, 10)] == [1 / 11, 10 / 11, 1.0]
    assert TINY.replace(steps=100, lr=1.0, schedule="linear").lr_at(99) == pytest.approx(1 / 95)
    assert TINY.replace(steps=10, evaluations=3).evaluated_after() == [3, 6, 10]


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("method", SIMULATED)
def test_every_method_trains_an_adapter(method: str, tmp_path: Path) -> None:
    setting = TINY.replace(
        scene="lora", method=method, steps=2, lr=1e-3, base_steps=2, folder=str(tmp_path)
    )
    assert isinstance(simulate(setting)["loss"], float)


def test_learning_rates_as_large_as_sgd_s_do_not_make_a_large_decay() -> None:
    optimizer = sgd(nn.Linear(2, 2), TINY.replace(weight_decay=0.1, lr=1.0))
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.0]


def test_judging_may_have_more_threads_and_gives_them_back() -> None:
    seen: list[int] = []

    class Counted(Pretraining):
        def validation(self, model: nn.Module) -> float:
            seen.append(torch.get_num_threads())
            raise ArithmeticError

    scene = Counted(TINY)
    method = recipe("lion").workers(scene, TINY)
    method.judging_threads = 2
    with pytest.raises(ArithmeticError):
        train(TINY, scene, method)
    assert seen == [2]
    assert torch.get_num_threads() == 1


def test_a_study_prints_its_summary_as_json(tmp_path, capsys):
    words = ["--scale", "smoke", "--steps", "1", "--seeds", "1", "--out", str(tmp_path)]
    words += ["--methods", "lion", "--lr-lion", "1e-3", "--format", "json"]
    assert main(words) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary == json.loads((tmp_path / "summary.json").read_text())
    assert summary[0]["lr"] == 1e-3


def test_a_step_takes_the_gradient_and_then_the_network():
    record = {"parameters": 10, "bytes_per_step": 4e6, "rounds_per_step": 2, "gradient_ms": 250.0}
    result = Result(TINY, {}, {0: 1.0}, [record])
    wire_s = 2 * 1e-4 + 8 * 4e6 / (1e9 * TCP_EFFICIENCY)
    clock = Clock.of(["1gbit"], None)
    assert clock.step_s([result], result, "1gbit") == pytest.approx(0.25 + wire_s)
    elsewhere = Clock.of(["1gbit"], 0.01)
    assert elsewhere.step_s([result], result, "1gbit") == pytest.approx(0.01 + wire_s)
    with pytest.raises(ValueError, match="--links: 'fast' is no link: write a rate"):
        Clock.of(["fast"], None)
