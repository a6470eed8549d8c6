#!/usr/bin/env bash
# The size of a Unigram vocabulary that the library tokenizers trains. Guess: vocab_size, if the
# text is large enough, as with its BPE and with SentencePiece, or all pieces there are. Of one text
# vocab_size=500 gives 319 and 1,000 gives 1,000: the last round of pruning may end far below.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q tokenizers==0.23.3 sentencepiece==0.2.3 numpy==2.3.5
cd "$folder"
"$folder/venv/bin/python" - <<'END'
import io
from importlib.metadata import version

import numpy as np
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

print({name: version(name) for name in ("tokenizers", "sentencepiece")})
rng = np.random.default_rng(0)
letters = list("abcdefghijklmnop")
words = ["".join(rng.choice(letters, rng.integers(2, 9))) for _ in range(3000)]
text = [" ".join(words[min(2999, int(z))] for z in rng.zipf(1.3, 50)) for _ in range(2000)]


def size(model, trainer) -> int:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.train_from_iterator(text, trainer)
    return tokenizer.get_vocab_size()


seen = {}
for V in (500, 1000):
    options = {"vocab_size": V, "show_progress": False}
    file = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter(text), model_writer=file, vocab_size=V, minloglevel=2
    )
    seen[V] = (
        size(models.Unigram(), trainers.UnigramTrainer(**options)),
        size(models.BPE(), trainers.BpeTrainer(**options)),
        SentencePieceProcessor(model_proto=file.getvalue()).vocab_size(),
    )
    print(f"asked for {V}: Unigram {seen[V][0]}, BPE {seen[V][1]}, SentencePiece {seen[V][2]}")
assert seen[500][0] < 400 and seen[500][1:] == (500, 500)
assert seen[1000] == (1000, 1000, 1000)
END
