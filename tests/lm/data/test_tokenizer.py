"""Tokenizers: what they split, what they join, and what errors say."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hstree.lm.data import (
    Subwords,
    Tokenizer,
    Vocabulary,
    WhiteSpace,
    Words,
    detokenize,
    learn_bpe,
    load_corpus,
    load_held_out,
    tokenize,
)

TEXT = [
    "The cats sat on the mats, the dogs sat on the cats.\n",
    "\n",
    "  Two leading spaces, <unk> and <eos> marks; naïve café 字字字 x\u0301 \U0001f600\n",
    "tab\tand trailing space \n",
] * 20
ODD = [
    "",
    " ",
    "never seen: ŁÓDŹ \u200b\u2028\u0085 \ufeff\ufffd",
    "\x00\x01\x7f",
    "👩\u200d👩\u200d👧 مرحبا हिन्दी",
    "a\rb",
    " <unk><eos> <token:3>",
    "x" * 5000,
]


@pytest.fixture(scope="module")
def bpe() -> Subwords:
    pytest.importorskip("tokenizers")
    return learn_bpe(iter(TEXT), 300)


def test_words_and_white_space() -> None:
    line = "Don't SPLIT  this(yet).\n"
    assert Words().split(line) == tokenize(line)
    assert WhiteSpace().split(line) == ["Don't", "SPLIT", "this(yet)."]
    kinds: list[Tokenizer] = [Words(), WhiteSpace()]
    for tokenizer in kinds:
        assert tokenizer.split_batch([line, "\n"]) == [tokenizer.split(line), []]
        assert tokenizer.join(["a", ",", "<eos>", "b"]) == detokenize(["a", ",", "<eos>", "b"])
    assert len({kind.identity for kind in kinds}) == 2


@pytest.mark.parametrize("line", [*TEXT[:4], *ODD])
def test_no_text_is_lost(bpe: Subwords, line: str) -> None:
    text = line.removesuffix("\n")
    tokens = bpe.split(line)
    assert bpe.join(tokens) == text
    assert bpe.join([*tokens, "<eos>", *tokens]) == f"{text}\n{text}"
    assert not {"<unk>", "<eos>"} & set(tokens)
    assert all(token.split() == [token] for token in tokens)


def test_line_ends_are_left_out(bpe: Subwords) -> None:
    assert bpe.split("the\r\n") == bpe.split("the\n") == bpe.split("the")


def test_batches_are_single_lines(bpe: Subwords) -> None:
    assert bpe.split_batch([*TEXT, *ODD]) == [bpe.split(line) for line in [*TEXT, *ODD]]


def test_frequent_words_are_merged(bpe: Subwords) -> None:
    assert bpe.split("on the cats") == ["on", "Ġthe", "Ġcats"]
    assert len(bpe.split("zqzq")) == 4


def test_learning_is_deterministic(bpe: Subwords) -> None:
    again = learn_bpe(TEXT, 300)
    assert again.to_bytes() == bpe.to_bytes()
    assert again.identity == bpe.identity
    assert learn_bpe(TEXT, 290).identity != bpe.identity


def test_bytes_round_trip(bpe: Subwords, tmp_path: Path) -> None:
    data = bpe.to_bytes()
    again = Subwords.from_bytes(data)
    assert again.to_bytes() == data
    assert again.identity == bpe.identity
    assert again.split_batch(ODD) == bpe.split_batch(ODD)
    (tmp_path / "tokenizer.json").write_bytes(json.dumps(json.loads(data)).encode())
    loaded = Subwords.load(tmp_path / "tokenizer.json")
    assert loaded.split_batch(TEXT) == bpe.split_batch(TEXT)


def test_unknown_tokens_stand_as_they_are(bpe: Subwords) -> None:
    assert bpe.join(["the", "<unk>", "Ġcats", "<eos>"]) == "the<unk> cats\n"


def word_level(words: list[str], **kinds: Any) -> Any:
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel(vocabulary, unk_token=kinds.get("unknown", words[0]))
    )
    tokenizer.pre_tokenizer = kinds.get("pre_tokenizer") or tokenizers.pre_tokenizers.Split(
        "|", "removed"
    )
    return tokenizer


def test_tokens_that_hold_white_space_have_a_name() -> None:
    subwords = Subwords(word_level(["<unk>", "a", "b c", "\n", ""]))
    assert subwords.split("a|b c|d") == ["a", "<token:2>", "<unk>"]
    words = subwords.split("b c|a")
    assert Vocabulary([*words, "<unk>", "<eos>"], [1, 1, 1, 1]).words[0] == "<token:2>"
    assert subwords.join(words) == "b c a"
    with pytest.raises(ValueError, match="two of its tokens have the same name"):
        Subwords(word_level(["<unk>", "<token:2>", "b c"]))


def test_nothing_is_added_cut_or_padded() -> None:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = word_level(["<unk>", "a", "[CLS]"])
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A", special_tokens=[("[CLS]", 2)]
    )
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=8)
    assert tokenizer.encode("a").tokens[:2] == ["[CLS]", "a"]
    assert Subwords(tokenizer).split("a|a|a|a|b") == ["a", "a", "a", "a", "<unk>"]


def text_file(folder: Path, lines: int = 400) -> Path:
    path = folder / "book.txt"
    words = ["cat", "dog", "house", "Running", "quickly"]
    text = "".join(
        f" {words[i % 5]} {words[i * i % 5]}ish  and {words[i // 7 % 5]}.\n\n" for i in range(lines)
    )
    path.write_bytes(text.encode())
    return path


def test_corpus_of_byte_pairs_is_the_text(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    path = text_file(tmp_path)
    corpus = load_corpus(path, tokenizer="bpe", max_vocabulary=290)
    assert isinstance(corpus.tokenizer, Subwords)
    assert 10 < len(corpus.vocabulary) <= 290
    ids = [*corpus.train.tolist(), *corpus.valid.tolist(), *corpus.test.tolist()]
    assert corpus.vocabulary.unknown not in ids
    assert corpus.tokenizer.join(corpus.vocabulary.decode(ids)) == path.read_text()
    # Every class but the markers occurs in the training part.
    missing = corpus.vocabulary.frequencies == 0
    assert [corpus.vocabulary.words[i] for i in missing.nonzero()[0]] == ["<unk>"]
    # The run's tokenizer and vocabulary give the same ids again.
    again = load_corpus(path, vocabulary=corpus.vocabulary, tokenizer=corpus.tokenizer)
    assert (again.train == corpus.train).all()
    assert (again.test == corpus.test).all()


def test_held_out_text_is_not_learnt_from(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    path = tmp_path / "book.txt"
    path.write_text("the cat sat on the mat\n" * 900 + "zebra zebra zebra zebra\n" * 100)
    corpus = load_corpus(path, tokenizer="bpe", max_vocabulary=270)
    assert not any("eb" in word for word in corpus.vocabulary)


def test_byte_pairs_of_a_folder_come_from_the_training_part(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    (tmp_path / "train.txt").write_text("aab aab aac\n" * 30)
    (tmp_path / "valid.txt").write_text("aab zzz\n\n")
    (tmp_path / "test.txt").write_text(" aac")
    corpus = load_corpus(tmp_path, tokenizer="bpe", max_vocabulary=265)
    assert corpus.vocabulary.decode(corpus.valid.tolist()) == [
        *("aab", "<unk>", "<unk>", "<unk>", "<unk>", "<eos>", "<eos>")
    ]
    assert corpus.vocabulary.decode(corpus.test.tolist()) == ["Ġaac", "<eos>"]


def test_tokenizer_file(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    file = tmp_path / "tokenizer.json"
    spaces = tokenizers.pre_tokenizers.WhitespaceSplit()
    word_level(["<unk>", "cat", "and"], pre_tokenizer=spaces).save(str(file))
    path = text_file(tmp_path)
    corpus = load_corpus(path, tokenizer=str(file))
    assert sorted(corpus.vocabulary) == ["<eos>", "<unk>", "and", "cat"]
    assert load_corpus(path, tokenizer=Subwords.load(file)).tokenizer.identity == (
        corpus.tokenizer.identity
    )
    small = load_corpus(path, tokenizer=str(file), max_vocabulary=4, min_count=2)
    assert len(small.vocabulary) == 4


def english(folder: Path, *, byte_level: bool) -> Path:
    """A tokenizer.json without unknown tokens, learned from letters alone."""
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    kinds = tokenizers.pre_tokenizers
    tokenizer.pre_tokenizer = kinds.ByteLevel(False) if byte_level else kinds.Whitespace()
    if byte_level:
        tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=60, show_progress=False)
    # Of the two bytes of a Cyrillic letter the first is known, and the second of a few.
    tokenizer.train_from_iterator(["the cat sat on the mat и", "a dog ran, fish swim."], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


@pytest.mark.parametrize("byte_level", [False, True])
@pytest.mark.parametrize("kind", ["file", "folder", "held out"])
def test_characters_without_a_token_are_noticed(
    kind: str, byte_level: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are gone from the text, so they count in no figure; said at each load."""
    lines = ["the cat sat\n", "ждёт кот и кот\n"] * 30
    data = tmp_path / "data"
    data.mkdir()
    for name in ("train", "valid", "test"):
        (data / f"{name}.txt").write_text("".join(lines))
    path = data / "test.txt" if kind == "file" else data
    tokenizer = Subwords.load(english(tmp_path, byte_level=byte_level))
    lost = "ждёткот" + "кот"
    characters, n_bytes = len("".join(lines)), len("".join(lines).encode())

    def load() -> Any:
        if kind != "held out":
            return load_corpus(path, tokenizer=tokenizer)
        vocabulary = Vocabulary(["<unk>", "<eos>", "t", "a"], [1, 1, 1, 1])
        return load_held_out(path, vocabulary=vocabulary, tokenizer=tokenizer)

    for _ in range(2):
        text = load()
        share = 30 * len(lost) / characters
        most = ", ".join(map(repr, "тко"))
        said = (
            f"hstree: {path.name}: the tokenizer has no token for {share:.2%} of the characters, "
            f"which are left out, most of all {most}; perplexities are of the rest\n"
        )
        assert capsys.readouterr().err == said
    if kind != "file":
        assert text.lengths["test"] == (characters - 300, n_bytes - 600)


