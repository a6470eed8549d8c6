"""Heads of hstree as the ``lm_head`` of causal language models of Hugging Face transformers."""

from __future__ import annotations

import functools
import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch.nn.functional as F
from torch import Tensor, nn

from hstree._files import read_tensors
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
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file
from transformers.utils.generic import can_return_tuple
from transformers.utils.hub import get_checkpoint_shard_files

if TYPE_CHECKING:
    from transformers import PreTrainedModel as _Base
else:
    _Base = object

CONFIG_KEY = "hstree_head"
"""Under which a model's config holds the name and the configuration of its head."""

_IGNORED = -100  # transformers' own
_HUB_OPTIONS = ("cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token")


@dataclass
class _Call:
    """One forward call of a model, as its :class:`LMHead` and its loss see it."""

    skip_logits: bool
    hidden: Tensor | None = None
    log_prob: Tensor | None = None
    loss: Tensor | None = None


class LMHead(nn.Module):
    """The module in the place of a model's ``lm_head``.

    Its output, where the model has its logits, is log P(v | h) of all classes, [..., V]: logits
    whose softmax is the head's distribution. In a call of the model that skips the logits it hands
    ``hidden`` on to the loss.
    """

    head: Head

    def __init__(self, head: Head | None = None) -> None:
        super().__init__()
        self.call: _Call | None = None
        if head is not None:
            self.head = head

    def forward(self, hidden: Tensor) -> Tensor:
        call = self.call or _Call(skip_logits=False)
        call.hidden = hidden
        if call.skip_logits:
            return hidden
        call.log_prob = self.head.log_prob(hidden)
        return call.log_prob


class _CausalLM(_Base):  # type: ignore[misc]
    """Overrides of a causal language model, for an ``lm_head`` that is a :class:`LMHead`."""

    _tied_weights_keys: dict[str, str]
    all_tied_weights_keys: dict[str, str]
    _keys_to_ignore_on_load_unexpected: set[str] | None

    def __init__(self, config: transformers.PreTrainedConfig, *args: Any, **options: Any) -> None:
        super().__init__(config, *args, **options)
        self.set_output_embeddings(LMHead())
        self._tied_weights_keys, self.all_tied_weights_keys = {}, {}
        # from_pretrained reads them: a head is built from its tensors.
        ignored = self._keys_to_ignore_on_load_unexpected or ()
        self._keys_to_ignore_on_load_unexpected = {*ignored, f"^{re.escape(_head_prefix(self))}"}

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(self, *args: Any, skip_logits: bool | None = None, **options: Any) -> Any:
        labelled = options.get("labels") is not None
        if skip_logits and not labelled:
            raise ValueError("skip_logits: expected labels, without which there is no loss")
        call = _Call(self.training and labelled if skip_logits is None else skip_logits)
        lm_head = self.get_output_embeddings()
        lm_head.call = call
        try:
            output = super().forward(*args, return_dict=True, **options)
        finally:
            lm_head.call = None
        if labelled and call.loss is None:
            raise TypeError(
                f"model: expected one that takes its loss from loss_function, which "
                f"{type(self).__name__} does not"
            )
        # Log-probabilities as the head gave them, without a model's soft cap or scale of logits.
        return type(output)(**{**output, "logits": call.log_prob})

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
        """As transformers' ``ForCausalLMLoss``, of the hidden vectors instead of the logits."""
        lm_head = self.get_output_embeddings()
        hidden = lm_head.call.hidden
        if shift_labels is None:
            shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        ignored = shift_labels == ignore_index
        target = shift_labels.masked_fill(ignored, _IGNORED).to(hidden.device)
        count = (~ignored).sum() if num_items_in_batch is None else num_items_in_batch
        if isinstance(count, Tensor):
            count = count.to(hidden.device)
        loss: Tensor = lm_head.head(hidden, target).loss / count
        lm_head.call.loss = loss
        return loss

    def resize_token_embeddings(
        self,
        new_num_tokens: int | None = None,
        pad_to_multiple_of: int | None = None,
        mean_resizing: bool = True,
    ) -> Any:
        head = self.get_output_embeddings().head
        if new_num_tokens not in (None, head.n_classes) or pad_to_multiple_of is not None:
            raise ValueError(
                f"new_num_tokens: expected {head.n_classes}, the classes of the model's "
                f"{type(head).__name__}, which cannot be resized, got {new_num_tokens} "
                f"(pad_to_multiple_of {pad_to_multiple_of}); resize the model before "
                f"replace_lm_head, which then makes a head of the new size"
            )
        return self.get_input_embeddings()

    @classmethod
    def from_pretrained(cls, path: str | os.PathLike[str], *args: Any, **options: Any) -> Any:
        loaded = super().from_pretrained(path, *args, **options)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        hub = {name: options[name] for name in _HUB_OPTIONS if name in options}
        tensors = _head_tensors(path, _head_prefix(model), hub)
        saved, embedding = getattr(model.config, CONFIG_KEY), model.get_input_embeddings()
        head = head_class(saved["name"]).from_config(saved["config"], tensors, embedding)
        tensors |= dict.fromkeys(_tied_names(head, embedding), embedding.weight)
        head.load_state_dict(tensors, assign=True)
        _attach(model, head.train(model.training))
        return loaded


