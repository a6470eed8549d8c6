"""The synthetic bottleneck experiment: targets, measures, fits, report."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.special
import scipy.stats
import torch

from hstree.__main__ import main
from hstree.lab import synthetic_bottleneck
from hstree.lab.synthetic import (
    SyntheticResult,
    _notes,
    _tables,
    choose_head,
    cross_entropy,
    dirichlet_targets,
    fit_head,
    known_heads,
    mode_matching,
)

TINY: dict[str, Any] = {"contexts": 12, "outcomes": 6, "dimensions": (2, 3), "alphas": (0.1,)}
TINY |= {"steps": 5, "learning_rates": (0.05, 0.2)}
HEADS = ("softmax", "gss:k=0.1,c=0")


def entropy(targets: torch.Tensor) -> torch.Tensor:
    return cross_entropy(targets, targets.log())


@pytest.fixture(scope="module")
def result() -> SyntheticResult:
    return synthetic_bottleneck(HEADS, **TINY)


@pytest.mark.parametrize("alpha", [0.1, 2.0])
def test_targets_have_the_moments_of_the_dirichlet_distribution(alpha: float) -> None:
    outcomes, contexts = 20, 20_000
    targets = dirichlet_targets(contexts, outcomes, alpha, seed=3)
    assert targets.shape == (contexts, outcomes)
    np.testing.assert_allclose(targets.sum(1), 1.0, rtol=1e-12)
    distribution = scipy.stats.dirichlet(np.full(outcomes, alpha))
    error = 5 / math.sqrt(contexts)  # five standard errors, in standard deviations
    variance = distribution.var()
    assert np.all(abs(targets.mean(0) - distribution.mean()) < error * np.sqrt(variance))
    np.testing.assert_allclose(targets.var(0), variance, rtol=0.3)
    # E H(P*) = psi(M alpha + 1) - psi(alpha + 1); that of a row by scipy.
    entropies = entropy(torch.from_numpy(targets)).numpy()
    np.testing.assert_allclose(entropies, scipy.stats.entropy(targets, axis=1), 1e-9, 1e-14)
    expected = scipy.special.digamma(outcomes * alpha + 1) - scipy.special.digamma(alpha + 1)
    assert abs(entropies.mean() - expected) < error * entropies.std()


def test_measures_on_cases_by_hand() -> None:
    targets = torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.0, 1.0], [0.2, 0.7, 0.1]], dtype=torch.float64)
    prediction = torch.tensor(
        [[0.25, 0.5, 0.25], [0.5, 0.25, 0.25], [0.1, 0.8, 0.1]], dtype=torch.float64
    )
    log_prob = prediction.log()
    by_hand = [1.5 * math.log(2), 2 * math.log(2)]
    assert cross_entropy(targets, log_prob)[:2].tolist() == pytest.approx(by_hand)
    assert entropy(targets)[:2].tolist() == pytest.approx([math.log(2), 0.0])
    divergence = (cross_entropy(targets, log_prob) - entropy(targets)).numpy()
    np.testing.assert_allclose(divergence, scipy.stats.entropy(targets, prediction, axis=1))
    # The first of two equal modes counts as the mode.
    assert mode_matching(targets, log_prob) == pytest.approx(100 / 3)
    assert mode_matching(targets, targets.log()) == 100.0


def test_what_a_target_excludes_costs_nothing() -> None:
    targets = torch.tensor([[1.0, 0.0]])
    logits = torch.tensor([[0.0, -torch.inf]], requires_grad=True)
    loss = cross_entropy(targets, logits).sum()
    loss.backward()
    assert loss.item() == 0.0
    assert torch.isfinite(logits.grad).all()


def test_baseline_is_the_mean_of_the_targets_of_each_seed(result: SyntheticResult) -> None:
    (found,) = result.baselines
    divergences, modes = [], []
    for seed in range(2):
        targets = dirichlet_targets(12, 6, 0.1, seed)
        mean = np.broadcast_to(targets.mean(0), targets.shape)
        divergences.append(scipy.stats.entropy(targets, mean, axis=1).mean())
        modes.append(100 * np.mean(targets.argmax(1) == targets.mean(0).argmax()))
    assert found["divergence"] == pytest.approx(np.mean(divergences))
    assert found["mode_matching"] == pytest.approx(np.mean(modes))


def test_softmax_of_enough_features_fits_anything() -> None:
    """With D >= M - 1 the logits of every context are free up to a constant."""
    targets = dirichlet_targets(8, 5, 1.0, seed=0)
    fit = fit_head(choose_head("softmax"), targets, 4, learning_rate=0.2, steps=1000, seed=0)
    assert 0 <= fit.divergence < 2e-4
    assert fit.mode_matching == 100.0
    assert fit.steps < 1000  # it ends when nothing is left to gain
    assert fit.entropy == pytest.approx(float(entropy(torch.from_numpy(targets)).mean()))
    assert fit.cross_entropy == pytest.approx(fit.entropy + fit.divergence)


def test_convex_function_matches_more_modes_than_softmax() -> None:
    """The published shape, on a small scale: a deformation that is flat for low logits frees them
    to move while a few stand out."""
    targets = dirichlet_targets(100, 50, 0.1, seed=0)
    fits = [
        fit_head(choose_head(name), targets, 4, learning_rate=0.2, steps=300, seed=0)
        for name in ("softmax", "gss:k=0.1,c=0", "plif")
    ]
    softmax, *deformed = fits
    assert min(fit.mode_matching for fit in deformed) > softmax.mode_matching + 10
    assert max(fit.divergence for fit in deformed) < softmax.divergence
    assert deformed[0].parameters == softmax.parameters == 50 * 5


def test_the_same_seed_gives_the_same_result(result: SyntheticResult) -> None:
    assert synthetic_bottleneck(HEADS, **TINY).fits == result.fits
    assert len({fit.divergence for fit in result.fits}) == len(result.fits)


def test_each_cell_takes_the_best_learning_rate_of_the_first_seed(result: SyntheticResult) -> None:
    cells = [(head, dimension, seed) for head in HEADS for dimension in (2, 3) for seed in (0, 1)]
    assert [(fit.head, fit.dimension, fit.seed) for fit in result.fits] == cells
    targets = dirichlet_targets(12, 6, 0.1, seed=0)
    for best, other in zip(result.fits[::2], result.fits[1::2], strict=True):
        choice = choose_head(best.head)
        tried = [fit_head(choice, targets, best.dimension, rate, 5, 0) for rate in (0.05, 0.2)]
        assert best.divergence == min(fit.divergence for fit in tried)
        assert other.learning_rate == best.learning_rate
        assert other.entropy != best.entropy  # other targets


def test_diverged_fit_is_infinitely_far() -> None:
    rates = {"dimensions": (2,), "learning_rates": (1e30,)}
    found = synthetic_bottleneck(["mos"], **TINY | rates)
    assert found.fits[0].divergence == math.inf
    assert _tables(found)[1].rows == (("mos", "diverged"),)


@pytest.mark.parametrize("name", known_heads())
def test_every_head_is_fitted(name: str) -> None:
    targets = dirichlet_targets(12, 6, 0.1, seed=0)
    choice = choose_head(name)
    before, after = (
        fit_head(choice, targets, 2, learning_rate=0.1, steps=steps, seed=0) for steps in (1, 30)
    )
    assert after.divergence < 0.8 * before.divergence
    head = choice.build(2, targets, seed=0)
    assert after.parameters == sum(p.numel() for p in head.parameters() if p.requires_grad)


def test_options_of_a_head() -> None:
    assert choose_head("mos").options == {"components": 4}
    assert choose_head("mos:components=15,latent_features=3").options == {
        "components": 15,
        "latent_features": 3,
    }
    nested = choose_head('mos-plif:function_options={"intervals": 50, "radius": 5},components=2')
    assert nested.options["function_options"] == {"intervals": 50, "radius": 5}
    assert nested.options["components"] == 2
    wide = choose_head("trees-wide:gate=uniform")
    assert (wide.name, wide.options["clusters"], wide.options["gate"]) == ("trees", 10, "uniform")


def test_bad_settings_are_refused_before_the_work() -> None:
    for heads, change, message in (
        (HEADS, {"dimensions": (4, 4)}, r"dimensions: expected .*, all different, got \[4, 4\]"),
        (HEADS, {"dimensions": ()}, "dimensions: expected at least one"),
        (("softmax:colour=red",), {}, "heads: softmax:colour=red, D = 2: .*colour"),
        (("adaptive:div_value=4",), {}, "adaptive:div_value=4, D = 2: div_value"),
        (("softmx",), {}, "heads: expected one of adaptive, forest, gss.*, got 'softmx'"),
        (("mos:components",), {}, "heads: expected NAME:KEY=VALUE,KEY=VALUE, got 'mos:compon"),
    ):
        with pytest.raises(ValueError, match=message):
            synthetic_bottleneck(heads, **TINY | change)


def test_tables_and_notes(result: SyntheticResult) -> None:
    modes, divergence, parameters = _tables(result)
    assert modes.header == divergence.header == ("head", "D=2", "D=3")
    assert [row[0] for row in modes.rows] == [*HEADS]
    matched = [fit.mode_matching for fit in result.fits[:2]]
    assert modes.rows[0][1] == f"{np.mean(matched):.1f} ± {np.std(matched, ddof=1):.1f}"
    assert parameters.rows[0] == ("softmax", "18", "24")
    notes = " ".join(_notes(result))
    assert f"{result.baselines[0]['entropy']:.3f} nats" in notes
    assert "gss:k=0.1,c=0 (k=0.1, c=0)" in notes
    chosen = [fit.learning_rate for fit in result.fits[::2]]
    assert f"rates: 4 in total, {chosen.count(0.05)} of them the smallest" in notes


# The command

SMALL = ["--contexts", "10", "--outcomes", "5", "--dimensions", "2", "4", "--steps", "3"]


@pytest.mark.usefixtures("elsewhere")
def test_page_figures_and_pictures(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hstree.lm.report.LINE_EVERY", 0.0)
    flags = ["--alpha", "0.1", "1", "--heads", "softmax", "mos:components=2", "--seeds", "1"]
    assert main(["experiment", "synthetic", *SMALL, *flags, "--output", "out/here"]) == 0
    captured = capsys.readouterr()
    assert re.search(r"^fitting heads, alpha = 1  100%  0 s left$", captured.err, re.M)
    assert "Mode matching (% of contexts), alpha = 0.1" in " ".join(captured.out.split())
    folder = Path("out/here")
    pictures = ["synthetic-alpha-0.1.png", "synthetic-alpha-1.png"]
    names = [*pictures, "synthetic.json", "synthetic.md"]
    assert sorted(path.name for path in folder.iterdir()) == names
    fits = json.loads((folder / "synthetic.json").read_text())["fits"]
    assert [(fit["alpha"], fit["head"], fit["dimension"]) for fit in fits] == [
        (alpha, head, dimension)
        for alpha in (0.1, 1.0)
        for head in ("softmax", "mos:components=2")
        for dimension in (2, 4)
    ]
    assert "| mos:components=2 |" in (folder / "synthetic.md").read_text()


@pytest.mark.usefixtures("elsewhere")
def test_all_heads(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--alpha", "1", "--heads", "all", "--seeds", "1", "--learning-rates", "0.1"]
    assert main(["experiment", "synthetic", *SMALL, *flags]) == 0
    out = capsys.readouterr().out
    assert all(f"\n {head} " in out for head in ("adaptive", "mixtape", "trees-wide"))


@pytest.mark.usefixtures("elsewhere")
def test_an_interruption_leaves_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("hstree.lab.synthetic.fit_head", interrupt)
    assert main(["experiment", "synthetic", *SMALL]) == 130
    assert not Path("results").exists()
    assert "Traceback" not in capsys.readouterr().err
