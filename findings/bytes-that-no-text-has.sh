#!/usr/bin/env bash
# The 256 pieces for single bytes of SentencePiece models of Mistral. Guess: 13 of them can never be
# written, the bytes that UTF-8 does not have. 140 cannot: 125 of ASCII are pieces of their own, C2
# and C3 begin only characters that have pieces. Whoever counts the tokens of a text counts them 0
# times, for ever; so are 750 control pieces.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q mistral-common==1.13.1 sentencepiece==0.2.3
cd "$folder"
"$folder/venv/bin/python" - <<'END'
from importlib.metadata import version
from importlib.resources import files

from sentencepiece import SentencePieceProcessor

print("mistral-common", version("mistral-common"), "sentencepiece", version("sentencepiece"))
for name in ("tokenizer.model.v1", "mistral_instruct_tokenizer_240323.model.v3"):
    model = SentencePieceProcessor(model_file=str(files("mistral_common").joinpath("data", name)))
    V = model.vocab_size()
    of_bytes = {i for i in range(V) if model.is_byte(i)}
    control = sum(model.is_control(i) for i in range(V))
    written = set()
    for start in range(0, 0x110000, 4096):
        points = [p for p in range(start, start + 4096) if not 0xD800 <= p < 0xE000]
        for ids in model.encode([chr(p) for p in points]):
            written.update(ids)
    never = of_bytes - written
    print(f"{name}: {V} pieces, {control} control, {len(of_bytes)} bytes, {len(never)} never written:")
    print("   ", *(model.id_to_piece(i) for i in sorted(never)[:4]), "...")
    assert len(of_bytes) == 256 and len(never) == 140
assert (V, control) == (32_768, 750)
END
