"""Two processes that share the parameters compute what one process computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from distributed.models import FREQUENCIES, Model, batches, model, my_part, train, tree_head
from hstree.distributed import fully_shard
from hstree.heads import Head, Mixtape, MixtureOfSoftmaxes, Softmax, TreeEnsemble

MIXED = (False, True)
FULL = StateDictOptions(full_state_dict=True)
HEADS = {
    "trees": lambda: tree_head(),
    "sparse trees": lambda: tree_head(sparse=True),
    "sparse trees, leaves": lambda: tree_head(sparse=True, node_vectors="leaves"),
    "softmax": lambda: Softmax(12, 40),
    "mos": lambda: MixtureOfSoftmaxes(12, 40, components=2),
    "mixtape": lambda: Mixtape(12, 40),
}


def head(name: str) -> Head:
    torch.manual_seed(1)
    return HEADS[name]().double()


def contexts() -> Tensor:
    random = torch.Generator().manual_seed(4)
    return torch.randn(6, 12, generator=random, dtype=torch.float64)


def full(tensor: Any) -> Tensor:
    tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return tensor.detach().to_dense().clone()


def full_gradients(module: nn.Module) -> dict[str, Tensor]:
    """A head without a gradient for a parameter has zeros."""
    return {
        name: torch.zeros(()) if p.grad is None else full(p.grad)
        for name, p in module.named_parameters()
    }


def sharded(sparse: bool, seed: int = 0, **options: Any) -> Model:
    made = model(sparse, seed)
    fully_shard(made.head, **options)
    fully_shard(made, **options)
    return made


def trained(sparse: bool, parts: int = 1) -> dict[str, Any]:
    made = sharded(sparse)
    losses = train(made, parts=parts)
    dist.all_reduce(losses)
    state = get_model_state_dict(made, options=FULL)
    shards = {name: isinstance(p, DTensor) for name, p in made.named_parameters()}
    return {"losses": losses / 2, "state": state, "shards": shards}


def loaded() -> dict[str, Any]:
    """A state of one process in two."""
    made = sharded(sparse=True, seed=5)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    state = model(sparse=True).state_dict() if dist.get_rank() == 0 else {}
    set_model_state_dict(made, state, options=options)
    return get_model_state_dict(made, options=FULL)


def methods_of(made: Head) -> dict[str, Any]:
    values, classes = made.topk(contexts(), 3)
    found: dict[str, Any] = {"log_prob": made.log_prob(contexts()), "values": values}
    (found["log_prob"].square().sum() + values.sum()).backward()
    found["gradients"] = full_gradients(made)
    found |= {"classes": classes, "predict": made.predict(contexts())}
    found["sample"] = made.sample(contexts(), generator=torch.Generator().manual_seed(3))
    found["entropy"] = made.entropy(contexts())
    found["loss"] = made(contexts(), classes[:, 0]).loss
    return {
        name: value.detach() if isinstance(value, Tensor) else value
        for name, value in found.items()
    }


def methods() -> dict[str, Any]:
    """Of heads to which torch's own function was applied, and of one to which ours was."""
    found = {}
    for name in HEADS:
        made = head(name)
        shard = fully_shard if name.startswith("sparse") else fsdp.fully_shard
        shard(made)
        assert isinstance(made, fsdp.FSDPModule)
        found[name] = methods_of(made)
    return found


def in_float32(sparse: bool) -> Model:
    """The embedding is dense: rows that keep their dtype would not fit the linear layer."""
    torch.manual_seed(0)
    return Model(tree_head(sparse=sparse), sparse=False)


def in_bfloat16() -> dict[str, Any]:
    found = {}
    for sparse in MIXED:
        policy = fsdp.MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32
        )
        made = in_float32(sparse)
        fully_shard(made.head, mp_policy=policy)
        fully_shard(made, mp_policy=policy)
        tokens, target = map(my_part, next(batches()))
        loss = made(tokens, target)["loss"]
        loss.backward()
        total = loss.detach().clone()
        dist.all_reduce(total)
        found[sparse] = {"loss": total / 2, "gradients": full_gradients(made)}
    return found


