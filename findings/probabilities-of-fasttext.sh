#!/usr/bin/env bash
# fastText adds 1e-5 to each probability before its logarithm. Guess: the probabilities of a softmax
# sum to 1, and a threshold of 0 lists all classes. With V classes they sum to 1 + V / 100,000; and
# predict(k=all, threshold=0.0) of a hierarchical softmax leaves out rare classes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q fasttext-wheel==0.9.2 "numpy<2"
cd "$folder"
"$folder/venv/bin/python" - <<'END'
from importlib.metadata import version

import fasttext
import numpy as np

rng = np.random.default_rng(0)
with open("train.txt", "w") as file:
    for _ in range(4000):
        c = int(min(199, rng.zipf(1.3) - 1))
        words = f"w{c % 17}_{rng.integers(5)} v{c // 17}_{rng.integers(5)}"
        file.write(f"__label__c{c} {words} {words}\n")
print("fastText", version("fasttext-wheel"))
for loss in ("softmax", "hs"):
    model = fasttext.train_supervised("train.txt", loss=loss, epoch=10, thread=1, verbose=0, dim=16)
    V = len(model.labels)
    listed = model.f.predict("w3_1 v0_2\n", V, 0.0, "strict")
    total = sum(p for p, _ in model.f.predict("w3_1 v0_2\n", V, -1.0, "strict"))
    print(f"{loss}: {V} classes, {len(listed)} listed, sum of the probabilities {total:.5f}")
    if loss == "softmax":
        assert abs(total - (1 + V * 1e-5)) < 2e-5
        assert len(listed) == V
    else:
        assert len(listed) < V
END
