"""Heads of hstree as the ``lm_head`` of Hugging Face transformers' causal language models."""

from __future__ import annotations

import copy
import functools
import inspect
import os
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import torch.nn.functional as F
from torch import Tensor, nn

from hstree.heads import Head, TreeEnsemble, head_class

try:
    import transformers
except ModuleNotFoundError as error:
    if error.name != "transformers":
        raise
    raise ImportError(
        "hstree.integrations.transformers needs the package transformers: "
        "pip install 'hstree[transformers]'"
    ) from None
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.utils.generic import can_return_tuple

from hstree.integrations._transformers_files import (
    CONFIG_KEY,
    HUB_OPTIONS,
    ConfigWithHead,
    HeadConfig,
    build_head,
    config_with_head,
    read_head_tensors,
)
from hstree.integrations._trl import is_fused, score_with_head

if TYPE_CHECKING:
    from transformers import PreTrainedModel as _Base
else:
    _Base = object

__all__ = [
    "CONFIG_KEY",
    "HeadConfig",
    "HeadForCausalLM",
    "LMHead",
    "from_pretrained",
    "replace_lm_head",
]

_IGNORED = -100  # the value of transformers


@dataclass
class Call:
    """What the :class:`LMHead` and the loss of a model share in one forward call."""

    skip_logits: bool
    head: Head | None = None
    hidden: Tensor | None = None
    log_prob: Tensor | None = None
    target_log_prob: Tensor | None = None
    loss: Tensor | None = None


class _Calls(threading.local):
    """The innermost call in progress of each thread. The modules hold no state of a call: threads
    share them, and PEFT replaces them by copies."""

    innermost: Call | None = None


_calls = _Calls()


class _NoWeight:
    """The ``weight`` of an :class:`LMHead`: models read its dtype and device. Nothing else works,
    so that no code can train or multiply by a matrix that the head does not have."""

    def __init__(self, head: Head) -> None:
        first = next(head.parameters())
        self.dtype, self.device = first.dtype, first.device
        self._message = (
            f"lm_head.weight: expected a linear lm_head, got {type(head).__name__} of hstree, "
            f"which is not one matrix; use the loss and the logits of the model, "
            f"model(input_ids, labels=labels).loss and model(input_ids).logits"
        )

    def _refuse(self, *args: Any, **options: Any) -> NoReturn:
        raise TypeError(self._message)

    __getitem__ = __len__ = __iter__ = __matmul__ = __rmatmul__ = __torch_function__ = _refuse

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(self._message)


class LMHead(nn.Module):
    """The module that replaces a model's ``lm_head``.

    Its output, the logits of the model, is log P(v | h) of all classes, [..., V]: the softmax of
    these logits is the head's distribution. In a call of the model that skips the logits it returns
    ``hidden``, which the loss takes from the call.
    """

    head: Head
    bias = None  # read by models and libraries

    def __init__(self, head: Head | None = None) -> None:
        super().__init__()
        if head is not None:
            self.head = head

    def forward(self, hidden: Tensor) -> Tensor:
        call = _calls.innermost or Call(skip_logits=False)
        call.head, call.hidden = self.head, hidden
        if call.skip_logits:
            return hidden
        call.log_prob = self.head.log_prob(hidden)
        return call.log_prob

    @property
    def weight(self) -> Any:
        return _NoWeight(self.head)

    @property
    def in_features(self) -> int:
        return self.head.in_features

    @property
    def out_features(self) -> int:
        return self.head.n_classes


