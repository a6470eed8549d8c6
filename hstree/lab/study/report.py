"""The results of a study: a table of its models, and a row for each run in full precision."""

from __future__ import annotations

import json
import statistics
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from hstree.lm.runs import RunResults
from hstree.lm.runs.results import model_settings
from hstree.lm.table import Table, count, decimals, latex, probability

from ..comparison import spread
from ..rank import EPSILONS
from ..report import Report, row_table
from ..significance import t_test
from .file import Study
from .runs import StudyRun


def study_report(study: Study, runs: Sequence[StudyRun]) -> Report:
    """The table of the models, also in LaTeX, and a row for each run: model, head, seed, state, the
    settings and head options that differ between models, and the results."""
    models = study_table(study, runs)
    return Report(
        study.name,
        [models],
        list(_notes(study, runs)),
        rows=_rows(study, runs),
        files={"study.tex": latex([models]).encode()},
        appendix=f"with\n\n```toml\n{study.source.strip()}\n```",
    )


def study_table(study: Study, runs: Sequence[StudyRun]) -> Table:
    """A table with a row for each model: mean and standard deviation of the perplexities over its
    finished seeds, the p-value against the baseline, parameters, and medians over the seeds of the
    seconds per epoch and of the ranks. See :func:`_train_perplexity` for that of training."""
    finals: dict[str, list[RunResults]] = {model.label: [] for model in study.models}
    for run in runs:
        if run.figures is not None and run.figures.final is not None:
            finals[run.model.label].append(run.figures)
    rows = []
    for model in study.models:
        own = [run for run in runs if run.model is model]
        figures = finals[model.label]
        ranks = [run.ranks for run in own if run.ranks is not None]
        row = {
            "model": model.label,
            "seeds": f"{len(figures)} of {len(own)}" if len(figures) < len(own) else str(len(own)),
            "train": spread([_train_perplexity(run) for run in figures]),
            "valid": spread([run.valid_perplexity for run in figures]),
            "test": spread([run.test_perplexity for run in figures]),
        }
        if study.baseline is not None:
            row["p"] = _p_value(figures, finals[study.baseline])
        final = figures[0].final if figures else None
        row["parameters"] = count(final.parameters if final else None)
        row["s per epoch"] = _median([run.seconds_per_epoch for run in figures], 1)
        if study.rank is not None:
            row["Press rank"] = _median([found.press_rank for found in ranks], 0)
            for epsilon in EPSILONS:
                values = [found.effective_ranks.get(epsilon) for found in ranks]
                row[f"rank, {epsilon:g}"] = _median(values, 0)
        rows.append(row)
    title = f"{study.name}: perplexity, mean ± standard deviation over seeds"
    return row_table(title, list(rows[0]), [list(row.values()) for row in rows], None, str)


def _train_perplexity(run: RunResults) -> float | None:
    """Perplexity on the training text during the best epoch, with dropout and while the weights
    change; None before the first epoch has ended, and where it is an estimate from sampled
    classes."""
    best = next((epoch for epoch in run.epochs if epoch.epoch == run.best_epoch), None)
    return None if best is None or best.sampled else best.train_perplexity


def _median(values: Iterable[float | None], digits: int) -> str:
    known = [value for value in values if value is not None]
    return decimals(digits)(statistics.median(known) if known else None)


def _p_value(figures: Sequence[RunResults], baseline: Sequence[RunResults]) -> str:
    """The p-value; ``-`` for the baseline itself, and unless both have two runs on the same
    text."""
    first, second = ([run.final for run in group if run.final] for group in (figures, baseline))
    texts = {final.text for final in (*first, *second)}
    if figures is baseline or len(texts) != 1 or min(len(first), len(second)) < 2:
        return "-"
    tests = [[final.test_perplexity for final in group] for group in (first, second)]
    return probability(t_test(*tests).p_value)


def _notes(study: Study, runs: Sequence[StudyRun]) -> Iterator[str]:
    if any(run.figures and run.figures.final for run in runs):
        yield (
            "train: mean over the best epoch, with dropout and while the weights change, so it may "
            "exceed valid; valid and test: of the weights kept after that epoch, without dropout"
        )
    sampled = {
        run.model.config.head
        for run in runs
        if run.figures and any(epoch.sampled for epoch in run.figures.epochs)
    }
    if sampled:
        yield (
            f"no training perplexity of {', '.join(sorted(sampled))}: it is estimated from sampled "
            "classes, too low on average"
        )
    if study.baseline is not None:
        yield (
            f"p: Welch's t-test of the test perplexities against {study.baseline}, two-sided, not "
            "corrected for the number of models"
        )
    if study.rank is not None:
        rows = "all" if study.rank.rows is None else f"the first {study.rank.rows:,}"
        yield (
            f"Press rank and effective ranks (rank, epsilon) of the log-probabilities in {rows} "
            f"contexts of the {study.rank.split} text; like the seconds of an epoch, medians over "
            "seeds"
        )
    unfinished = sum(run.state not in ("finished", "failed") for run in runs)
    if unfinished:
        yield f"{unfinished} of {len(runs)} runs have not finished"
    for run in runs:
        if run.failure is not None:
            ended = "failed" if run.state == "failed" else "was stopped"
            yield f"{run.path.name} {ended}: {run.failure}"
    texts = {run.figures.final.text for run in runs if run.figures and run.figures.final}
    if len(texts) > 1:
        yield "the runs differ in text or vocabulary: their perplexities are not comparable"


def _rows(study: Study, runs: Sequence[StudyRun]) -> list[dict[str, Any]]:
    settings = {m.label: model_settings(m.config) for m in study.models}
    every_option = dict.fromkeys(name for model in study.models for name in model.options)
    options = {m.label: every_option | m.options for m in study.models}
    names = [name for name in _varying(settings.values()) if name not in ("head", "head_option")]
    option_names = _varying(options.values())
    rows = []
    for run in runs:
        label, figures = run.model.label, run.figures
        final, ranks = figures and figures.final, run.ranks
        values = [(name, settings[label].get(name)) for name in names]
        values += [(name, options[label].get(name)) for name in option_names]
        rows.append(
            {
                "model": label,
                "head": run.model.config.head,
                "seed": run.seed,
                "state": run.state,
                **{name: _plain(value) for name, value in values},
                "test_perplexity": figures and figures.test_perplexity,
                "valid_perplexity": figures and figures.valid_perplexity,
                "train_perplexity": figures and _train_perplexity(figures),
                "best_epoch": figures and figures.best_epoch,
                "backbone_parameters": final and final.backbone_parameters,
                "head_parameters": final and final.head_parameters,
                "parameters": final and final.parameters,
                "seconds_per_epoch": figures and figures.seconds_per_epoch,
                "press_rank": ranks and ranks.press_rank,
                **{
                    f"effective_rank_{e:g}": ranks and ranks.effective_ranks.get(e)
                    for e in EPSILONS
                },
            }
        )
    return rows


def _varying(models: Collection[Mapping[str, Any]]) -> list[str]:
    """Names whose values differ between the models that have them, in order of appearance."""
    names = dict.fromkeys(name for values in models for name in values)
    return [name for name in names if len({json.dumps(v[name]) for v in models if name in v}) > 1]


def _plain(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, (bool, list, tuple, dict)) else value
