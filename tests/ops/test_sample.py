"""torch.ops.hstree.sample."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from reference.sample import philox, sample_reference
from reference.tree_mixture import all_log_probs
from torch import Tensor

from hstree.ops import sample
from ops.apart import apart, every_instruction_set, outcomes, with_instruction_set
from ops.cases import DTYPES, slow, threads
from ops.mixtures import (
    BLOCKS,
    MIXTURES,
    Mixture,
    corrupted,
    draw,
    every_mixture,
    huffman,
    walked,
)

SEED = torch.tensor([2**40 + 17])
TEMPERATURES = (1.0, 0.6)


def drawn(mixture: Mixture, n: int = 1, **options: Any) -> tuple[Tensor, Tensor]:
    return sample(*mixture.arguments(), seed=options.pop("seed", SEED), n=n, **options)


def test_philox() -> None:
    """The known answers of Random123."""
    assert philox((0, 0, 0, 0), 0) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    ones = 2**32 - 1
    answer = (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)
    assert philox((ones,) * 4, 2**64 - 1) == answer
    answer = (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)
    counter = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    assert philox(counter, 0x299F31D0A4093822) == answer


@pytest.mark.parametrize("at_root", [True, False])
def test_a_table_with_a_cycle_is_refused(at_root: bool) -> None:
    """Edges that lead back to the root, or to the node they start from."""
    mixture = draw(huffman(20))
    edge = mixture.edge.clone()
    inner = edge[0, :, 1] > 0
    edge[0, inner, 1] = 0 if at_root else edge[0, inner, 0]
    with pytest.raises(RuntimeError, match=r"hstree::sample: edge(\[0, \d+\])?: expected"):
        drawn(replace(mixture, edge=edge), 100)


def test_an_edge_to_another_class_is_refused() -> None:
    mixture = draw(huffman(20))
    leaf_edge = mixture.leaf_edge.clone().roll(1, 1)
    with pytest.raises(RuntimeError, match=r"leaf_edge\[0, \d+\]: expected the edge to this class"):
        drawn(replace(mixture, leaf_edge=leaf_edge))


@pytest.mark.parametrize("name", [*MIXTURES, *slow(BLOCKS)])
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_draws_are_those_of_the_reference(
    name: str, temperature: float, device: torch.device
) -> None:
    """Of float64, but for the roundings of the dtype, and so are their log-probabilities."""
    exact, n = (MIXTURES | BLOCKS)[name](), 4
    arguments, option = exact.arguments(), {"temperature": temperature}
    wanted, of_wanted = sample_reference(*arguments, seed=SEED, n=n, **option)
    every = all_log_probs(*arguments, **option)
    assert torch.equal(of_wanted, every.gather(1, wanted))
    for dtype in DTYPES:
        there = exact.to(dtype).on(device)
        got, log_prob = drawn(there, n, seed=SEED.to(device), **option)
        assert log_prob.dtype == torch.promote_types(dtype, torch.float32)
        others = int((got.cpu() != wanted).sum())
        assert others <= (0 if dtype == torch.float64 else 0.1 * wanted.numel())
        tolerance = 1e-12 if dtype == torch.float64 else 2e-5
        close = {"rtol": tolerance, "atol": tolerance}
        expected = every.gather(1, got.cpu())
        torch.testing.assert_close(log_prob.double().cpu(), expected, **close)


@every_mixture
def test_the_reference_is_the_walk(name: str) -> None:
    mixture = MIXTURES[name]()
    every = all_log_probs(*mixture.arguments())
    for row in range(min(2, len(every))):
        np.testing.assert_allclose(every[row], walked(mixture, row), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", ["wide root", "groups", "peaked", "two clusters"])
def test_draws_follow_the_distribution(name: str) -> None:
    """Chi-square of 40,000 draws, classes that are rare taken together."""
    count, mixture = 40_000, MIXTURES[name]()
    classes, log_prob = drawn(mixture, count)
    for row in range(2):
        log_of = np.array(walked(mixture, row))
        expected = count * np.exp(log_of)
        observed = np.bincount(classes[row], minlength=len(expected))
        rare = expected < 10
        expected = np.append(expected[~rare], expected[rare].sum() + 1e-9)
        observed = np.append(observed[~rare], observed[rare].sum())
        assert scipy.stats.chisquare(observed, expected * count / expected.sum()).pvalue > 1e-3
        np.testing.assert_allclose(log_prob[row], log_of[classes[row]], rtol=1e-10, atol=1e-10)


def test_seeds() -> None:
    mixture = draw(huffman(64, 2), rows=50)
    first, second = drawn(mixture)[0], drawn(mixture)[0]
    assert torch.equal(first, second)
    assert not torch.equal(first, drawn(mixture, seed=SEED + 1)[0])
    assert not torch.equal(first, drawn(mixture, seed=SEED + 2**33)[0])
    assert drawn(mixture, seed=torch.tensor([-5]))[0].shape == (50, 1)


def test_rows_and_draws_are_independent() -> None:
    """Two draws of a row, and draws of two rows alike, agree as often as chance has it."""
    mixture = draw(huffman(30, 2), rows=1)
    alike = replace(
        mixture,
        hidden=mixture.hidden.expand(20_000, -1),
        log_gate=mixture.log_gate.expand(20_000, -1),
    )
    classes, _ = drawn(alike, 2)
    prob = np.exp(walked(mixture, 0))
    chance = (prob**2).sum()
    deviation = np.sqrt(chance * (1 - chance) / 20_000)
    for other in (classes[:, 1], classes[:, 0].roll(1)):
        equal = float((classes[:, 0] == other).double().mean())
        assert abs(equal - chance) < 4 * deviation


def test_impossible_and_nan() -> None:
    """A class without probability is never drawn; a row with NaN gives a class and NaN."""
    mixture = draw(huffman(12, root=4), rows=2)
    assert mixture.root_log_prob is not None
    mixture.root_log_prob[0, 0] = torch.tensor([-torch.inf, 0.0, -torch.inf, -torch.inf])
    mixture.hidden[1], mixture.root_log_prob[0, 1] = torch.nan, torch.nan
    classes, log_prob = drawn(mixture, 200)
    assert log_prob[0].isfinite().all()
    possible = {y for y, value in enumerate(walked_finite(mixture)) if value}
    assert set(classes[0].tolist()) <= possible
    assert log_prob[1].isnan().all()
    assert ((classes >= 0) & (classes < 12)).all()
    mixture.log_gate[0] = -torch.inf
    classes, log_prob = drawn(mixture, 3)
    assert ((classes >= 0) & (classes < 12)).all()
    assert not log_prob[0].isfinite().any()


def walked_finite(mixture: Mixture) -> list[bool]:
    """Whether each class is below the second child of the root, in the first row."""
    tree = mixture.trees[0]
    nested: Any = tree.to_nested()
    below: list[Any] = [nested[1]]
    found = set()
    while below:
        item = below.pop()
        below.extend(item if isinstance(item, tuple) else ())
        found |= set() if isinstance(item, tuple) else {item}
    return [y in found for y in range(tree.n_classes)]


def results(dtype: torch.dtype) -> list[Tensor]:
    return [part for make in MIXTURES.values() for part in drawn(make().to(dtype), 3)]


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
def test_same_bits_for_every_number_of_threads(dtype: torch.dtype) -> None:
    found = []
    for count in (1, 2, 3):
        with threads(count):
            found.append(results(dtype))
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(other, found[0], strict=True))


def every_result() -> list[Tensor]:
    return [x for dtype in DTYPES for x in results(dtype)]


@pytest.mark.slow
@every_instruction_set
def test_instruction_sets_agree(capability: str, tmp_path: Path) -> None:
    of_other = with_instruction_set(capability, "ops.test_sample", "every_result()", tmp_path)
    torch.testing.assert_close(of_other, every_result(), rtol=3e-6, atol=3e-6)


@every_mixture
def test_opcheck(name: str) -> None:
    mixture, tests = MIXTURES[name](), ("test_schema", "test_faketensor")
    arguments = mixture.arguments()
    torch.library.opcheck(torch.ops.hstree.sample, (*arguments, SEED, 2, 1.0), test_utils=tests)


def test_not_differentiable() -> None:
    mixture = draw(huffman(9))
    mixture = replace(mixture, hidden=mixture.hidden.requires_grad_())
    message = r"not differentiable; .*TreeEnsemble\.candidate_log_prob"
    with pytest.raises(RuntimeError, match=f"hstree::sample: {message}"):
        drawn(mixture)[1].sum().backward()


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no draw": ({"n": 0}, "n: expected at least 1 draw of a row, got 0"),
    "cold": ({"temperature": 0.0}, "temperature: expected a finite positive number, got 0"),
    "hot": ({"temperature": float("inf")}, "temperature: expected a finite positive number"),
    "no number": ({"temperature": float("nan")}, "temperature: expected a finite positive"),
    "seeds": ({"seed": torch.zeros(2).long()}, r"seed: expected size 1 \(one number\)"),
    "seed": ({"seed": torch.zeros(1)}, "seed: expected dtype Long, got Float"),
    "shape": ({"seed": torch.tensor(3)}, r"seed: expected shape \[1\], got \[\]"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name: str, device: torch.device) -> None:
    options, message = WRONG[name]
    options = {"seed": SEED} | options
    options["seed"] = options["seed"].to(device)
    with pytest.raises(RuntimeError, match=f"hstree::sample: {message}"):
        drawn(draw(huffman(9)).on(device), **options)


def corrupt_tables() -> tuple[int, int]:
    """Each is refused, or gives classes."""
    random = np.random.default_rng(1)

    def attempt(mixture: Mixture) -> None:
        V = mixture.trees[0].n_classes
        classes, _ = drawn(mixture, 1)
        assert int(classes.min()) >= 0
        assert int(classes.max()) < V

    mixtures = (corrupted(seed, random) for seed in range(600))
    return outcomes(partial(attempt, mixture) for mixture in mixtures if mixture is not None)


def test_corrupt_tables_never_crash(tmp_path: Path) -> None:
    refused, accepted = apart("ops.test_sample", "corrupt_tables()", tmp_path)
    assert refused > 50
    assert accepted > 100
