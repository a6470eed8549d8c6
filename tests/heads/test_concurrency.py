"""Heads in several Python threads at a time."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from threading import Barrier

import pytest
import torch
from torch import Tensor

from heads.support import HEADS, D, draw, draw_targets, make
from hstree.heads import Head

THREADS, ROUNDS = 4, 3
every_head = pytest.mark.parametrize("kind", HEADS)
CPU = torch.device("cpu")


def answers(head: Head, seed: int) -> list[Tensor]:
    """What a head says of contexts drawn with a seed."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(9, D, generator=generator)
    with torch.no_grad():
        found = [head.log_prob(hidden), *head.topk(hidden, 5)]
        found.append(head.sample(hidden, 3, generator=generator))
        found.append(head.candidate_log_prob(hidden, found[-1]))
    return found


def trained(head: Head, hidden: Tensor, target: Tensor) -> list[Tensor]:
    """Parameters after a few steps."""
    for _ in range(3):
        head.zero_grad()
        head(hidden, target).loss.backward()
        with torch.no_grad():
            for parameter in head.parameters():
                if parameter.grad is not None:
                    parameter -= 0.1 * parameter.grad.to_dense()
    return [parameter.detach() for parameter in head.parameters()]


def in_threads(count: int, work: Callable[[int], list[Tensor]]) -> list[list[Tensor]]:
    """Results for 0 to THREADS - 1. Each thread says how many it uses for a product of torch, which
    otherwise depends on the thread."""
    with ThreadPoolExecutor(count, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        return list(pool.map(work, range(THREADS)))


def same(got: list[list[Tensor]], wanted: list[list[Tensor]]) -> bool:
    pairs = zip(chain.from_iterable(got), chain.from_iterable(wanted), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


@every_head
def test_one_head_answers_several_threads(kind: str) -> None:
    """At the same time, with the bits that it gives one after another."""
    head = make(kind, CPU).eval()
    wanted = in_threads(1, lambda seed: answers(head, seed))
    barrier = Barrier(THREADS)

    def work(seed: int) -> list[Tensor]:
        barrier.wait()
        return answers(head, seed)

    for _ in range(ROUNDS):
        assert same(in_threads(THREADS, work), wanted)


@every_head
def test_each_thread_trains_a_head(kind: str) -> None:
    """Draws of the head in training mode come from torch's generator, which threads share; without
    them the weights have the same bits."""
    head = make(kind, CPU)
    hidden, target = draw(9, D), draw_targets(9)
    wanted = in_threads(1, lambda _: trained(copy.deepcopy(head), hidden, target))
    barrier = Barrier(THREADS)

    def work(_: int) -> list[Tensor]:
        own = copy.deepcopy(head)
        barrier.wait()
        return trained(own, hidden, target)

    found = in_threads(THREADS, work)
    if kind.startswith("sampled"):  # every class once, in the order of its draw
        torch.testing.assert_close(found, wanted)
    else:
        assert same(found, wanted)


FORK = """
import itertools, os
import torch
from heads.support import make

for parent, kind in itertools.product((1, 2), ("trees, groups", "trees", "softmax")):
    torch.set_num_threads(parent)
    head = make(kind)
    hidden = torch.randn(4000, head.in_features, requires_grad=True)
    target = torch.arange(4000) % head.n_classes

    def work():
        loss = head(hidden, target).loss
        (gradient,) = torch.autograd.grad(loss, hidden)
        with torch.no_grad():
            return [loss.detach(), gradient, head.log_prob(hidden), head.topk(hidden, 3)[0]]

    torch.randn(10**6).sin()  # with all threads of the parent
    wanted = work()
    pid = os.fork()
    if pid == 0:
        torch.set_num_threads(1)
        pairs = zip(work(), wanted)
        os._exit(0 if all(torch.allclose(a, b, atol=1e-5) for a, b in pairs) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, (parent, kind)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_fork_works_on() -> None:
    """After the head was used and trained, in a child with one thread, as DataLoader's workers
    have. With two, torch waits for threads that the child does not have: in any operator of
    torch too."""
    done = subprocess.run(
        [sys.executable, "-c", FORK],
        cwd=Path(__file__).resolve().parents[1], capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