@functools.cache
def _with_head(model_class: type[transformers.PreTrainedModel]) -> type[_CausalLM]:
    """The subclass of a class of models whose ``lm_head`` is a head of hstree. It keeps its name,
    by which transformers knows what a model is."""

    @functools.wraps(model_class.forward)  # transformers reads its signature
    def forward(self: Any, *args: Any, **options: Any) -> Any:
        return _CausalLM.forward(self, *args, **options)

    members = {"forward": forward, "__module__": __name__, "__doc__": _CausalLM.__doc__}
    return type(model_class.__name__, (_CausalLM, model_class), members)


def __getattr__(name: str) -> Any:
    """The classes that pickle and torch.save name, such as GPT2LMHeadModel."""
    model_class = getattr(transformers, name, None) if name[:1].isupper() else None
    if isinstance(model_class, type) and issubclass(model_class, transformers.PreTrainedModel):
        return _with_head(model_class)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def replace_lm_head(
    model: transformers.PreTrainedModel, head: Head | str | None = None, **options: Any
) -> transformers.PreTrainedModel:
    r"""Make a head of hstree the ``lm_head`` of a causal language model, in place.

    The model is used as before: ``Trainer``, ``generate``, ``save_pretrained``. What changes:

    - ``model(input_ids, labels=labels).loss`` comes from the head. With ``labels`` in training no
      logits are computed, and ``logits`` is None: a step makes no tensor of [batch, time, V].
      ``skip_logits=True`` or ``False`` among the inputs chooses otherwise, for example in an
      evaluation that wants the loss alone.
    - ``logits`` are log-probabilities, [batch, time, V], of the head's distribution. Soft caps and
      scales with which a model changes its logits do not apply.
    - The loss is a mean over the labels that are not -100, or with ``num_items_in_batch`` the sum
      over them divided by that number, as in transformers. The head's ``reduction`` becomes
      ``"sum"`` for it.
    - Token embeddings are tied to the output only by a head that is built with
      ``embedding=model.get_input_embeddings()``, and can no longer be resized.

    Row-sparse gradients (``TreeEnsemble(sparse=True)``) need an optimizer that takes them, and a
    ``Trainer`` whose clipping does too::

        adamw = hstree.optim.AdamW, {"lr": 1e-3}
        trainer = Trainer(model, args, train_dataset=texts, optimizer_cls_and_kwargs=adamw)
        trainer.accelerator.clip_grad_norm_ = hstree.optim.clip_grad_norm_

    :func:`from_pretrained` loads what ``model.save_pretrained`` wrote; transformers' own
    ``from_pretrained`` would make a new linear layer, and say that it is not initialized.

    Args:
        model: with an ``lm_head`` (``get_output_embeddings()``) and a loss from ``loss_function``,
            such as ``GPT2LMHeadModel`` and ``LlamaForCausalLM``.
        head: of D features and V classes, those of the ``lm_head``, whose device and dtype it gets;
            or the name of one, see :func:`hstree.heads.head_names`; None: a
            :class:`hstree.heads.TreeEnsemble` that begins as an approximation of the ``lm_head``,
            by :meth:`~hstree.heads.TreeEnsemble.from_linear`.
        options: of the head, where it is not given; for an approximation those of ``from_linear``,
            such as ``at``, the mean of some hidden vectors, and ``n_trees``.

    Returns:
        The model.

    Raises:
        TypeError: ``model`` is not a causal language model of transformers, ``head`` no head.
        ValueError: it has a head of hstree already, or ``head`` does not fit.

    Example:
        >>> model = AutoModelForCausalLM.from_pretrained("gpt2")
        >>> replace_lm_head(model)
        >>> Trainer(model, TrainingArguments(), train_dataset=texts).train()
        >>> model.save_pretrained("gpt2-trees")
        >>> model = hstree.integrations.transformers.from_pretrained("gpt2-trees")
    """
    if not isinstance(model, transformers.PreTrainedModel):
        raise TypeError(f"model: expected one of transformers, got {type(model).__name__}")
    linear = model.get_output_embeddings()
    if isinstance(linear, LMHead):
        raise ValueError(f"model: expected a linear lm_head, got {type(linear.head).__name__}")
    if model.config.is_encoder_decoder or getattr(linear, "weight", None) is None:
        raise TypeError(
            f"model: expected a causal language model with an lm_head, got {type(model).__name__}"
        )
    n_classes, in_features = linear.weight.shape
    if head is None:
        head = TreeEnsemble.from_linear(linear, **options)
    elif isinstance(head, str):
        head = head_class(head)(in_features, n_classes, **options)
    elif not isinstance(head, Head):
        raise TypeError(
            f"head: expected one of hstree, its name or None, got {type(head).__name__}"
        )
    elif options:
        raise ValueError(f"{next(iter(options))}: expected no options beside a head")
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
        options: those of ``transformers.AutoModelForCausalLM.from_pretrained``.

    Raises:
        ValueError: the model has no head of hstree.
        OSError: there are no such files.
    """
    hub = {name: options[name] for name in _HUB_OPTIONS if name in options}
    config = options.get("config") or transformers.AutoConfig.from_pretrained(path, **hub)
    if not hasattr(config, CONFIG_KEY):
        raise ValueError(
            f"path: expected a model with a head of hstree, got {os.fspath(path)}, whose config "
            f"has no {CONFIG_KEY}"
        )
    model_class = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    model: transformers.PreTrainedModel = _with_head(model_class).from_pretrained(path, **options)
    return model


def _attach(model: transformers.PreTrainedModel, head: Head) -> None:
    """Put a head into a model with an empty :class:`LMHead`."""
    embedding, prefix = model.get_input_embeddings(), _head_prefix(model)
    tied = _tied_names(head, embedding)
    model.get_output_embeddings().head = head.to(embedding.weight.device, embedding.weight.dtype)
    head.reduction = "sum"
    model.config.tie_word_embeddings = bool(tied)
    source = f"{_name_of(model, embedding)}.weight"
    model._tied_weights_keys = {f"{prefix}{name}": source for name in tied}
    model.all_tied_weights_keys = dict(model._tied_weights_keys)
    model.loss_type = "ForCausalLM"  # Trainer then counts the labels that are targets
    setattr(model.config, CONFIG_KEY, {"name": head.name, "config": head.config()})


def _check_tied(head: Head, model: transformers.PreTrainedModel) -> None:
    tied = head.config().get("tied", False)
    if tied and not _tied_names(head, model.get_input_embeddings()):
        raise ValueError(
            "head: expected one tied to the model's embedding, "
            "embedding=model.get_input_embeddings(), got one tied to another"
        )


def _tied_names(head: Head, embedding: nn.Module) -> list[str]:
    return [name for name, value in head.named_parameters() if value is embedding.weight]


def _name_of(model: nn.Module, module: nn.Module) -> str:
    names: dict[nn.Module, str] = {own: name for name, own in model.named_modules()}
    return names[module]


def _head_prefix(model: transformers.PreTrainedModel) -> str:
    """With which the names of the head's tensors begin in the state dict of the model."""
    return f"{_name_of(model, model.get_output_embeddings())}.head."


def _head_tensors(
    path: str | os.PathLike[str], prefix: str, hub: dict[str, Any]
) -> dict[str, Tensor]:
    """The tensors of a saved model whose names begin with a prefix, without it."""
    try:
        index = cached_file(path, SAFE_WEIGHTS_INDEX_NAME, **hub)
    except OSError:
        files = [cached_file(path, SAFE_WEIGHTS_NAME, **hub)]
    else:
        files, _ = get_checkpoint_shard_files(path, index, **hub)
    return {
        name: tensor for file in files for name, tensor in read_tensors(file, prefix)[0].items()
    }
