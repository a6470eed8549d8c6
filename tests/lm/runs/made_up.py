"""Run folders with made-up figures: what ``hstree train`` writes, without training."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SETTINGS: dict[str, Any] = {
    "data": "/data/ptb",
    "head": "softmax",
    "head_option": [],
    "dropout": 0.4,
    "tied": False,
    "context_size": None,
    "optimizer": "sgd",
    "epochs": 3,
    "finetune": None,
    "run": None,
    "seed": 1,
}
SUMMARY: dict[str, Any] = {
    "corpus": "ptb",
    "head": "softmax",
    "classes": 10_000,
    "train_tokens": 929_589,
    "unigram_valid_perplexity": 700.2,
    "unigram_test_perplexity": 639.3,
    "backbone_parameters": 24_221_600,
    "head_parameters": 10_000,
    "cost": {"rows": 700, "head_seconds": 0.02, "flat_seconds": 0.03, "ratio": 1.5},
    "seconds": 60.0,
}


def write_run(
    folder: Path,
    valid: Sequence[float] = (200.0, 120.5, 130.0),
    test: float | None = 118.25,
    averaged_from: int | None = None,
    summary: dict[str, Any] | None = None,
    **settings: Any,
) -> Path:
    """A run with these validation perplexities and, if it has finished, this test perplexity.

    Epoch e takes 10 + e seconds at 1000 e tokens a second.
    """
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(SETTINGS | {"run": str(folder)} | settings))
    records = [
        {
            "epoch": epoch,
            "step": 100 * epoch,
            "learning_rate": 1.0,
            "train_loss": math.log(value) - 0.5,
            "valid_loss": math.log(value),
            "best": value == min(valid[:epoch]),
            "tokens_per_second": 1000.0 * epoch,
            "seconds": 10.0 + epoch,
            "sampled": False,
            "averaged": averaged_from is not None and epoch >= averaged_from,
            "train_perplexity": value / math.exp(0.5),
            "valid_perplexity": value,
        }
        for epoch, value in enumerate(valid, start=1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    if test is not None:
        final = {
            "epochs": len(valid),
            "best_epoch": 1 + list(valid).index(min(valid)),
            "valid_perplexity": min(valid),
            "test_perplexity": test,
        }
        (folder / "summary.json").write_text(json.dumps(SUMMARY | final | (summary or {})))
    return folder
