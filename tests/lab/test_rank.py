"""Ranks: matrices whose singular values are known, all routes against each other and LAPACK, the
bounds of the softmax, memory; and the command."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from lm.training.toy import small_config, write_corpus
from torch import Tensor

from hstree.__main__ import main
from hstree.heads import GSS, PLIF, MixtureOfContexts, MixtureOfSoftmaxes, Softmax
from hstree.lab import (
    BlockMatrix,
    RankResult,
    effective_rank,
    log_prob_rank,
    matrix_rank,
    model_log_prob,
    plan_rank,
    press_threshold,
    softmax_rank_bound,
    stored_matrix,
)
from hstree.lab.rank import compute
from hstree.lab.rank.report import energy_picture, rank_rows, rank_table, spectrum_picture, thinned
from hstree.lm._memory import available_memory, gibibytes
from hstree.lm.models import AWDLSTM, LanguageModel
from hstree.lm.runs import load_run
from hstree.lm.training import train
from lab.commands import csv_rows, refused

CPU = torch.device("cpu")
ROUTES = ("svd", "gram", "qr")


def with_values(m: int, n: int, values: list[float], seed: int = 0) -> Tensor:
    """A float64 matrix with these singular values and zeros."""
    generator = torch.Generator().manual_seed(seed)
    left, right = (
        torch.linalg.qr(torch.randn(k, len(values), generator=generator, dtype=torch.float64)).Q
        for k in (m, n)
    )
    return (left * torch.tensor(values, dtype=torch.float64)) @ right.T


def ranks(values: Tensor, method: str = "auto", **options: object) -> RankResult:
    return matrix_rank(plan_rank(stored_matrix(values, dtype=values.dtype), method), **options)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of few rows and strips of few columns, none of which divides the matrix."""
    monkeypatch.setattr(compute, "_BLOCK_BYTES", 8 * 500)
    monkeypatch.setattr(compute, "_COLUMNS", 13)


# Singular values


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("shape", [(200, 40), (40, 200), (60, 60), (1, 30), (30, 1)], ids=str)
@pytest.mark.parametrize("route", ROUTES)
def test_routes_agree_within_their_error_bounds(route: str, shape: tuple[int, int]) -> None:
    """A float32 matrix whose singular values fall from 1 to 1e-9, against numpy in float64."""
    m, n = shape
    values = with_values(m, n, np.geomspace(1, 1e-9, min(shape)).tolist()).float()
    exact = np.linalg.svd(values.double().numpy(), compute_uv=False)
    found = ranks(values, route)
    assert found.route == route
    error = np.abs(found.singular_values - exact)
    assert error.max() <= found.error_bound
    assert error[exact >= found.press_threshold].max() <= found.press_error
    assert found.press_error < (1.01 if route == "svd" else 0.1) * found.press_threshold
    assert found.error_bound < {"svd": 1e-6, "gram": 1e-6, "qr": 1e-14}[route]
    assert (np.diff(found.singular_values) <= 0).all()
    assert found.singular_values.dtype == np.float64
    assert found.press_rank == (exact > press_threshold(shape, exact[0], torch.float32)).sum()


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("shape", [(300, 30), (30, 300)], ids=str)
@pytest.mark.parametrize("route", ["svd", "qr"])
def test_float64_sees_far_smaller_values(route: str, shape: tuple[int, int]) -> None:
    known = np.geomspace(1, 1e-12, 25).tolist()
    found = ranks(with_values(*shape, known), route)
    np.testing.assert_allclose(found.singular_values[:25], known, rtol=0, atol=found.error_bound)
    assert found.error_bound < 1e-14
    assert found.press_rank == 25
    assert ranks(with_values(*shape, known).float(), "qr").press_rank < 18


def test_gram_keeps_integers_exact() -> None:
    """Small integers have an exact Gram matrix, here 36 times the identity."""
    blocks = torch.eye(5).repeat(36, 1)
    found = ranks(blocks, "gram")
    np.testing.assert_allclose(found.singular_values, np.full(5, 6.0), rtol=1e-15)


