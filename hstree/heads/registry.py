"""Heads by name."""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError
from torch import Tensor

from hstree._files import read_tensors
from hstree._memory import ran_out
from hstree.heads.adaptive import AdaptiveSoftmax
from hstree.heads.base import Head
from hstree.heads.forest import ForestSoftmax
from hstree.heads.mixtape import Mixtape
from hstree.heads.mixture import MixtureOfContexts, MixtureOfSoftmaxes
from hstree.heads.sampled import SampledSoftmax
from hstree.heads.screened import ScreenedSoftmax
from hstree.heads.softmax import GSS, PLIF, MonotonicNetwork, SigSoftmax, Softmax
from hstree.heads.state import METADATA_KEY, HasWeight, TyingError, tied_names
from hstree.heads.trees import TreeEnsemble


class _Entry(NamedTuple):
    """What a name stands for: a class, and options in place of its defaults."""

    head: type[Head]
    options: Mapping[str, Any]


_HEADS: dict[str, _Entry] = {}


def register_head(head: type[Head], name: str | None = None, **options: Any) -> type[Head]:
    """Register a subclass of :class:`Head` under its ``name``; usable as a decorator.

    Args:
        head: the class.
        name: another name, for the class with these options; None: the ``name`` of the class.
        **options: options in place of the defaults of the class.

    Returns:
        The class itself.

    Raises:
        ValueError: if another class, or the class with other options, has that name.

    Example:
        >>> import hstree
        >>> @hstree.heads.register_head
        ... class SmallSoftmax(hstree.Softmax):
        ...     name = "small-softmax"
        >>> hstree.heads.head_class("small-softmax") is SmallSoftmax
        True
    """
    name = head.name if name is None else name
    entry = _Entry(head, options)
    known = _HEADS.setdefault(name, entry)
    if known != entry:
        raise ValueError(
            f"name: expected a name that is not registered, got {name!r}, the name of "
            f"{known.head.__module__}.{known.head.__qualname__}"
        )
    return head


for _head in (
    TreeEnsemble,
    Softmax,
    AdaptiveSoftmax,
    SampledSoftmax,
    ScreenedSoftmax,
    ForestSoftmax,
    SigSoftmax,
    GSS,
    PLIF,
    MonotonicNetwork,
    MixtureOfSoftmaxes,
    MixtureOfContexts,
    Mixtape,
):
    register_head(_head)
register_head(PLIF, "plif-frozen", frozen=True)
register_head(MixtureOfSoftmaxes, "mos-plif", function="plif")


def head_names() -> list[str]:
    """Names of the registered heads that are built to be trained, sorted.

    Example:
        >>> import hstree
        >>> {"softmax", "trees"} <= set(hstree.heads.head_names())
        True
    """
    return sorted(name for name, entry in _HEADS.items() if entry.head.trainable)


def head_class(name: str) -> type[Head]:
    """The class registered under a name.

    Args:
        name: one of :func:`head_names`.

    Raises:
        ValueError: for an unknown name.

    Example:
        >>> import hstree
        >>> hstree.heads.head_class("trees").__name__
        'TreeEnsemble'
    """
    return _entry(name).head


def _entry(name: str) -> _Entry:
    if name not in _HEADS:
        raise ValueError(f"head: expected one of {', '.join(head_names())}, got {name!r}")
    return _HEADS[name]


def build_head(
    name: str,
    in_features: int,
    n_classes: int,
    *,
    frequencies: npt.ArrayLike | None = None,
    tokens: npt.ArrayLike = (),
    embedding: HasWeight | None = None,
    seed: int = 0,
    **options: Any,
) -> Head:
    """A head for a training text, by name.

    Args:
        name: one of :func:`head_names`.
        in_features: number of input features, D.
        n_classes: number of classes, V.
        frequencies: class counts [V] of the text.
        tokens: classes of the text in order, from which ``"trees"`` and ``"forest"`` build
            clustered trees by :meth:`TreeEnsemble.from_tokens` and
            :meth:`ForestSoftmax.from_tokens`. Without them ``"trees"`` builds Huffman trees by
            :meth:`TreeEnsemble.from_counts`, all classes equal without ``frequencies``, and
            ``"forest"`` has random clusters.
        embedding: module to whose weight the head is tied; None: none.
        seed: seed of trees and feature subsets. Parameters are drawn from torch's generator.
        **options: further arguments of the head, or of ``from_tokens``. They
            replace those that ``name`` stands for.

    Raises:
        ValueError: for an unknown name, or a value that the head rejects.
        TypeError: for options that the head does not have.

    Example:
        >>> import hstree
        >>> counts = range(5000, 0, -1)
        >>> head = hstree.heads.build_head("sampled", 16, 5000, frequencies=counts, negatives=64)
        >>> type(head).__name__, head.negatives
        ('SampledSoftmax', 64)
    """
    kind, given = _entry(name)
    options = {"frequencies": frequencies, **given, **options}
    if embedding is not None:
        options["embedding"] = embedding
    if "seed" in head_options(name):
        options = {"seed": seed} | options
    head: Head
    if issubclass(kind, (TreeEnsemble, ForestSoftmax)) and len(np.atleast_1d(tokens)):
        head = kind.from_tokens(in_features, n_classes, tokens, **options)
    elif issubclass(kind, TreeEnsemble):
        counts = options.pop("frequencies")
        counts = np.ones(n_classes) if counts is None else counts
        head = kind.from_counts(in_features, counts, **options)
    else:
        head = kind(in_features, n_classes, **options)
    head.name = name
    return head


