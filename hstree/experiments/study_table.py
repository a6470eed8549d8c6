"""The tables of a study: a row for each model, and a row for each run in full digits."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hstree.analysis import RunFigures, Table, table
from hstree.analysis.rank import EPSILONS
from hstree.analysis.runs import UNGROUPED
from hstree.analysis.table import count, decimals, probability
from hstree.laboratory import mean_and_deviation, t_test

from .study import StudyRun
from .study_file import Study, StudyModel


def study_table(study: Study, runs: Sequence[StudyRun]) -> Table:
    """A row for each model: perplexities as mean and standard deviation over its finished seeds,
    the p-value against the baseline, parameters, and medians over the seeds of the seconds of an
    epoch and of the ranks."""
    rows = []
    baseline = None if study.baseline is None else _finals(study.baseline, runs)
    for model in study.models:
        own = [run for run in runs if run.model is model]
        figures = _finals(model.label, runs)
        ranks = [run.ranks for run in own if run.ranks is not None]
        row = {
            "model": model.label,
            "seeds": f"{len(figures)}"
            if len(figures) == len(own)
            else f"{len(figures)} of {len(own)}",
            "valid": _spread([run.valid_perplexity for run in figures]),
            "test": _spread([run.test_perplexity for run in figures]),
        }
        if baseline is not None:
            row["p"] = "-" if model.label == study.baseline else _p_value(figures, baseline)
        row["parameters"] = count(_parameters(figures[0])) if figures else "-"
        row["s per epoch"] = _median([run.seconds_per_epoch for run in figures], 1)
        if study.rank is not None:
            row["Press rank"] = _median([found.press_rank for found in ranks], 0)
            for epsilon in EPSILONS:
                values = [found.effective_ranks.get(epsilon) for found in ranks]
                row[f"rank, {epsilon:g}"] = _median(values, 0)
        rows.append(row)
    columns = [(name, name != "model", [row[name] for row in rows]) for name in rows[0]]
    return table(f"{study.name}: perplexity, mean ± standard deviation over seeds", columns)


def study_notes(study: Study, runs: Sequence[StudyRun]) -> Iterator[str]:
    """What a reader of the table must know beside it, a sentence each."""
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
    unfinished = [run for run in runs if run.state not in ("finished", "failed")]
    if unfinished:
        yield f"{len(unfinished)} of {len(runs)} runs have not finished"
    for run in runs:
        if run.failure is not None:
            yield f"{run.path.name} failed: {run.failure}"
    texts = {run.figures.final.text for run in runs if run.figures and run.figures.final}
    if len(texts) > 1:
        yield "the runs are on different texts or vocabularies: their perplexities do not compare"


def study_rows(study: Study, runs: Sequence[StudyRun]) -> list[dict[str, Any]]:
    """A row for each run: model, head, seed, state, the settings and head options that are not the
    same for all models, and the figures; None where there are none."""
    settings = _varying([_settings(model) for model in study.models])
    options = _varying([model.options() for model in study.models])
    return [_row(run, settings, options) for run in runs]


def _row(run: StudyRun, settings: Sequence[str], options: Sequence[str]) -> dict[str, Any]:
    figures, final = run.figures, None if run.figures is None else run.figures.final
    values = {name: _settings(run.model).get(name) for name in settings}
    values |= {name: run.model.options().get(name) for name in options}
    ranks = {} if run.ranks is None else run.ranks.effective_ranks
    return {
        "model": run.model.label,
        "head": run.model.config.head,
        "seed": run.seed,
        "state": run.state,
        **{name: _plain(value) for name, value in values.items()},
        "test_perplexity": None if final is None else final.test_perplexity,
        "valid_perplexity": None if figures is None else figures.valid_perplexity,
        "best_epoch": None if figures is None else figures.best_epoch,
        "backbone_parameters": None if final is None else final.backbone_parameters,
        "head_parameters": None if final is None else final.head_parameters,
        "parameters": None if figures is None or final is None else _parameters(figures),
        "seconds_per_epoch": None if figures is None else figures.seconds_per_epoch,
        "press_rank": None if run.ranks is None else run.ranks.press_rank,
        **{f"effective_rank_{epsilon:g}": ranks.get(epsilon) for epsilon in EPSILONS},
    }


def _settings(model: StudyModel) -> dict[str, Any]:
    """The settings that make the model what it is, but for head and head options."""
    names = {*UNGROUPED, "head", "head_option"}
    values = dataclasses.asdict(model.config)
    return {name: value for name, value in values.items() if name not in names}


def _varying(models: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names whose values are not the same in all models, in the order in which they come up."""
    names = dict.fromkeys(name for values in models for name in values)
    return [name for name in names if len({json.dumps(v.get(name)) for v in models}) > 1]


def _plain(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, (bool, list, tuple, dict)) else value


def _finals(label: str, runs: Sequence[StudyRun]) -> list[RunFigures]:
    """The runs of a model that have been trained to the end."""
    return [
        run.figures
        for run in runs
        if run.model.label == label and run.figures is not None and run.figures.final is not None
    ]


def _spread(values: Sequence[float | None]) -> str:
    found = mean_and_deviation([value for value in values if value is not None])
    if found is None:
        return "-"
    mean = decimals(found.mean, 2)
    return mean if math.isnan(found.deviation) else f"{mean} ± {decimals(found.deviation, 2)}"


def _p_value(figures: Sequence[RunFigures], baseline: Sequence[RunFigures]) -> str:
    """``-`` unless both have two runs, on the same text."""
    texts = {run.final.text for run in (*figures, *baseline) if run.final is not None}
    first, second = (
        [run.test_perplexity for run in runs if run.test_perplexity is not None]
        for runs in (figures, baseline)
    )
    if len(texts) != 1 or min(len(first), len(second)) < 2:
        return "-"
    return probability(t_test(first, second).p_value)


def _parameters(run: RunFigures) -> int:
    assert run.final is not None
    return run.final.backbone_parameters + run.final.head_parameters


def _median(values: Sequence[float | None], digits: int) -> str:
    known = [value for value in values if value is not None]
    return decimals(statistics.median(known), digits) if known else "-"
