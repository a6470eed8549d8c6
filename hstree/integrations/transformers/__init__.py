"""Heads of hstree as the ``lm_head`` of Hugging Face transformers' causal language models."""

from __future__ import annotations

import os
from typing import Any, NoReturn

from torch import Tensor

try:
    import transformers
except ModuleNotFoundError as error:
    if error.name != "transformers":
        raise
    raise ImportError(
        "hstree.integrations.transformers needs the package transformers: "
        "pip install 'hstree[transformers]'"
    ) from None

from hstree.heads import (
    ForestSoftmax,
    Head,
    SampledSoftmax,
    ScreenedSoftmax,
    Softmax,
    build_head,
    head_class,
    head_options,
)
from hstree.integrations.transformers.files import (
    CONFIG_KEY,
    HUB_OPTIONS,
    ConfigWithHead,
    HeadConfig,
)
from hstree.integrations.transformers.lm_head import LMHead
from hstree.integrations.transformers.logits import hidden_states, scale_and_cap
from hstree.integrations.transformers.model import (
    IGNORED,
    attach,
    check_tied,
    uses_loss_function,
    with_head,
)

__all__ = [
    "CONFIG_KEY",
    "LMHead",
    "accelerate_lm_head",
    "from_pretrained",
    "replace_lm_head",
]

SOFTMAXES = (Softmax, SampledSoftmax, ForestSoftmax)
"""The heads that start as the softmax of a linear layer with their weight and bias."""


def __getattr__(name: str) -> Any:
    """The classes that pickle and torch.save look up by name, such as GPT2LMHeadModel."""
    model_class = getattr(transformers, name, None) if name[:1].isupper() else None
    if isinstance(model_class, type) and issubclass(model_class, transformers.PreTrainedModel):
        return with_head(model_class)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def replace_lm_head(
    model: transformers.PreTrainedModel, head: Head | str | None = None, **options: Any
) -> transformers.PreTrainedModel:
    r"""Replace the ``lm_head`` of a causal language model by a head of hstree, in place.

    ``Trainer``, ``generate`` and ``save_pretrained`` work as before. The differences:

    - ``model(input_ids, labels=labels).loss`` is computed by the head. With ``labels`` in training
      no logits are computed and ``logits`` is None: a step holds no tensor of [batch, time, V].
      The input ``skip_logits=True`` or ``False`` overrides this, for example in an evaluation that
      needs only the loss.
    - ``logits`` are log-probabilities of the head's distribution, [batch, time, V]. Without
      ``head``, and with ``"softmax"``, they have the scale and the soft cap that the model applies
      to its logits, which other heads ignore.
    - The loss is the mean over the labels that are not -100 or, with ``num_items_in_batch``, their
      sum divided by that number, as in transformers. The head's ``reduction`` is set to ``"sum"``.
    - Token embeddings that are tied to the ``lm_head`` stay tied, except to a ``head`` that was
      built without ``embedding=model.get_input_embeddings()``.

    Row-sparse gradients (``TreeEnsemble(sparse=True)``) need an optimizer and a clipping function
    that support them::

        adamw = hstree.optim.AdamW, {"lr": 1e-3}
        trainer = Trainer(model, args, train_dataset=texts, optimizer_cls_and_kwargs=adamw)
        trainer.accelerator.clip_grad_norm_ = hstree.optim.clip_grad_norm_

    Load a model that ``model.save_pretrained`` wrote with :func:`from_pretrained`, or with
    ``AutoModelForCausalLM.from_pretrained(path, trust_remote_code=True)``.

    Args:
        model: a model with an ``lm_head`` (``get_output_embeddings()``) that computes its loss by
            ``loss_function``, such as ``GPT2LMHeadModel`` and ``LlamaForCausalLM``.
        head: None: :class:`hstree.heads.Softmax` on the weight of the ``lm_head`` itself. The
            distribution of the model stays. A name (:func:`hstree.heads.head_names`): a new head to
            be trained, by :func:`hstree.heads.build_head`; ``"softmax"``, ``"sampled"`` and
            ``"forest"`` start as the softmax of the ``lm_head``. Or a head with the features D and
            classes V of the ``lm_head``, which is moved to its device and dtype.
        **options: arguments of ``build_head``, if ``head`` is a name, such as ``frequencies``; of
            :class:`~hstree.heads.Softmax`, if it is None, such as ``z_loss``.

    Returns:
        The model.

    Raises:
        TypeError: if ``model`` is not a causal language model of transformers that computes its
            loss by ``loss_function``, or ``head`` is not a head.
        ValueError: if the model has a head of hstree already, or ``head`` has other sizes; for a
            head that starts as the softmax of the ``lm_head``, if the model does more to its logits
            than scale and softly cap them; for ``"sampled"`` and ``"forest"``, if it does that.

    Example:
        >>> import torch
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> from hstree.integrations.transformers import from_pretrained, replace_lm_head
        >>> config = GPT2Config(vocab_size=200, n_positions=16, n_embd=16, n_layer=1, n_head=2)
        >>> model = replace_lm_head(GPT2LMHeadModel(config))
        >>> tokens = torch.randint(200, (2, 8))
        >>> model(tokens, labels=tokens).loss.backward()
        >>> model.save_pretrained("gpt2-softmax")
        >>> from_pretrained("gpt2-softmax").lm_head.head.tied
        True
    """
    linear = _linear_lm_head(model)
    n_classes, in_features = linear.weight.shape
    embedding = model.get_input_embeddings()
    tied = linear.weight is embedding.weight
    if head is None:
        head = _own_softmax(model, linear, **options)
    elif isinstance(head, str):
        if tied and "embedding" in head_options(head):
            options = {"embedding": embedding} | options
        kind = head_class(head)
        if issubclass(kind, SOFTMAXES):
            scale, cap = scale_and_cap(model, linear)
            if issubclass(kind, Softmax):
                options = {"scale": scale, "soft_cap": cap} | options
            elif (scale, cap) != (1.0, None):
                raise ValueError(
                    f"head: expected None or 'softmax' for {type(model).__name__}, whose logits "
                    f"have the scale {scale:.6g} and the soft cap {cap}, got {head!r}"
                )
            options = {"bias": getattr(linear, "bias", None) is not None} | options
        if issubclass(kind, ForestSoftmax) and not {"tokens", "trees"} & options.keys():
            options = {"vectors": linear.weight} | options
        head = build_head(head, in_features, n_classes, **options)
        if isinstance(head, SOFTMAXES):
            head.copy_linear(linear)
    elif not isinstance(head, Head):
        raise TypeError(
            f"head: expected a head of hstree, its name or None, got {type(head).__name__}"
        )
    elif options:
        name = next(iter(options))
        raise ValueError(f"{name}: expected no options together with a head, got {options[name]!r}")
    for name, expected in (
        ("in_features", in_features),
        ("n_classes", n_classes),
        ("ignore_index", IGNORED),
    ):
        if getattr(head, name) != expected:
            raise ValueError(f"head: expected {name}={expected}, got {getattr(head, name)}")
    check_tied(head, model)
    model.__class__ = with_head(model.__class__)
    model.set_output_embeddings(LMHead())
    attach(model, head.train(model.training))
    return model


