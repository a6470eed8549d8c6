"""Studies: what is made, what is left alone, what stops them, and the tables."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lm.runs.made_up import write_run
from scipy import stats

from hstree.lab import study as module
from hstree.lab.study import (
    RankSettings,
    Study,
    StudyError,
    StudyInterrupted,
    StudyRun,
    parse_study,
    run_study,
    seconds_left,
    study_report,
    study_runs,
    study_table,
)
from hstree.lm.config import TrainConfig
from hstree.lm.report import Reporter
from hstree.lm.train import TrainingError, TrainingInterrupted, TrainingMemoryError

TEXT = """
seeds = [1, 2, 3]
baseline = "softmax"
rank = { rows = 100 }
[settings]
data = "ptb"
epochs = 3
[[models]]
head = "softmax"
[[models]]
name = "100%_shape"
head = "gss"
epochs = 4
head_options = { c = [-1.0, 0.5] }
"""
ORDER = ["softmax", "100-_shape-c=-1.0", "100-_shape-c=0.5"]
TESTS = {"softmax": 100.0, "100-_shape-c=-1.0": 90.0, "100-_shape-c=0.5": 100.5, "sampled": 95.0}


@dataclasses.dataclass
class RankOf:
    """Stands for :class:`hstree.lab.RankResult`."""

    press_rank: int
    effective_ranks: dict[float, int]


def perplexity(name: str) -> float:
    """A test perplexity that depends on the model and the seed."""
    model, _, seed = name.partition("-seed=")
    return TESTS[model] + [0.0, 1.0, 5.0][int(seed) - 1]


class Workshop:
    """Stands for the trainer: writes made-up runs, and counts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.trained: list[str] = []
        self.resumed: list[str] = []
        self.ranked: list[str] = []
        self.errors: dict[str, BaseException] = {}
        self.without_folder: set[str] = set()
        for name in ("train", "resume", "_take_ranks"):
            monkeypatch.setattr(module, name, getattr(self, name))

    def train(self, config: TrainConfig, reporter: Reporter) -> None:
        assert config.run is not None
        path = Path(config.run)
        if path.name in self.errors:
            if path.name not in self.without_folder:
                write(path, config, finished=False)
            raise self.errors.pop(path.name)
        self.trained.append(path.name)
        write(path, config)

    def resume(self, path: Path, reporter: Reporter) -> None:
        self.resumed.append(path.name)
        write(path, TrainConfig.from_json((path / "config.json").read_bytes()))

    def _take_ranks(self, path: Path, settings: RankSettings) -> None:
        if path.name + " rank" in self.errors:
            raise self.errors.pop(path.name + " rank")
        self.ranked.append(path.name)
        values = {"0.001": 50, "0.0001": 200, "1e-05": 300 + len(self.ranked)}
        content = {
            "settings": dataclasses.asdict(settings),
            "press_rank": 400 + len(self.ranked),
            "effective_ranks": values,
        }
        (path / "rank.json").write_text(json.dumps(content))


def write(path: Path, config: TrainConfig, finished: bool = True) -> None:
    for file in path.glob("*"):
        file.unlink()
    if path.exists():
        path.rmdir()
    settings = json.loads(config.with_absolute_paths().to_json())
    test = perplexity(path.name)
    write_run(path, (test + 20, test + 10), test if finished else None, **settings)


@pytest.fixture
def workshop(monkeypatch: pytest.MonkeyPatch) -> Workshop:
    return Workshop(monkeypatch)


def names(seeds: Sequence[int] = (1, 2, 3)) -> list[str]:
    return [f"{model}-seed={seed}" for seed in seeds for model in ORDER]


def states(runs: Sequence[StudyRun]) -> list[str]:
    return [run.state for run in runs]


