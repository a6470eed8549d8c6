"""Logits that are computed when something reads them, and never for a cross-entropy.

While gradients are on, an output layer returns :class:`DeferredLogits`: a tensor that stands for
its logits. Views, slices, casts, a factor and a soft cap are noted, the cross-entropy of it is one
fused loss, and everything else computes the real logits, once, and works on them. No model, trainer
or library is known here.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import Parameter

from hstree._checks import mark_targets
from hstree._numerics import is_transformed
from hstree.heads import Head, ScreenedSoftmax, Softmax
from hstree.heads.functions import Scaled
from hstree.heads.state import Tables
from hstree.ops import default_chunk_rows

__all__ = ["DeferredHead", "defer_logits", "undefer"]

LEAST = 2**20
"""Logits of the smallest call that is deferred: a product of fewer takes less time than the rest of
a deferred step."""

Step = tuple[Callable[..., Tensor], tuple[Any, ...], dict[str, Any]]
"""A function that was called on logits, and its further arguments."""


def defer_logits(layer: nn.Module, head: Head | None = None) -> nn.Module:
    r"""Make an output layer return logits that are computed when something reads them.

    Equivalent to the layer as it was, in any model and any training loop, but for time and memory::

        hstree.defer_logits(model.lm_head)
        logits = model(tokens)                                          # nothing of size N x V
        loss = F.cross_entropy(logits.view(-1, V), targets.view(-1))    # one fused loss
        loss.backward()

    The layer stays the same object with the same parameters and the same state dict. While
    gradients are on, and in evaluation mode for more than one position, it returns
    :class:`~hstree.deferred.DeferredLogits`. ``F.cross_entropy`` (with ``ignore_index``, any
    ``reduction``, class weights and label smoothing), ``log_softmax`` followed by ``gather`` or
    ``nll_loss``, ``logsumexp`` and ``argmax`` of them are computed without holding the logits of
    all rows.
    Everything else computes the logits, as the layer would have.

    Plain logits, as before, come from calls of fewer than 2^20 logits, for one position without
    gradients (decoding), in training mode without gradients (reentrant checkpoints), and under
    torch.compile, torch.export, torch.func, tracing and dispatch modes, for sharded or quantized
    weights, and of a layer with backward hooks.

    Logits that nobody has read hold the hidden vectors and the weight. If either changes in place
    before they are read, for example by an optimizer's step, reading them raises RuntimeError.
    ``torch.autograd.grad`` with respect to logits needs them to be read before the loss.

    Args:
        layer: a :class:`torch.nn.Linear`, or a subclass that inherits its ``forward``.
        head: what the loss is. None: the cross-entropy of the layer. A
            :class:`~hstree.heads.SampledSoftmax`, or a :class:`~hstree.heads.Softmax` with options
            such as ``z_loss``: in training mode the cross-entropy is the head's loss with the
            layer's own weight and bias, which replace the head's; in evaluation mode, and in all
            numbers that are read, the head has no part. A
            :class:`~hstree.heads.ScreenedSoftmax` of the layer: without gradients the logits of one
            position are its scores. Any other head takes the place of the layer: see Returns.

    Returns:
        ``layer``; for a head with parameters of its own a new module with the head as ``head``, to
        be put into the layer's place: its logits are the head's scores, or log P(v | h) of a head
        that has none (:meth:`hstree.heads.Head.scores`), and their cross-entropy is the head's.

    Raises:
        TypeError: for another layer, a layer whose ``forward`` was replaced, or no head.
        ValueError: for a layer that is deferred already, or a head of other sizes.

    Example:
        >>> import torch, hstree
        >>> import torch.nn.functional as F
        >>> model = torch.nn.Sequential(torch.nn.Embedding(50_000, 16), torch.nn.Linear(16, 50_000))
        >>> _ = hstree.defer_logits(model[1])
        >>> logits = model(torch.arange(64))
        >>> F.cross_entropy(logits, torch.arange(64)).backward()
        >>> logits.computed
        False
    """
    kind: Any = type(layer)
    if not isinstance(layer, nn.Linear) or kind.forward is not nn.Linear.forward:
        if hasattr(layer, "deferral"):
            raise ValueError(
                "layer: expected a layer that is not deferred, got one that is; hstree.undefer "
                "gives the plain layer back"
            )
        raise TypeError(
            "layer: expected a torch.nn.Linear, or a subclass that inherits its forward, got "
            f"{kind.__name__}"
        )
    if "forward" in vars(layer):
        raise TypeError(
            "layer: expected a layer with the forward method of its class, got one whose forward "
            "was replaced, as accelerate does; defer it before that"
        )
    if head is None:
        with torch.device("meta"):
            head = Softmax(layer.in_features, layer.out_features)
    if not isinstance(head, Head):
        raise TypeError(f"head: expected a head of hstree or None, got {type(head).__name__}")
    for name, expected in (("in_features", layer.in_features), ("n_classes", layer.out_features)):
        if getattr(head, name) != expected:
            raise ValueError(
                f"head: expected {name}={expected}, as the layer has, got {getattr(head, name)}"
            )
    if not is_of_layer(head):
        return DeferredHead(head)
    if head.weight is not layer.weight:
        # The head's own are let go: they would be a second [V, D].
        head._parameters = dict(layer._parameters)
        vars(head)["tied"] = True
    changed: Any = layer
    changed.deferral, changed.__class__ = Deferral(head, layer), _deferred_class(kind)
    return layer


def undefer(layer: nn.Module) -> nn.Module:
    """Make a layer that :func:`defer_logits` has changed the plain layer that it was, in place.

    Args:
        layer: the layer.

    Returns:
        ``layer``, or, for a module with a head of its own, the head.

    Raises:
        TypeError: for another module.

    Example:
        >>> import torch, hstree
        >>> layer = hstree.defer_logits(torch.nn.Linear(8, 100))
        >>> type(hstree.undefer(layer))
        <class 'torch.nn.modules.linear.Linear'>
    """
    if isinstance(layer, DeferredHead):
        return layer.head
    if not hasattr(layer, "deferral"):
        raise TypeError(f"layer: expected a deferred layer, got {type(layer).__name__}")
    layer.__class__ = type(layer).__bases__[0]
    del layer.deferral
    return layer


def is_of_layer(head: Head) -> bool:
    """Whether the head has no parameters but the weight and bias of a linear layer, and its
    scores."""
    if isinstance(head, ScreenedSoftmax):
        return True
    own = {name for name, _ in head.named_parameters()}
    return isinstance(head, Softmax) and head.has_linear_scores and own <= {"weight", "bias"}


class Deferral:
    """What a deferred linear layer does in place of its product. No module: the head's parameters
    are the layer's, and nothing of it is in a state dict."""

    own = False
    """Whether the scores are the head's."""

    def __init__(self, head: Head, layer: nn.Linear) -> None:
        self.head, self.least = head, LEAST
        with torch.device("meta"):
            self.exact = Softmax(head.in_features, head.n_classes)
        if isinstance(head, ScreenedSoftmax):
            self.rows = torch.linspace(0, layer.out_features - 1, 64).long().to(layer.weight.device)
            self.values = layer.weight.detach()[self.rows]
            self.seen = id(layer.weight), _version(layer.weight)

    @property
    def estimates(self) -> bool:
        """Whether the loss in training mode is not the cross-entropy of the logits."""
        head = self.head
        return bool(head.samples_in_training or head.z_loss or head.label_smoothing) or (
            head.class_weight is not None
        )

    def fits(self, weight: Tensor) -> bool:
        """Whether the layer has the size that it had: transformers resizes tied ones in place."""
        return weight.shape == (self.head.n_classes, self.head.in_features)

    def bound(self, tensors: Sequence[Tensor], training: bool) -> Any:
        """The head of the loss, with the weight and bias of one call."""
        estimates = training and not isinstance(self.head, ScreenedSoftmax)
        return _with_weight(self.head if estimates else self.exact, tensors, training)

    def logits(self, hidden: Tensor, tensors: Sequence[Tensor], training: bool) -> Tensor:
        """The logits [..., V] of the layer."""
        return F.linear(hidden, *tensors)

    def scores(self, hidden: Tensor, tensors: Sequence[Tensor]) -> Tensor:
        """The scores [..., V] of the screen."""
        scores: Tensor = _with_weight(self.head, tensors, False).scores(hidden)
        return scores.to(_product_dtype(hidden, tensors[0].dtype))

    def screens(self, layer: nn.Module, hidden: Tensor) -> bool:
        """Whether a call without gradients takes the scores of the screen."""
        if not isinstance(self.head, ScreenedSoftmax) or layer.training:
            return False
        weight: Tensor = layer.weight  # type: ignore[assignment]
        if not (_is_plain(weight) and weight.dtype in _SCREENED and _rows(hidden) >= 1):
            return False
        if not self.fits(weight):
            return False
        if hidden.dim() > 1 and hidden.shape[-2] > 1:
            return False
        # Writes to weight.data have no version: some values tell of them. A cast or a move keeps
        # both, and a weight that was assigned has another id.
        self.rows = self.rows.to(weight.device)
        same = torch.equal(self.values.to(weight), weight.detach()[self.rows])
        if not same or (self.seen[0] == id(weight) and self.seen[1] != _version(weight)):
            raise RuntimeError(
                "layer: expected the weight that was screened, got one that has changed since; "
                "call undefer and screen it again"
            )
        return True


