"""Heads of hstree in models of Hugging Face transformers."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

try:
    import transformers
except ModuleNotFoundError as error:
    if error.name != "transformers":
        raise
    raise ImportError(
        "hstree.transformers needs the package transformers: pip install 'hstree[transformers]'"
    ) from None
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import cached_file, logging

from hstree._files import read_tensors, tensor_names
from hstree.deferred import DeferredHead, defer_logits, is_of_layer, undefer
from hstree.heads import ForestSoftmax, Head, SampledSoftmax, ScreenedSoftmax, Softmax
from hstree.heads.registry import build_head, head_class, head_options, saved_head
from hstree.heads.state import tied_names

__all__ = ["accelerate_lm_head", "from_pretrained", "replace_lm_head"]

CONFIG_KEY = "hstree_head"
"""Key of the head's name and configuration in the config.json of a saved model."""


def replace_lm_head(
    model: PreTrainedModel, head: Head | str | None = None, **options: Any
) -> PreTrainedModel:
    r"""Give a model of transformers a loss without logits, or another output layer, in place.

    The model keeps its class, and its output layer (``get_output_embeddings()``) its module, unless
    the head has parameters of its own. Its logits are computed when something reads them, and not
    for its loss: see :func:`hstree.defer_logits`. ``Trainer``, ``generate``, PEFT, TRL and
    ``save_pretrained`` work as before. Loss and logits are the model's for None and ``"softmax"``;
    for ``"sampled"`` the loss in training mode is an estimate. Those three have no parameters, and
    their saved folder is the plain model's.

    Other heads take the place of the output layer. The logits are then the head's scores
    (:meth:`hstree.heads.Head.scores`), or log P(v | h) of a head that has none, and the loss is the
    head's. Load a folder of such a model with :func:`from_pretrained`, or with
    ``AutoModelForCausalLM.from_pretrained(path, trust_remote_code=True)``.

    The model is run on a few tokens before and after. Where loss, logits or a gradient differ, it
    is given back as it was.

    Row-sparse gradients (``TreeEnsemble(sparse=True)``) need an optimizer and a clipping function
    that support them::

        adamw = hstree.optim.AdamW, {"lr": 1e-3}
        trainer = Trainer(model, args, train_dataset=texts, optimizer_cls_and_kwargs=adamw)
        trainer.accelerator.clip_grad_norm_ = hstree.optim.clip_grad_norm_

    Args:
        model: a model with a linear output layer, for text or for text and images.
        head: None: the model's own softmax. A name (:func:`hstree.heads.head_names`): a head by
            :func:`hstree.heads.build_head`; ``"sampled"`` and ``"forest"`` start as the softmax of
            the output layer, others are untrained. Or a head with the features D and classes V of
            the output layer, which is moved to its device and dtype.
        **options: arguments of ``build_head``, such as ``frequencies``, counts of the V rows of the
            output layer, 0 for rows without a token.

    Returns:
        The model.

    Raises:
        TypeError: if ``model`` is no model of transformers or has no linear output layer, or
            ``head`` is no head.
        ValueError: if the model is changed already, an option or size is wrong, the model changes
            the logits of a head with parameters (a soft cap, a factor), or the check fails.

    Example:
        >>> import torch
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> from hstree.transformers import replace_lm_head
        >>> config = GPT2Config(vocab_size=200, n_positions=16, n_embd=16, n_layer=1, n_head=2)
        >>> model = replace_lm_head(GPT2LMHeadModel(config), "mos", components=3)
        >>> tokens = torch.randint(200, (2, 8))
        >>> model(tokens, labels=tokens).loss.backward()
    """
    layer = _output_layer(model)
    made = _build(model, layer, head, options)
    if not is_of_layer(made):
        _put_head(model, layer, made)
        return model
    plain = _checked(model, layer)
    try:
        if plain is not None:
            _compare(model, plain, _outputs(model, defer_logits(layer), 0))
            undefer(layer)
        defer_logits(layer, made)
        if plain is not None:
            _outputs(model, layer, 0)  # raises what the loss of the head does
    except BaseException:
        if hasattr(layer, "deferral"):
            undefer(layer)
        raise
    return model


