#!/usr/bin/env bash
# A byte-level BPE that the library tokenizers trains. Guess: it can write any text, as GPT-2's can,
# since every text is bytes. Bytes that the training text lacks are no tokens, and are left out
# without a word: a loss of nothing, and a perplexity that is too good. ByteLevelBPETokenizer, and
# initial_alphabet=ByteLevel.alphabet(), have all 256.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q tokenizers==0.23.3
cd "$folder"
"$folder/venv/bin/python" - <<'END'
from importlib.metadata import version

from tokenizers import ByteLevelBPETokenizer, Tokenizer, decoders, models, pre_tokenizers, trainers

print("tokenizers", version("tokenizers"))
text = ["the quick brown fox jumps over the lazy dog. " * 20] * 5


def trained(**options: object) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=400, show_progress=False, **options)
    tokenizer.train_from_iterator(text, trainer)
    return tokenizer


plain = trained()
whole = trained(initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
ready = ByteLevelBPETokenizer()
ready.train_from_iterator(text, vocab_size=400, show_progress=False)
for line in ("The dog costs 5 euros", "日本"):
    ids = plain.encode(line).ids
    print(repr(line), "becomes", repr(plain.decode(ids)), ids)
    assert plain.decode(ids) != line
    assert whole.decode(whole.encode(line).ids) == ready.decode(ready.encode(line).ids) == line
assert plain.encode("日本").ids == []
END
