"""Speculative decoding draws from the model's distribution, whatever the draft."""

from __future__ import annotations

import importlib
import itertools
from typing import Any

import pytest
import torch
from heads.support import HEADS, D, V, make
from lm.evaluation.support import KINDS, language_model
from scipy.stats import chi2
from torch import Tensor

from hstree.decoding import verify
from hstree.heads import Head, Softmax, TreeEnsemble
from hstree.lm.models import AWDLSTM, LanguageModel, generate, speculative

module = importlib.import_module("hstree.lm.models.speculative")
VERIFICATION = importlib.import_module("hstree.decoding.verification")

FEW = 6  # classes
PROMPT = [2, 5]
DRAWS = 20_000


def randomized(head: Head, seed: int, scale: float) -> Head:
    """Weights far from 0, so that distributions are far from uniform."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.normal_(0.0, scale, generator=generator)
    return head


def small_model() -> LanguageModel:
    torch.manual_seed(0)
    backbone = AWDLSTM(FEW, 4, 5, layers=2, context_size=3)
    with torch.no_grad():
        for parameter in backbone.parameters():
            parameter.normal_()
    return LanguageModel(backbone, randomized(Softmax(3, FEW), 1, 0.5)).eval()


def bad_draft() -> Head:
    return randomized(TreeEnsemble.from_counts(3, [9, 1, 5, 3, 1, 2], n_trees=2), 5, 1.0)


def sequence_probabilities(
    model: LanguageModel, n_words: int, temperature: float, avoid: int | None
) -> Tensor:
    """Probability of each of the FEW ** n_words continuations of the prompt, float64."""
    texts = torch.tensor(list(itertools.product(range(FEW), repeat=n_words))).T
    prompt = torch.tensor(PROMPT)[:, None].expand(-1, texts.shape[1])
    with torch.no_grad():
        hidden, _ = model.hidden(torch.cat([prompt, texts])[:-1])
        score = model.head.log_prob(hidden[len(PROMPT) - 1 :]).double() / temperature
    if avoid is not None:
        score[..., avoid] = -torch.inf
    log_prob = score.log_softmax(-1).gather(2, texts[:, :, None])
    return log_prob.squeeze(2).sum(0).exp()


def log_p_value(samples: list[list[int]], expected: Tensor) -> float:
    """Logarithm of the chi-square test's p-value: continuations against their probabilities. Those
    expected fewer than five times count as one."""
    text = torch.tensor(samples)
    number = (text * FEW ** torch.arange(text.shape[1] - 1, -1, -1)).sum(1)
    seen = torch.bincount(number, minlength=len(expected)).double()
    assert (seen[expected == 0] == 0).all()
    wanted = expected * len(samples)
    rare = wanted < 5
    seen = torch.cat([seen[~rare], seen[rare].sum()[None]])
    wanted = torch.cat([wanted[~rare], wanted[rare].sum()[None]])
    seen, wanted = seen[wanted > 0], wanted[wanted > 0]
    statistic = ((seen - wanted).square() / wanted).sum()
    return float(chi2.logsf(statistic, len(seen) - 1))


LIMIT = -10.0  # about 5e-5
OPTIONS: list[dict[str, Any]] = [
    {"k": 1},
    {"k": 2},
    {"k": 3},
    {"k": 2, "temperature": 0.6},
    {"k": 2, "temperature": 1.7, "avoid": 4},
    {"k": 3, "avoid": 0},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_texts_have_the_probabilities_of_the_model(options: dict[str, Any]) -> None:
    model = small_model()
    output = speculative(model, bad_draft(), PROMPT, 3, DRAWS, seed=3, **options)
    expected = sequence_probabilities(
        model, 3, options.get("temperature", 1.0), options.get("avoid")
    )
    torch.testing.assert_close(expected.sum(), torch.tensor(1.0).double())
    assert log_p_value(output.classes, expected) > LIMIT
    assert 0.2 < output.accepted / output.drafted < 0.8  # both branches of the rule


@pytest.mark.parametrize("ignored", [4, 5])
@pytest.mark.parametrize("build", [Softmax, TreeEnsemble.from_counts], ids=["softmax", "trees"])
def test_the_draft_may_ignore_a_class(build: Any, ignored: int) -> None:
    """In training, as with padding: its probability is that of any other class."""
    model = small_model()
    counts: Any = FEW if build is Softmax else [9, 1, 5, 3, 1, 2]
    draft = randomized(build(3, counts, ignore_index=ignored), 5, 1.0)
    output = speculative(model, draft, PROMPT, 3, DRAWS, seed=3, k=2)
    assert log_p_value(output.classes, sequence_probabilities(model, 3, 1.0, None)) > LIMIT


def always_accept(log_p: Tensor, drafted: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    generator = rest[-1]
    count = torch.full((drafted.shape[1],), len(drafted))
    return count, torch.multinomial(log_p[-1].exp(), 1, generator=generator).squeeze(1)


def no_residual(
    log_p: Tensor, drafted: Tensor, log_q: Tensor, _: Any, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """A rejected word is replaced by a draw from p, not from max(p - q, 0)."""
    count, _word = verify(
        log_p, drafted, log_q, lambda step, row, at: log_p[step, row].gather(1, at)
    )
    prob = log_p[count, torch.arange(len(count))].exp()
    return count, torch.multinomial(prob, 1, generator=generator).squeeze(1)


@pytest.mark.parametrize("rule", [always_accept, no_residual])
def test_a_wrong_rule_is_found(rule: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The power of the test above."""
    monkeypatch.setattr(module, "verify", rule)
    model = small_model()
    output = speculative(model, bad_draft(), PROMPT, 3, DRAWS, seed=3, k=2)
    assert log_p_value(output.classes, sequence_probabilities(model, 3, 1.0, None)) < -100