def accelerate_lm_head(
    model: PreTrainedModel, contexts: Any = None, **options: Any
) -> PreTrainedModel:
    """Screen the output layer of a model, so that it generates faster, in place.

    Without gradients and in evaluation mode, the logits of one position are those of a
    :class:`hstree.heads.ScreenedSoftmax`, on the model's scale: exact for the words with the best
    previews, previews for all others. The loss, its gradients and the logits of texts stay exact,
    and the saved folder is the plain model's. If the weight changes afterwards, generation raises
    an error: call this function again.

    Args:
        model: a model that :func:`replace_lm_head` takes.
        contexts: a few thousand tokens of texts like those to generate, int64 [n, time] without
            padding, or the hidden vectors that the output layer reads for them, [..., D]. None: see
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
        >>> from hstree.transformers import accelerate_lm_head
        >>> config = GPT2Config(vocab_size=200, n_positions=16, n_embd=16, n_layer=1, n_head=2)
        >>> model, tokens = GPT2LMHeadModel(config).eval(), torch.randint(200, (8, 16))
        >>> model = accelerate_lm_head(model, tokens)
        >>> model.generate(tokens[:1, :4], max_new_tokens=8, do_sample=False).shape
        torch.Size([1, 12])
    """
    layer: Any = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
    if hasattr(layer, "deferral"):
        undefer(layer)
    layer = _output_layer(model)
    if contexts is not None and not isinstance(contexts, Tensor):
        name = model.name_or_path or "NAME"
        raise TypeError(
            f"contexts: expected tokens int64 [n, time] or hidden vectors, got "
            f"{type(contexts).__name__}; make tokens of texts with the model's tokenizer: "
            f"AutoTokenizer.from_pretrained({name!r})(text, return_tensors='pt').input_ids"
        )
    if contexts is not None and not contexts.is_floating_point():
        if model.config.is_encoder_decoder:
            raise ValueError(
                f"contexts: expected the hidden vectors of the decoder for {type(model).__name__}, "
                "an encoder and a decoder, got tokens"
            )
        if contexts.dim() != 2:
            raise ValueError(
                f"contexts: expected tokens [n, time], got the shape {list(contexts.shape)}"
            )
        contexts = _hidden_states(model, layer, contexts)
    return replace_lm_head(model, ScreenedSoftmax.from_linear(layer, contexts, **options).eval())


def _output_layer(model: Any) -> nn.Linear:
    """The output layer of a model that :func:`replace_lm_head` takes."""
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model: expected a model of transformers, got {type(model).__name__}")
    layer: Any = model.get_output_embeddings()
    if isinstance(layer, DeferredHead) or hasattr(layer, "deferral"):
        raise ValueError(
            f"model: expected a model with its own output layer, got {type(model).__name__} that "
            "was changed before; hstree.undefer(model.get_output_embeddings()) gives a deferred "
            "layer back"
        )
    if not isinstance(layer, nn.Linear):
        raise TypeError(
            f"model: expected a model with a linear output layer, got {type(model).__name__} with "
            f"{'none' if layer is None else type(layer).__name__}; call this function before other "
            "libraries wrap the layer"
        )
    return layer


