"""Causal language models of transformers whose ``lm_head`` is a head of hstree."""

from __future__ import annotations

import copy
import functools
import inspect
import os
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.utils.generic import can_return_tuple

from hstree.heads import Head
from hstree.heads.tying import tied_names
from hstree.integrations.transformers.files import (
    CONFIG_KEY,
    HUB_OPTIONS,
    ConfigWithHead,
    config_with_head,
    read_head_tensors,
    saved_head,
)
from hstree.integrations.transformers.lm_head import Call, LMHead, calls
from hstree.integrations.transformers.trl import is_fused, score_with_head

if TYPE_CHECKING:
    from transformers import PreTrainedModel as _Base
else:
    _Base = object

IGNORED = -100  # the value of transformers


class CausalLM(_Base):  # type: ignore[misc]
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
        outer, calls.innermost = calls.innermost, call
        try:
            output = super().forward(*args, return_dict=True, **options)
        finally:
            calls.innermost = outer
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
        ignore_index: int = IGNORED,
        shift_labels: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """``ForCausalLMLoss`` of transformers, computed from the hidden vectors, not the logits.
        Outside of a call of the model, computed from the log-probabilities that its logits are."""
        call = calls.innermost
        if call is None or call.head is None or call.hidden is None:
            given = num_items_in_batch, ignore_index, shift_labels
            loss: Tensor = ForCausalLMLoss(logits, labels, logits.shape[-1], *given)
            return loss
        hidden = call.hidden
        if shift_labels is None:
            shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        ignored = shift_labels == ignore_index
        target = shift_labels.masked_fill(ignored, IGNORED).to(hidden.device)
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
        tied = bool(tied_names(lm_head.head, embedding))
        # transformers resizes in place; the head needs the old rows.
        embedding = self._get_resized_embeddings(
            copy.deepcopy(embedding), size, None, mean_resizing
        ).requires_grad_(embedding.weight.requires_grad)
        old: Any = lm_head.head
        head = old.resized(size, embedding=embedding) if tied else old.resized(size)
        self.set_input_embeddings(embedding)
        attach(self, head)
        return embedding

    @classmethod
    def from_pretrained(cls, path: str | os.PathLike[str], *args: Any, **options: Any) -> Any:
        loaded = super().from_pretrained(path, *args, **options)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        hub = {name: options[name] for name in HUB_OPTIONS if name in options}
        embedding = model.get_input_embeddings()
        tensors = read_head_tensors(path, _head_prefix(model), hub)
        head = saved_head(path, vars(model.config), tensors, embedding)
        attach(model, head.train(model.training))
        return loaded


@functools.cache
def with_head(model_class: type[transformers.PreTrainedModel]) -> type[CausalLM]:
    """The subclass of a model class whose ``lm_head`` is a head of hstree. It has the same name,
    because transformers identifies models by it."""

    @functools.wraps(model_class.forward)  # transformers reads its signature
    def forward(self: Any, *args: Any, **options: Any) -> Any:
        return CausalLM.forward(self, *args, **options)

    members = {
        "forward": forward,
        "config_class": config_with_head(model_class.config_class),
        "__module__": __package__,
        "__doc__": CausalLM.__doc__,
    }
    return type(model_class.__name__, (CausalLM, model_class), members)


def attach(model: transformers.PreTrainedModel, head: Head) -> None:
    """Put a head into a model with an empty :class:`LMHead`."""
    embedding, prefix = model.get_input_embeddings(), _head_prefix(model)
    tied = tied_names(head, embedding)
    _own_config(model)
    lm_head: LMHead = model.get_output_embeddings()
    lm_head.head = head.to(embedding.weight.device, embedding.weight.dtype)
    head.reduction = "sum"
    model.config.tie_word_embeddings = bool(tied)
    source = f"{_name_of(model, embedding)}.weight"
    model._tied_weights_keys = {f"{prefix}{name}": source for name in tied}
    model.all_tied_weights_keys = dict(model._tied_weights_keys)
    model.loss_type = "ForCausalLM"  # makes Trainer count the labels that are targets
    setattr(model.config, CONFIG_KEY, {"name": head.name, "config": head.config()})


def check_tied(head: Head, model: transformers.PreTrainedModel) -> None:
    tied = head.config().get("tied", False)
    if tied and not tied_names(head, model.get_input_embeddings()):
        raise ValueError(
            "head: expected a head tied to the model's embedding "
            "(embedding=model.get_input_embeddings()), got one tied to another embedding"
        )


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


def uses_loss_function(model_class: type) -> bool:
    """Whether a forward method reads ``self.loss_function``."""
    methods = [vars(each)["forward"] for each in model_class.__mro__ if "forward" in vars(each)]
    codes = [getattr(inspect.unwrap(method), "__code__", None) for method in methods]
    return any(code is not None and "loss_function" in code.co_names for code in codes)
