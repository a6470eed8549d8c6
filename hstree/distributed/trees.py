"""The trees of an ensemble, shared out to the ranks of a device mesh."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hstree.heads import Head, TreeEnsemble
from hstree.heads.trees.gate import GATES
from hstree.heads.trees.state import EnsembleState
from hstree.trees import Tree

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_Ensemble = TypeVar("_Ensemble", bound=TreeEnsemble)


def shard_trees(head: TreeEnsemble, mesh: DeviceMesh) -> ShardedTreeEnsemble:
    r"""Share T trees out to the R ranks of a mesh: each keeps the vectors and tables of T / R.

    .. math::
        \log P(y \mid h) = \log \sum_r \exp\Bigl(\log \sum_{t \in r} \pi_t P_t(y \mid h)\Bigr)

    Each rank computes its inner sum; the outer one is two reductions (a maximum and a sum) of N
    numbers for the loss, of N V for ``log_prob``.

    Args:
        head: the whole ensemble, alike on all ranks, with ``node_vectors="free"``. Not changed.
        mesh: of one dimension, whose size divides T.

    Returns:
        A head with the same distribution, loss and gradients.

    Raises:
        ValueError: for a head or mesh that does not fit.

    On all ranks of the mesh the same rows must come in the same order, from a model with the same
    weights and random numbers: what lies below the head is computed R times, and its gradients are
    those of one process. :func:`gather_trees` is the way back, and the way to save. For data
    parallelism on top, take a second dimension of the mesh, as in the example.

    Clip gradients by :func:`hstree.distributed.clip_grad_norm_`: each rank has the gradients of its
    own trees, so other functions would find another norm on each.

    Example:
        >>> mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "trees"))
        >>> model.head = hstree.distributed.shard_trees(model.head, mesh["trees"])
        >>> model = hstree.distributed.DistributedDataParallel(
        ...     model, process_group=mesh.get_group("data")
        ... )
    """
    if mesh.ndim != 1:
        raise ValueError(
            f"mesh: expected one dimension, got {mesh.ndim}, {mesh.mesh_dim_names}; mesh[name] is "
            "one of them"
        )
    if not isinstance(head, TreeEnsemble) or isinstance(head, ShardedTreeEnsemble):
        raise ValueError(f"head: expected a whole TreeEnsemble, got {type(head).__name__}")
    if head.node_vectors != "free":
        raise ValueError(
            f"head: expected node_vectors='free', got {head.node_vectors!r}, whose trees share "
            "their vectors"
        )
    if head.n_trees % mesh.size():
        raise ValueError(
            f"head: expected a multiple of {mesh.size()} trees, the number of ranks in the mesh, "
            f"got {head.n_trees}"
        )
    return ShardedTreeEnsemble(head, mesh)


def gather_trees(head: ShardedTreeEnsemble) -> TreeEnsemble:
    """The whole ensemble of :func:`shard_trees` as it is now, on every rank of the mesh. All ranks
    must call it.

    Example:
        >>> whole = hstree.distributed.gather_trees(model.head)
        >>> if torch.distributed.get_rank() == 0:
        ...     whole.save("head.safetensors")
    """
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    # Whole tensors, of a head to which fully_shard was applied too.
    state: dict[str, Any] = get_model_state_dict(
        head, options=StateDictOptions(full_state_dict=True)
    )
    own = {name: state[name].cpu() for name, _ in head.stacked_parameters()}
    shards: list[Any] = [None] * head.mesh.size()
    dist.all_gather_object(
        shards, ([tree.arrays() for tree in head.trees], own), group=head.mesh.get_group()
    )
    trees = [Tree(**arrays) for of_rank, _ in shards for arrays in of_rank]
    whole = _like(TreeEnsemble(trees=trees, **_options(head)), head)
    gate = {name: state[f"whole_gate.{name}"] for name in head.whole_gate.state_dict()}
    whole.load_state_dict(gate, strict=False)
    first = 0
    with torch.no_grad():
        for of_rank, parameters in shards:
            for name, values in parameters.items():
                of_whole = whole.get_parameter(name)
                of_whole[first : first + len(of_rank), : values.shape[1]] = values
            first += len(of_rank)
    return whole


class ShardedTreeEnsemble(TreeEnsemble):
    """The trees of one rank, and the gate of all; made by :func:`shard_trees`.

    Attributes:
        mesh: the ranks.
        n_trees: T / R, of this rank.
        trees: those of this rank.
        own: which of the T trees they are.
        whole_gate: log pi [N, T] of all trees: hidden [N, D].
    """

    def __init__(self, head: TreeEnsemble, mesh: DeviceMesh) -> None:
        n_trees, rank = head.n_trees // mesh.size(), mesh.get_local_rank()
        own = slice(rank * n_trees, (rank + 1) * n_trees)
        super().__init__(trees=head.trees[own], **_options(head) | {"gate": "uniform"})
        self.mesh, self.gate, self.own = mesh, head.gate, own
        self.whole_gate = WholeGate(head)
        if head.feature_index is not None:
            self.register_constant("feature_index", head.feature_index[own])
        _like(self, head)
        state = head.state_dict()
        self.whole_gate.load_state_dict(
            {name: state[name] for name in self.whole_gate.state_dict()}
        )
        with torch.no_grad():
            for name, parameter in self.stacked_parameters():
                of_head = head.get_parameter(name)
                parameter.copy_(of_head[own, : parameter.shape[1]])
                parameter.requires_grad_(of_head.requires_grad)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        self.whole_gate.reset_parameters()

    def stacked_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Names and parameters [T / R, rows, ...] of the nodes."""
        return list(self.named_parameters(recurse=False))

    def log_gate(self, hidden: Tensor) -> Tensor:
        """log pi [N, T / R] of this rank's trees: hidden [N, D]."""
        log_gate: Tensor = self.whole_gate(hidden)
        return _sum_gradient(log_gate, self.mesh)[:, self.own]

    def target_log_prob(self, hidden: Tensor, target: Tensor) -> Tensor:
        own = self.log_prob_by_tree(_sum_gradient(hidden, self.mesh), target)
        mixture = _log_sum_exp(torch.logsumexp(own + self.log_gate(hidden), 1), self.mesh)
        return mixture.masked_fill(target == -1, 0.0)

    def class_log_prob(self, hidden: Tensor) -> Tensor:
        own = self.mixed_log_prob(_sum_gradient(hidden, self.mesh), self.log_gate(hidden))
        return _log_sum_exp(own, self.mesh)

    def topk_rows(self, hidden: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """From the log-probabilities of all classes."""
        return Head.topk_rows(self, hidden, k)

    def sample_rows(self, hidden: Tensor, generator: torch.Generator | None) -> Tensor:
        """Every rank draws from its trees; of the draws of a row the first rank chooses one, for
        all, by the gate."""
        group = self.mesh.get_group()
        own = super().sample_rows(hidden, generator)
        drawn = [torch.empty_like(own) for _ in range(self.mesh.size())]
        dist.all_gather(drawn, own, group=group)
        if not len(hidden):
            return own
        by_rank = self.whole_gate(hidden).exp().unflatten(1, (self.mesh.size(), -1)).sum(2)
        rank = torch.multinomial(by_rank, 1, generator=generator)
        dist.broadcast(rank, group=group, group_src=0)
        return torch.stack(drawn, 1).gather(1, rank).squeeze(1)

    def extra_repr(self) -> str:
        whole = f"trees {self.own.start}:{self.own.stop} of {self.whole_gate.n_trees}"
        return f"{super().extra_repr()}, {whole}"

    def config(self) -> NoReturn:
        raise NotImplementedError(
            "save: a ShardedTreeEnsemble holds the trees of one rank; save "
            "hstree.distributed.gather_trees(head)"
        )


class WholeGate(nn.Module):
    """The gate of all trees of an ensemble. Its parameters have the names that they have there."""

    def __init__(self, head: TreeEnsemble) -> None:
        super().__init__()
        self.in_features, self.n_trees = head.in_features, head.n_trees
        self._gate = GATES[head.gate if head.n_trees > 1 else "uniform"]
        self._gate.register(cast(EnsembleState, self))

    def reset_parameters(self) -> None:
        self._gate.reset(cast(EnsembleState, self))

    def forward(self, hidden: Tensor) -> Tensor:
        return self._gate.log_gate(cast(EnsembleState, self), hidden)


def _options(head: TreeEnsemble) -> dict[str, Any]:
    """Keyword arguments of the ensemble, without trees."""
    options = TreeEnsemble.config(head)
    del options["n_trees"], options["tied"]
    return options | {"class_weight": head.class_weight, "frequencies": head.frequencies}


def _like(head: _Ensemble, other: TreeEnsemble) -> _Ensemble:
    """The head, with the device, dtype and mode of the other."""
    parameter = next(other.parameters())
    return head.to(parameter.device, parameter.dtype).train(other.training)


def _sum_gradient(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """The tensor, which is the same on all ranks; its gradient is the sum of theirs."""
    from torch.distributed.tensor import DTensor, Partial, Replicate

    same = DTensor.from_local(tensor, mesh, [Replicate()], run_check=False)
    return same.to_local(grad_placements=[Partial()])


def _log_sum_exp(own: Tensor, mesh: DeviceMesh) -> Tensor:
    """log sum exp over the ranks; every rank gets it, and uses it alike."""
    from torch.distributed.tensor import DTensor, Partial, Replicate

    largest = DTensor.from_local(own.detach(), mesh, [Partial("max")], run_check=False)
    top = largest.full_tensor().clamp(min=torch.finfo(own.dtype).min)
    terms = DTensor.from_local((own - top).exp(), mesh, [Partial()], run_check=False)
    return top + terms.full_tensor(grad_placements=[Replicate()]).log()
