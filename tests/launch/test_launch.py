"""Scripts that nobody edits, started by `hf_dlion.launch`; a run that is killed and resumed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hf_dlion import launch
from tests.support import tiny
from tests.support.spawn import run_command, run_script

STRANGER = '''
"""Knows nothing of hf_dlion."""
import json, os, signal, sys
from transformers import HfArgumentParser, Trainer, TrainerCallback, TrainingArguments
from neighbour import tiny_data, tiny_llama, weights_digest

class Die(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if str(state.global_step) == os.environ.get("DIE_AT"):
            os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
    trainer = Trainer(
        model=tiny_llama(), args=args, train_dataset=tiny_data(), callbacks=[Die()]
    )
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    result = {
        "digest": weights_digest(trainer.model),
        "optimizer": type(trainer.optimizer.optimizer).__name__,
        "world_size": args.world_size,
        "logs": trainer.state.log_history,
        "argv": sys.argv,
    }
    with open(f"{args.output_dir}/result_{args.process_index}.json", "w") as file:
        json.dump(result, file)
'''

ARGUMENTS = {
    "optim": "dlion",
    "optim_args": "aggregation=majority,beta2=0.98",
    "learning_rate": "2e-3",
    "weight_decay": "0.1",
    "per_device_train_batch_size": "4",
    "max_steps": "40",
    "logging_steps": "10",
    "save_steps": "20",
    "report_to": "none",
    "disable_tqdm": "True",
    "use_cpu": "True",
    "ddp_find_unused_parameters": "False",
}


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    """A script in a folder of its own, with a module beside it."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "neighbour.py").write_text(Path(tiny.__file__).read_text())
    (folder / "run_clm.py").write_text(STRANGER)
    return folder / "run_clm.py"


def words(folder, **changes):
    """Returns the command line of a run into `folder`."""
    arguments = {"output_dir": folder, **ARGUMENTS, **changes}
    return [str(word) for name, value in arguments.items() for word in (f"--{name}", value)]


def results(folder, world_size):
    """Returns what every rank wrote at its end."""
    texts = [Path(folder, f"result_{rank}.json").read_text() for rank in range(world_size)]
    return [json.loads(text) for text in texts]


@pytest.fixture(scope="module")
def whole(script, tmp_path_factory):
    """The script under `accelerate launch`, with two processes, never interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    # --cpu would start one process only; --multi_gpu starts torchrun, with or without GPUs.
    accelerate = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu"]
    accelerate += ["--num_processes=2", "--num_machines=1", "--mixed_precision=no"]
    accelerate += ["--num_cpu_threads_per_process=1", "--main_process_port=0"]
    run_command([*accelerate, "-m", "hf_dlion.launch", str(script), *words(folder)])
    return results(folder, 2)


@pytest.mark.smoke
@pytest.mark.slow
@pytest.mark.multiproc
def test_accelerate_launch_runs_a_script_that_nobody_edited(whole, script):
    for result in whole:
        assert result["optimizer"] == "DistributedLion"
        assert result["world_size"] == 2
        assert result["digest"] == whole[0]["digest"]
        assert result["argv"][:2] == [str(script), "--output_dir"]
        losses = [entry["loss"] for entry in result["logs"] if "loss" in entry]
        assert len(losses) == 4
        assert all("dlion/agreement" in entry for entry in result["logs"] if "loss" in entry)


@pytest.mark.long
@pytest.mark.multiproc
def test_a_killed_run_that_is_resumed_ends_with_the_same_bits(whole, script, tmp_path):
    module = ["-m", "hf_dlion.launch"]
    killed = run_script(
        2, [*module, str(script), *words(tmp_path)], env={"DIE_AT": "27"}, check=False
    )
    assert killed.returncode != 0
    assert not (tmp_path / "checkpoint-40").exists()
    # The module form of the launcher, from the script's folder.
    resume = words(tmp_path, resume_from_checkpoint=tmp_path / "checkpoint-20")
    run_script(2, [*module, "-m", "run_clm", *resume], cwd=script.parent)
    for result in results(tmp_path, 2):
        assert result["digest"] == whole[0]["digest"]


@pytest.mark.slow
@pytest.mark.multiproc
def test_a_bad_option_ends_every_rank_with_one_line(script, tmp_path):
    arguments = words(tmp_path, optim_args="agregation=average")
    done = run_script(
        2, ["-m", "hf_dlion.launch", str(script), *arguments], timeout=60, check=False
    )
    assert done.returncode != 0
    error = "optim_args: there is no option 'agregation', did you mean 'aggregation'?"
    # One of two ranks may have been ended by torchrun before it could say so.
    assert 1 <= done.stderr.count(error) <= 2
    assert "parse_args_into_dataclasses" not in done.stderr  # no traceback of the script's
    assert not list(tmp_path.glob("result_*"))


@pytest.mark.slow
@pytest.mark.multiproc
def test_ranks_without_gpus_that_do_not_say_so_end_before_training(script, tmp_path):
    arguments = words(tmp_path, use_cpu="False")
    done = run_script(2, ["-m", "hf_dlion.launch", str(script), *arguments], check=False)
    assert done.returncode != 0
    error = "RuntimeError: torch.distributed has 2 ranks, but TrainingArguments knows of 1"
    assert error in done.stderr
    assert "TrainingArguments(use_cpu=True)" in done.stderr
    assert not list(tmp_path.glob("result_*"))


@pytest.mark.slow
@pytest.mark.multiproc
@pytest.mark.long
def test_accelerate_that_starts_one_process_of_two_is_told(script, tmp_path):
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes=2"]
    arguments = words(tmp_path, max_steps="2", save_strategy="no")
    done = run_command([*launcher, "-m", "hf_dlion.launch", str(script), *arguments])
    assert done.stderr.count("accelerate launch was asked for several processes") == 1
    assert results(tmp_path, 1)[0]["world_size"] == 1


RECORDER = """
import json, sys
from transformers import TrainingArguments
from transformers.training_args import OptimizerNames
with open(sys.argv[1], "w") as file:
    found = {"name": __name__, "argv": sys.argv, "path": sys.path[0], "file": __file__}
    json.dump({**found, "known": "dlion" in [o.value for o in OptimizerNames]}, file)
