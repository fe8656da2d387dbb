"""What Trainer would upload to the hub, with a stand-in for the hub."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from huggingface_hub.utils import filter_repo_objects
from transformers import trainer as trainer_module

from tests.support.spawn import on_ranks
from tests.support.tiny import tiny_args, tiny_trainer, weights_digest
from tests.support.training import agree

MOMENTA = {f"dlion_momentum_{rank}_of_2.safetensors" for rank in range(2)}
SAVES = [2, 4]


def files_in(folder: Path) -> list[str]:
    return [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]


class Hub:
    """Notes the names of the files in each upload."""

    def __init__(self) -> None:
        self.uploads: list[set[str]] = []

    def create_repo(self, name: str, **_: Any) -> Any:
        return mock.Mock(repo_id=f"someone/{name}")

    def upload_folder(
        self, *, folder_path: str, path_in_repo: str = "", ignore_patterns: Any = None, **_: Any
    ) -> Future[None]:
        kept = filter_repo_objects(files_in(Path(folder_path)), ignore_patterns=ignore_patterns)
        self.uploads.append({(Path(path_in_repo) / name).as_posix() for name in kept})
        done = Future[None]()
        done.set_result(None)
        return done

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"Trainer calls {name}, which this stand-in lacks")


@pytest.mark.parametrize(
    ("strategy", "places"),
    [
        ("end", []),
        ("every_save", []),
        ("checkpoint", ["last-checkpoint", "last-checkpoint"]),
        ("all_checkpoints", [f"checkpoint-{step}" for step in SAVES]),
    ],
)
@on_ranks(2)
def test_momenta_of_all_ranks_are_uploaded_with_checkpoints_only(
    rank: int, tmp_path: Path, strategy: str, places: list[str]
) -> None:
    args = tiny_args(
        tmp_path / "out", lr_scheduler_type="constant", save_every=SAVES[0], push_to_hub=True,
        hub_model_id="tiny", hub_strategy=strategy, hub_always_push=True,
    )  # fmt: skip
    hub = Hub()
    with mock.patch.object(trainer_module, "hf_api", return_value=hub):
        trainer = tiny_trainer(args)
        with mock.patch.object(trainer, "create_model_card"):  # It asks the hub about the data.
            trainer.train()
            trainer.push_to_hub()
    assert agree(weights_digest(trainer.model))
    if rank != 0:
        assert hub.uploads == []
        return
    checkpoints = [files for files in hub.uploads if any("/" in name for name in files)]
    models = [files for files in hub.uploads if files not in checkpoints]
    # Each save pushes the model, unless only the end does.
    assert len(models) == 1 + len(SAVES) * (strategy != "end")
    for files in models:
        assert "model.safetensors" in files
        assert not any("momentum" in name for name in files)
    assert len(checkpoints) == len(places)
    for files, place, step in zip(checkpoints, places, SAVES, strict=False):
        saved = set(files_in(tmp_path / "out" / f"checkpoint-{step}"))
        assert files == {f"{place}/{name}" for name in saved}
        assert MOMENTA < saved
