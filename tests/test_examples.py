"""Every example trains on two ranks, and what it says it made is there."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.spawn import run_script

EXAMPLES = Path(__file__).parent.parent / "examples"

# Nothing may be looked up outside this machine.
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}

pytestmark = [pytest.mark.multiproc, pytest.mark.slow]


def run_example(name: str, *flags: str | Path) -> str:
    """Runs an example on two ranks and returns what it printed."""
    return run_script(2, [EXAMPLES / name, *flags], env=OFFLINE, timeout=240).stdout


needs_trl = pytest.mark.skipif(find_spec("trl") is None, reason="needs trl and peft")


def numbers_after(label: str, text: str) -> list[float]:
    return [float(number) for number in re.findall(rf"{label} (\d+\.\d+)", text)]


def test_every_example_is_tested():
    tested = {"accelerate_loop.py", "ddp_loop.py", "finetune_llm.py", "sft.py"}
    assert {path.name for path in EXAMPLES.glob("*.py")} == tested


def test_the_short_examples_fit_on_a_page():
    for name in ("accelerate_loop.py", "ddp_loop.py"):
        assert len((EXAMPLES / name).read_text().splitlines()) <= 120


def test_finetune_llm_learns_saves_plots_and_reloads(tmp_path):
    said = run_example(
        "finetune_llm.py",
        *("--output_dir", tmp_path, "--max_steps", "40", "--eval_steps", "20"),
        *("--hidden_size", "64", "--num_hidden_layers", "2", "--warmup_steps", "5"),
        *("--learning_rate", "2e-3"),
    )
    before, after = re.findall(r"validation loss (\d\.\d+) before, (\d\.\d+) after", said)[0]
    assert float(before) > 5.0  # ln 256 = 5.5: it knew nothing
    assert float(after) < 3.5
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "model.safetensors").exists()
    # The reloaded model goes on from the prompt.
    assert re.search(r"reloaded, it writes:\s+def read.{20,}", said, re.DOTALL)
    # Only rank 0 prints.
    assert said.count("validation loss") == 3 + 1

    size, ranks, steps = re.findall(r"([\d,]+) trained parameters, (\d) ranks, (\d+) steps", said)[
        0
    ]
    assert (ranks, steps) == ("2", "40")
    parameters = int(size.replace(",", ""))
    sent = [int(n.replace(",", "")) for n in re.findall(r"sent per step +([\d,]+) bytes", said)]
    (dense,) = re.findall(r"bf16 gradient all-reduce +([\d,]+) bytes", said)
    assert len(sent) == 2
    assert int(dense.replace(",", "")) == 2 * parameters
    # One bit per parameter, and what padding, activity and the header add.
    assert all(parameters // 8 <= count <= 1.05 * parameters / 8 for count in sent)
    times = re.findall(r"(compute|encode|exchange|apply) (\d+\.\d+) ms", said)
    assert [name for name, _ in times] == ["compute", "encode", "exchange", "apply"]
    assert all(float(ms) > 0.0 for _, ms in times)


def test_finetune_llm_trains_a_saved_model_on_local_files(tmp_path):
    model = saved_model(tmp_path / "model")
    for name, count in (("train", 400), ("validation", 40)):
        lines = [f"{k} plus {k + 1} is {2 * k + 1}" for k in range(count)]
        (tmp_path / f"{name}.txt").write_text("\n".join(lines))
    said = run_example(
        "finetune_llm.py",
        *("--model_name_or_path", model),
        *("--train_file", tmp_path / "train.txt", "--validation_file", tmp_path / "validation.txt"),
        *("--output_dir", tmp_path / "out", "--block_size", "32", "--prompt", "1 plus"),
        *("--max_steps", "30", "--eval_steps", "30", "--warmup_steps", "5"),
        *("--learning_rate", "2e-3"),
    )
    before, after = re.findall(r"validation loss (\d\.\d+) before, (\d\.\d+) after", said)[0]
    assert float(after) < 0.8 * float(before)
    assert (tmp_path / "out" / "tokenizer.json").exists()


def saved_model(folder: Path) -> Path:
    """A small model with a tokenizer of its own, as a download would have left them."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    letters = "0123456789 abcdefghijklmnopqrstuvwxyz"
    vocabulary = {letter: index for index, letter in enumerate(letters)} | {"<end>": len(letters)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token=" "))
    tokenizer.pre_tokenizer = Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(folder)
    config = GPT2Config(
        vocab_size=len(vocabulary),
        n_positions=256,
        n_embd=32,
        n_layer=2,
        n_head=2,
        bos_token_id=len(letters),
        eos_token_id=len(letters),
    )
    GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


