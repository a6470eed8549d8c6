"""What is checked of a class of transformers: the same model before and after."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of what the packages import
    import transformers
    from integrations.model_configs import build

    from hstree.deferred import Source
    from hstree.transformers import accelerate_lm_head, from_pretrained, replace_lm_head

BATCH, TIME = 2, 12
PENALTY = {"repetition_penalty": 1.3, "max_new_tokens": 10, "do_sample": False}
"""With a penalty, a text depends on a constant that is added to the logits."""
DRAWS = PENALTY | {"do_sample": True, "top_k": 5}

FUSED, READ = "loss without logits", "reads its logits"
REFUSED, ALONE, TAKES = "refused", "needs more than tokens", "takes other heads"
NOT_BUILT = "not built here"


def inputs(name: str) -> tuple[dict[str, Any], Tensor]:
    generator = torch.Generator().manual_seed(3)
    high = 256 if name.startswith("Blt") else 300
    ids = torch.randint(5, high, (BATCH, TIME), generator=generator)
    labels = ids.clone()
    labels[0, :4] = -100
    labels[1, -2:] = -100
    given: dict[str, Any] = {"input_ids": ids}
    if name == "GitForCausalLM":
        given["pixel_values"] = torch.randn(BATCH, 3, 16, 16, generator=generator)
    if name == "T5ForConditionalGeneration":
        given["decoder_input_ids"] = ids
    return given, labels


def check_class(name: str, folder: Path) -> tuple[str, str]:
    """Asserts what a model of the class does after ``replace_lm_head`` and ``accelerate_lm_head``.

    Returns:
        What becomes of its loss, and whether heads with parameters of their own take its output
        layer's place.
    """
    # As users load it: some classes save under other names what they have loaded.
    try:
        build(name).save_pretrained(folder / "plain")
    except ImportError:
        return NOT_BUILT, NOT_BUILT
    model = getattr(transformers, name).from_pretrained(folder / "plain")
    given, labels = inputs(name)

    def train(model: Any) -> list[Tensor]:
        model = copy.deepcopy(model).train()
        torch.manual_seed(5)
        loss = model(**given, labels=labels).loss
        loss.backward()
        return [loss.detach()] + [p.grad for p in model.parameters() if p.grad is not None]

    @torch.no_grad()
    def evaluate(model: Any, **more: Any) -> Any:
        torch.manual_seed(5)
        return model(**given, **more)

    def generate(model: Any, **options: Any) -> Tensor:
        torch.manual_seed(5)
        prompt = given | {"input_ids": given["input_ids"][:, : TIME // 2]}
        text: Tensor = model.generate(**prompt, **options)
        return text

    plain = _try(lambda: evaluate(model, labels=labels))
    try:
        replaced = _quietly(lambda: replace_lm_head(copy.deepcopy(model)))
    except TypeError as error:
        if "expected a" not in str(error):
            raise
        return REFUSED, REFUSED
    if plain is None:
        return ALONE, ALONE
    replaced.get_output_embeddings().deferral.least = 0

    reads = []
    compute = Source.compute
    with patch.object(Source, "compute", lambda source: reads.append(1) or compute(source)):
        expected = _try(lambda: train(model))
        if expected is not None:
            found = train(replaced)
            assert len(found) == len(expected)
            for own, gradient in zip(found, expected, strict=True):
                scale = gradient.norm().clamp_min(1e-2)
                assert (own - gradient).norm() <= 1e-3 * scale, name
        loss = evaluate(replaced, labels=labels).loss
        torch.testing.assert_close(loss, plain.loss, atol=1e-5, rtol=1e-4)
    outcome = READ if reads else FUSED
    logits = evaluate(replaced).logits
    assert torch.equal(logits + 0, evaluate(model).logits)
    for options in (PENALTY, DRAWS):
        text = _try(lambda options=options: generate(model, **options))
        if text is not None:
            assert torch.equal(generate(replaced, **options), text), options

    # Its folder is the plain one.
    replaced.save_pretrained(folder / "replaced")
    model.save_pretrained(folder / "again")
    assert _bytes(folder / "replaced") == _bytes(folder / "again")

    if name != "GitForCausalLM":
        contexts = None
        if not model.config.is_encoder_decoder:
            contexts = torch.randint(5, 256, (4, 24), generator=torch.Generator().manual_seed(9))
        classes = model.get_output_embeddings().out_features
        fast = _quietly(lambda: accelerate_lm_head(copy.deepcopy(model), contexts, exact=classes))
        text = _try(lambda: generate(model, **PENALTY))
        if text is not None:
            assert torch.equal(generate(fast, **PENALTY), text)
            assert torch.equal(generate(fast, **DRAWS), generate(model, **DRAWS))

    try:
        other = _quietly(lambda: replace_lm_head(copy.deepcopy(model), "mos", components=2))
    except ValueError as error:
        if "expected None, 'softmax'" not in str(error):
            raise
        return outcome, REFUSED
    _fit(other.train(), given, labels)
    other.eval().save_pretrained(folder / "mos")
    loaded = _quietly(lambda: from_pretrained(folder / "mos"))
    if name != "YoutuForCausalLM":  # transformers itself loads another row of the padding token
        found = evaluate(loaded).logits + 0
        torch.testing.assert_close(found, evaluate(other).logits + 0, atol=1e-4, rtol=1e-4)
    return outcome, TAKES


def _fit(model: Any, given: dict[str, Any], labels: Tensor) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = model(**given, labels=labels).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def _try(work: Callable[[], Any]) -> Any:
    """The result; None for what transformers' own model cannot do."""
    try:
        return work()
    except Exception:
        return None


def _quietly(work: Callable[[], Any]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", ".*was not compared")
        return work()


def _bytes(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}
