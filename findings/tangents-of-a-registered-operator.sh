#!/usr/bin/env bash
# An operator of torch.library.custom_op whose gradient register_autograd has, with setup_context.
# Guess: torch.func.grad takes it, since that method is what torch.func asks for; a forward-mode
# derivative is an error. torch.func.grad says that the method is missing; torch.func.jvp returns a
# derivative of zero.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q torch==2.13.0 numpy
cd "$folder"
"$folder/venv/bin/python" - <<'END'
import torch

print("torch", torch.__version__)


@torch.library.custom_op("findings::cube", mutates_args=())
def cube(x: torch.Tensor) -> torch.Tensor:
    return x**3


def setup_context(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def backward(ctx, grad):
    (x,) = ctx.saved_tensors
    return grad * 3 * x**2


cube.register_autograd(backward, setup_context=setup_context)
x = torch.tensor([1.0, 2.0], requires_grad=True)
(grad,) = torch.autograd.grad(cube(x).sum(), x)
x = x.detach()
value, tangent = torch.func.jvp(cube, (x,), (torch.ones(2),))
print("gradient:", grad, "tangent of torch.func.jvp:", tangent)
assert grad.tolist() == [3.0, 12.0] and tangent.tolist() == [0.0, 0.0]
assert torch.func.jvp(lambda x: x**3, (x,), (torch.ones(2),))[1].tolist() == [3.0, 12.0]
try:
    torch.func.grad(lambda x: cube(x).sum())(x)
except RuntimeError as error:
    print("torch.func.grad:", error)
    assert "setup_context" in str(error)
else:
    raise AssertionError("no error")
END
