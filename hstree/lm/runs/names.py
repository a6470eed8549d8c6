"""The files of a run folder.

    config.json          settings (TrainConfig)
    vocabulary.txt       one line word<TAB>frequency for each class
    tokenizer.json       of Hugging Face tokenizers, or the name of the rule that split the text
    model.safetensors    weights of the best epoch, and in its metadata the sizes of the backbone
                         and the head's configuration
    last.safetensors     the state that --resume loads: last weights, optimizer with its averages,
                         LSTM states, random states, position, figures of the epochs
    metrics.jsonl        one JSON object for each epoch (EpochRecord)
    learning_curve.png   perplexities by epoch
    comparison.png       perplexity against training time, beside a run with another head
    summary.json         the final figures, once training has ended (Summary)

The folder appears when training begins. At the end of an epoch last.safetensors is written last. If
the process is killed before that, the other files may belong to an epoch that last.safetensors does
not contain; --resume repeats this epoch with the same result.
"""

from __future__ import annotations

CONFIG, VOCABULARY, TOKENIZER = "config.json", "vocabulary.txt", "tokenizer.json"
MODEL, STATE = "model.safetensors", "last.safetensors"
METRICS, SUMMARY = "metrics.jsonl", "summary.json"
CURVE, COMPARISON = "learning_curve.png", "comparison.png"


class CheckpointError(ValueError):
    """A folder that is not a run folder, or a file of a run that is missing, truncated,
    inconsistent or of another kind."""
