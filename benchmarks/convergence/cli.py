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

from benchmarks.command import checked, environment, positive, told
from benchmarks.convergence import report
from benchmarks.convergence.methods import (
    IN_PROCESS,
    NOT_TRAINED,
    ONLY_IN_PROCESS,
    check_method,
    family,
)
from benchmarks.convergence.results import Records, Trial, results
from benchmarks.convergence.scenes import SCENES, Scene, scene_class
from benchmarks.convergence.setting import WARMUP, Setting
from benchmarks.convergence.train import run_real, simulate
from benchmarks.methods import METHODS
from benchmarks.plot import figure

# One of each kind, and what the Distributed Lion paper compares with.
COMPARED = [
    *("adamw", "lion", "majority", "average", "bits4", "sync16"),
    *("terngrad", "graddrop", "dgc"),
]
# What a scale stands for; options that are given come first.
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


def main(argv: list[str] | None = None) -> int:
    parser = _parser()
    args = parser.parse_args(argv)
    for name, value in SCALES[args.scale].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    return told(parser, lambda: _run(args))


def _run(args: argparse.Namespace) -> None:
    if args.plot:
        figure(1)  # Refused now rather than after hours.
    trials, folder = _trials(args), Path(args.out)
    records = Records(folder / "runs.jsonl")
    if not args.report:
        before, made = environment(), _complete(trials, records)
        print(f"{made} runs made; all {len(records)} are in {records.path}")
        if made:
            with (folder / "environment.jsonl").open("a") as file:
                entry = {**before, "runs": made, "words": sys.argv[1:]}
                file.write(json.dumps(entry) + "\n")
    found = results(trials, records)
    times = [report.step_times(together, args.links, args.compute_s) for together in found]
    for together, own in zip(found, times, strict=True):
        report.print_tables(together, own)
    if args.plot:
        for path in report.draw(found, times, folder):
            print(f"drawn: {path}")


def _complete(trials: list[Trial], records: Records) -> int:
    """Makes all missing runs, each written at once; returns how many."""
    for trial in trials:
        _scene(trial.setting).prepare()
    made = 0
    # First the runs that choose learning rates, then those with the chosen ones.
    while todo := list(dict.fromkeys(run for trial in trials for run in trial.missing(records))):
        for number, own in enumerate(todo, 1):
            record = run_real(own) if own.real else simulate(own, _scene(own))
            records.add(record)
            made += 1
            loss = "diverged" if record["loss"] is None else f"{record['loss']:.4f}"
            print(
                f"{number}/{len(todo)}  {own.scene} {own.method} {own.workers}x{own.batch} "
                f"lr {own.lr:g} seed {own.seed}: {loss}, {record['seconds']:.0f} s",
                file=sys.stderr,
                flush=True,
            )
    return made


def _scene(setting: Setting) -> Scene:
    # What scenes read of a setting. Settings that differ in their folder alone are equal.
    return _made_scene(setting.replace(method="", lr=0.0, seed=0, workers=0), setting.folder)


@functools.lru_cache(maxsize=4)
def _made_scene(setting: Setting, folder: str) -> Scene:
    return scene_class(setting.scene)(setting)


def _trials(args: argparse.Namespace) -> list[Trial]:
    """Returns the study: every scene, number of workers, batch and method."""
    given = {"adamw": args.lr_adamw, "lion": args.lr_lion, "sgd": args.lr_sgd}
    names = ("sequence", "hidden", "layers", "steps", "weight_decay", "evaluations")
    same = {name: getattr(args, name) for name in (*names, "real", "warmup")}
    same |= {"betas": tuple(args.betas), "clip": args.clip or 0.0, "folder": args.out}
    trials = []
    for scene, workers, batch, method in itertools.product(
        args.scenes, args.workers, args.batch, args.methods
    ):
        grid = given[family(method)] or scene_class(scene).grids[family(method)]
        setting = Setting(
            scene=scene, method=method, workers=workers, batch=batch, lr=0.0, seed=0,
            base_steps=args.base_steps if scene in FINE_TUNING else 0,
            lr_factors=tuple(args.lr_factors), **same,
        )  # fmt: skip
        if scene in FINE_TUNING and not setting.base_steps:
            raise ValueError(f"--scale {args.scale} makes no base for {scene}: give --base-steps")
        check_method(setting)
        trials.append(Trial(setting, tuple(sorted(set(grid))), args.seeds))
    return trials


