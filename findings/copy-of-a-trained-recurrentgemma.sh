#!/usr/bin/env bash
# copy.deepcopy of a RecurrentGemma after a training step. Guess: it works, as for every other model
# of transformers. It raises RuntimeError: a training step leaves its recurrent state, which has a
# graph, in the module. After a step without gradients it can be copied again.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q transformers==5.24.0 torch==2.13.0
cd "$folder"
"$folder/venv/bin/python" - <<'END'
import copy

import torch
import transformers
from transformers import RecurrentGemmaConfig, RecurrentGemmaForCausalLM

print("transformers", transformers.__version__)
sizes = dict(vocab_size=50, hidden_size=32, intermediate_size=64, num_hidden_layers=3)
config = RecurrentGemmaConfig(
    **sizes, num_attention_heads=2, lru_width=32, attention_window_size=16
)
model = RecurrentGemmaForCausalLM(config)
copy.deepcopy(model)
ids = torch.randint(50, (1, 8))
model(input_ids=ids, labels=ids).loss.backward()
try:
    copy.deepcopy(model)
    raised = None
except RuntimeError as error:
    raised = str(error).split(". ")[0]
print("after a training step:", raised)
assert raised is not None
with torch.no_grad():
    model(input_ids=ids)
copy.deepcopy(model)
END
