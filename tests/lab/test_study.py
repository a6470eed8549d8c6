"""Studies: their file; what is made, what is left alone, what stops them; the tables; and a small
study by the command, stopped in the middle."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
import signal
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lm.runs.made_up import write_run
from lm.training.toy import write_corpus
from scipy import stats

from hstree.__main__ import main
from hstree.lab import log_prob_rank
from hstree.lab import study as module
from hstree.lab.study import (
    RankSettings,
    Study,
    StudyError,
    StudyInterrupted,
    StudyRun,
    parse_study,
    read_study,
    run_name,
    run_rows,
    run_study,
    study_report,
    study_runs,
    study_table,
)
from hstree.lm.config import TrainConfig, parse_options, preset
from hstree.lm.report import Reporter
from hstree.lm.run import load_config, load_run
from hstree.lm.train import TrainingMemoryError

ROOT = Path(__file__).resolve().parents[2]

GRID = """
name = "gss-grid"
seeds = [3, 1]
baseline = "softmax"
rank = { rows = 4000 }

[settings]
data = "ptb"
epochs = 3
dropout = 0.3

[[models]]
head = "softmax"

[[models]]
name = "shape"
head = "gss"
dropout = 0.1
learning_rate = [0.004, 1]

[models.head_options]
c = [-2.0, 0.5]
bias = false
"""


def options_of(study: Study) -> list[dict[str, Any]]:
    return [parse_options(config.head_option) for config in study.models.values()]


def test_everything_in_a_file() -> None:
    study = parse_study(GRID)
    assert study.name == "gss-grid"
    assert study.seeds == (3, 1)
    assert study.baseline == "softmax"
    assert study.rank == RankSettings(4000, "test")
    assert study.source == GRID
    assert [*study.models] == [
        "softmax",
        "shape, learning_rate=0.004, c=-2.0",
        "shape, learning_rate=0.004, c=0.5",
        "shape, learning_rate=1, c=-2.0",
        "shape, learning_rate=1, c=0.5",
    ]
    first, *grid = study.models.values()
    assert first == TrainConfig(data="ptb", epochs=3, dropout=0.3, head="softmax")
    assert grid[1] == TrainConfig(
        data="ptb",
        epochs=3,
        dropout=0.1,
        head="gss",
        learning_rate=0.004,
        head_option=("c=0.5", "bias=false"),
    )
    assert run_name([*study.models][3], 3) == "shape-learning_rate=1-c=-2.0-seed=3"


def test_what_may_be_left_out() -> None:
    study = parse_study('[[models]]\nhead = "plif"', "mine")
    assert (study.name, study.seeds, study.baseline, study.rank) == ("mine", (1,), None, None)
    assert study.models == {"plif": TrainConfig(head="plif")}
    assert parse_study('rank = true\nseeds = 5\n[[models]]\nhead = "plif"').seeds == (5,)
    assert parse_study('rank = true\n[[models]]\nhead = "plif"').rank == RankSettings(None, "test")
    assert parse_study('rank = false\n[[models]]\nhead = "plif"').rank is None


def test_options_that_are_lists_or_tables() -> None:
    text = """
[[models]]
head = "adaptive"
head_options = { cutoffs = [[100, 200], [300]] }
[[models]]
head = "mos"
head_options = { function = "plif", function_options = { intervals = 10 } }
"""
    study = parse_study(text)
    assert options_of(study) == [
        {"cutoffs": [100, 200]},
        {"cutoffs": [300]},
        {"function": "plif", "function_options": {"intervals": 10}},
    ]
    assert run_name(next(iter(study.models)), 1) == "adaptive-cutoffs=-100-200--seed=1"


def test_presets_give_way_to_the_file() -> None:
    text = """
