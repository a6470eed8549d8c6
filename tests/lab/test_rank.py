"""Ranks: matrices whose singular values are known, against LAPACK; the bounds of the softmax;
log-probabilities as one stream; and the command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lm.training.toy import small_config, write_corpus
from torch import Tensor

from hstree.__main__ import main
from hstree.heads import GSS, PLIF, MixtureOfContexts, MixtureOfSoftmaxes, Softmax
from hstree.lab import (
    RankResult,
    effective_rank,
    log_prob_blocks,
    log_prob_rank,
    matrix_rank,
    press_threshold,
    rank,
    softmax_rank_bound,
)
from hstree.lm.model import AWDLSTM, LanguageModel
from hstree.lm.run import load_run
from hstree.lm.train import evaluate, train
from lab.commands import csv_rows, refused

DTYPES = (torch.float32, torch.float64)


def with_values(m: int, n: int, values: list[float], seed: int = 0) -> Tensor:
    """A float64 matrix with these singular values and zeros."""
    generator = torch.Generator().manual_seed(seed)
    left, right = (
        torch.linalg.qr(torch.randn(k, len(values), generator=generator, dtype=torch.float64)).Q
        for k in (m, n)
    )
    return (left * torch.tensor(values, dtype=torch.float64)) @ right.T


def ranks(values: Tensor, **options: Any) -> RankResult:
    """Of the matrix in blocks of 7 rows."""
    return matrix_rank(torch.split(values, 7), **options)


# Singular values


@pytest.mark.parametrize("shape", [(200, 40), (40, 200), (60, 60), (1, 30), (30, 1)], ids=str)
def test_singular_values_within_their_error_bound(
    shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A float32 matrix whose singular values fall from 1 to 1e-9, against numpy in float64."""
    monkeypatch.setattr(rank, "_PART_BYTES", 8 * 500)  # parts that do not divide the matrix
    values = with_values(*shape, np.geomspace(1, 1e-9, min(shape)).tolist()).float()
    exact = np.linalg.svd(values.double().numpy(), compute_uv=False)
    found = ranks(values)
    assert (found.shape, found.dtype) == (shape, torch.float32)
    error = np.abs(found.singular_values - exact)
    assert error.max() < 1e-7
    assert error[exact >= found.press_threshold].max() <= found.press_error
    assert found.press_error < 0.1 * found.press_threshold
    assert (np.diff(found.singular_values) <= 0).all()
    assert found.press_rank == (exact > press_threshold(shape, exact[0], torch.float32)).sum()


@pytest.mark.parametrize("shape", [(300, 30), (30, 300)], ids=str)
def test_float64_sees_far_smaller_values(shape: tuple[int, int]) -> None:
    known = np.geomspace(1, 1e-12, 25).tolist()
    found = ranks(with_values(*shape, known))
    np.testing.assert_allclose(found.singular_values[:25], known, rtol=0, atol=found.press_error)
    assert found.press_error < 1e-14
    assert found.press_rank == 25
    assert ranks(with_values(*shape, known).float()).press_rank < 18


def test_integers_are_exact() -> None:
    """Small integers have an exact Gram matrix, here 36 times the identity."""
    found = ranks(torch.eye(5).repeat(36, 1))
    np.testing.assert_allclose(found.singular_values, np.full(5, 6.0), rtol=1e-15)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_zeros_and_numbers_that_are_not_finite(dtype: torch.dtype) -> None:
    found = ranks(torch.zeros(6, 4, dtype=dtype))
    assert found.singular_values.tolist() == [0.0] * 4
    assert (found.press_rank, found.press_threshold) == (0, 0.0)
    assert set(found.effective_ranks.values()) == {0}
    for bad in (float("nan"), float("-inf")):
        values = torch.zeros(6, 4, dtype=dtype)
        values[5, 3] = bad
        with pytest.raises(ValueError, match="matrix: expected finite numbers"):
            ranks(values)


# Ranks


def test_press_threshold() -> None:
    assert press_threshold((3, 5), 2.0, torch.float64) == pytest.approx(3 * 2.0**-52)
    assert press_threshold((3, 5), 2.0, torch.float32) == pytest.approx(3 * 2.0**-23)
    threshold = press_threshold((50, 30), 1.0, torch.float32)
    known = [1.0, 10 * threshold, 2 * threshold, threshold / 2, threshold / 10]
    found = ranks(with_values(50, 30, known).float())
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


TOKENS = np.random.default_rng(0).integers(0, 60, 200, dtype=np.int32)


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("head", ["softmax", "tied", "moc"])
def test_rank_of_one_softmax(head: str, bias: bool) -> None:
    """d + 1 without a bias, d + 2 with one; the 402 = 400 + 2 of the literature."""
    model = random_model(head, bias)
    bound = 9 + 1 + bias
    assert softmax_rank_bound(model.head) == bound
    for dtype in DTYPES:
        assert log_prob_rank(model, TOKENS, dtype=dtype).press_rank == bound
    assert log_prob_rank(model, TOKENS, rows=8).press_rank == 8


@pytest.mark.parametrize("head", ["mos", "gss", "plif"])
def test_others_go_beyond(head: str) -> None:
    model = random_model(head, True)
    assert softmax_rank_bound(model.head) is None
    found = log_prob_rank(model, TOKENS, epsilons=(1e-2,))
    assert found.press_rank > 30
    assert list(found.effective_ranks) == [1e-2]


