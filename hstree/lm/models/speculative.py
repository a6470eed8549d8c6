"""Speculative decoding: a fast head drafts words, the model's own head accepts or replaces them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from hstree._checks import check_int, check_temperature
from hstree._progress import Task
from hstree.decoding import verify
from hstree.decoding.acceptance import check_draft
from hstree.heads import Head

from .awd_lstm import State
from .generation import check_prompt, check_samples
from .language_model import LanguageModel

NO_CLASS = -1
"""``ignore_index`` of the draft: it draws the class that it ignores in training as well."""


class SpeculativeOutput(NamedTuple):
    """Words drawn by :func:`speculative`, and how well the draft did.

    Attributes:
        classes: ``n_samples`` lists of ``n_words`` classes.
        verifications: number of verifications, summed over the samples; each calls the model's
            head once, for all drafted words.
        drafted: mean number of words drafted for a verification: k, and fewer near the end.
        accepted: mean number of drafted words that a verification accepts. It then draws one word
            more, so the model's head is called once for each ``accepted + 1`` words.
    """

    classes: list[list[int]]
    verifications: int
    drafted: float
    accepted: float


@torch.no_grad()
def speculative(
    model: LanguageModel,
    draft: Head,
    prompt: Sequence[int],
    n_words: int,
    n_samples: int = 1,
    *,
    k: int = 4,
    seed: int = 0,
    avoid: int | None = None,
    temperature: float = 1.0,
) -> SpeculativeOutput:
    r"""Continue a prompt: words from the model's distribution, most of them drawn by another head.

    The draft head reads the hidden vectors of the same backbone. It draws up to k words, one after
    the other. One call of the model's head then gives the model's distribution p before and after
    each of them. A word x that was drawn from the draft's distribution q is accepted with
    probability

    .. math:: \min\bigl(1, p(x) / q(x)\bigr).

    The first word that is not accepted is replaced by a draw from the normalized
    :math:`\max(p - q, 0)`, and the words after it are dropped, with their states. If all are
    accepted, one word more is drawn from p.

    The words have the distribution of the model, whatever the draft: the same as those of
    :func:`hstree.lm.models.generate`, up to rounding. The draft decides only the speed. It pays if
    the model's head takes most of the time, takes little longer for k + 1 hidden vectors than for
    one, as a large softmax does whose weights are read from memory, and accepts most words. The
    backbone also runs for words that are rejected.

    Args:
        model: language model with any head, set to evaluation mode.
        draft: head with the features and classes of the model's, on the same device, such as trees
            made of its softmax by :meth:`hstree.heads.TreeEnsemble.from_linear`; set to evaluation
            mode.
        prompt: classes of the prompt, at least one.
        n_words: number of words to draw for each sample.
        n_samples: number of independent continuations.
        k: number of words to draft for each verification.
        seed: seed of the draws; the same seed gives the same words on the same device.
        avoid: class that is never drawn; p is conditioned on the other classes. Where the draft
            draws it, the word is replaced.
        temperature: divisor of the model's log-probabilities, in [1e-6, 1e6]; the draft draws at
            the same one, see :meth:`hstree.heads.Head.sample`.

    Returns:
        The words, and the mean number of accepted ones.

    Raises:
        ValueError: if the sizes of the draft differ from those of the model's head, for an empty
            prompt, a class or another argument out of range, or samples that do not fit into
            memory.

    Example:
        >>> import hstree
        >>> from hstree.lm.models import AWDLSTM, LanguageModel, speculative
        >>> softmax = hstree.Softmax(16, 2000)
        >>> draft = hstree.TreeEnsemble.from_linear(softmax)
        >>> model = LanguageModel(AWDLSTM(2000, 8, 16), softmax)
        >>> output = speculative(model, draft, prompt=[3, 14], n_words=12, k=3)
        >>> len(output.classes[0]), 3 <= output.verifications <= 12
        (12, True)

    Source: Leviathan, Kalman and Matias, Fast inference from transformers via speculative decoding,
    ICML 2023; Chen et al., Accelerating large language model decoding with speculative sampling,
    2023.
    """
    head = model.head
    check_draft(draft, head)
    check_prompt(prompt, head.n_classes)
    check_int("n_words", n_words, 0)
    check_int("n_samples", n_samples)
    check_int("k", k)
    temperature = check_temperature(temperature)
    check_int("seed", seed, -(2**63), 2**64 - 1)
    if avoid is not None:
        check_int("avoid", avoid, 0, head.n_classes - 1)
    verified = min(k + 1, n_words) * head.n_classes
    check_samples(model, len(prompt), n_words, n_samples, verified)
    device = model.backbone.embedding.weight.device
    generator = torch.Generator(device).manual_seed(seed)
    model.eval()
    draft.eval()

    text = torch.zeros(n_samples, n_words + k, dtype=torch.int64, device=device)
    length = torch.zeros(n_samples, dtype=torch.int64, device=device)
    tokens = torch.tensor(prompt, device=device)[:, None].repeat(1, n_samples)
    state: State | None = None
    verifications = drafted = accepted = 0
    rows = torch.arange(n_samples if n_words else 0, device=device)  # samples that are not finished
    with closing(Task("drawing words", n_words)) as task:
        while len(rows):
            most = min(k, n_words - 1 - int(length[rows].min()))
            words = _draft(model, draft, tokens, state, most, temperature, generator)
            log_p = _model_log_prob(head, words.hidden, temperature, avoid)
            log_q = partial(_draft_log_prob, draft, words.hidden, temperature)
            count, last = verify(log_p, words.classes, words.log_prob, log_q, generator)
            verifications += len(rows)
            drafted += words.classes.numel()
            accepted += int(count.sum())
            place = length[rows]  # rejected words are overwritten, by this word and the next draft
            steps = torch.arange(most, device=device)
            text[rows[:, None], place[:, None] + steps] = words.classes.T
            text[rows, place + count] = last
            length[rows] += count + 1
            task.advance(min(int(length.min()), n_words) - task.done)
            (left,) = (length[rows] < n_words).nonzero(as_tuple=True)
            tokens, state = last[left][None], _state_after(words.states, count[left], left)
            rows = rows[left]
    calls = max(verifications, 1)
    classes: list[list[int]] = text[:, :n_words].tolist()
    return SpeculativeOutput(classes, verifications, drafted / calls, accepted / calls)


class _Draft(NamedTuple):
    """Drafted words. Hidden vectors and states are those before each of them, and after the
    last."""

    classes: Tensor  # [n, B]
    log_prob: Tensor  # [n, B]
    hidden: Tensor  # [n + 1, B, D]
    states: list[State]


def _draft(
    model: LanguageModel,
    draft: Head,
    tokens: Tensor,
    state: State | None,
    n: int,
    temperature: float,
    generator: torch.Generator,
) -> _Draft:
    """Read ``tokens`` [time, B] after ``state``, then draw n words."""
    read, state = model.hidden(tokens, state)
    hidden, states = [read[-1]], [state]
    classes = [tokens.new_empty(0, tokens.shape[1])]
    log_prob = [read.new_empty(0, tokens.shape[1])]
    for _ in range(n):
        word, of_word = draft.sample(
            hidden[-1], temperature=temperature, generator=generator, return_log_prob=True
        )
        classes.append(word[None])
        log_prob.append(of_word[None])
        read, state = model.hidden(word[None], states[-1])
        hidden.append(read[-1])
        states.append(state)
    return _Draft(torch.cat(classes), torch.cat(log_prob), torch.stack(hidden), states)


def _model_log_prob(head: Head, hidden: Tensor, temperature: float, avoid: int | None) -> Tensor:
    """Log-probabilities [..., V] of the distribution that words are to have."""
    log_prob = head.log_prob(hidden)
    if avoid is not None:
        log_prob[..., avoid] = -torch.inf
    if avoid is None and temperature == 1.0:
        return log_prob
    return ((log_prob - log_prob.amax(-1, keepdim=True)) / temperature).log_softmax(-1)


def _draft_log_prob(
    draft: Head, hidden: Tensor, temperature: float, step: Tensor, row: Tensor, classes: Tensor
) -> Tensor:
    """Log-probabilities [R, K] of classes in the distribution that the draft draws from, at R
    places of hidden [n, B, D]: step and row int64 [R]."""
    return draft.candidate_log_prob(
        hidden[step, row], classes, temperature=temperature, ignore_index=NO_CLASS
    )


def _state_after(states: list[State], step: Tensor, row: Tensor) -> State:
    """State of each of the rows after its own number of steps: both int64 [R]."""

    def at(parts: list[Tensor]) -> Tensor:
        return torch.stack(parts)[step, 0, row][None]

    layers = zip(*states, strict=True)
    return tuple((at([h for h, _ in layer]), at([c for _, c in layer])) for layer in layers)