class _CausalLM(_Base):  # type: ignore[misc]
    """Overrides of a causal language model whose ``lm_head`` is a :class:`LMHead`."""

    _tied_weights_keys: dict[str, str]
    all_tied_weights_keys: dict[str, str]
    _keys_to_ignore_on_load_unexpected: set[str] | None
    _get_resized_embeddings: Callable[..., nn.Module]

    def __init__(self, config: transformers.PreTrainedConfig, *args: Any, **options: Any) -> None:
        super().__init__(config, *args, **options)
        self.set_output_embeddings(LMHead())
        self._tied_weights_keys, self.all_tied_weights_keys = {}, {}
        # from_pretrained reads these tensors itself and builds the head from them.
        ignored = self._keys_to_ignore_on_load_unexpected or ()
        self._keys_to_ignore_on_load_unexpected = {*ignored, f"^{re.escape(_head_prefix(self))}"}

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "forward" and is_fused(value):  # by a trainer of TRL
            value = score_with_head(value)
        super().__setattr__(name, value)

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(self, *args: Any, skip_logits: bool | None = None, **options: Any) -> Any:
        labelled = options.get("labels") is not None
        if skip_logits and not labelled:
            raise ValueError("skip_logits: expected labels for the loss, got labels=None")
        call = Call(self.training and labelled if skip_logits is None else skip_logits)
        output = self.run(call, *args, **options)
        # The log-probabilities of the head, without a model's soft cap or scale of the logits.
        return type(output)(**{**output, "logits": call.log_prob})

    def run(self, call: Call, *args: Any, **options: Any) -> Any:
        """The forward method of transformers, as the call."""
        outer, _calls.innermost = _calls.innermost, call
        try:
            output = super().forward(*args, return_dict=True, **options)
        finally:
            _calls.innermost = outer
        if call.hidden is None or (options.get("labels") is not None and call.loss is None):
            raise TypeError(
                "model: expected a model that calls its lm_head and computes its loss by "
                f"loss_function, got {type(self).__name__}"
            )
        return output

    @property
    def loss_function(self) -> Any:
        return self._head_loss

    def _head_loss(
        self,
        logits: Tensor,
        labels: Tensor,
        vocab_size: int | None = None,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = _IGNORED,
        shift_labels: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """``ForCausalLMLoss`` of transformers, computed from the hidden vectors, not the logits.
        Outside of a call of the model, computed from the log-probabilities that its logits are."""
        call = _calls.innermost
        if call is None or call.head is None or call.hidden is None:
            given = num_items_in_batch, ignore_index, shift_labels
            loss: Tensor = ForCausalLMLoss(logits, labels, logits.shape[-1], *given)
            return loss
        hidden = call.hidden
        if shift_labels is None:
            shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        ignored = shift_labels == ignore_index
        target = shift_labels.masked_fill(ignored, _IGNORED).to(hidden.device)
        count = (~ignored).sum() if num_items_in_batch is None else num_items_in_batch
        if isinstance(count, Tensor):
            count = count.to(hidden.device)
        call.target_log_prob, total = call.head(hidden, target)
        call.loss = total / count
        return call.loss

    def _resize_token_embeddings(
        self,
        new_num_tokens: int | None = None,
        pad_to_multiple_of: int | None = None,
        mean_resizing: bool = True,
    ) -> Any:
        """Called by ``resize_token_embeddings``."""
        embedding, lm_head = self.get_input_embeddings(), self.get_output_embeddings()
        if not isinstance(lm_head, LMHead):
            raise TypeError(
                f"resize_token_embeddings: expected the head of hstree as lm_head, got "
                f"{type(lm_head).__name__}; resize the model before another library wraps it"
            )
        size = lm_head.out_features if new_num_tokens is None else new_num_tokens
        multiple = pad_to_multiple_of or 1
        size = -(-size // multiple) * multiple
        if size == lm_head.out_features:
            return embedding
        tied = bool(_tied_names(lm_head.head, embedding))
        # transformers resizes in place; the head needs the old rows.
        embedding = self._get_resized_embeddings(
            copy.deepcopy(embedding), size, None, mean_resizing
        ).requires_grad_(embedding.weight.requires_grad)
        old: Any = lm_head.head
        head = old.resized(size, embedding=embedding) if tied else old.resized(size)
        self.set_input_embeddings(embedding)
        _attach(self, head)
        return embedding

    @classmethod
    def from_pretrained(cls, path: str | os.PathLike[str], *args: Any, **options: Any) -> Any:
        loaded = super().from_pretrained(path, *args, **options)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        hub = {name: options[name] for name in HUB_OPTIONS if name in options}
        embedding = model.get_input_embeddings()
        tensors = read_head_tensors(path, _head_prefix(model), hub)
        head = build_head(path, vars(model.config), tensors, embedding)
        _attach(model, head.train(model.training))
        return loaded


@functools.cache
def _with_head(model_class: type[transformers.PreTrainedModel]) -> type[_CausalLM]:
    """The subclass of a model class whose ``lm_head`` is a head of hstree. It has the same name,
    because transformers identifies models by it."""

    @functools.wraps(model_class.forward)  # transformers reads its signature
    def forward(self: Any, *args: Any, **options: Any) -> Any:
        return _CausalLM.forward(self, *args, **options)

    members = {
        "forward": forward,
        "config_class": config_with_head(model_class.config_class),
        "__module__": __name__,
        "__doc__": _CausalLM.__doc__,
    }
    return type(model_class.__name__, (_CausalLM, model_class), members)


def __getattr__(name: str) -> Any:
    """The classes that pickle and torch.save look up by name, such as GPT2LMHeadModel."""
    model_class = getattr(transformers, name, None) if name[:1].isupper() else None
    if isinstance(model_class, type) and issubclass(model_class, transformers.PreTrainedModel):
        return _with_head(model_class)
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
    - ``logits`` are log-probabilities of the head's distribution, [batch, time, V]. Soft caps and
      scales that a model applies to its logits are ignored.
    - The loss is the mean over the labels that are not -100 or, with ``num_items_in_batch``, their
      sum divided by that number, as in transformers. The head's ``reduction`` is set to ``"sum"``.
    - The token embeddings can no longer be resized. They are tied to the output only if the head
      was built with ``embedding=model.get_input_embeddings()``.

    Row-sparse gradients (``TreeEnsemble(sparse=True)``) need an optimizer and a clipping function
    that support them::

        adamw = hstree.optim.AdamW, {"lr": 1e-3}
        trainer = Trainer(model, args, train_dataset=texts, optimizer_cls_and_kwargs=adamw)
        trainer.accelerator.clip_grad_norm_ = hstree.optim.clip_grad_norm_

    Load a model that ``model.save_pretrained`` wrote with :func:`from_pretrained`. The
    ``from_pretrained`` of transformers would create a new linear layer and warn that it is not
    initialized.

    Args:
        model: a model with an ``lm_head`` (``get_output_embeddings()``) that computes its loss by
            ``loss_function``, such as ``GPT2LMHeadModel`` and ``LlamaForCausalLM``.
        head: a head with the features D and classes V of the ``lm_head``, which is moved to its
            device and dtype; or the name of a head, see :func:`hstree.heads.head_names`; None: a
            :class:`hstree.heads.TreeEnsemble` that starts as an approximation of the ``lm_head``,
            by :meth:`~hstree.heads.TreeEnsemble.from_linear`.
        **options: arguments of the head, if ``head`` is a name; of ``from_linear``, if it is None,
            such as ``n_trees``, or ``at``, the mean of some hidden vectors.

    Returns:
        The model.

    Raises:
        TypeError: if ``model`` is not a causal language model of transformers, or ``head`` is not a
            head.
        ValueError: if the model has a head of hstree already, or ``head`` has other sizes.

    Example:
        >>> import torch
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> from hstree.integrations.transformers import from_pretrained, replace_lm_head
        >>> config = GPT2Config(vocab_size=200, n_positions=16, n_embd=16, n_layer=1, n_head=2)
        >>> model = replace_lm_head(GPT2LMHeadModel(config))
        >>> tokens = torch.randint(200, (2, 8))
        >>> model(tokens, labels=tokens).loss.backward()
        >>> model.save_pretrained("gpt2-trees")
        >>> type(from_pretrained("gpt2-trees").lm_head.head).__name__
        'TreeEnsemble'
    """
    if not isinstance(model, transformers.PreTrainedModel):
        raise TypeError(f"model: expected a model of transformers, got {type(model).__name__}")
    linear = model.get_output_embeddings()
    if isinstance(linear, LMHead):
        raise ValueError(f"model: expected a linear lm_head, got {type(linear.head).__name__}")
    if model.config.is_encoder_decoder or getattr(linear, "weight", None) is None:
        raise TypeError(
            f"model: expected a causal language model with an lm_head, got {type(model).__name__}"
        )
    if not _uses_loss_function(type(model)):
        raise TypeError(
            f"model: expected a causal language model that computes its loss by loss_function, got "
            f"{type(model).__name__}"
        )
    n_classes, in_features = linear.weight.shape
    if head is None:
        head = TreeEnsemble.from_linear(linear, **options)
    elif isinstance(head, str):
        head = head_class(head)(in_features, n_classes, **options)
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
        ("ignore_index", _IGNORED),
    ):
        if getattr(head, name) != expected:
            raise ValueError(f"head: expected {name}={expected}, got {getattr(head, name)}")
    _check_tied(head, model)
    model.__class__ = _with_head(model.__class__)
    model.set_output_embeddings(LMHead())
    _attach(model, head.train(model.training))
    return model


def from_pretrained(path: str | os.PathLike[str], **options: Any) -> transformers.PreTrainedModel:
    """Load a model with a head of hstree that ``model.save_pretrained`` wrote.

    Args:
        path: folder, or repository on the hub.
        **options: arguments of ``transformers.AutoModelForCausalLM.from_pretrained``.

    Returns:
        The model, in evaluation mode.

    Raises:
        ValueError: if the model has no head of hstree.
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
    model_class = _with_head(transformers.MODEL_FOR_CAUSAL_LM_MAPPING[body])
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


def _attach(model: transformers.PreTrainedModel, head: Head) -> None:
    """Put a head into a model with an empty :class:`LMHead`."""
    embedding, prefix = model.get_input_embeddings(), _head_prefix(model)
    tied = _tied_names(head, embedding)
    _own_config(model)
    model.get_output_embeddings().head = head.to(embedding.weight.device, embedding.weight.dtype)
    head.reduction = "sum"
    model.config.tie_word_embeddings = bool(tied)
    source = f"{_name_of(model, embedding)}.weight"
    model._tied_weights_keys = {f"{prefix}{name}": source for name in tied}
    model.all_tied_weights_keys = dict(model._tied_weights_keys)
    model.loss_type = "ForCausalLM"  # makes Trainer count the labels that are targets
    setattr(model.config, CONFIG_KEY, {"name": head.name, "config": head.config()})


def _check_tied(head: Head, model: transformers.PreTrainedModel) -> None:
    tied = head.config().get("tied", False)
    if tied and not _tied_names(head, model.get_input_embeddings()):
        raise ValueError(
            "head: expected a head tied to the model's embedding "
            "(embedding=model.get_input_embeddings()), got one tied to another embedding"
        )


def _tied_names(head: Head, embedding: nn.Module) -> list[str]:
    return [name for name, value in head.named_parameters() if value is embedding.weight]


def _name_of(model: nn.Module, module: nn.Module) -> str:
    names: dict[nn.Module, str] = {own: name for name, own in model.named_modules()}
    return names[module]


def _head_prefix(model: transformers.PreTrainedModel) -> str:
    """Prefix of the names of the head's tensors in the state dict of the model."""
    return f"{_name_of(model, model.get_output_embeddings())}.head."


def _own_config(model: transformers.PreTrainedModel) -> None:
    """Give the model a config that other models do not share, and that is saved for hstree."""
    shared = model.config
    if not isinstance(shared, ConfigWithHead):
        config = copy.deepcopy(shared)
        config_class: Any = config_with_head(shared.__class__)
        object.__setattr__(config, "__class__", config_class)
        for module in model.modules():
            if getattr(module, "config", None) is shared:
                module.config = config


def _uses_loss_function(model_class: type) -> bool:
    """Whether a forward method reads ``self.loss_function``."""
    methods = [vars(each)["forward"] for each in model_class.__mro__ if "forward" in vars(each)]
    codes = [getattr(inspect.unwrap(method), "__code__", None) for method in methods]
    return any(code is not None and "loss_function" in code.co_names for code in codes)
