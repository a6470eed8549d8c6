"""One training run of ``hstree train``, measured: interrupted runs are resumed."""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.ptb import CpuTimes, cpu_file, finished
from hstree.data import Corpus
from hstree.runs import EpochRecord, TrainConfig, load_config, load_model, read_run
from hstree.runs.names import MODEL, SUMMARY
from hstree.runs.records import Summary
from hstree.training import TrainingError, resume, train

from .measure import band_losses, rows_scored


class _EpochTimes(CpuTimes):
    """CPU seconds of the training of whole epochs, in a file, so that those of an interrupted run
    remain."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.file = file
        self.kept: list[float] = json.loads(file.read_text()) if file.is_file() else []
        self.whole = True

    def start(self, epochs: int, steps_per_epoch: int, step: int = 0) -> None:
        super().start(epochs, steps_per_epoch, step)
        self.whole = step % steps_per_epoch == 0

    def epoch(self, record: EpochRecord) -> None:
        super().epoch(record)
        if self.whole:
            self.kept.append(self.training[-1])
            self.file.write_text(json.dumps(self.kept) + "\n")
        self.whole = True


def measured_run(config: TrainConfig, corpus: Corpus, *, keep: bool = False) -> dict[str, Any]:
    """Train as configured, or go on with the run in ``config.run``, and return its figures.

    Args:
        config: settings with the folder of the run.
        corpus: the text of ``config.data``.
        keep: whether to keep the folder; without, only the figures remain.

    Raises:
        ValueError: the folder holds a run with other settings.

    Returns:
        ``valid``, ``test``: perplexities, None if training diverged; ``epochs``: validation
        perplexity by epoch; ``head_parameters``, ``backbone_parameters``; ``rows`` of
        :func:`rows_scored`; ``epoch_seconds``: CPU seconds of an epoch's training, median;
        ``head_step``, ``flat_step``: seconds of a forward and backward pass of the head and of a
        flat softmax, timed alternately, and their ``step_rows``; ``bands`` of :func:`band_losses`
        on the validation text; ``seconds`` of CPU time in all.
    """
    assert config.run is not None
    run = Path(config.run)
    print(f"{run.name}:", flush=True)
    begin = time.process_time()
    times = _EpochTimes(cpu_file(run))
    expected = config.with_absolute_paths()
    if run.is_dir() and replace(load_config(run), run=config.run) != expected:
        raise ValueError(f"{run}: expected a run with the settings {config}, got another; move it")
    try:
        if not run.is_dir():
            train(config, times)
        elif not finished(run):
            resume(run, times)
    except TrainingError as error:
        print(error, flush=True)
        figures: dict[str, Any] = {"valid": None, "test": None, "error": str(error)}
    else:
        figures = _figures(run, corpus, times.kept)
        figures["seconds"] = time.process_time() - begin
    if not keep:
        shutil.rmtree(run, ignore_errors=True)
        cpu_file(run).unlink(missing_ok=True)
    return figures


def _figures(run: Path, corpus: Corpus, epoch_seconds: list[float]) -> dict[str, Any]:
    summary = Summary.from_json((run / SUMMARY).read_text())
    model = load_model(run / MODEL)
    frequencies = corpus.statistics().frequencies
    return {
        "valid": summary.valid_perplexity,
        "test": summary.test_perplexity,
        "epochs": [epoch.valid_perplexity for epoch in read_run(run).epochs],
        "head_parameters": summary.head_parameters,
        "backbone_parameters": summary.backbone_parameters,
        "rows": rows_scored(model.head, frequencies),
        "epoch_seconds": median(epoch_seconds) if epoch_seconds else None,
        "head_step": summary.cost.head_seconds,
        "flat_step": summary.cost.flat_seconds,
        "step_rows": summary.cost.rows,
        "bands": band_losses(model, corpus.valid, frequencies),
    }
