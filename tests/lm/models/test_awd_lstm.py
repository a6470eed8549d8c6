"""The AWD-LSTM against LSTM equations written out step by step, its masks, and its penalty."""

from __future__ import annotations

import copy
import json
import math
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hstree.lm import model as awd_lstm
from hstree.lm.model import AWDLSTM, BackboneOutput, _one_block, _run, activation_penalty, detach

V = 11
EVERY_DROPOUT = {
    "dropout": 0.4,
    "dropout_input": 0.3,
    "dropout_hidden": 0.25,
    "dropout_embedding": 0.2,
    "weight_dropout": 0.5,
}


def lstm_cells(backbone: AWDLSTM) -> list[nn.LSTMCell]:
    """The layers as cells with equal weights."""
    cells = []
    for lstm in backbone.lstms:
        cell = nn.LSTMCell(lstm.input_size, lstm.hidden_size)
        cell.load_state_dict({name.removesuffix("_l0"): p for name, p in lstm.named_parameters()})
        cells.append(cell)
    return cells


def lstm_step(
    x: Tensor, h: Tensor, c: Tensor, lstm: nn.LSTM, weight_hh: Tensor
) -> tuple[Tensor, Tensor]:
    """h_t and c_t of the LSTM's equations."""
    gates = x @ lstm.weight_ih_l0.T + lstm.bias_ih_l0 + h @ weight_hh.T + lstm.bias_hh_l0
    i, f, g, o = gates.chunk(4, dim=1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


@pytest.fixture
def masks(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Masks in the order in which they are drawn, as numbers by which to multiply."""
    drawn: list[Tensor] = []
    dropout = F.dropout

    def spy(x: Tensor, p: float, *arguments: Any, **options: Any) -> Tensor:
        assert bool((x != 0).all())
        result = dropout(x, p, *arguments, **options)
        drawn.append((result / x).detach())
        return result

    monkeypatch.setattr(F, "dropout", spy)
    return drawn


def read_by_layers(backbone: AWDLSTM, tokens: Tensor) -> list[Tensor]:
    """What each layer reads in a window, and the hidden vectors."""
    read: list[Tensor] = []

    def run(lstm: nn.LSTM, input: Tensor, *rest: Any) -> Any:
        read.append(input)
        return _run(lstm, input, *rest)

    with patch.object(awd_lstm, "_run", run):
        hidden = backbone(tokens).hidden
    return [*read, hidden]


@pytest.mark.parametrize("context_size", [None, 7, 4])
@pytest.mark.parametrize("layers", [1, 3])
def test_layers_one_after_the_other(layers: int, context_size: int | None) -> None:
    """Against LSTM cells run step by step."""
    torch.manual_seed(1)
    backbone = AWDLSTM(V, 5, 7, layers, context_size=context_size).eval()
    sizes = (5, *[7] * (layers - 1), context_size or 7)
    assert backbone.layer_sizes == sizes
    assert backbone.out_features == sizes[-1]
    tokens = torch.randint(V, (6, 3))
    cells = lstm_cells(backbone)
    state = [(torch.randn(3, size), torch.randn(3, size)) for size in sizes[1:]]
    start = tuple((h[None], c[None]) for h, c in state)
    expected = []
    for step in tokens:
        x = backbone.embedding.weight[step]
        every = [x]
        for number, cell in enumerate(cells):
            state[number] = cell(x, state[number])
            x = state[number][0]
            every.append(x)
        expected.append(torch.cat(every, dim=1))
    output = backbone(tokens, start)
    every_layer = torch.stack(expected)
    for found in (output.hidden, output.raw, output.dropped):
        torch.testing.assert_close(found, every_layer[..., -sizes[-1] :])
    torch.testing.assert_close(output.state, tuple((h[None], c[None]) for h, c in state))


@pytest.mark.parametrize("layers", [1, 3])
def test_training_with_every_dropout(layers: int, masks: list[Tensor]) -> None:
    """Values and gradients of two windows against the equations with the same masks."""
    torch.manual_seed(2)
    backbone = AWDLSTM(V, 5, 7, layers, context_size=4, **EVERY_DROPOUT).double()
    sizes = backbone.layer_sizes
    state = backbone.initial_state(3)
    expected_state = [(h[0], c[0]) for h, c in state]
    loss, expected_loss = torch.zeros(()), torch.zeros(())
    for _ in range(2):
        masks.clear()
        tokens = torch.randint(V, (6, 3))
        output = backbone(tokens, state)
        state = output.state
        word, first, *rest = masks
        weights, locked = rest[::2], [first, *rest[1::2]]
        assert word.shape == (V, 1)
        assert [mask.shape for mask in locked] == [(1, 3, size) for size in sizes]
        assert [mask.shape for mask in weights] == [(4 * size, size) for size in sizes[1:]]
        scales = [0.8, *[0.5] * layers, 0.7, *[0.75] * (layers - 1), 0.6]
        for mask, keep in zip([word, *weights, *locked], scales, strict=True):
            kept = mask[mask != 0]
            torch.testing.assert_close(kept, torch.full_like(kept, 1 / keep))
        raw, last = [], []
        for step in tokens:
            x = (backbone.embedding.weight * word)[step] * locked[0][0]
            for layer, lstm in enumerate(backbone.lstms):
                weight_hh = lstm.weight_hh_l0 * weights[layer]
                expected_state[layer] = lstm_step(x, *expected_state[layer], lstm, weight_hh)
                x = expected_state[layer][0] * locked[layer + 1][0]
            raw.append(expected_state[-1][0])
            last.append(x)
        hidden = torch.stack(last)
        expected = BackboneOutput(
            hidden, tuple((h[None], c[None]) for h, c in expected_state), torch.stack(raw), hidden
        )
        torch.testing.assert_close(output, expected)
        weight = torch.randn_like(hidden)
        loss = loss + (output.hidden * weight).sum() + activation_penalty(output, 2.0, 3.0)
        expected_loss = expected_loss + (expected.hidden * weight).sum()
        expected_loss = expected_loss + activation_penalty(expected, 2.0, 3.0)
    found = torch.autograd.grad(loss, list(backbone.parameters()))
    wanted = torch.autograd.grad(expected_loss, list(backbone.parameters()))
    for (name, _), ours, theirs in zip(backbone.named_parameters(), found, wanted, strict=True):
        assert theirs.abs().sum() > 0, name
        torch.testing.assert_close(ours, theirs, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("dropouts", [{}, {"dropout_embedding": 0.3, "dropout_input": 0.4}])
def test_embedding_noise(dropouts: dict[str, float]) -> None:
    """Added to every element after the dropout of words and before the locked mask."""
    torch.manual_seed(18)
    sigma = 0.15
    backbone = AWDLSTM(V, 50, 4, embedding_noise=sigma, **dropouts)
    tokens = torch.randint(V, (40, 8))
    torch.manual_seed(19)
    found = read_by_layers(backbone, tokens)[0]
    torch.manual_seed(19)
    words, locked = torch.ones(V, 1), torch.ones(1, 8, 50)
    if dropouts:
        words = F.dropout(words, dropouts["dropout_embedding"])
    noise = torch.randn(40, 8, 50)
    if dropouts:
        locked = F.dropout(locked, dropouts["dropout_input"])
    expected = ((backbone.embedding.weight * words)[tokens] + sigma * noise) * locked
    torch.testing.assert_close(found, expected)
    (gradient,) = torch.autograd.grad(found.sum(), backbone.embedding.weight)
    of_words = torch.zeros(V, 50).index_put(
        (tokens.flatten(),), locked.expand(40, 8, 50).reshape(-1, 50), accumulate=True
    )
    torch.testing.assert_close(gradient, of_words * words)


def test_dropped_weights_are_never_stale() -> None:
    """Changed, loaded and copied weights are those of the next call."""
    torch.manual_seed(7)
    backbone = AWDLSTM(V, 5, 7, 2, **EVERY_DROPOUT)
    tokens = torch.randint(V, (6, 3))
    backbone(tokens).hidden.sum().backward()
    twin = copy.deepcopy(backbone)
    with torch.no_grad():
        for parameter in backbone.parameters():
            parameter.add_(0.1)
    plain = AWDLSTM(V, 5, 7, 2)
    plain.load_state_dict(backbone.state_dict())
    expected = plain(tokens)
    torch.testing.assert_close(backbone.eval()(tokens), expected)
    assert not torch.allclose(twin.eval()(tokens).hidden, expected.hidden)
    twin.load_state_dict(backbone.state_dict())
    torch.testing.assert_close(twin(tokens), expected)


def test_names_are_those_of_torch() -> None:
    names = ["weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0"]
    expected = ["embedding.weight"] + [f"lstms.{i}.{name}" for i in range(2) for name in names]
    backbone = AWDLSTM(V, 5, 7, 2, **EVERY_DROPOUT)
    assert list(backbone.state_dict()) == expected
    assert [name for name, _ in backbone.named_parameters()] == expected
    backbone(torch.zeros(3, 2, dtype=torch.int64))
    assert list(backbone.state_dict()) == expected


def test_sparse_gradients_of_the_embedding() -> None:
    """Those of a dense one, in the rows of the words that were read."""
    tokens = torch.tensor([[3, 1], [1, 4]])
    gradients = []
    for sparse in (False, True):
        torch.manual_seed(11)
        backbone = AWDLSTM(
            V, 5, 7, 2, sparse_embedding=sparse, embedding_noise=0.1, **EVERY_DROPOUT
        )
        assert AWDLSTM.from_config(backbone.config()).embedding.sparse is sparse
        backbone(tokens).hidden.square().sum().backward()
        gradients.append(backbone.embedding.weight.grad)
    assert gradients[1].is_sparse
    assert sorted(gradients[1].coalesce().indices()[0].tolist()) == [1, 3, 4]
    torch.testing.assert_close(gradients[1].to_dense(), gradients[0])


def test_evaluation_has_no_randomness_and_training_a_seed() -> None:
    torch.manual_seed(10)
    backbone = AWDLSTM(V, 5, 7, 2, embedding_noise=0.1, **EVERY_DROPOUT).eval()
    plain = AWDLSTM(V, 5, 7, 2).train()
    plain.load_state_dict(backbone.state_dict())
    tokens = torch.randint(V, (6, 3))
    generator = torch.get_rng_state()
    output = backbone(tokens)
    torch.testing.assert_close(output, plain(tokens), rtol=0, atol=0)
    torch.testing.assert_close(output, backbone(tokens), rtol=0, atol=0)
    assert torch.equal(output.raw, output.dropped)
    assert torch.equal(torch.get_rng_state(), generator)
    backbone.train()
    outputs = []
    for seed in (8, 8, 9):
        torch.manual_seed(seed)
        outputs.append(backbone(tokens).hidden)
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])


def test_one_block_of_weights() -> None:
    """One contiguous block in the order of cuDNN, with the values and gradients of the parts."""
    torch.manual_seed(12)
    lstm = nn.LSTM(5, 7).double()
    weights = list(lstm.parameters())
    block = _one_block(weights)
    places = [part.storage_offset() for part in block]
    assert places == [0, 28 * 5, 28 * 12, 28 * 13]
    assert len({part.untyped_storage().data_ptr() for part in block}) == 1
    assert block[0].untyped_storage().nbytes() == 28 * 14 * 8
    assert all(part.is_contiguous() for part in block)
    x = torch.randn(6, 3, 5, dtype=torch.float64)
    zero = torch.zeros(1, 3, 7, dtype=torch.float64)
    found = torch.lstm(x, (zero, zero), block, True, 1, 0.0, True, False, False)[0]
    expected = lstm(x)[0]
    torch.testing.assert_close(found, expected)
    upstream = torch.randn_like(expected)
    torch.testing.assert_close(
        torch.autograd.grad(found, weights, upstream),
        torch.autograd.grad(expected, weights, upstream),
    )


@pytest.mark.cuda
def test_gpu_with_every_dropout(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same masks give the CPU's values and gradients, without a warning of cuDNN."""
    torch.manual_seed(13)
    dropout = F.dropout
    monkeypatch.setattr(F, "dropout", lambda x, p: x * dropout(torch.ones(x.shape), p).to(x.device))
    backbone = AWDLSTM(V, 5, 8, 3, context_size=4, **EVERY_DROPOUT)
    tokens = torch.randint(V, (6, 3))
    found = []
    for device in ("cpu", "cuda"):
        twin = copy.deepcopy(backbone).to(device)
        torch.manual_seed(14)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            output = twin(tokens.to(device))
            output.hidden.square().sum().backward()
        # Copies: on the CPU the next backward pass adds to the same tensors.
        grads = {name: p.grad.cpu().clone() for name, p in twin.named_parameters()}
        found.append((output.hidden.cpu(), grads))
        twin.eval()(tokens.to(device)).hidden.sum().backward()  # cuDNN keeps what this needs
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-4)


def test_state_carries_over_windows() -> None:
    backbone = AWDLSTM(V, 5, 7, 2, context_size=4)
    tokens = torch.randint(V, (9, 2))
    whole = backbone(tokens)
    first = backbone(tokens[:4])
    second = backbone(tokens[4:], detach(first.state))
    torch.testing.assert_close(torch.cat([first.hidden, second.hidden]), whole.hidden)
    torch.testing.assert_close(second.state, whole.state)
    assert all(part.requires_grad for pair in first.state for part in pair)
    assert not any(part.requires_grad for pair in detach(first.state) for part in pair)


def test_state_needs_a_pair_for_each_layer() -> None:
    backbone = AWDLSTM(V, 5, 7, 2, context_size=4)
    tokens = torch.randint(V, (6, 3))
    state = backbone.initial_state(3)
    assert [(h.shape, c.shape) for h, c in state] == [((1, 3, 7),) * 2, ((1, 3, 4),) * 2]
    assert not any(part.any() for pair in state for part in pair)
    for wrong in (state[:1], backbone.initial_state(2), (state[0], state[1][:1])):
        with pytest.raises(
            ValueError, match=r"state: .* \[\(\(1, 3, 7\), \(1, 3, 7\)\), .* got \["
        ):
            backbone(tokens, wrong)


@pytest.mark.parametrize(("alpha", "beta"), [(0.0, 0.0), (2.0, 0.0), (0.0, 1.5), (2.0, 1.5)])
@pytest.mark.parametrize("steps", [1, 5])
def test_activation_penalty(steps: int, alpha: float, beta: float) -> None:
    torch.manual_seed(15)
    output = AWDLSTM(V, 3, 4, dropout=0.5)(torch.randint(V, (steps, 2)))
    assert not torch.equal(output.raw, output.dropped)
    penalty = activation_penalty(output, alpha, beta)
    assert penalty.shape == ()
    assert penalty.requires_grad == (alpha > 0 or (beta > 0 and steps > 1))
    places = [(t, b, d) for t in range(steps) for b in range(2) for d in range(4)]
    expected = alpha * sum(output.dropped[at].item() ** 2 for at in places) / len(places)
    raw = output.raw
    changes = [(raw[t, b, d] - raw[t - 1, b, d]).item() ** 2 for t, b, d in places if t > 0]
    expected += beta * sum(changes) / max(len(changes), 1)
    assert penalty.item() == pytest.approx(expected, rel=1e-5)


def test_penalty_of_half_precision_is_taken_in_float32() -> None:
    raw = torch.full((3, 1, 2), 300.0, dtype=torch.float16)
    output = BackboneOutput(raw, (), raw, raw)
    penalty = activation_penalty(output, 1.0, 1.0)
    assert penalty.dtype == torch.float32
    assert penalty.item() == 90000.0  # beyond float16


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"context_size": 3},
        EVERY_DROPOUT | {"embedding_noise": 0.1},
    ],
)
def test_config_round_trip(options: dict[str, Any]) -> None:
    backbone = AWDLSTM(V, 5, 7, layers=2, **options)
    config = backbone.config()
    other = AWDLSTM.from_config(json.loads(json.dumps(config)))
    assert other.config() == config
    assert config["kind"] == "awd-lstm"
    assert config.items() >= options.items()
    assert other.out_features == backbone.out_features
    other.load_state_dict(backbone.state_dict())
    with pytest.raises(ValueError, match="expected the kind 'awd-lstm', got 'gru'"):
        AWDLSTM.from_config(config | {"kind": "gru"})
    with pytest.raises(ValueError, match="unexpected keyword argument 'colour'"):
        AWDLSTM.from_config(config | {"colour": 1})


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        *(
            (name, [0, -1, 1.5], "a whole number of at least 1")
            for name in ("n_classes", "embedding_size", "hidden_size", "layers", "context_size")
        ),
        *((name, [-0.1, 1.0, math.nan], r"a probability in \[0, 1\)") for name in EVERY_DROPOUT),
        ("embedding_noise", [-0.1, math.nan, math.inf, True, "0.1"], "a .*number"),
        ("sparse_embedding", [1], "True or False"),
    ],
)
def test_bad_arguments(name: str, values: list[Any], message: str) -> None:
    for value in values:
        arguments = {"n_classes": V, "embedding_size": 5, "hidden_size": 7, name: value}
        with pytest.raises(ValueError, match=f"{name}: expected {message}.*, got "):
            AWDLSTM(**arguments)


