"""The function of a head, and its logits, against formulas on all logits at once; the command."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from heads.formulas import curve, latents
from heads.support import make, randomise
from torch import Tensor

from hstree.__main__ import main
from hstree.heads import Softmax
from hstree.lab import view_function
from hstree.lab.function import Histogram, function_picture, function_tables
from hstree.lm.run import load_run
from lab.toy_models import all_contexts, toy_model, toy_text


def read(head: Any, hidden: Tensor) -> Tensor:
    """Vectors [N, K, E] that W multiplies."""
    if head.name not in ("mos", "moc"):
        return hidden[:, None]
    z = latents(head, hidden, head.n_components)
    if head.name == "moc":
        z = (head.prior(hidden).softmax(1)[..., None] * z).sum(1, keepdim=True)
    return z


KINDS = ("softmax", "gss", "plif", "monotonic", "mos")


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
        logits = read(head, hidden) @ head.weight.t()
        logits = (logits if head.bias is None else logits + head.bias).double()
    following = logits.gather(2, target[:, None, None].expand(-1, logits.shape[1], 1))
    assert view.components == logits.shape[1]
    for histogram, values in ((view.logits, logits), (view.next_logits, following)):
        assert histogram.total == values.numel()
        width = histogram.width
        inner = values.flatten()[(values.flatten() / width % 1 - 0.5).abs() < 0.49]
        counts = np.histogram(inner.numpy(), histogram.edges)[0]
        assert (counts <= histogram.counts).all()  # but for those next to an edge
        for share in (0.0, 0.05, 0.5, 0.9, 1.0):
            exact = np.quantile(values.numpy(), share, method="inverted_cdf")
            assert histogram.quantile(share) == pytest.approx(exact, abs=1.5 * width)

    exact = copy.deepcopy(head).double()
    with torch.no_grad():
        x = torch.from_numpy(view.x)
        value = curve(exact, x).numpy()
        every = curve(exact, logits).numpy().ravel()
    at = logits.flatten().requires_grad_()
    slopes = torch.autograd.grad(curve(exact, at).sum(), at)[0].numpy()
    np.testing.assert_allclose(view.value - view.shift, value, atol=2e-6)
    assert view.shift == pytest.approx(logits.numpy().mean() - every.mean(), abs=0.002)
    line = np.polyfit(logits.numpy().ravel(), every, 1)
    assert view.line == pytest.approx(line[0], abs=0.002)
    bend = (every - np.polyval(line, logits.numpy().ravel())).std()
    assert view.bend == pytest.approx(bend, abs=0.002)
    assert view.slopes["all logits"]["mean"] == pytest.approx(slopes.mean(), rel=1e-4)
    for name, share in (("5%", 0.05), ("median", 0.5), ("95%", 0.95)):
        low, high = np.quantile(slopes, (share - 0.002, share + 0.002))
        assert low - 1e-3 <= view.slopes["all logits"][name] <= high + 1e-3
    if view.radius is not None:
        outside = (logits.abs() > view.radius).double().mean().item()
        assert view.outside == pytest.approx(outside, abs=1e-6)
    if view.function == "plif":
        expected = F.softplus(head.function.v.detach().double()).mean().item()
        assert view.slopes["pieces of f"]["mean"] == pytest.approx(expected, rel=1e-6)
        assert outside > 0.05


def test_identity_has_no_bend() -> None:
    view = view_function(toy_model(make("softmax")), toy_text(37))
    assert (view.shift, view.bend, view.radius, view.outside) == (0, 0, None, None)
    assert view.line == pytest.approx(1)
    np.testing.assert_array_equal(view.value, view.x)
    assert {*view.slopes["all logits"].values()} == {1.0}


def test_histogram(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hstree.lab.function._REACH", 1024)
    monkeypatch.setattr("hstree.lab.function.BINS", 7)
    random = np.random.default_rng(0)
    histogram, everything = Histogram(-0.5, 0.25), []
    for scale in (0.1, 3.0, 1.0, 40.0, 7.0):
        values = random.normal(scale=scale, size=500)
        everything.append(values)
        histogram.add(torch.from_numpy(values.copy()))
    coarse = histogram.coarse()
    for edges, found in ((histogram.edges, histogram.counts), coarse.values()):
        counts = np.histogram(np.concatenate(everything), edges)[0]
        np.testing.assert_array_equal(found, counts)
    assert len(coarse["counts"]) <= 7
    for beyond in (256.0, -257.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="expected finite logits, from -256 to 256"):
            histogram.add(torch.tensor([0.0, beyond]))


def test_quantile_of_known_histogram() -> None:
    histogram = Histogram(0.0, 1.0)
    histogram.add(torch.tensor([1.5, 3.5, 1.5, 3.5]))
    assert [histogram.quantile(q) for q in (0, 0.25, 0.5, 0.75, 1)] == [1, 1.5, 2, 3.5, 4]


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
    names = ("softmax", "gss", "plif", "mos")
    views = {name: view_function(toy_model(make(name)), toy_text(37)) for name in names}
    functions, slopes, quantiles = function_tables(views)
    assert [row[0] for row in functions.rows] == list(views)
    assert [row[2] for row in functions.rows][:2] == ["identity", "gss(c=-0.5, k=2.5)"]
    assert {row[0] for row in slopes.rows} == {"gss", "plif"}
    assert len(quantiles.rows) == 8
    for row in quantiles.rows:
        values = [float(cell) for cell in row[2:]]
        assert values == sorted(values)
    alone = {"softmax": views["softmax"]}
    assert len(function_tables(alone)) == 2
    for drawn in (views, alone):
        figure = function_picture(drawn)
        figure.canvas.draw()
        assert len(figure.legends[0].get_texts()) == len(drawn)


# The command


@pytest.mark.usefixtures("runs")
def test_page_figures_and_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "results"
    names = ["softmax", "plif", "mos"]
    assert main(["analyze", "function", *names, "--output", str(folder)]) == 0
    assert "Function f of the logits" in capsys.readouterr().out
    files = {"function.md", "function.json", "function-of-the-logits.png"}
    assert {path.name for path in folder.iterdir()} == files
    page = (folder / "function.md").read_text()
    assert "![function of the logits](function-of-the-logits.png)" in page
    assert "- the logits of a mixture are those of all components" in page
    data = json.loads((folder / "function.json").read_text())
    contexts = len(load_run("plif").corpus().test) - 1
    for name in ("softmax", "plif"):
        logits, following = data[name]["logits"], data[name]["next_logits"]
        assert sum(logits["counts"]) == contexts * len(load_run(name).vocabulary)
        assert sum(following["counts"]) == contexts
        assert len(logits["edges"]) == len(logits["counts"]) + 1
    assert data["plif"]["options"]["intervals"] == 1000
    assert data["plif"]["slopes"]["pieces of f"]["mean"] == pytest.approx(1.1, abs=0.2)
