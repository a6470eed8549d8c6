#!/usr/bin/env bash
# The probabilities of a hierarchical softmax of napkinXC. Guess: they sum to 1, as those of its
# squared hinge do. With its logistic loss they sum to 0.99995 = sigmoid(10) for every row: the
# root, which is always right, is a classifier with a fixed score of 10, and its probability is
# multiplied in.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q napkinxc==0.7.2 "numpy<2" scipy scikit-learn
cd "$folder"
"$folder/venv/bin/python" - <<'END'
from importlib.metadata import version

import numpy as np
from napkinxc.models import HSM
from scipy.sparse import csr_matrix

rng = np.random.default_rng(0)
centers = rng.normal(size=(20, 12))
label = rng.integers(0, 20, size=400)
rows = csr_matrix((centers[label] + 0.7 * rng.normal(size=(400, 12))).astype(np.float32))
print("napkinxc", version("napkinxc"))
sums = {}
for loss in ("log", "l2"):
    model = HSM(f"model-{loss}", loss=loss, tree_type="completeKaryInOrder", threads=1, seed=0)
    model.fit(rows, [[int(c)] for c in label])
    found = model.predict_proba(rows[:50], top_k=20)
    sums[loss] = np.array([sum(p for _, p in row) for row in found])
    print(loss, "sums from", sums[loss].min(), "to", sums[loss].max())
assert np.abs(sums["log"] - 1 / (1 + np.exp(-10))).max() < 1e-6
assert np.abs(sums["l2"] - 1).max() < 1e-6
END
