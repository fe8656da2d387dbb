"""The command line of the study."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.command import environment, exit_code_of
from benchmarks.convergence import report
from benchmarks.convergence.files import digest
from benchmarks.convergence.methods import NOT_TRAINED, check_method, needs_real_ranks
from benchmarks.convergence.results import Records, Trial, results
from benchmarks.convergence.setting import WARMUP, Setting
from benchmarks.convergence.tasks import TASKS, task_class
from benchmarks.convergence.train import run_real, simulate
from benchmarks.methods import ADAMW_BETAS, BETAS, METHODS, method_of
from benchmarks.plot import figure
from hf_dlion.cli.arguments import Parser, above_zero, positive, rate

COMPARED = ["adamw", "lion", "majority", "average", "bits4", "sync16"]
# Default values by --scale.
SCALES: dict[str, dict[str, Any]] = {
    "smoke": {
        "methods": ["adamw", "lion", "majority"], "workers": [2], "batch": [2], "sequence": 16,
        "hidden": 32, "layers": 1, "steps": 6, "seeds": 2, "evaluations": 2, "base_steps": 6,
    },
    "small": {
        "methods": COMPARED, "workers": [2, 4, 8], "batch": [8], "sequence": 64, "hidden": 64,
        "layers": 2, "steps": 300, "seeds": 3, "evaluations": 6, "base_steps": 1000,
    },
    # For the tasks with SmolLM2; a run takes about an hour of one core.
    "llm": {
        "methods": ["adamw", "majority", "bits2", "bits4"], "workers": [2], "batch": [2],
        "sequence": 128, "hidden": 576, "layers": 30, "steps": 160, "seeds": 3, "evaluations": 4,
        "base_steps": 0, "clip": 1.0,
    },
}  # fmt: skip
FINE_TUNING = ("finetune", "lora")
EXAMPLES = (
    "Default sizes are those of --scale small.",
    "",
    "examples:",
    "  python -m benchmarks.convergence --scale smoke --plot",
    "  python -m benchmarks.convergence --tasks finetune --workers 4 --methods adamw lion majority",
)


def main(argv: list[str] | None = None) -> int:
    parser = _parser()
    args = parser.parse_args(argv)
    return exit_code_of(parser, lambda: _run(args))


def _run(args: argparse.Namespace) -> None:
    if args.plot:
        figure(1)  # Fails now rather than after hours.
    files = tuple(args.base_text), tuple(args.text)
    trials, folder = _trials(args, digest(files) if args.text else ""), Path(args.out)
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
    for together, step_times in zip(found, times, strict=True):
        report.print_tables(together, step_times)
    if args.plot:
        for path in report.draw(found, times, folder):
            print(f"drawn: {path}")


def _complete(trials: list[Trial], records: Records) -> int:
    """Makes all missing runs and writes each one at its end; returns their number."""
    for trial in trials:
        task_class(trial.setting.task)(trial.setting).prepare()
    made = 0
    # The first round chooses learning rates, the second uses them.
    while todo := list(dict.fromkeys(run for trial in trials for run in trial.missing(records))):
        for number, run in enumerate(todo, 1):
            record = run_real(run) if run.real else simulate(run)
            records.add(record)
            made += 1
            loss = "diverged" if record["loss"] is None else f"{record['loss']:.4f}"
            print(
                f"{number}/{len(todo)}  {run.task} {run.method} {run.workers}x{run.batch} "
                f"lr {run.lr:g} seed {run.seed}: {loss}, {record['seconds']:.0f} s",
                file=sys.stderr,
                flush=True,
            )
    return made


def _trials(args: argparse.Namespace, text: str = "") -> list[Trial]:
    """Returns a trial for every task, number of workers, batch, and method; adds default sizes.

    Args:
        args: Values of the options.
        text: Hash of the text files.
    """
    for name, value in SCALES[args.scale].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    given = {"adamw": args.lr_adamw, "lion": args.lr_lion}
    names = ("sequence", "hidden", "layers", "steps", "weight_decay", "evaluations")
    same = {
        name: getattr(args, name) for name in (*names, "real", "warmup", "bf16", "bf16_weights")
    }
    same |= {"betas": tuple(args.betas), "adamw_betas": tuple(args.betas_adamw)}
    same |= {"clip": args.clip or 0.0, "folder": args.out}
    trials = []
    for task, workers, batch, method in itertools.product(
        args.tasks, args.workers, args.batch, args.methods
    ):
        kind, grids = method_of(method).family, task_class(task).grids
        grid = given[kind] or grids[kind]
        of_files: dict[str, Any] = {}
        if task.endswith("text"):
            of_files = {"files": (tuple(args.base_text), tuple(args.text)), "text": text}
        if task == "text":
            of_files |= {"vocabulary": args.vocabulary, "untied": args.untied}
        tuned = task in FINE_TUNING or (task == "text" and args.base_text)
        setting = Setting(
            task=task, method=method, workers=workers, batch=batch, lr=0.0, seed=0,
            base_steps=args.base_steps if tuned else 0, lr_factors=tuple(args.lr_factors),
            **same, **of_files,
        )  # fmt: skip
        if tuned and not setting.base_steps:
            raise ValueError(f"--scale {args.scale} trains no base for {task}; pass --base-steps")
        check_method(setting)
        trials.append(Trial(setting, tuple(sorted(set(grid))), args.seeds))
    return trials


_several, _vocabulary = partial(positive, least=2), partial(positive, least=256)


def _share(text: str) -> float:
    if not 0.0 <= float(text) < 1.0:
        raise argparse.ArgumentTypeError(f"must be at least 0 and below 1 (got {text})")
    return float(text)


def _link(text: str) -> str:
    rate(text)  # Fails now rather than after hours.
    return text


def _factor(text: str) -> tuple[str, float]:
    pattern, _, factor = text.rpartition("=")
    if not pattern:
        raise argparse.ArgumentTypeError(f"{text!r} must be PATTERN=FACTOR, such as *embed*=3")
    return pattern, above_zero(factor)


def _parser() -> argparse.ArgumentParser:
    lines = ["methods (+: only with --real):"]
    for name, method in METHODS.items():
        mark = "+" if needs_real_ranks(name) else " "
        lines += [f" {mark} {name:17}{method.about}"] * (name not in NOT_TRAINED)
    lines += ["", "tasks:", *(f"   {name:17}{line}" for name, (_, line) in TASKS.items())]
    made = Parser(
        prog="python -m benchmarks.convergence",
        description="Train with each method at its best learning rate, and compare the losses.\n"
        "Finished runs are kept: the same command continues where it was stopped.",
        epilog="\n".join([*lines, "", *EXAMPLES]),
    )
    add = made.add_argument
    add("--scale", choices=list(SCALES), default="small", help="Default sizes (default: small).")
    add("--tasks", nargs="+", default=["pretrain"], help="Tasks, see below (default: pretrain).")
    compared = f"Methods, see below (default: {' '.join(COMPARED)})."
    add("--methods", nargs="+", help=compared)
    add("--workers", nargs="+", type=_several, help="Numbers of ranks (default: 2 4 8).")
    add("--batch", nargs="+", type=positive, help="Sequences per rank (default: 8).")
    add("--sequence", type=_several, help="Tokens of a sequence (default: 64).")
    add("--hidden", type=positive, help="Width of the model (default: 64).")
    add("--layers", type=positive, help="Number of layers (default: 2).")
    add("--steps", type=positive, help="Steps of a run (default: 300).")
    text = "Text files that the task text trains on, with no part seen twice (default: none)."
    add("--text", nargs="+", default=[], metavar="FILE", help=text)
    before = "Text files that train the base of the task text (default: random weights)."
    add("--base-text", nargs="+", default=[], metavar="FILE", help=before)
    tokens = "Tokens in the vocabulary of the task text (default: 4096)."
    add("--vocabulary", type=_vocabulary, default=4096, help=tokens)
    untied = "Give the head of the task text its own weights (default: those of the embedding)."
    add("--untied", action="store_true", help=untied)
    base = "Steps that train the base of a fine-tuning task (default: 1000)."
    add("--base-steps", type=positive, help=base)
    seeds = "Number of seeds; the first one chooses the learning rate (default: 3)."
    add("--seeds", type=positive, help=seeds)
    rates = "Learning rates to choose from for {} (default: by task)."
    add("--lr-adamw", nargs="+", type=above_zero, help=rates.format("AdamW"))
    add("--lr-lion", nargs="+", type=above_zero, help=rates.format("Lion and DistributedLion"))
    add("--weight-decay", type=float, default=0.1, help="Weight decay (default: 0.1).")
    clip = (
        "Clip gradients to this norm, those that DDP has averaged, or each rank's own (default: "
        "don't clip; 1 with --scale llm)."
    )
    add("--clip", type=float, metavar="NORM", help=clip)
    betas = "Betas of {} (default: {:g} {:g})."
    add("--betas", nargs=2, type=float, default=BETAS, help=betas.format("Lion", *BETAS))
    of_adamw = betas.format("AdamW", *ADAMW_BETAS)
    add("--betas-adamw", nargs=2, type=float, default=ADAMW_BETAS, help=of_adamw)
    warmup = f"Share of the steps in which the learning rate rises (default: {WARMUP})."
    add("--warmup", type=_share, default=WARMUP, help=warmup)
    bf16 = "Compute the forward pass in bfloat16, by autocast (default: float32)."
    add("--bf16", action="store_true", help=bf16)
    weights = "Train weights of bfloat16, with gradients and state of bfloat16 (default: float32)."
    add("--bf16-weights", action="store_true", help=weights)
    factors = (
        "Multiply the learning rate of parameters whose names match; the first match counts "
        "(default: none)."
    )
    add("--lr-factors", nargs="+", type=_factor, default=[], metavar="PATTERN=FACTOR", help=factors)
    add("--evaluations", type=positive, help="Validation losses per run (default: 6).")
    real = "Start a process for every rank, with gloo (default: simulate all ranks in one process)."
    add("--real", action="store_true", help=real)
    out = "Folder of records, pictures, and bases (default: outputs/study)."
    add("--out", default="outputs/study", help=out)
    links = "Network links to compute step times for (default: 100mbit 1gbit)."
    add("--links", nargs="+", type=_link, default=["100mbit", "1gbit"], help=links)
    compute = "Seconds of forward and backward in computed step times (default: as in the runs)."
    add("--compute-s", type=above_zero, default=0.0, help=compute)
    add("--plot", action="store_true", help="Draw pictures (default: print tables only).")
    finished = "Report finished runs only (default: make the missing runs first)."
    add("--report", action="store_true", help=finished)
    return made
