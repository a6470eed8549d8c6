"""bfloat16 and float16 on the CPU: parameters and contexts are rounded, sums are not."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from heads.support import FREQUENCIES, HEADS, D, V, draw, draw_targets, make, trees
from hstree import _numerics
from hstree.heads import Head, SampledSoftmax, TreeEnsemble
from hstree.heads.trees import Groups
from hstree.ops import mixture_log_prob as loss
from hstree.ops._row_sparse import cast

OP = sys.modules["hstree.ops.group_log_prob"]  # hstree.ops has the function of this name
LOW = [torch.bfloat16, torch.float16]
low = pytest.mark.parametrize("dtype", LOW, ids=["bfloat16", "float16"])
ENCODED = ("mos", "moc", "mixtape", "adaptive", "plif", "monotonic")
"""Heads that round in between: encodings, slopes, torch's own adaptive softmax."""
EXACT = [kind for kind in HEADS if not kind.startswith(ENCODED)]
TREES = [kind for kind in EXACT if kind.startswith("trees")]
ROUNDINGS = 2e-6
"""Of float32 sums of numbers up to the largest score, in units of that score."""


def pair(kind: str, dtype: torch.dtype, scale: float = 3.0) -> tuple[Head, Head]:
    """A head of 16 bits and the same in float64, in evaluation mode."""
    head = make(kind).eval()
    with torch.no_grad():
        for parameter in head.parameters():
            parameter *= scale
    return head.to(dtype), copy.deepcopy(head).double()


def contexts(rows: int, dtype: torch.dtype) -> Tensor:
    """Scores of up to 60."""
    return (4 * draw(rows, D)).to(dtype)


