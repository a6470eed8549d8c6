"""A warning about training that stays worse than the class frequencies."""

from __future__ import annotations

import warnings

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hstree._numerics import is_transformed

BATCHES, WINDOWS, MARGIN = 100, 10, 0.02


class LossWatch:
    """Compares the training loss of a head that knows the class frequencies with their loss on the
    same targets. Warns once if, over one of the first WINDOWS windows of BATCHES batches, the mean
    is more than MARGIN nats higher. A GPU is read once in a window."""

    def __init__(self) -> None:
        self.batches = 0
        self.excess: Tensor | None = None
        self.log_share: Tensor | None = None

    @torch.no_grad()
    def __call__(
        self,
        head: str,
        frequencies: npt.NDArray[np.float64] | None,
        output: Tensor,
        target: Tensor,
    ) -> None:
        """Of a batch: name and class frequencies [V] of the head, log-probabilities [N], and
        targets [N] of :func:`hstree.ops.mark_targets`."""
        # Compilation first: torch.compile makes a graph for each value of a number that it reads.
        if torch.compiler.is_compiling() or is_transformed() or output.device.type == "meta":
            return
        if frequencies is None or self.batches == BATCHES * WINDOWS:
            return
        if output.is_cuda and torch.cuda.is_current_stream_capturing():
            return
        if self.log_share is None or self.log_share.device != output.device:
            # The marks V and -1 are places of the table too. A row with -1 has the output 0.
            log_share = np.append(np.log(frequencies / frequencies.sum()), [0.0, 0.0])
            self.log_share = torch.from_numpy(log_share).to(output.device)
        excess = (self.log_share[target] - output).sum() / (target >= 0).sum().clamp(min=1)
        self.excess = excess if self.excess is None else self.excess + excess
        self.batches += 1
        if self.batches % BATCHES == 0:
            mean, self.excess = self.excess.item() / BATCHES, None
            if not mean <= MARGIN:  # nan too
                self._warn(head, mean)
            if self.batches == BATCHES * WINDOWS:
                self.log_share = None

    def _warn(self, head: str, excess: float) -> None:
        self.batches = BATCHES * WINDOWS
        warnings.warn(
            f"the training loss of {head} was {excess:.2f} nats above that of the "
            f"class frequencies over {BATCHES} batches: lower the learning rate, which "
            "parameter_groups(lr, hidden=...) chooses by a batch of hidden states, or check the "
            "features",
            stacklevel=7,
        )