"""


@pytest.fixture
def recorder(tmp_path, monkeypatch):
    """A script that writes down what it sees, and a process whose argv and path may change."""
    monkeypatch.setattr(sys, "argv", ["launch"])
    monkeypatch.setattr(sys, "path", [str(Path.cwd()), *sys.path])
    path = tmp_path / "project" / "record.py"
    path.parent.mkdir()
    path.write_text(RECORDER)
    return path


def test_a_script_sees_what_python_would_show_it(recorder, tmp_path):
    launch.main([str(recorder), str(tmp_path / "seen"), "--flag", "-m"])
    seen = json.loads((tmp_path / "seen").read_text())
    assert seen == {
        "name": "__main__",
        "argv": [str(recorder), str(tmp_path / "seen"), "--flag", "-m"],
        "path": str(recorder.parent),
        "file": str(recorder),
        "known": True,
    }


def test_a_module_sees_what_python_would_show_it(recorder, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(recorder.parent))
    launch.main(["-m", "record", str(tmp_path / "seen")])
    seen = json.loads((tmp_path / "seen").read_text())
    assert seen["name"] == "__main__"
    assert seen["argv"] == [str(recorder), str(tmp_path / "seen")]
    assert seen["known"]


def test_the_end_of_a_script_is_the_end_of_the_launcher(recorder):
    recorder.write_text("raise SystemExit(7)")
    with pytest.raises(SystemExit) as caught:
        launch.main([str(recorder)])
    assert caught.value.code == 7


BAD = """
from transformers import TrainingArguments
TrainingArguments("out", optim="dlion", use_cpu=True, optim_args="{optim_args}")
"""


@pytest.mark.parametrize(
    ("optim_args", "reason"),
    [
        ("bits=3", "optim_args='bits=3': bits=3 is unknown; choose one of 1, 2, 4, 8"),
        ("overlap=true,local_group=2", "overlap=True does not go with local_group=2"),
    ],
)
def test_a_bad_option_ends_with_one_line_and_code_2(recorder, capsys, optim_args, reason):
    recorder.write_text(BAD.format(optim_args=optim_args))
    with pytest.raises(SystemExit) as caught:
        launch.main([str(recorder)])
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("hf_dlion.launch: optim_args")
    assert reason in said
    assert len(said.splitlines()) == 1


def test_another_error_of_the_script_keeps_its_traceback(recorder):
    recorder.write_text("raise ValueError('not about optim_args')")
    with pytest.raises(ValueError, match="not about optim_args"):
        launch.main([str(recorder)])


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        ([], "no script given"),
        (["-m"], "no module given after -m"),
        (["--optim", "dlion"], "--optim stands before the script"),
        (["nowhere.py"], "there is no script nowhere.py"),
    ],
)
def test_what_cannot_run_ends_with_the_usage(capsys, argv, reason):
    with pytest.raises(SystemExit) as caught:
        launch.main(argv)
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert reason in said
    assert "usage: python -m hf_dlion.launch SCRIPT" in said


def test_help_is_printed(capsys):
    launch.main(["--help"])
    assert "usage: python -m hf_dlion.launch" in capsys.readouterr().out


def test_no_script_after_python_m_is_a_usage_error():
    command = [sys.executable, "-m", "hf_dlion.launch"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert "no script given" in done.stderr


@pytest.mark.slow
@pytest.mark.multiproc
@pytest.mark.parametrize("how", ["flags", pytest.param("config", marks=pytest.mark.long)])
def test_trls_own_script_trains_with_votes(tmp_path, how):
    from examples.smollm2 import write_base

    write_base(tmp_path / "base", small=True)
    (tmp_path / "data").mkdir()
    with (tmp_path / "data" / "train.jsonl").open("w") as file:
        for k in range(64):
            turns = {"user": f"{k} plus {k}?", "assistant": f"{2 * k}"}
            messages = [{"role": role, "content": text} for role, text in turns.items()]
            file.write(json.dumps({"messages": messages}) + "\n")
    options = {
        "optim": "dlion",
        "model_name_or_path": str(tmp_path / "base"),
        "dataset_name": str(tmp_path / "data"),
        "output_dir": str(tmp_path / "out"),
        "max_steps": 4,
        "logging_steps": 2,
        "save_steps": 4,
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
    }
    flags = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
    if how == "config":
        config = "".join(f"{name}: {json.dumps(value)}\n" for name, value in options.items())
        (tmp_path / "sft.yaml").write_text(config)
        flags = ["--config", str(tmp_path / "sft.yaml")]
    module = ["-m", "hf_dlion.launch", "-m", "trl.scripts.sft"]
    run_script(2, [*module, *flags], env={"HF_HUB_OFFLINE": "1"})
    (state,) = tmp_path.glob("out/checkpoint-4/trainer_state.json")
    logs = json.loads(state.read_text())["log_history"]
    assert len(logs) == 2
    assert all(entry["dlion/wire_mb_per_step"] > 0 for entry in logs)
