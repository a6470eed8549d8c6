"""Checks of arguments. Each error names the argument, what was expected and what it got."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

_NO_NUMBER = (bool, np.bool_, str, bytes, type(None))
_MOST = 2**63 - 1
_LONGEST = 80


def check_bool(name: str, value: Any) -> bool:
    """The value; raises ValueError unless it is True or False."""
    if not isinstance(value, (bool, np.bool_)):
        raise ValueError(f"{name}: expected True or False, got {_shown(value)}")
    return bool(value)


def check_int(name: str, value: Any, low: int = 1, high: int = _MOST) -> int:
    """The value as an int; raises ValueError unless it is a whole number in [low, high]."""
    try:
        number = None if isinstance(value, _NO_NUMBER) else operator.index(value)
    except TypeError:
        number = None
    if number is None or not low <= number <= high:
        bounded = high != _MOST or low < -_MOST
        open_ended = not bounded and (number is None or number < low)
        limits = f"of at least {low}" if open_ended else f"from {low} to {high}"
        got = _shown(value if number is None else number)
        raise ValueError(f"{name}: expected a whole number {limits}, got {got}")
    return number


def check_sequence(name: str, values: Any) -> list[Any]:
    """The values as a list; raises ValueError for a string or what cannot be iterated over."""
    if isinstance(values, (str, bytes)) or not hasattr(values, "__iter__"):
        raise ValueError(f"{name}: expected a sequence of numbers, got {_shown(values)}")
    return list(values)


def check_ignore_index(value: Any) -> int:
    """The value as an int; raises ValueError unless it is a whole number of 64 bits."""
    return check_int("ignore_index", value, -(2**63))


def check_seed(seed: Any) -> int:
    """The seed as an int; raises ValueError unless it fits into an unsigned 64-bit integer."""
    return check_int("seed", seed, 0, 2**64 - 1)


def check_number(name: str, value: Any, *, positive: bool = False) -> float:
    """The value as a float; raises ValueError unless it is finite and, with ``positive``, above
    0."""
    number = _float(value)
    if not math.isfinite(number) or (positive and number <= 0):
        kind = "finite positive number" if positive else "finite number"
        raise ValueError(f"{name}: expected a {kind}, got {_shown(value)}")
    return number


def check_nonnegative(name: str, value: Any) -> float:
    """The value as a float; raises ValueError unless it is finite and at least 0."""
    number = check_number(name, value)
    if number < 0:
        raise ValueError(f"{name}: expected a number of at least 0, got {_shown(value)}")
    return number


def check_probability(name: str, value: Any) -> float:
    """The value as a float; raises ValueError unless it is in [0, 1)."""
    number = _float(value)
    if not 0 <= number < 1:
        raise ValueError(f"{name}: expected a probability in [0, 1), got {_shown(value)}")
    return number


def _float(value: Any) -> float:
    """The value as a float, or NaN if it is not one number or too large for a float."""
    if isinstance(value, _NO_NUMBER) or not hasattr(value, "__float__"):
        return math.nan
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):  # arrays; tensors; large integers
        return math.nan


def _shown(value: Any) -> str:
    """The value in an error, on one line and not too long."""
    try:
        text = " ".join(repr(value).split())
    except ValueError:  # Python writes no integer of more than some thousand digits
        return "an integer of thousands of digits"
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def check_temperature(value: Any) -> float:
    """The temperature as a float; raises ValueError unless it is in [1e-6, 1e6]. Beyond these the
    most probable class, or a uniform draw, is the same up to rounding."""
    number = _float(value)
    if not 1e-6 <= number <= 1e6:
        raise ValueError(f"temperature: expected a number from 1e-6 to 1e6, got {_shown(value)}")
    return number


def check_up_to(name: str, value: Any, high: float) -> float:
    """The value as a float; raises ValueError unless it is in [0, high]."""
    number = _float(value)
    if not 0 <= number <= high:
        raise ValueError(f"{name}: expected a number from 0 to {high:g}, got {_shown(value)}")
    return number


def check_generator(generator: Any, device: torch.device, of: str = "hidden") -> None:
    """Raises TypeError unless it is a random generator or None, and ValueError for one of another
    device than that of the argument ``of``."""
    if generator is None:
        return
    if not isinstance(generator, torch.Generator):
        raise TypeError(f"generator: expected a torch.Generator or None, got {generator!r}")
    own = generator.device
    both_known = own.index is not None and device.index is not None
    if own.type != device.type or (both_known and own.index != device.index):
        raise ValueError(
            f"generator: expected one of the device of {of}, {device}, got one of {own}"
        )


def check_choice(name: str, value: Any, choices: Collection[str]) -> str:
    """The value; raises ValueError unless it is one of the choices."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name}: expected one of {', '.join(choices)}, got {_shown(value)}")
    return value


