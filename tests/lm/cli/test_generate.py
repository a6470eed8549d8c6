"""``hstree generate``: what it prints, and how it fails."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from lm.cli.support import fails
from lm.training.toy import small_config

from hstree.__main__ import main
from hstree.lm.train import train

SPEED = r"hstree: [\d,]+ tokens/s\n"


@pytest.mark.parametrize("options", ["", "--temperature 0.7 --top-p 0.9 --top-k 8"])
@pytest.mark.parametrize("head", ["trees", "softmax"])
def test_text(head: str, options: str, runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["generate", str(runs / head), "--prompt", "the OLD", "--words", "40"]
    command += options.split()
    assert main([*command, "--seed", "3"]) == 0
    first = capsys.readouterr()
    assert first.out.startswith("the old ")
    assert re.fullmatch(SPEED, first.err)
    assert "<unk>" not in first.out
    assert len(re.findall(r"\w+|\.|\n", first.out)) >= 40
    assert main([*command, "--seed", "3"]) == 0
    assert capsys.readouterr().out == first.out
    assert main([*command, "--seed", "4", "--samples", "2"]) == 0
    assert capsys.readouterr().out.count("-----") > 0


def test_one_word_is_left(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = set()
    narrow = ("--top-k 1", "--top-p 1e-5", "--temperature 1e-5")
    for seed, options in enumerate(narrow):
        assert main(["generate", str(runs / "trees"), "--seed", str(seed), *options.split()]) == 0
        texts.add(capsys.readouterr().out)
    assert len(texts) == 1


def test_unknown_words_are_named(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(runs / "trees"), "--prompt", "the zebra", "--words", "3"]) == 0
    captured = capsys.readouterr()
    notice = "hstree: not in the vocabulary, read as <unk>: zebra\n"
    assert re.fullmatch(notice + SPEED, captured.err)
    assert captured.out.startswith("the zebra")


def test_byte_pairs(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tokenizers")
    run = tmp_path / "bytes"
    train(small_config(data, run, tokenizer="bpe", max_vocabulary=280))
    capsys.readouterr()
    prompt = "the cat sleeps .\nthe  old"
    assert main(["generate", str(run), "--prompt", prompt, "--words", "30"]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith(prompt)
    assert len(captured.out) >= len(prompt) + 30
    assert re.fullmatch(SPEED, captured.err)
    assert main(["generate", str(run), "--prompt", "the O", "--words", "3"]) == 0
    captured = capsys.readouterr()
    notice = "hstree: not in the vocabulary, read as <unk>: O\n"
    assert re.fullmatch(notice + SPEED, captured.err)
    assert captured.out.startswith("the O")


def test_samples_beyond_memory_are_refused(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("hstree.lm.generate.available_memory", lambda _: 30_000_000)
    command = ["generate", str(runs / "softmax"), "--words", "2", "--samples"]
    assert main([*command, "9"]) == 0
    capsys.readouterr()
    assert fails(capsys, *command, "200000000").startswith(
        "hstree: --samples: expected samples that fit into memory, got 200,000,000 of 2 words"
    )