def _with_weight(head: Head, tensors: Sequence[Tensor], training: bool) -> Any:
    """A copy of the head, as threads share the layer, with this weight and bias."""
    if isinstance(head, Tables):
        head.place_tables(tensors[0].device)
    head = copy.copy(head)
    # Not by setattr: weights of torch.func and of parametrizations are no Parameters.
    head._parameters = {"weight": tensors[0], "bias": (*tensors, None)[1]}  # type: ignore
    head._buffers, head._modules = dict(head._buffers), dict(head._modules)
    head.training = training
    return head


_SCREENED = (torch.float32, torch.bfloat16, torch.float16)


@functools.cache
def _deferred_class(kind: Any) -> Any:
    """The subclass of a linear layer that defers."""

    def forward(self: Any, hidden: Tensor, work: Callable[..., Any] | None = None) -> Any:
        if work is not None:
            return work(_tensors(self))
        deferral: Deferral = self.deferral
        least = 0 if deferral.estimates else deferral.least
        if not (_defers(self, hidden, least) and deferral.fits(self.weight)):
            if not torch.is_grad_enabled() and deferral.screens(self, hidden):
                return deferral.scores(hidden, _tensors(self))
            return kind.forward(self, hidden)
        dtype = torch.result_type(hidden, self.weight)
        source = Source(self, hidden, _tensors(self))
        return DeferredLogits.of(source, self.out_features, _product_dtype(hidden, dtype))

    def reduce_ex(self: Any, protocol: Any) -> Any:
        # pickle finds classes by their name, and this one has none.
        _, _, *rest = super(made, self).__reduce_ex__(protocol)
        return (_unpickled, (kind,), *rest)

    members = {
        "__module__": __name__,
        "__doc__": f"A :class:`{kind.__name__}` that returns :class:`DeferredLogits`.",
        "forward": forward,
        "__reduce_ex__": reduce_ex,
    }
    made: Any = type(f"Deferred{kind.__name__}", (kind,), members)
    return made


