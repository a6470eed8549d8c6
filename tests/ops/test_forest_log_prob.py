"""forest_log_prob in chunks against all scores of all trees in torch's own operators."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from reference.forest_log_prob import forest_log_prob_reference
from torch import Tensor

from hstree._numerics import is_low
from hstree.ops import _chunked_loss, forest_log_prob
from hstree.ops.forest_log_prob import by_cluster, forest_log_softmax

N, D, V, T, C = 23, 7, 41, 3, 5
NAMES = ("hidden", "log_prior", "cluster_score", "weight", "bias")
CPU = torch.device("cpu")
forest_log_prob_module = sys.modules["hstree.ops.forest_log_prob"]  # hidden by the function


def draw(*size: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return scale * torch.randn(size, generator=random, dtype=torch.float64)


def arguments(
    rows: int = N,
    classes: int = V,
    trees: int = T,
    clusters: int = C,
    scale: float = 1.0,
    device: torch.device = CPU,
) -> dict[str, Any]:
    """In float64, leaves that want gradients; row 4 is ignored."""
    random = torch.Generator().manual_seed(9)
    made: dict[str, Any] = {
        "hidden": draw(rows, D, seed=2),
        "log_prior": draw(rows, trees, seed=1).log_softmax(1),
        "cluster_score": draw(rows, trees, clusters, seed=5, scale=scale),
        "weight": draw(classes, D, seed=3),
        "bias": draw(classes, seed=4),
    }
    made = {name: tensor.to(device).requires_grad_() for name, tensor in made.items()}
    made["cluster"] = torch.randint(clusters, (classes, trees), generator=random).int().to(device)
    made["target"] = torch.randint(classes, (rows,), generator=random).to(device)
    made["target"][4:5] = -1
    made["offset"] = None
    return made


def offsets(given: dict[str, Any], scale: float = 1.0) -> Tensor:
    """For each class, some of which are left out where they are not the target."""
    offset = draw(len(given["weight"]), seed=8, scale=scale)
    offset[::3] = -math.inf
    return offset.to(given["weight"].device)


def leaves(given: dict[str, Any]) -> list[Tensor]:
    return [given[name] for name in NAMES if given[name] is not None]


def check(given: dict[str, Any], reduction: str = "mean", **options: Any) -> None:
    """Log-probabilities, loss and gradients, of the loss alone and of a sum over rows that weighs
    them differently."""
    inputs, target = leaves(given), given["target"]
    log_prob, loss = forest_log_prob(**given, reduction=reduction, **options)
    expected = forest_log_prob_reference(**given)
    kept = options.get("row_weight", torch.ones_like(expected))
    kept = kept.masked_fill(target == -1, 0)
    right = -kept * expected
    if reduction != "none":
        right = right.sum() / (kept.sum() if reduction == "mean" else 1)
    torch.testing.assert_close(log_prob, expected)
    torch.testing.assert_close(loss, right)
    upstream = draw(len(target), seed=7).to(expected)
    for value, reference in (
        ((0.7 * loss).sum(), (0.7 * right).sum()),
        ((upstream * log_prob).sum(), (upstream * expected).sum()),
    ):
        got = torch.autograd.grad(value, inputs, retain_graph=True)
        for a, b in zip(
            got, torch.autograd.grad(reference, inputs, retain_graph=True), strict=True
        ):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("chunk_rows", [1, 4, N, 1000])
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_equals_the_reference(reduction: str, chunk_rows: int, device: torch.device) -> None:
    given = arguments(device=device)
    check(given, reduction, chunk_rows=chunk_rows)
    row_weight = torch.linspace(0, 2, N).double().to(device)
    check(given, reduction, chunk_rows=chunk_rows, row_weight=row_weight)
    check(given | {"offset": offsets(given)}, reduction, chunk_rows=chunk_rows)


@pytest.mark.parametrize("rows", [0, 1, 8, 15, 16, 100, 300])
@pytest.mark.parametrize(("trees", "clusters", "classes"), [(1, 1, 1), (2, 1, V), (5, 40, V)])
def test_sizes(rows: int, trees: int, clusters: int, classes: int, device: torch.device) -> None:
    """Rows of every number of vectors; one class; clusters without a class."""
    given = arguments(rows, classes, trees, clusters, device=device)
    check(given, "sum")
    check(given | {"bias": None}, "sum")


def test_many_classes(device: torch.device) -> None:
    """More than are summed one after the other, in float32, and than have two rows in a lane."""
    classes, features = 70_000, 4
    given = arguments(6, classes, device=device)
    for name in NAMES:
        given[name] = given[name].detach().float()[..., : features if name == "hidden" else None]
    given["weight"] = given["weight"][:, :features]
    given["offset"] = offsets(given).float()
    log_prob = forest_log_prob(**given)[0]
    exact = {n: t.double() if t.is_floating_point() else t for n, t in given.items()}
    expected = forest_log_prob_reference(**exact)
    torch.testing.assert_close(log_prob.double(), expected, rtol=1e-6, atol=3e-6)


def test_literal_values() -> None:
    """Two classes. Tree 0 tells them apart by log 3; tree 1 has them in one cluster."""
    log_prob, loss = forest_log_prob(
        torch.zeros(1, 1),
        torch.tensor([[0.9, 0.1]]).log(),
        torch.tensor([[[3.0, 1.0], [7.0, 5.0]]]).log(),
        torch.zeros(2, 1),
        None,
        torch.tensor([[0, 1], [1, 1]], dtype=torch.int32),
        torch.tensor([0]),
    )
    torch.testing.assert_close(log_prob.exp(), torch.tensor([0.9 * 0.75 + 0.1 * 0.5]))
    torch.testing.assert_close(loss, -log_prob[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("of_offset", [0, 1, 1e3])
@pytest.mark.parametrize(("of_class", "of_cluster"), [(1e3, 1), (1, 1e3), (1e3, 1e3), (30, 10)])
def test_range(
    of_class: float, of_cluster: float, of_offset: float, dtype: torch.dtype, device: torch.device
) -> None:
    """Scores and cluster scores of 1e3 against float64: also where a cluster that is far below the
    largest score has nearly all of the probability."""
    given = arguments(scale=of_cluster, device=device)
    given["weight"] = (given["weight"] * of_class).detach()
    if of_offset:
        given["offset"] = offsets(given, of_offset).to(dtype).double()
    made = {n: given[n].detach().to(dtype).requires_grad_() for n in NAMES}
    exact = {n: t.detach().double().requires_grad_() for n, t in made.items()}
    log_prob, loss = forest_log_prob(**given | made, reduction="sum")
    expected = forest_log_prob_reference(**given | exact)
    eps = torch.finfo(dtype).eps
    size = expected.abs().max().item()
    torch.testing.assert_close(log_prob.double(), expected, rtol=8 * eps, atol=8 * eps * size)
    got = torch.autograd.grad(loss, leaves(made))
    right = torch.autograd.grad(-expected.sum(), leaves(exact))
    for a, b in zip(got, right, strict=True):
        limit = 100 * eps * max(of_class, of_cluster, of_offset) * b.abs().max().clamp(min=1)
        assert (a - b).abs().max() <= limit


def test_infinities(device: torch.device) -> None:
    """A class of probability 0, as a class and as a target; rows with NaN, which stay alone."""
    given = arguments(device=device)
    with torch.no_grad():
        given["bias"][7] = -math.inf
        given["target"][given["target"] == 7] = 8
    check(given, "sum")
    given["target"][2] = 7
    log_prob, loss = forest_log_prob(**given, reduction="none")
    assert log_prob[2] == -math.inf
    for gradient in torch.autograd.grad(loss[2], leaves(given)):
        assert not gradient.any()
    with torch.no_grad():
        given["hidden"][3, 0], given["cluster_score"][5, 1, 2] = math.nan, math.inf
        given["hidden"][4, 0], given["target"][2] = math.inf, 0  # row 4 is ignored
        given["cluster_score"][6, 0, 1] = -math.inf
        given["target"][6] = int((given["cluster"][:, 0] != 1).nonzero()[0])
    log_prob, loss = forest_log_prob(**given, reduction="none")
    bad = torch.zeros(N, dtype=torch.bool, device=device)
    bad[[3, 5]] = True
    assert torch.equal(log_prob.isnan(), bad)
    expected = forest_log_prob_reference(**given)
    torch.testing.assert_close(log_prob[~bad], expected[~bad])
    grad = torch.autograd.grad(loss.sum(), given["hidden"], retain_graph=True)[0]
    assert torch.equal(grad.isnan().any(1), bad)
    assert not grad[4].any()


def all_classes(given: dict[str, Any], dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Log-probabilities [N, V] by the kernel, and in float64 by torch's own operators."""
    made = {n: t.detach().to(dtype) for n, t in given.items() if n in NAMES}
    cluster = given["cluster"]
    with torch.no_grad():
        got = forest_log_softmax(cluster=cluster, **made)
    exact = {n: t.double().requires_grad_() for n, t in made.items()}
    return got, forest_log_softmax(cluster=cluster, **exact).detach()


