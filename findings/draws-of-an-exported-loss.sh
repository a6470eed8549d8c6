#!/usr/bin/env bash
# A sampled loss that draws its classes with numpy, in torch.export and torch.compile. Guess: an
# error, or draws as in the eager model. The exported program has the draws of its export for ever
# (with strict=True it draws anew); the compiled one draws with torch's generator, and
# numpy.random.seed does nothing.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q torch==2.13.0 numpy==2.3.5
cd "$folder"
"$folder/venv/bin/python" - <<'END'
import numpy as np
import torch

print("torch", torch.__version__, "numpy", np.__version__)


class Draw(torch.nn.Module):
    def forward(self, x):
        return x + torch.from_numpy(np.random.randint(0, 10_000, 4))


x = torch.zeros(4)


def draws(model) -> list[list[float]]:
    """Three calls, each with the same seed of numpy."""
    result = []
    for _ in range(3):
        np.random.seed(0)
        result.append(model(x).tolist())
    return result


def differ(model) -> int:
    return len({tuple(model(x).tolist()) for _ in range(5)})


exported = torch.export.export(Draw(), (x,)).module()
strict = torch.export.export(Draw(), (x,), strict=True).module()
compiled = torch.compile(Draw(), backend="aot_eager")
counts = [differ(model) for model in (Draw(), exported, strict, compiled)]
print("different of 5 draws: eager, exported, strict, compiled:", counts)
assert counts == [5, 1, 5, 5]
eager, seeded = draws(Draw()), draws(compiled)
print("with one seed of numpy, eager:", eager, "compiled:", seeded)
assert eager[0] == eager[1] and seeded[0] != seeded[1]
END
