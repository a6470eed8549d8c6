"""Distribution of the trees of an ensemble over the ranks of a device mesh."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hstree._numerics import log_sum_exp
from hstree.distributed.averaging import sum_of_ranks
from hstree.heads import Head, TreeEnsemble
from hstree.heads.losses import mask_candidates
from hstree.heads.trees.gate import UniformGate
from hstree.heads.trees.nodes import Nodes
from hstree.heads.trees.queries import composed_candidates
from hstree.trees import Tree

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

_Ensemble = TypeVar("_Ensemble", bound=TreeEnsemble)


def shard_trees(head: TreeEnsemble, mesh: DeviceMesh) -> ShardedTreeEnsemble:
    r"""Distribute T trees over the R ranks of a mesh: each rank keeps the vectors and tables of
    T / R trees.

    .. math::
        \log P(y \mid h) = \log \sum_r \exp\Bigl(\log \sum_{t \in r} \pi_t P_t(y \mid h)\Bigr)

    Each rank computes its inner sum. The outer sum takes two reductions (a maximum and a sum), of N
    numbers for the loss and of N V for ``log_prob``.

    An output embedding E, with ``node_vectors="leaves"``, is on every rank. Each backward pass sums
    its gradient over the ranks, rows of a row-sparse one, so that E stays the same on all of them:
    optimizers and :func:`hstree.distributed.clip_grad_norm_` treat it as the parameter of one
    process. A tied E stays tied.

    All ranks of the mesh must process the same rows in the same order, with a model of the same
    weights and random numbers: each rank computes the layers below the head, and their gradients
    are those of one process. :func:`gather_trees` returns the whole ensemble, also for saving. For
    additional data parallelism use a second dimension of the mesh, as in the example.

    Clip gradients with :func:`hstree.distributed.clip_grad_norm_`. Each rank has only the gradients
    of its own trees, so other functions would compute a different norm on each rank.

    Args:
        head: the whole ensemble, the same on all ranks. It is not changed.
        mesh: device mesh with one dimension, whose size divides T.

    Returns:
        A head with the same distribution, loss and gradients.

    Raises:
        ValueError: for another kind of head, a mesh with several dimensions, or a number of trees
            that is not a multiple of the size of the mesh.

    Example:
        With ``torchrun --nproc-per-node 4``, leave out the arguments after ``"gloo"`` and use a
        mesh of the shape (2, 2):

        >>> import hstree
        >>> from torch import distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> mesh = dist.init_device_mesh("cpu", (1, 1), mesh_dim_names=("data", "trees"))
        >>> head = hstree.TreeEnsemble.from_counts(16, range(2000, 0, -1))
        >>> head = hstree.distributed.shard_trees(head, mesh["trees"])
        >>> model = hstree.distributed.DistributedDataParallel(
        ...     head, process_group=mesh.get_group("data")
        ... )
        >>> dist.destroy_process_group()
    """
    if mesh.ndim != 1:
        raise ValueError(
            f"mesh: expected one dimension, got {mesh.ndim}, {mesh.mesh_dim_names}; select one by "
            "mesh[name]"
        )
    if not isinstance(head, TreeEnsemble) or isinstance(head, ShardedTreeEnsemble):
        raise ValueError(f"head: expected a whole TreeEnsemble, got {type(head).__name__}")
    if head.n_trees % mesh.size():
        raise ValueError(
            f"head: expected a multiple of {mesh.size()} trees, the number of ranks in the mesh, "
            f"got {head.n_trees}"
        )
    return ShardedTreeEnsemble(head, mesh)


def gather_trees(head: ShardedTreeEnsemble) -> TreeEnsemble:
    """Gather the trees of all ranks: the whole ensemble with its current parameters.

    All ranks of the mesh must call it, and all get the ensemble. It is tied if the head is, but for
    a weight that ``fully_shard`` has sharded: then it has a copy.

    Args:
        head: result of :func:`shard_trees`.

    Returns:
        The ensemble.

    Example:
        In a script that ``torchrun`` starts, leave out the arguments after ``"gloo"``:

        >>> import hstree
        >>> from torch import distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
        >>> whole = hstree.TreeEnsemble.from_counts(16, range(2000, 0, -1))
        >>> head = hstree.distributed.shard_trees(whole, mesh)
        >>> whole = hstree.distributed.gather_trees(head)
        >>> if dist.get_rank() == 0:
        ...     whole.save("head.safetensors")
        >>> dist.destroy_process_group()
    """
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    # Whole tensors, also for a head to which fully_shard was applied.
    state: dict[str, Any] = get_model_state_dict(
        head, options=StateDictOptions(full_state_dict=True)
    )
    own = {name: state[name].cpu() for name in head.stacked_parameters()}
    shards: list[Any] = [None] * head.mesh.size()
    dist.all_gather_object(
        shards, ([tree.arrays() for tree in head.trees], own), group=head.mesh.get_group()
    )
    trees = [Tree(**arrays) for of_rank, _ in shards for arrays in of_rank]
    options = _options(head)
    if head.tied and hasattr(head.output_embedding, "device_mesh"):
        options["embedding"] = None
    whole = TreeEnsemble(trees=trees, **options)
    _like(whole, head)
    first = 0
    with torch.no_grad():
        for name, parameter in whole.gate.named_parameters():
            parameter.copy_(state[f"gate.whole.{name}"])
        if head.node_vectors == "leaves" and not whole.tied:
            whole.output_embedding.copy_(state["nodes.output_embedding"])
        for of_rank, parameters in shards:
            for name, values in parameters.items():
                of_whole = whole.get_parameter(name)
                of_whole[first : first + len(of_rank), : values.shape[1]] = values
            first += len(of_rank)
    return whole


class ShardedTreeEnsemble(TreeEnsemble):
    """The trees of one rank and the gate of all trees; made by :func:`shard_trees`.

    Attributes:
        mesh: device mesh of the ranks.
        n_trees: number of trees of this rank, T / R.
        trees: trees of this rank.
        own: slice of these trees among all T trees.
        gate: module that computes log pi of these trees from the gate of all trees, ``gate.whole``.
    """

    gate: _ShardedGate

    def __init__(self, head: TreeEnsemble, mesh: DeviceMesh) -> None:
        n_trees, rank = head.n_trees // mesh.size(), mesh.get_local_rank()
        own = slice(rank * n_trees, (rank + 1) * n_trees)
        options = _options(head)
        super().__init__(trees=head.trees[own], **options)
        self.mesh, self.own = mesh, own
        if head.layout.feature_index is not None:
            self.layout.register_table("feature_index", head.layout.feature_index[own])
        embedding = options.get("embedding")
        self.nodes = _ShardedNodes(
            self.layout, head.in_features, embedding=embedding, sparse=head.sparse
        )
        self.nodes.mesh = mesh
        self.gate = _ShardedGate(head.in_features, head.gate, mesh, own)
        _like(self, head)
        self.gate.whole.load_state_dict(head.gate.state_dict())
        with torch.no_grad():
            for name, parameter in self.stacked_parameters().items():
                of_head = head.get_parameter(name)
                parameter.copy_(of_head[own, : parameter.shape[1]])
                parameter.requires_grad_(of_head.requires_grad)
            if head.node_vectors == "leaves" and not head.tied:
                self.output_embedding.copy_(head.output_embedding)
                self.output_embedding.requires_grad_(head.output_embedding.requires_grad)

    def stacked_parameters(self) -> dict[str, nn.Parameter]:
        """Parameters [T / R, rows, ...] of the nodes by name; not those of the classes, which are
        the same on all ranks."""
        own = self.nodes.named_parameters(prefix="nodes")
        return {name: each for name, each in own if not name.endswith("output_embedding")}

    def target_log_prob(self, hidden: Tensor, target: Tensor) -> Tensor:
        own = self.log_prob_by_tree(_sum_gradient(hidden, self.mesh), target)
        mixture = _log_sum_exp(log_sum_exp(own + self.log_gate(hidden), 1), self.mesh)
        return mixture.masked_fill(target == -1, 0.0)

    def class_log_prob(self, hidden: Tensor) -> Tensor:
        own = self.mixed_log_prob(_sum_gradient(hidden, self.mesh), self.log_gate(hidden))
        return _log_sum_exp(own, self.mesh)

    def topk_rows(
        self, hidden: Tensor, k: int, excluded: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Computed from the log-probabilities of all classes, in chunks of rows."""
        return Head.topk_rows(self, hidden, k, excluded)

    def sample_rows(
        self,
        hidden: Tensor,
        n: int,
        temperature: float,
        generator: torch.Generator | None,
        excluded: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Every rank draws from its trees. The first rank chooses one of these draws for each draw
        of a row by the gate, and broadcasts its choice."""
        if excluded is not None:
            raise self._refusal("exclude")
        group = self.mesh.get_group()
        own, _ = super().sample_rows(hidden, n, temperature, generator)
        drawn = [torch.empty_like(own) for _ in range(self.mesh.size())]
        dist.all_gather(drawn, own, group=group)
        if not len(hidden):
            return own, None
        by_rank = self.gate.whole(hidden).exp().unflatten(1, (self.mesh.size(), -1)).sum(2)
        rank = torch.multinomial(by_rank, n, replacement=True, generator=generator)
        dist.broadcast(rank, group=group, group_src=0)
        classes = torch.stack(drawn, 2).gather(2, rank.unsqueeze(2)).squeeze(2)
        return classes, None

    def candidate_rows(self, hidden: Tensor, candidates: Tensor, temperature: float) -> Tensor:
        gate, hidden = self.log_gate(hidden), _sum_gradient(hidden, self.mesh)
        blocks = self.nodes(self.layout)
        own = composed_candidates(blocks, self.layout, hidden, gate, candidates, temperature)
        mixture = _log_sum_exp(own, self.mesh)
        return mask_candidates(mixture, candidates, self.n_classes)

    def config(self) -> NoReturn:
        raise self._refusal("save")

    def _refusal(self, method: str) -> NotImplementedError:
        return NotImplementedError(
            f"{method}: a ShardedTreeEnsemble holds the trees of one rank; call it on "
            "hstree.distributed.gather_trees(head)"
        )

    def extra_repr(self) -> str:
        whole = f"trees {self.own.start}:{self.own.stop} of {self.gate.whole.n_trees}"
        return f"{super().extra_repr()}, {whole}"


class _ShardedNodes(Nodes):
    """Nodes of the trees of one rank; the gradient of the output embedding is summed over the
    ranks."""

    mesh: DeviceMesh

    def class_vectors(self) -> Tensor:
        return _sum_gradient(super().class_vectors(), self.mesh)


class _ShardedGate(UniformGate):
    """log pi [N, T / R] of the trees of one rank from the gate of all trees."""

    def __init__(self, in_features: int, gate: UniformGate, mesh: DeviceMesh, own: slice) -> None:
        super().__init__(in_features, gate.n_trees)
        self.whole = copy.deepcopy(gate)
        self.name, self.mesh, self.own = gate.name, mesh, own

    def reset(self) -> None:
        self.whole.reset()

    def forward(self, hidden: Tensor) -> Tensor:
        return _sum_gradient(self.whole(hidden), self.mesh)[:, self.own]


def _options(head: TreeEnsemble) -> dict[str, Any]:
    """Keyword arguments of the ensemble, without the trees."""
    options = TreeEnsemble.config(head)
    del options["n_trees"]
    if options.pop("tied"):
        options["embedding"] = SimpleNamespace(weight=head.output_embedding)
    return options | {"class_weight": head.class_weight, "frequencies": head.frequencies}


def _like(head: _Ensemble, other: TreeEnsemble) -> _Ensemble:
    """Move the head to the device and dtype of the other, and set the same mode."""
    parameter = next(other.parameters())
    return head.to(parameter.device, parameter.dtype).train(other.training)


class _SumGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return sum_of_ranks(gradient, ctx.group), None


def _sum_gradient(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """The tensor, which is the same on all ranks; its gradient, dense or row-sparse, is summed over
    the ranks. Backward passes come to these sums in the same order on all ranks: in the reverse of
    the order of the calls, because what is computed later from any of them goes before."""
    summed: Tensor = _SumGradient.apply(tensor, mesh.get_group())  # type: ignore[no-untyped-call]
    return summed


def _log_sum_exp(own: Tensor, mesh: DeviceMesh) -> Tensor:
    """log sum exp over the ranks, the same result on every rank."""
    from torch.distributed.tensor import DTensor, Partial, Replicate

    largest = DTensor.from_local(own.detach(), mesh, [Partial("max")], run_check=False)
    top = largest.full_tensor().clamp(min=torch.finfo(own.dtype).min)
    terms = DTensor.from_local((own - top).exp(), mesh, [Partial()], run_check=False)
    return top + terms.full_tensor(grad_placements=[Replicate()]).log()
