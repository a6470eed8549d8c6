"""Log-probability matrices in blocks: of models, against the head itself; of files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from hstree.heads import Softmax
from hstree.lab import model_log_prob, stored_matrix
from hstree.lab.rank import matrix as log_prob
from hstree.lm.evaluation import evaluate_stream
from hstree.lm.models import AWDLSTM, LanguageModel

N, V = 300, 17


@pytest.fixture
def model() -> LanguageModel:
    torch.manual_seed(0)
    backbone = AWDLSTM(V, 6, 8, layers=2, context_size=5, dropout=0.3, weight_dropout=0.2)
    model = LanguageModel(backbone, Softmax(5, V))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.7)
    return model


@pytest.fixture
def tokens() -> np.ndarray:
    return np.random.default_rng(0).integers(0, V, N, dtype=np.int32)


@pytest.mark.parametrize("size", [1, 7, 130, N, 2 * N])
def test_blocks_are_one_stream(size: int, model: LanguageModel, tokens: np.ndarray) -> None:
    """Windows of 128 words and blocks of any size give what one window over the text gives."""
    matrix = model_log_prob(model, tokens, dtype=torch.float64)
    assert matrix.shape == (N, V)
    blocks = list(matrix.blocks(size))
    assert max(map(len, blocks)) <= size
    assert len(blocks) <= -(-N // size) + N // 128 + 1
    found = torch.cat(blocks)
    assert found.dtype == torch.float64
    whole = model.double().eval()
    with torch.no_grad():
        hidden, _ = whole.hidden(torch.from_numpy(tokens.astype(np.int64))[:, None])
        expected = whole.head.log_prob(hidden[:, 0])
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found.exp().sum(1), torch.ones(N, dtype=torch.float64))


def test_targets_have_the_probabilities_of_evaluation(
    model: LanguageModel, tokens: np.ndarray
) -> None:
    """Row i is of the word behind token i; and the model is left as it was."""
    model.train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = torch.cat(list(model_log_prob(model, tokens).blocks(50)))
    assert found.dtype == torch.float32
    assert not found.requires_grad
    target = torch.from_numpy(tokens[1:].astype(np.int64))
    loss = -float(found[:-1].gather(1, target[:, None]).double().mean())
    assert loss == pytest.approx(evaluate_stream(model, tokens), rel=1e-6)
    assert model.training
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_float64_computes_in_float64(model: LanguageModel, tokens: np.ndarray) -> None:
    single = torch.cat(list(model_log_prob(model, tokens).blocks(N)))
    double = torch.cat(list(model_log_prob(model, tokens, dtype=torch.float64).blocks(N)))
    assert model.head.weight.dtype == torch.float32
    assert not torch.equal(single.double(), double)
    torch.testing.assert_close(single.double(), double, rtol=1e-5, atol=1e-5)


def test_first_rows(model: LanguageModel, tokens: np.ndarray) -> None:
    matrix = model_log_prob(model, tokens, rows=20)
    assert matrix.shape == (20, V)
    found = torch.cat(list(matrix.blocks(8)))
    everything = torch.cat(list(model_log_prob(model, tokens).blocks(8)))
    torch.testing.assert_close(found, everything[:20], rtol=1e-5, atol=1e-5)


def test_window_is_small_for_many_classes(
    model: LanguageModel, tokens: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = torch.cat(list(model_log_prob(model, tokens, dtype=torch.float64).blocks(N)))
    monkeypatch.setattr(log_prob, "_WINDOW_BYTES", 3 * V * 8)
    lengths = []
    hidden = model.hidden
    monkeypatch.setattr(
        LanguageModel,
        "hidden",
        lambda self, words, state: lengths.append(len(words)) or hidden(words, state),
    )
    model.double()
    found = torch.cat(list(model_log_prob(model, tokens, dtype=torch.float64).blocks(100)))
    assert max(lengths) == 3
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_stored_matrices(tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_normal((10, 4))
    np.save(tmp_path / "m.npy", values)
    mapped = np.load(tmp_path / "m.npy", mmap_mode="r")
    for source in (values, mapped, torch.from_numpy(values)):
        matrix = stored_matrix(source, rows=9, dtype=torch.float64)
        assert matrix.shape == (9, 4)
        blocks = list(matrix.blocks(4))
        assert [len(block) for block in blocks] == [4, 4, 1]
        assert torch.equal(torch.cat(blocks), torch.from_numpy(values[:9]))
    half = stored_matrix(values.astype(np.float16))
    assert [block.dtype for block in half.blocks(10)] == [torch.float32]
    swapped = stored_matrix(values.astype(">f8"), dtype=torch.float64)
    assert torch.equal(torch.cat(list(swapped.blocks(3))), torch.from_numpy(values))


def test_refusals(model: LanguageModel, tokens: np.ndarray) -> None:
    with pytest.raises(ValueError, match=r"rows: expected 1 to 300 \(the tokens\), got 301"):
        model_log_prob(model, tokens, rows=301)
    with pytest.raises(ValueError, match=r"tokens: expected at least one integer .* shape \(0,\)"):
        model_log_prob(model, tokens[:0])
    with pytest.raises(ValueError, match=r"dtype: expected torch.float32 .* got torch.float16"):
        model_log_prob(model, tokens, dtype=torch.float16)
    with pytest.raises(
        ValueError, match=r"rows: expected 1 to 5 \(the rows in the matrix\), got 0"
    ):
        stored_matrix(np.zeros((5, 3)), rows=0)
    for wrong in (np.zeros(3), np.zeros((0, 3)), np.zeros((2, 3), np.int64), torch.zeros(2, 1, 1)):
        with pytest.raises(ValueError, match=r"values: expected floating-point numbers in two"):
            stored_matrix(wrong)
