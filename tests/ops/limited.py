"""Runs operators at a limit, in a process of its own: `python -m ops.limited NAME` in tests/.

memory     with too little memory; the limit holds for the whole process
interrupt  until Ctrl-C, which the main thread receives
elements   on more than 2^31 elements: 10 GB of memory and some minutes, for no test
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from heads.support import V, trees
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hstree.heads import PLIF, Head, TreeEnsemble
from hstree.heads.trees.search import search_classes
from hstree.ops import feature_gather, piecewise, sparse_adam_

D = 16
MIB = 1 << 20


class Recorder(TorchDispatchMode):
    """Keeps the first call of every operator of hstree, with its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, Callable[[], Any]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace == "hstree":
            kept = [x.detach().clone() if isinstance(x, Tensor) else x for x in args]
            self.calls.setdefault(func.__name__, lambda: func(*kept, **(kwargs or {})))
        return func(*args, **(kwargs or {}))


def tree_heads() -> list[Head]:
    """Heads whose blocks use all tree operators."""
    return [
        TreeEnsemble(D, V, trees("huffman", 3, 8, 4), subset_size=9),
        TreeEnsemble(D, V, trees("huffman", 3)),
        TreeEnsemble(D, V, trees("huffman", 2, 8, 4), sparse=True),
        TreeEnsemble(D, V, trees("cluster", 2, 8, 4), node_vectors="leaves"),
        TreeEnsemble(D, V, trees("cluster", 2, 8, 4), node_vectors="leaves", sparse=True),
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
                    search_classes(head, hidden, 3)
                head.sample(hidden)
                head.candidate_log_prob(hidden, target[:, None])
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
            if not name.endswith(("_", "_.default")):  # the others write into their arguments
                for got, expected in zip(flattened(small[name]()), before, strict=True):
                    assert torch.equal(got, expected), name
        print(f"{name}: {failures} failures")


def flattened(outputs: Any) -> list[Tensor]:
    return [outputs] if isinstance(outputs, Tensor) else list(outputs or [])


def interrupted(call: Callable[[], object], after: float = 0.5) -> float:
    """Sends Ctrl-C during a call and returns how many seconds later it ended."""
    sent = 0.0

    def send() -> None:
        nonlocal sent
        time.sleep(after)
        sent = time.monotonic()
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=send)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt) as raised:
            call()
        end = time.monotonic()
    finally:
        thread.join()
    assert raised.value.__context__ is None
    return end - sent


def interrupt() -> None:
    """Prints how soon long operators ended after Ctrl-C, of how many seconds."""
    head = TreeEnsemble.from_counts(16, torch.arange(2000, 0, -1), leaf=1, root=1)
    hidden, target = torch.randn(60_000, 16), torch.randint(2000, (60_000,))
    few = head(hidden[:10], target[:10]).loss

    def backward() -> None:
        for _ in range(100):
            head(hidden, target).loss.backward()

    with torch.inference_mode():
        print("topk", interrupted(lambda: head.topk(hidden, 100)))
    print("training", interrupted(backward))
    assert torch.equal(head(hidden[:10], target[:10]).loss, few)

    seen: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: seen.append(number))
    timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    values, classes = head.topk(hidden[:400], 100)  # the handler does not raise: all rows
    timer.join()
    assert seen == [signal.SIGINT]
    part = head.topk(hidden[390:400], 100)
    assert torch.equal(values[390:], part[0])
    assert torch.equal(classes[390:], part[1])


def many_elements() -> None:
    """More than 2^31 log-probabilities, and their gradients: the last rows are as without the
    others."""
    classes, rows, last = 100_003, 21_480, 5  # a multiple of the lanes, and one part of them
    torch.manual_seed(0)
    few = torch.randn(last, D)

    logits = torch.zeros(rows, classes)  # pages that are not written take no memory
    logits[-last:] = torch.randn(last, classes)
    target = torch.full((rows,), -1)
    target[-last:] = torch.randint(classes, (last,))
    grad = torch.ones(rows)
    table = torch.tensor([[0.0, 1.0]] * 4)
    for function in ((-0.5, 2.5, None, 1.0), (0.0, 1.0, table, 3.0)):
        part = (logits[-last:].clone(), target[-last:].clone())
        expected = torch.ops.hstree.monotone_log_prob(*part, *function)
        got = torch.ops.hstree.monotone_log_prob(logits, target, *function)
        for one, other in zip(got, expected, strict=True):
            assert torch.equal(one[-last:], other)
        gradient = torch.ops.hstree.monotone_log_prob_backward_
        kept = logits[-last:].clone()
        gradient(part[0], grad[-last:], part[1], expected[1], *function, False)
        gradient(logits, grad, target, got[1], *function, False)
        assert torch.equal(logits[-last:], part[0])
        logits[-last:] = kept
        print("monotone_log_prob", function[:2], flush=True)
    del logits

    values = torch.zeros(2**31 + 40, dtype=torch.bfloat16)
    values[-20:] = torch.randn(20)
    expected = piecewise(values[-20:].clone(), table, 1.0)
    assert torch.equal(piecewise(values, table, 1.0)[-20:], expected)
    print("piecewise", flush=True)
    del values

    head = TreeEnsemble.from_counts(D, torch.arange(classes, 0, -1), n_trees=2)
    hidden = torch.zeros(rows, D)
    hidden[-last:] = few
    with torch.no_grad():
        torch.testing.assert_close(head.log_prob(hidden)[-last:], head.log_prob(few))
    print("tree_log_prob", flush=True)

    features, rows = 512, 2**22 + 20
    hidden, target = torch.zeros(rows, features), torch.full((rows,), -100)
    hidden[-last:], target[-last:] = torch.randn(last, features), torch.randint(V, (last,))
    batches = (hidden[-last:].clone(), target[-last:]), (hidden, target)
    # One gradient of so many contexts at a time.
    for made, of_contexts in ((trees("huffman", 2, 8, 4), False), (trees("huffman", 2), True)):
        head = TreeEnsemble(features, V, made)
        found = []
        for x, y in batches:
            head.zero_grad()
            head(x.requires_grad_(of_contexts), y).loss.backward()
            gradients = [parameter.grad for parameter in head.parameters()]
            found.append([*gradients, x.grad[-last:] if x.grad is not None else None])
        torch.testing.assert_close(*found)
    print("path_log_prob and wide_log_prob", flush=True)


if __name__ == "__main__":
    runs = {"memory": exhaust_memory, "interrupt": interrupt, "elements": many_elements}
    runs[sys.argv[1]]()
