"""Two processes with half of the batch each make the steps of one process with all of it."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from distributed.models import (
    D,
    Model,
    V,
    batches,
    gradients,
    model,
    my_part,
    train,
    tree_head,
    weights,
)
from hstree.distributed import DistributedDataParallel
from hstree.heads import SampledSoftmax, TreeEnsemble


def trained(sparse: bool, parts: int = 1, **options: Any) -> dict[str, Any]:
    wrapped = DistributedDataParallel(model(sparse, seed=dist.get_rank()), **options)
    losses = train(wrapped, wrapped.no_sync, parts)
    dist.all_reduce(losses)
    return {"losses": losses / dist.get_world_size(), "weights": weights(wrapped.module)}


def trained_by_torch() -> dict[str, Any]:
    wrapped = nn.parallel.DistributedDataParallel(model(sparse=False))
    losses = train(wrapped)
    dist.all_reduce(losses)
    return {"losses": losses / dist.get_world_size(), "weights": weights(wrapped.module)}


def one_rank_reaches_no_row() -> dict[str, Any]:
    wrapped = DistributedDataParallel(model(sparse=True), find_unused_parameters=True)
    tokens, target = map(my_part, next(batches()))
    wrapped(tokens, target if dist.get_rank() == 0 else None)["loss"].backward()
    return gradients(wrapped.module)


def not_synchronised() -> list[dict[str, Any]]:
    """Gradients after each of two backward passes, the first without exchange."""
    wrapped = DistributedDataParallel(model(sparse=True))
    tokens, target = map(my_part, next(batches()))
    found = []
    with wrapped.no_sync():
        wrapped(tokens, target)["loss"].backward()
    found.append(gradients(wrapped.module))
    wrapped(tokens, target)["loss"].backward()
    found.append(gradients(wrapped.module))
    layouts = {p.grad is not None and p.grad.is_sparse for p in wrapped.module.head.parameters()}
    assert layouts == {True, False}
    return found


def a_head_alone(**options: Any) -> dict[str, Any]:
    head = DistributedDataParallel(tree_head(sparse=True, **options).double())
    hidden, target = head_batch()
    head(my_part(hidden), my_part(target)).loss.backward()
    return gradients(head.module)


def a_head_of_one_node() -> dict[str, Any]:
    """Its trees have no paths: tables of no elements."""
    head = DistributedDataParallel(one_node())
    hidden, target = head_batch()
    head(my_part(hidden), my_part(target)).loss.backward()
    return gradients(head.module)


def a_sampled_softmax() -> dict[str, Any]:
    wrapped = DistributedDataParallel(sampled())
    tokens, target = map(my_part, next(batches()))
    wrapped(tokens, target)["loss"].backward()
    return gradients(wrapped.module)


def sampled() -> Model:
    """A loss that is exact, as every class is drawn once."""
    torch.manual_seed(0)
    every = {"negatives": V, "distribution": "uniform", "in_batch": False}
    head = SampledSoftmax(D, V, **every, sparse=True)
    return Model(head, sparse=True).double()


def one_node() -> TreeEnsemble:
    return TreeEnsemble.from_counts(12, range(40, 0, -1)).double()


def dense_gradients_of_sparse_parameters() -> dict[str, Any]:
    """As rows on one rank, dense on the other: its loss reads all classes."""
    wrapped = DistributedDataParallel(AllClasses(tree_head(sparse=True).double()))
    hidden, target = head_batch()
    wrapped(my_part(hidden), my_part(target), dist.get_rank() == 1).backward()
    return gradients(wrapped.module.head)


class AllClasses(nn.Module):
    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head = head

    def forward(self, hidden: Any, target: Any, all_classes: bool) -> Any:
        if all_classes:
            return nn.functional.nll_loss(self.head.log_prob(hidden), target)
        return self.head(hidden, target).loss


def wrapped_again() -> dict[str, Any]:
    """What the first wrapper has left with the parameters is over."""
    made = model(sparse=True)
    other = dist.new_group(list(range(dist.get_world_size())))
    DistributedDataParallel(made, process_group=other)
    dist.destroy_process_group(other)
    gc.collect()
    wrapped = DistributedDataParallel(made)
    tokens, target = map(my_part, next(batches()))
    wrapped(tokens, target)["loss"].backward()
    return gradients(made)


def head_batch() -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(2)
    hidden = torch.randn(16, 12, generator=random, dtype=torch.float64)
    return hidden, torch.randint(40, (16,), generator=random)


def other_trees() -> str:
    with pytest.raises(ValueError, match="same trees") as error:
        DistributedDataParallel(model(sparse=True, seed=0, n_trees=2 + dist.get_rank()))
    return str(error.value)


def raised() -> list[str]:
    messages = []
    for refused in (
        lambda: DistributedDataParallel(nn.Embedding(5, 2, sparse=True)),
        lambda: DistributedDataParallel(model(sparse=True)).join(),
        lambda: DistributedDataParallel(model(sparse=True).to("meta")),
    ):
        with pytest.raises((ValueError, NotImplementedError, RuntimeError)) as error:
            refused()
        messages.append(str(error.value))
    return messages


SCENARIOS = {
    "ddp sparse": lambda: trained(True),
    "ddp dense": lambda: trained(False),
    "ddp accumulated": lambda: trained(True, parts=2),
    "ddp find_unused_parameters": lambda: trained(True, find_unused_parameters=True),
    "ddp static_graph": lambda: trained(True, static_graph=True),
    "ddp device_mesh": lambda: trained(True, device_mesh=init_device_mesh("cpu", (2,))),
    "ddp torch": trained_by_torch,
    "ddp unused": one_rank_reaches_no_row,
    "ddp no_sync": not_synchronised,
    "ddp head": a_head_alone,
    "ddp leaves": lambda: a_head_alone(node_vectors="leaves"),
    "ddp one node": a_head_of_one_node,
    "ddp sampled": a_sampled_softmax,
    "ddp layouts": dense_gradients_of_sparse_parameters,
    "ddp again": wrapped_again,
    "ddp other trees": other_trees,
    "ddp raised": raised,
}

Found = list[dict[str, Any]]


@pytest.mark.parametrize(
    ("name", "sparse", "parts"),
    [
        ("ddp sparse", True, 1),
        ("ddp dense", False, 1),
        ("ddp accumulated", True, 2),
        ("ddp find_unused_parameters", True, 1),
        ("ddp static_graph", True, 1),
        ("ddp device_mesh", True, 1),
        ("ddp torch", False, 1),
    ],
)
def test_steps_are_those_of_one_process(name: str, sparse: bool, parts: int, two: Found) -> None:
    alone = model(sparse)
    before = weights(alone)
    losses = train(alone)
    for found in two:
        torch.testing.assert_close(found[name]["losses"], losses, rtol=0, atol=1e-10)
        torch.testing.assert_close(found[name]["weights"], weights(alone), rtol=0, atol=1e-10)
    assert all(not torch.equal(before[key], value) for key, value in weights(alone).items())


def test_a_rank_without_any_row_counts_as_zero(two: Found) -> None:
    alone = model(sparse=True)
    tokens, target = next(batches())
    loss = alone(tokens[:8], target[:8])["loss"] + alone(tokens[8:], None)["loss"]
    (loss / 2).backward()
    for found in two:
        torch.testing.assert_close(found["ddp unused"], gradients(alone), rtol=0, atol=1e-12)


def test_no_sync_exchanges_nothing(two: Found) -> None:
    tokens, target = next(batches())
    own = []
    for rank in range(2):
        alone = model(sparse=True)
        alone(tokens.chunk(2)[rank], target.chunk(2)[rank])["loss"].backward()
        own.append(gradients(alone))
    both = {name: own[0][name] + own[1][name] for name in own[0]}  # 2 times the mean
    for rank, found in enumerate(two):
        first, second = found["ddp no_sync"]
        torch.testing.assert_close(first, own[rank], rtol=0, atol=1e-12)
        torch.testing.assert_close(second, both, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "node_vectors"),
    [("ddp head", "free"), ("ddp layouts", "free"), ("ddp leaves", "leaves")],
)
def test_gradients_of_a_head(name: str, node_vectors: str, two: Found) -> None:
    torch.manual_seed(0)  # as in every scenario; it draws the output embedding
    head = tree_head(sparse=True, node_vectors=node_vectors).double()
    head(*head_batch()).loss.backward()
    for found in two:
        torch.testing.assert_close(found[name], gradients(head), rtol=0, atol=1e-12)


def test_gradients_of_a_head_of_one_node(two: Found) -> None:
    head = one_node()
    head(*head_batch()).loss.backward()
    for found in two:
        torch.testing.assert_close(found["ddp one node"], gradients(head), rtol=0, atol=1e-12)


def test_gradients_of_a_sampled_softmax(two: Found) -> None:
    alone = sampled()
    alone(*next(batches()))["loss"].backward()
    for found in two:
        torch.testing.assert_close(found["ddp sampled"], gradients(alone), rtol=0, atol=1e-12)


def test_a_model_is_wrapped_again(two: Found) -> None:
    alone = model(sparse=True)
    alone(*next(batches()))["loss"].backward()
    for found in two:
        torch.testing.assert_close(found["ddp again"], gradients(alone), rtol=0, atol=1e-12)


def test_other_trees_on_another_rank_are_refused(two: Found) -> None:
    for found in two:
        assert "on [1]" in found["ddp other trees"]


def test_errors_say_what_was_expected(two: Found) -> None:
    all_sparse, join, meta = two[0]["ddp raised"]
    assert "module: expected at least one parameter with dense gradients" in all_sparse
    assert "join: expected a model without row-sparse gradients" in join
    assert "module: expected row-sparse parameters with data" in meta
