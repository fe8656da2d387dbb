"""The command line of the study."""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.convergence import table
from benchmarks.convergence.clock import check_clock, clock_of
from benchmarks.convergence.real import check_real
from benchmarks.convergence.recipes import METHODS, SIMULATED, TRIALS, check_simulated, recipe
from benchmarks.convergence.records import Records
from benchmarks.convergence.result import results
from benchmarks.convergence.run import complete, estimate_s
from benchmarks.convergence.scenes import SCENES, scene_class
from benchmarks.convergence.search import Trial, missing
from benchmarks.convergence.setting import SCHEDULES, WARMUP, Setting
from hf_dlion.tools.arguments import Parser, add_format, checked, exit_code, positive
from hf_dlion.tools.report import (
    MissingPackageError,
    Output,
    duration,
    environment,
    require_matplotlib,
    write_json,
)

# One of each kind, and what the Distributed Lion paper compares with.
COMPARED = [
    *("adamw", "lion", "majority", "average", "bits4", "sync16"),
    *("terngrad", "graddrop", "dgc"),
]

# About 14 hours of one core for a scene.
MEDIUM: dict[str, Any] = {
    "methods": COMPARED, "workers": [2, 4, 8], "batch": [8], "sequence": 128, "hidden": 128,
    "layers": 4, "steps": 1000, "seeds": 3, "evaluations": 10, "base_steps": 3000,
}  # fmt: skip

# What a scale stands for; a flag of the same name comes first.
SCALES: dict[str, dict[str, Any]] = {
    "smoke": {
        "methods": ["adamw", "lion", "majority"], "workers": [2], "batch": [2], "sequence": 16,
        "hidden": 32, "layers": 1, "steps": 6, "seeds": 2, "evaluations": 2, "base_steps": 6,
    },
    "small": {
        "methods": [name for name in SIMULATED if name not in TRIALS], "workers": [2, 4, 8],
        "batch": [8], "sequence": 64, "hidden": 64, "layers": 2, "steps": 300, "seeds": 3,
        "evaluations": 6, "base_steps": 1000,
    },
    "medium": MEDIUM,
    # For the scenes of SmolLM2; about an hour of one core for a run.
    "llm": {
        "methods": ["adamw", "lion", "majority", "bits2", "bits4"], "workers": [2], "batch": [2],
        "sequence": 128, "hidden": 576, "layers": 30, "steps": 160, "seeds": 3, "evaluations": 4,
        "base_steps": 0, "clip": 1.0,
    },
    # The workers and the batch of the Distributed Lion paper; about five days of one core.
    "full": {**MEDIUM, "workers": [4, 8, 16, 32], "batch": [32], "sequence": 64},
}  # fmt: skip
FINE_TUNING = ("finetune", "lora")
CLIP = "gradients, to this norm: with --real a rank's own but in DDP's mean (llm: 1; 0: not)"
FACTORS = "multiply the learning rate of parameters with such names; the first that matches counts"


def main(argv: list[str] | None = None) -> int:
    """Runs the study; returns the exit code.

    Args:
        argv: The words of the command line; by default those of this process.
    """
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
    check_clock(args.links, args.times, [trial.setting for trial in trials])
    folder = Path(args.out)
    records = Records(folder / "runs.jsonl")
    if args.dry_run:
        todo = list(missing(trials, records, ahead=True))
        seconds = estimate_s(todo)
        out.line(
            f"{len(todo)} runs to make, {len(records)} are there; about "
            f"{duration(seconds)} of one core for their gradients"
        )
        out.result({"missing": len(todo), "made": len(records), "gradients_s": seconds})
        return
    # Every run is written as soon as it is made, so an interrupted study goes on from there.
    if args.report:
        trials = [trial.made(records) for trial in trials]
    else:
        before = environment()
        made = complete(trials, records, args.jobs)
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
    clocks = partial(clock_of, args.links, args.times, args.compute_s)
    table.print_losses(out, found, clocks)
    table.print_grids(out, found)
    table.print_sign_agreement(out, found)
    summary = []
    for together in table.cells(found):
        clock = clocks(together)
        for result in together:
            times = {link: asdict(clock.step(result, link)) for link in args.links}
            summary.append({**result.as_json(), "step_s": times})
    write_json(folder / "summary.json", summary)
    out.line(f"written: {folder / 'summary.json'}")
    if args.plot:
        from benchmarks.convergence.plot import draw

        for path in draw(found, folder, clocks):
            out.line(f"drawn: {path}")
    out.result(summary)


def _trials(args: argparse.Namespace) -> list[Trial]:
    """Returns the study: every scene, number of workers, batch and method.

    Raises:
        ValueError: If there is no such scene or method.
    """
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
        if setting.clip and recipe(method).compressor is not None:
            raise ValueError(f"--clip does not go with {method}, which keeps gradients apart")
        if setting.lr_factors and (recipe(method).rival or recipe(method).workers):
            raise ValueError(f"--lr-factors does not go with {method}, which takes one rate")
        if args.real:
            check_real(setting)
        else:
            check_simulated(setting)
        lrs = tuple(sorted(set(grids[family] or kind.grids[family])))
        seeds = tuple(range(args.seeds))
        trials.append(Trial(setting, lrs, seeds, min(args.tuning_seeds, args.seeds)))
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
    add("--methods", nargs="+", help=f"{', '.join(METHODS)} (small: all from adamw to dgc)")
    add("--workers", nargs="+", type=_several, help="numbers of workers (small: 2 4 8)")
    add("--batch", nargs="+", type=positive, help="sequences per worker (small: 8)")
    add("--sequence", type=_pairs, help="tokens in each (small: 64)")
    add("--hidden", type=positive, help="width of the model (small: 64)")
    add("--layers", type=positive, help="depth of the model (small: 2)")
    add("--steps", type=positive, help="of a run (small: 300)")
    add("--base-steps", type=positive, help="that made a base to fine-tune (small: 1000)")
    add("--seeds", type=positive, help="how many (small: 3)")
    add("--tuning-seeds", type=positive, default=1, help="that choose learning rates (1)")
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
    add("--jobs", type=positive, default=1, help="runs at once, a thread each (1)")
    add("--out", default="outputs/study", help="folder of records, pictures, bases")
    add("--links", nargs="+", default=["100mbit", "1gbit"], help="of which times are told (both)")
    add("--times", nargs="+", default=[], metavar="FILE", help="JSON of step_time.py on such links")
    add("--compute-s", type=_above_zero, help="of a gradient elsewhere; all times are computed")
    add("--plot", action="store_true", help="draw pictures, too")
    add("--report", action="store_true", help="make no runs, tell of those that are there")
    add("--dry-run", action="store_true", help="say how many runs are missing, and what they take")
    add_format(made)
    return made
