#!/usr/bin/env bash
# recommend(N=) of implicit with the items that a user has already. Guess: they are left out, and
# fewer than N come where there are no others. They come all the same, at the end, with a score of
# -3.4e38; and beyond the number of items come item 0 and score 0 again and again, better than many
# that are real.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q implicit==0.7.3 "numpy<3" scipy
cd "$folder"
"$folder/venv/bin/python" - <<'END'
import implicit
import numpy as np
from implicit.als import AlternatingLeastSquares
from scipy.sparse import csr_matrix

print("implicit", implicit.__version__)
seen = csr_matrix((np.random.default_rng(0).random((30, 12)) < 0.6).astype(np.float32))
model = AlternatingLeastSquares(factors=8, iterations=3, random_state=0)
model.fit(seen, show_progress=False)
items, scores = model.recommend(0, seen[0], N=12, filter_already_liked_items=True)
liked = np.isin(items, seen[0].indices)
print("liked items in the list:", items[liked], "scores:", scores[liked])
assert liked.sum() == seen[0].nnz
assert (scores[liked] == np.finfo(np.float32).min).all()
items, scores = model.recommend(0, seen[0], N=20, filter_already_liked_items=False)
print("20 of 12 items:", items, scores[-8:])
assert (items[12:] == 0).all() and (scores[12:] == 0).all() and scores[11] < 0
END
