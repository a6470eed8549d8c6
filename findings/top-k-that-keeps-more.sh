#!/usr/bin/env bash
# top_k in the generation of transformers. Guess: at most k tokens are left. All tokens that tie
# with the k-th are: logits that a model computes in bfloat16 have ties, top_k=1 then draws among
# the best, where do_sample=False takes the first, and an output layer whose weights are zero keeps
# the whole vocabulary.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q torch==2.13.0 transformers==5.24.0 numpy
cd "$folder"
"$folder/venv/bin/python" - <<'END'
import torch
import transformers
from transformers import TopKLogitsWarper

print("transformers", transformers.__version__)
torch.manual_seed(0)
V = 50_000


def left(scores: torch.Tensor, k: int) -> list[int]:
    """Number of tokens that each row may draw."""
    return TopKLogitsWarper(k)(None, scores).isfinite().sum(1).tolist()


exact = 2 * torch.randn(8, V)
scores = exact.bfloat16().float()  # generate() reads logits of any dtype as float32
print("float32, k = 50: ", left(exact, 50))
print("bfloat16, k = 50:", left(scores, 50))
print("bfloat16, k = 1: ", left(scores, 1))
print("zeros, k = 50:   ", left(torch.zeros(1, V), 50))
assert left(exact, 50) == [50] * 8
assert max(left(scores, 50)) > 50 and max(left(scores, 1)) > 1
assert left(torch.zeros(1, V), 50) == [V]
END
