"""Fine-tune on conversations with TRL's `SFTTrainer`, two processes and one bit per parameter.

Without any download, a small new Llama learns to say what the functions of Python's standard
library do; the conversations are made from their docstrings, as a file of JSON lines:

    torchrun --standalone --nproc_per_node 2 examples/sft.py

A model and conversations of your own (a line is {"messages": [{"role": "user", "content": ...},
{"role": "assistant", "content": ...}]}, or any other form that TRL reads), or a data set of the
hub; with LoRA only the adapter's votes travel:

    torchrun --standalone --nproc_per_node 2 examples/sft.py --assistant_only_loss \
        --model_name_or_path Qwen/Qwen3-0.6B --train_file my.jsonl --learning_rate 1e-5
    ... --model_name_or_path Qwen/Qwen3-0.6B --dataset_name trl-lib/Capybara \
        --use_peft --lora_r 16 --learning_rate 1e-4

The folder that it writes is what the usual evaluation reads next (pip install "lm-eval[hf]"), here
on common-sense questions:

    lm_eval --model hf --model_args pretrained=outputs/sft --apply_chat_template --batch_size auto \
        --tasks arc_easy,arc_challenge,boolq,piqa,social_iqa,hellaswag,openbookqa
    lm_eval --model hf --model_args pretrained=Qwen/Qwen3-0.6B,peft=outputs/sft ...  # of LoRA

Every field of TRL's `ScriptArguments`, `SFTConfig` and `ModelConfig` is a flag; `--optim
adamw_torch --learning_rate 3e-3` trains the same model with the usual gradient all-reduce.
"""

import ast
import gc
import json
import sysconfig
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from datasets import DatasetDict, disable_progress_bars, load_dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    set_seed,
)
from transformers.utils import logging
from trl import ModelConfig, ScriptArguments, SFTConfig, SFTTrainer, TrlParser, get_peft_config

import hf_dlion

# ChatML. The marks of generation tell --assistant_only_loss which tokens the assistant says.
CHAT_TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\n' }}
{%- if message['role'] == 'assistant' %}
{%- generation %}{{- message['content'] + '<|im_end|>' }}{%- endgeneration %}{{- '\n' }}
{%- else %}
{{- message['content'] + '<|im_end|>\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""


@dataclass
class ExampleArguments(ScriptArguments):
    """TRL's choice of a data set, and what this example adds."""

    train_file: str | None = field(default=None, metadata={"help": "Local JSON lines."})
    prompt: str = field(
        default="What does textwrap.fill do?", metadata={"help": "Asked of the final model."}
    )


def write_conversations(path: Path) -> None:
    """Write a question about every documented function of the standard library, and its answer."""
    with path.open("w", encoding="utf-8") as file:
        for module in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
            for node in ast.walk(ast.parse(module.read_bytes())):
                if not isinstance(node, ast.FunctionDef | ast.ClassDef):
                    continue
                answer = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
                if not 10 <= len(answer) <= 300:
                    continue
                question = f"What does {module.stem}.{node.name} do?"
                turns = {"user": question, "assistant": answer}
                messages = [{"role": role, "content": text} for role, text in turns.items()]
                file.write(json.dumps({"messages": messages}) + "\n")


def write_small_model(folder: Path) -> None:
    """Write a new Llama and a tokenizer of single bytes, as a download would have left them."""
    marks = ["<|im_start|>", "<|im_end|>", "<|pad|>"]
    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *marks]
    inner = Tokenizer(models.BPE({word: index for index, word in enumerate(words)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(marks)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<|im_end|>", pad_token="<|pad|>"
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def conversations(args: ExampleArguments) -> DatasetDict:
    """A training and a held-out split of the file or of the hub's data set."""
    if args.train_file is None:
        data = load_dataset(args.dataset_name, args.dataset_config)
    else:
        data = load_dataset("json", data_files={args.dataset_train_split: args.train_file})
    if args.dataset_test_split in data:
        train, test = data[args.dataset_train_split], data[args.dataset_test_split]
    else:
        halves = data[args.dataset_train_split].train_test_split(test_size=0.05, seed=0)
        train, test = halves["train"], halves["test"]
    return DatasetDict({"train": train, "test": test.select(range(min(len(test), 256)))})


def reply(trainer: SFTTrainer, prompt: str) -> str:
    """Let the model answer a user."""
    tokenizer, model = trainer.processing_class, trainer.accelerator.unwrap_model(trainer.model)
    tokens = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    ).to(model.device)
    model.eval()
    with torch.no_grad():
        output = model.generate(**tokens, max_new_tokens=160, do_sample=True, temperature=0.5)
    return tokenizer.decode(output[0, tokens["input_ids"].shape[1] :], skip_special_tokens=True)


def parse() -> tuple[ExampleArguments, SFTConfig, ModelConfig]:
    """Return the command line's arguments, with this example's defaults."""
    logging.disable_progress_bar()  # of saving and loading
    disable_progress_bars()
    hf_dlion.register()  # before the parser, which lists the optimizers that it knows
    cuda = torch.cuda.is_available()
    parser = TrlParser((ExampleArguments, SFTConfig, ModelConfig))
    parser.set_defaults(
        output_dir="outputs/sft",
        optim="dlion",
        learning_rate=2e-3,
        weight_decay=0.1,
        lr_scheduler_type="cosine",
        warmup_steps=10,
        max_steps=100,
        max_length=512,
        per_device_train_batch_size=8,
        per_device_eval_batch_size=32,
        eval_on_start=True,
        eval_strategy="steps",
        eval_steps=50,
        logging_steps=10,
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
    """Train, report, save and answer."""
    set_seed(training.seed)
    folder = Path(training.output_dir)
    with training.main_process_first():  # the others read what it wrote, and its cache
        if training.local_process_index == 0:
            folder.mkdir(parents=True, exist_ok=True)
        if model.model_name_or_path is None:
            model.model_name_or_path = str(folder / "base")
            if training.local_process_index == 0:
                write_small_model(folder / "base")
        if example.train_file is None and example.dataset_name is None:
            example.train_file = str(folder / "conversations.jsonl")
            if training.local_process_index == 0:
                write_conversations(folder / "conversations.jsonl")
        data = conversations(example)

    trainer = SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(
            model.model_name_or_path, revision=model.model_revision, dtype=model.dtype
        ),
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
    losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    trained = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    print(f"validation loss {losses[0]:.3f} before, {losses[-1]:.3f} after training")
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)  # out of Accelerate's
    if isinstance(optimizer, hf_dlion.DistributedLion):
        sent = optimizer.wire.bytes_sent // max(trainer.state.global_step, 1)
        print(f"{trained:,} trained parameters, {sent:,} bytes sent per step and rank")
    print(f"model: {training.output_dir}; asked {example.prompt!r}, it says:\n")
    print(reply(trainer, example.prompt))


def main() -> None:
    """Run `train`, and end the process group that Trainer began."""
    train(*parse())
    # gloo may abort the process if a DDP model outlives its process group.
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
