"""Tokenizers: what they split, what they join, and what errors say."""

from __future__ import annotations

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
    prompt_words,
    tokenize,
    tokenizer_from_bytes,
    tokenizer_to_bytes,
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
    expected = {Words: tokenize(line), WhiteSpace: ["Don't", "SPLIT", "this(yet)."]}
    for kind, tokens in expected.items():
        assert kind().split_batch([line, "\n"]) == [tokens, []]
        assert kind().join(["a", ",", "<eos>", "b"]) == detokenize(["a", ",", "<eos>", "b"])
        assert type(tokenizer_from_bytes(tokenizer_to_bytes(kind()))) is kind
    with pytest.raises(TypeError, match=r"expected one of hstree\.lm\.data, got Tokenizer"):
        tokenizer_to_bytes(Tokenizer())


@pytest.mark.parametrize("line", [*TEXT[:4], *ODD])
def test_no_text_is_lost(bpe: Subwords, line: str) -> None:
    text = line.removesuffix("\n")
    tokens = bpe.split(line)
    assert bpe.join(tokens) == text
    assert bpe.join([*tokens, "<eos>", *tokens]) == f"{text}\n{text}"
    assert not {"<unk>", "<eos>"} & set(tokens)
    assert all(token.split() == [token] for token in tokens)


def test_byte_pairs(bpe: Subwords) -> None:
    """Frequent words are merged; batches are single lines; learning is deterministic."""
    assert bpe.split("on the cats") == ["on", "Ġthe", "Ġcats"]
    assert len(bpe.split("zqzq")) == 4
    assert bpe.split("the\r\n") == bpe.split("the\n") == bpe.split("the")
    assert bpe.split_batch([*TEXT, *ODD]) == [bpe.split(line) for line in [*TEXT, *ODD]]
    assert bpe.join(["the", "<unk>", "Ġcats", "<eos>"]) == "the<unk> cats\n"
    assert learn_bpe(TEXT, 300).data == bpe.data
    assert learn_bpe(TEXT, 290).data != bpe.data
    again = tokenizer_from_bytes(tokenizer_to_bytes(bpe))
    assert again.split_batch(ODD) == bpe.split_batch(ODD)


def test_words_of_a_prompt(bpe: Subwords) -> None:
    vocabulary = Vocabulary(["<unk>", "<eos>", "U.S.", "Ġcats"], [1, 1, 1, 1])
    assert prompt_words("The U.S.  Army,\nx", vocabulary) == ["the", "U.S.", "army", ",", "x"]
    assert prompt_words("on cats\n\non", vocabulary, bpe) == ["on", "Ġcats", "<eos>", "<eos>", "on"]


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
    assert subwords.join(subwords.split("b c|a")) == "b c a"
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
    assert len(tokenizer.encode("a|a|a|a|b").ids) == 8  # that of the user is as it was


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
    assert again.fingerprint() == corpus.fingerprint()


def test_held_out_text_is_not_learnt_from(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    path = tmp_path / "book.txt"
    path.write_text("the cat sat on the mat\n" * 950 + "zebra zebra zebra zebra\n" * 50)
    corpus = load_corpus(path, tokenizer="bpe", max_vocabulary=300)  # more than there are pairs
    assert corpus.tokenizer.split("zebra") == [*"zebra"]
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
    assert sorted(corpus.vocabulary.words) == ["<eos>", "<unk>", "and", "cat"]
    assert tokenizer_to_bytes(corpus.tokenizer) == file.read_bytes()
    small = load_corpus(path, tokenizer=str(file), max_vocabulary=4, min_count=2)
    assert len(small.vocabulary) == 4


@pytest.mark.parametrize("kind", ["bytes", "letters", "words"])
def test_a_tokenizer_that_loses_characters_is_refused(kind: str, tmp_path: Path) -> None:
    """They would be missing in the text, and count in no figure."""
    tokenizers = pytest.importorskip("tokenizers")
    if kind == "words":
        tokenizer = word_level(["the", "cat"], unknown="[UNK]")
        message = "--tokenizer: .*: the tokenizer cannot split the text: .*UNK"
    else:
        tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
        kinds = tokenizers.pre_tokenizers
        tokenizer.pre_tokenizer = kinds.ByteLevel(False) if kind == "bytes" else kinds.Whitespace()
        tokenizer.decoder = tokenizers.decoders.ByteLevel() if kind == "bytes" else None
        trainer = tokenizers.trainers.BpeTrainer(vocab_size=60, show_progress=False)
        tokenizer.train_from_iterator(["the cat sat on the mat и", "a dog ran."], trainer)
        message = "--tokenizer: .*: not a usable tokenizer: it leaves out characters such as 'Ж'"
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match=message):
        load_corpus(text_file(tmp_path), tokenizer=str(tmp_path / "tokenizer.json"))


@pytest.mark.parametrize(
    ("load", "message"),
    [
        (
            lambda path: load_corpus(path, tokenizer="bpe"),
            "--max-vocabulary: expected a number of classes to learn, .* got None",
        ),
        (
            lambda path: load_corpus(path, tokenizer="bpe", max_vocabulary=257),
            "--max-vocabulary: .* at least 258 with --tokenizer bpe .*, got 257",
        ),
        (
            lambda path: load_corpus(path, tokenizer=f"{path}.json"),
            "--tokenizer: .*book.txt.json: no such file",
        ),
        (
            lambda path: load_corpus(path, tokenizer=str(path)),
            "--tokenizer: .*book.txt: not a tokenizer of the package tokenizers",
        ),
        (lambda path: Subwords(b"{}"), "^not a tokenizer of the package tokenizers"),
        (lambda path: Subwords(b"\xff"), "^not a tokenizer of the package tokenizers"),
        (
            lambda path: load_corpus(
                path, tokenizer="bpe", vocabulary=Vocabulary(["<unk>", "<eos>"], [1, 1])
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
