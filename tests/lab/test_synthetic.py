"""The synthetic bottleneck experiment: targets, measures, fits, report."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import scipy.special
import scipy.stats
import torch

from hstree.__main__ import main
from hstree.heads import head_names
from hstree.lab import SyntheticSetting, choose_head, known_heads, synthetic_bottleneck
from hstree.lab.synthetic import (
    HeadChoice,
    constant_prediction,
    cross_entropy,
    dirichlet_targets,
    entropy,
    fit_head,
    mode_matching,
    synthetic_report,
)
from lab.commands import csv_rows, refused


def heads(*names: str) -> tuple[HeadChoice, ...]:
    return tuple(map(choose_head, names))


TINY = SyntheticSetting(
    contexts=12,
    outcomes=6,
    dimensions=(2, 3),
    alphas=(0.1,),
    heads=heads("softmax", "gss:k=0.1,c=0"),
    steps=5,
    learning_rates=(0.05, 0.2),
)


@pytest.mark.parametrize("alpha", [0.01, 0.1, 2.0])
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


def test_targets_are_those_of_their_seed() -> None:
    first = dirichlet_targets(5, 4, 0.1, seed=1)
    np.testing.assert_array_equal(first, dirichlet_targets(5, 4, 0.1, seed=1))
    assert not np.array_equal(first, dirichlet_targets(5, 4, 0.1, seed=2))


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


def test_constant_prediction() -> None:
    targets = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.0, 0.0]]).double()
    divergence, modes = constant_prediction(targets)
    assert divergence == pytest.approx(-(0.75 * math.log(0.75) + 0.25 * math.log(0.25)))
    assert modes == 75.0
    # Every seed has a mean of its own.
    other = torch.tensor([[0.0, 1.0]] * 4).double()
    assert constant_prediction(torch.stack((targets, other))) == (divergence / 2, 87.5)


@pytest.mark.parametrize("dimension", [4, 6])
def test_softmax_of_enough_features_fits_anything(dimension: int) -> None:
    """With D >= M - 1 the logits of every context are free up to a constant."""
    targets = dirichlet_targets(8, 5, 1.0, seed=0)
    choice = choose_head("softmax")
    fit = fit_head(choice, targets, dimension, learning_rate=0.2, steps=1000, seed=0)
    assert 0 <= fit.divergence < 2e-4
    assert fit.mode_matching == 100.0
    assert fit.steps < 1000  # it ends when nothing is left to gain
    truth = torch.from_numpy(targets)
    assert fit.entropy == pytest.approx(float(entropy(truth).mean()))
    assert fit.cross_entropy == pytest.approx(fit.entropy + fit.divergence)


def test_one_feature_without_bias_is_fitted_to_its_optimum() -> None:
    """Two outcomes, one context of their mean: what is best is known."""
    targets = np.array([[0.8, 0.2]])
    fit = fit_head(choose_head("softmax"), targets, 1, learning_rate=0.1, steps=500, seed=0)
    assert fit.cross_entropy == pytest.approx(scipy.stats.entropy([0.8, 0.2]), abs=2e-4)


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


def test_the_same_seed_gives_the_same_result() -> None:
    first, second = synthetic_bottleneck(TINY), synthetic_bottleneck(TINY)
    assert first == second
    assert len({fit.divergence for fit in first.fits}) == len(first.fits)


@pytest.mark.slow
def test_several_processes_give_the_same_result() -> None:
    told: list[object] = []
    result = synthetic_bottleneck(TINY, advance=told.append, processes=2)
    assert len(told) == TINY.n_fits
    # Other numbers of threads may round otherwise.
    for fit, here in zip(result.fits, synthetic_bottleneck(TINY).fits, strict=True):
        assert (fit.head, fit.dimension, fit.seed) == (here.head, here.dimension, here.seed)
        assert fit.divergence == pytest.approx(here.divergence, abs=1e-4)
    with pytest.raises(ValueError, match="processes: expected at least 1, got 0"):
        synthetic_bottleneck(TINY, processes=0)


def test_each_cell_takes_the_best_learning_rate_of_the_first_seed() -> None:
    told: list[object] = []
    result = synthetic_bottleneck(TINY, advance=told.append)
    assert len(told) == TINY.n_fits == 1 * 2 * 2 * (2 + 1)
    assert [fit.seed for fit in result.fits] == [0, 1] * 4
    for begin in range(4):
        tried = result.search[2 * begin : 2 * begin + 2]
        best, other = result.fits[2 * begin : 2 * begin + 2]
        assert best.divergence == min(fit.divergence for fit in tried)
        assert other.learning_rate == best.learning_rate
        cell = result.cells[begin]
        divergences = [best.divergence, other.divergence]
        assert cell.divergence == pytest.approx(np.mean(divergences))
        assert cell.divergence_deviation == pytest.approx(np.std(divergences, ddof=1))
        assert cell.mode_matching == np.mean([best.mode_matching, other.mode_matching])


def test_diverged_fit_is_infinitely_far() -> None:
    targets = dirichlet_targets(12, 6, 0.1, seed=0)
    fit = fit_head(choose_head("mos"), targets, 2, learning_rate=1e30, steps=5, seed=0)
    assert fit.divergence == math.inf
    setting = SyntheticSetting(12, 6, (2,), (0.1,), heads("mos"), 5, (1e30,))
    report = synthetic_report(synthetic_bottleneck(setting))
    assert report.tables[1].rows == (("mos", "diverged"),)


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


def test_every_registered_head_but_that_of_layers_is_known() -> None:
    assert set(head_names()) - set(known_heads()) == {"doc"}


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
    assert (wide.name, wide.options["root"], wide.options["gate"]) == ("trees", 10, "uniform")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"contexts": 0}, "contexts: expected at least 1, got 0"),
        ({"outcomes": 1}, "outcomes: expected at least 2, got 1"),
        ({"dimensions": (4, 0)}, "dimensions: expected at least 1, got 0"),
        ({"dimensions": (4, 4)}, "dimensions: expected different ones, got 4, 4"),
        ({"dimensions": ()}, "dimensions: expected at least one, got none"),
        ({"alphas": (0.0,)}, "alphas: expected positive numbers, got 0"),
        ({"learning_rates": (math.inf,)}, "learning_rates: expected positive numbers, got inf"),
        ({"heads": heads("mos", "mos")}, "heads: expected different ones, got mos, mos"),
        (
            {"heads": heads("softmax:colour=red")},
            "heads: softmax:colour=red, D = 2: .*colour",
        ),
        (
            {"heads": heads("adaptive:div_value=4")},
            "adaptive:div_value=4, D = 2: div_value",
        ),
    ],
)
def test_bad_settings_are_refused_before_the_work(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SyntheticSetting(**change)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("softmx", "heads: expected one of adaptive, forest, gss.*, got 'softmx'"),
        ("doc", "heads: expected one of adaptive, .*, got 'doc'"),
        ("mos:components", "heads: expected NAME:KEY=VALUE,KEY=VALUE, got 'mos:components'"),
    ],
)
def test_bad_heads_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        choose_head(text)


def test_report() -> None:
    result = synthetic_bottleneck(TINY)
    report = synthetic_report(result)
    modes, divergence, parameters = report.tables
    assert modes.header == divergence.header == ("head", "D=2", "D=3")
    assert [row[0] for row in modes.rows] == ["softmax", "gss:k=0.1,c=0"]
    cell = result.cells[0]
    shown = f"{cell.mode_matching:.1f} ± {cell.mode_matching_deviation:.1f}"
    assert modes.rows[0][1] == shown
    assert parameters.rows[0] == ("softmax", "18", "24")
    notes = " ".join(report.notes)
    assert f"{result.baselines[0].entropy:.3f} nats" in notes
    assert "gss:k=0.1,c=0 (k=0.1, c=0)" in notes
    chosen = [cell.learning_rate for cell in result.cells]
    assert f"rates: 4 in total, {chosen.count(0.05)} of them the smallest" in notes


# The command

SMALL = ["--contexts", "10", "--outcomes", "5", "--dimensions", "2", "4", "--steps", "3"]
SMALL += ["--processes", "1"]


@pytest.mark.usefixtures("elsewhere")
def test_page_pictures_and_figures(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--alpha", "0.1", "1", "--heads", "softmax", "mos:components=2", "--seeds", "1"]
    assert main(["experiment", "synthetic", *SMALL, *flags, "--output", "out/here"]) == 0
    captured = capsys.readouterr()
    assert all(line.endswith(" s left") for line in captured.err.splitlines())  # where it is slow
    assert "Mode matching (% of contexts), alpha = 0.1" in " ".join(captured.out.split())
    folder = Path("out/here")
    assert sorted(path.name for path in folder.iterdir()) == [
        "synthetic-alpha-0.1.png",
        "synthetic-alpha-1.png",
        "synthetic.csv",
        "synthetic.json",
        "synthetic.md",
    ]
    rows = csv_rows(folder / "synthetic.csv")
    assert [(row["alpha"], row["head"], row["dimension"]) for row in rows] == [
        (alpha, head, dimension)
        for alpha in ("0.1", "1.0")
        for head in ("softmax", "mos:components=2")
        for dimension in ("2", "4")
    ]
    data = json.loads((folder / "synthetic.json").read_text())
    assert data["fits"][0]["divergence"] == float(rows[0]["divergence"])
    assert len(data["search"]) == 3 * len(rows)
    assert data["cells"][0]["divergence"] == data["fits"][0]["divergence"]
    assert "| mos:components=2 |" in (folder / "synthetic.md").read_text()


@pytest.mark.usefixtures("elsewhere")
def test_all_heads(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--alpha", "1", "--heads", "all", "--seeds", "1", "--learning-rates", "0.1"]
    assert main(["experiment", "synthetic", *SMALL, *flags]) == 0
    out = capsys.readouterr().out
    assert all(f"\n {head} " in out for head in ("adaptive", "mixtape", "trees-wide"))
    assert "doc" not in out


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--heads", "softmx"), "heads: expected one of adaptive"),
        (("--heads", "doc"), "trees-wide, got 'doc'"),
        (("--dimensions", "2", "2"), "dimensions: expected different ones"),
        (("--processes", "0"), "--processes: expected at least 1"),
        (("--outcomes", "1"), "outcomes: expected at least 2"),
        (("--alpha", "0"), "--alpha: expected a positive number"),
        (("--contexts", "none"), "--contexts: invalid"),
        (("--output", "file"), "--output: expected a folder"),
    ],
)
def test_errors_are_one_line(
    capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], message: str
) -> None:
    Path("file").touch()
    assert message in refused(capsys, "experiment", "synthetic", *flags, left="results")


@pytest.mark.usefixtures("elsewhere")
def test_interruption_leaves_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("hstree.lab.synthetic.fit_head", interrupt)
    assert main(["experiment", "synthetic", *SMALL]) == 130
    assert not Path("results").exists()
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.usefixtures("elsewhere")
def test_progress_is_shown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hstree.lm.report.LINE_EVERY", 0.0)
    flags = ["--heads", "softmax", "--alpha", "1", "--seeds", "1"]
    assert main(["experiment", "synthetic", *SMALL, *flags]) == 0
    captured = capsys.readouterr()
    assert "Mode matching" in captured.out
    assert re.search(
        r"^fitting heads  100%  softmax, D = \d+, alpha = 1  0 s left$", captured.err, re.M
    )
