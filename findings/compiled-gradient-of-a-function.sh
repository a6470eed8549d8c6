#!/usr/bin/env bash
# torch.compile(torch.func.grad(f)), where f has an autograd.Function with setup_context around an
# operator without a gradient of its own. Guess: what torch.func.grad(f) gives. The compiled
# gradient is 0, with a warning; if the operator comes from custom_op, it is an error. Of a Function
# in plain torch it is right.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q torch==2.13.0 numpy
cd "$folder"
"$folder/venv/bin/python" - <<'END'
import warnings

import torch

print("torch", torch.__version__)
library = torch.library.Library("findings", "DEF")
library.define("cube(Tensor x) -> Tensor")
library.impl("cube", lambda x: x**3, "CPU")
torch.library.register_fake("findings::cube")(torch.empty_like)


def gradient_of(cube, compiled):
    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(x):
            return cube(x)

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(*inputs)

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            return grad * 3 * x**2

    gradient = torch.func.grad(lambda x: Cube.apply(x).sum())
    if compiled:
        gradient = torch.compile(gradient, backend="aot_eager")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = gradient(torch.tensor([1.0, 2.0])).tolist()
    return result, any("autograd kernel was not registered" in str(w.message) for w in caught)


seen = {}
for name, cube in (("operator", torch.ops.findings.cube), ("plain torch", lambda x: x**3)):
    for compiled in (False, True):
        seen[name, compiled] = gradient_of(cube, compiled)
        print(f"{name}, compiled={compiled}: gradient {seen[name, compiled][0]}")
assert seen.pop(("operator", True)) == ([0.0, 0.0], True)
assert {tuple(gradient) for gradient, _ in seen.values()} == {(3.0, 12.0)}
END
