"""The command line of the study."""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import sys
from pathlib import Path
from typing import Any

from hf_dlion.tools.arguments import Parser, add_format, checked, exit_code, positive
from hf_dlion.tools.report import (
    MissingPackageError,
    Output,
    environment,
    require_matplotlib,
    track,
    write_json,
)

from benchmarks.convergence import report
from benchmarks.convergence.methods import METHODS, check_method, recipe
from benchmarks.convergence.results import Record, Records, Trial, cells, missing, results
from benchmarks.convergence.scenes import SCENES, Scene, scene_class
from benchmarks.convergence.setting import SCHEDULES, WARMUP, Setting
from benchmarks.convergence.train import run_real, simulate

# One of each kind, and what the Distributed Lion paper compares with.
COMPARED = [
    *("adamw", "lion", "majority", "average", "bits4", "sync16"),
    *("terngrad", "graddrop", "dgc"),
]
# What a scale stands for; a flag of the same name comes first.
SCALES: dict[str, dict[str, Any]] = {
    "smoke": {
        "methods": ["adamw", "lion", "majority"], "workers": [2], "batch": [2], "sequence": 16,
        "hidden": 32, "layers": 1, "steps": 6, "seeds": 2, "evaluations": 2, "base_steps": 6,
    },
    "small": {
        "methods": COMPARED, "workers": [2, 4, 8], "batch": [8], "sequence": 64, "hidden": 64,
        "layers": 2, "steps": 300, "seeds": 3, "evaluations": 6, "base_steps": 1000,
    },
    # For the scenes of SmolLM2; about an hour of one core for a run.
    "llm": {
        "methods": ["adamw", "lion", "majority", "bits2", "bits4"], "workers": [2], "batch": [2],
        "sequence": 128, "hidden": 576, "layers": 30, "steps": 160, "seeds": 3, "evaluations": 4,
        "base_steps": 0, "clip": 1.0,
    },
}  # fmt: skip
FINE_TUNING = ("finetune", "lora")
CLIP = "gradients, to this norm: with --real a rank's own but in DDP's mean (llm: 1; 0: not)"
FACTORS = "multiply the learning rate of parameters with such names; the first that matches counts"


