"""What the commands of the laboratory refuse: one line that names the argument, and no folder."""

from __future__ import annotations

from pathlib import Path

import pytest
from lm.runs.made_up import write_run

from hstree.__main__ import main

FILES = {
    "scores.csv": b"model,seed,test_perplexity,press_rank,k\na,1,60,9,2\na,2,61,8,2\nb,1,62,7,2\n",
    "empty.csv": b"",
    "header.csv": b"model,test_perplexity\n",
    "words.csv": b"model,test_perplexity\n\na,1\na,high\n",
    "quote.csv": b'model,test_perplexity\n"a,1\n',
    "bytes.csv": b"model,test_perplexity\n\xff,1\n",
    "set.txt": b"gem jewel 3.8\n",
    "text.txt": b"gem jewel 3.8\ngem jewel\n",
    "file": b"kept",
}
REFUSED = {
    "analyze rank run run": "run: expected every run and file once, got this one twice",
    "analyze rank absent": "absent: no such run folder",
    "analyze rank softmax --rows 999999": "softmax, test part: rows: expected 1 to ",
    "analyze function softmax trees": "trees: model: expected a head that is a softmax",
    "analyze function plif --data nowhere": "no such",
    "analyze function plif --output file": "--output: expected a folder",
    "analyze tree softmax": "model: expected a head of trees, got the head 'softmax'",
    "analyze words --benchmarks set.txt": "the following arguments are required: RUN",
    "analyze words softmax": "the following arguments are required: --benchmarks",
    "analyze words softmax --benchmarks nowhere": "nowhere: no such file or folder",
    "analyze words softmax --benchmarks text.txt": "line 2: expected word1 word2 score",
    "analyze words data --benchmarks set.txt": "not a run folder",
    "analyze predictions softmax": "the following arguments are required: --context",
    "analyze predictions softmax --context +": "--context: expected words, or words | true word",
    "analyze predictions softmax --context the+|+": "expected words, or words | true word, got",
    "analyze predictions softmax --context the+|+big+cat": "--context: expected one word after | ",
    "analyze predictions softmax --context the --top-k 99": "--top-k: expected at most",
    "analyze significance": "the following arguments are required: --table",
    "analyze significance --table absent.csv": "absent.csv",
    "analyze significance --table empty.csv": "--model: expected one of the columns of empty.csv",
    "analyze significance --table header.csv": "with two or more finite values each, got 0",
    "analyze significance --table words.csv": "words.csv, line 4: expected numbers: could not",
    "analyze significance --table quote.csv": "quote.csv: expected a CSV file in UTF-8",
    "analyze significance --table bytes.csv": "bytes.csv: expected a CSV file in UTF-8",
    "analyze correlation scores.csv --x rank": "--x: expected one of the columns of scores.csv (",
    "analyze correlation scores.csv --within size": "--within: expected one of",
    "analyze correlation scores.csv --y model": "scores.csv, line 2: expected numbers: could",
    "analyze correlation scores.csv --y k": "scores.csv, x = press_rank, y = k: y: expected values",
    "experiment jacobian --experts 0": "argument --experts: expected at least 1, got 0",
    "experiment jacobian --experts 2 2": "--experts: expected each once, got [2, 2]",
    "experiment jacobian --gates relu": "argument --gates: invalid choice: 'relu'",
    "experiment robustness --size 8": "--rank: expected a number below --size, 8, got 10",
    "experiment robustness --repetitions 0": "--repetitions: expected at least 1, got 0",
    "experiment synthetic --heads softmx": "heads: expected one of adaptive",
    "experiment synthetic --alpha 0": "--alpha: expected a positive number",
    "compare": "the following arguments are required: RUN",
    "compare run absent": "absent: no such run folder",
    "compare .": "its subfolders are runs: name one of them",
    "compare run --format html": "invalid choice: 'html'",
    "compare damaged": "metrics.jsonl, line 1: expected a JSON object",
}


@pytest.fixture(scope="module")
def folder(trained: Path) -> Path:
    for name, content in FILES.items():
        (trained / name).write_bytes(content)
    write_run(trained / "run")
    (write_run(trained / "damaged") / "metrics.jsonl").write_text("[1]")
    return trained


@pytest.mark.parametrize("command", REFUSED)
def test_what_is_refused(
    command: str, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.delenv("HSTREE_DEBUG", raising=False)
    before = sorted(folder.iterdir())
    assert main([part.replace("+", " ") for part in command.split()]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1, captured.err
    assert captured.err.startswith("hstree")
    assert REFUSED[command] in captured.err
    assert sorted(folder.iterdir()) == before
    assert (folder / "file").read_bytes() == b"kept"