def _unpickled(kind: Any) -> Any:
    made = _deferred_class(kind)
    return made.__new__(made)


class DeferredHead(nn.Module):
    """A head with parameters of its own in the place of an output layer.

    Its logits are the head's scores [..., V], or log P(v | h) of a head that has none, as
    :class:`DeferredLogits`: their cross-entropy is the head's loss, which for trees scores few
    classes.

    Args:
        head: the head.

    Example:
        >>> import torch, hstree
        >>> import torch.nn.functional as F
        >>> layer = hstree.deferred.DeferredHead(hstree.PLIF(8, 100, intervals=10))
        >>> hidden, target = torch.randn(4, 8), torch.arange(4)
        >>> loss = F.cross_entropy(layer(hidden), target)
        >>> torch.allclose(loss, layer.head(hidden, target).loss)
        True
    """

    head: Head
    bias = None  # read by models and libraries
    own, estimates = True, True
    least: float = 0

    def __init__(self, head: Head) -> None:
        super().__init__()
        self.head = head

    def forward(self, hidden: Tensor, work: Callable[..., Any] | None = None) -> Any:
        if work is not None:
            return work(_tensors(self))
        if not _defers(self, hidden, self.least):
            return _logits(self.head, hidden)
        dtype = torch.float64 if self.weight.dtype == torch.float64 else torch.float32
        return DeferredLogits.of(Source(self, hidden, _tensors(self)), self.out_features, dtype)

    def register_parameter(self, name: str, param: Any) -> None:
        if name != "weight":  # transformers ties the matrix that it expects here
            super().register_parameter(name, param)

    def bound(self, tensors: Sequence[Tensor], training: bool) -> Any:
        """The head with the parameters of one call."""
        return _with_parameters(self.head, iter(tensors)).train(training)

    def logits(self, hidden: Tensor, tensors: Sequence[Tensor], training: bool) -> Tensor:
        """Scores [..., V], or log-probabilities of a head without them; a copy, as models write
        into logits, of which a head may keep some for its gradient."""
        return _logits(self.bound(tensors, training), hidden).clone()

    @property
    def in_features(self) -> int:
        return self.head.in_features

    @property
    def out_features(self) -> int:
        return self.head.n_classes

    @property
    def weight(self) -> Any:
        """The dtype and the device of the head, which models ask a weight for."""
        return _NoWeight(self.head)


def _logits(head: Head, hidden: Tensor) -> Tensor:
    return head.scores(hidden) if head.has_normalizer else head.log_prob(hidden)


class _NoWeight:
    """Nothing can train, or multiply by, a matrix that the head does not have."""

    def __init__(self, head: Head) -> None:
        first = next(head.parameters())
        self.dtype, self.device, self._name = first.dtype, first.device, type(head).__name__

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"weight: expected an output layer that is one matrix, got {self._name} of hstree; use "
            "the loss and the logits of the model"
        )

    def __torch_function__(self, *call: Any) -> Any:
        return self.matrix


def _tensors(layer: nn.Module) -> tuple[Tensor, ...]:
    """The parameters of a call: parametrizations and functional_call have others a moment later."""
    if isinstance(layer, DeferredHead):
        return tuple(_each_parameter(layer.head))
    weight, bias = layer.weight, layer.bias
    return (weight,) if bias is None else (weight, bias)  # type: ignore[return-value]


def _each_parameter(module: nn.Module) -> Iterator[Tensor]:
    for parameter in module._parameters.values():
        if parameter is not None:
            yield parameter
    for child in module.children():
        yield from _each_parameter(child)


def _with_parameters(module: Any, tensors: Iterator[Tensor]) -> Any:
    """A shallow copy of the module with the tensors of :func:`_each_parameter`."""
    made = copy.copy(module)
    made._parameters = {
        name: None if parameter is None else next(tensors)
        for name, parameter in module._parameters.items()
    }
    children = {id(child): _with_parameters(child, tensors) for child in module.children()}
    made._modules = {name: children.get(id(child)) for name, child in module._modules.items()}
    return made


def _is_plain(tensor: Any) -> bool:
    """Whether it is a tensor of torch itself: not sharded, quantized, fake or of torch.func."""
    return type(tensor) in (Tensor, Parameter) and tensor.device.type != "meta"


def _defers(layer: Any, hidden: Tensor, least: float) -> bool:
    """Whether a call is deferred, if it has at least so many logits."""
    grad = torch.is_grad_enabled()
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or is_transformed():  # type: ignore
        return False
    tensors = (hidden, *_tensors(layer))
    if not all(map(_is_plain, tensors)) or hidden.dim() < 2 or not _rows(hidden):
        return False
    if not grad and (layer.training or hidden.shape[-2] == 1):
        return False
    rows = _rows(hidden)
    return (
        hidden.is_floating_point()
        and hidden.shape[-1] == layer.in_features
        and rows * layer.out_features >= least
        and (hidden.dtype == tensors[1].dtype or torch.is_autocast_enabled(hidden.device.type))
        # These three names are torch's own: no public one tells whether hooks wait for the gradient
        # of the logits, which a fused loss does not make, or a mode sees each operator.
        and not layer._backward_hooks
        and not layer._backward_pre_hooks
        and not torch._C._len_torch_dispatch_stack()
    )


