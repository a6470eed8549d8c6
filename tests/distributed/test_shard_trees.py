"""An ensemble on two ranks has the values and gradients of the whole one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh

from distributed.models import FREQUENCIES, D, Model, V, model, train, tree_head, weights
from distributed.processes import launch
from hstree import distributed
from hstree.distributed import (
    DistributedDataParallel,
    fully_shard,
    gather_trees,
    shard_trees,
)
from hstree.heads import Softmax, TreeEnsemble
from hstree.optim import AdamW, clip_grad_norm_
from hstree.trees import build_ensemble

HEADS: dict[str, Callable[[], TreeEnsemble]] = {
    "uniform": lambda: tree_head(4, gate="uniform"),
    "constant": lambda: tree_head(4, gate="constant"),
    "context": lambda: tree_head(4, gate="context"),
    "one tree each": lambda: tree_head(2, gate="context"),
    "all features": lambda: tree_head(2, gate="constant", subset_size=12),
    "row-sparse": lambda: tree_head(4, sparse=True),
    "options": lambda: tree_head(4, reduction="sum", label_smoothing=0.1, class_weight=range(40)),
    "leaves": lambda: tree_head(4, node_vectors="leaves"),
    "leaves, row-sparse": lambda: tree_head(4, node_vectors="leaves", sparse=True),
    "leaves, tied": lambda: tree_head(
        2, node_vectors="leaves", embedding=nn.Embedding(40, 12), subset_size=12
    ),
    "flat": lambda: flat_head(),
}
CLOSE = {"rtol": 1e-14, "atol": 1e-12}


def flat_head() -> TreeEnsemble:
    """Roots over all classes, in other orders: E is all that the trees have."""
    trees = build_ensemble("random", V, 2, root=V)
    head = TreeEnsemble(D, V, trees, node_vectors="leaves", frequencies=FREQUENCIES)
    nn.init.normal_(head.output_embedding, generator=torch.Generator().manual_seed(5))
    return head


def whole(name: str) -> TreeEnsemble:
    torch.manual_seed(11)
    return HEADS[name]().double()


def mesh() -> Any:
    return init_device_mesh("cpu", (2,), mesh_dim_names=("trees",))


def contexts() -> Tensor:
    random = torch.Generator().manual_seed(4)
    return torch.randn(3, 5, 12, generator=random, dtype=torch.float64)


def targets() -> Tensor:
    target = torch.randint(40, (3, 5), generator=torch.Generator().manual_seed(8))
    target[1, 2] = -100
    return target


def values(head: TreeEnsemble) -> dict[str, Any]:
    """What the head computes, and the gradients of its hidden vectors and its gate."""
    found: dict[str, Any] = {}
    with torch.no_grad():
        found |= {"log_prob": head.log_prob(contexts()), "entropy": head.entropy(contexts())}
        found |= {"topk": head.topk(contexts(), 4), "predict": head.predict(contexts())}
    for name, loss in (
        ("loss", lambda hidden: head(hidden, targets()).loss),
        ("output", lambda hidden: head(hidden, targets()).output.sin().sum()),
        ("log_prob", lambda hidden: head.log_prob(hidden).square().sum()),
        ("topk", lambda hidden: head.topk(hidden, 4)[0].square().sum()),
    ):
        hidden = contexts().requires_grad_()
        value = loss(hidden)
        value.backward()
        found |= {f"{name} value": value.detach(), f"{name} hidden": hidden.grad}
        for key, parameter in head.named_parameters():
            gradient = parameter.grad
            assert gradient is not None
            found[f"{name} {key.replace('gate.whole.', 'gate.')}"] = gradient.to_dense()
            if "weight" in key and name in ("loss", "output") and "gate" not in key:
                assert gradient.is_sparse == (head.sparse and "root" not in key)
            parameter.grad = None
    return found


def sharded_values() -> dict[str, Any]:
    found = {}
    for name in HEADS:
        head = shard_trees(whole(name), mesh())
        found[name] = values(head)
    return found


def in_other_modes() -> dict[str, Tensor]:
    """Losses of hidden vectors and heads in half precision, and after inference mode."""
    head, hidden = shard_trees(tree_head(4), mesh()), contexts().float()
    with torch.inference_mode():
        head.log_prob(hidden)
        head.topk(hidden, 2)
    return losses_in_other_modes(head, hidden)


def losses_in_other_modes(head: TreeEnsemble, hidden: Tensor) -> dict[str, Tensor]:
    found = {"after inference": head(hidden, targets()).loss}
    found["after inference"].backward()
    with torch.autocast("cpu", torch.bfloat16):
        found["autocast"] = head(hidden, targets()).loss
    found["bfloat16 hidden"] = head(hidden.bfloat16(), targets()).loss
    found["bfloat16"] = head.bfloat16()(hidden.bfloat16(), targets()).loss
    return {name: loss.detach() for name, loss in found.items()}


def gathered() -> dict[str, Any]:
    return {name: gather_trees(shard_trees(whole(name), mesh())).state_dict() for name in HEADS}


def reset() -> Tensor:
    head = shard_trees(whole("context"), mesh())
    head.reset_parameters()
    return head.log_prob(contexts()).detach()


def drawn() -> Tensor:
    torch.manual_seed(dist.get_rank())  # need not be the same
    head = shard_trees(whole("context"), mesh())
    assert head.sample(contexts()[:0]).shape == (0, 5)
    return head.sample(contexts()[0, :2].repeat(20_000, 1))


def trained() -> dict[str, Any]:
    made = model(sparse=True, n_trees=4)
    made.head = shard_trees(made.head, mesh())
    losses = train(made, part=lambda tensor: tensor)  # all ranks read all rows
    made.head = gather_trees(made.head)
    return {"losses": losses, "weights": weights(made)}


def of_leaves(sharded: bool, row_sparse: bool) -> dict[str, Any]:
    """Three clipped steps of the constructor's default: shared leaves, 1,500 classes."""
    head = TreeEnsemble.from_counts(D, range(1500, 0, -1), n_trees=4, root=8, sparse=row_sparse)
    random = torch.Generator().manual_seed(2)
    nn.init.normal_(head.output_embedding, std=0.3, generator=random)
    head = head.double()
    assert head.node_vectors == "leaves"
    if sharded:
        head = shard_trees(head, mesh())
    clip = distributed.clip_grad_norm_ if sharded else clip_by_parameters
    optimizer = AdamW(head.parameter_groups(0.01))
    norms, copies = [], []
    for _ in range(3):
        hidden = torch.randn(9, D, generator=random, dtype=torch.float64)
        target = torch.randint(1500, (9,), generator=random)
        optimizer.zero_grad()
        head(hidden, target).loss.backward()
        assert head.output_embedding.grad.is_sparse == row_sparse
        norms.append(clip(head, 0.05))
        optimizer.step()
        copies.append(head.output_embedding.detach().clone())
    whole = gather_trees(head) if sharded else head
    return {"norms": torch.stack(norms), "copies": copies, "weights": weights(whole)}


