"""Writes a tiny model and a few lines of data into a folder, for the recipes of frameworks."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ' ' + message['content'] + ' <eos> ' }}"
    "{% endfor %}"
)

folder = Path(sys.argv[1])
words = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"w{index}" for index in range(60))]
inner = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=inner,
    eos_token="<eos>",
    bos_token="<bos>",
    pad_token="<pad>",
    unk_token="<unk>",
    chat_template=TEMPLATE,
)
tokenizer.save_pretrained(folder / "model")
config = LlamaConfig(
    vocab_size=len(words),
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=2,
    max_position_embeddings=512,
    pad_token_id=0,
    eos_token_id=1,
    bos_token_id=2,
)
LlamaForCausalLM(config).save_pretrained(folder / "model")

draw = random.Random(0)
rows = []
for _ in range(64):
    question, answer = (" ".join(draw.choices(words[4:], k=8)) for _ in range(2))
    rows.append({"instruction": question, "input": "", "output": answer})
(folder / "data").mkdir(exist_ok=True)
with (folder / "data" / "my.jsonl").open("w") as file:
    for row in rows:
        print(json.dumps(row), file=file)
(folder / "data" / "dataset_info.json").write_text(
    json.dumps({"my_data": {"file_name": "my.jsonl"}})
)