@pytest.mark.parametrize("name", ["alpha", "beta"])
def test_bad_penalties(name: str) -> None:
    output = AWDLSTM(V, 3, 4)(torch.zeros(2, 1, dtype=torch.int64))
    for value in (-1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match=f"{name}: expected a .*number.*, got {value}"):
            activation_penalty(output, **{name: value})


PROBE = """
import torch
from hstree.lm.model import AWDLSTM, cpu_has_lstm

before = torch.get_rng_state()
has = cpu_has_lstm(torch.bfloat16)
assert torch.equal(torch.get_rng_state(), before)
with torch.inference_mode():
    cpu_has_lstm.cache_clear()
    assert cpu_has_lstm(torch.bfloat16) == has
x = torch.randn(5, 3, 7)
with torch.autocast("cpu", torch.bfloat16):
    try:
        output = torch.nn.LSTM(7, 9)(x)[0]
        output.float().sum().backward()
    except RuntimeError:
        assert not has
    else:
        assert has and output.dtype == torch.bfloat16
    output = AWDLSTM(11, 7, 9, 2)(torch.randint(11, (5, 3)))
    assert output.hidden.dtype == (torch.bfloat16 if has else torch.float32)
output.hidden.float().sum().backward()
print(has)
"""


@pytest.mark.parametrize("isa", ["DEFAULT", "AVX2"])
def test_a_bfloat16_lstm_is_known_where_there_is_one(isa: str, tmp_path: Path) -> None:
    """Against torch's own layer, on this CPU and with oneDNN held to AVX2."""
    done = subprocess.run(
        [sys.executable, "-c", PROBE], env=os.environ | {"ONEDNN_MAX_CPU_ISA": isa}, cwd=tmp_path,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    if isa == "AVX2" and os.uname().machine == "x86_64":
        assert done.stdout == "False\n"


def test_autocast_on_a_cpu_without_such_an_lstm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit the layers without autocast, forward and backward, with dropout; a state of
    bfloat16, from a CPU that has such layers, is taken."""
    monkeypatch.setattr("hstree.lm.model.cpu_has_lstm", lambda dtype: False)
    torch.manual_seed(0)
    backbone = AWDLSTM(V, 5, 7, layers=2, **EVERY_DROPOUT)
    tokens = torch.randint(V, (6, 3))
    low = tuple((h.bfloat16(), c.bfloat16()) for h, c in detach(backbone(tokens).state))
    wide = tuple((h.float(), c.float()) for h, c in low)
    results = []
    for enabled, state in ((False, wide), (True, low)):
        torch.manual_seed(1)
        backbone.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            output = backbone(tokens, state)
        output.hidden.sum().backward()
        values = [output.hidden, *(part for pair in output.state for part in pair)]
        assert {value.dtype for value in values} == {torch.float32}
        results.append(values + [parameter.grad.clone() for parameter in backbone.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
