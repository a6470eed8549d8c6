#!/usr/bin/env bash
# Cross-entropy of 70,000 equal logits in float16. Guess: log(70,000) = 11.16, which float16 can
# hold. torch on a CPU and JAX say inf, from 65,520 classes on, with a gradient of 0 for all classes
# but the target: they add up the exponentials in float16. In bfloat16 torch is right.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q torch==2.13.0 jax==0.10.2 numpy
cd "$folder"
"$folder/venv/bin/python" - <<'END'
from importlib.metadata import version

import jax
import jax.numpy as jnp
import torch
import torch.nn.functional as F

print({name: version(name) for name in ("torch", "jax")})
for V in (65_519, 65_520, 70_000):
    x = torch.zeros(1, V, dtype=torch.float16, requires_grad=True)
    loss = F.cross_entropy(x, torch.tensor([3]))
    loss.backward()
    of_torch, zeros = loss.item(), int((x.grad == 0).sum())
    row = jnp.zeros((1, V), jnp.float16)
    of_jax = -float(jax.nn.log_softmax(row)[0, 3])
    total = float(jax.nn.softmax(row).astype(jnp.float32).sum())
    print(V, "classes: torch", of_torch, "gradients of 0:", zeros, "JAX", of_jax, "sum of its softmax", total)
    if V < 65_520:
        assert abs(of_torch - 11.09) < 0.02 and abs(of_jax - 11.09) < 0.02 and zeros == 0
    else:
        assert of_torch == of_jax == float("inf") and zeros == V - 1 and total == 0

assert F.cross_entropy(torch.zeros(1, V).bfloat16(), torch.tensor([3])).item() == 11.1875
END
