#!/usr/bin/env bash
# A search of ScaNN that finds fewer than k neighbours, because the leaves that it looks at hold
# fewer. Guess: rows end with -1, as in faiss. In a batch they end with index 0, a row that exists,
# and distance NaN; a single query returns a shorter array.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q scann==1.4.2 "numpy<3"
cd "$folder"
"$folder/venv/bin/python" - <<'END'
from importlib.metadata import version

import numpy as np
import scann

vectors = np.random.default_rng(0).normal(size=(1000, 16)).astype(np.float32)
tree = scann.scann_ops_pybind.builder(vectors, 5, "dot_product").tree(
    num_leaves=100, num_leaves_to_search=1, training_sample_size=1000
)
searcher = tree.score_brute_force().build()
k = 200
index, distance = searcher.search_batched(vectors[1:5], final_num_neighbors=k)
alone, _ = searcher.search(vectors[1], final_num_neighbors=k)
missing = np.isnan(distance)
print("scann", version("scann"), "dtype of the indices:", index.dtype)
print("found of", k, "in a batch:", (~missing).sum(1), "alone:", len(alone))
print("indices of those that are missing:", np.unique(index[missing]))
assert missing.any(1).all() and (index[missing] == 0).all()
assert len(alone) == (~missing[0]).sum() < k
END