@pytest.mark.parametrize("candidates", [1, 2, 64])
def test_acceptance_rule(candidates: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """P(accepted) = sum min(p, q), and the word is then distributed as p, in one step of six
    classes; places of other rows do not matter."""
    monkeypatch.setattr(VERIFICATION, "CANDIDATES", candidates)
    p = torch.tensor([0.5, 0.2, 0.1, 0.1, 0.1, 0.0])
    q = torch.tensor([0.1, 0.3, 0.2, 0.0, 0.2, 0.2])
    generator = torch.Generator().manual_seed(0)
    batch = 40_000
    drafted = torch.multinomial(q, batch, replacement=True, generator=generator)[None]
    log_p = p.log().expand(2, batch, -1)
    asked = []

    def log_q(step: Tensor, row: Tensor, classes: Tensor) -> Tensor:
        asked.append((step, row))
        return q.log()[classes]

    count, word = verify(log_p, drafted, q.log()[drafted], log_q, generator)
    for step, row in asked:
        assert (step == 0).all()
        assert row.equal((count == 0).nonzero().squeeze(1))
    accepted = torch.minimum(p, q).sum()
    assert abs(count.float().mean() - accepted) < 0.01
    first = torch.where(count == 1, drafted[0], word)
    share = torch.bincount(first, minlength=FEW) / batch
    torch.testing.assert_close(share, p, atol=0.012, rtol=0)
    assert share[5] == 0


def test_the_first_rejection_ends_the_draft() -> None:
    """p is 1 for class 1; 1 is always accepted and 0 never."""
    log_p = torch.tensor([0.0, 1.0]).log().expand(4, 5, -1)
    drafted = torch.tensor([[0, 1, 1, 1, 0], [1, 0, 1, 1, 0], [1, 1, 0, 1, 0]])
    half = torch.tensor(0.5).log()
    count, word = verify(
        log_p, drafted, half.expand(3, 5), lambda _, row, at: half.expand(at.shape)
    )
    assert count.tolist() == [0, 1, 2, 3, 0]
    assert word.tolist() == [1] * 5


def test_nothing_left_of_p() -> None:
    """p below q everywhere, as rounding may have it: the word is then drawn from p."""
    log_p = torch.tensor([0.0, 0.5, 0.5]).log().expand(2, 9, -1)
    one = torch.zeros(1, 9)
    count, word = verify(
        log_p, one.long(), one, lambda _, row, at: log_p[0, : len(row)].gather(1, at) + 0.1
    )
    assert count.tolist() == [0] * 9
    assert set(word.tolist()) <= {1, 2}


def same_head(head: Head) -> Head:
    copy = type(head).from_config(head.config(), head.state_dict())
    copy.load_state_dict(head.state_dict())
    return copy


@pytest.mark.parametrize("kind", KINDS)
def test_a_draft_that_is_the_model_is_accepted(kind: str) -> None:
    """With words that end between two verifications, for every kind of head."""
    model = language_model(kind)
    for draft in (model.head, same_head(model.head)):
        output = speculative(model, draft, [7], 24, 3, k=4)
        assert [len(sample) for sample in output.classes] == [24] * 3
        assert output.accepted == output.drafted
        assert output.verifications == 3 * 5  # 5 + 5 + 5 + 5 + 4
        assert output.drafted == (4 + 4 + 4 + 4 + 3) / 5


@pytest.mark.parametrize("options", [{}, {"temperature": 0.8, "avoid": 2}, {"k": 1}], ids=str)
def test_the_same_seed_gives_the_same_words(options: dict[str, Any]) -> None:
    model, draft = language_model(), make("trees, sparse")
    first = speculative(model, draft, [3], 20, 2, seed=5, **options)
    assert first == speculative(model, draft, [3], 20, 2, seed=5, **options)
    assert first != speculative(model, draft, [3], 20, 2, seed=6, **options)
    assert [len(sample) for sample in first.classes] == [20, 20]


def test_the_model_reads_the_text_that_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """After each word dropped, hidden vectors go on from the state before it: those of each
    verification are those of the finished text, read at once."""
    model, draft = language_model(), make("trees, sparse")
    seen: list[Tensor] = []
    log_prob = module._model_log_prob

    def noted(head: Head, hidden: Tensor, *rest: Any) -> Tensor:
        seen.append(hidden)
        return log_prob(head, hidden, *rest)

    monkeypatch.setattr(module, "_model_log_prob", noted)
    counts: list[int] = []

    def counted(*arguments: Any) -> tuple[Tensor, Tensor]:
        count, word = verify(*arguments)
        counts.append(int(count))
        return count, word

    monkeypatch.setattr(module, "verify", counted)
    output = speculative(model, draft, [3, 8], 40, seed=1)
    assert len(set(counts)) > 2
    kept = torch.cat([hidden[: count + 1, 0] for hidden, count in zip(seen, counts, strict=True)])
    text = torch.tensor([3, 8, *output.classes[0]])[:, None]
    expected, _ = model.hidden(text)
    torch.testing.assert_close(kept[:40], expected[1:41, 0])


def test_greedy_limit_is_the_most_probable_text() -> None:
    """Every row of a batch at its own place; the draft is another head."""
    model = language_model("softmax")
    expected = generate(model, [3], 12, temperature=1e-5)
    for k in (1, 3, 20):
        output = speculative(model, make("trees, sparse"), [3], 12, 3, k=k, temperature=1e-5)
        assert output.classes == expected * 3


def test_a_class_that_is_all_but_certain_is_avoided() -> None:
    model = language_model()
    with torch.no_grad():
        model.head.bias[4] = 500.0
    output = speculative(model, same_head(model.head), [1], 5, 3, avoid=4)
    assert not any(4 in sample for sample in output.classes)
    assert output.accepted == 0


def test_heads_and_modes() -> None:
    """Trees draft for a softmax of another dtype, and heads in training mode are switched."""
    model, draft = language_model(), make("trees, sparse").double()
    output = speculative(model, draft, [3], 4, 2)
    assert not model.training
    assert not draft.training
    assert len(output.classes) == 2
    assert speculative(model, draft, [3], 0, 2).classes == [[], []]
    assert speculative(model, draft, [3], 0).verifications == 0
    one = speculative(model, draft, [3], 1, k=3)
    assert (one.verifications, one.drafted, len(one.classes[0])) == (1, 0, 1)


def test_the_model_is_called_once_for_each_verification(monkeypatch: pytest.MonkeyPatch) -> None:
    model, draft = language_model(), make("trees, sparse")
    rows: list[int] = []
    whole = Softmax.class_log_prob
    monkeypatch.setattr(
        Softmax,
        "class_log_prob",
        lambda head, hidden: (rows.append(len(hidden)), whole(head, hidden))[1],
    )
    output = speculative(model, draft, [3], 30, k=3)
    assert len(rows) == output.verifications
    assert sum(rows) == round((output.drafted + 1) * output.verifications)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"draft": Softmax(D, V + 1)}, f"draft: expected n_classes = {V}, .* got {V + 1}"),
        ({"draft": Softmax(D + 1, V)}, f"draft: expected in_features = {D}, .* got {D + 1}"),
        ({"prompt": []}, r"prompt: expected class ids in \[0, .* got \[\]"),
        ({"prompt": [V]}, "prompt: expected class ids"),
        ({"n_words": -1}, "n_words: expected a whole number of at least 0, got -1"),
        ({"n_samples": 0}, "n_samples: expected a whole number of at least 1, got 0"),
        ({"k": 0}, "k: expected a whole number of at least 1, got 0"),
        ({"temperature": 0.0}, "temperature: expected a number from 1e-6 to 1e6, got 0.0"),
        ({"avoid": V}, f"avoid: expected a whole number from 0 to {V - 1}, got {V}"),
    ],
    ids=str,
)
def test_bad_input(changes: dict[str, Any], message: str) -> None:
    arguments = {"draft": HEADS["softmax"](), "prompt": [1], "n_words": 3} | changes
    with pytest.raises(ValueError, match=message):
        speculative(language_model(), **arguments)
