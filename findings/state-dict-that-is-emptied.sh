#!/usr/bin/env bash
# save_pretrained(state_dict=d) of transformers. Guess: d is read. It is emptied: whoever keeps its
# weights in d, for another file or to load them again, has none after the call.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q transformers==5.24.0 torch==2.13.0
cd "$folder"
"$folder/venv/bin/python" - <<'END'
import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

print("transformers", transformers.__version__)
sizes = dict(vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=1)
heads = dict(num_attention_heads=2, num_key_value_heads=2)
model = LlamaForCausalLM(LlamaConfig(**sizes, **heads))
weights = {name: value.clone() for name, value in model.state_dict().items()}
before = len(weights)
model.save_pretrained("saved", state_dict=weights)
print("entries before:", before, "after:", len(weights))
loaded = LlamaForCausalLM.from_pretrained("saved").state_dict()
assert all(torch.equal(value, loaded[name]) for name, value in model.state_dict().items())
assert before == 12 and len(weights) == 0
END
