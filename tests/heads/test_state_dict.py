"""What loops over all entries of a state dict, or over all buffers, do to a head.

Trees, orders of the classes and other tables of whole numbers are the head's own: averages and
casts leave them as they are, or the next load says that they were changed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from safetensors.torch import load_model, save_file, save_model
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from heads.support import FREQUENCIES, HEADS, ORDER, REVERSED, SOME, D, V, draw, draw_targets, make
from hstree._files import read_tensors
from hstree.heads import (
    AdaptiveSoftmax,
    ForestSoftmax,
    Head,
    Mixtape,
    SampledSoftmax,
    TreeEnsemble,
    load_head,
)
from hstree.heads.state import EXTRA_STATE
from hstree.trees import build_ensemble

every_head = pytest.mark.parametrize("kind", HEADS)

MANY = 5000  # neighbours of numbers above 2,048 are the same in float16
ENSEMBLE = build_ensemble("huffman", MANY, 2, range(MANY, 0, -1), clusters=64)
LARGE: dict[str, Callable[[], Head]] = {
    "trees": lambda: TreeEnsemble(4, MANY, build_ensemble("random", MANY, 2)),
    "trees, groups": lambda: TreeEnsemble(4, MANY, ENSEMBLE, subset_size=3),
    "forest": lambda: ForestSoftmax(4, MANY, n_trees=2, clusters=3000),
    "mixtape": lambda: Mixtape(4, MANY, order=torch.arange(MANY - 1, -1, -1)),
    "adaptive": lambda: AdaptiveSoftmax(
        4, MANY, cutoffs=[500], order=torch.arange(MANY - 1, -1, -1)
    ),
    "sampled": lambda: SampledSoftmax(4, MANY, negatives=50, frequencies=range(MANY, 0, -1)),
}
every_table = pytest.mark.parametrize("kind", LARGE)


def large(kind: str) -> Head:
    head, random = LARGE[kind](), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=random))
    return head.eval()


def check_same(got: Head, wanted: Head, **tolerance: Any) -> None:
    """Loss and log-probabilities; gradients in single precision."""
    hidden = draw(6, wanted.in_features)
    target = draw_targets(6, n_classes=wanted.n_classes)
    values = []
    for head in (got, wanted):
        torch.manual_seed(0)
        loss = head(hidden, target).loss
        if all(parameter.dtype == torch.float32 for parameter in head.parameters()):
            loss.backward()
        grads = [p.grad.to_dense() for p in head.parameters() if p.grad is not None]
        values.append([loss, head.log_prob(hidden), *grads])
        head.zero_grad()
    torch.testing.assert_close(*values, **tolerance)


def average(average: dict[str, Tensor], state: dict[str, Tensor], decay: float = 0.9999) -> None:
    """timm's rule, for all entries."""
    for a, v in zip(average.values(), state.values(), strict=True):
        a.copy_(decay * a + (1 - decay) * v)


@every_head
def test_average_of_all_entries_in_place(kind: str, tmp_path: Path) -> None:
    head = make(kind)
    ema = copy.deepcopy(head)
    with torch.no_grad():
        for _ in range(3):
            average(ema.state_dict(), head.state_dict())
    check_same(ema, head)
    ema.save(tmp_path / "ema")
    check_same(load_head(tmp_path / "ema"), head)


@every_table
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_average_kept_in_a_dictionary_of_floats(kind: str, dtype: torch.dtype) -> None:
    head, other = large(kind), LARGE[kind]().eval()
    state = {name: value.to(dtype, copy=True) for name, value in head.state_dict().items()}
    for _ in range(20):
        average(state, head.state_dict())
    other.load_state_dict(state)
    check_same(other, head, rtol=1e-4, atol=1e-4)


@every_table
def test_truncated_tables_are_reported(kind: str) -> None:
    """An average kept in the dtype of each entry: whole numbers are truncated in every step."""
    head = large(kind)
    state = copy.deepcopy(head.state_dict())
    average(state, head.state_dict())
    with pytest.raises(ValueError, match=r"_extra_state: .* the tables were changed\. .*average"):
        LARGE[kind]().load_state_dict(state)
    with pytest.raises(ValueError, match="the tables were changed"):
        type(head).from_config(head.config(), state)