@pytest.mark.parametrize("route", ROUTES)
def test_zeros(route: str) -> None:
    found = ranks(torch.zeros(6, 4), route)
    assert found.singular_values.tolist() == [0.0] * 4
    assert (found.press_rank, found.press_threshold, found.press_error) == (0, 0.0, 0.0)
    assert set(found.effective_ranks.values()) == {0}


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
def test_numbers_must_be_finite(route: str, bad: float) -> None:
    values = torch.zeros(6, 4)
    values[5, 3] = bad
    with pytest.raises(ValueError, match="matrix: expected finite numbers"):
        ranks(values, route)


# Ranks


def test_press_threshold() -> None:
    assert press_threshold((3, 5), 2.0, torch.float64) == pytest.approx(3 * 2.0**-52)
    assert press_threshold((3, 5), 2.0, torch.float32) == pytest.approx(3 * 2.0**-23)
    threshold = press_threshold((50, 30), 1.0, torch.float32)
    known = [1.0, 10 * threshold, 2 * threshold, threshold / 2, threshold / 10]
    found = ranks(with_values(50, 30, known).float(), "gram")
    assert found.press_threshold == pytest.approx(threshold, rel=1e-6)
    assert found.press_rank == 3


def test_effective_ranks_of_known_spectra() -> None:
    """Squares 1, 1/2, 1/4, ...: what k of them leave is 2^-k of an infinite sum."""
    values = np.sqrt(0.5 ** np.arange(60))
    for epsilon, k in ((0.51, 1), (0.49, 2), (1e-3, 10), (1e-4, 14), (1e-5, 17)):
        assert effective_rank(values, epsilon) == k
        assert effective_rank(values[::-1] * 1e200, epsilon) == k
    assert [effective_rank(np.ones(1000), e) for e in (0.5, 1e-2, 1e-5)] == [500, 990, 1000]
    assert effective_rank([3.0, 0.0], 1e-3) == 1
    assert effective_rank([0.0, 0.0], 1e-3) == 0
    found = ranks(with_values(80, 70, values.tolist()), epsilons=(1e-3, 0.51))
    assert found.effective_ranks == {1e-3: 10, 0.51: 1}


@pytest.mark.parametrize("epsilon", [0.0, 1.0, -1e-3, float("nan")])
def test_epsilons_are_shares(epsilon: float) -> None:
    with pytest.raises(ValueError, match="epsilon: expected a number between 0 and 1"):
        effective_rank([1.0], epsilon)
    with pytest.raises(ValueError, match="epsilons: expected numbers between 0 and 1"):
        ranks(torch.ones(2, 2), epsilons=(1e-3, epsilon))


# The softmax bottleneck


def random_model(head: str, bias: bool, features: int = 9, n_classes: int = 60) -> LanguageModel:
    torch.manual_seed(1)
    backbone = AWDLSTM(n_classes, 8, features)
    heads = {
        "softmax": lambda: Softmax(features, n_classes, bias=bias),
        "tied": lambda: Softmax(features, n_classes, bias=bias, embedding=backbone.embedding),
        "moc": lambda: MixtureOfContexts(features, n_classes, components=3, bias=bias),
        "mos": lambda: MixtureOfSoftmaxes(features, n_classes, components=3, bias=bias),
        "gss": lambda: GSS(features, n_classes, bias=bias),
        "plif": lambda: PLIF(features, n_classes, intervals=1000, bias=bias),
    }
    if head == "tied":
        backbone = AWDLSTM(n_classes, features, features)
    model = LanguageModel(backbone, heads[head]())
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    return model.eval()