_positive = checked(float, lambda value: 0.0 < value < math.inf, "must be above 0")
_share = checked(float, lambda value: 0.0 <= value < 1.0, "must be at least 0 and below 1")
_several = checked(int, lambda value: value >= 2, "is too few: give 2 or more")


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
    about = {name: METHODS[name].about for name in METHODS if name not in NOT_TRAINED}
    about |= {name: line for name, (_, line) in ONLY_IN_PROCESS.items()}
    lines = ["methods (+: with --real only; -: without --real only):"]
    for name, line in about.items():
        mark = "-" if name in ONLY_IN_PROCESS else " " if name in IN_PROCESS else "+"
        lines.append(f" {mark} {name:13}{line}")
    lines += ["", "scenes:", *(f"   {name:13}{line}" for name, (_, line) in SCENES.items())]
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.convergence",
        description="Trains with each method at its best learning rate, and compares the losses.\n"
        "Finished runs are kept: the same command continues where it was stopped.",
        epilog="\n".join(lines),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = made.add_argument
    add("--scale", choices=list(SCALES), default="small", help="Default sizes (small).")
    add("--scenes", nargs="+", default=["pretrain"], help="Tasks, see below (pretrain).")
    add("--methods", nargs="+", help=f"Methods, see below (small: {' '.join(COMPARED)}).")
    add("--workers", nargs="+", type=_several, help="Numbers of ranks (small: 2 4 8).")
    add("--batch", nargs="+", type=positive, help="Sequences per rank (small: 8).")
    add("--sequence", type=_several, help="Tokens of a sequence (small: 64).")
    add("--hidden", type=positive, help="Width of the model (small: 64).")
    add("--layers", type=positive, help="Depth of the model (small: 2).")
    add("--steps", type=positive, help="Steps of a run (small: 300).")
    add("--base-steps", type=positive, help="Steps that made a fine-tuning's base (small: 1000).")
    add("--seeds", type=positive, help="Seeds; the first chooses learning rates (small: 3).")
    add("--lr-adamw", nargs="+", type=_positive, help="AdamW's learning rates (by scene).")
    add("--lr-lion", nargs="+", type=_positive, help="Learning rates of Lion and ours (by scene).")
    add("--lr-sgd", nargs="+", type=_positive, help="SGD's learning rates (by scene).")
    add("--weight-decay", type=float, default=0.1, help="Weight decay (0.1).")
    clip = "Clip gradients to this norm, a rank's own if it votes on them (llm: 1, else 0: don't)."
    add("--clip", type=float, metavar="NORM", help=clip)
    add("--betas", nargs=2, type=float, default=[0.9, 0.99], help="Lion's betas (0.9 0.99).")
    add("--warmup", type=_share, default=WARMUP, help="Share of steps with a rising rate (0.05).")
    factors = "Multiply the learning rate of parameters with such names; the first match counts."
    add("--lr-factors", nargs="+", type=_factor, default=[], metavar="PATTERN=FACTOR", help=factors)
    add("--evaluations", type=positive, help="Points of a curve (small: 6).")
    add("--real", action="store_true", help="Start a process for every rank, with gloo.")
    add("--out", default="outputs/study", help="Folder of records, pictures, and bases.")
    add("--links", nargs="+", default=["100mbit", "1gbit"], help="Links of computed times (both).")
    add("--compute-s", type=_positive, default=0.0, help="Seconds of a gradient (as in the runs).")
    add("--plot", action="store_true", help="Draw pictures.")
    add("--report", action="store_true", help="Make no runs; report those that are there.")
    return made
