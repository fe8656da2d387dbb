"""Unedited commands under `hf-dlion run` and `hf_dlion.launch`."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from hf_dlion.launch import STARTUP
from tests.support import tiny
from tests.support.spawn import free_port, run_command

RUN = [sys.executable, "-m", "hf_dlion", "run"]
LAUNCH = [sys.executable, "-m", "hf_dlion.launch"]
ACCELERATE = [sys.executable, "-m", "accelerate.commands.launch"]


def output_of(
    words: list[str], code: int = 0, cwd: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    done = run_command(words, env=environment, cwd=cwd, check=False)
    assert done.returncode == code, done.stderr
    return done


# What a command sees


RECORDER = """
import json, os, sys
with open(os.environ["RECORD"], "w") as file:
    json.dump([__name__, sys.argv, __file__, sys.path, sys.flags.dev_mode], file)
"""


@pytest.fixture
def recorder(tmp_path: Path) -> Path:
    """A script that writes down what it sees, in a folder with a space in its name."""
    path = tmp_path / "a project" / "record.py"
    path.parent.mkdir()
    path.write_text(RECORDER)
    return path


@pytest.mark.parametrize("target", ["script", "module"])
def test_a_script_or_module_sees_what_python_would_show_it(
    recorder: Path, monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    record = recorder.parent / "record.json"
    monkeypatch.setenv("PYTHONPATH", str(recorder.parent))
    what = [str(recorder)] if target == "script" else ["-m", "record"]
    words = ["-X", "dev", *what, "--flag", "a word", "-m"]
    seen = []
    for command in ([sys.executable], [*RUN, sys.executable], LAUNCH):
        options = words[:2]
        if command is LAUNCH:
            command = [sys.executable, *options, *LAUNCH[1:]]
            output_of([*command, *words[2:]], RECORD=str(record))
        else:
            output_of([*command, *words], RECORD=str(record))
        seen.append(json.loads(record.read_text()))
    assert seen[0][4]
    assert seen[0] == seen[1] == seen[2]


def test_the_exit_code_and_signals_are_those_of_the_command(tmp_path: Path) -> None:
    output_of([*RUN, sys.executable, "-c", "raise SystemExit(7)"], code=7)
    program = (
        "import signal, time\n"
        "got = []\n"
        "def note(number, frame):\n"
        "    got.append(number)\n"
        "    print('got', number, flush=True)\n"
        "for number in (signal.SIGINT, signal.SIGTERM):\n"
        "    signal.signal(number, note)\n"
        "print('ready', flush=True)\n"
        "while len(got) < 2:\n"
        "    time.sleep(0.05)\n"
        "signal.signal(signal.SIGTERM, signal.SIG_DFL)\n"
        "print('last', flush=True)\n"
        "time.sleep(60)"
    )
    command = [*RUN, sys.executable, "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        for number in (signal.SIGINT, signal.SIGTERM):
            process.send_signal(number)
            assert process.stdout.readline() == f"got {int(number)}\n"
        assert process.stdout.readline() == "last\n"
        process.terminate()
    assert process.returncode == -signal.SIGTERM


@pytest.mark.parametrize(
    ("words", "code", "reason"),
    [
        ([*RUN], 2, "the following arguments are required: COMMAND"),
        ([*RUN, "--optim", "dlion"], 2, "unknown option --optim"),
        ([*RUN, "no-such-command"], 127, "no-such-command: command not found"),
        ([*RUN, __file__], 126, f"write hf-dlion run python {__file__}"),
        ([*LAUNCH], 2, "no script given"),
        ([*LAUNCH, "-m"], 2, "Argument expected for the -m option"),
        ([*LAUNCH, "--optim", "dlion"], 2, "unknown option --optim"),
        ([*LAUNCH, "nowhere.py"], 2, "nowhere.py': [Errno 2] No such file"),
    ],
)
def test_what_cannot_run_is_refused_with_a_reason(words: list[str], code: int, reason: str) -> None:
    assert reason in " ".join(output_of(words, code).stderr.split())


def test_two_dashes_end_the_options_of_run() -> None:
    done = output_of([*RUN, "--", sys.executable, "-c", "import sys; print(sys.argv)", "--"])
    assert done.stdout == "['-c', '--']\n"


def test_a_script_without_an_interpreter_is_refused_with_how_to_run_it(tmp_path: Path) -> None:
    (script := tmp_path / "script.sh").write_text("echo hello\n")
    script.chmod(0o755)
    assert f"write hf-dlion run bash {script}" in output_of([*RUN, str(script)], 126).stderr


# In which processes the name is valid


def test_a_process_without_torch_imports_nothing_and_one_without_trainer_keeps_it_so() -> None:
    program = "import sys; print(*sorted(sys.modules))"
    plain = output_of([sys.executable, "-c", program]).stdout.split()
    under = output_of([*RUN, sys.executable, "-c", program]).stdout.split()
    assert set(under) - set(plain) <= {"sitecustomize"}
    program = (
        "import sys, torch\n"
        "assert not any(name.startswith('hf_dlion.trainer') for name in sys.modules)\n"
        "from transformers import TrainingArguments\n"
        "assert 'transformers.trainer' not in sys.modules"
    )
    output_of([*RUN, sys.executable, "-c", program])


ORDERS = {
    "arguments first": "from transformers import TrainingArguments, Trainer",
    "a subclass": "from transformers import Seq2SeqTrainer as Trainer\n"
    "from transformers import Seq2SeqTrainingArguments as TrainingArguments",
    "the module": "from transformers.trainer import Trainer\n"
    "from transformers.training_args import TrainingArguments",
}


@pytest.mark.slow
@pytest.mark.parametrize("imports", ORDERS.values(), ids=ORDERS)
def test_the_name_is_valid_whatever_is_imported_first(imports: str, tmp_path: Path) -> None:
    program = (
        f"{imports}\n"
        "import sys\n"
        "from transformers import HfArgumentParser\n"
        "words = ['--output_dir', sys.argv[1], '--optim', 'dlion', '--use_cpu', 'true']\n"
        "(args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(words)\n"
        "args = TrainingArguments(sys.argv[1], optim='dlion', use_cpu=True, optim_args={'bits': 2})"
        "\nprint(Trainer.get_optimizer_cls_and_kwargs(args)[0].__name__, args.optim_args)"
    )
    done = output_of([*RUN, sys.executable, "-c", program, str(tmp_path)])
    assert done.stdout == "DistributedLion bits=2\n"


def test_a_sitecustomize_that_was_there_also_runs(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "sitecustomize.py").write_text("import builtins; builtins.theirs = 1")
    program = (
        "import os, sys, subprocess, transformers.training_args as t\n"
        "print(theirs, t.OptimizerNames('dlion').value, sys.modules['sitecustomize'].__file__)\n"
        "print(os.environ['PYTHONPATH'])"
    )
    done = output_of([*RUN, *RUN, sys.executable, "-c", program], PYTHONPATH=str(theirs))
    assert done.stdout.split("\n")[:2] == [
        f"1 dlion {theirs / 'sitecustomize.py'}",
        os.pathsep.join([STARTUP, str(theirs)]),
    ]
    # An empty entry is the current folder.
    (tmp_path / "here.py").touch()
    for earlier in (f":{theirs}", f"{theirs}:"):
        program = "import here; print(theirs)"
        words = [*RUN, sys.executable, "-P", "-c", program]
        done = output_of(words, cwd=tmp_path, PYTHONPATH=earlier)
        assert done.stdout == "1\n"
    (theirs / "sitecustomize.py").write_text("1 / 0")  # Python says so, and continues.
    program = "import transformers.training_args as t; print(t.OptimizerNames('dlion').value)"
    done = output_of([*RUN, sys.executable, "-c", program], PYTHONPATH=str(theirs))
    assert "ZeroDivisionError" in done.stderr
    assert done.stdout == "dlion\n"


def test_an_environment_without_hf_dlion_says_so_and_works_otherwise(tmp_path: Path) -> None:
    other = tmp_path / "an environment"
    venv.create(other, symlinks=True)
    # Instead of installing torch there.
    (other / "lib" / "torch").mkdir(parents=True)
    (other / "lib" / "torch" / "__init__.py").write_text("")
    (other / "lib" / "torch" / "distributed.py").write_text("")
    python = str(other / "bin" / "python")
    program = "import torch.distributed; print('works')"
    done = output_of([*RUN, python, "-c", program], cwd=tmp_path, PYTHONPATH=str(other / "lib"))
    assert done.stdout == "works\n"
    said = f"isn't available with {python}: hf_dlion isn't installed there"
    assert said in done.stderr
    assert "Traceback" not in done.stderr


NO_CARD = """
import sys
import types

