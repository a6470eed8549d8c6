"""Runs operators at a limit, in a process of its own: `python -m ops.limited NAME` in tests/.

memory    with too little memory; the limit holds for the whole process
elements  on more than 2^31 elements, those of `elements NAME`: 10 GB of memory
"""

from __future__ import annotations

import ctypes
import resource
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from heads.support import V, trees
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from hstree.heads import PLIF, ForestSoftmax, Head, ScreenedSoftmax, TreeEnsemble
from hstree.ops import feature_gather, piecewise, sparse_adam_, tree_topk

D = 16
_PR_SET_THP_DISABLE = 41
MIB = 1 << 20


class Recorder(TorchDispatchMode):
    """Keeps the first call of every operator of hstree, with its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, Callable[[], Any]] = {}
        self.arguments: dict[str, list[Any]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace == "hstree":
            kept = [x.detach().clone() if isinstance(x, Tensor) else x for x in args]
            self.arguments.setdefault(func.__name__, kept)
            self.calls.setdefault(func.__name__, lambda: func(*kept, **(kwargs or {})))
        return func(*args, **(kwargs or {}))


def tree_heads() -> list[Head]:
    """Heads that use all tree operators."""
    return [
        TreeEnsemble(D, V, trees("huffman", 3, 8, True), subset_size=9),
        TreeEnsemble(D, V, trees("huffman", 2, 2, True), sparse=True),
        TreeEnsemble(D, V, trees("cluster", 2, 8)),
        TreeEnsemble(D, V, trees("cluster", 2, 8), sparse=True),
    ]


def recorded(rows: int) -> dict[str, Callable[[], Any]]:
    """A call of every operator with a kernel in C++, on so many rows."""
    torch.manual_seed(0)
    hidden, target = torch.randn(rows, D), torch.randint(V, (rows,))
    with Recorder() as recorder:
        for head in (*tree_heads(), PLIF(D, V)):
            x = hidden.clone().requires_grad_()
            head(x, target).loss.backward()
            head.log_prob(x).sum().backward()
            with torch.no_grad():
                if isinstance(head, TreeEnsemble):
                    tree_topk(**head._walk(hidden), k=3)
                    head.topk(hidden, V)
                head.sample(hidden)
        ScreenedSoftmax.from_linear(nn.Linear(D, V), exact=9).log_prob(hidden)
        with torch.no_grad():
            ForestSoftmax(D, V, clusters=4).log_prob(hidden)
        index = torch.tensor([[0, 3, 5]], dtype=torch.int32)
        feature_gather(hidden.clone().requires_grad_(), index).sum().backward()
        table = torch.randn(8, 4, requires_grad=True)
        piecewise(hidden.clone().requires_grad_(), table, 1.0).sum().backward()
        state = [torch.zeros(rows, D) for _ in range(3)]
        rule = {"step": 1, "lr": 0.1, "beta1": 0.9, "beta2": 0.9, "eps": 1e-8}
        sparse_adam_(*state, torch.arange(rows)[None], hidden, **rule)
    return recorder.calls


def limit(extra: int | None) -> None:
    """Lets the process take so many bytes more; None: any number."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (hard if extra is None else used + extra, hard))


def exhaust_memory() -> None:
    """Each operator with ever more memory, until it has enough: each failure is RuntimeError."""
    calls, small = recorded(8_000), recorded(20)
    for name, call in calls.items():
        before = flattened(small[name]())
        failures = 0
        for extra in (0, *(MIB << power for power in range(0, 11, 2))):
            limit(extra)
            try:
                call()
            except RuntimeError as error:
                message = str(error)
            else:
                break
            finally:
                limit(None)
            assert "memory" in message, f"{name}: {message}"
            failures += 1
            # The others write into their arguments, or give memory that nobody has written to.
            if not name.endswith(("_", "_.default", "recycled.default")):
                for got, expected in zip(flattened(small[name]()), before, strict=True):
                    assert torch.equal(got, expected), name
        print(f"{name}: {failures} failures")


def flattened(outputs: Any) -> list[Tensor]:
    return [outputs] if isinstance(outputs, Tensor) else list(outputs or [])


CLASSES, ROWS, LAST = 100_003, 21_480, 5
"""Together more than 2^31 elements; the last rows, which are a part of the lanes, are not zero: the
results are as without the others."""
TABLE = torch.tensor([[0.0, 1.0]] * 4)


def zeros(*shape: int) -> Tensor:
    """In memory that numpy has from calloc: pages that are not written take none."""
    return torch.from_numpy(np.zeros(shape, np.float32))


def many_of_target_log_softmax() -> None:
    logits = zeros(ROWS, CLASSES)
    logits[-LAST:] = torch.randn(LAST, CLASSES)
    target = torch.full((ROWS,), -1)
    target[-LAST:] = torch.randint(CLASSES, (LAST,))
    grad = torch.ones(ROWS)
    for function in ((-0.5, 2.5, None, 1.0), (0.0, 1.0, TABLE, 3.0)):
        part = (logits[-LAST:].clone(), target[-LAST:].clone())
        expected = torch.ops.hstree.target_log_softmax(*part, *function)
        got = torch.ops.hstree.target_log_softmax(logits, target, *function)
        for one, other in zip(got, expected, strict=True):
            assert torch.equal(one[-LAST:], other)
        gradient = torch.ops.hstree.target_log_softmax_backward_
        kept = logits[-LAST:].clone()
        gradient(part[0], grad[-LAST:], part[1], expected[1], *function, False)
        gradient(logits, grad, target, got[1], *function, False)
        assert torch.equal(logits[-LAST:], part[0])
        logits[-LAST:] = kept


