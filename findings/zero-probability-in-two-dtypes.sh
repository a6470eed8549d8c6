#!/usr/bin/env bash
# sklearn.metrics.log_loss of a class with probability 0. Guess: inf, or one large number. It is
# 15.9 in float32 and 36.0 in float64, of the same zeros, and in float16 6.9: probabilities are
# clipped at the epsilon of their dtype.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q scikit-learn==1.9.1 numpy
cd "$folder"
"$folder/venv/bin/python" - <<'END'
from importlib.metadata import version

import numpy as np
from sklearn.metrics import log_loss

print("scikit-learn", version("scikit-learn"))
seen = []
for dtype in (np.float16, np.float32, np.float64):
    seen.append(log_loss([1], np.array([[1, 0]], dtype), labels=[0, 1]))
    print(dtype.__name__, "loss of a probability of 0:", seen[-1], "-log(eps):", -np.log(np.finfo(dtype).eps))
    assert abs(seen[-1] + np.log(np.finfo(dtype).eps)) < 0.01
END
