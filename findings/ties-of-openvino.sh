#!/usr/bin/env bash
# The order of equal values in OpenVINO's TopK. Guess: the lower index first, as ONNX says, whatever
# k is. For k = 5 it is so; for k = 50 equal values come in no order of their indices.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q openvino==2026.4.1 numpy
cd "$folder"
"$folder/venv/bin/python" - <<'END'
import numpy as np
import openvino as ov
from openvino import opset13

print("openvino", ov.__version__)


def topk(x: np.ndarray, k: int) -> np.ndarray:
    parameter = opset13.parameter(list(x.shape), np.float32)
    result = opset13.topk(parameter, opset13.constant(k, dtype=np.int64), 1, "max", "value")
    compiled = ov.compile_model(ov.Model([result.output(1)], [parameter]), "CPU")
    return next(iter(compiled(x).values()))[0]


scores = np.zeros((1, 50_000), np.float32)
scores[:, ::3] = 1
few, many = topk(scores, 5), topk(scores, 50)
print("k = 5: ", few)
print("k = 50:", many[:12], "...")
assert few.tolist() == list(range(0, 15, 3))
assert many.tolist() != sorted(many.tolist())
END