@pytest.mark.parametrize("kind", [*LARGE, *(f"small {kind}" for kind in SOME)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_all_entries_in_half_precision(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Loaded, and as a file: exactly what casts of the weights alone give."""
    small = kind.removeprefix("small ")
    head = large(kind) if kind in LARGE else make(small).eval()
    wanted = copy.deepcopy(head).to(dtype)
    state = {name: value.to(dtype) for name, value in head.state_dict().items()}
    for assign in (False, True):
        other = (LARGE[kind] if kind in LARGE else HEADS[small])().eval()
        other.load_state_dict(state, assign=assign)
        check_same(other, wanted if assign else copy.deepcopy(wanted).float())
    head.save(tmp_path / "head")
    _, metadata = read_tensors(tmp_path / "head")
    save_file({name: value.clone() for name, value in state.items()}, tmp_path / "half", metadata)
    check_same(load_head(tmp_path / "half").eval(), wanted)


@every_table
@pytest.mark.parametrize("rule", ["mean", "ema", "function"])
@pytest.mark.parametrize("use_buffers", [False, True])
def test_averaged_model_of_torch(kind: str, rule: str, use_buffers: bool) -> None:
    head = large(kind)
    options: dict[str, Any] = {
        "mean": {},
        "ema": {"multi_avg_fn": get_ema_multi_avg_fn(0.9999)},
        "function": {"avg_fn": lambda a, v, n: 0.9999 * a + 0.0001 * v},
    }[rule]
    averaged = AveragedModel(head, use_buffers=use_buffers, **options)
    for _ in range(3):
        averaged.update_parameters(head)
    check_same(averaged.module, head)


@every_head
def test_tables_are_neither_parameters_nor_buffers(kind: str) -> None:
    head = make(kind)
    assert not list(head.buffers())
    assert all(parameter.is_floating_point() for parameter in head.parameters())


PAIRS: dict[str, tuple[Head, Head, str]] = {
    "trees": (make("trees"), TreeEnsemble(D, V, build_ensemble("random", V, 1)), "trees.0.bound"),
    "number of trees": (
        TreeEnsemble(D, V, build_ensemble("random", V, 2)),
        TreeEnsemble(D, V, build_ensemble("random", V, 3)),
        "trees.2.",
    ),
    "subsets": (
        *(
            TreeEnsemble(D, V, build_ensemble("random", V, 2), subset_size=4, seed=seed)
            for seed in (1, 2)
        ),
        "feature_index",
    ),
    "adaptive": (*(AdaptiveSoftmax(D, V, order=o) for o in (ORDER, REVERSED)), "order"),
    "forest": (*(ForestSoftmax(D, V, clusters=5, seed=seed) for seed in (1, 2)), "cluster"),
    "mixtape": (*(Mixtape(D, V, order=o) for o in (ORDER, REVERSED)), "own"),
    "sampled": (
        SampledSoftmax(D, V, frequencies=FREQUENCIES),
        SampledSoftmax(D, V, frequencies=FREQUENCIES, distribution="uniform"),
        "cumulative",
    ),
}


@pytest.mark.parametrize("case", PAIRS)
def test_the_state_of_other_tables_is_refused(case: str) -> None:
    head, other, table = PAIRS[case]
    state = head.state_dict()
    with pytest.raises((ValueError, RuntimeError)) as error:
        other.load_state_dict(state)
    assert "expected the tables of this head, got others" in str(error.value)
    assert table in str(error.value)
    assert "Build the head with the arguments that it was saved with" in str(error.value)
    (entry,) = (key for key in state if key.endswith(EXTRA_STATE))
    del state[entry]
    with pytest.raises(RuntimeError, match=r"Missing key.*_extra_state"):
        copy.deepcopy(head).load_state_dict(state)


@pytest.mark.parametrize("state", [None, 3, torch.zeros(2, 2), torch.zeros(0), torch.zeros(99)])
def test_an_entry_without_tables_is_refused(state: Any) -> None:
    head = make("trees")
    with pytest.raises(ValueError, match="_extra_state: expected the tables of a head as bytes"):
        head.load_state_dict(head.state_dict() | {f"below.{EXTRA_STATE}": state})


@pytest.mark.parametrize("kind", SOME)
def test_models_of_safetensors_and_accelerate(kind: str, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(D, D), make(kind))
    save_model(model, tmp_path / "model.safetensors")
    for load in (
        lambda other: load_model(other, tmp_path / "model.safetensors"),
        lambda other: accelerate.load_checkpoint_in_model(
            other, str(tmp_path / "model.safetensors")
        ),
        lambda other: set_model_state_dict(
            other, dict(model.state_dict()), options=StateDictOptions(full_state_dict=True)
        ),
    ):
        other = nn.Sequential(nn.Linear(D, D), HEADS[kind]())
        load(other)
        check_same(other[1], model[1])


@every_head
def test_tables_follow_parameters_that_move_alone(kind: str) -> None:
    """As FSDP and accelerate move them: without ``to`` of the head."""
    head = make(kind)
    wanted = copy.deepcopy(head)
    kept = {name: parameter.detach() for name, parameter in head.named_parameters()}
    for device in ("meta", "cpu"):
        for name, value in kept.items():
            path, _, last = name.rpartition(".")
            module = head.get_submodule(path)
            module._parameters[last] = nn.Parameter(value.to(device), value.is_floating_point())
        hidden, target = draw(5, D).to(device), draw_targets(5).to(device)
        assert head.log_prob(hidden).device.type == device
        assert head(hidden, target).output.device.type == device
        assert head.sample(hidden).device.type == device
    for name, parameter in head.named_parameters():
        parameter.requires_grad_(wanted.get_parameter(name).requires_grad)
    check_same(head, wanted)
