#!/usr/bin/env bash
# Tokens of a byte-level BPE against its own tokenizer. Guess: the text of a token is encoded as this
# one token, since merges made it. Of Qwen's 151,643 tokens 1,909 are valid UTF-8 and encoded
# otherwise: text is normalized and split at combining marks before it is merged. Whoever counts
# the tokens of a text counts them 0 times, for ever.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q dashscope==2.0.2 tiktoken==0.12.0
cd "$folder"
"$folder/venv/bin/python" - <<'END'
from base64 import b64decode
from importlib.metadata import version
from importlib.resources import files

from dashscope import get_tokenizer

tokenizer = get_tokenizer("qwen-7b-chat")
lines = files("dashscope").joinpath("resources/qwen.tiktoken").read_bytes().splitlines()
tokens = [b64decode(line.split()[0]) for line in lines if line]
whole, other = 0, []
for token in range(len(tokens)):
    try:
        text = tokens[token].decode()
    except UnicodeDecodeError:
        continue
    whole += 1
    found = tokenizer.encode(text)
    if found != [token]:
        other.append((text, found))
print("dashscope", version("dashscope"), "tiktoken", version("tiktoken"))
print(len(tokens), "tokens,", whole, "of them valid UTF-8,", len(other), "of these encoded otherwise")
print("examples:", other[3:6])
assert len(tokens) == 151_643
assert len(other) == 1_909
END