def clip_by_parameters(module: nn.Module, max_norm: float) -> Tensor:
    return clip_grad_norm_(module.parameters(), max_norm)


def tied() -> dict[str, Any]:
    """The embedding is read by the model too."""
    made = tied_model()
    made.head = shard_trees(made.head, mesh())
    same = made.head.output_embedding is made.embedding.weight
    losses = train(made, part=lambda tensor: tensor)
    made.head = gather_trees(made.head)
    same &= made.head.output_embedding is made.embedding.weight
    return {"losses": losses, "weights": weights(made), "same": same}


def tied_model() -> Model:
    made = model(sparse=False, n_trees=2)
    made.head = tree_head(2, node_vectors="leaves", embedding=made.embedding).double()
    return made


def refused() -> list[str]:
    two_dimensions = init_device_mesh("cpu", (2, 1), mesh_dim_names=("data", "trees"))
    head = shard_trees(whole("context"), mesh())
    messages = []
    for wrong in (
        lambda: shard_trees(whole("context"), two_dimensions),
        lambda: shard_trees(tree_head(3), mesh()),
        lambda: shard_trees(Softmax(12, 40), mesh()),
        lambda: shard_trees(head, mesh()),
        lambda: head.save("head.safetensors"),
    ):
        with pytest.raises((ValueError, NotImplementedError)) as error:
            wrong()
        messages.append(str(error.value))
    return messages


def memory() -> list[int]:
    """Numbers of parameters and of tables: of a rank, and of the whole."""
    head = tree_head(4, gate="uniform")
    mine = shard_trees(head, mesh())
    return [
        sum(tensor.numel() for tensor in tensors)
        for made in (mine, head)
        for tensors in (made.parameters(), made.buffers())
    ]


