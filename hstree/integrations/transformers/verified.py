"""``generate`` of transformers: a screen drafts words, and the model's own head verifies them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hstree.decoding import verify
from hstree.heads import Head, ScreenedSoftmax
from hstree.integrations.transformers.lm_head import Call

DRAFTED, MOST = 8, 16
"""Words that are drafted for the first verification, and at most for one."""


def is_verified(generation_config: Any, synced_gpus: bool) -> bool:
    """Whether :func:`generate_verified` can take the place of ``_sample``: what it has not are
    scores and states to return, processes in step, and processors that hold a state of the text."""
    return not (
        synced_gpus
        or generation_config.return_dict_in_generate
        or generation_config.watermarking_config is not None
        or generation_config.guidance_scale not in (None, 1)
    )


@torch.no_grad()
def generate_verified(
    model: Any,
    draft: ScreenedSoftmax,
    input_ids: Tensor,
    logits_processor: Callable[[Tensor, Tensor], Tensor],
    stopping_criteria: Any,
    generation_config: Any,
    streamer: Any = None,
    **inputs: Any,
) -> Tensor:
    """Greedy decoding and sampling, as the method ``_sample`` of a model of transformers.

    The model reads one word after the other, and the draft gives the next one from its hidden
    vector. After some words one product of the head gives the distributions p of all of them.
    Drafted words are accepted by the rule of :func:`hstree.decoding.verify`, or where they are the
    greedy ones; the cache forgets the rejected ones. The words of a batch that are dropped because
    another row rejects an earlier one do not change its distribution: that row is independent.
    """
    head: Head = model.get_output_embeddings().head
    greedy = not generation_config.do_sample
    pad = generation_config._pad_token_tensor
    padded = any(hasattr(criterion, "eos_token_id") for criterion in stopping_criteria)
    unfinished = torch.ones_like(input_ids[:, 0], dtype=torch.bool)

    def log_probs(text: Tensor, scores: Tensor) -> Tensor:
        return logits_processor(text, scores.float()).log_softmax(1)

    def choose(log_prob: Tensor) -> Tensor:
        return log_prob.argmax(1) if greedy else torch.multinomial(log_prob.exp(), 1).squeeze(1)

    def append(words: Tensor) -> None:
        nonlocal input_ids, unfinished
        if padded:
            words = torch.where(unfinished, words, pad.to(words.device))
        input_ids = torch.cat([input_ids, words[:, None]], 1)
        if streamer is not None:
            streamer.put(words.cpu())
        unfinished = unfinished & ~stopping_criteria(input_ids, None)

    output = model._prefill(input_ids, generation_config, inputs)
    inputs = model._update_model_kwargs_for_generation(output, inputs)
    append(choose(log_probs(input_ids, output.logits[:, -1])))
    cache = output.get("cache")
    drafts = cache is None or cache.is_croppable
    most = DRAFTED if drafts else 0
    if cache is not None and drafts:
        cache.activate_past_recording()
    while unfinished.any():
        text, read = input_ids, [inputs]
        hidden, texts = list[Tensor](), list[Tensor]()
        words, log_q = list[Tensor](), list[Tensor]()
        left = most
        if stopping_criteria.max_length is not None:
            left = min(most, stopping_criteria.max_length - text.shape[1] - 1)
        while True:
            call = Call(skip_logits=True)
            step = model.prepare_inputs_for_generation(
                text, next_sequence_length=1 if inputs["use_cache"] else None, **read[-1]
            )
            output = model.run(call, **step)
            read.append(model._update_model_kwargs_for_generation(output, dict(read[-1])))
            assert call.hidden is not None
            hidden.append(call.hidden[:, -1])
            texts.append(text)
            if len(words) >= left or (words and bool(stopping_criteria(text, None).all())):
                break
            log_q.append(log_probs(text, draft.log_prob(hidden[-1])))
            words.append(choose(log_q[-1]))
            text = torch.cat([text, words[-1][:, None]], 1)
        scores = head.log_prob(torch.stack(hidden))
        log_p = torch.stack([log_probs(*pair) for pair in zip(texts, scores, strict=True)])
        drafted = text[:, input_ids.shape[1] :].T  # [n, B]
        if greedy:
            best = log_p.argmax(2)
            count = (best[:-1] == drafted).long().cumprod(0).sum(0)
            last = best.gather(0, count[None]).squeeze(0)
        else:
            rows = torch.stack(log_q) if log_q else log_p[:0]

            def of_draft(step: Tensor, row: Tensor, some: Tensor, rows: Tensor = rows) -> Tensor:
                return rows[step, row].gather(1, some)

            of_drafted = rows.gather(2, drafted[:, :, None]).squeeze(2)
            count, last = verify(log_p, drafted, of_drafted, of_draft)
        kept = int(torch.where(unfinished, count, len(drafted)).min())
        for i in range(kept + 1):
            append(torch.where(count > i, drafted[i], last) if i < len(drafted) else last)
            if not unfinished.any():
                break
        inputs = read[i + 1]
        if cache is not None and drafts:
            cache.crop(i - len(drafted))
        if kept == most:
            most = min(most + 2, MOST) if drafts else 0
        elif kept < len(drafted):
            most = max(1, (kept + most) // 2)
    if streamer is not None:
        streamer.end()
    return input_ids