def check_tensor(name: str, value: Any) -> None:
    """Raises TypeError unless the value is a tensor."""
    if isinstance(value, Tensor):
        return
    kind = type(value)
    got = kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
    way = "torch.as_tensor makes one of it"
    if isinstance(value, nn.utils.rnn.PackedSequence):
        got, way = "a PackedSequence", "pass its field data"
    raise TypeError(f"{name}: expected a tensor, got {got}; {way}")


def check_hidden(hidden: Any, in_features: int) -> None:
    """Raises TypeError or ValueError unless these are context vectors [..., D], floating point."""
    check_tensor("hidden", hidden)
    if hidden.ndim < 1 or hidden.shape[-1] != in_features:
        raise ValueError(f"hidden: expected shape [..., {in_features}], got {tuple(hidden.shape)}")
    if not hidden.is_floating_point():
        raise ValueError(f"hidden: expected a floating-point dtype, got {hidden.dtype}")


in_torch_func: Callable[[], bool] = torch._C._are_functorch_transforms_active
"""Whether a transform of torch.func is active."""


def is_readable(tensor: Tensor) -> bool:
    """Whether values may be read: without a graph that must not depend on them, and on a CPU, where
    reading costs no synchronization."""
    traced = torch.compiler.is_compiling() or in_torch_func()
    return tensor.device.type == "cpu" and not traced


def check_classes(name: str, value: Any) -> Tensor:
    """Classes as int64; raises TypeError unless they are a tensor, and ValueError unless they are
    int64 or, as in torch, uint8."""
    check_tensor(name, value)
    if value.dtype not in (torch.int64, torch.uint8):
        raise ValueError(f"{name}: expected dtype torch.int64 or torch.uint8, got {value.dtype}")
    classes: Tensor = value.long()
    return classes


def mark_targets(
    target: Tensor, n_classes: int, ignore_index: int, *, name: str = "target"
) -> Tensor:
    """Replace ``ignore_index`` by -1 and bad targets by V; other targets are classes in [0, V).

    The operators ignore rows with target -1 and make rows with target V NaN.

    Args:
        target: classes, int64 or, as in torch, uint8, of any shape.
        n_classes: number of classes, V.
        ignore_index: value of the targets to ignore.
        name: name of the argument in the message of an error.

    Returns:
        The targets, int64, shape of ``target``: itself if it is int64 and, where values are read,
        has nothing but classes.

    Raises:
        TypeError: if ``target`` is not a tensor.
        ValueError: for another dtype, or an ``ignore_index`` that is not a whole number of 64 bits;
            on the CPU, for a target that is neither in [0, V) nor ``ignore_index``. Under
            torch.compile, under torch.func, and on a GPU, where reading the values would cost a
            synchronization, such a target becomes V.

    Example:
        >>> import torch
        >>> from hstree.ops import mark_targets
        >>> mark_targets(torch.tensor([3, -100, 0]), n_classes=5, ignore_index=-100)
        tensor([ 3, -1,  0])
    """
    target = check_classes(name, target)
    ignore_index = check_ignore_index(ignore_index)
    unread = not is_readable(target)
    if not unread and target.numel():
        least, most = target.aminmax()
        lowest, highest = int(least), int(most)
        if lowest >= 0 and highest < n_classes and not lowest <= ignore_index <= highest:
            return target
    ignored = target == ignore_index
    if unread:
        bad = target != target.clamp(0, n_classes - 1)
        return target.masked_fill(bad, n_classes).masked_fill(ignored, -1)
    bad = ((target < 0) | (target >= n_classes)) & ~ignored
    if bad.any():
        raise ValueError(
            f"{name}: expected values in [0, {n_classes}) or "
            f"{'ignore_index ' * (name != 'exclude')}{ignore_index}, got {int(target[bad][0])}"
        )
    return target.masked_fill(ignored, -1)


def check_entries(name: str, values: Tensor, right: Tensor, expected: str) -> None:
    """Raises ValueError for the first of the values that is not right, by a mask of their shape."""
    if not bool(right.all()):
        at = (~right).nonzero()[0].tolist()
        raise ValueError(f"{name}{at}: expected {expected}, got {values[tuple(at)].item()}")