def _linear_lm_head(model: transformers.PreTrainedModel) -> Any:
    """The ``lm_head`` of a model that :func:`replace_lm_head` takes."""
    if not isinstance(model, transformers.PreTrainedModel):
        raise TypeError(f"model: expected a model of transformers, got {type(model).__name__}")
    linear = model.get_output_embeddings()
    if isinstance(linear, LMHead):
        raise ValueError(f"model: expected a linear lm_head, got {type(linear.head).__name__}")
    if model.config.is_encoder_decoder or getattr(linear, "weight", None) is None:
        raise TypeError(
            f"model: expected a causal language model with an lm_head, got {type(model).__name__}"
        )
    if not uses_loss_function(type(model)):
        raise TypeError(
            f"model: expected a causal language model that computes its loss by loss_function, got "
            f"{type(model).__name__}"
        )
    return linear


def _own_softmax(model: transformers.PreTrainedModel, linear: Any, **options: Any) -> Softmax:
    """The softmax on the weight of the ``lm_head`` with the distribution of the model."""
    scale, cap = scale_and_cap(model, linear)
    given = {"scale": scale, "soft_cap": cap} | options
    head = Softmax.from_linear(linear, tied=True, **given)
    head.tied = linear.weight is model.get_input_embeddings().weight
    return head