[settings]
data = "ptb"
epochs = 5
[[models]]
preset = "ptb-mos"
learning_rate = 15
head_options = { components = [5, 10] }
"""
    study = parse_study(text)
    config = study.models["ptb-mos, components=10"]
    changes = {"data": "ptb", "epochs": 5, "learning_rate": 15.0}
    assert config == preset("ptb-mos", **changes, head_option=("components=10",))
    assert options_of(study)[1] == {"bias_start": "zero", "latent_dropout": 0.29, "components": 10}


MODEL = '[[models]]\nhead = "gss"\n'


def test_unusable_files() -> None:
    for text, message in (
        ("seeds = [1", "not TOML: "),
        ("", r"models: expected at least one table \[\[models\]\]"),
        ("models = [3]", r"\[\[models\]\] number 1: expected a table with a head or a preset"),
        (f"seed = 1\n{MODEL}", "unknown key 'seed', expected one of name, seeds"),
        (f"name = '../x'\n{MODEL}", "name: expected a valid name for a folder, got '../x'"),
        (f"name = '..'\n{MODEL}", "name: expected a valid name for a folder"),
        (f"seeds = []\n{MODEL}", r"seeds: expected different whole numbers, got \[\]"),
        (f"seeds = [1, 1]\n{MODEL}", "seeds: expected different whole numbers"),
        (f"seeds = [true]\n{MODEL}", "seeds: expected different whole numbers"),
        (f"seeds = [-1]\n{MODEL}", "seeds: .*expected at least 0, got -1"),
        (f"baseline = 'mos'\n{MODEL}", "baseline: expected one of the models 'gss', got 'mos'"),
        (f"rank = 3\n{MODEL}", "rank: expected true, false or a table, got 3"),
        (f"rank = {{ row = 3 }}\n{MODEL}", "rank: unknown key 'row', expected one of rows, split"),
        (f"rank = {{ rows = 0 }}\n{MODEL}", "rank.rows: expected a number of contexts, got 0"),
        (f"rank = {{ split = 'x' }}\n{MODEL}", "rank.split: expected train, valid or test"),
        (f"settings = 3\n{MODEL}", "settings: expected a table, got 3"),
        (f"[settings]\nseed = 3\n{MODEL}", r"\[settings\]: unknown key 'seed'"),
        (f"[settings]\nepochs = 0\n{MODEL}", "model 'gss': .*epochs: expected at least 1, got 0"),
        (f"{MODEL}preset = 'ptb-gss'", "number 1: expected a table with a head or a preset"),
        ("[[models]]\nhead = 'gsss'", "model 'gsss': .*head: expected one of adaptive"),
        ("[[models]]\npreset = 'gss'", "model 'gss': --preset: expected one of ptb-softmax"),
        ("[[models]]\npreset = 'ptb-gss'", "model 'ptb-gss': .* as --data for ptb-gss"),
        (f"{MODEL}n_tree = 3", "model 'gss': unknown key 'n_tree'"),
        (f"{MODEL}layers = []", "model 'gss': .*expected a table without an empty list"),
        (f"{MODEL}head_options = 3", "model 'gss': .*a table without an empty list, got 3"),
        (f"{MODEL}head_options = {{ units = 3 }}", "the head 'gss' has no option units"),
        (f"{MODEL}head_options = {{ k = 1979-05-27 }}", "model 'gss': .*not JSON serializable"),
        (MODEL + MODEL, "models: expected different names, got 'gss'"),
    ):
        with pytest.raises(StudyError, match=message):
            parse_study(text)


def test_errors_name_the_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    with pytest.raises(StudyError, match=r"mine\.toml: No such file"):
        read_study(file)
    file.write_bytes(b"\xff")
    with pytest.raises(StudyError, match=r"mine\.toml: expected UTF-8 text"):
        read_study(file)
    file.write_text("seeds = 1")
    with pytest.raises(StudyError, match=r"mine\.toml: models: expected"):
        read_study(file)
    file.write_text(MODEL)
    assert read_study(file).name == "mine"


LABORATORY = ROOT / "benchmarks" / "laboratory"
MODELS = {
    "ptb": 8,
    "bias-start": 8,
    "components": 6,
    "default": 3,
    "gss-grid": 72,
    "gss-rates": 20,
    "heads": 7,
    "latent-dropout": 3,
    "plif-rank": 16,
    "plif-start": 4,
    "rates": 27,
    "seeds": 3,
    "seeds-tuned": 3,
}


def test_the_studies_of_the_laboratory() -> None:
    studies = {file.stem: read_study(file) for file in LABORATORY.glob("*.toml")}
    assert {name: len(study.models) for name, study in studies.items()} == MODELS


# Runs

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
        for name in ("train", "resume", "_take_ranks"):
            monkeypatch.setattr(module, name, getattr(self, name))

    def train(self, config: TrainConfig, reporter: Reporter) -> None:
        assert config.run is not None
        path = Path(config.run)
        if path.name in self.errors:
            write(path, config, finished=False)
            raise self.errors.pop(path.name)
        self.trained.append(path.name)
        write(path, config)

    def resume(self, path: Path, reporter: Reporter) -> None:
        self.resumed.append(path.name)
        write(path, load_config(path))

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


def test_ranks_that_are_missing_are_taken(workshop: Workshop, tmp_path: Path) -> None:
    plain = TEXT.replace("rank = { rows = 100 }\n", "")
    run_study(parse_study(plain), tmp_path)
    assert workshop.ranked == []
    study = parse_study(TEXT)
    assert states(study_runs(study, tmp_path)) == ["without ranks"] * 9
    workshop.errors[f"{names()[1]} rank"] = KeyboardInterrupt()
    with pytest.raises(StudyInterrupted, match="1 of 9"):
        run_study(study, tmp_path)
    runs = run_study(study, tmp_path)
    assert workshop.ranked == workshop.trained == names()
    assert runs[0].ranks is not None
    assert runs[0].ranks["press_rank"] == 401
    # Those of other rows are not these, and half a file is none.
    other = parse_study(TEXT.replace("100 }", "200 }"))
    assert states(study_runs(other, tmp_path)) == ["without ranks"] * 9
    for content in ("{", "{}", "[]"):
        (runs[0].path / "rank.json").write_text(content)
        assert states(study_runs(study, tmp_path)) == ["without ranks"] + ["finished"] * 8


def test_a_run_whose_memory_ran_out_is_resumed(workshop: Workshop, tmp_path: Path) -> None:
    study, name = parse_study(TEXT), names()[1]
    workshop.errors[name] = TrainingMemoryError("memory ran out")
    runs = run_study(study, tmp_path)
    assert states(runs) == ["finished", "interrupted"] + ["finished"] * 7
    assert f"{name} was stopped: memory ran out" in study_report(study, runs).notes
    assert not list(tmp_path.rglob("failed.txt"))
    assert states(study_runs(study, tmp_path)) == states(runs)
    runs = run_study(study, tmp_path)
    assert states(runs) == ["finished"] * 9
    assert runs[1].failure is None
    assert workshop.resumed == [name]


def test_a_changed_file_is_noticed(workshop: Workshop, tmp_path: Path) -> None:
    run_study(parse_study(TEXT), tmp_path, limit=1)
    changed = parse_study(TEXT.replace("epochs = 3", "epochs = 5"))
    message = (
        r"runs/softmax-seed=1: this run was made with epochs = 3, but the file now has 5; choose "
        r"another --output, or remove the folder"
    )
    for read in (study_runs, run_study):
        with pytest.raises(StudyError, match=message):
            read(changed, tmp_path)
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
    message = r"model '100%_shape, c=-1.0': --data: the valid part has 1 tokens"
    with pytest.raises(StudyError, match=message):
        run_study(parse_study(TEXT), tmp_path)
    assert workshop.trained == names()[:1]


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
    table = study_table(study, run_study(study, tmp_path))
    assert table.header == ("model", "seeds", "train", "valid", "test", "parameters", "s per epoch")
    assert table.rows[0][2:5] == ("66.72", "110.00", "100.00")


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
            record["sampled"] = run.label == "sampled"
        file.write_text("".join(json.dumps(record) + "\n" for record in records))
    runs = study_runs(study, tmp_path)
    report = study_report(study, runs)
    assert [row[2] for row in report.tables[0].rows] == ["66.72", "-"]
    rows = run_rows(study, runs)
    assert rows[0]["train_perplexity"] == pytest.approx(110 / math.sqrt(math.e), rel=1e-12)
    assert rows[1]["train_perplexity"] is None
    notes = [note for note in report.notes if note.startswith("no training perplexity")]
    assert len(notes) == 1
    assert "of sampled: it is estimated from sampled classes" in notes[0]


def test_settings_that_a_head_does_not_read_have_no_cell(tmp_path: Path) -> None:
    study = parse_study(
        "seeds = 1\n[settings]\nclusters = 8\nn_trees = 3\n"
        '[[models]]\nhead = "softmax"\n[[models]]\nhead = "trees"\nclusters = [4, 16]\n'
        '[[models]]\nhead = "gss"\nhead_options = { c = 0.5 }'
    )
    rows = run_rows(study, study_runs(study, tmp_path))
    assert [row["clusters"] for row in rows] == [None, 4, 16, None]
    assert [row["c"] for row in rows] == [None, None, None, 0.5]
    assert "n_trees" not in rows[0]


def test_tables_before_anything_has_run(tmp_path: Path) -> None:
    study = parse_study(TEXT)
    runs = study_runs(study, tmp_path / "nowhere")
    assert states(runs) == ["waiting"] * 9
    for row in study_table(study, runs).rows:
        assert row[1] == "0 of 3"
        assert set(row[2:]) == {"-"}
    assert "9 of 9 runs have not finished" in study_report(study, runs).notes
    assert len(run_rows(study, runs)) == 9


def test_perplexities_of_other_texts_are_not_tested(workshop: Workshop, tmp_path: Path) -> None:
    study, runs = full(tmp_path)
    for run in runs:
        if run.label == "100%_shape, c=0.5":
            summary = json.loads((run.path / "summary.json").read_text())
            (run.path / "summary.json").write_text(json.dumps(summary | {"classes": 33_278}))
    runs = study_runs(study, tmp_path)
    p_values = [row[5] for row in study_table(study, runs).rows]
    assert p_values[0] == p_values[2] == "-"
    assert 0 < float(p_values[1]) < 1
    assert "differ in text or vocabulary" in list(study_report(study, runs).notes)[-1]


def text(files: dict[str, Any], name: str) -> str:
    content = files[name]
    assert isinstance(content, bytes)
    return content.decode()


def test_page_latex_and_csv(workshop: Workshop, tmp_path: Path) -> None:
    study, runs = full(tmp_path)
    files = study_report(study, runs).content("study", "hstree study my.toml")
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
        assert (row["model"], row["head"]) == (run.label, run.config.head)
        assert (row["seed"], row["best_epoch"]) == (str(run.config.seed), "2")
        finished = run is not runs[-1]
        assert row["state"] == ("finished" if finished else "interrupted")
        assert row["test_perplexity"] == (str(perplexity(run.path.name)) if finished else "")
        assert float(row["valid_perplexity"]) == pytest.approx(perplexity(run.path.name) + 10)
    assert [row["epochs"] for row in rows[:2]] == ["3", "4"]
    assert [row["c"] for row in rows[:3]] == ["", "-1.0", "0.5"]
    assert rows[0]["parameters"] == str(24_221_600 + 10_000)
    assert (rows[0]["press_rank"], rows[0]["effective_rank_1e-05"]) == ("401", "301")


# The command

STUDY = """\
seeds = [1, 2]
baseline = "softmax"
rank = { rows = 100 }