def check_class_weight(class_weight: Any, n_classes: int) -> Tensor | None:
    """Class weights as a floating-point tensor [V], or None for None.

    Raises:
        ValueError: unless they are V finite numbers of at least 0.
    """
    if class_weight is None:
        return None
    try:
        weight = torch.as_tensor(class_weight, device="cpu").detach().clone()
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"class_weight: expected {n_classes} numbers, got {error}") from error
    if weight.shape != (n_classes,) or weight.is_complex() or weight.dtype == torch.bool:
        raise ValueError(
            f"class_weight: expected {n_classes} numbers, one per class, got "
            f"shape {tuple(weight.shape)} and dtype {weight.dtype}"
        )
    if not weight.is_floating_point() or weight.dtype == torch.float64:
        weight = weight.to(torch.get_default_dtype())
    right = weight.isfinite() & (weight >= 0)
    check_entries("class_weight", weight, right, "a finite number of at least 0")
    return weight


def check_order(
    order: Tensor | None, n_classes: int, frequencies: npt.NDArray[np.float64] | None
) -> Tensor:
    """The order of the classes, int64 [V], for None by decreasing frequencies or, without them, 0,
    1, 2, ...; raises ValueError unless it is a permutation."""
    if order is None and frequencies is not None:
        return torch.from_numpy(np.argsort(-frequencies, kind="stable"))
    if order is None:
        return torch.arange(n_classes, device="cpu")
    if not isinstance(order, Tensor):
        raise ValueError(f"order: expected a tensor int64 [{n_classes}], got {type(order)}")
    right = order.shape == (n_classes,) and order.dtype == torch.int64
    if not right or not torch.equal(
        order.sort().values, torch.arange(n_classes, device=order.device)
    ):
        raise ValueError(
            f"order: expected a permutation of 0..{n_classes - 1}, int64 [{n_classes}], got "
            f"{'no permutation' if right else f'shape {tuple(order.shape)} and {order.dtype}'}"
        )
    return order


def check_int_array(
    name: str, values: Any, dtype: type[np.integer[Any]], copy: bool = True
) -> npt.NDArray[Any]:
    """The values as a contiguous 1-D array of ``dtype``, a new one unless ``copy`` is False; raises
    TypeError unless they are integers, and ValueError for a wrong shape or an integer out of range
    of ``dtype``."""
    array = np.asarray(values)
    if array.ndim != 1:
        raise ValueError(f"{name}: expected a 1-D array, got shape {array.shape}")
    if array.size == 0:
        return np.empty(0, dtype)
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name}: expected integers, got dtype {array.dtype}")
    limits = np.iinfo(dtype)
    if not np.can_cast(array.dtype, dtype):
        bad = (array < limits.min) | (array > limits.max)
        if bad.any():
            i = int(bad.argmax())
            raise ValueError(
                f"{name}[{i}]: expected a value that fits {limits.dtype}, got {array[i]}"
            )
    return np.array(array, dtype, order="C") if copy else np.ascontiguousarray(array, dtype)


def check_frequencies(
    frequencies: Any, n_classes: int | None = None, name: str = "frequencies"
) -> npt.NDArray[np.float64]:
    """Frequencies as a contiguous float64 [V] array; raises TypeError unless they are real numbers,
    and ValueError unless they are finite, none negative, with a finite sum."""
    if isinstance(frequencies, Tensor):  # numpy has no bfloat16
        frequencies = frequencies.detach().cpu()
        if frequencies.is_floating_point():
            frequencies = frequencies.double()
    try:
        array = np.asarray(frequencies)
    except ValueError as error:  # rows of different lengths
        raise ValueError(f"{name}: expected a 1-D array of numbers: {error}") from None
    if array.dtype.kind not in "iuf":
        raise TypeError(f"{name}: expected real numbers, got dtype {array.dtype}")
    if array.ndim != 1 or (n_classes is not None and len(array) != n_classes) or len(array) == 0:
        wanted = "at least one class" if n_classes is None else f"shape ({n_classes},)"
        raise ValueError(f"{name}: expected a 1-D array of {wanted}, got shape {array.shape}")
    array = np.ascontiguousarray(array, dtype=np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        total = array.sum()
        if not np.isfinite(total) or array.min() < 0:
            bad = ~(np.isfinite(array) & (array >= 0))
            if bad.any():
                i = int(bad.argmax())
                raise ValueError(
                    f"{name}[{i}]: expected a finite number of at least 0, got {array[i]}"
                )
            raise ValueError(f"{name}: expected a finite sum, got {total}")
    return array


def smoothed_frequencies(frequencies: npt.ArrayLike, n_classes: int) -> npt.NDArray[np.float64]:
    """Frequencies [V] as float64; zeros are replaced by half of the smallest positive frequency.

    If all frequencies are zero, all become one.

    Raises:
        TypeError: if they are not real numbers.
        ValueError: for a wrong shape, or a negative, infinite or NaN entry.
    """
    mass = check_frequencies(frequencies, n_classes)
    positive = mass[mass > 0]
    if not len(positive):
        return np.ones(n_classes)
    return np.where(mass > 0, mass, positive.min() / 2)
