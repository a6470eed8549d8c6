"""Mean hidden states as class vectors for clustered trees."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hstree._checks import check_int, check_number
from hstree.trees.tables import MAX_CLASSES

_ROWS = 8192  # contexts that are summed at a time, in float64
_RIDGE = 1e-6  # relative to the mean square of the hidden states


class ContextMeans:
    r"""The mean hidden state of the contexts before each class, and class vectors from it.

    Of n contexts with the hidden states h_i and the next classes y_i it keeps three sums,

    .. math::
        n_y = \sum_{i: y_i = y} 1, \qquad s_y = \sum_{i: y_i = y} h_i, \qquad
        S = \sum_i h_i h_i^T

    Sums of several processes can be added: ``count``, ``sum`` and ``second_moment`` are plain
    tensors. They are added up in float64 and deterministic, on a GPU too.

    Args:
        n_classes: number of classes, V >= 1.
        n_features: number of features of a hidden state, D >= 1.
        device: where the sums are kept; hidden states are moved there.

    Attributes:
        count: number of contexts of each class n_y, int64 [V].
        sum: sum of their hidden states s_y, float64 [V, D].
        second_moment: S, float64 [D, D].

    Example:
        >>> import torch
        >>> from hstree.trees import ContextMeans, cluster_tree
        >>> means = ContextMeans(n_classes=4, n_features=2)
        >>> hidden = torch.tensor([[0.9, 0], [1.1, 0], [1, 0.2], [0, 1.2], [0, 1.0], [0.1, 0.9]])
        >>> means.add(hidden, torch.tensor([0, 0, 2, 1, 3, 3]))
        >>> means.count.tolist()
        [2, 1, 1, 2]
        >>> tree = cluster_tree(means.vectors(), means.count)
        >>> sorted(sorted(pair) for pair in tree.to_nested())
        [[0, 2], [1, 3]]
    """

    def __init__(
        self, n_classes: int, n_features: int, *, device: torch.device | str | None = None
    ) -> None:
        n_classes = check_int("n_classes", n_classes, 1, MAX_CLASSES)
        n_features = check_int("n_features", n_features, 1)
        where = torch.device("cpu" if device is None else device)
        self.count = torch.zeros(n_classes, dtype=torch.int64, device=where)
        self.sum = torch.zeros(n_classes, n_features, dtype=torch.float64, device=where)
        self.second_moment = torch.zeros(n_features, n_features, dtype=torch.float64, device=where)

    @torch.no_grad()
    def add(self, hidden: Tensor, target: Tensor) -> None:
        """Add contexts.

        Args:
            hidden: hidden states, floating point [..., D].
            target: the class that follows each, int64 [...].

        Raises:
            ValueError: for a wrong shape or dtype, or a class outside [0, V).
        """
        n_classes, n_features = self.sum.shape
        if not hidden.is_floating_point() or hidden.shape[-1:] != (n_features,):
            raise ValueError(
                f"hidden: expected floating point of shape [..., {n_features}], got "
                f"{hidden.dtype} of shape {tuple(hidden.shape)}"
            )
        if target.dtype != torch.int64 or target.shape != hidden.shape[:-1]:
            raise ValueError(
                f"target: expected torch.int64 of shape {tuple(hidden.shape[:-1])}, got "
                f"{target.dtype} of shape {tuple(target.shape)}"
            )
        outside = target[(target < 0) | (target >= n_classes)]
        if len(outside):
            raise ValueError(
                f"target: expected classes from 0 to {n_classes - 1}, got {int(outside[0])}"
            )
        classes = target.flatten().to(self.count.device)
        self.count += torch.bincount(classes, minlength=n_classes)
        rows = hidden.reshape(-1, n_features)
        for state, index in zip(torch.split(rows, _ROWS), torch.split(classes, _ROWS), strict=True):
            state = state.to(self.sum)
            if state.is_cuda:  # index_add_ adds in any order there; index_put_ sorts first
                self.sum.index_put_((index,), state, accumulate=True)
            else:
                self.sum.index_add_(0, index, state)
            self.second_moment.addmm_(state.T, state)

    @property
    def mean(self) -> Tensor:
        """The mean hidden state m of all contexts, float64 [D].

        Raises:
            ValueError: if there is no context.
        """
        n = int(self.count.sum())
        if n == 0:
            raise ValueError("contexts: expected at least one, got none")
        return self.sum.sum(0) / n

    def vectors(self, shrinkage: float = 8.0) -> Tensor:
        r"""Class vectors: shrunk means of the hidden states, whitened within classes.

        .. math::
            \hat\mu_y = \frac{s_y + \kappa m}{n_y + \kappa}, \qquad
            x_y = L^{-1} (\hat\mu_y - m), \qquad
            L L^T = W + \epsilon I, \qquad
            W = \frac{1}{n} S - \sum_y \frac{n_y}{n} \mu_y \mu_y^T

        with the class means :math:`\mu_y = s_y / n_y`, the overall mean :math:`m`, the covariance
        within classes :math:`W`, its lower Cholesky factor :math:`L`, and :math:`\epsilon` = 1e-6
        tr(S) / (n D). An invertible linear map of the hidden states only rotates the vectors, up to
        rounding and :math:`\epsilon`.

        Args:
            shrinkage: weight of the overall mean :math:`\kappa`, in contexts, at least 0. The mean
                square error is smallest for the variance within classes over that between them.

        Returns:
            The vectors, float32 [V, D], on the CPU; zero for classes without a context.

        Raises:
            ValueError: if there is no context, all hidden states are zero or one is not finite, or
                the shrinkage is negative.
        """
        kappa = check_number("shrinkage", shrinkage)
        if kappa < 0:
            raise ValueError(f"shrinkage: expected a number of at least 0, got {shrinkage!r}")
        mean, total, second = (t.cpu() for t in (self.mean, self.sum, self.second_moment))
        count = self.count.cpu().double()[:, None]
        n = count.sum()
        scale = float(second.trace() / (n * len(mean)))
        if not 0 < scale < math.inf:
            raise ValueError(f"hidden: expected a finite positive mean square, got {scale}")
        # The second moment of all contexts less that of the class means.
        within = (second - (total / count.clamp(min=1)).T @ total) / n
        within.diagonal().add_(_RIDGE * scale)
        shrunk = (total - count * mean) / (count + kappa).clamp(min=1)  # without a context: 0
        factor = torch.linalg.cholesky(within)
        vectors: Tensor = torch.linalg.solve_triangular(factor, shrunk.T, upper=False).T
        return vectors.float().contiguous()
