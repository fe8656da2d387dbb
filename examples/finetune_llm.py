"""Fine-tune a causal language model with `Trainer`, two processes and one bit per parameter.

Without any download, a small Llama learns the bytes of Python's standard library:

    torchrun --standalone --nproc_per_node 2 examples/finetune_llm.py

A model and a data set of your own:

    torchrun --standalone --nproc_per_node 2 examples/finetune_llm.py \
        --model_name_or_path Qwen/Qwen3-0.6B --dataset_name roneneldan/TinyStories \
        --bf16 --learning_rate 1e-5 --max_steps 1000
    ... --model_name_or_path ./my-model --train_file train.txt --validation_file held_out.txt

Every field of `TrainingArguments` is a flag; `--optim adamw_torch --learning_rate 3e-3` trains the
same model with the usual gradient all-reduce.
"""

import gc
import sysconfig
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from datasets import Dataset, DatasetDict, load_dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    default_data_collator,
    set_seed,
)
from transformers.utils import logging

import hf_dlion

# Files of the standard library that the default data set keeps for validation.
HELD_OUT = ("argparse.py", "json/decoder.py", "statistics.py", "tarfile.py", "textwrap.py")


@dataclass
class ExampleArguments:
    """What to train, and on what."""

    model_name_or_path: str | None = field(
        default=None, metadata={"help": "A pretrained model; default: a small new Llama."}
    )
    dataset_name: str | None = field(
        default=None, metadata={"help": "A data set with a column 'text'."}
    )
    dataset_config_name: str | None = field(default=None, metadata={"help": "Its configuration."})
    train_file: str | None = field(default=None, metadata={"help": "A local text or JSON file."})
    validation_file: str | None = field(default=None, metadata={"help": "The same, held out."})
    block_size: int = field(default=128, metadata={"help": "Tokens in one training example."})
    hidden_size: int = field(default=128, metadata={"help": "Width of the new Llama."})
    num_hidden_layers: int = field(default=4, metadata={"help": "Depth of the new Llama."})
    prompt: str = field(default="def read", metadata={"help": "What the final model continues."})


def blocks_of(tokens: list[int], block_size: int) -> Dataset:
    """Cut a stream of tokens into examples of equal length."""
    ends = range(block_size, len(tokens) + 1, block_size)
    blocks = [tokens[end - block_size : end] for end in ends]
    return Dataset.from_dict({"input_ids": blocks, "labels": blocks})


def standard_library(block_size: int) -> DatasetDict:
    """The source of Python's standard library: one token is one byte."""
    root = Path(sysconfig.get_path("stdlib"))
    modules = [*root.glob("*.py"), *(root / "json").glob("*.py"), *(root / "email").glob("*.py")]
    splits: dict[str, list[int]] = {"train": [], "validation": []}
    for path in sorted(modules):
        held_out = path.relative_to(root).as_posix() in HELD_OUT
        splits["validation" if held_out else "train"].extend(path.read_bytes())
    # A fixed slice keeps the evaluations short.
    splits["validation"] = splits["validation"][: 256 * 128]
    return DatasetDict({name: blocks_of(tokens, block_size) for name, tokens in splits.items()})


def tokenized_text(args: ExampleArguments, tokenizer: PreTrainedTokenizerBase) -> DatasetDict:
    """A data set of the hub or local files, tokenized and cut into blocks."""
    if args.dataset_name is not None:
        raw = load_dataset(args.dataset_name, args.dataset_config_name)
    else:
        files = {"train": args.train_file, "validation": args.validation_file}
        kind = "json" if Path(str(args.train_file)).suffix in {".json", ".jsonl"} else "text"
        raw = load_dataset(kind, data_files={k: v for k, v in files.items() if v is not None})
    if "validation" not in raw:
        halves = raw["train"].train_test_split(test_size=0.05, seed=0)
        raw = DatasetDict({"train": halves["train"], "validation": halves["test"]})

    def encode(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        stream = [token for text in batch["text"] for token in [*tokenizer(text).input_ids, *end]]
        size = args.block_size
        blocks = [stream[k - size : k] for k in range(size, len(stream) + 1, size)]
        return {"input_ids": blocks, "labels": blocks}

    return raw.map(encode, batched=True, remove_columns=raw["train"].column_names)


def small_llama(args: ExampleArguments) -> LlamaForCausalLM:
    """A new byte-level Llama, the same on every rank."""
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=args.hidden_size,
        intermediate_size=3 * args.hidden_size,
        num_hidden_layers=args.num_hidden_layers,
        num_attention_heads=max(args.hidden_size // 32, 1),
        max_position_embeddings=2 * args.block_size,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config)


class Progress(TrainerCallback):
    """Prints a line whenever the trainer logs, and measures the steps without evaluations."""

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self.step_began = 0.0
        self.steps = 0
        self.steps_s = 0.0

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        """Starts the clock of a step: its forward and backward passes follow."""
        self.step_began = time.perf_counter()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        """Stops the clock: the optimizer has made its step."""
        self.steps += 1
        self.steps_s += time.perf_counter() - self.step_began

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **_: object,
    ) -> None:
        """Prints the loss, and what the exchange measured where it was logged."""
        if not state.is_world_process_zero or logs is None:
            return
        shown = {"loss": "loss {:.3f}", "eval_loss": "validation loss {:.3f}"}
        shown |= {"dlion/agreement": "agreement {:.2f}", "dlion/wire_mb_per_step": "{:.3f} MB sent"}
        parts = [text.format(float(logs[key])) for key, text in shown.items() if key in logs]
        if parts:
            seconds = time.perf_counter() - self.began
            print(
                f"{seconds:6.1f} s  step {state.global_step:4d}/{state.max_steps}  "
                + ", ".join(parts),
                flush=True,
            )


