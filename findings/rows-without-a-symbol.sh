#!/usr/bin/env bash
# Symbols and rows of shipped vocabularies. Guess: V symbols have the ids 0 to V - 1, with spare
# rows at the end if any. Kokoro's 114 phonemes lie among 178 rows, the first of which is free; in
# OpenAI's cl100k_base ids 100,256 and 100,261 to 100,275 are no token, and n_vocab counts them.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q --no-deps kokoro-onnx==0.6.1 litellm==1.110.2
"$folder/venv/bin/python" -m pip install -q tiktoken==0.14.0
cd "$folder"
"$folder/venv/bin/python" - <<'END'
import json
import os
import sysconfig
from importlib.metadata import version
from pathlib import Path

packages = Path(sysconfig.get_path("purelib"))
# litellm has the file that tiktoken would fetch.
os.environ["TIKTOKEN_CACHE_DIR"] = str(packages / "litellm/litellm_core_utils/tokenizers")
import tiktoken

print({name: version(name) for name in ("kokoro-onnx", "litellm", "tiktoken")})
config = json.loads((packages / "kokoro_onnx/config.json").read_text())
ids = set(config["vocab"].values())
free = [i for i in range(config["n_token"]) if i not in ids]
print("Kokoro:", config["n_token"], "rows,", len(ids), "symbols, free rows:", free)
assert (config["n_token"], len(ids), free[0], max(ids)) == (178, 114, 0, 177)

encoding = tiktoken.get_encoding("cl100k_base")
ids = set(encoding._mergeable_ranks.values()) | set(encoding._special_tokens.values())
free = [i for i in range(encoding.n_vocab) if i not in ids]
print("cl100k_base: n_vocab", encoding.n_vocab, "tokens", len(ids), "free:", free)
assert free == [100_256, *range(100_261, 100_276)]
END