@low
@pytest.mark.parametrize("kind", EXACT)
@pytest.mark.parametrize("rows", [1, 30])
@pytest.mark.parametrize("block", [50, 2**19])
def test_sums_are_float32(
    kind: str, dtype: torch.dtype, rows: int, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Output, loss and every query against float64, at scores of 30 and more; also with weights
    that are cast in many blocks."""
    monkeypatch.setattr(_numerics, "BLOCK_NUMBERS", block)
    head, truth = pair(kind, dtype)
    hidden, target = contexts(rows, dtype), draw_targets(rows)
    classes = torch.arange(V).expand(rows, -1)
    with torch.no_grad():
        wanted = truth.log_prob(hidden.double())
        assert wanted.min() < -30
        close: dict[str, Any] = {"rtol": 0, "atol": ROUNDINGS * float(-wanted.min())}
        of_target = wanted.gather(1, target[:, None]).squeeze(1)
        got = {
            "log_prob": (head.log_prob(hidden), wanted),
            "output": (head(hidden, target).output, of_target),
            "loss": (head(hidden, target).loss, -of_target.mean()),
            "candidates": (head.candidate_log_prob(hidden, classes), wanted),
            "topk": (head.topk(hidden, 3)[0], wanted.topk(3)[0]),
        }
        drawn, log_prob = head.sample(hidden, 20, return_log_prob=True)
        got["sample"] = (log_prob, wanted.gather(1, drawn))
    for name, (value, expected) in got.items():
        assert value.dtype == torch.float32, name
        torch.testing.assert_close(
            value.double(), expected, msg=lambda text, name=name: f"{name}: {text}", **close
        )


@low
@pytest.mark.parametrize("kind", TREES)
@pytest.mark.parametrize("temperature", [1e-6, 0.7, 1e6])
@pytest.mark.parametrize("way", ["candidate_rows", "_repeated", "_gathered"])
def test_temperatures(
    kind: str,
    dtype: torch.dtype,
    temperature: float,
    way: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Candidates at every temperature, in each of the ways they are computed: those of float64, up
    to roundings of the scores that the temperature divides."""
    head, truth = pair(kind, dtype)
    monkeypatch.setattr(TreeEnsemble, "candidate_rows", getattr(TreeEnsemble, way))
    hidden, classes = contexts(4, dtype), torch.arange(V).expand(4, -1)
    got = head.candidate_log_prob(hidden, classes, temperature=temperature)
    with torch.no_grad():
        expected = truth.candidate_log_prob(hidden.double(), classes, temperature=temperature)
        largest = float(truth.log_prob(hidden.double()).abs().max())
    unit = max(1.0, largest / temperature)
    torch.testing.assert_close(got.double(), expected, rtol=1e-6, atol=5 * ROUNDINGS * unit)
    got.clamp(min=-1e4).sum().backward()
    for name, parameter in head.named_parameters():
        if parameter.grad is not None:
            assert parameter.grad.dtype == dtype
            if temperature > 1e-3:  # 1e6 times a gradient overflows float16
                assert parameter.grad.to_dense().isfinite().all(), name


@low
@pytest.mark.parametrize("kind", EXACT)
@pytest.mark.parametrize("temperature", [0.1, 1.0])
def test_draws_and_candidates_agree(kind: str, dtype: torch.dtype, temperature: float) -> None:
    head, _ = pair(kind, dtype)
    for rows in (1, 40):
        hidden = contexts(rows, dtype)
        drawn, log_prob = head.sample(hidden, 9, temperature=temperature, return_log_prob=True)
        for recorded in (False, True):
            with torch.set_grad_enabled(recorded):
                again = head.candidate_log_prob(hidden, drawn, temperature=temperature)
            atol = ROUNDINGS * 100 / temperature
            torch.testing.assert_close(again.detach(), log_prob, rtol=0, atol=atol)


@low
def test_cross_entropy(dtype: torch.dtype) -> None:
    """The ops alone, and their gradients: those of float64, rounded."""
    weight, bias = (8 * draw(V, D)).to(dtype), draw(V, seed=1).to(dtype)
    hidden, target = contexts(20, dtype), draw_targets(20)
    latent, prior = contexts(60, dtype).view(20, 3, D), draw(20, 3, seed=3).log_softmax(1)

    def both(function: Callable[..., Tensor], *tensors: Tensor) -> None:
        found = []
        for to in (dtype, torch.float64):
            leaves = [x.to(to).detach().requires_grad_() for x in tensors]
            loss = function(*leaves)
            loss.backward()
            found.append((loss, *(x.grad for x in leaves)))
        (loss, *grads), (wanted, *of_wanted) = found
        torch.testing.assert_close(loss.double(), wanted, rtol=1e-6, atol=1e-5)
        for grad, of in zip(grads, of_wanted, strict=True):
            error = (grad.double() - of).abs().max() / of.abs().max()
            assert error < 3 * torch.finfo(dtype).eps

    one = hidden[:, None]
    both(lambda x, w, b: loss(x, None, w, b, target, chunk_rows=7)[1], one, weight, bias)
    both(
        lambda x, w, b: loss(
            x, prior.to(x.dtype if x.dtype == torch.float64 else torch.float32), w, b, target
        )[1],
        latent,
        weight,
        bias,
    )


def sparse_heads() -> dict[str, Head]:
    counts = FREQUENCIES
    trees: dict[str, Any] = {"n_trees": 3, "sparse": True}
    return {
        "sampled": SampledSoftmax(D, V, negatives=5, frequencies=counts, sparse=True),
        "paths": TreeEnsemble.from_counts(D, counts, clusters=4, binary=True, **trees),
        "groups": TreeEnsemble.from_counts(D, counts, clusters=20, **trees),
        "subsets": TreeEnsemble.from_counts(D, counts, clusters=20, **trees, subset_size=6),
    }


@low
@pytest.mark.parametrize("kind", ["sampled", "paths", "groups", "subsets"])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_row_sparse_gradients(kind: str, dtype: torch.dtype, training: bool) -> None:
    """Those of the dense head, in one backward pass of both dtypes; torch adds no two of float16 on
    a CPU, which is said where it would be needed."""
    head = sparse_heads()[kind].to(dtype).train(training)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(draw(*parameter.shape, seed=2))
    dense = copy.deepcopy(head)
    getattr(dense, "below", dense).sparse = False
    hidden, target = draw(6, D, dtype=dtype), torch.arange(6)
    if kind in ("groups", "subsets"):
        assert len(head.below.single_child)  # type: ignore[union-attr,arg-type]
    grads = []
    for one in (head, dense):
        torch.manual_seed(1)
        one(hidden, target).loss.backward()
        grads.append({n: p.grad for n, p in one.named_parameters() if p.grad is not None})
    sparse = {name for name, grad in grads[0].items() if grad.is_sparse}
    assert bool(sparse) == (training or kind != "sampled")
    assert not any(grad.is_sparse for grad in grads[1].values())
    for name, grad in grads[0].items():
        torch.testing.assert_close(grad.to_dense(), grads[1][name].to_dense())
    if not sparse:
        return
    if dtype == torch.float16:
        with pytest.raises(NotImplementedError, match=r"^grad: expected None .*call zero_grad\(\)"):
            head(hidden, target).loss.backward()
        head.zero_grad()
    head(hidden, target).loss.backward()


class Seen(TorchDispatchMode):
    """Records the dtypes of the floating-point arguments of ``hstree::group_log_prob``, and how
    often a tensor of some shape is cast to 16 bits."""

    def __init__(self, shape: torch.Size) -> None:
        super().__init__()
        self.shape, self.casts, self.dtypes = shape, 0, list[torch.dtype]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.hstree.group_log_prob.default:
            self.dtypes += [x.dtype for x in args[:3]]
        if func is torch.ops.aten._to_copy.default and args[0].shape == self.shape:
            self.casts += kwargs["dtype"] in LOW
        return func(*args, **(kwargs or {}))


@low
@pytest.mark.parametrize("sparse", [True, False])
@pytest.mark.parametrize("tensor_cores", [True, False])
def test_groups_under_autocast(
    tensor_cores: bool, sparse: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With tensor cores E is cast once for all trees, and its gradient, with that of the root's
    children, arrives in float32: those of groups that are cast explicitly."""
    head = make("trees, groups, sparse")
    head.below.sparse = sparse
    assert len(head.below.single_child)
    embedding, target = head.output_embedding, draw_targets(30)
    monkeypatch.setattr(
        sys.modules["hstree.ops.group_log_prob"], "has_tensor_cores", lambda _: tensor_cores
    )

    def step() -> list[Tensor]:
        head.zero_grad()
        hidden = draw(30, D).requires_grad_()
        with torch.autocast("cpu", dtype):
            loss = head(hidden, target).loss
        loss.backward()
        grads = {name: p.grad for name, p in head.named_parameters()}
        assert all(grad.dtype == torch.float32 for grad in grads.values())
        assert embedding.grad.is_sparse == sparse
        return [loss.detach(), hidden.grad, *(grad.to_dense() for grad in grads.values())]

    with Seen(embedding.shape) as seen:
        got = step()
    assert seen.dtypes == 3 * [dtype if tensor_cores else torch.float32]
    assert seen.casts == tensor_cores
    if not tensor_cores:
        return
    plain = Groups.target_log_prob

    def explicit(
        below: Groups, hidden: Tensor, target: Tensor, weight: Tensor, bias: Tensor
    ) -> Tensor | None:
        with torch.autocast("cpu", enabled=False):
            return plain(below, hidden, target, cast(weight, dtype), cast(bias, dtype))

    monkeypatch.setattr(Groups, "target_log_prob", explicit)
    for one, other in zip(got, step(), strict=True):
        assert torch.equal(one, other)


def test_low_temperature_under_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    """The contexts divided by it would be infinite in float16."""
    monkeypatch.setattr(
        sys.modules["hstree.ops.group_log_prob"], "has_tensor_cores", lambda _: True
    )
    head, classes = make("trees, groups, sparse"), torch.arange(V).expand(4, -1)
    monkeypatch.setattr(TreeEnsemble, "candidate_rows", TreeEnsemble._repeated)
    with torch.autocast("cpu", torch.float16):
        log_prob = head.candidate_log_prob(draw(4, D), classes, temperature=1e-6)
    assert not log_prob.isnan().any()


@pytest.mark.parametrize("subset", [None, 6])
@pytest.mark.parametrize("autocast", [True, False])
def test_root_logits_beyond_float16(
    autocast: bool, subset: int | None, device: torch.device
) -> None:
    """Logits of 80,000, where float16 ends at 65,504: loss and gradients of float64."""
    built = trees("huffman", 2, V)
    head = TreeEnsemble(
        D, V, built, frequencies=FREQUENCIES, gate="uniform", subset_size=subset, seed=1
    ).to(device)
    hidden = draw(20, D).to(device)
    hidden[:, :] = hidden.half()
    with torch.no_grad():
        weight = head.roots.weight
        weight.copy_(draw(*weight.shape))
        weight[..., 0] = 20.0
        first = 0 if subset is None else head.below.feature_index[:, 0].long()
        hidden[:, first] = 4000.0
        weight.copy_(weight.half())
    target, found = draw_targets(20).to(device), []
    for precise in (True, False):
        one = copy.deepcopy(head).double() if precise else head
        if not (precise or autocast):
            one = one.half()
        x = hidden.to(one.roots.weight.dtype).requires_grad_()
        with torch.autocast(device.type, torch.float16, enabled=autocast and not precise):
            loss = one(x, target).loss
        loss.backward()
        weight = one.roots.weight
        assert weight.grad.dtype == weight.dtype
        found.append([loss.detach(), x.grad, weight.grad[..., 1:], one.roots.bias.grad])
    for got, expected in zip(found[1], found[0], strict=True):
        # Logits have a unit of 1/128 in float32.
        error = (got.double() - expected).abs().max() / expected.abs().max()
        assert error < 0.03
