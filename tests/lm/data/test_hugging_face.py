"""Texts that the package datasets reads, from files and folders: nothing here asks the network."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hstree.__main__ import main
from hstree.lm.data import Corpus, Subwords, WhiteSpace, load_corpus, load_held_out
from hstree.lm.run import load_config

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


def test_same_words_as_a_folder_of_text(datasets: Any, tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    rows = {"train": ["a b\n", " \n", "b c d\n"], "validation": ["a\n"], "test": ["d e\n"]}
    for name, lines in rows.items():
        file = {"validation": "valid"}.get(name, name) + ".txt"
        (tmp_path / "text" / file).write_text("".join(lines))
    text = load_corpus(tmp_path / "text")
    corpus = load_corpus(save(datasets, tmp_path / "saved", rows))
    assert corpus.vocabulary == text.vocabulary
    assert corpus.fingerprint() == text.fingerprint()


def test_held_out_splits_suffice(datasets: Any, tmp_path: Path, saved: Path) -> None:
    vocabulary = load_corpus(saved).vocabulary
    for splits in (["validation", "test"], ["test"]):
        rows = {split: ROWS[split] for split in splits}
        folder = save(datasets, tmp_path / splits[0], rows)
        text = load_held_out(folder, vocabulary=vocabulary, tokenizer=WhiteSpace())
        assert [*text.parts] == [{"validation": "valid"}.get(split, split) for split in splits]
        assert vocabulary.decode(text.parts["test"].tolist()) == ["the", "end", "<eos>"]
        assert text.lengths["test"] == (8, 8)
    folder = save(datasets, tmp_path / "train", {"train": ["the"], "dev": ["the"]})
    with pytest.raises(ValueError, match=r"parts valid or test, .* there are train, dev"):
        load_held_out(folder, vocabulary=vocabulary, tokenizer=WhiteSpace())
    with pytest.raises(ValueError, match="missing valid, test; there are train, dev"):
        load_corpus(folder)


def test_column(datasets: Any, tmp_path: Path) -> None:
    """The only one with text, or text, or the one that is named."""
    folder = save(datasets, tmp_path / "saved", ROWS, column="body")
    for column in (None, "body"):
        assert words(load_corpus(folder, column=column), "test") == "the end <eos>"
    message = "--column: expected a column of text of saved, one of body, got 'number'"
    with pytest.raises(ValueError, match=message):
        load_corpus(folder, column="number")
    rows = [json.dumps({"title": f"a c {i}", "text": f"b c {i}", "n": i}) for i in range(50)]
    path = tmp_path / "two.jsonl"
    path.write_text("\n".join(rows))
    assert "b" in load_corpus(path).vocabulary
    assert "a" in load_corpus(path, column="title").vocabulary
    path.write_text("\n".join(rows).replace("text", "body"))
    with pytest.raises(ValueError, match=r"of text of two\.jsonl, one of title, body, got none"):
        load_corpus(path)
    path.write_text("\n".join(f'{{"n": {i}}}' for i in range(50)))
    with pytest.raises(ValueError, match=r"of text of two\.jsonl, whose columns are n"):
        load_corpus(path)


# Files

LINES = [f'Line {i}, "{"the cat sat" if i % 3 else "a dog ran"}".' for i in range(60)]


def packed(path: Path, content: bytes) -> None:
    """Write a file, compressed as its name says."""
    kinds = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}
    if path.suffix == ".zst":
        kinds[".zst"] = pytest.importorskip("zstandard").ZstdCompressor().compress
    path.write_bytes(kinds.get(path.suffix, bytes)(content))


def write_rows(path: Path, lines: list[str]) -> None:
    """Write lines of text in the format of the name of the file."""
    suffixes = path.name.partition(".")[2]
    kind = suffixes.partition(".")[0]
    table = io.StringIO()
    if kind in ("csv", "tsv"):
        writer = csv.writer(table, delimiter="," if kind == "csv" else "\t")
        writer.writerows([["number", "text"], *([i, line] for i, line in enumerate(lines))])
    elif kind in ("jsonl", "ndjson"):
        table.write("".join(json.dumps({"n": 1, "text": line}) + "\n" for line in lines))
    elif kind == "json":
        json.dump([{"n": 1, "text": line} for line in lines], table)
    elif kind == "parquet":
        parquet = pytest.importorskip("pyarrow.parquet")
        pyarrow = pytest.importorskip("pyarrow")
        parquet.write_table(pyarrow.table({"text": lines}), path)
        return
    else:
        table.write("".join(f"{line}\n" for line in lines))
    packed(path, table.getvalue().encode())


@pytest.mark.parametrize(
    "name",
    [
        *("x.jsonl", "x.ndjson", "x.json", "x.csv", "x.tsv", "x.parquet", "X.JSONL", "a [1]*?.csv"),
        *("x.jsonl.gz", "x.csv.xz", "x.jsonl.zst", "x.txt.gz", "x.gz", "x.txt.bz2", "x.raw.xz"),
    ],
)
def test_a_file_is_the_text_that_it_holds(datasets: Any, name: str, tmp_path: Path) -> None:
    """As if it were in a file of text: words, parts, all of it to be scored."""
    (tmp_path / "book.txt").write_text("".join(f"{line}\n" for line in LINES))
    text = load_corpus(tmp_path / "book.txt")
    write_rows(tmp_path / name.lower(), LINES)
    (tmp_path / name.lower()).rename(tmp_path / name)
    write_rows(tmp_path / "a 1xx.csv", ["another"])
    corpus = load_corpus(tmp_path / name)
    assert corpus.name == name
    assert corpus.vocabulary == text.vocabulary
    assert corpus.fingerprint() == text.fingerprint()
    options: Any = {"vocabulary": text.vocabulary, "tokenizer": text.tokenizer}
    scored = load_held_out(tmp_path / name, **options)
    assert np.array_equal(
        scored.parts["text"], load_held_out(tmp_path / "book.txt", **options).parts["text"]
    )


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "txt.gz"])
def test_a_folder_of_shards(datasets: Any, kind: str, tmp_path: Path) -> None:
    """One text in the order of their names, or the parts that they name."""
    (tmp_path / "book.txt").write_text("".join(f"{line}\n" for line in LINES))
    text = load_corpus(tmp_path / "book.txt")
    for folder, name in (("one", "part-{}"), ("train", "train-0000{}-of-00006")):
        place = tmp_path / folder / "data"
        place.mkdir(parents=True)
        for number in range(6):
            path = place / f"{name.format(number)}.{kind}"
            write_rows(path, LINES[10 * number : 10 * number + 10])
        corpus = load_corpus(tmp_path / folder)
        assert corpus.name == folder
        assert corpus.fingerprint() == text.fingerprint()
    for folder in ("text", "named"):
        (tmp_path / folder).mkdir()
    for split, other in (("train", "training"), ("valid", "dev"), ("test", "test")):
        lines = LINES[: 60 if split == "train" else 5]
        (tmp_path / "text" / f"{split}.txt").write_text("".join(f"{line}\n" for line in lines))
        write_rows(tmp_path / "named" / f"{other}-0.{kind}", lines)
    text, corpus = load_corpus(tmp_path / "text"), load_corpus(tmp_path / "named")
    assert corpus.fingerprint() == text.fingerprint()
    # Beside files of text they are not read.
    write_rows(tmp_path / "text" / "train.jsonl", ["another"])
    assert load_corpus(tmp_path / "text").fingerprint() == text.fingerprint()


def test_files_that_cannot_be_read(datasets: Any, saved: Path, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    write_rows(folder / "train.jsonl", LINES)
    write_rows(folder / "valid.jsonl", LINES[:5])
    (folder / "README.md").write_text("# About\n")
    with pytest.raises(ValueError, match="missing test; there are train, valid"):
        load_corpus(folder)
    write_rows(folder / "test.csv", LINES)
    with pytest.raises(ValueError, match=r"^folder: .* cannot be loaded: .*same data file"):
        load_corpus(folder)
    (tmp_path / "broken.jsonl").write_text('{"text": "a"}\n{"text": oops')
    (tmp_path / "broken.txt.gz").write_bytes(b"\x1f\x8b oops")
    next((saved / "train").glob("*.arrow")).write_bytes(b"")
    for name in ("broken.jsonl", "broken.txt.gz", "saved", "hf:nobody/nothing"):
        path = name if name.startswith("hf:") else tmp_path / name
        message = f"^{name.removeprefix('hf:')}: the dataset cannot be loaded: "
        with pytest.raises(ValueError, match=message):
            load_corpus(path)
    for text in ("hf:", "hf::config", "hf:a:b:c"):
        message = r"--data: expected hf:NAME\[:CONFIG\], a dataset of t"
        with pytest.raises(ValueError, match=message):
            load_corpus(text)
    message = f"a dataset of the hub, got a folder; give --data {saved}"
    with pytest.raises(ValueError, match=message):
        load_corpus(f"hf:{saved}")
    empty = save(datasets, tmp_path / "empty", ROWS | {"test": [" ", ""]})
    with pytest.raises(ValueError, match="empty: the part test has no words"):
        load_corpus(empty)


def test_byte_pairs_of_shards_come_from_the_training_part(datasets: Any, tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    write_rows(tmp_path / "x.jsonl", ["the cat sat on"] * 90 + ["zebra zebra zebra"] * 10)
    corpus = load_corpus(tmp_path / "x.jsonl", tokenizer="bpe", max_vocabulary=270)
    assert not any("eb" in word for word in corpus.vocabulary.words)


def test_a_changed_file_is_noticed(datasets: Any, tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    write_rows(path, LINES)
    assert "cat" in load_corpus(path).vocabulary
    write_rows(path, [line.replace("cat", "cow") for line in LINES])
    assert "cow" in load_corpus(path).vocabulary


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
    assert load_corpus(saved).fingerprint() == first.fingerprint()
    assert len([*(tmp_path / "cache" / "tokens").glob("*.ids")]) == 1
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
    other = load_corpus("hf:some/name", column="body")
    assert words(other, "valid") == "<unk> sat <eos> the cat <eos>"
    assert words(load_corpus("hf:some/name"), "valid") == words(corpus, "valid")
    assert asked == [
        ("Salesforce/wikitext", "wikitext-2-raw-v1"),
        ("some/name", None),
        ("some/name", None),
    ]


def test_one_split_is_cut_as_a_file_is(datasets: Any, tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("".join(f"{line}\n" for line in LINES))
    text = load_corpus(tmp_path / "book.txt")
    save(datasets, tmp_path / "train", {"train": LINES})
    datasets.Dataset.from_dict({"text": LINES}).save_to_disk(str(tmp_path / "single"))
    for name in ("train", "single"):
        assert load_corpus(tmp_path / name).fingerprint() == text.fingerprint()
    save(datasets, tmp_path / "short", {"train": ["a b c"]})
    with pytest.raises(ValueError, match="short: 4 tokens are too few to split"):
        load_corpus(tmp_path / "short")


@pytest.mark.usefixtures("elsewhere")
def test_commands_read_columns(
    datasets: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The column is a setting of the run, and another text has a column of its own."""
    for name, column in (("a.jsonl", "body"), ("b.jsonl", "story")):
        rows = ({column: f"the cat sat {i % 7}", "title": "a b"} for i in range(200))
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    a, b = str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")
    sizes = ["--embedding-size=8", "--hidden-size=8", "--batch-size=4", "--bptt=8", "--epochs=1"]
    command = ["train", "--run", "run", "--head", "softmax", *sizes, "--data", a]
    assert main(command) == 2
    assert "--column: expected a column of text of a.jsonl, one of" in capsys.readouterr().err
    assert main([*command, "--column", "body"]) == 0
    assert load_config("run").column == "body"
    assert main(["evaluate", "run"]) == 0
    other = ["evaluate", "run", "--json", "--data", b]
    assert main(other) == 2
    capsys.readouterr()
    assert main([*other, "--column", "story"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["text"]["tokens"] == 200 * 5 - 1
    assert main(["evaluate", "run", "--column", "title"]) == 2
    assert "--column: expected a text with columns, got no --data" in capsys.readouterr().err
    assert main(["train", "--resume", "run", "--epochs", "2", "--data", b]) == 2
    assert "one of story, title, got 'body'" in capsys.readouterr().err
    resumed = ["train", "--resume", "run", "--epochs", "2", "--data", b, "--column", "story"]
    assert main(resumed) == 0
    assert load_config("run").column == "story"


def test_missing_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    message = r"--data hf:some/name: needs the package datasets: pip install 'hstree\[data\]'"
    with pytest.raises(ValueError, match=message):
        load_corpus("hf:some/name")
    (tmp_path / "x.jsonl").write_text("{}")
    with pytest.raises(ValueError, match=r"x\.jsonl: needs the package datasets: pip install "):
        load_corpus(tmp_path / "x.jsonl")