def test_every_run_is_made_once(workshop: Workshop, tmp_path: Path) -> None:
    study = parse_study(TEXT)
    seen: list[list[str]] = []
    messages: list[str] = []

    class Listener(Reporter):
        def message(self, text: str) -> None:
            messages.append(text)

    runs = run_study(
        study,
        tmp_path,
        limit=4,
        reporter=Listener,
        changed=lambda runs: seen.append(states(runs)),
    )
    assert workshop.trained == workshop.ranked == names()[:4]
    assert states(runs) == ["finished"] * 4 + ["waiting"] * 5
    assert seen == [["finished"] * n + ["waiting"] * (9 - n) for n in range(5)]
    assert messages[0] == "run 1 of 9: softmax-seed=1"
    # 11 + 12 seconds of epochs for each of 8 runs
    assert messages[2] == "run 2 of 9: 100-_shape-c=-1.0-seed=1, about 3 min of training left"
    assert [run.path for run in runs] == [tmp_path / "runs" / name for name in names()]
    config = json.loads((tmp_path / "runs" / names()[3] / "config.json").read_text())
    assert (config["seed"], config["head"], config["epochs"]) == (2, "softmax", 3)

    runs = run_study(study, tmp_path)
    assert workshop.trained == workshop.ranked == names()
    assert states(runs) == ["finished"] * 9
    assert run_study(study, tmp_path) == runs == study_runs(study, tmp_path)
    assert workshop.trained == names()
    assert seconds_left(runs) == 0


