"""The function of a head, and its logits, against formulas on all logits at once; the command."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from heads.support import make, randomise
from lm.training.toy import small_config, write_corpus
from reference.piecewise import piecewise_reference
from torch import Tensor

from hstree.__main__ import main
from hstree.heads import Softmax
from hstree.lab import view_function
from hstree.lab.function import (
    Histogram,
    _Counter,
    function_data,
    function_picture,
    function_tables,
)
from hstree.lab.report import plain_data
from hstree.lm.run import load_run
from hstree.lm.train import train
from lab.commands import refused
from lab.toy_models import all_contexts, toy_model, toy_text


def latents(head: Any, hidden: Tensor) -> Tensor:
    """Vectors [N, K, E] that W multiplies, from the definitions."""
    if head.name not in ("mos", "mos-plif", "moc"):
        return hidden[:, None]
    z = torch.tanh(head.latent(hidden)).view(len(hidden), head.n_components, -1)
    if head.name == "moc":
        z = (head.prior(hidden).softmax(1)[..., None] * z).sum(1, keepdim=True)
    return z


def formula(head: Any, x: Tensor) -> Tensor:
    """f(x) in float64."""
    f = head.function
    if f.name == "gss":
        return f.k * (x - f.c) + f.c - (f.k - 1) * F.softplus(x - f.c)
    if f.name == "sigsoftmax":
        return x + F.logsigmoid(x)
    if f.name == "plif":
        rise = F.softplus(f.v.double()) * 2 * f.radius / f.intervals
        return piecewise_reference(x, torch.stack([rise.cumsum(0) - rise, rise], 1), f.radius)
    if f.name == "monotonic":
        u, v = F.softplus(f.u.double()), F.softplus(f.v.double())
        return (v * torch.sigmoid(u * x[..., None] + f.b.double())).sum(-1)
    return x


KINDS = ("softmax", "sigsoftmax", "gss", "plif", "plif-frozen", "monotonic", "mos", "mos-plif")


@pytest.mark.parametrize("kind", [*KINDS, "moc", "plif, tied"])
def test_view(kind: str) -> None:
    head = make(kind)
    assert isinstance(head, Softmax)
    if "plif" in kind:
        randomise(head, scale=1.5)  # so that many logits lie beyond R
    model = toy_model(head)
    text = toy_text(head.n_classes)
    view = view_function(model, text)
    hidden, target = all_contexts(model, text)
    with torch.no_grad():
        logits = latents(head, hidden) @ head.weight.t()
        logits = (logits if head.bias is None else logits + head.bias).double()
    following = logits.gather(2, target[:, None, None].expand(-1, logits.shape[1], 1))
    assert view.components == logits.shape[1]
    for histogram, values in ((view.logits, logits), (view.next_logits, following)):
        assert histogram.total == values.numel()
        width = histogram.edges[1] - histogram.edges[0]
        inner = values.flatten()[(values.flatten() / width % 1 - 0.5).abs() < 0.49]
        counts = np.histogram(inner.numpy(), histogram.edges)[0]
        assert (counts <= histogram.counts).all()  # but for those next to an edge
        for share in (0.0, 0.05, 0.5, 0.9, 1.0):
            exact = np.quantile(values.numpy(), share, method="inverted_cdf")
            assert histogram.quantile(share) == pytest.approx(exact, abs=1.5 * width)

    with torch.no_grad():
        x = torch.from_numpy(view.x)
        value = formula(head, x).numpy()
        every = formula(head, logits).numpy().ravel()
    at = logits.flatten().requires_grad_()
    slopes = torch.autograd.grad(formula(head, at).sum(), at)[0].numpy()
    np.testing.assert_allclose(view.value - view.shift, value, atol=2e-6)
    assert view.shift == pytest.approx(logits.numpy().mean() - every.mean(), abs=0.002)
    line = np.polyfit(logits.numpy().ravel(), every, 1)
    assert view.line == pytest.approx(line[0], abs=0.002)
    bend = (every - np.polyval(line, logits.numpy().ravel())).std()
    assert view.bend == pytest.approx(bend, abs=0.002)
    over, weight = view.slopes["all logits"]
    assert np.average(over, weights=weight) == pytest.approx(slopes.mean(), rel=1e-4)
    if view.radius is not None:
        outside = (logits.abs() > view.radius).double().mean().item()
        assert view.outside == pytest.approx(outside, abs=1e-6)
    if view.function == "plif":
        expected = F.softplus(head.function.v.detach().double()).numpy()
        np.testing.assert_allclose(view.slopes["pieces of f"][0], expected, rtol=1e-6)
        assert outside > 0.05


def test_identity_has_no_bend() -> None:
    view = view_function(toy_model(make("softmax")), toy_text(37))
    assert (view.shift, view.bend, view.radius, view.outside) == (0, 0, None, None)
    assert view.line == pytest.approx(1)
    np.testing.assert_array_equal(view.value, view.x)
    assert all((values == 1).all() for values, _ in view.slopes.values())


def test_counter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hstree.lab.function._REACH", 1024)
    random = np.random.default_rng(0)
    counter, everything = _Counter(-0.5, 0.25), []
    for scale in (0.1, 3.0, 1.0, 40.0, 7.0):
        values = random.normal(scale=scale, size=500)
        everything.append(values)
        counter.add(torch.from_numpy(values.copy()))
    for found in (counter.histogram(), counter.histogram().coarse(7)):
        counts = np.histogram(np.concatenate(everything), found.edges)[0]
        np.testing.assert_array_equal(found.counts, counts)
    assert len(found.counts) <= 7
    for beyond in (256.0, -257.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="expected finite logits, from -256 to 256"):
            counter.add(torch.tensor([0.0, beyond]))


def test_quantile_of_known_histogram() -> None:
    histogram = Histogram(np.array([0.0, 1, 2, 3, 4]), np.array([0, 2, 0, 2]))
    assert [histogram.quantile(q) for q in (0, 0.25, 0.5, 0.75, 1)] == [1, 1.5, 2, 3.5, 4]


def test_the_model_goes_back_to_training() -> None:
    model = toy_model(make("softmax")).train()
    first = view_function(model, toy_text(37))
    assert model.training
    again = view_function(model.eval(), toy_text(37))
    np.testing.assert_array_equal(first.logits.counts, again.logits.counts)


@pytest.mark.parametrize("kind", ["trees", "adaptive", "mixtape", "forest"])
def test_heads_without_a_function(kind: str) -> None:
    with pytest.raises(ValueError, match=f"the head '{kind}', which applies no function"):
        view_function(toy_model(make(kind)), toy_text(37))


def test_bad_text_and_weights() -> None:
    head = Softmax(4, 9)
    with pytest.raises(ValueError, match="expected at least 2"):
        view_function(toy_model(head), np.array([1]))
    with torch.no_grad():
        head.weight[3, 2] = torch.nan
    with pytest.raises(ValueError, match="expected finite logits"):
        view_function(toy_model(head), toy_text(9))


def test_tables_and_picture() -> None:
    views = {
        name: view_function(toy_model(make(name)), toy_text(37))
        for name in ("softmax", "gss", "plif", "mos")
    }
    functions, slopes, quantiles = function_tables(views)
    assert [row[0] for row in functions.rows] == list(views)
    assert [row[2] for row in functions.rows][:2] == ["identity", "gss(c=-0.5, k=2.5)"]
    assert {row[0] for row in slopes.rows} == {"gss", "plif"}
    assert len(quantiles.rows) == 8
    for row in quantiles.rows:
        values = [float(cell) for cell in row[2:]]
        assert values == sorted(values)
    assert len(function_tables({"softmax": views["softmax"]})) == 2
    for drawn in (views, {"softmax": views["softmax"]}):
        figure = function_picture(drawn)
        figure.canvas.draw()
        assert len(figure.legends[0].get_texts()) == len(drawn)
    data = plain_data(function_data(views["plif"]))
    assert sum(data["logits"]["counts"]) == views["plif"].logits.total
    assert sum(data["slopes"]["all logits"]["counts"]) == views["plif"].logits.total


# The command

HEADS = ("plif", "softmax", "mos", "trees")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a corpus, ``data``, and a run of each head."""
    folder = tmp_path_factory.mktemp("runs")
    data = write_corpus(folder / "data", sentences=100)
    for head in HEADS:
        train(small_config(data, folder / head, head=head, epochs=1))
    return folder