TOKENS = np.random.default_rng(0).integers(0, 60, 200)


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("head", ["softmax", "tied", "moc"])
def test_rank_of_one_softmax(head: str, bias: bool) -> None:
    """d + 1 without a bias, d + 2 with one; the 402 = 400 + 2 of the literature."""
    model = random_model(head, bias)
    bound = 9 + 1 + bias
    assert softmax_rank_bound(model.head) == bound
    for dtype in (torch.float32, torch.float64):
        assert log_prob_rank(model, TOKENS, dtype=dtype).press_rank == bound
    assert log_prob_rank(model, TOKENS, rows=8).press_rank == 8


@pytest.mark.parametrize("head", ["mos", "gss", "plif"])
def test_others_go_beyond(head: str) -> None:
    model = random_model(head, True)
    assert softmax_rank_bound(model.head) is None
    found = log_prob_rank(model, TOKENS, epsilons=(1e-2,))
    assert found.press_rank > 30
    assert list(found.effective_ranks) == [1e-2]


@pytest.mark.parametrize("route", ROUTES)
def test_on_every_device(device: torch.device, route: str) -> None:
    expected = log_prob_rank(random_model("mos", True), TOKENS, method=route)
    found = log_prob_rank(random_model("mos", True).to(device), TOKENS, method=route)
    assert found.effective_ranks == expected.effective_ranks
    np.testing.assert_allclose(
        found.singular_values, expected.singular_values, rtol=0, atol=1e-4 * expected.s_max
    )


def test_rounded_log_probabilities_have_full_rank_in_float64() -> None:
    """Why a float64 matrix is of a model in float64."""
    matrix = log_prob_rank(random_model("softmax", True), TOKENS, dtype=torch.float64)
    assert matrix.press_rank == 11
    values = with_values(200, 60, [1.0] * 11).float().double()
    assert ranks(values).press_rank == 60


# Routes and memory


def empty(m: int, n: int, dtype: torch.dtype = torch.float32) -> BlockMatrix:
    """A matrix that may not be read."""

    def blocks(size: int) -> None:
        raise AssertionError

    return BlockMatrix((m, n), dtype, CPU, blocks)


@pytest.mark.parametrize(
    ("matrix", "route"),
    [
        (empty(4096, 4096), "svd"),
        (empty(4097, 4096), "gram"),
        (empty(4097, 4096, torch.float64), "svd"),
        (empty(300, 20_000, torch.float64), "svd"),
        (empty(40_000, 10_000, torch.float64), "qr"),
        (empty(33_320, 33_278, torch.float64), "svd"),
    ],
    ids=lambda value: value if isinstance(value, str) else str(value.shape),
)
def test_auto_chooses_by_size_and_dtype(matrix: BlockMatrix, route: str) -> None:
    plan = plan_rank(matrix, max_memory=10**12)
    assert (plan.route, plan.matrix) == (route, matrix)


def test_memory_is_bounded_and_said() -> None:
    """The whole test text of Penn Treebank: 3.1 GiB as a matrix, 0.75 GiB as a Gram matrix."""
    plan = plan_rank(empty(82_430, 10_000), max_memory=2**40)
    assert plan.route == "gram"
    assert 2 * 8 * 10_000**2 < plan.memory < 2.5 * 2**30
    assert str(plan) == f"82,430 x 10,000 float32, gram, {gibibytes(plan.memory)} of memory"
    assert plan_rank(empty(10**8, 10_000), max_memory=2**40).memory == plan.memory
    assert plan_rank(empty(82_430, 10_000), "svd", 2**40).memory > 2 * 82_430 * 10_000 * 4
    assert plan_rank(empty(82_430, 10_000, torch.float64), max_memory=2**40).memory < 7 * 2**30
    wide = plan_rank(empty(2000, 267_735), max_memory=2**40)
    assert wide.route == "gram"
    assert wide.memory < 6 * 2000 * 267_735
    with pytest.raises(
        ValueError, match=r"max_memory: expected enough for 82,430 x 10,000 .* 1.00 GiB are allowed"
    ):
        plan_rank(empty(82_430, 10_000), max_memory=2**30)