def test_ddp_loop_resumes_where_it_stopped(tmp_path):
    whole = run_example("ddp_loop.py", "--steps", "200", "--output_dir", tmp_path / "whole")
    losses = numbers_after("held-out loss", whole)
    assert losses[-1] < 0.2 * losses[0]
    assert numbers_after("accuracy", whole)[-1] > 0.95

    folder = tmp_path / "parts"
    run_example("ddp_loop.py", "--steps", "100", "--output_dir", folder)
    resumed = run_example("ddp_loop.py", "--steps", "200", "--resume", "--output_dir", folder)
    # Both end with the same lines: held-out loss, accuracy, bytes.
    assert resumed.splitlines()[-2:] == whole.splitlines()[-2:]


def test_accelerate_loop_resumes_where_it_stopped(tmp_path):
    whole = run_example("accelerate_loop.py", "--epochs", "2", "--output_dir", tmp_path / "whole")
    losses = numbers_after("held-out loss", whole)
    assert losses[-1] < 0.5 * losses[0]

    folder = tmp_path / "parts"
    run_example("accelerate_loop.py", "--epochs", "1", "--output_dir", folder)
    resumed = run_example("accelerate_loop.py", "--epochs", "2", "--resume", "--output_dir", folder)
    assert resumed.splitlines()[-2:] == whole.splitlines()[-2:]


def test_finetune_llm_runs_on_one_process(tmp_path):
    said = run_script(
        1,
        [
            *(EXAMPLES / "finetune_llm.py", "--output_dir", tmp_path, "--max_steps", "3"),
            *("--hidden_size", "32", "--num_hidden_layers", "1", "--block_size", "32"),
        ],
        env=OFFLINE,
        timeout=240,
    ).stdout
    assert re.search(r"rank 0 sent per step +0 bytes", said)


@needs_trl
def test_sft_learns_to_answer_and_saves_what_an_evaluation_loads(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    said = run_example(
        *("sft.py", "--output_dir", tmp_path, "--assistant_only_loss"),
        *("--max_steps", "40", "--eval_steps", "20", "--logging_steps", "20"),
    )
    before, after = re.findall(r"validation loss (\d\.\d+) before, (\d\.\d+) after", said)[0]
    assert float(before) > 5.0  # ln 259 = 5.6: it knew nothing
    assert float(after) < 3.7
    assert re.search(r"asked '.+', it says:\s+\S", said)
    # Only rank 0 prints.
    assert said.count("validation loss") == 1
    ((parameters, sent),) = sent_by_sft(said)
    # One bit per parameter, and what padding, activity and the header add.
    assert parameters // 8 <= sent <= 1.05 * parameters / 8

    lines = (tmp_path / "conversations.jsonl").read_text().splitlines()
    roles = {tuple(turn["role"] for turn in json.loads(line)["messages"]) for line in lines}
    assert len(lines) > 1000
    assert roles == {("user", "assistant")}

    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    turns = [{"role": "user", "content": "Où?"}]
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\nOù?<|im_end|>\n<|im_start|>assistant\n"
    tokens = tokenizer(text).input_ids
    assert tokenizer.decode(tokens) == text
    assert max(tokens) < model.config.vocab_size


def sent_by_sft(said: str) -> list[tuple[int, int]]:
    """How many parameters examples/sft.py trained, and the bytes that a rank sent in a step."""
    found = re.findall(r"([\d,]+) trained parameters, ([\d,]+) bytes sent per step", said)
    return [(int(size.replace(",", "")), int(sent.replace(",", ""))) for size, sent in found]


@needs_trl
def test_sft_of_an_adapter_on_a_local_file_sends_only_its_votes(tmp_path):
    from safetensors.torch import load_file

    base, file, out = saved_model(tmp_path / "model"), tmp_path / "my.jsonl", tmp_path / "out"
    template = "{% for turn in messages %}{{ turn['content'] }}{% endfor %}"
    (base / "chat_template.jinja").write_text(template)
    with file.open("w") as stream:
        for k in range(200):
            words = {"user": f"{k} plus {k + 1} ", "assistant": f"is {2 * k + 1}"}
            messages = [{"role": role, "content": text} for role, text in words.items()]
            stream.write(json.dumps({"messages": messages}) + "\n")
    said = run_example(
        *("sft.py", "--model_name_or_path", base, "--train_file", file, "--output_dir", out),
        *("--use_peft", "--lora_r", "2", "--max_steps", "5", "--logging_steps", "5"),
    )
    ((parameters, sent),) = sent_by_sft(said)
    adapter = load_file(out / "adapter_model.safetensors")
    assert parameters == sum(tensor.numel() for tensor in adapter.values())
    # The headers are longer than the votes of this few parameters.
    assert parameters / 8 <= sent < parameters / 8 + 200
    # A fresh adapter's B is 0: these moved.
    assert all(tensor.any() for name, tensor in adapter.items() if "lora_B" in name)
    assert json.loads((out / "adapter_config.json").read_text())["base_model_name_or_path"] == str(
        base
    )
    assert not (out / "base").exists()
    assert not (out / "conversations.jsonl").exists()
