#!/usr/bin/env bash
# Labels without an example in XLinearModel of PECOS. Guess: a score of 0, or the last places. Each
# has the score of a margin of -1 in every row, 0.27 with the post-processor sigmoid, while labels
# that have examples get margins below: one that never occurs is among the first five of nearly
# every row.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q --no-deps libpecos==1.2.8
"$folder/venv/bin/python" -m pip install -q numpy==1.26.4 scipy==1.13.1 scikit-learn==1.5.2 tqdm cloudpickle
cd "$folder"
"$folder/venv/bin/python" - <<'END'
from importlib.metadata import version

import numpy as np
from pecos.xmc.xlinear.model import XLinearModel
from scipy.sparse import csr_matrix

print("libpecos", version("libpecos"))
rng = np.random.default_rng(0)
n_labels, n_seen, n_rows = 40, 32, 600
centers = rng.normal(size=(n_labels, 20))
label = rng.integers(0, n_seen, size=n_rows)  # the last eight labels never occur
rows = csr_matrix((centers[label] + 0.7 * rng.normal(size=(n_rows, 20))).astype(np.float32))
ones = np.ones(n_rows, np.float32)
labels = csr_matrix((ones, (np.arange(n_rows), label)), shape=(n_rows, n_labels))
model = XLinearModel.train(rows, labels)
for name in ("sigmoid", "l3-hinge"):
    found = model.predict(rows, only_topk=n_labels, post_processor=name)
    scores = found.toarray()
    unseen = scores[:, n_seen:]
    place = (-scores).argsort(1, kind="stable").argsort(1)[:, n_seen:].min(1)
    right = (scores.argmax(1) == label).mean()
    print(f"{name}: first label right {right:.2f}; labels that never occur: scores", unseen.min(), unseen.max())
    print("    rows with one of them among the first five:", (place < 5).mean())
    assert right > 0.9 and (place < 5).mean() > 0.9 and unseen.max() - unseen.min() < 1e-6
    if name == "sigmoid":
        assert abs(unseen.mean() - 1 / (1 + np.e)) < 1e-3
END
