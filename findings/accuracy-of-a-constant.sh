#!/usr/bin/env bash
# Top-k accuracy of scores that are all equal, as those of an untrained output layer whose weights
# start at zero. Guess: k / V. Keras says 1.0 for any k, for k = 1 too, where its accuracy is 0.1:
# every class that ties with the k-th counts.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q keras==3.15.1 jax==0.10.2 numpy
cd "$folder"
"$folder/venv/bin/python" - <<'END'
import os

os.environ["KERAS_BACKEND"] = "jax"
import keras
import numpy as np

print("keras", keras.__version__)
V = 10
label = np.arange(1000) % V
scores = np.zeros((len(label), V), np.float32)
seen = {}
for k in (1, 3):
    metric = keras.metrics.SparseTopKCategoricalAccuracy(k=k)
    metric.update_state(label, scores)
    seen[k] = float(metric.result())
    print(f"top {k}: {seen[k]}")
accuracy = float(keras.metrics.sparse_categorical_accuracy(label, scores).mean())
print("accuracy:", accuracy)
assert seen == {1: 1.0, 3: 1.0} and abs(accuracy - 0.1) < 1e-6
END
