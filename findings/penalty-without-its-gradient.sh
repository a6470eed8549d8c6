#!/usr/bin/env bash
# torch.autograd.function.once_differentiable. Guess: a second derivative is an error. It is one only
# where the upstream gradient has a graph; else the term is left out of the second derivative.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q torch==2.13.0 numpy
cd "$folder"
"$folder/venv/bin/python" - <<'END'
import torch
from torch.autograd.function import once_differentiable

print("torch", torch.__version__)


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 3 * x**2 * grad


def penalty(cube):
    """Gradients by x and w of the squared norm of d loss / d x."""
    x, w = (torch.tensor(value, requires_grad=True) for value in (2.0, 5.0))
    (grad,) = torch.autograd.grad(cube(x) + w * x, x, create_graph=True)
    (grad**2).backward()
    return x.grad, w.grad


expected, seen = penalty(lambda x: x**3), penalty(Cube.apply)
print("of x**3:", *expected, "of Cube:", *seen)
assert expected == (torch.tensor(408.0), torch.tensor(34.0))
assert seen == (None, torch.tensor(34.0))

x = torch.tensor(2.0, requires_grad=True)
(grad,) = torch.autograd.grad(Cube.apply(x) ** 2, x, create_graph=True)
try:
    grad.backward()
except RuntimeError as error:
    print("with an upstream graph:", error)
else:
    raise AssertionError("no error")
END