def report_wire(trainer: Trainer, steps: int, steps_s: float) -> None:
    """Print bytes and times of the exchange; every rank calls this, rank 0 prints.

    Args:
        trainer: Has trained.
        steps: Made by this process: a resumed run made fewer than the trainer counts.
        steps_s: Seconds that they took.
    """
    optimizer = trainer.optimizer
    optimizer = getattr(optimizer, "optimizer", optimizer)  # out of Accelerate's wrapper
    if not isinstance(optimizer, hf_dlion.DistributedLion):
        return
    wire, world_size = optimizer.wire, optimizer.world_size
    steps = max(steps, 1)
    sent: list[int | None] = [wire.bytes_sent // steps]
    if world_size > 1:
        sent = [None] * world_size
        dist.all_gather_object(sent, wire.bytes_sent // steps)
    if not trainer.is_world_process_zero():
        return
    size = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    all_reduce = 2 * (world_size - 1) * size * 2 // world_size
    print(f"\n{size:,} trained parameters, {world_size} ranks, {steps} steps")
    for rank, count in enumerate(sent):
        print(f"rank {rank} sent per step        {count:>12,} bytes")
    print(f"a bf16 gradient all-reduce  {all_reduce:>12,} bytes")
    parts = {"encode": wire.encode_s, "exchange": wire.exchange_s, "apply": wire.apply_s}
    parts = {"compute": steps_s - sum(parts.values()), **parts}
    print("time per step on rank 0: ", end="")
    print(", ".join(f"{name} {1e3 * s / steps:.1f} ms" for name, s in parts.items()))


def plot_losses(history: list[dict[str, float]], path: Path) -> None:
    """Write the curve of training and validation loss."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for key, label, style in (("loss", "training", "-"), ("eval_loss", "validation", "o--")):
        points = [(entry["step"], entry[key]) for entry in history if key in entry]
        axes.plot(*zip(*points, strict=True), style, label=label)
    axes.set(xlabel="step", ylabel="loss (nats per token)")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def continue_prompt(folder: str, prompt: str, tokenizer: PreTrainedTokenizerBase | None) -> str:
    """Reload the saved model and let it write on."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokens = list(prompt.encode()) if tokenizer is None else tokenizer(prompt).input_ids
    inputs = torch.tensor([tokens])
    with torch.no_grad():
        output = model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=160,
            do_sample=True,
            temperature=0.5,
        )[0].tolist()
    return bytes(output).decode(errors="replace") if tokenizer is None else tokenizer.decode(output)


def parse() -> tuple[ExampleArguments, TrainingArguments]:
    """Return the command line's arguments, with this example's defaults."""
    logging.disable_progress_bar()  # of saving and loading
    hf_dlion.register()  # before the parser, which lists the optimizers that it knows
    parser = HfArgumentParser((ExampleArguments, TrainingArguments))
    parser.set_defaults(
        output_dir="outputs/finetune_llm",
        optim="dlion",
        learning_rate=7e-4,
        weight_decay=0.1,
        lr_scheduler_type="cosine",
        warmup_steps=20,
        max_steps=300,
        per_device_train_batch_size=8,
        per_device_eval_batch_size=32,
        eval_on_start=True,
        eval_strategy="steps",
        eval_steps=100,
        logging_steps=20,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        # Without it, Trainer does not see the two processes on a machine without a GPU.
        use_cpu=not torch.cuda.is_available(),
        dataloader_pin_memory=torch.cuda.is_available(),
        ddp_find_unused_parameters=False,
    )
    return parser.parse_args_into_dataclasses()


def train(example: ExampleArguments, training: TrainingArguments) -> None:
    """Train, report, save, reload and generate."""
    set_seed(training.seed)

    tokenizer: PreTrainedTokenizerBase | None = None
    model: PreTrainedModel
    if example.model_name_or_path is None:
        model = small_llama(example)
    else:
        model = AutoModelForCausalLM.from_pretrained(example.model_name_or_path)
        tokenizer = AutoTokenizer.from_pretrained(example.model_name_or_path)
    if example.dataset_name is None and example.train_file is None:
        data = standard_library(example.block_size)
    else:
        with training.main_process_first():  # the others read its cache
            data = tokenized_text(example, tokenizer)

    progress = Progress()
    trainer = Trainer(
        model=model,
        args=training,
        train_dataset=data["train"],
        eval_dataset=data["validation"],
        processing_class=tokenizer,
        data_collator=default_data_collator,  # equal lengths, nothing to pad
        callbacks=[progress],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
    report_wire(trainer, progress.steps, progress.steps_s)
    trainer.save_model()
    if trainer.is_world_process_zero():
        history = trainer.state.log_history
        losses = [entry["eval_loss"] for entry in history if "eval_loss" in entry]
        print(f"validation loss {losses[0]:.3f} before, {losses[-1]:.3f} after training")
        curve = Path(training.output_dir) / "loss.png"
        plot_losses(history, curve)
        print(f"loss curve: {curve}; model: {training.output_dir}; reloaded, it writes:\n")
        print(continue_prompt(training.output_dir, example.prompt, tokenizer))


def main() -> None:
    """Run `train`, and end the process group that Trainer began."""
    train(*parse())
    # gloo may abort the process if a DDP model outlives its process group.
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