def test_nothing_is_said_of_a_tokenizer_that_keeps_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Names that are not the characters, and a token for unknown ones."""
    tokenizers = pytest.importorskip("tokenizers")
    path = tmp_path / "odd.txt"
    path.write_text("".join([*TEXT, "\n".join(ODD)]) * 4, encoding="utf-8")
    load_corpus(path, tokenizer="bpe", max_vocabulary=300)
    words = tokenizers.pre_tokenizers.WhitespaceSplit()
    load_corpus(path, tokenizer=Subwords(word_level(["<unk>", "cats", "the"], pre_tokenizer=words)))
    assert capsys.readouterr().err == ""


def test_a_tokenizer_that_refuses_unknown_characters(tmp_path: Path) -> None:
    (tmp_path / "cyrillic.txt").write_text("ждёт кот\n" * 50)
    with pytest.raises(ValueError, match="has no words that the tokenizer knows"):
        load_corpus(tmp_path / "cyrillic.txt", tokenizer=str(english(tmp_path, byte_level=False)))
    tokenizer = Subwords(word_level(["the", "cat"], unknown="[UNK]"))
    message = "--tokenizer: the tokenizer cannot split the text: .*UNK"
    with pytest.raises(ValueError, match=message):
        load_corpus(text_file(tmp_path), tokenizer=tokenizer)


@pytest.mark.parametrize(
    ("load", "message"),
    [
        (
            lambda path: load_corpus(path, tokenizer="bpe"),
            "--max-vocabulary: --tokenizer bpe needs the number of classes",
        ),
        (
            lambda path: load_corpus(path, tokenizer="bpe", max_vocabulary=257),
            "--max-vocabulary: expected at least 258 with --tokenizer bpe .*, got 257",
        ),
        (
            lambda path: load_corpus(path, tokenizer=f"{path}.json"),
            "--tokenizer: .*book.txt.json: no such file",
        ),
        (
            lambda path: load_corpus(path, tokenizer=str(path)),
            "--tokenizer: .*book.txt: not a tokenizer of the package tokenizers",
        ),
        (lambda path: Subwords.from_bytes(b"{}"), "^not a tokenizer of the package tokenizers"),
        (lambda path: Subwords.from_bytes(b"\xff"), "^not a tokenizer of the package tokenizers"),
        (
            lambda path: load_corpus(
                path,
                tokenizer="bpe",
                max_vocabulary=300,
                vocabulary=Vocabulary(["<unk>", "<eos>"], [1, 1]),
            ),
            "tokenizer: expected the one that made the vocabulary, got 'bpe'",
        ),
    ],
)
def test_bad_settings(load: Callable[[Path], Any], message: str, tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    with pytest.raises(ValueError, match=message):
        load(text_file(tmp_path))


def test_missing_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    monkeypatch.setenv("HSTREE_CACHE", "")
    message = r"--tokenizer: needs the package tokenizers: pip install 'hstree\[data\]'"
    with pytest.raises(ValueError, match=message):
        load_corpus(text_file(tmp_path), tokenizer="bpe", max_vocabulary=300)
    with pytest.raises(ValueError, match=message):
        Subwords.from_bytes(b"{}")
