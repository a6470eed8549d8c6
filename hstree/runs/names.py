"""What lies in the folder of a run.

    config.json          settings (TrainConfig)
    vocabulary.txt       one line word<TAB>frequency for each class
    tokenizer.json       of Hugging Face tokenizers, where a text was cut by one
    model.safetensors    weights of the best epoch, and in its metadata the sizes of the backbone
                         and the head's configuration
    last.safetensors     the state from which --resume goes on: last weights, optimiser with its
                         averages, LSTM states, random states, position, figures of the epochs
    metrics.jsonl        one JSON object for each epoch (EpochRecord)
    learning_curve.png   perplexities by epoch
    summary.json         the final figures, once training has ended (Summary)

The folder appears when training begins. At the end of an epoch last.safetensors is written last: if
the process is killed before, the other files may be of an epoch that it does not know yet, and
which --resume makes again, the same.
"""

from __future__ import annotations

CONFIG, VOCABULARY, TOKENIZER = "config.json", "vocabulary.txt", "tokenizer.json"
MODEL, STATE = "model.safetensors", "last.safetensors"
METRICS, CURVE, SUMMARY = "metrics.jsonl", "learning_curve.png", "summary.json"


class CheckpointError(ValueError):
    """A folder that is no run, or a file of a run that is missing, foreign, truncated or not
    consistent."""
