"""Calls the operators with wrong arguments in a process of its own, which may crash.

    python -m fuzz.hostile SEED COUNT

Each case spoils one or two arguments of a call that is right. The call must either return, or raise
RuntimeError, ValueError or TypeError with a message that names an argument. Prints a line for each
case that does otherwise, and the number of calls that were refused and that returned.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fuzz.forests import PATHS
from fuzz.problems import Problem, Setting
from fuzz.test_ops import all_classes, function_of, target_arguments
from hstree import ops

SEARCH = [
    *("hidden", "weight", "bias", "class_weight", "class_bias", "root_log_prob"),
    *("log_gate", "feature_index", "node", "edge", "leaf_edge"),
]
# Names in the schemas: those of backward operators, and n_classes of tree_log_softmax.
INNER_NAMES = ["grad_log_prob", "score", "classes"]
DIFFERENTIABLE = (
    ops.path_log_prob,
    ops.group_log_prob,
    ops.tree_log_softmax,
    ops.feature_gather,
    ops.target_log_softmax,
    ops.mixture_log_prob,
    ops.forest_log_prob,
    ops.piecewise,
    ops.plif,
)
NUMBERS = (torch.float32, torch.float64, torch.bfloat16, torch.int32, torch.int64, torch.bool)
Call = tuple[Callable[..., Any], dict[str, Any]]


def of_targets(problem: Problem) -> Call:
    tables = ["path_offset", "path", "leaf_position", "feature_index"]
    if problem.setting.groups:
        tables = ["cluster", "order", "begin"]
    values, keyword = target_arguments(problem)
    arguments = {"hidden": problem.hidden, "weight": problem.weight, "bias": problem.bias}
    arguments |= dict(zip(["target", *tables], values, strict=True))
    return function_of(problem), arguments | keyword


def all_calls(problem: Problem) -> list[Call]:
    """A right call of every operator."""
    random, rows = problem.random, problem.setting.rows
    search = dict(zip(SEARCH, problem.search_arguments(), strict=True))
    values, keywords = all_classes(problem, torch.float32)
    names = ("score", "log_gate", "node", "edge", "n_classes")
    classes, features = problem.setting.n_classes, problem.setting.features
    latent = torch.randn(rows, 2, features)
    weight, target = torch.randn(classes, features), problem.target
    index = torch.tensor([np.flatnonzero(random.integers(0, 2, classes))])
    adam = {
        "weight": weight.clone(),
        "exp_avg": torch.zeros_like(weight),
        "exp_avg_sq": torch.zeros_like(weight),
        "index": index,
        "values": torch.randn(index.shape[1], features),
        "step": 1,
        "lr": 0.1,
        "beta1": 0.9,
        "beta2": 0.99,
        "eps": 1e-8,
    }
    logits = {"logits": torch.randn(rows, classes), "target": target, "c": 0.1, "k": 2.0}
    table = {"table": torch.randn(5, 2), "radius": 2.0}
    subset = torch.arange(features, dtype=torch.int32)[None]
    prior = torch.zeros(rows, 2).log_softmax(1)
    mixture = {"latent": latent, "log_prior": prior, "weight": weight, "bias": None}
    forest = {"hidden": latent[:, 0], "log_prior": prior, "cluster_score": torch.randn(rows, 2, 3)}
    forest |= {"weight": weight, "bias": None, "offset": weight[:, 0]}
    forest["cluster"] = torch.from_numpy(random.integers(0, 3, (classes, 2))).int()
    scores = dict(zip(names, values, strict=True)) | keywords
    top = [(ops.group_topk, scores | {"k": 1})] if problem.setting.groups else []
    return [
        of_targets(problem),
        (ops.tree_log_softmax, scores),
        *top,
        (ops.tree_topk, search | {"k": 1 + int(random.integers(classes))}),
        (ops.sample, search | {"seed": torch.tensor([3]), "n": 4, "temperature": 1.0}),
        (ops.feature_gather, {"hidden": problem.hidden, "feature_index": subset}),
        (ops.target_log_softmax, logits | table),
        (ops.mixture_log_prob, mixture | {"target": target, "chunk_rows": 3}),
        (ops.forest_log_prob, forest | {"target": target, "chunk_rows": 3}),
        (ops.piecewise, {"input": torch.randn(7, 2), **table}),
        (ops.plif, {"input": torch.randn(7), "slopes": torch.rand(4) + 0.1, "radius": 2.0}),
        (ops.sparse_adam_, adam),
    ]


def spoilt_tensor(value: Tensor, random: np.random.Generator) -> Tensor:
    way = random.integers(5 if value.is_floating_point() else 9)
    if way == 0:
        return value.to(NUMBERS[random.integers(len(NUMBERS))])
    if way == 1:
        return value.to("meta")
    if way == 2:
        return value.unsqueeze(int(random.integers(value.dim() + 1)))
    if way == 3 and value.dim():
        dim = int(random.integers(value.dim()))
        size = value.shape[dim]
        return value.narrow(dim, 0, int(random.integers(size + 1)) if size else 0)
    if way == 4 and value.dim():
        dim = int(random.integers(value.dim()))
        return torch.cat([value, value.narrow(dim, 0, min(1, value.shape[dim]))], dim)
    value = value.clone()
    if value.is_floating_point() or not value.numel():
        return value
    if value.dtype == torch.bool:
        return ~value
    flat, info = value.view(-1), torch.iinfo(value.dtype)
    for _ in range(random.integers(1, 4)):
        wild = [info.min, info.max, -1, 1 << 20, len(flat)][random.integers(5)]
        near = int(random.integers(-3, 40))
        flat[int(random.integers(len(flat)))] = wild if random.random() < 0.4 else near
    return value


def spoilt(value: Any, random: np.random.Generator) -> Any:
    if isinstance(value, Tensor):
        return spoilt_tensor(value, random)
    if isinstance(value, bool):
        return value
    if isinstance(value, int):
        return [-1, 0, value - 1, value + 1, 65, -(2**62), 2**20 + 1][random.integers(7)]
    if isinstance(value, float):
        return [np.nan, np.inf, -np.inf, -1.0, 0.0, 1e308][random.integers(6)]
    return value


def is_named(message: str, names: list[str]) -> bool:
    message = re.sub(r"^hstree::\w+: ", "", message)
    return re.match(rf"({'|'.join(names)})\b", message) is not None


def main(seed: int, count: int) -> None:
    torch.set_num_threads(1)
    refused = returned = 0
    for number in range(seed, seed + count):
        random = np.random.default_rng(number)
        shapes = [str(random.choice(PATHS))]
        setting = Setting(
            n_trees=int(random.integers(1, 4)),
            n_classes=int(random.integers(1, 30)),
            shapes=shapes,
            groups=bool(random.integers(2)),
            wide_root=bool(random.integers(2)),
            rows=int(random.integers(0, 9)),
            features=int(random.integers(1, 6)),
            subset=None if random.integers(2) else 3,
            bias=bool(random.integers(2)),
            dtype="float32",
            layout="contiguous",
            scale=1.0,
            ignored=0.2,
            seed=number,
        )
        for function, arguments in all_calls(Problem(setting)):
            given = [name for name, value in arguments.items() if value is not None]
            for _ in range(random.integers(1, 3)):
                name = given[random.integers(len(given))]
                arguments[name] = spoilt(arguments[name], random)
            place = f"{number} {function.__name__}"
            tensors = [value for value in arguments.values() if isinstance(value, Tensor)]
            print(place, end="\r", file=sys.stderr, flush=True)
            for name, value in arguments.items():
                if isinstance(value, Tensor):
                    learned = function in DIFFERENTIABLE and value.dtype == torch.float32
                    learned = learned and bool(random.integers(2))
                    arguments[name] = value.detach().requires_grad_(learned)
            try:
                result = function(**arguments)
                result = result if isinstance(result, tuple) else (result,)
                for value in result:
                    if value is not None and value.requires_grad:
                        value.sum().backward(retain_graph=True)
                returned += 1
            except Exception as error:
                refused += 1
                fits = isinstance(error, (RuntimeError, ValueError, TypeError))
                fits = fits and is_named(str(error), [*arguments, *INNER_NAMES])
                # torch itself answers where meta tensors meet others.
                if not fits and not any(value.is_meta for value in tensors):
                    first = str(error).splitlines()[0]
                    print(f"{place}: {type(error).__name__}: {first}")
    print(f"{refused} refused, {returned} returned")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
