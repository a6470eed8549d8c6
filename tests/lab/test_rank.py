"""Ranks: matrices whose singular values are known, against LAPACK; the bounds of the softmax;
log-probabilities as one stream; and the command."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from hstree.__main__ import main
from hstree.heads import GSS, MixtureOfContexts, MixtureOfSoftmaxes, Softmax
from hstree.lab import log_prob_rank, matrix_rank, rank
from hstree.lab.rank import (
    RankResult,
    effective_rank,
    log_prob_blocks,
    press_threshold,
    softmax_rank_bound,
)
from hstree.lm.model import AWDLSTM, LanguageModel
from hstree.lm.run import load_run
from hstree.lm.train import evaluate

DTYPES = (torch.float32, torch.float64)


def with_values(m: int, n: int, values: list[float], seed: int = 0) -> Tensor:
    """A float64 matrix with these singular values and zeros."""
    generator = torch.Generator().manual_seed(seed)
    left, right = (
        torch.linalg.qr(torch.randn(k, len(values), generator=generator, dtype=torch.float64)).Q
        for k in (m, n)
    )
    return (left * torch.tensor(values, dtype=torch.float64)) @ right.T


def ranks(values: Tensor) -> RankResult:
    """Of the matrix in blocks of 7 rows."""
    return matrix_rank(torch.split(values, 7))


# Singular values


@pytest.mark.parametrize("shape", [(200, 40), (40, 200), (60, 60), (1, 30), (30, 1)], ids=str)
def test_singular_values_of_float32(
    shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They fall from 1 to 1e-9, against numpy in float64; with errors far below the threshold."""
    monkeypatch.setattr(rank, "_PART_ROWS", 13)  # parts that do not divide the matrix
    values = with_values(*shape, np.geomspace(1, 1e-9, min(shape)).tolist()).float()
    exact = np.linalg.svd(values.double().numpy(), compute_uv=False)
    found = ranks(values)
    assert (found.shape, found.dtype) == (shape, torch.float32)
    error = np.abs(found.singular_values - exact)
    assert error.max() < 1e-7
    assert error[exact >= found.press_threshold].max() < 1e-3 * found.press_threshold
    assert (np.diff(found.singular_values) <= 0).all()
    assert found.press_rank == (exact > press_threshold(shape, exact[0], torch.float32)).sum()


@pytest.mark.parametrize("shape", [(300, 30), (30, 300)], ids=str)
def test_float64_sees_far_smaller_values(shape: tuple[int, int]) -> None:
    known = np.geomspace(1, 1e-12, 25).tolist()
    found = ranks(with_values(*shape, known))
    np.testing.assert_allclose(found.singular_values[:25], known, rtol=0, atol=1e-14)
    assert found.press_rank == 25
    assert ranks(with_values(*shape, known).float()).press_rank < 18


def test_rounded_log_probabilities_have_full_rank_in_float64() -> None:
    """Why a float64 matrix is of a model in float64."""
    assert ranks(with_values(200, 60, [1.0] * 11).float().double()).press_rank == 60


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
    found = ranks(with_values(80, 70, values.tolist()))
    assert found.effective_ranks == {1e-3: 10, 1e-4: 14, 1e-5: 17}


# Models


def random_model(head: str, bias: bool = True) -> LanguageModel:
    torch.manual_seed(1)
    backbone = AWDLSTM(60, 9, 9)
    options = {"embedding": backbone.embedding} if head == "tied" else {}
    options |= {"components": 3} if head in ("mos", "moc") else {}
    kinds = {"moc": MixtureOfContexts, "mos": MixtureOfSoftmaxes, "gss": GSS}
    model = LanguageModel(backbone, kinds.get(head, Softmax)(9, 60, bias=bias, **options))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    return model.eval()


TOKENS = np.random.default_rng(0).integers(0, 60, 200, dtype=np.int32)


