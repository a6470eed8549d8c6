#!/usr/bin/env bash
# F.cross_entropy(x, y, weight=w) of torch with labels, and with the same labels as one-hot
# probabilities. Guess: one number. With labels the mean divides by the sum of the weights of the
# targets, with probabilities by the number of rows: the loss and its gradient are larger by the
# mean weight.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q torch==2.13.0 numpy
cd "$folder"
"$folder/venv/bin/python" - <<'END'
import torch
import torch.nn.functional as F

print("torch", torch.__version__)
torch.manual_seed(0)
x, y = torch.randn(6, 4), torch.tensor([0, 1, 2, 3, 3, 3])
weight = torch.tensor([1.0, 2.0, 3.0, 10.0])
one_hot = F.one_hot(y, 4).float()
for smoothing in (0.0, 0.1):
    options = {"weight": weight, "label_smoothing": smoothing}
    labels, probabilities = F.cross_entropy(x, y, **options), F.cross_entropy(x, one_hot, **options)
    ratio = (probabilities / labels).item()
    print(f"label_smoothing={smoothing}: labels {labels:.4f} one-hot {probabilities:.4f} ratio {ratio}")
    assert abs(ratio - weight[y].mean().item()) < 1e-5
assert torch.allclose(F.cross_entropy(x, y), F.cross_entropy(x, one_hot))
END
