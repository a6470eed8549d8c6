#!/usr/bin/env bash
# torch.nn.AdaptiveLogSoftmaxWithLoss with few features. Guess: each cluster of the tail keeps at
# least one feature, or there is an error. A cluster of in_features // div_value^i = 0 features has
# an empty weight: its classes all have one probability, whatever it is trained on. One warning
# speaks of zero-element tensors.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q torch==2.13.0 numpy
cd "$folder"
"$folder/venv/bin/python" - <<'END'
import math

import torch
from torch.nn import AdaptiveLogSoftmaxWithLoss

print("torch", torch.__version__)
torch.manual_seed(0)
hidden, target = torch.randn(700, 16), torch.arange(300, 1000)  # a row for each rare class


def trained(div_value: float) -> tuple[AdaptiveLogSoftmaxWithLoss, float]:
    head = AdaptiveLogSoftmaxWithLoss(16, 1000, cutoffs=[10, 100, 300], div_value=div_value)
    optimizer = torch.optim.Adam(head.parameters(), 0.1)
    for _ in range(200):
        optimizer.zero_grad()
        loss = head(hidden, target).loss
        loss.backward()
        optimizer.step()
    return head, loss.item()


few, loss = trained(4.0)
sizes = [cluster[0].out_features for cluster in few.tail]
print("features of the clusters:", sizes, "loss after training:", loss, "log(700):", math.log(700))
assert sizes == [4, 1, 0] and loss > math.log(700)
log_prob = few.log_prob(hidden)[:, 300:]
assert (log_prob == log_prob[:, :1]).all()
all_features, other = trained(1.0)
print("loss with div_value=1:", other)
assert other < math.log(700) / 2
END
