#!/usr/bin/env bash
# The vocabulary in a file of Mistral's tokenizer Tekken. Guess: it has as many entries as the model
# has classes, and the rank of an entry is its token. The file has 150,000 entries, the tokenizer
# 131,072 tokens; the token of an entry is its rank + 1,000, and the last 19,928 entries have none.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q mistral-common==1.8.5
cd "$folder"
"$folder/venv/bin/python" - <<'END'
import json
from base64 import b64decode
from importlib.metadata import version
from importlib.resources import files

from mistral_common.tokens.tokenizers.tekken import Tekkenizer

path = files("mistral_common").joinpath("data/tekken_240911.json")
entries = json.loads(path.read_text())["vocab"]
tokenizer = Tekkenizer.from_file(str(path))
print("mistral-common", version("mistral-common"))
print(len(entries), "entries,", tokenizer.n_words, "tokens")
entry = entries[5_000]
text = b64decode(entry["token_bytes"]).decode()
(token,) = tokenizer.encode(text, bos=False, eos=False)
print(f"{text!r}: rank {entry['rank']}, token {token}")
assert len(entries) == 150_000 and tokenizer.n_words == 131_072
assert token == entry["rank"] + 1_000
left = b64decode(entries[149_999]["token_bytes"]).decode(errors="replace")
print(f"the last entry, {left!r}: tokens", tokenizer.encode(left, bos=False, eos=False))
assert len(tokenizer.encode(left, bos=False, eos=False)) > 1
END
