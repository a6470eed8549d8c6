"""The chunked losses against the whole matrix of logits in torch's own operators."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from hstree.ops import LogitFunction, mixture_cross_entropy, monotone_cross_entropy
from ops.test_mixture_log_prob import D, K, V, arguments, gradients, targets


@pytest.mark.parametrize("ignore_index", [-100, -1, 3, V + 2])
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_monotone_cross_entropy_is_cross_entropy(
    ignore_index: int, reduction: str, device: torch.device
) -> None:
    given, target = arguments(1, device), targets(device, ignore_index)
    h, w, b = given["latent"].detach()[:, 0].requires_grad_(), given["weight"], given["bias"]
    options: dict[str, Any] = {"ignore_index": ignore_index, "reduction": reduction}
    for function in (LogitFunction(), LogitFunction(0.0, 2.0)):
        loss = monotone_cross_entropy(h, w, b, target, function, **options, chunk_rows=6)
        expected = F.cross_entropy(function(F.linear(h, w, b)), target, **options)
        torch.testing.assert_close(loss, expected)
        for a, e in zip(
            gradients(loss.sum(), [h, w, b]), gradients(expected.sum(), [h, w, b]), strict=True
        ):
            torch.testing.assert_close(a, e)


def test_mixture_cross_entropy_is_the_documented_formula(device: torch.device) -> None:
    given, target = arguments(K, device), targets(device, -100)
    logits = F.linear(given["latent"], given["weight"], given["bias"])
    log_prob = (given["log_prior"][:, :, None] + logits.log_softmax(-1)).logsumexp(1)
    expected = F.nll_loss(log_prob, target)
    loss = mixture_cross_entropy(*given.values(), target)
    torch.testing.assert_close(loss, expected)
    inputs = list(given.values())
    for a, e in zip(gradients(loss, inputs), gradients(expected, inputs), strict=True):
        torch.testing.assert_close(a, e)


def test_bad_dtypes_and_targets() -> None:
    h, w = torch.randn(4, D), torch.randn(V, D)
    y = torch.tensor([0, 1, V, 2])
    for value in (V, -7, 2**40):
        bad = torch.tensor([0, 1, value, 2])
        with pytest.raises(
            ValueError, match=rf"target: .*\[0, 41\) or ignore_index -100, got {value}"
        ):
            monotone_cross_entropy(h, w, None, bad)
    y = y.clamp(max=V - 1)
    with pytest.raises(
        ValueError, match=r"weight: expected dtype torch.float32, got torch.float64"
    ):
        monotone_cross_entropy(h, w.double(), None, y)
    with pytest.raises(ValueError, match=r"target: .*torch.int64 or torch.uint8, .*torch.int32"):
        monotone_cross_entropy(h, w, None, y.int())
    with pytest.raises(ValueError, match=r"latent: expected a floating-point dtype"):
        monotone_cross_entropy(h.long(), w, None, y)
    with pytest.raises(ValueError, match=r"hidden: expected shape \[N, D\], got \(4, 1, 7\)"):
        monotone_cross_entropy(h[:, None], w, None, y)