@pytest.mark.parametrize("rows", [0, 1, 7, 8, 16, 20, 83, 300])
@pytest.mark.parametrize(("trees", "clusters", "classes"), [(1, 1, 1), (2, 1, V), (5, 40, 64)])
def test_all_classes(rows: int, trees: int, clusters: int, classes: int) -> None:
    """Rows of every number of vectors; parts of a vector of classes, and whole ones."""
    given = arguments(rows, classes, trees, clusters)
    got, expected = all_classes(given)
    torch.testing.assert_close(got, expected)
    target = given["target"].clamp(min=0)
    of_target = forest_log_prob_reference(**given | {"target": target, "offset": None})
    torch.testing.assert_close(got.gather(1, target[:, None])[:, 0], of_target.detach())
    got, expected = all_classes(given, torch.float32)
    torch.testing.assert_close(got.double(), expected, rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("of_prior", [1, 1e3])
@pytest.mark.parametrize(("of_class", "of_cluster"), [(1e3, 1), (1, 1e3), (1e3, 1e3), (30, 10)])
def test_range_of_all_classes(
    of_class: float, of_cluster: float, of_prior: float, dtype: torch.dtype
) -> None:
    """As in ``test_range``; priors need not sum to 1."""
    given = arguments(scale=of_cluster)
    given["weight"] = given["weight"].detach() * of_class
    given["log_prior"] = given["log_prior"].detach() * of_prior
    got, expected = all_classes(given, dtype)
    limit = 8 * torch.finfo(dtype).eps
    size = expected.abs().max().item()
    torch.testing.assert_close(got.double(), expected, rtol=limit, atol=limit * size)


def test_infinities_of_all_classes() -> None:
    given = {n: t if t is None else t.detach() for n, t in arguments().items()}
    given["bias"][7] = given["cluster_score"][6, 0, 1] = given["log_prior"][8, 1] = -math.inf
    given["hidden"][3, 0], given["cluster_score"][5, 1, 2] = math.nan, math.inf
    given["hidden"][4, 0], given["log_prior"][9] = math.inf, -math.inf
    got, expected = all_classes(given)
    bad = torch.zeros(N, dtype=torch.bool)
    bad[3:6] = True
    assert torch.equal(got.isnan().all(1), bad)
    assert torch.equal(got.isnan(), expected.isnan())
    torch.testing.assert_close(got, expected, equal_nan=True)
    with pytest.raises(RuntimeError, match=r"forest_log_softmax: cluster\[6\]: .*\[0, 5\), got 5"):
        all_classes(given | {"cluster": given["cluster"].index_fill(0, torch.tensor(6), C)})


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("name", ["hidden", "log_prior", "cluster_score"])
def test_ignored_rows_count_nothing(name: str, reduction: str, device: torch.device) -> None:
    """Whatever they hold."""
    found = []
    for value in (0.0, math.nan, math.inf):
        given = arguments(device=device)
        with torch.no_grad():
            given[name][4] = value
        loss = forest_log_prob(**given, reduction=reduction)[1].sum()
        gradients = torch.autograd.grad(loss, leaves(given))
        found.append([loss.detach(), *gradients])
        assert not gradients[NAMES.index(name)][4].any()
    for other in found[1:]:
        for got, expected in zip(other, found[0], strict=True):
            assert torch.equal(got, expected)


def test_gradcheck() -> None:
    given = arguments(rows=6)

    def loss(*_: Tensor) -> Any:
        return forest_log_prob(**given, chunk_rows=4)

    assert torch.autograd.gradcheck(loss, leaves(given), fast_mode=True)


@pytest.mark.parametrize("wanted", [[True] * 5, [False] * 5, [True, False, True, False, True]])
def test_opcheck(wanted: list[bool]) -> None:
    given = arguments()
    given["offset"] = offsets(given)
    problem = (*given.values(), 10)
    torch.library.opcheck(torch.ops.hstree.forest_log_prob.default, (*problem, None, True, wanted))
    plain = [x.detach() if isinstance(x, Tensor) else x for x in problem]
    torch.library.opcheck(
        torch.ops.hstree.forest_log_prob_backward.default,
        (torch.ones(N, dtype=torch.float64), *plain, wanted),
        test_utils=("test_schema", "test_faketensor"),
    )
    chunk = (draw(V, N), draw(T, C, N), draw(T, N), given["cluster"], given["target"])
    for grad in (None, draw(N)):
        torch.library.opcheck(
            torch.ops.hstree.forest_gradient_.default,
            (*chunk, None, None, grad),
            test_utils=("test_schema", "test_faketensor"),
        )
    torch.library.opcheck(torch.ops.hstree.forest_log_softmax.default, chunk[:4])
    with pytest.raises(RuntimeError, match="forest_log_softmax: not differentiable"):
        torch.ops.hstree.forest_log_softmax(chunk[0].requires_grad_(), *chunk[1:4]).sum().backward()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision(dtype: torch.dtype, device: torch.device) -> None:
    """Errors against float64 on the rounded inputs: at most those of torch's own operators in that
    precision and a small margin."""
    given = arguments(device=device)
    target, upstream = given["target"], draw(N, seed=3).to(device)
    rounded = {
        n: given[n].detach().to(dtype if n in ("hidden", "weight") else torch.float32)
        for n in NAMES
    }

    def run(function: Callable[..., Tensor], cast: torch.dtype | None = None) -> list[Tensor]:
        made = {n: t.to(cast or t.dtype).clone().requires_grad_() for n, t in rounded.items()}
        value = function(**given | made)
        return [value, *torch.autograd.grad((value * upstream).sum(), leaves(made))]

    def eager(**made: Any) -> Tensor:
        h, prior, r, w, b, cluster, *_ = made.values()
        score = F.linear(h, w, b.to(w.dtype)).float()
        by_tree = [score + r[:, t][:, cluster[:, t].long()] for t in range(T)]
        log_prob = (prior[:, :, None] + torch.stack(by_tree, 1).log_softmax(2)).logsumexp(1)
        return -F.nll_loss(log_prob, target, ignore_index=-1, reduction="none")

    truth = run(forest_log_prob_reference, torch.float64)
    got = run(lambda **made: forest_log_prob(**made, reduction="none")[0])
    assert got[0].dtype == torch.float32
    for a, b, t in zip(got, run(eager), truth, strict=True):
        scale = t.abs().max()
        error, allowed = (a - t).abs().max() / scale, (b - t).abs().max() / scale
        assert error <= 1.05 * allowed + 2 * torch.finfo(dtype).eps


@pytest.mark.parametrize("rows", [0, 7, 16, N])
@pytest.mark.parametrize("group", [1, 2, N])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_in_16_bits_of_several_chunks(
    dtype: torch.dtype,
    group: int,
    rows: int,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The products of a GPU, here also on the CPU."""
    for module in (_chunked_loss, forest_log_prob_module):
        monkeypatch.setattr(module, "keeps_low", is_low)
    monkeypatch.setattr(forest_log_prob_module, "group_chunks", lambda *_: group)
    given, exact = (arguments(rows, device=device) for _ in range(2))
    for name in NAMES:
        low = given[name].detach().to(dtype)
        given[name], exact[name] = low.requires_grad_(), low.detach().double().requires_grad_()
    loss = forest_log_prob(**given, chunk_rows=8, reduction="sum")[1]
    kept = given["target"] != -1
    truth = -forest_log_prob_reference(**exact)[kept].sum()
    torch.testing.assert_close(loss.double(), truth, rtol=1e-3, atol=1e-3)
    got, true = (torch.autograd.grad(x, leaves(of)) for x, of in ((loss, given), (truth, exact)))
    for a, b in zip(got, true, strict=True):
        assert a.dtype == dtype
        if b.numel():
            assert (a - b).abs().max() <= 2 * torch.finfo(dtype).eps * b.abs().max()


def chunk_gradients(given: dict[str, Any], dtype: torch.dtype | None = None) -> tuple[Tensor, ...]:
    """Of a chunk in float32: log_prob, and the gradients of the log-priors, scores and scores of
    clusters. With ``dtype`` that of the scores has rows of its own, with gaps, and the operator
    adds the bias."""
    given = {n: t if t is None else t.detach() for n, t in given.items()}
    scores = (given["weight"] @ given["hidden"].t()).float()
    of_clusters = given["cluster_score"].float().permute(1, 2, 0).contiguous()
    rest = (given["log_prior"].float().t(), given["cluster"], given["target"])
    plan = by_cluster(given["cluster"], of_clusters.shape[1])
    bias = None if dtype is None else (8 * given["bias"]).round().float() / 8
    scores = (64 * scores).round() / 64  # so that no sum with a bias is rounded
    if dtype is None:
        scores += (8 * given["bias"]).round().float()[:, None] / 8
    before = scores.clone(), of_clusters.clone()
    forward = torch.ops.hstree.forest_gradient_(scores, of_clusters, *rest, *plan, None, bias)
    assert torch.equal(scores, before[0])
    assert torch.equal(of_clusters, before[1])
    grad = torch.linspace(-1, 2, scores.shape[1], device=scores.device)
    output = None
    if dtype is not None:
        output = scores.new_full((len(scores), scores.shape[1] + 3), 7, dtype=dtype)[:, :-3]
    results = torch.ops.hstree.forest_gradient_(
        scores, of_clusters, *rest, *plan, grad, bias, output
    )
    torch.testing.assert_close(forward[0], results[0], rtol=0, atol=0, equal_nan=True)
    return (*results, scores if output is None else output, of_clusters)


def test_any_number_of_threads_gives_the_same_bits() -> None:
    given, before, results = arguments(300, 200), torch.get_num_threads(), []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            results.append(chunk_gradients(given))
    finally:
        torch.set_num_threads(before)
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_memory_is_that_of_a_chunk() -> None:
    """No allocation of the order of all scores, nor of those of all trees of a chunk."""
    rows, classes, chunk = 512, 6000, 32
    given = arguments(rows, classes)
    made = {n: given[n].detach().float().requires_grad_() for n in NAMES}
    activity = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activity, profile_memory=True) as profile:
        forest_log_prob(**given | made, chunk_rows=chunk)[1].backward()
    largest = max(event.self_cpu_memory_usage for event in profile.events())
    assert chunk * classes * 4 <= largest < 1.5 * chunk * classes * 4


def test_compile() -> None:
    torch._dynamo.reset()
    given = arguments()
    given["offset"] = offsets(given)

    def loss(*tensors: Tensor) -> Tensor:
        return 2 * forest_log_prob(**given | dict(zip(NAMES, tensors, strict=True)))[1]

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    inputs = leaves(given)
    got = torch.autograd.grad(compiled(*inputs), inputs)
    for a, b in zip(got, torch.autograd.grad(loss(*inputs), inputs), strict=True):
        torch.testing.assert_close(a, b)


def test_autocast() -> None:
    given = arguments()
    made = {n: given[n].detach().float().requires_grad_() for n in NAMES}
    expected = forest_log_prob(**given | made)[1]
    with torch.autocast("cpu", torch.bfloat16):
        loss = forest_log_prob(**given | made)[1]
    assert loss.dtype == torch.float32
    assert 0 < (loss - expected).abs() < 0.05
    loss.backward()
    assert {t.grad.dtype for t in made.values()} == {torch.float32}


def test_second_derivative_is_refused() -> None:
    given = arguments()
    loss = forest_log_prob(**given)[1]
    (grad,) = torch.autograd.grad(loss, given["hidden"], create_graph=True)
    with pytest.raises(RuntimeError, match=r"forest_log_prob.*second derivative"):
        grad.sum().backward()


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"hidden": (N, 1, D)}, r"hidden: expected shape \[N, D\], got \(23, 1, 7\)"),
        ({"weight": (V, D + 1)}, r"weight: expected shape \[V, 7\].*got \(41, 8\)"),
        ({"bias": (V + 1,)}, r"bias: expected shape \[41\], got \(42,\)"),
        ({"log_prior": (N, 2)}, r"log_prior: expected shape \[23, 3\], got \(23, 2\)"),
        ({"cluster_score": (N, T)}, r"cluster_score: expected shape \[23, T, C\].*got \(23, 3\)"),
        ({"cluster_score": (N, T, 0)}, r"cluster_score: .*at least 1, got \(23, 3, 0\)"),
        ({"cluster": torch.zeros(V, T)}, r"cluster: expected .*torch.int32, got .*torch.float32"),
        ({"target": torch.zeros(N)}, r"target: expected shape \[23\] and dtype torch.int64"),
        ({"offset": (V + 1,)}, r"offset: expected shape \[41\], got \(42,\)"),
        ({"row_weight": torch.ones(2)}, r"row_weight: expected shape \[23\], got \(2,\)"),
        ({"reduction": "avg"}, "reduction: expected one of none, sum, mean, got 'avg'"),
        ({"chunk_rows": 0}, "chunk_rows: expected at least 1, got 0"),
    ],
    ids=str,
)
def test_bad_arguments(change: dict[str, Any], match: str) -> None:
    changed = {
        name: torch.zeros(value, dtype=torch.float64) if isinstance(value, tuple) else value
        for name, value in change.items()
    }
    with pytest.raises(ValueError, match=match):
        forest_log_prob(**arguments() | changed)


def test_bad_numbers() -> None:
    given = arguments()
    for name, index, value in (("target", 2, V), ("target", 3, -2)):
        tensor = given[name].clone()
        tensor[index] = value
        with pytest.raises(RuntimeError, match=rf"target\[{index}\]: expected .* got {value}"):
            forest_log_prob(**given | {name: tensor})
    for value in (C, -1):
        cluster = given["cluster"].clone()
        cluster[6, 1] = value
        with pytest.raises(RuntimeError, match=rf"cluster\[6\]: .*\[0, 5\), got {value}"):
            forest_log_prob(**given | {"cluster": cluster})


def check_bad_numbers_on_cuda(device: torch.device) -> None:
    """A target out of range makes its row NaN. A cluster out of range is none: the score of its
    class has the gradient NaN, as has a row whose target it is; for the others the class has
    probability 0 in that tree."""
    rows = torch.arange(12, device=device)
    given = arguments(12, device=device)
    clean = chunk_gradients(given)
    given["target"][:6] = torch.tensor([-2, -(2**63), V, 2**31, 2**62, 2**63 - 1])
    for got, expected in zip(chunk_gradients(given), clean, strict=True):
        assert got[..., :6].isnan().all()
        assert torch.equal(got[..., 6:], expected[..., 6:])
    given = arguments(12, device=device)
    given["target"][given["target"] == 7] = 8
    for cluster in (-1, C, -(2**31), 2**31 - 1):
        given["cluster"][7, 1] = cluster
        log_prob, grad_log_prior, of_scores, of_clusters = chunk_gradients(given)
        classes = torch.arange(V, device=device)[:, None]
        assert torch.equal(of_scores.isnan(), (classes == 7) & (given["target"] != -1))
        assert all(x.isfinite().all() for x in (log_prob, grad_log_prior, of_clusters))
    given["target"][:2] = 7
    assert torch.equal(chunk_gradients(given)[0].isnan(), rows < 2)


on_cuda = pytest.mark.parametrize(
    "device",
    [
        pytest.param("emulated", marks=pytest.mark.slow),
        pytest.param("cuda", marks=pytest.mark.cuda),
    ],
    indirect=True,
)


@on_cuda
def test_bad_numbers_on_cuda(device: torch.device) -> None:
    check_bad_numbers_on_cuda(device)


@on_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gradients_of_scores_are_rounded(dtype: torch.dtype, device: torch.device) -> None:
    given = arguments(70, device=device)
    for got, exact in zip(chunk_gradients(given, dtype), chunk_gradients(given), strict=True):
        assert torch.equal(got, exact.to(got.dtype))


@on_cuda
def test_bad_arguments_on_cuda(device: torch.device) -> None:
    given = arguments(device=device)
    chunk = [draw(V, N), draw(T, C, N), draw(T, N), given["cluster"], given["target"]]
    good = [*chunk, *by_cluster(given["cluster"], C), draw(N), draw(V), draw(V, N)]
    for place, bad, match in (
        (5, None, r"order: expected a tensor of shape \[T, V\], got None"),
        (6, torch.zeros(T, C).long(), r"boundary: expected size 6 .* got shape \[3, 5\]"),
        (8, torch.zeros(N), r"bias: expected size 41 .* got shape \[23\]"),
        (9, torch.zeros(V, 2), r"grad_score: expected size 23 .* got shape \[41, 2\]"),
        (9, torch.zeros(V, N), "the dtypes of score and grad_score do not fit"),
    ):
        wrong = [x if x is None else x.to(device) for x in (*good[:place], bad, *good[place + 1 :])]
        with pytest.raises(RuntimeError, match=match):
            torch.ops.hstree.forest_gradient_(*wrong)