def test_more_memory_than_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ValueError,
        match=r"max_memory: expected enough for 1,000,000,000 x 1,000,000 .* are available",
    ):
        plan_rank(empty(10**9, 10**6))
    monkeypatch.setattr(compute, "available_memory", lambda device: None)
    assert plan_rank(empty(10**9, 10**6)).route == "gram"


def test_available_memory() -> None:
    available = available_memory(CPU)
    assert available is not None
    assert 2**26 < available < 2**50
    assert [gibibytes(n) for n in (2**30, 2**29, 2**20)] == ["1.00 GiB", "0.50 GiB", "1.0 MiB"]


def test_refused_methods() -> None:
    with pytest.raises(ValueError, match=r"method: expected one of auto, svd, gram, qr, got 'x'"):
        plan_rank(empty(3, 3), "x")
    with pytest.raises(ValueError, match=r"method: gram resolves .* expected qr or svd"):
        plan_rank(empty(3, 3, torch.float64), "gram")


# Tables and pictures


def test_tables_and_pictures() -> None:
    results = {
        "a": ranks(with_values(50, 40, [4.0, 2.0, 1.0]).float()),
        "$b_1$": ranks(with_values(20, 30, [1.0]), epsilons=(0.5,)),
        "zero": ranks(torch.zeros(3, 3)),
        "one": ranks(torch.ones(1, 1)),
    }
    rows = rank_rows(results)
    cells = rank_table(rows).rows
    assert cells[0][:5] == ("a", "50", "40", "float32", "svd")
    assert cells[0][-5:] == ("3", "3", "3", "3", "-")
    assert cells[1][-5:] == ("1", "-", "-", "-", "1")
    assert (rows[0]["press_rank"], rows[0]["effective_rank_0.0001"]) == (3, 3)
    assert rows[0]["s_max"] == pytest.approx(4)
    for draw in (spectrum_picture, energy_picture):
        for drawn in (results, {"zero": results["zero"]}):
            figure = draw(drawn)
            figure.canvas.draw()
            assert len(figure.legends[0].get_texts()) == len(drawn)


def test_thinned() -> None:
    assert thinned(5).tolist() == [1, 2, 3, 4, 5]
    assert thinned(1).tolist() == [1]
    some = thinned(10_000)
    assert (some[0], some[-1]) == (1, 10_000)
    assert 500 < len(some) <= 1000
    assert (np.diff(some) > 0).all()


