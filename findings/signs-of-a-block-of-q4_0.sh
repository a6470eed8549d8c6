#!/usr/bin/env bash
# Blocks of 32 weights in the formats of GGUF that llama.cpp reads. Guess: a block of +1 and -1 is
# kept in four bits, and one of equal small numbers in eight. In Q4_0 the second sign comes back as
# 7/8 of its weight, in Q5_0 as 15/16: the range is -8 to 7, and the first of the largest numbers
# gets the -8. In Q8_0 rows of 1e-6 become zero, as the scale is a float16 that is a 127th of the
# largest number.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q gguf==0.19.0 numpy
cd "$folder"
"$folder/venv/bin/python" - <<'END'
from importlib.metadata import version

import numpy as np
from gguf import GGMLQuantizationType as Format
from gguf import quants

print("gguf", version("gguf"))


def kept(block: np.ndarray, name: str) -> np.ndarray:
    return quants.dequantize(quants.quantize(block, Format[name]), Format[name])


signs = np.tile(np.array([1, -1], np.float32), (1, 16))
for name, least in (("Q4_0", 7 / 8), ("Q5_0", 15 / 16)):
    for block in (signs, -signs):
        back = kept(block, name)[0, :2]
        print(name, block[0, :2], "becomes", back)
        assert back[0] == block[0, 0] and back[1] == least * block[0, 1]
assert np.allclose(kept(signs, "Q4_1"), signs, atol=1e-3)
for size in (1e-4, 1e-6):
    back = kept(np.full((1, 32), size, np.float32), "Q8_0")
    print("Q8_0", size, "becomes", back[0, 0])
assert (back == 0).all()
END
