"""Training curves for TensorBoard."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hstree.lm._packages import optional_package
from hstree.lm.runs import EpochRecord, perplexity

from .progress import Reporter

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

STEPS_PER_POINT = 10


class TensorBoardLog(Reporter):
    """A reporter that writes events to the subfolder ``tensorboard`` of a run folder.

    ``train/loss`` (nats per token) and ``train/perplexity`` are means over the tokens of ten steps;
    ``valid/loss``, ``valid/perplexity``, ``learning_rate`` and ``tokens_per_second`` are written
    once per epoch. The horizontal axis is the number of optimizer steps of the whole run. A resumed
    run continues the same curves: points after the step where it resumes are removed. Raises
    ValueError if the package ``tensorboard`` is missing.
    """

    def __init__(self, run: Path) -> None:
        optional_package("tensorboard", "--tensorboard", "tensorboard")
        self._folder = run / "tensorboard"
        self._writer: SummaryWriter | None = None
        self._step = 0
        self._clear()

    def start(self, epochs: int, steps_per_epoch: int, step: int = 0) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._step = step
        self._clear()
        # Points of this step remain: they are not written again.
        self._writer = SummaryWriter(str(self._folder), purge_step=step + 1, flush_secs=10)

    def step(self, epoch: int, loss: float, tokens: int) -> None:
        self._step += 1
        self._total += loss * tokens
        self._tokens += tokens
        if self._step % STEPS_PER_POINT == 0:
            self._write_point()

    def epoch(self, record: EpochRecord) -> None:
        self._write(
            record.step,
            {
                "valid/loss": record.valid_loss,
                "valid/perplexity": record.valid_perplexity,
                "learning_rate": record.learning_rate,
                "tokens_per_second": record.tokens_per_second,
            },
        )

    def stop(self) -> None:
        self._write_point()
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _write_point(self) -> None:
        if self._tokens > 0:
            loss = self._total / self._tokens
            self._write(self._step, {"train/loss": loss, "train/perplexity": perplexity(loss)})
        self._clear()

    def _clear(self) -> None:
        self._total, self._tokens = 0.0, 0

    def _write(self, step: int, values: dict[str, float]) -> None:
        if self._writer is not None:
            for tag, value in values.items():
                self._writer.add_scalar(tag, value, step)