def _rows(hidden: Tensor) -> int:
    return math.prod(hidden.shape[:-1])


def _product_dtype(tensor: Tensor, dtype: torch.dtype) -> torch.dtype:
    """The dtype of a product with the tensor."""
    kind = tensor.device.type
    if dtype != torch.float64 and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return dtype


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


class Source:
    """What logits are computed from: hidden vectors, and the parameters and modes of the call.

    Args:
        layer: the layer.
        hidden: hidden vectors, [..., D].
        tensors: its parameters in the call.
        then: functions of the logits that came after it, elementwise or of rows.
        like: the source whose modes these are; None: those of now.
    """

    value: Tensor | None = None
    """The logits, once they are computed."""
    state: dict[str, bool]
    """Shared with its copies: whether a fused loss was computed of one of them."""

    def __init__(
        self,
        layer: Any,
        hidden: Tensor,
        tensors: tuple[Tensor, ...],
        then: tuple[Step, ...] = (),
        like: Source | None = None,
    ) -> None:
        self.layer, self.tensors, self.then = layer, tensors, then
        self.kind: Any = getattr(layer, "deferral", layer)  # Deferral or DeferredHead
        self.grad = torch.is_grad_enabled()
        self.state = {"fused": False}
        self.training: bool = layer.training
        self.inference = torch.is_inference_mode_enabled()
        kind = hidden.device.type
        self.autocast: dict[str, Any] = {
            "device_type": kind,
            "enabled": torch.is_autocast_enabled(kind),
            "dtype": torch.get_autocast_dtype(kind),
        }
        # A tensor of inference mode does not tell whether it has changed.
        self.hidden = hidden.clone() if hidden.is_inference() and like is None else hidden
        self.versions = [(tensor, _version(tensor)) for tensor in (self.hidden, *tensors)]
        if like is not None:
            self.grad = self.grad and like.grad
            for name in ("state", "training", "inference", "autocast", "versions"):
                setattr(self, name, getattr(like, name))

    def modes(self, grad: bool) -> AbstractContextManager[Any]:
        """The modes of the call."""
        stack = ExitStack()
        stack.enter_context(_DisableTorchFunction())
        if self.inference:
            stack.enter_context(torch.inference_mode())
        else:
            stack.enter_context(torch.set_grad_enabled(grad))
        stack.enter_context(torch.autocast(**self.autocast))
        return stack

    def run(self, work: Callable[[tuple[Tensor, ...]], Tensor]) -> Tensor:
        """``work(tensors)`` with the parameters of the call."""
        if not all(map(_is_plain, self.layer.parameters())):
            # FSDP has taken them back: its hooks gather them for a call of the layer.
            gathered: Tensor = self.layer(None, work)
            return gathered
        if any(_version(tensor) != version for tensor, version in self.versions):
            raise RuntimeError(
                "logits: expected to be read before the hidden vectors or the weight they are "
                "computed from change in place (an optimizer's step), as they are computed when "
                "something reads them; logits.compute() before that keeps them"
            )
        return work(self.tensors)

    def logits(
        self, hidden: Tensor, tensors: tuple[Tensor, ...], grad: bool, steps: tuple[Step, ...] = ()
    ) -> Tensor:
        """Real logits of hidden vectors."""
        with self.modes(grad):
            value: Tensor = self.kind.logits(hidden, tensors, self.training)
            for function, arguments, options in (*self.then, *steps):
                value = function(value, *arguments, **options)
        return value

    def compute(self) -> Tensor:
        if self.value is None:
            self.value = self.run(lambda tensors: self.logits(self.hidden, tensors, self.grad))
        return self.value


# torch documents this context for __torch_function__ of subclasses under this name only.
_DisableTorchFunction: Any = torch._C.DisableTorchFunctionSubclass


class _InGraph(torch.autograd.Function):
    """A place in the graph for logits that nobody has read, for code with a backward pass of its
    own. The gradients of logits that are read, and of a fused loss, do not pass here."""

    @staticmethod
    def forward(
        ctx: Any, source: Source, steps: tuple[Step, ...], meta: Tensor, *tensors: Tensor
    ) -> Tensor:
        ctx.source, ctx.steps = source, steps
        ctx.save_for_backward(*tensors)
        return _wrapper(source, meta)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[3:]
        pairs = zip(ctx.saved_tensors, needed, strict=True)
        hidden, *tensors = (tensor.detach().requires_grad_(need) for tensor, need in pairs)
        value = ctx.source.logits(hidden, tuple(tensors), True, ctx.steps)
        inputs = [tensor for tensor in (hidden, *tensors) if tensor.requires_grad]
        found = iter(torch.autograd.grad(value, inputs, grad))
        return (None, None, None, *(next(found) if need else None for need in needed))


def _wrapper(source: Source, meta: Tensor) -> DeferredLogits:
    made: DeferredLogits = Tensor._make_wrapper_subclass(
        DeferredLogits,
        meta.shape,
        strides=meta.stride(),
        dtype=meta.dtype,
        device=source.hidden.device,
    )
    return made


