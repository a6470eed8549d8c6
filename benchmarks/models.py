"""What becomes of each model class of transformers: python -m benchmarks.models

Checks every class (tests/integrations/model_checks.py) and writes benchmarks/results/models.md.
Takes about five minutes of one core.
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from collections import Counter
from datetime import date
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "benchmarks" / "results" / "models.md"

HEADER = """\
# Model classes of transformers {version}

`python -m benchmarks.models`, {date}, torch {torch}. Small random models of every causal language
model class, and of models of text with images or sound, loaded from a folder. Checked for each:

- loss and all gradients in training; the loss and the bits of the logits in evaluation mode;
- greedy and drawn text with a repetition penalty of 1.3, also of a screened model;
- the saved folder, byte by byte;
- training, saving and loading with a mixture of softmaxes in the place of the output layer.

The slow test `tests/integrations/test_model_classes.py` repeats it. What the columns say:

- *loss without logits*: {fused} classes compute no logits for their loss.
- *reads its logits*: {read} compute real logits, as their own code works on them.
- *refused*: the output layer is not one linear layer, or, for other heads, the model scales
  or caps what it gives.
- *needs more than tokens*: the model does not run on tokens alone, and was not checked.
- *not built here*: the model needs a package that is not installed.

| class | own softmax | heads with parameters |
| --- | --- | --- |
"""


def main() -> None:
    sys.path.insert(0, str(ROOT / "tests"))
    warnings.simplefilter("ignore")
    import torch
    import transformers
    from integrations.model_checks import FUSED, READ, check_class
    from integrations.model_configs import NAMES, VLMS

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    rows = {}
    for name in [*NAMES, *VLMS]:
        with tempfile.TemporaryDirectory() as folder:
            rows[name] = check_class(name, Path(folder))
    counts = Counter(own for own, _ in rows.values())
    header = HEADER.format(
        version=transformers.__version__,
        torch=torch.__version__,
        date=date.today(),
        fused=counts[FUSED],
        read=counts[READ],
    )
    lines = (f"| {name} | {own} | {other} |\n" for name, (own, other) in rows.items())
    PAGE.write_text(header + "".join(lines), encoding="utf-8")
    print(counts)


if __name__ == "__main__":
    main()