def on_a_mesh() -> dict[str, Tensor]:
    """Replicated over two ranks, sharded over one."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    made = sharded(sparse=True, seed=dist.get_rank(), mesh=mesh)
    for parameter in made.parameters():  # all begin as those of the first rank
        if isinstance(parameter, DTensor):
            dist.broadcast(parameter.to_local().detach(), 0)
    tokens, target = map(my_part, next(batches()))
    made(tokens, target)["loss"].backward()
    return full_gradients(made)


def one_tree() -> dict[str, Any]:
    """Of one tree torch would shard nothing."""
    made = fully_shard(tree_head(1, gate="uniform").double())
    sizes = {name: p.to_local().shape for name, p in made.named_parameters()}
    made(contexts(), torch.arange(6)).loss.backward()
    state = get_model_state_dict(made, options=FULL)
    return {"sizes": sizes, "gradients": full_gradients(made), "state": state}


def deferred() -> Tensor:
    """Made without data, sharded, then set to first values."""
    with torch.device("meta"):
        made = TreeEnsemble(12, 40, tree_head().trees, frequencies=FREQUENCIES, subset_size=8)
    fully_shard(made)
    made.to_empty(device="cpu").reset_parameters()
    return made.log_prob(contexts().float()).detach()


def on_meta() -> str:
    with pytest.raises(ValueError, match="meta device") as error:
        fully_shard(tree_head(sparse=True).to("meta"))
    return str(error.value)


SCENARIOS = {
    "fsdp dense": lambda: trained(False),
    "fsdp sparse": lambda: trained(True),
    "fsdp accumulated": lambda: trained(True, parts=2),
    "fsdp loaded": loaded,
    "fsdp methods": methods,
    "fsdp bfloat16": in_bfloat16,
    "fsdp mesh": on_a_mesh,
    "fsdp one tree": one_tree,
    "fsdp deferred": deferred,
    "fsdp meta": on_meta,
}

Found = list[dict[str, Any]]


def one_batch() -> Model:
    alone = model(sparse=True)
    alone(*next(batches()))["loss"].backward()
    return alone


@pytest.mark.parametrize(
    ("name", "sparse", "parts"),
    [("fsdp dense", False, 1), ("fsdp sparse", True, 1), ("fsdp accumulated", True, 2)],
)
def test_steps_are_those_of_one_process(name: str, sparse: bool, parts: int, two: Found) -> None:
    alone = model(sparse)
    losses = train(alone)
    row_sparse = {id(p) for p in alone.head.sparse_parameters()}
    row_sparse |= {id(alone.embedding.weight)} if sparse else set()
    for found in two:
        torch.testing.assert_close(found[name]["losses"], losses, rtol=0, atol=1e-10)
        torch.testing.assert_close(
            found[name]["state"], dict(alone.state_dict()), rtol=0, atol=1e-10
        )
        assert found[name]["shards"] == {
            key: id(p) not in row_sparse for key, p in alone.named_parameters()
        }


def test_a_full_state_loads_into_a_plain_head(two: Found) -> None:
    alone = model(sparse=True)
    train(alone)
    state = {
        key.removeprefix("head."): value
        for key, value in two[0]["fsdp sparse"]["state"].items()
        if key.startswith("head.")
    }
    plain = tree_head().double()
    plain.load_state_dict(state)
    expected = alone.head.log_prob(contexts())
    torch.testing.assert_close(plain.log_prob(contexts()), expected, rtol=0, atol=1e-10)


def test_a_state_of_one_process_is_loaded(two: Found) -> None:
    for found in two:
        expected = dict(model(sparse=True).state_dict())
        torch.testing.assert_close(found["fsdp loaded"], expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", HEADS)
def test_methods_outside_of_forward(name: str, two: Found) -> None:
    expected = methods_of(head(name))
    for found in two:
        torch.testing.assert_close(found["fsdp methods"][name], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("sparse", MIXED)
def test_mixed_precision(sparse: bool, two: Found) -> None:
    alone = in_float32(sparse)
    loss = alone(*next(batches()))["loss"]
    loss.backward()
    for found in two:
        mixed = found["fsdp bfloat16"][sparse]
        torch.testing.assert_close(mixed["loss"], loss.detach(), rtol=0.02, atol=0)
        for key, gradient in full_gradients(alone).items():
            error = (mixed["gradients"][key] - gradient).norm() / gradient.norm()
            assert mixed["gradients"][key].dtype == torch.float32
            assert error < 0.05, key


def test_rows_are_averaged_over_all_dimensions_of_a_mesh(two: Found) -> None:
    expected = full_gradients(one_batch())
    for found in two:
        torch.testing.assert_close(found["fsdp mesh"], expected, rtol=0, atol=1e-12)


def test_the_vectors_of_one_tree_are_sharded(two: Found) -> None:
    alone = tree_head(1, gate="uniform").double()
    alone(contexts(), torch.arange(6)).loss.backward()
    for found in two:
        mine = found["fsdp one tree"]
        for name, parameter in alone.named_parameters():
            if parameter.ndim == 3:
                assert 2 * mine["sizes"][name].numel() == parameter.numel()
        torch.testing.assert_close(mine["gradients"], full_gradients(alone), rtol=0, atol=1e-12)
        torch.testing.assert_close(mine["state"], dict(alone.state_dict()), rtol=0, atol=0)


def test_deferred_initialisation(two: Found) -> None:
    plain = TreeEnsemble(12, 40, tree_head().trees, frequencies=FREQUENCIES, subset_size=8)
    for found in two:
        torch.testing.assert_close(found["fsdp deferred"], plain.log_prob(contexts().float()))


def test_row_sparse_parameters_need_data(two: Found) -> None:
    assert "to_empty" in two[1]["fsdp meta"]


def test_a_head_that_is_not_sharded_keeps_its_methods() -> None:
    assert TreeEnsemble.log_prob is Head.log_prob
    assert "log_prob" not in vars(tree_head())
