"""Every causal language model class of transformers, and models of text with images or sound."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of what the packages import
    import transformers
    from integrations.model_checks import FUSED, REFUSED, TAKES, check_class
    from integrations.model_configs import NAMES, VLMS

PAGE = Path(__file__).parents[2] / "benchmarks" / "results" / "models.md"
KNOWN = "5.24.0"
"""The version whose classes the configs and the page are of."""

pytestmark = pytest.mark.filterwarnings("ignore")  # of the models


@pytest.fixture(autouse=True)
def _quiet() -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("LlamaForCausalLM", (FUSED, TAKES)),
        ("GPTNeoXForCausalLM", (FUSED, TAKES)),  # saved under the names of an older checkpoint
        ("Gemma2ForCausalLM", (FUSED, REFUSED)),  # a soft cap
        ("BartForCausalLM", (FUSED, TAKES)),  # a loss of its own
        ("Qwen2VLForConditionalGeneration", (FUSED, TAKES)),
        ("ModernBertDecoderForCausalLM", (FUSED, TAKES)),  # a bias
    ],
)
def test_some_classes(name: str, expected: tuple[str, str], tmp_path: Path) -> None:
    assert check_class(name, tmp_path) == expected


@pytest.mark.slow
@pytest.mark.parametrize("name", [*NAMES, *VLMS])
def test_every_class(name: str, tmp_path: Path) -> None:
    if transformers.__version__ != KNOWN:
        pytest.skip(f"the configs are those of transformers {KNOWN}")
    outcome = " | ".join(check_class(name, tmp_path))
    assert f"| {name} | {outcome} |" in PAGE.read_text(encoding="utf-8")