def _build(
    model: PreTrainedModel, layer: nn.Linear, head: Head | str | None, options: dict[str, Any]
) -> Head:
    classes, features = layer.weight.shape
    counts = options.get("frequencies")
    if counts is not None and len(counts) != classes:
        raise ValueError(
            f"frequencies: expected {classes} counts, one for each row of the output layer (0 for "
            f"a row without a token), got {len(counts)}"
        )
    if isinstance(head, Head):
        if options:
            name = next(iter(options))
            raise ValueError(f"{name}: expected no options together with a head, got {name}=...")
        for name, expected in (("in_features", features), ("n_classes", classes)):
            if getattr(head, name) != expected:
                raise ValueError(f"head: expected {name}={expected}, got {getattr(head, name)}")
        of_other = not is_of_layer(head) and head.config().get("tied", False)
        if of_other and not tied_names(head, model.get_input_embeddings()):
            raise ValueError(
                "head: expected a head tied to the model's embedding "
                "(embedding=model.get_input_embeddings()), got one tied to another embedding"
            )
        return head if is_of_layer(head) else head.to(layer.weight.device, layer.weight.dtype)
    name = "softmax" if head is None else head
    if not isinstance(name, str):
        raise TypeError(
            f"head: expected a head of hstree, its name or None, got {type(head).__name__}"
        )
    kind = head_class(name)
    of_layer = kind in (Softmax, SampledSoftmax)
    embedding = model.get_input_embeddings()
    if of_layer:
        options = {"embedding": layer, "bias": layer.bias is not None} | options
    elif layer.weight is getattr(embedding, "weight", None) and "embedding" in head_options(name):
        options = {"embedding": embedding} | options
    if issubclass(kind, ForestSoftmax):
        options = {"bias": layer.bias is not None} | options
        if not {"tokens", "trees"} & options.keys():
            options = {"vectors": layer.weight} | options
    made = build_head(name, features, classes, **options)
    if isinstance(made, ForestSoftmax):
        made.copy_linear(layer)
    return made if of_layer else made.to(layer.weight.device, layer.weight.dtype)


# The check.

_Outputs = dict[str, Tensor]


def _outputs(model: PreTrainedModel, layer: Any, least: float | None = None) -> _Outputs:
    """Loss, logits, gradient of what the output layer reads, and its output, for a few tokens, some
    of them without a label, in training mode; the same random numbers in every call. ``least``:
    number of logits from which they are deferred."""
    seen: list[Tensor] = []

    def keep(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        seen[:] = [inputs[0].detach().requires_grad_()]
        return (seen[0], *inputs[1:])

    rows = min(model.get_input_embeddings().weight.shape[0], layer.out_features)
    # Low numbers: those of images and the like are high.
    tokens = ((torch.arange(16) * 7 + 5) % min(rows, 100)).view(2, 8).to(model.device)
    labels = tokens.clone()
    labels[0, :3] = -100
    state = getattr(layer, "deferral", layer)
    before = getattr(state, "least", None)
    if least is not None:
        state.least = least
    hooks = [layer.register_forward_pre_hook(keep)]
    hooks += [layer.register_forward_hook(lambda module, inputs, output: seen.append(output))]
    try:
        with _mode(model, True), torch.enable_grad(), torch.random.fork_rng():
            torch.manual_seed(0)
            out = model(input_ids=tokens, labels=labels)
            (gradient,) = torch.autograd.grad(out.loss, seen[0])
        with torch.no_grad():
            found = {"loss": out.loss, "logits": out.logits, "gradient": gradient, "of": seen[1]}
            return {name: value + 0 for name, value in found.items()}
    finally:
        if least is not None:
            state.least = before
        for hook in hooks:
            hook.remove()


def _checked(model: PreTrainedModel, layer: Any, least: float | None = None) -> _Outputs | None:
    """:func:`_outputs`; None, with a warning, for a model that takes more than tokens."""
    try:
        return _outputs(model, layer, least)
    except Exception as error:
        warnings.warn(
            f"{type(model).__name__} was not compared before and after, as it does not run on "
            f"tokens and labels alone: {type(error).__name__}: {str(error)[:200]}",
            stacklevel=4,
        )
        return None


def _compare(
    model: PreTrainedModel,
    before: _Outputs,
    after: _Outputs,
    names: tuple[str, ...] = ("loss", "logits", "gradient"),
) -> None:
    for name in names:
        a, b = before[name], after[name]
        low = 3e-2 if min(a.element_size(), b.element_size()) < 4 else 1e-3
        a, b = a.double(), b.double()
        if a.shape != b.shape or not (a - b).norm() <= low * a.norm() + 1e-5:
            raise ValueError(
                f"model: expected the {name} of {type(model).__name__} to stay what it was, got "
                f"{b.flatten()[:3].tolist()} for {a.flatten()[:3].tolist()} on a few tokens; the "
                "model is given back as it was"
            )


@contextmanager
def _mode(model: nn.Module, training: bool) -> Iterator[None]:
    """Training or evaluation mode, temporarily; what calls leave in modules goes, too."""
    modules = [(module, dict(vars(module))) for module in model.modules()]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        model.train(training)
        yield
    finally:
        for module, attributes in modules:
            vars(module).clear()
            vars(module).update(attributes)
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)


