"""torchrun with restarts: killed again and again, a run ends with an undisturbed one's bits."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.support.fault_trial import undisturbed
from tests.support.faults import Fault
from tests.support.faulty_training import Job, whole_checkpoints
from tests.support.spawn import run_script

pytestmark = [pytest.mark.multiproc, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {
    "PYTHONPATH": str(ROOT),
    # Otherwise torch keeps one store for all attempts, and a rank that starts before another one
    # finds the address of the dead one there (pytorch/pytorch#135712).
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}

# Real interpreters from their start to their end, threads and process groups at exit included.
BY_HAND = """
import gc, json, os, sys
from pathlib import Path
import torch.distributed as dist
from tests.support.faults import Fault, Injector, Journal
from tests.support.faulty_training import Job, train

if __name__ == "__main__":
    folder, what = Path(sys.argv[1]), json.loads(sys.argv[2])
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    dist.init_process_group("gloo")
    rank, faults = dist.get_rank(), what["faults"]
    fault = Fault(**faults[attempt]) if attempt < len(faults) else None
    injector = Injector(fault, rank)
    injector.wrap()
    journal = Journal(folder / f"{rank}_{attempt}.journal")
    train(rank, dist.get_world_size(), Job(**what["job"]), folder, injector, journal)
    gc.collect()
    dist.destroy_process_group()
"""


def digests(folder: Path, rank: int, attempt: int) -> dict[int, str]:
    """Returns the hashes by step that a rank wrote down in one attempt."""
    lines = (folder / f"{rank}_{attempt}.journal").read_text().splitlines()
    return {entry["step"]: entry["digest"] for entry in map(json.loads, lines)}


@pytest.mark.long
def test_a_loop_of_ones_own_resumes_from_the_last_whole_checkpoint(tmp_path: Path) -> None:
    job = Job(mode="overlap", options={"exchange": "two_phase"}, dtype="bfloat16", steps=7)
    (tmp_path / "script.py").write_text(BY_HAND)
    faults = [
        Fault(kind="kill", rank=1, step=4, point="within a file"),
        Fault(kind="raise", rank=0, step=5, point="in backward", nth=3),
        Fault(kind="kill", rank=0, step=6, point="before counting", nth=1),
    ]
    folder = tmp_path / "run"
    folder.mkdir()
    what = json.dumps({"job": asdict(job), "faults": [asdict(fault) for fault in faults]})
    run_script(
        2,
        ["--max-restarts=3", str(tmp_path / "script.py"), str(folder), what],
        env=ENVIRONMENT,
        timeout=240,
    )
    whole = undisturbed(job, 2, tmp_path / "whole")[0].digests
    for rank in range(2):
        found = [digests(folder, rank, attempt) for attempt in range(4)]
        # From the last whole checkpoint on: of step 2 until that of step 4 is whole.
        assert [min(own) for own in found if own] == [1, 3, 5, 5][: sum(map(bool, found))]
        assert found[-1].keys() == {5, 6, 7}
        assert all(own.items() <= whole.items() for own in found)
    names = [path.name for path in whole_checkpoints(folder)]
    assert names == ["checkpoint_2", "checkpoint_4", "checkpoint_6"]


TRAINER = """
import json, os, signal, sys
from transformers import TrainerCallback
import hf_dlion
from tests.support.tiny import tiny_args, tiny_trainer, weights_digest

attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
rank = int(os.environ["RANK"])

class Strike(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if (attempt, rank, state.global_step) == (0, 1, 7):
            os.kill(os.getpid(), signal.SIGKILL)

    def on_step_begin(self, args, state, control, **kwargs):
        # The steps that are done already.
        if (attempt, rank, state.global_step) == (1, 0, 10):
            raise RuntimeError("injected")

def train(folder, callbacks):
    args = tiny_args(folder, max_steps=12, save_strategy="steps", save_steps=3)
    trainer = tiny_trainer(args, callbacks=callbacks)
    last = hf_dlion.last_whole_checkpoint(folder)
    trainer.train(resume_from_checkpoint=last is not None)
    return weights_digest(trainer.model), last

if __name__ == "__main__":
    whole, struck = sys.argv[1:]
    # Both in one process, because starting is what takes long.
    told = {"whole": train(whole, [])[0]} if attempt == 0 else {}
    with open(f"{whole}/told_{rank}_{attempt}", "w") as file:
        json.dump(told, file)
    digest, last = train(struck, [Strike()])
    with open(f"{struck}/told_{rank}", "w") as file:
        json.dump({"digest": digest, "resumed": last and os.path.basename(last)}, file)
"""


@pytest.mark.long
def test_trainer_resumes_from_its_last_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(TRAINER)
    run_script(
        2,
        [
            "--max-restarts=2",
            *("-m", "hf_dlion.launch", str(tmp_path / "script.py")),
            *(str(tmp_path / "whole"), str(tmp_path / "struck")),
        ],
        env=ENVIRONMENT,
        timeout=280,
    )
    for rank in range(2):
        whole = json.loads((tmp_path / "whole" / f"told_{rank}_0").read_text())["whole"]
        told = json.loads((tmp_path / "struck" / f"told_{rank}").read_text())
        assert told == {"digest": whole, "resumed": "checkpoint-9"}