def accelerate_lm_head(
    model: transformers.PreTrainedModel,
    contexts: Tensor | None = None,
    **options: Any,
) -> transformers.PreTrainedModel:
    """Screen the ``lm_head`` of a causal language model, so that it generates faster, in place.

    A :class:`hstree.heads.ScreenedSoftmax` replaces the ``lm_head``:
    ``generate`` of every kind runs on a distribution close to the model's.

    Args:
        model: a model that :func:`replace_lm_head` takes, or whose head is a
            :class:`hstree.heads.Softmax` already.
        contexts: a few thousand tokens of texts like those to generate, int64 [n, time] without
            padding, or the hidden vectors that the ``lm_head`` reads for them, [..., D]. None: see
            :meth:`hstree.heads.ScreenedSoftmax.from_linear`.
        **options: further arguments of :meth:`hstree.heads.ScreenedSoftmax.from_linear`.

    Returns:
        The model.

    Raises:
        TypeError, ValueError: as :func:`replace_lm_head`, and
            :meth:`hstree.heads.ScreenedSoftmax.from_linear`.

    Example:
        >>> import torch
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> from hstree.integrations.transformers import accelerate_lm_head
        >>> config = GPT2Config(vocab_size=200, n_positions=16, n_embd=16, n_layer=1, n_head=2)
        >>> model, tokens = GPT2LMHeadModel(config).eval(), torch.randint(200, (8, 16))
        >>> model = accelerate_lm_head(model, tokens)
        >>> model.generate(tokens[:1, :4], max_new_tokens=8, do_sample=False).shape
        torch.Size([1, 12])
    """
    lm_head: Any = getattr(model, "get_output_embeddings", lambda: None)()
    replaced = isinstance(lm_head, LMHead)
    if replaced and isinstance(lm_head.head, Softmax):
        softmax = lm_head.head
    else:
        softmax = _own_softmax(model, _linear_lm_head(model))
    if contexts is not None and not contexts.is_floating_point():
        if contexts.dim() != 2:
            raise ValueError(
                f"contexts: expected tokens [n, time], got the shape {list(contexts.shape)}"
            )
        contexts = hidden_states(model, lm_head, contexts)
    own = {name: softmax.config()[name] for name in ("scale", "soft_cap")}
    screen = ScreenedSoftmax.from_linear(softmax, contexts, tied=softmax.tied, **(own | options))
    if replaced:
        attach(model, screen)
    else:
        replace_lm_head(model, screen)
    return model


def from_pretrained(path: str | os.PathLike[str], **options: Any) -> transformers.PreTrainedModel:
    """Load a model with a head of hstree that ``model.save_pretrained`` wrote.

    Args:
        path: folder, or repository on the hub.
        **options: arguments of ``transformers.AutoModelForCausalLM.from_pretrained``.

    Returns:
        The model, in evaluation mode.

    Raises:
        ValueError: if the model has no head of hstree, or a damaged one.
        OSError: if the files do not exist.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> from hstree.integrations.transformers import from_pretrained, replace_lm_head
        >>> config = GPT2Config(vocab_size=200, n_positions=16, n_embd=16, n_layer=1, n_head=2)
        >>> model = replace_lm_head(GPT2LMHeadModel(config), "mos", components=3)
        >>> model.save_pretrained("gpt2-mos")
        >>> from_pretrained("gpt2-mos").lm_head.head.n_components
        3
    """
    config = options.pop("config", None)
    if config is None:
        hub = {name: options[name] for name in HUB_OPTIONS if name in options}
        config = HeadConfig.from_pretrained(path, **hub)
    body = config.body_class if isinstance(config, ConfigWithHead) else type(config)
    if body not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(
            f"path: expected a causal language model of transformers, got {os.fspath(path)} with "
            f"{body.__name__}"
        )
    model_class = with_head(transformers.MODEL_FOR_CAUSAL_LM_MAPPING[body])
    model: transformers.PreTrainedModel = model_class.from_pretrained(
        path, config=config, **options
    )
    return model


class HeadForCausalLM:
    """What the file ``modeling_hstree.py`` of a saved model gives to
    ``transformers.AutoModelForCausalLM.from_pretrained(path, trust_remote_code=True)``."""

    @staticmethod
    def register_for_auto_class(auto_class: Any = None) -> None:
        """Called by transformers, which would copy the source code of a registered class."""

    @staticmethod
    def from_pretrained(path: str | os.PathLike[str], *args: Any, **options: Any) -> Any:
        """See :func:`from_pretrained`."""
        return from_pretrained(path, **options)

    @staticmethod
    def _from_config(config: transformers.PreTrainedConfig, **options: Any) -> NoReturn:
        raise ValueError(
            f"config: expected a config without {CONFIG_KEY}, since a new model has no weights of "
            f"its head, got {type(config).__name__}; make the model from a "
            f"{config.body_class.__name__}, then call replace_lm_head"
        )