@pytest.mark.parametrize(
    ("head", "bias"), [("softmax", False), ("softmax", True), ("tied", True), ("moc", True)]
)
def test_rank_of_one_softmax(head: str, bias: bool) -> None:
    """d + 1 without a bias, d + 2 with one; the 402 = 400 + 2 of the literature."""
    model = random_model(head, bias)
    bound = 9 + 1 + bias
    assert softmax_rank_bound(model.head) == bound
    for dtype in DTYPES:
        assert log_prob_rank(model, TOKENS, dtype=dtype).press_rank == bound
    assert log_prob_rank(model, TOKENS, rows=8).press_rank == 8


@pytest.mark.parametrize("head", ["mos", "gss"])
def test_others_go_beyond(head: str) -> None:
    model = random_model(head)
    assert softmax_rank_bound(model.head) is None
    assert log_prob_rank(model, TOKENS).press_rank > 30


def test_on_every_device(device: torch.device) -> None:
    expected = log_prob_rank(random_model("mos"), TOKENS)
    found = log_prob_rank(random_model("mos").to(device), TOKENS)
    assert found.effective_ranks == expected.effective_ranks
    atol = 1e-4 * expected.singular_values[0]
    np.testing.assert_allclose(found.singular_values, expected.singular_values, rtol=0, atol=atol)


@pytest.mark.parametrize("bytes_at_once", [1, 8 * 60 * 7, 1 << 25])
def test_log_probabilities_are_of_one_stream(
    bytes_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows of any size give what one window over the text gives, in float64 to its rounding."""
    monkeypatch.setattr(rank, "_WINDOW_BYTES", bytes_at_once)
    model = random_model("mos")
    found = torch.cat([*log_prob_blocks(model, TOKENS, torch.float64)])
    assert model.head.weight.dtype == torch.float32
    whole = model.double()
    with torch.no_grad():
        hidden, _ = whole.hidden(torch.from_numpy(TOKENS.astype(np.int64))[:, None])
        expected = whole.head.log_prob(hidden[:, 0])
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_targets_have_the_probabilities_of_evaluation() -> None:
    """Row i is of the word behind token i; and the model is left as it was."""
    model = random_model("softmax").train()
    found = torch.cat([*log_prob_blocks(model, TOKENS)])
    assert (found.dtype, found.requires_grad) == (torch.float32, False)
    target = torch.from_numpy(TOKENS[1:].astype(np.int64))
    loss = -float(found[:-1].gather(1, target[:, None]).double().mean())
    assert loss == pytest.approx(evaluate(model, TOKENS, 1), rel=1e-6)
    assert model.training


# The command


@pytest.mark.usefixtures("runs")
def test_page_figures_and_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results, options = tmp_path / "results", tmp_path / "options"
    run = load_run("softmax")
    tokens = run.corpus().test
    assert main(["analyze", "rank", "softmax", "mos", "--output", str(results)]) == 0
    out = capsys.readouterr().out
    assert f"softmax: head softmax, {len(tokens):,} contexts of the test part of data; " in out
    assert "such a softmax has rank at most 8" in out.replace("\n", " ")
    names = {"rank.md", "rank.json", "rank-spectrum.png"}
    assert {path.name for path in results.iterdir()} == names
    data = json.loads((results / "rank.json").read_text())
    one, other = data["Press rank and effective ranks"]
    expected = log_prob_rank(run.model, tokens)
    assert one["press_rank"] == expected.press_rank == 8
    assert one["effective_rank_1e-05"] == expected.effective_ranks[1e-5]
    assert (other["matrix"], other["press_rank"] > 8) == ("mos", True)
    values = data["singular_values"]["softmax"]
    np.testing.assert_array_equal(values, expected.singular_values)

    # The first rows of the validation text in float64.
    flags = ["--split", "valid", "--rows", "7", "--dtype", "float64"]
    assert main(["analyze", "rank", "mos", "--output", str(options), *flags]) == 0
    run = load_run("mos")
    expected = log_prob_rank(run.model, run.corpus().valid, 7, torch.float64)
    data = json.loads((options / "rank.json").read_text())
    (row,) = data["Press rank and effective ranks"]
    assert (row["rows"], row["dtype"]) == (7, "float64")
    assert row["press_rank"] == expected.press_rank == 7
    assert row["effective_rank_0.001"] == expected.effective_ranks[1e-3]