@pytest.fixture(autouse=True)
def among_the_runs(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(runs)
    monkeypatch.delenv("HSTREE_DEBUG", raising=False)


def fails(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    return refused(capsys, "analyze", "function", *arguments, "--output", "no", left="no")


def test_page_picture_and_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "results"
    command = ["analyze", "function", "softmax", "plif", "mos", "--output", str(folder)]
    monkeypatch.setattr("sys.argv", ["hstree", *command])
    assert main(command) == 0
    out = capsys.readouterr().out
    assert "Function f of the logits" in out
    assert {path.name for path in folder.iterdir()} == {
        "function.md",
        "function.json",
        "function-of-the-logits.png",
    }
    page = (folder / "function.md").read_text()
    assert "![function of the logits](function-of-the-logits.png)" in page
    assert "hstree analyze function softmax plif mos" in page
    assert "- the logits of a mixture are those of all components" in page
    data = json.loads((folder / "function.json").read_text())
    contexts = len(load_run("plif").corpus().test) - 1
    classes = len(load_run("plif").vocabulary)
    for name in ("softmax", "plif"):
        assert sum(data[name]["logits"]["counts"]) == contexts * classes
        assert sum(data[name]["next_logits"]["counts"]) == contexts
    assert data["plif"]["options"]["intervals"] == 1000
    assert data["plif"]["slopes"]["pieces of f"]["mean"] == pytest.approx(1.1, abs=0.2)


def test_unusable_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    expected = "trees: model: expected a head that is a softmax"
    assert expected in fails(capsys, "softmax", "trees")
    assert "plif: expected every run and file once, got this one twice" in fails(
        capsys, "plif", "plif"
    )
    assert "absent: no such run folder" in fails(capsys, "absent")
    assert "no such" in fails(capsys, "plif", "--data", "nowhere")
    assert main(["analyze", "function", "plif", "--output", "plif/config.json"]) == 2
    assert "--output: expected a folder" in capsys.readouterr().err
