#!/usr/bin/env bash
# Labels of -1 and -100, which mark padding elsewhere, in cross-entropies of optax and mlx. Guess:
# an error, NaN, or a loss of 0. A label of -1 is silently the last class in both, and its rows are
# trained on; in optax -100 is NaN.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q optax==0.2.8 jax==0.10.2 "mlx[cpu]==0.32.4" numpy
cd "$folder"
"$folder/venv/bin/python" - <<'END'
from importlib.metadata import version

import jax.numpy as jnp
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import optax

logits = np.random.default_rng(0).normal(size=(3, 5)).astype(np.float32)
rows, labels = np.repeat(logits[:1], 3, 0), np.array([4, -1, -100], np.int32)
of_optax = np.asarray(
    optax.softmax_cross_entropy_with_integer_labels(jnp.asarray(rows), jnp.asarray(labels))
)
of_mlx = np.array(nn.losses.cross_entropy(mx.array(rows[:2]), mx.array(labels[:2])))
print("optax", version("optax"), "losses for the labels 4, -1, -100:", of_optax)
print("mlx", version("mlx"), "losses for the labels 4, -1:", of_mlx)
assert of_optax[0] == of_optax[1] and np.isnan(of_optax[2])
assert of_mlx[0] == of_mlx[1]
END