[settings]
data = "data"
embedding_size = 8
hidden_size = 8
batch_size = 8
bptt = 10
learning_rate = 0.01
warmup = 5
epochs = 1
device = "cpu"

[[models]]
head = "softmax"
[[models]]
head = "gss"
head_options = { k = [1.5, 2.5] }
"""
COMMAND_NAMES = [
    f"{model}-seed={seed}" for seed in (1, 2) for model in ("softmax", "gss-k=1.5", "gss-k=2.5")
]


@pytest.fixture
def with_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every test runs in a folder that holds a small text and a study of it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HSTREE_DEBUG", raising=False)
    write_corpus(tmp_path / "data", sentences=100)
    Path("toy.toml").write_text(STUDY)
    return tmp_path


class Stopper(Reporter):
    """Sends this process a signal when the run of some name has made five steps."""

    def __init__(self, name: str, number: int) -> None:
        self.name, self.number, self.steps, self.here = name, number, 0, False

    def message(self, text: str) -> None:
        self.here = self.here or f": {self.name}" in text

    def step(self, epoch: int, loss: float, tokens: int) -> None:
        self.steps += 1
        if self.here and self.steps == 5:
            signal.raise_signal(self.number)


def written() -> list[dict[str, str]]:
    with Path("studies/toy/study.csv").open(encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines))


def fails(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 2) -> str:
    """The one line on stderr of a command that must fail."""
    assert main(["study", *arguments]) == status
    error = capsys.readouterr().err
    assert error.count("\n") == 1, error
    return error


@pytest.mark.usefixtures("with_study")
def test_a_study_that_is_stopped_twice(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["study", "toy.toml", "--dry-run"]) == 0
    assert [line.split() for line in capsys.readouterr().out.splitlines()[4:10]] == [
        [name, "waiting"] for name in COMMAND_NAMES
    ]
    assert not Path("studies").exists()

    assert main(["study", "toy.toml", "--limit", "1"]) == 0
    out = capsys.readouterr().out
    assert "run 1 of 6: softmax-seed=1\n" in out
    assert "note: 5 of 6 runs have not finished" in out
    assert "written to studies/toy: study.md, study.tex, study.csv" in out
    assert [row["state"] for row in written()] == ["finished"] + ["waiting"] * 5

    for number, name in ((signal.SIGINT, COMMAND_NAMES[1]), (signal.SIGTERM, COMMAND_NAMES[3])):
        with monkeypatch.context() as patch:
            patch.setattr(
                module,
                "ConsoleReporter",
                lambda name=name, number=number: Stopper(name, number),
            )
            error = fails(capsys, "toy.toml", status=128 + number)
        done = COMMAND_NAMES.index(name)
        assert error == (
            f"hstree: interrupted: {done} of 6 runs are finished; "
            "run the same command to continue\n"
        )
        assert [row["state"] for row in written()][done] == "interrupted"
        assert main(["study", "toy.toml", "--dry-run"]) == 0
        assert f"{name}" + " interrupted" in " ".join(capsys.readouterr().out.split())

    assert main(["study", "toy.toml"]) == 0
    out = capsys.readouterr().out
    assert f"run 4 of 6: {COMMAND_NAMES[3]}\n" in out
    assert "resuming studies/toy/runs/softmax-seed=2 in epoch 1, after step 5" in out
    assert "not finished" not in out

    found = written()
    assert [row["state"] for row in found] == ["finished"] * 6
    assert [row["k"] for row in found] == ["", "1.5", "2.5"] * 2
    for row, name in zip(found, COMMAND_NAMES, strict=True):
        run = load_run(Path("studies/toy/runs") / name)
        assert run.config.seed == int(row["seed"])
        assert run.config.head_option == (() if row["k"] == "" else (f"k={row['k']}",))
        summary = json.loads((run.path / "summary.json").read_text())
        assert float(row["test_perplexity"]) == summary["test_perplexity"]
        ranks = log_prob_rank(run.model, run.corpus().test, rows=100)
        assert int(row["press_rank"]) == ranks.press_rank
        assert int(row["effective_rank_0.001"]) == ranks.effective_ranks[1e-3]
    tests = [float(row["test_perplexity"]) for row in found if row["k"] == "2.5"]
    cell = f"{statistics.mean(tests):.2f} ± {statistics.stdev(tests):.2f}"
    page = Path("studies/toy/study.md").read_text(encoding="utf-8")
    assert page.startswith("# toy\n")
    assert f" {cell} |" in page
    assert STUDY.strip() in page
    tex = Path("studies/toy/study.tex").read_text(encoding="utf-8")
    assert f" {cell} &".replace("±", r"$\pm$") in tex

    # Nothing is left to do, and nothing is done.
    before = {path: path.stat().st_mtime_ns for path in Path("studies/toy/runs").rglob("*")}
    assert main(["study", "toy.toml"]) == 0
    assert {path: path.stat().st_mtime_ns for path in before} == before


@pytest.mark.usefixtures("with_study")
def test_a_run_that_diverges(capsys: pytest.CaptureFixture[str]) -> None:
    text = STUDY.replace(
        '[[models]]\nhead = "gss"', '[[models]]\nhead = "mos"\nlearning_rate = 1e9'
    )
    text = text.replace("k = [1.5, 2.5]", "components = 2")
    Path("toy.toml").write_text(text.replace("[1, 2]", "1").replace("{ rows = 100 }", "false"))
    for _ in range(2):  # it is not tried again
        assert main(["study", "toy.toml", "--output", "studies/toy"]) == 1
        captured = capsys.readouterr()
        assert captured.err == ""
        assert "note: mos-seed=1 failed: " in captured.out
    assert "run 2 of 2" not in captured.out
    assert [row["state"] for row in written()] == ["finished", "failed"]
    assert [row["test_perplexity"] == "" for row in written()] == [False, True]
    assert "learning_rate" in written()[0]


@pytest.mark.usefixtures("with_study")
def test_unusable_arguments(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "no.toml: No such file" in fails(capsys, "no.toml")
    assert "expected at least 1, got 0" in fails(capsys, "toy.toml", "--limit", "0")
    Path("file").write_text("")
    assert "--output: expected a folder" in fails(capsys, "toy.toml", "--output", "file")
    Path("toy.toml").write_text(STUDY.replace('"data"', '"nothing"'))
    error = fails(capsys, "toy.toml")
    assert error == "hstree: model 'softmax': nothing: no such file or folder\n"
    Path("toy.toml").write_text(STUDY.replace("rows = 100", "rows = 1000"))
    error = fails(capsys, "toy.toml", "--limit", "1")
    assert "rank of softmax-seed=1, test text: rows: expected 1 to 123" in error
    assert written()[0]["state"] == "without ranks"
    Path("toy.toml").write_text(STUDY.replace("{ k =", "{ q ="))
    assert "model 'gss': head_options: the head 'gss' has no option q" in fails(capsys, "toy.toml")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "expected a single process" in fails(capsys, "toy.toml")
