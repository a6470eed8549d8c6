"""A text whose next word mostly follows from the last, small enough to learn in a second."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from hstree.lm.config import TrainConfig

CHAINS = {
    "the": ("cat", "dog", "old"),
    "old": ("cat", "dog"),
    "cat": ("sleeps", "eats"),
    "dog": ("runs", "eats"),
    "sleeps": ("on", "."),
    "runs": ("to", "."),
    "eats": ("fish", "meat"),
    "fish": (".",),
    "meat": (".",),
    "on": ("mats",),
    "to": ("town",),
    "mats": (".",),
    "town": (".",),
}


# What makes a head quick enough for many small runs.
QUICK = {
    "monotonic": ("units=50", "intervals=256"),
    "plif": ("intervals=1000",),
    "plif-frozen": ("intervals=1000",),
    "mos": ("components=5",),
    "mos-plif": ("components=5", 'function_options={"intervals": 1000}'),
}

# Plain SGD, as of AWD-LSTM, at a rate from which a toy learns.
SGD: dict[str, Any] = {
    "optimizer": "sgd",
    "learning_rate": 3.0,
    "head_learning_rate_factor": 1.0,
    "clip": 0.25,
    "schedule": "constant",
    "warmup": 0,
}


def sentence(generator: random.Random) -> str:
    words = ["the"]
    while words[-1] != ".":
        words.append(generator.choice(CHAINS[words[-1]]))
    return " ".join(words)


def write_corpus(folder: Path, sentences: int = 300, seed: int = 0) -> Path:
    """train.txt, valid.txt and test.txt in a new folder."""
    generator = random.Random(seed)
    folder.mkdir()
    for name, share in (("train", 1.0), ("valid", 0.2), ("test", 0.2)):
        lines = [sentence(generator) for _ in range(int(sentences * share))]
        (folder / f"{name}.txt").write_text("\n".join(lines) + "\n")
    return folder


def small_config(data: Path, run: Path, **changes: Any) -> TrainConfig:
    """Settings for a run of about a second."""
    settings: dict[str, Any] = {
        "data": str(data),
        "run": str(run),
        "head": "softmax",
        "embedding_size": 12,
        "hidden_size": 16,
        "dropout": 0.1,
        "dropout_input": 0.1,
        "dropout_hidden": 0.1,
        "epochs": 2,
        "batch_size": 8,
        "bptt": 10,
        "learning_rate": 0.01,
        "clusters": 4,
        "n_trees": 2,
        "warmup": 5,
        "device": "cpu",
    }
    settings["head_option"] = QUICK.get(changes.get("head", ""), ())
    return TrainConfig(**(settings | changes))
