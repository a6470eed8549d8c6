#!/usr/bin/env bash
# Probabilities of a softmax over a million classes in float32 do not sum to 1. One class has three
# quarters of the mass, the others share the rest. Guess: each library is right to 1e-6, since these
# sums are what it is for. They add up the small terms in float32 one after the other; torch's own
# logsumexp does not.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q torch==2.13.0 "mlx[cpu]==0.32.4" jax==0.10.2 openvino==2026.4.1 numpy
cd "$folder"
"$folder/venv/bin/python" - <<'END'
from importlib.metadata import version

import jax
import mlx.core as mx
import numpy as np
import openvino as ov
import torch
from openvino import opset13

V = 1_000_001
scores = np.zeros((1, V), np.float32)
scores[0, 77] = np.log(3 * V)
x = torch.from_numpy(scores)
parameter = opset13.parameter([1, V], np.float32)
model = ov.compile_model(ov.Model([opset13.log_softmax(parameter, 1)], [parameter]), "CPU")
log_prob = {
    "torch, log_softmax": x.log_softmax(1).numpy(),
    "torch, softmax": x.softmax(1).log().numpy(),
    "mlx, softmax": np.log(np.array(mx.softmax(mx.array(scores), axis=1))),
    "openvino, log_softmax": next(iter(model(scores).values())),
    "torch, x - logsumexp": (x - x.logsumexp(1, keepdim=True)).numpy(),
    "jax, log_softmax": np.asarray(jax.nn.log_softmax(scores)),
}
print({name: version(name) for name in ("torch", "mlx", "openvino", "jax")})
wrong = []
for name, values in log_prob.items():
    total = np.exp(values.astype(np.float64)).sum()
    print(f"{name:24} sum of the probabilities {total:.6f}")
    wrong.append(abs(total - 1) > 1e-4)
assert wrong == [True, True, True, True, False, False], wrong
END
