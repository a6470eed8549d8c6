"""The Trainer of Lightning: a head with row-sparse gradients beside a plain loop, and deferred
logits beside plain ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset

import hstree
from hstree.heads import TreeEnsemble
from hstree.optim import AdamW, clip_grad_norm_
from hstree.trees import random_tree

V, D, BATCHES, EPOCHS, MAX_NORM = 50, 8, 3, 2, 0.05

pytestmark = pytest.mark.filterwarnings(
    # What the Trainer says of a short run on a CPU.
    "ignore:The '(train|val)_dataloader' does not have many workers",
    "ignore:The number of training batches",
    "ignore:.*you have not used a validation loop",
    "ignore:.*LeafSpec.*is deprecated",
)


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lstm = nn.LSTM(D, D, batch_first=True)
        trees = [random_tree(V, seed=seed) for seed in (1, 2)]
        self.head = TreeEnsemble(D, V, trees, gate="context", sparse=True)
        self.losses: list[float] = []

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        hidden, target = batch
        loss = self.head(self.lstm(hidden)[0], target).loss
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> Any:
        groups = [{"params": self.lstm.parameters()}, *self.head.parameter_groups(lr=0.01)]
        optimizer = AdamW(groups, lr=0.01)
        schedule = CosineAnnealingLR(optimizer, BATCHES * EPOCHS)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        assert self.head.below.weight.grad.is_sparse
        clip_grad_norm_(self.parameters(), gradient_clip_val)


def batches() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(4 * BATCHES, 5, D, generator=generator)
    target = torch.randint(V, (4 * BATCHES, 5), generator=generator)
    return DataLoader(TensorDataset(hidden, target), batch_size=4)


def trainer(folder: Path, epochs: int, precision: Any = None) -> lightning.Trainer:
    return lightning.Trainer(
        max_epochs=epochs, gradient_clip_val=MAX_NORM, accelerator="cpu", default_root_dir=folder,
        logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, precision=precision,
    )  # fmt: skip


def plain_loop() -> Classifier:
    model = Classifier()
    [optimizer], [schedule] = model.configure_optimizers()
    for _ in range(EPOCHS):
        for batch in batches():
            optimizer.zero_grad()
            model.training_step(batch, 0).backward()
            assert float(clip_grad_norm_(model.parameters(), MAX_NORM)) > MAX_NORM
            optimizer.step()
            schedule["scheduler"].step()
    return model


def test_trainer_equals_a_plain_loop_and_resumes(tmp_path: Path) -> None:
    expected = plain_loop()
    model = Classifier()
    trainer(tmp_path, EPOCHS).fit(model, batches())
    assert model.losses == expected.losses

    half = trainer(tmp_path, 1)
    half.fit(first := Classifier(), batches())
    half.save_checkpoint(tmp_path / "half.ckpt")
    second = Classifier()
    trainer(tmp_path, EPOCHS).fit(second, batches(), ckpt_path=tmp_path / "half.ckpt")
    assert first.losses + second.losses == expected.losses
    for other in (model, second):
        for got, wanted in zip(other.parameters(), expected.parameters(), strict=True):
            assert torch.equal(got, wanted)


class Language(lightning.LightningModule):
    """A plain output layer and the loss of torch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lstm = nn.LSTM(D, D, batch_first=True)
        self.output = nn.Linear(D, V)

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        hidden, target = batch
        return F.cross_entropy(self.output(self.lstm(hidden)[0]).flatten(0, 1), target.flatten())

    def validation_step(self, batch: list[Tensor], _: int) -> None:
        self.log("loss", self.training_step(batch, 0))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_deferred_logits(precision: Any, tmp_path: Path, computed: list[int]) -> None:
    """The weights, losses and checkpoint of the plain module."""
    plain, model = Language(), Language()
    hstree.defer_logits(model.output)
    low = {"atol": 1e-6, "rtol": 1e-5} if precision == "32-true" else {"atol": 1e-2, "rtol": 1e-2}
    for each in (plain, model):
        made = trainer(tmp_path, EPOCHS, precision)
        made.fit(each, batches(), batches())
        each.losses = made.validate(each, batches(), verbose=False)
    assert not computed
    assert model.losses == [pytest.approx(plain.losses[0], rel=low["rtol"])]
    torch.testing.assert_close(dict(model.state_dict()), dict(plain.state_dict()), **low)
    made.save_checkpoint(tmp_path / "model.ckpt")
    again = Language.load_from_checkpoint(tmp_path / "model.ckpt")
    for name, tensor in again.state_dict().items():
        assert tensor.equal(model.state_dict()[name].float())
