"""The head in plain PyTorch of docs/architecture.md is the one that from_counts builds."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

import hstree

D, V = 8, 2000
PAGE = Path(__file__).resolve().parents[2] / "docs" / "architecture.md"


def plain_copy(head: hstree.TreeEnsemble) -> Any:
    """The class of the page with the parameters of a head."""
    code = re.search(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    assert code is not None
    page: dict[str, Any] = {}
    exec(code[1], page)
    plain = page["PlainTreeEnsemble"](D, head.below.root_child[:, :V].long()).to(torch.float64)
    assert head.roots is not None
    own = {
        "gate.weight": head.gate.linear.weight,
        "gate.bias": head.gate.linear.bias,
        "root_weight": head.roots.weight,
        "root_bias": head.roots.bias,
        "output_embedding": head.output_embedding,
        "class_bias": head.below.bias,
    }
    plain.load_state_dict(own, strict=False)
    assert set(own) == {name for name, _ in plain.named_parameters()}
    return plain


def test_the_plain_head_is_the_head() -> None:
    head = hstree.TreeEnsemble.from_counts(D, 10_000 / torch.arange(1, V + 1)).double()
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.normal_()
    assert len(head.below.single_class) > 0  # clusters of one class
    plain = plain_copy(head)
    hidden, target = torch.randn(16, D, dtype=torch.float64), torch.randint(V, (16,))
    close = {"rtol": 0.0, "atol": 1e-6}
    torch.testing.assert_close(plain.log_prob(hidden), head.log_prob(hidden), **close)
    log_prob, output = plain(hidden, target), head(hidden, target).output
    torch.testing.assert_close(log_prob, output, **close)
    of_plain = torch.autograd.grad(log_prob.sum(), plain.output_embedding)
    of_head = torch.autograd.grad(output.sum(), head.output_embedding)
    torch.testing.assert_close(of_plain, of_head, **close)
