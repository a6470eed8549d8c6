#!/usr/bin/env bash
# Top-k accuracy of scores that are all equal, as those of an untrained output layer whose weights
# start at zero. Guess: k / V. Keras says 1.0 for any k, even for k = 1 where its accuracy is 0.1:
# every class that ties counts. scikit-learn takes the last classes, so that the value depends on
# their order.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q keras==3.15.1 jax==0.10.2 scikit-learn==1.9.1 numpy
cd "$folder"
"$folder/venv/bin/python" - <<'END'
import os

os.environ["KERAS_BACKEND"] = "jax"
from importlib.metadata import version

import keras
import numpy as np
from sklearn.metrics import top_k_accuracy_score

print({name: version(name) for name in ("keras", "scikit-learn")})
V = 10
label = np.r_[np.arange(1000) % V, np.zeros(1000, np.int64)]  # class 0 is frequent
scores = np.zeros((len(label), V), np.float32)
seen = {}
for k in (1, 3):
    metric = keras.metrics.SparseTopKCategoricalAccuracy(k=k)
    metric.update_state(label, scores)
    last = top_k_accuracy_score(label, scores, k=k)
    first = top_k_accuracy_score(V - 1 - label, scores, k=k)
    seen[k] = float(metric.result()), last, first
    print(f"top {k}: Keras {seen[k][0]}, scikit-learn {last}, with the classes in reverse {first}")
accuracy = float(keras.metrics.sparse_categorical_accuracy(label, scores).mean())
print("accuracy of Keras:", accuracy)
assert seen[1][0] == seen[3][0] == 1.0 and abs(accuracy - 0.55) < 1e-6
assert np.allclose(seen[3][1:], (0.15, 0.65))
END
