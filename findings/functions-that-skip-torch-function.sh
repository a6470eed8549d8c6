#!/usr/bin/env bash
# A class that stands for a tensor by __torch_function__, without being one. Guess: all of torch
# asks it, as torch.exp does. A torch.autograd.Function does not: its forward pass gets the object
# itself, and its result has no gradient, without a word.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q torch==2.13.0 numpy
cd "$folder"
"$folder/venv/bin/python" - <<'END'
import torch

print("torch", torch.__version__)


class Later:
    """A tensor that is computed when something reads it."""

    asked: list[str] = []

    def __init__(self, value):
        self.value = value

    def exp(self):
        return self.value.exp()

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.asked.append(func.__name__)
        args = [x.value if isinstance(x, Later) else x for x in args]
        return func(*args, **(kwargs or {}))


class Exp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.kind = type(x)
        ctx.save_for_backward(result := x.exp())
        return result

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0]


x = torch.ones(3, requires_grad=True)
by_torch, by_function, of_value = torch.exp(Later(x)), Exp.apply(Later(x)), Exp.apply(x)
print("asked:", Later.asked)
for name, y in (("torch.exp", by_torch), ("Exp", by_function), ("Exp of the tensor", of_value)):
    print(f"{name}: {y.tolist()} requires_grad={y.requires_grad}")
assert Later.asked == ["exp"]
assert by_torch.requires_grad and of_value.requires_grad and not by_function.requires_grad
END