def head_from_config(
    saved: Mapping[str, Any], tensors: Mapping[str, Tensor], embedding: HasWeight | None
) -> Head:
    """:meth:`Head.from_config` of a saved head: its ``name``, under which it was built, and its
    ``config``."""
    head = head_class(saved["name"]).from_config(saved["config"], tensors, embedding)
    head.name = saved["name"]
    return head


def head_options(name: str) -> set[str]:
    """Names of the options that :func:`build_head` takes for a head.

    Args:
        name: one of :func:`head_names`.

    Example:
        >>> import hstree
        >>> "negatives" in hstree.heads.head_options("sampled")
        True
    """
    head, found = head_class(name), set[str]()
    for base in (base for base in head.__mro__ if "__init__" in vars(base)):
        parameters = inspect.signature(vars(base)["__init__"]).parameters.values()
        own = {each.name for each in parameters if each.kind is each.KEYWORD_ONLY}
        found |= own.difference(vars(base).get("for_subclasses", ()))
        if all(each.kind is not each.VAR_KEYWORD for each in parameters):
            break
    if issubclass(head, (TreeEnsemble, ForestSoftmax)):
        given = inspect.signature(head.from_tokens).parameters.values()
        found |= {each.name for each in given if each.kind is each.KEYWORD_ONLY}
        found -= {"trees", "vectors", "groups"}  # of trees that are given
    return found


def load_head(path: str | os.PathLike[str], *, embedding: HasWeight | None = None) -> Head:
    """Read a head that :meth:`Head.save` wrote, on the CPU.

    Args:
        path: the safetensors file.
        embedding: module to whose weight [V, D] a head that was saved tied is tied again. The head
            is then on its device. None: the head gets its own copy of the weight in the file.

    Raises:
        FileNotFoundError: if the file does not exist.
        ValueError: if it is a folder or not a saved head; for an ``embedding`` of another shape, or
            for a head that was not tied; without it, if the file has no such weight.

    Example:
        >>> import hstree
        >>> head = hstree.Softmax(16, 100)
        >>> head.save("head.safetensors")
        >>> type(hstree.load_head("head.safetensors"))
        <class 'hstree.heads.softmax.Softmax'>
    """
    if Path(path).is_dir():
        raise ValueError(f"path: expected a file, got the folder {os.fspath(path)}")
    try:
        tensors, metadata = read_tensors(path)
    except SafetensorError as error:
        raise ValueError(
            f"path: expected a safetensors file, got {os.fspath(path)}, which is another file or "
            f"damaged: {error}"
        ) from error
    if METADATA_KEY not in metadata:
        raise ValueError(
            f"path: expected a saved head, got {os.fspath(path)}, a safetensors file without "
            f"{METADATA_KEY} metadata"
        )
    try:
        head = _built(path, json.loads(metadata[METADATA_KEY]), tensors, embedding)
    except TyingError:
        raise
    except Exception as error:  # whatever a damaged file leads to
        if ran_out(error):
            raise
        raise ValueError(
            f"path: expected a saved head, got {os.fspath(path)}, which is damaged or from another "
            f"version of hstree: {type(error).__name__}: {error}"
        ) from error
    return head if embedding is None else head.to(embedding.weight.device)


def _built(
    path: str | os.PathLike[str],
    saved: Any,
    tensors: dict[str, Tensor],
    embedding: HasWeight | None,
) -> Head:
    """The head of a file. No memory is taken before the sizes have been compared with those of
    the tensors."""
    tied = saved["config"].get("tied", False)
    if embedding is not None and not tied:
        raise TyingError(f"embedding: expected None, since {os.fspath(path)} holds no tied head")
    _check_sizes(path, saved["config"], tensors, embedding)
    with torch.device("meta"):
        head = head_from_config(saved, tensors, embedding)
    if embedding is not None:
        tensors |= dict.fromkeys(tied_names(head, embedding), embedding.weight)
    elif tied and not head.state_dict().keys() <= tensors.keys():
        raise _no_embedding(path)
    head.load_state_dict(tensors, assign=True)  # keeps the dtype of the tensors
    return head


def saved_head(
    source: str, saved: dict[str, Any], tensors: dict[str, Tensor], embedding: HasWeight
) -> Head:
    """The head of a saved model, tied to its embedding if it was.

    Raises:
        ValueError: if its configuration and tensors are not those of a head; the message begins
            with ``source``.
    """
    given = embedding if saved["config"].get("tied", False) else None
    try:
        return _built(source, saved, tensors, given)
    except Exception as error:  # whatever damaged files lead to
        if ran_out(error):
            raise
        raise ValueError(
            f"{source}: expected the configuration of the head whose tensors are saved with it, "
            f"got one that is damaged or of another version of hstree: {type(error).__name__}: "
            f"{error}"
        ) from error


_SIZES = ("in_features", "n_classes", "units")
_SMALL = 2**20  # a size up to this costs a few MB, whatever the file holds


def _check_sizes(
    path: str | os.PathLike[str],
    config: dict[str, Any],
    tensors: dict[str, Tensor],
    embedding: HasWeight | None,
) -> None:
    """Raises ValueError for a claimed size, of those for which constructors take memory on the
    host, that is beyond the number of elements of all tensors together."""
    held = sum(tensor.numel() for tensor in tensors.values())
    held += 0 if embedding is None else embedding.weight.numel()
    for name in _SIZES:
        claimed = config.get(name, 0)
        if not claimed <= max(held, _SMALL):
            if embedding is None and config.get("tied", False):
                raise _no_embedding(path)
            raise ValueError(
                f"{name}: expected a size that fits the tensors, which have {held:,} elements "
                f"together, got {claimed}"
            )


def _no_embedding(path: str | os.PathLike[str]) -> TyingError:
    return TyingError(
        f"embedding: expected the module to whose weight the head in {os.fspath(path)} is tied, "
        "because the file was written without this weight, got None"
    )
