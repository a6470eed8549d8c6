"""All contests by name."""

from __future__ import annotations

from benchmarks.contest import Build
from benchmarks.decoding import DECODING_CONTESTS, SCREENED_CONTESTS
from benchmarks.heads import HEAD_CONTESTS
from benchmarks.optimizers import OPTIMIZER_CONTESTS
from benchmarks.paths import PATH_CONTESTS
from benchmarks.trainer import TRAINER_CONTESTS
from benchmarks.word2vec import WORD2VEC_CONTESTS

CONTESTS: dict[str, dict[str, Build]] = {
    **HEAD_CONTESTS,
    **PATH_CONTESTS,
    **DECODING_CONTESTS,
    **SCREENED_CONTESTS,
    **OPTIMIZER_CONTESTS,
    **TRAINER_CONTESTS,
    **WORD2VEC_CONTESTS,
}