def test_on_every_device(device: torch.device) -> None:
    expected = log_prob_rank(random_model("mos", True), TOKENS)
    found = log_prob_rank(random_model("mos", True).to(device), TOKENS)
    assert found.effective_ranks == expected.effective_ranks
    tolerance = 1e-4 * expected.singular_values[0]
    np.testing.assert_allclose(
        found.singular_values, expected.singular_values, rtol=0, atol=tolerance
    )


def test_rounded_log_probabilities_have_full_rank_in_float64() -> None:
    """Why a float64 matrix is of a model in float64."""
    values = with_values(200, 60, [1.0] * 11).float().double()
    assert ranks(values).press_rank == 60


# Log-probabilities


@pytest.mark.parametrize("bytes_at_once", [1, 8 * 60 * 7, 1 << 25])
def test_log_probabilities_are_of_one_stream(
    bytes_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows of any size give what one window over the text gives, in float64 to its rounding."""
    monkeypatch.setattr(rank, "_WINDOW_BYTES", bytes_at_once)
    model = random_model("mos", True)
    found = torch.cat([*log_prob_blocks(model, TOKENS, torch.float64)])
    assert model.head.weight.dtype == torch.float32
    whole = model.double()
    with torch.no_grad():
        hidden, _ = whole.hidden(torch.from_numpy(TOKENS.astype(np.int64))[:, None])
        expected = whole.head.log_prob(hidden[:, 0])
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_targets_have_the_probabilities_of_evaluation() -> None:
    """Row i is of the word behind token i; and the model is left as it was."""
    model = random_model("softmax", True).train()
    found = torch.cat([*log_prob_blocks(model, TOKENS)])
    assert (found.dtype, found.requires_grad) == (torch.float32, False)
    target = torch.from_numpy(TOKENS[1:].astype(np.int64))
    loss = -float(found[:-1].gather(1, target[:, None]).double().mean())
    assert loss == pytest.approx(evaluate(model, TOKENS, 1), rel=1e-6)
    assert model.training


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model("softmax", True)
    with pytest.raises(ValueError, match=r"rows: expected 1 to 200 \(the tokens\), got 201"):
        log_prob_rank(model, TOKENS, rows=201)
    with pytest.raises(ValueError, match=r"tokens: expected at least one integer .* shape \(0,\)"):
        log_prob_rank(model, TOKENS[:0])
    with pytest.raises(ValueError, match=r"dtype: expected torch.float32 .* got torch.float16"):
        log_prob_rank(model, TOKENS, dtype=torch.float16)
    monkeypatch.setattr(rank, "available_memory", lambda device: 2**16)
    with pytest.raises(ValueError, match=r"of memory for the ranks of 200 x 60 .* are available"):
        log_prob_rank(model, TOKENS)


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


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    run = load_run("softmax")
    tokens = run.corpus().test
    assert main(["analyze", "rank", "softmax", "mos", "--output", "results"]) == 0
    out = capsys.readouterr().out
    assert f"softmax: head softmax, {len(tokens):,} contexts of the test part of data; " in out
    assert "such a softmax has rank at most 8" in out.replace("\n", " ")
    names = ("rank.md", "rank.json", "rank.csv", "rank-spectrum.png")
    assert {path.name for path in Path("results").iterdir()} == {*names}
    one, other = csv_rows("results/rank.csv")
    expected = log_prob_rank(run.model, tokens)
    assert int(one["press_rank"]) == expected.press_rank == 8
    assert int(one["effective_rank_1e-05"]) == expected.effective_ranks[1e-5]
    assert (other["matrix"], int(other["press_rank"]) > 8) == ("mos", True)
    data = json.loads(Path("results/rank.json").read_text())["matrices"]
    np.testing.assert_array_equal(data[0]["singular_values"], expected.singular_values)


def test_options() -> None:
    """The first rows of the validation text in float64, with an epsilon of one's own."""
    options = "--split valid --rows 7 --dtype float64 --epsilon 0.1"
    assert main(["analyze", "rank", "mos", "--output", "options", *options.split()]) == 0
    run = load_run("mos")
    expected = log_prob_rank(run.model, run.corpus().valid, 7, torch.float64, (0.1,))
    (row,) = csv_rows("options/rank.csv")
    assert (row["rows"], row["dtype"]) == ("7", "float64")
    assert row["press_rank"] == str(expected.press_rank) == "7"
    assert row["effective_rank_0.1"] == str(expected.effective_ranks[0.1])
    assert "effective_rank_0.001" not in row


def test_failures(capsys: pytest.CaptureFixture[str]) -> None:
    def fails(*arguments: str) -> str:
        return refused(capsys, "analyze", "rank", *arguments)

    assert "softmax: expected every run and file once" in fails("softmax", "softmax")
    assert "absent: no such run folder" in fails("absent")
    assert "softmax, test part: rows: expected 1 to " in fails("softmax", "--rows", "999999")
    message = "--epsilon: expected a number between 0 and 1, got 1"
    assert message in fails("softmax", "--epsilon", "1")
    assert not Path("rank").exists()