def many_of_piecewise() -> None:
    values, grad = (zeros(2**30 + 20).view(torch.bfloat16) for _ in range(2))
    values[-20:], grad[-20:] = torch.randn(20), torch.randn(20)
    few, few_grad = values[-20:].clone(), grad[-20:].clone()
    expected = piecewise(few, TABLE, 1.0)
    assert torch.equal(piecewise(values, TABLE, 1.0)[-20:], expected)
    gradient = torch.ops.hstree.piecewise_backward
    got, expected = gradient(grad, values, TABLE, 1.0), gradient(few_grad, few, TABLE, 1.0)
    assert torch.equal(got[0][-20:], expected[0])
    torch.testing.assert_close(got[1], expected[1])


def many_of_tree_log_softmax() -> None:
    counts = torch.arange(CLASSES, 0, -1)
    head = TreeEnsemble.from_counts(D, counts, n_trees=1, clusters=2, binary=True)
    with Recorder() as recorder, torch.no_grad():
        head.log_prob(torch.randn(LAST, D))
    few_score, few_gate, *tables = recorder.arguments["tree_log_softmax.default"][:6]
    expected = torch.ops.hstree.tree_log_softmax(few_score, few_gate, *tables)
    score, gate = zeros(*few_score.shape[:2], ROWS), torch.zeros(ROWS, 1)
    score[:, :, -LAST:], gate[-LAST:] = few_score, few_gate
    got = torch.ops.hstree.tree_log_softmax(score, gate, *tables)
    torch.testing.assert_close(got[-LAST:], expected)
    del got
    grad, log_prob = zeros(ROWS, CLASSES), zeros(ROWS, CLASSES)
    grad[-LAST:], log_prob[-LAST:] = torch.randn(LAST, CLASSES), expected
    node, edge, root_begin, _classes = tables
    gradient, tables = torch.ops.hstree.tree_log_softmax_backward, [node, edge, *[root_begin] * 2]
    few = gradient(grad[-LAST:].clone(), expected, few_score, few_gate, *tables)
    many = gradient(grad, log_prob, score, gate, *tables)
    torch.testing.assert_close(many[0][:, :, -LAST:], few[0])
    torch.testing.assert_close(many[1][-LAST:], few[1])


FEATURES, CONTEXTS = 512, 2**22 + 20


def many_contexts() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Contexts and targets of the last rows, and of all."""
    hidden, target = zeros(CONTEXTS, FEATURES), torch.full((CONTEXTS,), -100)
    hidden[-LAST:], target[-LAST:] = torch.randn(LAST, FEATURES), torch.randint(V, (LAST,))
    return (hidden[-LAST:].clone(), target[-LAST:].clone()), (hidden, target)


def many_of_group_log_prob() -> None:
    head = TreeEnsemble(FEATURES, V, trees("cluster", 2, 8))
    few, many = many_contexts()
    with Recorder() as recorder, torch.no_grad():
        head(*few)
    _, weight, bias, _, *tables = recorder.arguments["group_log_prob.default"]
    grad = torch.randn(LAST, len(head.trees))
    found = []
    for hidden, target in (few, many):
        arguments = hidden, weight, bias, target, *tables
        log_prob, *saved = torch.ops.hstree.group_log_prob(*arguments)
        upstream = torch.zeros_like(log_prob)
        upstream[-LAST:] = grad
        backward = torch.ops.hstree.group_log_prob_backward
        gradients = backward(upstream, *arguments, *saved, [True] * 3, False)
        found.append([log_prob[-LAST:], gradients[0][-LAST:], *gradients[1:]])
    torch.testing.assert_close(*found)


def many_of_path_log_prob() -> None:
    found = []
    head = TreeEnsemble(FEATURES, V, trees("huffman", 2, 2, True))
    for x, y in many_contexts():
        head.zero_grad()
        # No row is ignored, for which the head would copy the contexts.
        target = y.clamp(min=0)
        head(x.requires_grad_(), target).output[-LAST:].sum().backward()
        gradients = [parameter.grad for parameter in head.parameters()]
        found.append([*gradients, x.grad[-LAST:] if x.grad is not None else None])
    torch.testing.assert_close(*found)


ELEMENTS = {
    "target_log_softmax": many_of_target_log_softmax,
    "piecewise": many_of_piecewise,
    "tree_log_softmax": many_of_tree_log_softmax,
    "group_log_prob": many_of_group_log_prob,
    "path_log_prob": many_of_path_log_prob,
}
"""More than 2^31 elements, forward and backward."""


def elements() -> None:
    """Prints the most memory that it took, in GB."""
    # Without huge pages, of which a single number would take 2 MB.
    ctypes.CDLL(None).prctl(_PR_SET_THP_DISABLE, 1, 0, 0, 0)
    torch.manual_seed(0)
    ELEMENTS[sys.argv[2]]()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6)


if __name__ == "__main__":
    runs = {"memory": exhaust_memory, "elements": elements}
    runs[sys.argv[1]]()
