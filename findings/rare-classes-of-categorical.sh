#!/usr/bin/env bash
# torch.distributions.Categorical(probs=p).log_prob(y) for rare classes. Guess: log p(y).
# Probabilities below 1.19e-7 count as 1.19e-7, so that 2^24 equal classes have a probability of 2
# together, and a class with p = 0 has log P = -15.94. The same with logits=p.log() is right, and so
# is numpyro.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q torch==2.13.0 numpyro==0.22.0 jax==0.10.2 numpy
cd "$folder"
"$folder/venv/bin/python" - <<'END'
from importlib.metadata import version

import numpy as np
import numpyro.distributions as of_numpyro
import torch
from torch.distributions import Categorical

print({name: version(name) for name in ("torch", "numpyro")})
p = torch.tensor([1 - 1e-6, 1e-6 - 1e-9, 1e-9, 0.0])
classes = torch.arange(4)
seen = Categorical(probs=p).log_prob(classes)
other = of_numpyro.Categorical(probs=p.numpy()).log_prob(classes.numpy())
print("log p: ", p.log())
print("torch: ", seen)
print("numpyro:", other)
assert torch.allclose(seen[:2], p.log()[:2]) and (seen[2:] > -15.95).all()
assert torch.equal(Categorical(logits=p.log()).log_prob(classes)[2:], p.log()[2:])
assert np.allclose(other, p.log().numpy())

V = 2**24
p = torch.full((V,), 1 / V)
uniform = Categorical(probs=p)
log_prob = uniform.log_prob(torch.tensor(0)).item()
total = V * np.exp(log_prob)
print(V, "equal classes: log P =", log_prob, "sum of the probabilities", total)
assert abs(total - 2) < 1e-3
END