def main(argv: list[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    for name, value in SCALES[args.scale].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    told = (MissingPackageError, ImportError, OSError, ValueError)
    return exit_code("benchmarks.convergence", lambda: _run(args), *told)


def _run(args: argparse.Namespace) -> None:
    if args.plot:
        require_matplotlib()
    out = Output(args.format)
    trials = _trials(args)
    clock = report.Clock.of(args.links, args.compute_s)
    folder = Path(args.out)
    records = Records(folder / "runs.jsonl")
    # Every run is written as soon as it is made, so an interrupted study goes on from there.
    if args.report:
        trials = [trial.made(records) for trial in trials]
    else:
        before = environment()
        made = _complete(trials, records)
        out.line(f"{made} runs made; all {len(records)} are in {records.path}")
        if made:
            entry = {**before, "runs": made, "words": sys.argv[1:]}
            with (folder / "environment.jsonl").open("a") as file:
                file.write(json.dumps(entry) + "\n")
    found = results(trials, records)
    if not found:
        out.line("no results yet")
        out.result([])
        return
    report.print_tables(out, found, clock)
    summary = []
    for together in cells(found):
        for result in together:
            times = {link: clock.step_s(together, result, link) for link in args.links}
            summary.append({**result.as_json(), "step_s": times})
    write_json(folder / "summary.json", summary)
    out.line(f"written: {folder / 'summary.json'}")
    if args.plot:
        for path in report.draw(found, folder, clock):
            out.line(f"drawn: {path}")
    out.result(summary)


def _complete(trials: list[Trial], records: Records) -> int:
    """Makes all missing runs; returns how many."""
    for trial in trials:
        _scene(trial.setting).prepare(Path(trial.setting.folder))
    made = 0
    # First those that choose learning rates, then those that take the choices.
    while todo := list(dict.fromkeys(missing(trials, records))):
        for number, setting in enumerate(track(todo, "runs"), 1):
            record = run_real(setting) if setting.real else simulate(setting, _scene(setting))
            records.add(record)
            made += 1
            _say(number, len(todo), setting, record)
    return made


def _say(number: int, count: int, own: Setting, record: Record) -> None:
    loss = "diverged" if record["loss"] is None else f"{record['loss']:.4f}"
    print(
        f"{number}/{count}  {own.scene} {own.method} {own.workers}x{own.batch} lr {own.lr:g} "
        f"seed {own.seed}: {loss}, {record['seconds']:.0f} s",
        file=sys.stderr,
        flush=True,
    )


def _scene(setting: Setting) -> Scene:
    # The part of a setting that scenes read. Those that differ in their folder alone are equal.
    return _made_scene(setting.replace(method="", lr=0.0, seed=0, workers=0), setting.folder)


@functools.lru_cache(maxsize=4)
def _made_scene(setting: Setting, folder: str) -> Scene:
    return scene_class(setting.scene)(setting)


def _trials(args: argparse.Namespace) -> list[Trial]:
    """Returns the study: every scene, number of workers, batch and method."""
    grids = {"adamw": args.lr_adamw, "lion": args.lr_lion, "sgd": args.lr_sgd}
    trials = []
    for scene, workers, batch, method in itertools.product(
        args.scenes, args.workers, args.batch, args.methods
    ):
        kind, family = scene_class(scene), recipe(method).family
        setting = Setting(
            scene=scene, method=method, workers=workers, batch=batch, sequence=args.sequence,
            hidden=args.hidden, layers=args.layers, steps=args.steps, lr=0.0,
            weight_decay=args.weight_decay, betas=(args.betas[0], args.betas[1]),
            schedule=args.schedule, seed=0, evaluations=args.evaluations,
            base_steps=args.base_steps if scene in FINE_TUNING else 0, real=args.real,
            folder=args.out, clip=args.clip or 0.0, warmup=args.warmup,
            lr_factors=tuple(args.lr_factors),
        )  # fmt: skip
        if scene in FINE_TUNING and not setting.base_steps:
            raise ValueError(f"--scale {args.scale} makes no base for {scene}: give --base-steps")
        check_method(setting)
        lrs = tuple(sorted(set(grids[family] or kind.grids[family])))
        trials.append(Trial(setting, lrs, tuple(range(args.seeds))))
    return trials


_above_zero = checked(float, lambda value: 0.0 < value < math.inf, "must be above 0")
_share = checked(float, lambda value: 0.0 <= value < 1.0, "must be at least 0 and below 1")
_pairs = checked(int, lambda value: value >= 2, "leaves no token to predict: give 2 or more")
_several = checked(
    int, lambda value: value >= 2, "workers have nobody to vote with: give 2 or more"
)


def _factor(text: str) -> tuple[str, float]:
    pattern, _, factor = text.rpartition("=")
    try:
        found = pattern, float(factor)
    except ValueError:
        found = "", 0.0
    if not found[0] or not 0.0 < found[1] < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is no PATTERN=FACTOR, like *embed*=3")
    return found


def _parser() -> argparse.ArgumentParser:
    made = Parser(
        prog="python -m benchmarks.convergence",
        description="Train with AdamW, global Lion and Distributed Lion's options, each at its "
        "best learning rate, and compare. Finished runs are kept: the same command goes on where "
        "it was stopped.",
    )
    add = made.add_argument
    add("--scale", choices=list(SCALES), default="small", help="defaults of the sizes (small)")
    add("--scenes", nargs="+", default=["pretrain"], help=f"{', '.join(SCENES)} (pretrain)")
    add("--methods", nargs="+", help=f"{', '.join(METHODS)} (small: {' '.join(COMPARED)})")
    add("--workers", nargs="+", type=_several, help="numbers of workers (small: 2 4 8)")
    add("--batch", nargs="+", type=positive, help="sequences per worker (small: 8)")
    add("--sequence", type=_pairs, help="tokens in each (small: 64)")
    add("--hidden", type=positive, help="width of the model (small: 64)")
    add("--layers", type=positive, help="depth of the model (small: 2)")
    add("--steps", type=positive, help="of a run (small: 300)")
    add("--base-steps", type=positive, help="that made a base to fine-tune (small: 1000)")
    add("--seeds", type=positive, help="how many (small: 3); the first chooses learning rates")
    add("--lr-adamw", nargs="+", type=float, help="learning rates to choose from (by scene)")
    add("--lr-lion", nargs="+", type=float, help="the same for Lion and Distributed Lion")
    add("--lr-sgd", nargs="+", type=float, help="the same for SGD")
    add("--weight-decay", type=float, default=0.1, help="(0.1)")
    add("--clip", type=float, metavar="NORM", help=CLIP)
    add("--betas", nargs=2, type=float, default=[0.9, 0.99], help="Lion's (0.9 0.99)")
    add("--warmup", type=_share, default=WARMUP, help="share of the steps in which it rises (0.05)")
    add("--lr-factors", nargs="+", type=_factor, default=[], metavar="PATTERN=FACTOR", help=FACTORS)
    add("--schedule", choices=SCHEDULES, default="cosine", help="of the learning rate (cosine)")
    add("--evaluations", type=positive, help="points of a curve (small: 6)")
    add("--real", action="store_true", help="a process for every rank, with gloo")
    add("--out", default="outputs/study", help="folder of records, pictures, bases")
    add("--links", nargs="+", default=["100mbit", "1gbit"], help="of which times are told (both)")
    add("--compute-s", type=_above_zero, help="of a gradient elsewhere (that of the runs)")
    add("--plot", action="store_true", help="draw pictures, too")
    add("--report", action="store_true", help="make no runs, tell of those that are there")
    add_format(made)
    return made