def _hidden_states(model: PreTrainedModel, layer: nn.Module, tokens: Tensor) -> Tensor:
    """What the output layer reads for texts: tokens int64 [n, time], result [n, time, D]."""
    found: list[Tensor] = []

    def keep(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        found.append(inputs[0])
        return (inputs[0][:, :1],)  # the logits of one token alone

    hook = layer.register_forward_pre_hook(keep)
    try:
        with _mode(model, False), torch.no_grad():
            for row in tokens.to(model.device):
                model(row[None], use_cache=False)
    finally:
        hook.remove()
    return torch.cat(found)


# Heads with parameters of their own: their place in the model, and its folder.


def _put_head(model: PreTrainedModel, layer: nn.Linear, head: Head) -> None:
    """Put a head into the place of the output layer, if the model takes its scores as they are."""
    tied = dict(model.all_tied_weights_keys)
    new: Any = defer_logits(layer, head)
    hooks = [_attach(model, new)]
    try:
        plain = _checked(model, new, float("inf"))
        if plain is None:
            return
        try:
            _compare(model, {"logits": plain["of"]}, plain, ("logits",))
        except ValueError:
            raise ValueError(
                f"head: expected None, 'softmax' or 'sampled' for {type(model).__name__}, which "
                f"changes what its output layer gives (a factor, a soft cap), got {head.name!r}, "
                "whose distribution would no longer be its own"
            ) from None
        sampled = head.samples_in_training
        exact = not (sampled or head.z_loss or head.label_smoothing)
        exact = exact and head.class_weight is None
        deferred = _outputs(model, new, 0)
        _compare(model, plain, deferred, ("loss", "logits", "gradient") if exact else ("logits",))
    except BaseException:
        del model.save_pretrained, model.resize_token_embeddings
        for hook in hooks:
            hook.remove()
        model.set_output_embeddings(layer)
        model.all_tied_weights_keys = tied
        raise


def _attach(model: PreTrainedModel, new: DeferredHead) -> Any:
    """Put the head into the model; returns the handle of a hook."""
    model.set_output_embeddings(new.train(model.training))
    name = _name_of(model, new)
    keys = model.all_tied_weights_keys
    model.all_tied_weights_keys = {k: v for k, v in keys.items() if not k.startswith(f"{name}.")}
    model.save_pretrained, model.resize_token_embeddings = _Saver(model), _Resizer(model)
    return model.register_load_state_dict_pre_hook(_check_names)


def _name_of(model: nn.Module, module: nn.Module) -> str:
    names: dict[nn.Module, str] = {own: name for name, own in model.named_modules()}
    return names[module]


class _Saver:
    """``save_pretrained`` of a model with a head of its own."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model

    def __call__(self, save_directory: str | os.PathLike[str], *args: Any, **options: Any) -> None:
        if options.get("push_to_hub"):
            raise ValueError("push_to_hub: expected False, got True; call model.push_to_hub")
        layer = self.model.get_output_embeddings()
        if not isinstance(layer, DeferredHead):
            raise TypeError(
                "save_pretrained: expected the head of hstree as output layer, got "
                f"{type(layer).__name__}; save the model without what wraps it"
            )
        head, embedding = layer.head, self.model.get_input_embeddings()
        state = options.pop("state_dict", None)
        state = dict(self.model.state_dict() if state is None else state)
        place = f"{_name_of(self.model, layer)}.head."
        for name in tied_names(head, embedding):  # saved as the embedding
            state.pop(f"{place}{name}", None)
        names = [key.removeprefix(place) for key in state if key.startswith(place)]
        type(self.model).save_pretrained(
            self.model, save_directory, *args, state_dict=state, **options
        )
        if not options.get("is_main_process", True):
            return
        folder = Path(save_directory)
        (folder / "modeling_hstree.py").write_text(_CODE, encoding="utf-8")
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        entry = {"name": head.name, "config": head.config(), "tensors": names}
        entry |= {name: config[key] for key, name in _SAVED.items() if key in config}
        text = json.dumps(config | _WRITTEN | {CONFIG_KEY: entry}, indent=2, sort_keys=True)
        (folder / "config.json").write_text(text + "\n", encoding="utf-8")


class _Resizer:
    """``resize_token_embeddings`` of a model with a head of its own."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model

    def __call__(
        self,
        new_num_tokens: int | None = None,
        pad_to_multiple_of: int | None = None,
        mean_resizing: bool = True,
    ) -> Any:
        head: Head = self.model.get_output_embeddings().head
        size = head.n_classes if new_num_tokens is None else new_num_tokens
        size = -(-size // (pad_to_multiple_of or 1)) * (pad_to_multiple_of or 1)
        if size != head.n_classes:
            raise ValueError(
                f"new_num_tokens: expected {head.n_classes}, got {size}, since the output layer is "
                f"a head of its own, got {type(head).__name__}; resize the model before "
                "replace_lm_head"
            )
        return self.model.get_input_embeddings()


_CODE = '''\
"""The output layer of this model is a head of hstree: pip install 'hstree[transformers]'"""

from hstree.transformers import HeadConfig, HeadForCausalLM
'''

_WRITTEN = {
    # Transformers knows no model of this type and follows auto_map, if trust_remote_code is True.
    "model_type": "hstree",
    "auto_map": {
        "AutoConfig": "modeling_hstree.HeadConfig",
        "AutoModelForCausalLM": "modeling_hstree.HeadForCausalLM",
        "AutoModelForImageTextToText": "modeling_hstree.HeadForCausalLM",
    },
    # GPT2LMHeadModel.from_pretrained would only warn of the type and make a random lm_head. Its
    # config class accepts no string here: the error that it raises shows this sentence.
    "tie_word_embeddings": (
        "The output layer of this model is a head of hstree: pip install 'hstree[transformers]', "
        "then load it with hstree.transformers.from_pretrained or "
        "AutoModelForCausalLM.from_pretrained(..., trust_remote_code=True)."
    ),
}
"""Written over the values of a config, which are saved with the head."""

_SAVED = {"model_type": "body_type", "tie_word_embeddings": "tie_word_embeddings"}
"""Those values and their names in the entry of the head. Transformers would take an entry with the
model_type of a class for the config of that class."""

_HUB = ("cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token")


def from_pretrained(path: str | os.PathLike[str], **options: Any) -> Any:
    """Load a model with a head of its own that ``model.save_pretrained`` wrote.

    Args:
        path: folder, or repository on the hub.
        **options: arguments of ``from_pretrained`` of the model's class.

    Returns:
        The model, in evaluation mode; with ``output_loading_info=True`` the information, too.

    Raises:
        ValueError: if the model has no head of hstree, or a damaged one.
        OSError: if the files do not exist.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> from hstree.transformers import from_pretrained, replace_lm_head
        >>> config = GPT2Config(vocab_size=200, n_positions=16, n_embd=16, n_layer=1, n_head=2)
        >>> model = replace_lm_head(GPT2LMHeadModel(config), "mos", components=3)
        >>> model.save_pretrained("gpt2-mos")
        >>> from_pretrained("gpt2-mos").lm_head.head.n_components
        3
    """
    hub = {name: options[name] for name in _HUB if name in options}
    config_file = f"{os.fspath(path)}/config.json"
    raw, _ = PreTrainedConfig.get_config_dict(path, **hub)
    entry = _entry(path, config_file, raw)
    for key in _WRITTEN:
        raw.pop(key, None)
    raw |= {key: entry.pop(name) for key, name in _SAVED.items() if name in entry}
    del raw[CONFIG_KEY]
    name = next(iter(raw.get("architectures") or ()), None)
    model_class = getattr(transformers, name, None) if isinstance(name, str) else None
    if raw.get("model_type") not in transformers.CONFIG_MAPPING or model_class is None:
        raise ValueError(
            f"{config_file}: expected a model of transformers {transformers.__version__}, got "
            f"the type {raw.get('model_type')!r} and the class {name!r}"
        )
    config_class: Any = transformers.CONFIG_MAPPING[raw["model_type"]]
    names = {"dtype", "torch_dtype"} & options.keys()  # "auto" is no value of a config
    kept = {str(key): options.pop(key) for key in names}
    given = options.pop("config", None)
    config, options = config_class.from_dict(raw, return_unused_kwargs=True, **options)
    config = config if given is None else given
    options |= kept
    wants_info = options.pop("output_loading_info", False)
    # Only the report of what this function expects is left out.
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        model, info = model_class.from_pretrained(
            path, config=config, output_loading_info=True, **options
        )
    except SafetensorError as error:
        raise _damaged(path, error) from error
    finally:
        logging.set_verbosity(level)
    embedding = model.get_input_embeddings()
    tensors = _head_tensors(path, entry.pop("tensors", []), hub | options)
    head = saved_head(f"{config_file}: {CONFIG_KEY}", entry, tensors, embedding)
    # In the dtype that it was saved in, if that was not the model's.
    saved = {str(t.dtype) for t in tensors.values() if t.is_floating_point()}
    own = saved and f"torch.{raw.get('dtype')}" not in saved
    head.to(embedding.weight.device, None if own else embedding.weight.dtype)
    _attach(model, DeferredHead(head))
    # The layer that is gone, and the tensors of the head.
    info["missing_keys"] &= model.state_dict().keys()
    ends = tuple(f"head.{name}" for name in tensors)
    info["unexpected_keys"] = {k for k in info["unexpected_keys"] if not k.endswith(ends)}
    if any(info[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys")):
        warnings.warn(f"{os.fspath(path)}: tensors that do not fit: {info}", stacklevel=2)
    return (model, info) if wants_info else model


def _entry(path: str | os.PathLike[str], file: str, config: dict[str, Any]) -> dict[str, Any]:
    """The entry of the head in a config."""
    if CONFIG_KEY not in config:
        raise ValueError(
            f"path: expected a model with a head of hstree, got {os.fspath(path)}, whose config "
            f"has no {CONFIG_KEY}; load it with its own class, then call replace_lm_head"
        )
    head = config[CONFIG_KEY]
    if not isinstance(head, dict):
        raise ValueError(f"{file}: {CONFIG_KEY}: expected a dict, got {head!r:.80}")
    for name, kind in (("name", str), ("config", dict)):
        if not isinstance(head.get(name), kind):
            raise ValueError(
                f"{file}: {CONFIG_KEY}: {name}: expected a {kind.__name__}, got "
                f"{head.get(name)!r:.80}"
            )
    return dict(head)


def _head_tensors(
    path: str | os.PathLike[str], names: list[str], options: dict[str, Any]
) -> dict[str, Tensor]:
    """The tensors of the head in a saved model, by their names in the head."""
    hub = {name: options[name] for name in _HUB if name in options}
    variant = f".{options['variant']}" if options.get("variant") else ""
    try:
        index: Any = cached_file(path, f"model.safetensors.index{variant}.json", **hub)
    except OSError:
        files = [cached_file(path, f"model{variant}.safetensors", **hub)]
    else:
        shards = set(json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"].values())
        files = [cached_file(path, shard, **hub) for shard in sorted(shards)]
    tensors: dict[str, Tensor] = {}
    try:
        prefix = _prefix(path, [name for file in files for name in tensor_names(file)], names)
        for file in files:
            tensors |= read_tensors(file, prefix)[0]
    except SafetensorError as error:
        raise _damaged(path, error) from error
    return tensors


def _damaged(path: str | os.PathLike[str], error: Exception) -> ValueError:
    return ValueError(
        f"{os.fspath(path)}: expected files of safetensors, got a damaged one: {error}"
    )


def _prefix(path: str | os.PathLike[str], keys: Any, names: list[str]) -> str:
    """What the names of the head's tensors begin with in a file. It is not always their place in
    the model: transformers saves some classes under the names of an older checkpoint."""
    known, ending = set(keys), f"head.{names[0] if names else ''}"
    for key in known:
        prefix = key.removesuffix(ending) + "head."
        if key.endswith(ending) and all(f"{prefix}{name}" in known for name in names):
            return str(prefix)
    raise ValueError(
        f"{os.fspath(path)}: expected tensors of the head, {', '.join(names)}, got none or not all "
        "of them in its files"
    )


def _check_names(model: Any, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    """Before a state dict is loaded: transformers saves some models under the names of an older
    checkpoint, and its Trainer, which resumes from them, ignores what it does not find."""
    layer = model.get_output_embeddings()
    if not isinstance(layer, DeferredHead):
        return
    place, names = f"{prefix}{_name_of(model, layer)}.head.", list(layer.head.state_dict())
    if not any(f"{place}{name}" in state for name in names):
        others = [key for key in state if key.endswith(tuple(f".head.{name}" for name in names))]
        if others:
            raise RuntimeError(
                f"state dict: expected the tensors of the head as {place}{names[0]}, got "
                f"{others[0]}: it was saved under the names of another checkpoint; load the folder "
                "with hstree.transformers.from_pretrained"
            )


class HeadConfig(PreTrainedConfig):  # type: ignore[misc]
    """What ``AutoConfig`` makes of the folder of a model with a head of its own."""

    model_type = "hstree"

    @classmethod
    def from_pretrained(cls, path: str | os.PathLike[str], **options: Any) -> Any:
        """As ``AutoConfig.from_pretrained``, for ``AutoModelForCausalLM``."""
        wants_unused = options.pop("return_unused_kwargs", False)
        _, options = PreTrainedConfig.get_config_dict(path, **options)
        config: Any = cls()
        config.auto_map, config.name_or_path = dict(_WRITTEN["auto_map"]), os.fspath(path)  # type: ignore
        return (config, options) if wants_unused else config


class HeadForCausalLM:
    """What the file ``modeling_hstree.py`` of a saved model gives to
    ``transformers.AutoModelForCausalLM.from_pretrained(path, trust_remote_code=True)``."""

    @staticmethod
    def register_for_auto_class(auto_class: Any = None) -> None:
        """Called by transformers, which would copy the source code of a registered class."""

    @staticmethod
    def from_pretrained(path: str | os.PathLike[str], *args: Any, **options: Any) -> Any:
        """See :func:`from_pretrained`."""
        options.pop("config", None)
        return from_pretrained(path, **options)

    @staticmethod
    def _from_config(config: Any, **options: Any) -> NoReturn:
        raise ValueError(
            "config: expected the config of a model of transformers, since a new model has no "
            f"weights of its head, got {type(config).__name__}; make the model, then call "
            "replace_lm_head"
        )