# The command


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a corpus, ``data``, and two finished runs, ``softmax``, tied, and ``mos``."""
    folder = tmp_path_factory.mktemp("runs")
    data = write_corpus(folder / "data")
    for head in ("softmax", "mos"):
        sizes = {"embedding_size": 6, "context_size": 6, "tied": head == "softmax"}
        train(small_config(data, folder / head, head=head, epochs=1, **sizes))
    return folder


@pytest.fixture(autouse=True)
def elsewhere(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(runs)


def fails(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    return refused(capsys, "analyze", "rank", *arguments)


def test_runs_and_a_matrix(capsys: pytest.CaptureFixture[str]) -> None:
    run = load_run("softmax")
    tokens = run.corpus().test
    np.save("own.npy", torch.cat(list(model_log_prob(run.model, tokens).blocks(100))).numpy())
    options = ["softmax", "mos", "--log-prob", "own.npy", "--output", "results"]
    assert main(["analyze", "rank", *options]) == 0
    captured = capsys.readouterr()
    n, v = len(tokens), len(run.vocabulary)
    assert f"softmax: {n:,} x {v} float32, svd, " in captured.err
    assert f"softmax: head softmax, {n:,} contexts of the test part of data; " in captured.out
    assert "a softmax over 6 features with bias has rank at most 8" in captured.out
    assert (
        "note: rank.json has a selection of the singular values, rank-values.npz has all"
        in captured.out
    )
    assert {path.name for path in Path("results").iterdir()} == {
        "rank.md",
        "rank.json",
        "rank.csv",
        "rank-spectrum.png",
        "rank-energy.png",
        "rank-values.npz",
    }
    rows = csv_rows("results/rank.csv")
    assert [row["matrix"] for row in rows] == ["softmax", "mos", "own.npy"]
    expected = log_prob_rank(run.model, tokens)
    assert expected.press_rank == 8
    assert [int(row["press_rank"]) for row in rows[::2]] == [8, 8]
    assert int(rows[1]["press_rank"]) > 8
    assert int(rows[2]["effective_rank_1e-05"]) == expected.effective_ranks[1e-5]
    with np.load("results/rank-values.npz") as values:
        assert values["names"].tolist() == ["softmax", "mos", "own.npy"]
        np.testing.assert_array_equal(values["matrix_0"], expected.singular_values)
    data = json.loads(Path("results/rank.json").read_text())["matrices"]
    assert data[0]["index"] == list(range(1, v + 1))
    np.testing.assert_allclose(data[0]["singular_values"], expected.singular_values, rtol=1e-5)


def test_options(capsys: pytest.CaptureFixture[str]) -> None:
    """The first rows of the validation text in float64, through QR, with an epsilon of one's
    own."""
    options = "--split valid --rows 7 --dtype float64 --method qr --epsilon 0.1 --max-memory 2"
    assert main(["analyze", "rank", "mos", "--output", "options", *options.split()]) == 0
    assert "mos: 7 x " in capsys.readouterr().err
    run = load_run("mos")
    expected = log_prob_rank(run.model, run.corpus().valid, 7, torch.float64, "svd", (0.1,))
    (row,) = csv_rows("options/rank.csv")
    assert (row["rows"], row["dtype"], row["route"]) == ("7", "float64", "qr")
    assert row["press_rank"] == str(expected.press_rank) == "7"
    assert row["effective_rank_0.1"] == str(expected.effective_ranks[0.1])
    assert "effective_rank_0.001" not in row
    assert float(row["s_max"]) == pytest.approx(expected.s_max, rel=1e-12)


def test_gram_says_how_exact_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--method", "gram", "--output", "gram"]
    assert main(["analyze", "rank", "softmax", *options]) == 0
    out = capsys.readouterr().out
    note = r"the error bound of gram is \d+\.\d\d% of the threshold; 0 singular values"
    assert re.search(note, out)
    (row,) = csv_rows("gram/rank.csv")
    assert (row["route"], row["press_rank"]) == ("gram", "8")


def test_failures(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "RUN: expected at least one run folder or --log-prob" in fails(capsys)
    assert "softmax: expected every run and file once" in fails(capsys, "softmax", "softmax")
    assert "absent: no such run folder" in fails(capsys, "absent")
    message = "softmax, test part: rows: expected 1 to "
    assert message in fails(capsys, "softmax", "--rows", "999999")
    message = "--log-prob absent.npy: expected a .npy file"
    assert message in fails(capsys, "--log-prob", "absent.npy")
    np.savez(tmp_path / "two.npz", a=np.ones(2))
    assert "got an archive" in fails(capsys, "--log-prob", str(tmp_path / "two.npz"))
    (tmp_path / "text.npy").write_text("text")
    assert "expected a .npy file" in fails(capsys, "--log-prob", str(tmp_path / "text.npy"))
    np.save(tmp_path / "flat.npy", np.ones(2))
    assert "two dimensions" in fails(capsys, "--log-prob", str(tmp_path / "flat.npy"))
    assert "--epsilon: expected a number between 0 and 1, got 1" in fails(
        capsys, "softmax", "--epsilon", "1"
    )
    message = "method: gram resolves"
    assert message in fails(capsys, "softmax", "--method", "gram", "--dtype", "float64")
    message = "max_memory: "
    assert message in fails(capsys, "softmax", "--max-memory", "0.0001", "--output", "never")
    assert not Path("never").exists()