def with_data_parallel(wrap: Callable[[Model, Any], Any], options: dict[str, Any]) -> Any:
    """On four ranks: half of the trees by half of the rows."""
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "trees"))
    made = model(n_trees=4, **options)
    made.head = shard_trees(made.head, grid["trees"])
    wrapped = wrap(made, grid["data"])
    part = grid.get_local_rank("data")
    losses = train(wrapped, part=lambda tensor: tensor.chunk(2)[part])
    dist.all_reduce(losses, group=grid.get_group("data"))
    head = gather_trees(made.head)
    state = get_model_state_dict(made, options=StateDictOptions(full_state_dict=True))
    return {
        "losses": losses / 2,
        "weights": {f"head.{name}": value for name, value in weights(head).items()}
        | {name: value for name, value in state.items() if not name.startswith("head.")},
    }


def by_ddp(made: Model, mesh: Any) -> Any:
    return DistributedDataParallel(made, process_group=mesh.get_group())


def by_fsdp(made: Model, mesh: Any) -> Any:
    fully_shard(made.head, mesh=mesh)
    return fully_shard(made, mesh=mesh)


ON_GRID: dict[str, tuple[Callable[[Model, Any], Any], dict[str, Any]]] = {
    "ddp": (by_ddp, {"sparse": True}),
    "fsdp": (by_fsdp, {"sparse": True}),
    "ddp, leaves": (by_ddp, {"sparse": False, "node_vectors": "leaves"}),
    "fsdp, leaves": (by_fsdp, {"sparse": False, "node_vectors": "leaves"}),
    "ddp, leaves, row-sparse": (by_ddp, {"sparse": True, "node_vectors": "leaves"}),
    "fsdp, leaves, row-sparse": (by_fsdp, {"sparse": True, "node_vectors": "leaves"}),
}
GRID = {name: partial(with_data_parallel, *case) for name, case in ON_GRID.items()}
SCENARIOS = {
    "trees values": sharded_values,
    "trees modes": in_other_modes,
    "trees gathered": gathered,
    "trees reset": reset,
    "trees drawn": drawn,
    "trees trained": trained,
    "trees of leaves": lambda: {kind: of_leaves(True, kind) for kind in (False, True)},
    "trees tied": tied,
    "trees refused": refused,
    "trees memory": memory,
    "trees shown": lambda: repr(shard_trees(tree_head(4), mesh())),
}

pytestmark = pytest.mark.slow

Found = list[dict[str, Any]]


def of_nodes(name: str) -> bool:
    """Whether a parameter is distributed over the ranks."""
    return "gate" not in name and "output_embedding" not in name


@pytest.mark.parametrize("name", HEADS)
def test_values_and_gradients(name: str, two: Found) -> None:
    expected = values(whole(name))
    for rank, found in enumerate(two):
        mine = found["trees values"][name]
        assert mine.keys() == expected.keys()
        for key, value in mine.items():
            wanted = expected[key]
            parts = key.split(" ")
            if len(parts) == 2 and of_nodes(parts[1]) and parts[1] in whole(name).state_dict():
                wanted = wanted[rank * len(value) : (rank + 1) * len(value), : value.shape[1]]
            torch.testing.assert_close(value, wanted, **CLOSE)