@pytest.mark.parametrize("number", [None, signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_study_goes_on(
    number: int | None, workshop: Workshop, tmp_path: Path
) -> None:
    study = parse_study(TEXT)
    workshop.errors[names()[2]] = TrainingInterrupted(None, None, number)
    seen: list[list[str]] = []
    with pytest.raises(StudyInterrupted, match="2 of 9 runs are finished; run the same") as caught:
        run_study(study, tmp_path, changed=lambda runs: seen.append(states(runs)))
    assert caught.value.signal == number
    assert seen[-1] == ["finished"] * 2 + ["interrupted"] + ["waiting"] * 6
    run_study(study, tmp_path)
    assert workshop.resumed == [names()[2]]
    assert sorted(workshop.trained + workshop.resumed) == sorted(names())
    assert workshop.ranked == names()


def test_ranks_that_are_missing_are_taken(workshop: Workshop, tmp_path: Path) -> None:
    plain = TEXT.replace("rank = { rows = 100 }\n", "")
    run_study(parse_study(plain), tmp_path)
    assert workshop.ranked == []
    study = parse_study(TEXT)
    assert states(study_runs(study, tmp_path)) == ["without ranks"] * 9
    workshop.errors[f"{names()[1]} rank"] = KeyboardInterrupt()
    with pytest.raises(StudyInterrupted, match="1 of 9") as caught:
        run_study(study, tmp_path)
    assert caught.value.signal is None
    runs = run_study(study, tmp_path)
    assert workshop.ranked == workshop.trained == names()
    assert runs[0].ranks is not None
    assert runs[0].ranks.press_rank == 401
    assert runs[0].ranks.effective_ranks == {1e-3: 50, 1e-4: 200, 1e-5: 301}
    # Those of other rows are not these.
    other = parse_study(TEXT.replace("100 }", "200 }"))
    assert states(study_runs(other, tmp_path)) == ["without ranks"] * 9
    # Half a file is none.
    (runs[0].path / "rank.json").write_text("{")
    assert states(study_runs(study, tmp_path)) == ["without ranks"] + ["finished"] * 8


def test_a_run_that_fails_is_noted_and_the_others_go_on(workshop: Workshop, tmp_path: Path) -> None:
    study = parse_study(TEXT)
    workshop.errors[names()[1]] = TrainingError("the loss became nan in epoch 1")
    runs = run_study(study, tmp_path)
    assert states(runs) == ["finished", "failed"] + ["finished"] * 7
    assert runs[1].failure == "the loss became nan in epoch 1"
    assert run_study(study, tmp_path) == runs
    assert names()[1] not in workshop.trained + workshop.resumed
    notes = list(study_report(study, runs).notes)
    assert f"{names()[1]} failed: the loss became nan in epoch 1" in notes
    assert not any("not finished" in note for note in notes)
    assert study_table(study, runs).rows[1][1] == "2 of 3"
    row = (study_report(study, runs).rows or ())[1]
    assert (row["state"], row["test_perplexity"]) == ("failed", None)


@pytest.mark.parametrize("saved", [True, False])
def test_a_run_whose_memory_ran_out_is_resumed(
    workshop: Workshop, tmp_path: Path, saved: bool
) -> None:
    study, name = parse_study(TEXT), names()[1]
    workshop.errors[name] = TrainingMemoryError("memory ran out")
    if not saved:
        workshop.without_folder.add(name)
    runs = run_study(study, tmp_path)
    open_state = "interrupted" if saved else "waiting"
    assert states(runs) == ["finished", open_state] + ["finished"] * 7
    assert runs[1].failure == "memory ran out"
    notes = list(study_report(study, runs).notes)
    assert f"{name} was stopped: memory ran out" in notes
    assert not list(tmp_path.rglob("failed.txt"))
    assert states(study_runs(study, tmp_path)) == states(runs)
    runs = run_study(study, tmp_path)
    assert states(runs) == ["finished"] * 9
    assert runs[1].failure is None
    assert (name in workshop.resumed) == saved


def test_a_changed_file_is_noticed(workshop: Workshop, tmp_path: Path) -> None:
    run_study(parse_study(TEXT), tmp_path, limit=1)
    changed = parse_study(TEXT.replace("epochs = 3", "epochs = 5"))
    message = (
        r"runs/softmax-seed=1: this run was made with epochs = 3, but the file now has 5; choose "
        r"another --output, or remove the folder"
    )
    with pytest.raises(StudyError, match=message):
        study_runs(changed, tmp_path)
    with pytest.raises(StudyError, match=message):
        run_study(changed, tmp_path)
    other_text = parse_study(TEXT.replace('"ptb"', '"wt2"'))
    with pytest.raises(
        StudyError, match=r"made with data = \".*ptb\", but the file now has \".*wt2\""
    ):
        study_runs(other_text, tmp_path)
    # What makes no other model may change; so may the rest of the file.
    more = TEXT.replace("seeds = [1, 2, 3]", "seeds = [1, 7]").replace(
        'data = "ptb"', 'data = "ptb"\nthreads = 1'
    )
    assert states(study_runs(parse_study(more), tmp_path))[0] == "finished"


def test_an_error_of_a_run_names_its_model(workshop: Workshop, tmp_path: Path) -> None:
    workshop.errors[names()[1]] = ValueError("--data: the valid part has 1 tokens")
    message = r"model '100%_shape, c=-1.0': data: the valid part has 1 tokens"
    with pytest.raises(StudyError, match=message):
        run_study(parse_study(TEXT), tmp_path)
    assert workshop.trained == names()[:1]


def test_a_folder_that_is_no_run(workshop: Workshop, tmp_path: Path) -> None:
    (tmp_path / "runs" / names()[0]).mkdir(parents=True)
    with pytest.raises(ValueError, match=r"softmax-seed=1: not a run folder: config\.json missing"):
        run_study(parse_study(TEXT), tmp_path)


def full(tmp_path: Path) -> tuple[Study, tuple[StudyRun, ...]]:
    study = parse_study(TEXT, "my_study")
    return study, run_study(study, tmp_path)


def test_table_of_the_models(workshop: Workshop, tmp_path: Path) -> None:
    study, runs = full(tmp_path)
    content = study_table(study, runs)
    assert content.title == "my_study: perplexity, mean ± standard deviation over seeds"
    rows = {row[0]: dict(zip(content.header, row, strict=True)) for row in content.rows}
    assert list(rows) == ["softmax", "100%_shape, c=-1.0", "100%_shape, c=0.5"]
    values = {
        label: np.array([perplexity(f"{name}-seed={seed}") for seed in (1, 2, 3)])
        for label, name in zip(rows, ORDER, strict=True)
    }
    for label, row in rows.items():
        tests = values[label]
        assert row["seeds"] == "3"
        assert row["test"] == f"{tests.mean():.2f} ± {tests.std(ddof=1):.2f}"
        assert row["valid"] == f"{tests.mean() + 10:.2f} ± {tests.std(ddof=1):.2f}"
        train = (tests + 10) / math.sqrt(math.e)  # see write_run
        assert row["train"] == f"{train.mean():.2f} ± {train.std(ddof=1):.2f}"
        assert row["parameters"] == "24.23M"
        assert row["s per epoch"] == "11.5"
        if label == "softmax":
            assert row["p"] == "-"
        else:
            p = stats.ttest_ind(tests, values["softmax"], equal_var=False).pvalue
            assert float(row["p"]) == pytest.approx(p, abs=5e-4)
    # Ranks are counted up from 401 and 301 in the order of the runs.
    assert [row["Press rank"] for row in rows.values()] == ["404", "405", "406"]
    assert [row["rank, 1e-05"] for row in rows.values()] == ["304", "305", "306"]
    assert {row["rank, 0.001"] for row in rows.values()} == {"50"}
    notes = list(study_report(study, runs).notes)
    assert notes[0].startswith("train: mean over the best epoch, with dropout")
    assert notes[1].startswith("p: Welch's t-test of the test perplexities against softmax")
    assert "in the first 100 contexts of the test text" in notes[2]
    assert len(notes) == 3


def test_what_a_study_does_not_ask_for_has_no_column(workshop: Workshop, tmp_path: Path) -> None:
    study = parse_study('seeds = 1\n[[models]]\nname = "softmax"\nhead = "softmax"')
    runs = run_study(study, tmp_path)
    header = ("model", "seeds", "train", "valid", "test", "parameters", "s per epoch")
    assert study_table(study, runs).header == header
    assert study_table(study, runs).rows[0][2:5] == ("66.72", "110.00", "100.00")
    (note,) = study_report(study, runs).notes
    assert note.startswith("train: ")


def test_training_perplexity_is_that_of_the_best_epoch(workshop: Workshop, tmp_path: Path) -> None:
    """Not of the last one; and an estimate from sampled classes is left out."""
    study = parse_study(
        'seeds = 1\n[[models]]\nname = "softmax"\nhead = "softmax"\n[[models]]\nhead = "sampled"'
    )
    run_study(study, tmp_path)
    for run in study_runs(study, tmp_path):
        file = run.path / "metrics.jsonl"
        records = [json.loads(line) for line in file.read_text().splitlines()]
        records.append(records[1] | {"epoch": 3, "train_loss": 0.0, "valid_loss": 9.0})
        for record in records:
            record["sampled"] = run.model.label == "sampled"
        file.write_text("".join(json.dumps(record) + "\n" for record in records))
    runs = study_runs(study, tmp_path)
    report = study_report(study, runs)
    assert [row[2] for row in report.tables[0].rows] == ["66.72", "-"]
    rows = report.rows or ()
    assert rows[0]["train_perplexity"] == pytest.approx(110 / math.sqrt(math.e), rel=1e-12)
    assert rows[1]["train_perplexity"] is None
    notes = [note for note in report.notes if note.startswith("no training perplexity")]
    assert len(notes) == 1
    assert "of sampled: it is estimated from sampled classes" in notes[0]


def test_settings_that_a_head_does_not_read_have_no_cell(tmp_path: Path) -> None:
    study = parse_study(
        "seeds = 1\n[settings]\nroot = 8\nn_trees = 3\n"
        '[[models]]\nhead = "softmax"\n[[models]]\nhead = "trees"\nroot = [4, 16]\n'
        '[[models]]\nhead = "gss"\nhead_options = { c = 0.5 }'
    )
    rows = study_report(study, study_runs(study, tmp_path)).rows or ()
    assert [row["root"] for row in rows] == [None, 4, 16, None]
    assert [row["c"] for row in rows] == [None, None, None, 0.5]
    assert "n_trees" not in rows[0]


def test_tables_before_anything_has_run(tmp_path: Path) -> None:
    study = parse_study(TEXT)
    runs = study_runs(study, tmp_path / "nowhere")
    assert states(runs) == ["waiting"] * 9
    assert seconds_left(runs) is None
    for row in study_table(study, runs).rows:
        assert row[1] == "0 of 3"
        assert set(row[2:]) == {"-"}
    assert "9 of 9 runs have not finished" in study_report(study, runs).notes
    assert len(study_report(study, runs).rows or ()) == 9


def test_perplexities_of_other_texts_are_not_tested(workshop: Workshop, tmp_path: Path) -> None:
    study, runs = full(tmp_path)
    for run in runs:
        if run.model.label == "100%_shape, c=0.5":
            summary = json.loads((run.path / "summary.json").read_text())
            (run.path / "summary.json").write_text(json.dumps(summary | {"classes": 33_278}))
    runs = study_runs(study, tmp_path)
    p_values = [row[5] for row in study_table(study, runs).rows]
    assert p_values[0] == p_values[2] == "-"
    assert 0 < float(p_values[1]) < 1
    assert "differ in text or vocabulary" in list(study_report(study, runs).notes)[-1]


def test_rows_of_the_runs(workshop: Workshop, tmp_path: Path) -> None:
    study, runs = full(tmp_path)
    (runs[-1].path / "summary.json").unlink()
    files = study_report(study, study_runs(study, tmp_path)).content("study", "")
    rows: list[dict[str, Any]] = list(csv.DictReader(io.StringIO(text(files, "study.csv"))))
    assert list(rows[0]) == [
        *("model", "head", "seed", "state", "epochs", "c", "test_perplexity", "valid_perplexity"),
        *("train_perplexity", "best_epoch", "backbone_parameters", "head_parameters"),
        *("parameters", "seconds_per_epoch", "press_rank", "effective_rank_0.001"),
        *("effective_rank_0.0001", "effective_rank_1e-05"),
    ]
    for row, run in zip(rows, runs, strict=True):
        assert row["model"] == run.model.label
        assert row["head"] == run.model.config.head
        assert int(row["seed"]) == run.seed
        finished = run is not runs[-1]
        assert row["state"] == ("finished" if finished else "interrupted")
        assert row["test_perplexity"] == (str(perplexity(run.path.name)) if finished else "")
        assert float(row["valid_perplexity"]) == pytest.approx(perplexity(run.path.name) + 10)
        assert row["best_epoch"] == "2"
    first = rows[0] | {"seconds_per_epoch": 11.5}
    assert first["c"] == ""
    assert (first["epochs"], rows[1]["epochs"]) == ("3", "4")
    assert (rows[1]["c"], rows[2]["c"]) == ("-1.0", "0.5")
    assert first["parameters"] == str(24_221_600 + 10_000)
    assert (first["press_rank"], first["effective_rank_1e-05"]) == ("401", "301")


def text(files: dict[str, Any], name: str) -> str:
    content = files[name]
    assert isinstance(content, bytes)
    return content.decode()


def test_latex_and_markdown(workshop: Workshop, tmp_path: Path) -> None:
    files = study_report(*full(tmp_path)).content("study", "hstree study my.toml")
    assert sorted(files) == ["study.csv", "study.md", "study.tex"]
    tex = text(files, "study.tex")
    assert r"\caption{my\_study: perplexity, mean $\pm$ standard deviation over seeds}" in tex
    spreads = r"61.87 $\pm$ 1.60 & 102.00 $\pm$ 2.65 & 92.00 $\pm$ 2.65"
    assert rf"    100\%\_shape, c=-1.0 & 3 & {spreads} & " in tex
    assert r"\begin{tabular}{lrrrrrrrrrrr}" in tex
    assert tex.isascii()
    page = text(files, "study.md")
    assert page.startswith("# my_study\n")
    assert "| 100%_shape, c=-1.0 | 3 | 61.87 ± 1.60 | 102.00 ± 2.65 | 92.00 ± 2.65 |" in page
    assert f"    hstree study my.toml\n\nwith\n\n```toml\n{TEXT.strip()}\n```\n" in page


def test_infinite_perplexities(workshop: Workshop, tmp_path: Path) -> None:
    study, runs = full(tmp_path)
    summary = json.loads((runs[1].path / "summary.json").read_text())
    (runs[1].path / "summary.json").write_text(json.dumps(summary | {"test_perplexity": math.inf}))
    row = study_table(study, study_runs(study, tmp_path)).rows[1]
    assert row[4:6] == ("inf", "-")
