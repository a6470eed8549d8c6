"""What a training step minimizes."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hstree.lm.models import BackboneOutput, LanguageModel, State, activation_penalty, detach
from hstree.lm.runs import TrainConfig


class Objective(nn.Module):
    """The objective to minimize, for the streams of one process or a part of them."""

    def __init__(self, model: LanguageModel, config: TrainConfig) -> None:
        super().__init__()
        self.model = model
        self.config = config

        def head_loss(hidden: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
            """The loss, and the mean negative log-likelihood without the options of the loss."""
            output, loss = model.head(hidden, target)
            return loss, -output.detach().sum() / (target != model.head.ignore_index).sum()

        self.head_loss = torch.compile(head_loss, dynamic=True) if config.compile else head_loss

    def forward(
        self, tokens: Tensor, target: Tensor, state: State | None, loss_share: float, share: float
    ) -> tuple[Tensor, Tensor, State]:
        """``loss_share`` times the mean loss plus ``share`` times the penalties; its value and
        ``loss_share`` times the mean negative log-likelihood, float64 [2]; the state without its
        history."""
        with torch.autocast(
            tokens.device.type, torch.bfloat16, enabled=self.config.precision == "bfloat16"
        ):
            read: BackboneOutput = self.model.backbone(tokens, state)
            loss, nll = self.head_loss(read.hidden, target)
        objective = share * activation_penalty(read, self.config.alpha, self.config.beta)
        # The mean over no targets is NaN, but DistributedDataParallel needs a graph.
        if loss_share > 0:
            loss, nll = loss_share * loss, loss_share * nll
        else:
            loss = nll = 0.0 * read.dropped.sum()
        objective = objective + loss
        values = torch.stack([objective.detach(), nll.detach()]).double()
        return objective, values, detach(read.state)