class _Noted(NamedTuple):
    """What was done to logits that nobody has read."""

    factor: float = 1.0
    cap: float | None = None  # bound; 0 after tanh, before the bound is known
    normalized: bool = False  # log_softmax
    transposed: bool = False  # [..., V, T]


class DeferredLogits(Tensor):
    """Logits [..., V] that nobody has read yet. Everything that a tensor can do, it does: what is
    not a fused loss computes the logits and works on them.

    ``computed`` says whether they have been computed, ``compute()`` does it.

    Example:
        >>> import torch, hstree
        >>> layer = hstree.defer_logits(torch.nn.Linear(16, 50_000))
        >>> logits = layer(torch.randn(64, 16))
        >>> logits.shape, logits.computed
        (torch.Size([64, 50000]), False)
        >>> logits.max().isfinite(), logits.computed
        (tensor(True), True)
    """

    source: Source
    hidden: Tensor  # [..., D], of these rows
    views: tuple[Step, ...]  # from the value of the source to these logits
    meta: Tensor  # shape, strides and dtype
    grad_mode: bool
    noted: _Noted
    read: Tensor | None  # the real logits

    @property
    def computed(self) -> bool:
        return self.source.value is not None

    @staticmethod
    def of(source: Source, classes: int, dtype: torch.dtype) -> DeferredLogits:
        """The logits of a call."""
        meta = torch.empty((*source.hidden.shape[:-1], classes), dtype=dtype, device="meta")
        return DeferredLogits._made(source, source.hidden, (), meta, source.grad)

    @staticmethod
    def _made(
        source: Source,
        hidden: Tensor,
        views: tuple[Step, ...],
        meta: Tensor,
        grad: bool,
        noted: _Noted = _Noted(),  # noqa: B008
    ) -> DeferredLogits:
        self: DeferredLogits
        if grad and not source.inference:
            with torch.enable_grad():
                self = _InGraph.apply(source, views, meta, source.hidden, *source.tensors)  # type: ignore
        else:
            self = _wrapper(source, meta)
        self.source, self.hidden, self.views, self.meta = source, hidden, views, meta
        self.grad_mode, self.noted, self.read = grad, noted, None
        return self

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        try:
            text: str = super().__repr__(**options)  # type: ignore[no-untyped-call]
            return text
        except RuntimeError:  # their hidden vectors or weight have changed
            shape, dtype = tuple(self.meta.shape), self.meta.dtype
            return f"DeferredLogits(shape={shape}, dtype={dtype}, never computed)"

    def compute(self) -> Tensor:
        """The real logits. Views of them share memory: a write to one is seen by all."""
        if self.read is None:
            value = self.source.compute()
            with _DisableTorchFunction(), torch.set_grad_enabled(self.grad_mode):
                for function, arguments, options in self.views:
                    value = function(value, *arguments, **options)
            self.read = value
        return self.read

    def _view(self, step: Step, meta: Tensor, hidden: Tensor, **new: Any) -> DeferredLogits:
        grad = self.grad_mode and torch.is_grad_enabled()
        noted = self.noted._replace(**new)
        return self._made(self.source, hidden, (*self.views, step), meta, grad, noted)

    def _copy(
        self, step: Step, meta: Tensor, hidden: Tensor | None = None, **new: Any
    ) -> DeferredLogits:
        """New values, from the hidden vectors: a later write to these logits is not seen."""
        old = self.source
        hidden = self.hidden if hidden is None else hidden
        then = old.then if step[0] is _rows_only else (*old.then, step)
        source = Source(old.layer, hidden, old.tensors, then, old)
        source.grad = source.grad and self.grad_mode
        return self._made(source, hidden, (), meta, source.grad, self.noted._replace(**new))

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():  # of logits that were made outside
            from hstree._uncompiled import uncompiled

            return uncompiled(cls._called, function, args, kwargs)
        return cls._called(function, args, kwargs)

    @classmethod
    def _called(cls, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if function in _ABOUT:
            with _DisableTorchFunction():
                return function(*args, **kwargs)
        if function is torch.autograd.grad:
            _check_read(*args, **kwargs)
        rule = _RULES.get(function)
        self = args[0] if args else None
        if rule is not None and isinstance(self, DeferredLogits) and self._is_open(rule):
            result = rule(self, function, args[1:], kwargs)
            if result is not NotImplemented:
                return result
        args, kwargs = _real(args), _real(kwargs)
        with _DisableTorchFunction():
            return function(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return function(*_real(args, True), **_real(kwargs or {}, True))

    def _is_open(self, rule: Any) -> bool:
        """Whether the rule may answer: nothing was read, or the loss is another than that of the
        logits and they were only read."""
        value = self.source.value
        if value is None:
            return not self.noted.transposed or rule is _cross_entropy
        unchanged = value.is_inference() or value._version == 0
        return self.source.kind.estimates and rule is _cross_entropy and unchanged

    # Fused losses.

    def loss(
        self,
        target: Tensor,
        *,
        ignore_index: int = -100,
        reduction: str = "mean",
        class_weight: Tensor | None = None,
        label_smoothing: float = 0.0,
    ) -> Any:
        """``F.cross_entropy`` of these logits, [N, V] or [..., V], and targets of their rows."""
        if not self._is_known():
            return NotImplemented
        training = self.source.training and self.source.grad
        marked = mark_targets(
            target, self.meta.shape[-2 if self.noted.transposed else -1], ignore_index
        )

        def work(tensors: tuple[Tensor, ...]) -> Tensor:
            head, hidden = self._scaled(tensors, training)
            head.reduction = reduction
            if class_weight is not None:
                head.class_weight = class_weight
            if label_smoothing or not training:
                head.label_smoothing = label_smoothing
            if not training:
                head.z_loss = 0.0
            encoded = head.encoded_rows(hidden)
            with torch.set_grad_enabled(self.grad_mode and torch.is_grad_enabled()):
                loss: Tensor = head.target_loss(encoded, marked.reshape(-1))[1]
                return loss

        with self.source.modes(torch.is_grad_enabled()):
            loss = self.source.run(work)
        self.source.state["fused"] = True
        # As in torch, where autocast takes a loss in float32.
        is_cast = torch.is_autocast_enabled(self.device.type)
        loss = loss.to(torch.float32 if is_cast and self.dtype != torch.float64 else self.dtype)
        return loss.view(target.shape) if reduction == "none" else loss

    def _scaled(self, tensors: tuple[Tensor, ...], training: bool) -> tuple[Any, Tensor]:
        """The head, and the hidden vectors [..., D], with the factor and the soft cap."""
        head, hidden = self.source.kind.bound(tensors, training), self.hidden
        factor, cap = self.noted.factor, self.noted.cap
        if cap is not None:
            if head.samples_in_training and training:
                raise TypeError(
                    "head: expected logits without a soft cap for the loss of a sampled softmax, "
                    f"got a cap of {cap:g}; use the exact loss, head=None"
                )
            head._modules["function"] = Scaled(factor * cap, cap)  # c tanh(s x / c), s = factor c
        elif factor != 1:
            hidden = hidden * factor
            if head.bias is not None:
                head._parameters["bias"] = head.bias * factor
        return head, hidden

    def _is_known(self) -> bool:
        """Whether the loss knows the function of the logits that was noted."""
        noted = self.noted
        return noted.cap != 0 and (not self.source.kind.own or noted[:2] == (1.0, None))

    def at(self, target: Tensor, *, normalized: bool) -> Any:
        """Logits [...] of one class of each row, or their log-probabilities."""
        if not self._is_known():
            return NotImplemented
        shape, flat = target.shape, target.reshape(-1)

        def work(tensors: tuple[Tensor, ...]) -> Tensor:
            head, hidden = self._scaled(tensors, False)
            rows = head.encoded_rows(hidden)
            with torch.set_grad_enabled(self.grad_mode and torch.is_grad_enabled()):
                if normalized or not head.has_normalizer:
                    found: Tensor = head.target_log_prob(rows, flat)
                    return found
                score: Tensor = head.target_score(rows, flat)
                return score

        with self.source.modes(torch.is_grad_enabled()):
            found = self.source.run(work)
        return found.to(self.dtype).view(shape)


def _real(value: Any, detached: bool = False) -> Any:
    """Arguments with real logits in the place of deferred ones."""
    if isinstance(value, DeferredLogits):
        found = value.compute()
        return found.detach() if detached else found
    if isinstance(value, dict):
        return {key: _real(each, detached) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_real(each, detached) for each in value)
    return value


def _check_read(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> None:
    given = [inputs] if isinstance(inputs, Tensor) else inputs
    if any(isinstance(each, DeferredLogits) and not each.computed for each in given):
        raise RuntimeError(
            "inputs: expected logits that were read before the loss was computed from them, got "
            "DeferredLogits, whose gradient a fused loss does not compute; call logits.compute() "
            "first"
        )


def _rows_only(value: Tensor) -> Tensor:
    """The step of a copy of some rows, which the hidden vectors have taken already."""
    return value


# The rules: what is known of a function, (logits, function, further arguments, keywords) -> result,
# or NotImplemented, where the real logits are computed.


def _cast(self: DeferredLogits, function: Any, args: Any, kwargs: Any) -> Any:
    if any(isinstance(each, DeferredLogits) for each in args):
        return NotImplemented
    with _DisableTorchFunction():
        small = torch.empty(0, dtype=self.dtype, device=self.device)
        cast = function(small, *args, **kwargs)
    if cast.device != self.device or "memory_format" in kwargs:
        return NotImplemented
    if cast is small:
        return self
    return self._copy((function, args, kwargs), self.meta.to(cast.dtype))


def _alias(self: DeferredLogits, function: Any, args: Any, kwargs: Any) -> Any:
    """contiguous and clone."""
    if args or kwargs:
        return NotImplemented
    if function is Tensor.contiguous and self.meta.is_contiguous():
        return self
    return self._copy((_rows_only, (), {}), self.meta.contiguous())


def _detach(self: DeferredLogits, function: Any, args: Any, kwargs: Any) -> Any:
    with torch.no_grad():
        return self._view((Tensor.detach, (), {}), self.meta, self.hidden.detach())


def _reshape(self: DeferredLogits, function: Any, args: Any, kwargs: Any) -> Any:
    if any(isinstance(each, torch.dtype) for each in (*args, *kwargs.values())):
        return NotImplemented
    meta = function(self.meta, *args, **kwargs)
    if not meta.dim() or meta.shape[-1] != self.shape[-1]:
        return NotImplemented
    hidden = self.hidden.reshape(*meta.shape[:-1], self.hidden.shape[-1])
    if meta is self.meta or meta._is_view():
        return self._view((function, args, kwargs), meta, hidden)
    return self._copy((_rows_only, (), {}), meta, hidden)


def _index(self: DeferredLogits, function: Any, args: Any, kwargs: Any) -> Any:
    index = args[0] if isinstance(args[0], tuple) else (args[0],)
    tensors = [each for each in index if isinstance(each, Tensor)]
    if not all(each is Ellipsis or type(each) in (int, slice, Tensor) for each in index):
        return NotImplemented
    if any(each.dtype not in (torch.bool, torch.int64) for each in tensors):
        return NotImplemented
    # The classes must stay whole and last.
    used = sum(
        each.dim()
        if isinstance(each, Tensor) and each.dtype == torch.bool
        else each is not Ellipsis
        for each in index
    )
    last = index[-1] if index else slice(None)
    whole = last == slice(None) if isinstance(last, slice) else False
    if used > self.dim() or not (whole or (used < self.dim() and Ellipsis not in index)):
        return NotImplemented
    hidden = self.hidden[index]
    if tensors:
        meta = self.meta.new_empty((*hidden.shape[:-1], self.shape[-1]))
        return self._copy((_rows_only, (), {}), meta, hidden)
    return self._view((Tensor.__getitem__, (index,), {}), self.meta[index], hidden)


def _pieces(self: DeferredLogits, function: Any, args: Any, kwargs: Any) -> Any:
    """split, chunk, unbind and iteration over rows."""
    dim = kwargs.get("dim", args[-1] if len(args) > (function not in _UNBIND) else 0)
    if (
        type(dim) is not int
        or not -self.dim() <= dim < self.dim()
        or dim % self.dim() == self.dim() - 1
    ):
        return NotImplemented
    dim, begin, found = dim % self.dim(), 0, []
    for piece in function(self.meta, *args, **kwargs):
        size = piece.shape[dim] if piece.dim() == self.dim() else 1
        part = slice(begin, begin + size) if piece.dim() == self.dim() else begin
        found.append(_index(self, None, ((slice(None),) * dim + (part,),), {}))
        begin += size
    return iter(found) if function is Tensor.__iter__ else tuple(found)


def _transpose(self: DeferredLogits, function: Any, args: Any, kwargs: Any) -> Any:
    """[B, T, V] to [B, V, T], as F.cross_entropy takes it."""
    if self.dim() != 3:
        return NotImplemented
    meta = function(self.meta, *args, **kwargs)
    turned = [(each[0], each[2], each[1]) for each in (self.meta.shape, self.meta.stride())]
    if [tuple(meta.shape), meta.stride()] != turned:
        return NotImplemented
    return self._view((function, args, kwargs), meta, self.hidden, transposed=True)


def _number(value: Any) -> Any:
    """A number, or what is one: a tensor of no dimension that needs no wait."""
    if type(value) is Tensor and value.dim() == 0 and value.device.type == "cpu":
        return NotImplemented if value.requires_grad else value.item()
    return value


def _scale(self: DeferredLogits, function: Any, args: Any, kwargs: Any) -> Any:
    number: Any = _number(args[0]) if len(args) == 1 and not kwargs else None
    noted = self.noted
    if type(number) not in (int, float) or not 0 < number < math.inf or noted.normalized:
        return NotImplemented
    factor = 1 / number if function in _DIVISIONS else number
    step = (function, args, kwargs)
    if noted.cap is None:
        return self._copy(step, self.meta, factor=noted.factor * factor)
    return self._copy(step, self.meta, cap=factor) if noted.cap == 0 else NotImplemented


def _tanh(self: DeferredLogits, function: Any, args: Any, kwargs: Any) -> Any:
    if self.noted.cap is not None or self.noted.normalized or args or kwargs:
        return NotImplemented
    return self._copy((function, (), {}), self.meta, cap=0.0)


def _log_softmax(self: DeferredLogits, function: Any, args: Any, kwargs: Any) -> Any:
    names = ("dim", "_stacklevel", "dtype") if function is F.log_softmax else ("dim", "dtype")
    given = dict(zip(names, args, strict=False)) | kwargs
    dim, dtype = given.get("dim"), given.get("dtype")
    if self.noted.normalized or self.noted.cap == 0 or dim not in (-1, self.dim() - 1):
        return NotImplemented
    if dtype is None:
        is_cast = torch.is_autocast_enabled(self.device.type) and self.dtype != torch.float64
        dtype = torch.float32 if is_cast else self.dtype
    step = (torch.log_softmax, (-1,), {"dtype": dtype})
    return self._copy(step, self.meta.to(dtype), normalized=True)


def _gather(self: DeferredLogits, function: Any, args: Any, kwargs: Any) -> Any:
    given: dict[str, Any] = dict(zip(("dim", "index"), args, strict=False)) | kwargs
    dim, index = given.pop("dim", None), given.pop("index", None)
    if given or dim not in (-1, self.dim() - 1) or type(index) is not Tensor:
        return NotImplemented
    if index.shape != (*self.shape[:-1], 1) or not _in_range(index, self.shape[-1]):
        return NotImplemented
    return self.at(index, normalized=self.noted.normalized)


def _logsumexp(self: DeferredLogits, function: Any, args: Any, kwargs: Any) -> Any:
    of_rows = (*args, *kwargs.values()) in ((-1,), (self.dim() - 1,))
    if not of_rows or self.noted.normalized:
        return NotImplemented
    first = torch.zeros(self.shape[:-1], dtype=torch.int64, device=self.device)
    score = self.at(first, normalized=False)
    return NotImplemented if score is NotImplemented else score - self.at(first, normalized=True)


def _in_range(index: Tensor, size: int) -> bool:
    """Whether all classes are; on a GPU they are not read, and a bad one gives NaN."""
    if index.device.type != "cpu" or not index.numel():
        return index.dtype == torch.int64
    low, high = index.aminmax()
    return index.dtype == torch.int64 and low.item() >= 0 and high.item() < size


def _hook(self: DeferredLogits, function: Any, args: Any, kwargs: Any) -> Any:
    """FSDP asks the outputs of what it has sharded for a hook that tells it when the backward pass
    begins, which it learns from the loss, too. Other hooks wait for the gradient of real logits."""
    sharded = any(kind.__name__ == "FSDPModule" for kind in type(self.source.layer).__mro__)
    if not (self.source.state["fused"] or sharded):
        return NotImplemented
    with _DisableTorchFunction():
        return function(self, *args, **kwargs)


def _argmax(self: DeferredLogits, function: Any, args: Any, kwargs: Any) -> Any:
    if (*args, *kwargs.values()) not in ((-1,), (self.dim() - 1,)):
        return NotImplemented
    rows = self.hidden.reshape(-1, self.hidden.shape[-1])
    source = self.source

    def work(tensors: tuple[Tensor, ...]) -> Tensor:
        size = default_chunk_rows(rows, self.shape[-1])
        parts = (source.logits(part, tensors, False).argmax(-1) for part in torch.split(rows, size))
        return torch.cat(list(parts))

    return source.run(work).view(self.shape[:-1])


def _cross_entropy(self: DeferredLogits, function: Any, args: Any, kwargs: Any) -> Any:
    given = dict(zip(_LOSS_NAMES[function], args, strict=False)) | kwargs
    target, weight = given.pop("target"), given.pop("weight", None)
    if any(given.pop(name, None) is not None for name in ("size_average", "reduce")):
        return NotImplemented
    rows = (self.shape[0], self.shape[2]) if self.noted.transposed else self.shape[:-1]
    right = type(target) is Tensor and target.dtype in (torch.int64, torch.uint8)
    if (
        not right
        or target.shape != rows
        or not len(rows)
        or (len(rows) > 1) != self.noted.transposed
    ):
        return NotImplemented
    if self.noted.normalized != (function is not F.cross_entropy):
        return NotImplemented
    return self.loss(target, class_weight=weight, **given)


def _get(name: str) -> Any:
    """What reads an attribute of a tensor."""
    return getattr(Tensor, name).__get__


_LOSS_NAMES = {
    F.cross_entropy: (
        "target", "weight", "size_average", "ignore_index", "reduce", "reduction",
        "label_smoothing",
    ),
    F.nll_loss: ("target", "weight", "size_average", "ignore_index", "reduce", "reduction"),
}  # fmt: skip
_UNBIND = (Tensor.unbind, torch.unbind, Tensor.__iter__)
_DIVISIONS = (Tensor.div, Tensor.__truediv__, torch.div, torch.true_divide, Tensor.true_divide)

_RULES: dict[Any, Callable[..., Any]] = {
    function: rule
    for rule, functions in {
        _cross_entropy: (F.cross_entropy, F.nll_loss),
        _cast: (
            Tensor.float, Tensor.to, Tensor.type_as, Tensor.double, Tensor.bfloat16, Tensor.half,
        ),
        _alias: (Tensor.contiguous, Tensor.clone, torch.clone),
        _detach: (Tensor.detach,),
        _reshape: (
            Tensor.view, Tensor.reshape, torch.reshape, Tensor.flatten, torch.flatten,
        ),
        _index: (Tensor.__getitem__,),
        _pieces: (Tensor.split, torch.split, Tensor.chunk, torch.chunk, *_UNBIND),
        _transpose: (
            Tensor.transpose, torch.transpose, Tensor.permute, torch.permute, Tensor.swapaxes,
            torch.swapaxes, _get("mT"),
        ),
        _scale: (Tensor.mul, Tensor.__mul__, Tensor.__rmul__, torch.mul, *_DIVISIONS),
        _tanh: (Tensor.tanh, torch.tanh),
        _log_softmax: (Tensor.log_softmax, torch.log_softmax, F.log_softmax),
        _gather: (Tensor.gather, torch.gather),
        _logsumexp: (Tensor.logsumexp, torch.logsumexp),
        _argmax: (Tensor.argmax, torch.argmax),
        _hook: (Tensor.register_hook,),
    }.items()
    for function in functions
}  # fmt: skip

_ABOUT = {
    _get(name)
    for name in (
        "shape", "dtype", "device", "ndim", "requires_grad", "is_leaf", "grad_fn", "layout",
        "is_cuda", "is_cpu", "is_meta", "is_mps", "is_sparse", "is_quantized", "is_nested",
        "_base", "_version", "output_nr",
    )
} | {
    Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.nelement, Tensor.stride,
    Tensor.is_floating_point, Tensor.is_complex, Tensor.is_contiguous, Tensor.get_device,
    Tensor.element_size, Tensor.__len__, Tensor.is_inference, torch.is_floating_point,
    torch.is_complex, torch.numel, Tensor.requires_grad_,
}  # fmt: skip
"""Asked of the tensor that stands for the logits: no values are read."""