stub = sys.modules["hf_dlion.launch.after_imports"] = types.ModuleType("after_imports")
stub.set_interface = lambda: 1 / 0
stub.accept_name = lambda: __import__("hf_dlion").register()
stub.register = lambda: None
from transformers import TrainingArguments

print(TrainingArguments("out", optim="dlion", use_cpu=True).optim.value)
"""


def test_without_a_network_interface_the_optimizer_is_still_there(tmp_path: Path) -> None:
    done = output_of([*RUN, sys.executable, "-c", NO_CARD], cwd=tmp_path)
    assert "hf-dlion run: cannot choose the network interface: division by zero" in done.stderr
    assert done.stdout == "dlion\n"


def test_a_command_of_an_environment_that_is_not_active_is_found(tmp_path: Path) -> None:
    done = output_of(
        [*RUN, "hf-dlion", "--help"], PATH="/usr/bin:/bin", PYTHONDONTWRITEBYTECODE="1"
    )
    assert done.stdout.startswith("usage: hf-dlion")


# Trainer


STRANGER = """
import json, sys
from transformers import HfArgumentParser, Trainer, TrainingArguments
from neighbor import tiny_data, tiny_llama, weights_digest

if __name__ == "__main__":
    (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
    trainer = Trainer(model=tiny_llama(), args=args, train_dataset=tiny_data())
    trainer.train()
    kind = type(trainer.optimizer.optimizer).__name__
    result = [weights_digest(trainer.model), kind, args.world_size]
    with open(f"{args.output_dir}/result_{args.process_index}.json", "w") as file:
        json.dump(result, file)
"""
# A command that starts torchrun itself, as those of frameworks do.
STARTER = """
import subprocess, sys
torchrun = ["torchrun", "--nproc_per_node=2", "--rdzv-backend=c10d", "--local-addr=127.0.0.1"]
sys.exit(subprocess.call([*torchrun, "--rdzv-endpoint=localhost:0", *sys.argv[1:]]))
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """A script that knows nothing of hf_dlion, with a module next to it."""
    (tmp_path / "neighbor.py").write_text(Path(tiny.__file__).read_text())
    (tmp_path / "run_clm.py").write_text(STRANGER)
    return tmp_path / "run_clm.py"


def arguments(script: Path, optim_args: str) -> list[str]:
    options = {
        "output_dir": script.parent, "optim": "dlion", "optim_args": optim_args, "max_steps": 4,
        "report_to": "none", "disable_tqdm": True, "use_cpu": True, "save_strategy": "no",
    }  # fmt: skip
    return [str(word) for name, value in options.items() for word in (f"--{name}", value)]


@pytest.mark.smoke
@pytest.mark.slow
@pytest.mark.multiproc
@pytest.mark.parametrize(
    "launcher",
    [pytest.param("accelerate launch", marks=pytest.mark.oldest), "a command of its own"],
)
def test_launchers_train_an_unedited_script_with_votes(script: Path, launcher: str) -> None:
    words = [str(script), *arguments(script, "aggregation=majority")]
    if launcher == "accelerate launch":
        # --cpu would start one process; --multi_gpu starts torchrun, with or without GPUs.
        options = ["--multi_gpu", "--num_processes=2", "--num_machines=1", "--mixed_precision=no"]
        options += ["--num_cpu_threads_per_process=1", f"--main_process_port={free_port()}"]
        run_command([*RUN, *ACCELERATE, *options, *words])
    else:
        starter = script.parent / "starter.py"
        starter.write_text(STARTER)
        run_command([*RUN, "python", str(starter), *words], env={"PATH": "/usr/bin:/bin"})
    texts = [(script.parent / f"result_{rank}.json").read_text() for rank in (0, 1)]
    assert texts[0] == texts[1]
    assert json.loads(texts[0])[1:] == ["DistributedLion", 2]


@pytest.mark.slow
@pytest.mark.multiproc
def test_trls_command_trains_with_votes(tmp_path: Path) -> None:
    """`trl sft` reads the arguments in a process of its own, and starts torchrun."""
    tiny.tiny_llama().save_pretrained(tmp_path / "model")
    tiny.tiny_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "data").mkdir()
    rows = [json.dumps({"text": f"w{k} w{k + 1} w{k + 2}"}) for k in range(32)]
    (tmp_path / "data" / "train.jsonl").write_text("\n".join(rows))
    words = "trl sft --optim dlion --model_name_or_path model --dataset_name data --output_dir out"
    words += " --learning_rate 1e-3 --max_steps 3 --logging_steps 1 --report_to none --use_cpu"
    words += f" --multi_gpu --num_processes 2 --main_process_port {free_port()}"
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    done = run_command([*RUN, *words.split()], cwd=tmp_path, env=offline, timeout=240)
    assert "dlion/wire_mb_per_step" in done.stdout
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_a_bad_option_is_refused_when_arguments_are_parsed(script: Path) -> None:
    done = output_of([*LAUNCH, str(script), *arguments(script, "agregation=average")], code=1)
    assert re.search(r"ValueError: optim_args.*aggregation", done.stderr)
    assert "parse_args_into_dataclasses" in done.stderr
    assert not list(script.parent.glob("result_*"))


def test_a_transformers_without_the_table_of_optimizers_is_named(tmp_path: Path) -> None:
    stub = tmp_path / "transformers"
    stub.mkdir()
    (stub / "__init__.py").write_text("__version__ = '4.50.0'")
    (stub / "training_args.py").write_text(
        "class TrainingArguments:\n    def __post_init__(self): pass"
    )
    program = "import transformers.training_args; print('works')"
    done = output_of([*RUN, sys.executable, "-c", program], PYTHONPATH=str(tmp_path))
    assert done.stdout == "works\n"
    assert "which transformers 4.50.0 doesn't have" in done.stderr
