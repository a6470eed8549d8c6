"""One training run of ``hstree train``, measured: interrupted runs are resumed."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.ptb import finished
from hstree.lm.data import Corpus
from hstree.lm.runs import TrainConfig, load_config, load_model, read_run
from hstree.lm.runs.names import MODEL, SUMMARY
from hstree.lm.runs.records import Summary
from hstree.lm.training import ConsoleReporter, Trainer, TrainingError, resume, train
from hstree.lm.training.trainer import Step

from .measure import band_losses, rows_scored


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
        :func:`rows_scored`;
        ``head_step``, ``flat_step``: seconds of a forward and backward pass of the head and of a
        flat softmax, timed alternately, and their ``step_rows``; ``bands`` of :func:`band_losses`
        on the validation text; ``seconds`` of CPU time in all.
    """
    assert config.run is not None
    run = Path(config.run)
    print(f"{run.name}:", flush=True)
    begin = time.process_time()
    expected = config.with_absolute_paths()
    if run.is_dir() and replace(load_config(run), run=config.run) != expected:
        raise ValueError(f"{run}: expected a run with the settings {config}, got another; move it")
    try:
        if not run.is_dir():
            train(config, ConsoleReporter())
        elif not finished(run):
            resume(run, ConsoleReporter())
    except TrainingError as error:
        print(error, flush=True)
        figures: dict[str, Any] = {"valid": None, "test": None, "error": str(error)}
    else:
        figures = _figures(run, corpus)
        figures["seconds"] = time.process_time() - begin
    if not keep:
        shutil.rmtree(run, ignore_errors=True)
    return figures


def _figures(run: Path, corpus: Corpus) -> dict[str, Any]:
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
        "head_step": summary.cost.head_seconds,
        "flat_step": summary.cost.flat_seconds,
        "step_rows": summary.cost.rows,
        "bands": band_losses(model, corpus.valid, frequencies),
    }


def endless_steps(trainer: Trainer) -> Iterator[Step]:
    """Make steps, epoch after epoch, without validation."""
    while True:
        yield from trainer.steps()
        trainer.note_validation(0.0)
