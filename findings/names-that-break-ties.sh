#!/usr/bin/env bash
# Documents of equal score in pytrec_eval. Guess: they are ranked in the order of the run. The name
# that comes last in the alphabet is first: a scorer that knows nothing has a reciprocal rank of 1
# or 1/4 by the name of the right document, and scores are float32 first, so that ones that differ
# in double precision tie too.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q pytrec-eval-terrier==0.5.11 numpy
cd "$folder"
"$folder/venv/bin/python" - <<'END'
from importlib.metadata import version

from pytrec_eval import RelevanceEvaluator

print("pytrec-eval-terrier", version("pytrec-eval-terrier"))


def rank(right: str, run: dict[str, float]) -> float:
    result = RelevanceEvaluator({"query": {right: 1}}, {"recip_rank"}).evaluate({"query": run})
    return 1 / result["query"]["recip_rank"]


seen = {}
for right in ("a", "z"):
    for run in ({right: 1.0, "b": 1.0, "c": 1.0, "d": 1.0}, {"d": 1.0, "c": 1.0, "b": 1.0, right: 1.0}):
        seen[tuple(run)] = rank(right, run)
        print("run:", *run, "right:", right, "rank:", seen[tuple(run)])
assert list(seen.values()) == [4, 4, 1, 1]
close = {"a": -18.0000001, "b": -18.0000002}
print(close, "rank of a:", rank("a", close))
assert rank("a", close) == 2
END
