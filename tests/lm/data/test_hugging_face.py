"""Datasets of the package datasets, from folders: nothing here asks the network."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hstree.lm.data import Corpus, Subwords, WhiteSpace, load_corpus, load_held_out

ROWS = {
    "train": [" = Title = \n", "", "the cat sat", None, "two\nlines", "the end\n"] * 5,
    "validation": ["the cat", "unseen sat"],
    "test": ["the end"],
}


@pytest.fixture(scope="module")
def datasets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HOME", str(tmp_path_factory.mktemp("hugging-face")))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the packages that it imports
            package = pytest.importorskip("datasets")
        package.disable_progress_bars()
        yield package


@pytest.fixture
def saved(datasets: Any, tmp_path: Path) -> Path:
    return save(datasets, tmp_path / "saved", ROWS)


def save(datasets: Any, folder: Path, rows: dict[str, list[Any]], column: str = "text") -> Path:
    splits = {
        name: datasets.Dataset.from_dict({column: values, "number": list(range(len(values)))})
        for name, values in rows.items()
    }
    datasets.DatasetDict(splits).save_to_disk(str(folder))
    return folder


def words(corpus: Corpus, split: str) -> str:
    return " ".join(corpus.vocabulary.decode(getattr(corpus, split).tolist()))


def test_a_row_is_a_line(saved: Path) -> None:
    corpus = load_corpus(saved)
    assert corpus.name == "saved"
    line = "= Title = <eos> <eos> the cat sat <eos> two <eos> lines <eos> the end <eos>"
    assert words(corpus, "train") == " ".join([line] * 5)
    assert words(corpus, "valid") == "the cat <eos> <unk> sat <eos>"
    assert words(corpus, "test") == "the end <eos>"
    named = load_corpus(f"hf:{saved}")
    assert np.array_equal(named.train, corpus.train)


def test_same_words_as_a_folder_of_text(datasets: Any, tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    rows = {"train": ["a b\n", " \n", "b c d\n"], "validation": ["a\n"], "test": ["d e\n"]}
    for name, lines in rows.items():
        file = {"validation": "valid"}.get(name, name) + ".txt"
        (tmp_path / "text" / file).write_text("".join(lines))
    text = load_corpus(tmp_path / "text")
    corpus = load_corpus(save(datasets, tmp_path / "saved", rows))
    assert corpus.vocabulary == text.vocabulary
    for split in ("train", "valid", "test"):
        assert words(corpus, split) == words(text, split)


def test_held_out_splits_suffice(datasets: Any, tmp_path: Path, saved: Path) -> None:
    vocabulary = load_corpus(saved).vocabulary
    for splits in (["validation", "test"], ["test"]):
        rows = {split: ROWS[split] for split in splits}
        folder = save(datasets, tmp_path / splits[0], rows)
        text = load_held_out(str(folder), vocabulary=vocabulary, tokenizer=WhiteSpace())
        assert [*text.parts] == [{"validation": "valid"}.get(split, split) for split in splits]
        assert vocabulary.decode(text.parts["test"].tolist()) == ["the", "end", "<eos>"]
        assert text.lengths["test"] == (8, 8)
    folder = save(datasets, tmp_path / "train", {"train": ["the"]})
    with pytest.raises(ValueError, match="expected the splits validation or test, missing"):
        load_held_out(str(folder), vocabulary=vocabulary, tokenizer=WhiteSpace())


def test_column(datasets: Any, tmp_path: Path) -> None:
    folder = save(datasets, tmp_path / "saved", ROWS, column="body")
    assert words(load_corpus(f"hf:{folder}::body"), "test") == "the end <eos>"
    message = "saved: expected a column 'text' of text in the split train, whose columns are body, "
    with pytest.raises(ValueError, match=message):
        load_corpus(folder)
    with pytest.raises(ValueError, match="expected a column 'number' of text"):
        load_corpus(f"hf:{folder}::number")


def test_byte_pairs(saved: Path) -> None:
    pytest.importorskip("tokenizers")
    corpus = load_corpus(saved, tokenizer="bpe", max_vocabulary=270)
    assert isinstance(corpus.tokenizer, Subwords)
    text = corpus.tokenizer.join(corpus.vocabulary.decode(corpus.train.tolist()))
    assert text == " = Title = \n\nthe cat sat\ntwo\nlines\nthe end\n" * 5


def test_changed_dataset_is_noticed(
    datasets: Any, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HSTREE_CACHE", str(tmp_path / "cache"))
    first = load_corpus(saved)
    again = load_corpus(saved)
    entries = [path for path in (tmp_path / "cache" / "tokens").iterdir() if path.is_dir()]
    assert len(entries) == 1
    assert np.array_equal(again.train, first.train)
    other = save(datasets, tmp_path / "other", ROWS | {"test": ["the cat"]})
    saved.rename(tmp_path / "old")
    other.rename(saved)
    assert words(load_corpus(saved), "test") == "the cat <eos>"


def test_hub_name_and_configuration(datasets: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked of the package, and a cache that goes by its fingerprints."""
    asked = []

    def load_dataset(name: str, config: str | None) -> Any:
        asked.append((name, config))
        return datasets.DatasetDict(
            {
                split: datasets.Dataset.from_dict({"text": rows, "body": rows[::-1]})
                for split, rows in ROWS.items()
            }
        )

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    corpus = load_corpus("hf:Salesforce/wikitext:wikitext-2-raw-v1")
    assert corpus.name == "Salesforce/wikitext wikitext-2-raw-v1"
    assert words(corpus, "valid") == "the cat <eos> <unk> sat <eos>"
    assert words(load_corpus("hf:some/name::body"), "valid") == "<unk> sat <eos> the cat <eos>"
    assert words(load_corpus("hf:some/name"), "valid") == words(corpus, "valid")
    assert asked == [
        ("Salesforce/wikitext", "wikitext-2-raw-v1"),
        ("some/name", None),
        ("some/name", None),
    ]


def test_missing_splits(datasets: Any, tmp_path: Path) -> None:
    rows = {"train": ROWS["train"], "dev": ROWS["test"]}
    folder = save(datasets, tmp_path / "saved", rows)
    message = "missing validation, test; there are train, dev"
    with pytest.raises(ValueError, match=message):
        load_corpus(folder)
    single = datasets.Dataset.from_dict({"text": ROWS["train"]})
    single.save_to_disk(str(tmp_path / "single"))
    with pytest.raises(ValueError, match="got one dataset without splits"):
        load_corpus(tmp_path / "single")


def test_errors(datasets: Any, saved: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nobody/nothing: the dataset cannot be loaded: "):
        load_corpus("hf:nobody/nothing")
    for text in ("hf:", "hf::config", "hf:a:b:c:d"):
        with pytest.raises(
            ValueError, match=r"--data: expected hf:NAME\[:CONFIG\[:COLUMN\]\], got"
        ):
            load_corpus(text)
    with pytest.raises(ValueError, match="a saved dataset has no configurations, got 'raw'"):
        load_corpus(f"hf:{saved}:raw")
    empty = save(datasets, tmp_path / "empty", ROWS | {"test": [" ", ""]})
    with pytest.raises(ValueError, match="empty: the split test has no words"):
        load_corpus(empty)
    next((saved / "train").glob("*.arrow")).write_bytes(b"")
    with pytest.raises(ValueError, match="saved: the dataset cannot be loaded: "):
        load_corpus(saved)


def test_missing_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    message = r"--data hf:some/name: needs the package datasets: pip install 'hstree\[data\]'"
    with pytest.raises(ValueError, match=message):
        load_corpus("hf:some/name")