def test_inference_mode_and_half_precision(two: Found) -> None:
    expected = losses_in_other_modes(tree_head(4), contexts().float())
    for found in two:
        torch.testing.assert_close(found["trees modes"], expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", HEADS)
def test_gathered_trees_are_the_whole(name: str, two: Found) -> None:
    expected = whole(name)
    for found in two:
        state = found["trees gathered"][name]
        assert state.keys() == expected.state_dict().keys()
        fresh = HEADS[name]().double()
        for parameter in fresh.parameters():
            torch.nn.init.zeros_(parameter)
        fresh.load_state_dict(state)
        assert torch.equal(fresh.log_prob(contexts()), expected.log_prob(contexts()))


def test_reset_parameters(two: Found) -> None:
    expected = whole("context")
    before = expected.log_prob(contexts())
    expected.reset_parameters()
    for found in two:
        torch.testing.assert_close(found["trees reset"], expected.log_prob(contexts()), **CLOSE)
    assert not torch.allclose(before, expected.log_prob(contexts()))


def test_samples_follow_the_distribution(two: Found) -> None:
    samples = two[0]["trees drawn"].view(-1, 2)
    assert torch.equal(two[1]["trees drawn"].view(-1, 2), samples)
    with torch.no_grad():
        prob = whole("context").log_prob(contexts()[0, :2]).exp()
    for row in range(2):
        share = samples[:, row].bincount(minlength=40) / len(samples)
        error = (prob[row] * (1 - prob[row]) / len(samples)).sqrt()
        assert ((share - prob[row]).abs() < 5 * error + 1e-4).all()


def test_training_is_that_of_one_process(two: Found) -> None:
    alone = model(sparse=True, n_trees=4)
    losses = train(alone)
    for found in two:
        torch.testing.assert_close(found["trees trained"]["losses"], losses, rtol=0, atol=1e-10)
        equal_but_for_filling(found["trees trained"]["weights"], alone)


@pytest.mark.parametrize("row_sparse", [False, True])
def test_shared_leaves_are_trained_as_by_one_process(row_sparse: bool, two: Found) -> None:
    """The output embedding counts once in the norm and in the optimizer, and stays the same."""
    alone = of_leaves(False, row_sparse)
    for found in two:
        mine = found["trees of leaves"][row_sparse]
        torch.testing.assert_close(mine["norms"], alone["norms"], rtol=1e-12, atol=0)
        torch.testing.assert_close(mine["copies"], alone["copies"], rtol=0, atol=1e-12)
        # Where the gradient of the gate is 0, Adam divides its rounding errors by 1e-8.
        torch.testing.assert_close(mine["weights"], alone["weights"], rtol=0, atol=1e-10)
        for copy, other in zip(
            mine["copies"], two[0]["trees of leaves"][row_sparse]["copies"], strict=True
        ):
            assert torch.equal(copy, other)


def test_a_tied_embedding_stays_tied(two: Found) -> None:
    alone = tied_model()
    losses = train(alone)
    for found in two:
        torch.testing.assert_close(found["trees tied"]["losses"], losses, rtol=0, atol=1e-10)
        assert found["trees tied"]["same"]
        equal_but_for_filling(found["trees tied"]["weights"], alone)


def equal_but_for_filling(found: dict[str, Tensor], alone: Model) -> None:
    expected = weights(alone)
    assert found.keys() == expected.keys()
    trees = alone.head.layout.trees
    for name, value in found.items():
        if name.startswith("head.") and of_nodes(name):
            kind = {"binary": 0, "wide": 1, "leaf": 2, "root": 3}[name.split(".")[-1].split("_")[0]]
            for t, tree in enumerate(trees):
                rows = len(tree.edge[kind])
                torch.testing.assert_close(
                    value[t, :rows], expected[name][t, :rows], rtol=0, atol=1e-10
                )
        else:
            torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-10)


def test_errors_say_what_was_expected(two: Found) -> None:
    dimensions, uneven, softmax, again, *whole_only = two[0]["trees refused"]
    assert dimensions.startswith("mesh: expected one dimension, got 2, ('data', 'trees')")
    assert uneven.startswith("head: expected a multiple of 2 trees")
    assert uneven.endswith("got 3")
    assert softmax == "head: expected a whole TreeEnsemble, got Softmax"
    assert again == "head: expected a whole TreeEnsemble, got ShardedTreeEnsemble"
    for method, message in zip(("save",), whole_only, strict=True):
        assert message.startswith(f"{method}: ")
        assert "hstree.distributed.gather_trees(head)" in message


def test_a_rank_holds_its_share(two: Found) -> None:
    for rank, found in enumerate(two):
        assert f"trees {2 * rank}:{2 * rank + 2} of 4" in found["trees shown"]
        parameters, tables, all_parameters, all_tables = found["trees memory"]
        assert parameters <= 0.55 * all_parameters
        assert tables <= 0.55 * all_tables


def test_trees_by_rows() -> None:
    ranks = launch(["distributed.grid"], 4)
    for name, (_, options) in ON_GRID.items():
        alone = model(n_trees=4, **options)
        losses = train(alone)
        for found in ranks:
            torch.testing.assert_close(found[name]["losses"], losses, rtol=0, atol=1e-10)
            equal_but_for_filling(found[name]["weights"], alone)
