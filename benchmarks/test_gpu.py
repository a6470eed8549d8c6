"""benchmarks.gpu: its counts, its checks, tiny measurements on the CPU, its record and its page."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import gpu
from benchmarks.gpu import CONTESTANTS, SETTINGS, TINY
from hstree.heads.trees.layout import Layout
from hstree.trees import build_ensemble

SETTING = SETTINGS[TINY]
RECORD = gpu.ROOT / "benchmarks" / "results" / "gpu.json"


def test_visited_rows_are_counted_row_by_row() -> None:
    classes = 30
    trees = build_ensemble("huffman", classes, 3, 1.0 / np.arange(1, classes + 1))
    layout = Layout(trees)
    target = torch.randint(classes, (11,))
    nodes = {
        (t, int(entry) >> 1)
        for t, offset in enumerate(layout.path_offset.tolist())
        for y in target.tolist()
        for entry in layout.path[offset[y] : offset[y + 1]]
    }
    assert gpu.visited_rows(target, layout.path_offset, layout.path) == len(nodes)


def test_compulsory_bytes() -> None:
    """Each float32 input row, visited weight row, score and gradient once."""
    step = gpu.BUILDERS["paths"](SETTING, "cpu", **CONTESTANTS["huffman-4"].options)
    step.run()
    assert step.compulsory is not None
    rows, subset = SETTING.rows, SETTING.features // 4
    visited = len(step.leaves[1].grad.coalesce().values())
    scores = 4 * rows * SETTING.trees
    rest = step.compulsory["forward"] - 4 * rows * SETTING.features - 4 * visited * subset
    assert rest % scores == 0  # one for each level
    gradients = 4 * rows * SETTING.features + visited * (4 * (subset + 1) + 16)
    assert step.compulsory["backward"] == step.compulsory["forward"] + gradients


@pytest.mark.slow
@pytest.mark.parametrize("name", CONTESTANTS)
def test_contestant_is_right_and_measured(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function: function)
    figures = gpu.measure(CONTESTANTS[name], SETTING, "cpu")
    if figures["outcome"] == "missing":
        assert CONTESTANTS[name].kind == "flat"
        assert figures["detail"]
        return
    assert figures["outcome"] == "measured", figures
    assert max(figures["errors"].values()) < 1e-5
    assert {len(seconds) for seconds in figures["seconds"].values()} == {SETTING.rounds}
    assert len(figures["reference"]) == 2
    assert ("traffic" in figures) == (CONTESTANTS[name].kind == "paths")
    json.dumps(figures)


@pytest.mark.parametrize(
    ("change", "outcome", "detail"),
    [
        (lambda x: 1.01 * x, "wrong", "error of loss: expected at most 0.0002, got 0.01"),
        (lambda x: x + (x.detach() - x) / 2, "wrong", "error of grad_input: expected at most"),
        (lambda x: x * torch.nan, "wrong", "error of loss: expected at most 0.0002, got nan"),
        (lambda x: x.reshape(7, 7), "failed", "RuntimeError: shape '[7, 7]' is invalid"),
    ],
    ids=["loss", "gradient", "nan", "raises"],
)
def test_contestant_that_is_wrong_is_not_timed(
    change: Any, outcome: str, detail: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(gpu.FLAT, "eager", lambda: lambda *tensors: change(gpu._eager(*tensors)))
    figures = gpu.measure(CONTESTANTS["eager"], SETTING, "cpu")
    assert figures["outcome"] == outcome
    assert figures["detail"].startswith(detail)
    assert "seconds" not in figures


def test_kernels_by_name() -> None:
    ours = "void hstree::(anonymous namespace)::path_log_prob_kernel<__nv_bfloat16, true>(Tables)"
    assert gpu.kernel_name(ours) == "path_log_prob_kernel"
    assert gpu.kernel_name("void at::native::reduce_kernel<512>()") == "sort and the rest"


def test_without_a_gpu_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main(["--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err == "benchmarks.gpu needs a CUDA GPU, but torch finds none\n"
    with pytest.raises(SystemExit):
        gpu.main(["--device", "cpu"])
    assert "expected --out DIR" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_folder_keeps_what_was_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    call = ["--device", "cpu", "--out", str(tmp_path), "--contestants", "random-4", "eager"]
    assert gpu.main([*call, "--minutes", "0.01"]) == 3  # no time for a contestant
    assert gpu.main(call) == 0
    assert "benchmarks/tiny/random-4: measured" in capsys.readouterr().out
    record = (tmp_path / "results.json").read_text()
    assert list(json.loads(record)["entries"]) == [
        "benchmarks/tiny/random-4",
        "benchmarks/tiny/eager",
    ]
    page = (tmp_path / "report.md").read_text()
    assert "| balanced trees, S = D/4 | backward |" in page

    monkeypatch.setattr(gpu, "of_process", None)  # nothing is measured again
    assert gpu.main(call) == 0
    monkeypatch.setattr(
        gpu, "machine", lambda device: {"gpu": {"name": "H100"}, "torch": "", "cuda": ""}
    )
    with pytest.raises(SystemExit, match="is of cpu, this device is H100"):
        gpu.main(call)


@pytest.mark.parametrize(
    ("code", "outcome", "detail"),
    [
        ("import os; print('begun', flush=True); os.abort()", "crashed", "exit status -6\nbegun"),
        ("import time; time.sleep(60)", "timed out", "after 2 s"),
    ],
)
def test_a_process_that_fails_is_recorded(
    code: str, outcome: str, detail: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "python"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{code}"\n')
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    figures = gpu.of_process(TINY, "eager", "cpu", 2.0, tmp_path / "one.json")
    assert (figures["outcome"], figures["detail"]) == (outcome, detail)
    assert figures["title"] == CONTESTANTS["eager"].title


def test_tables_from_figures() -> None:
    def measured(name: str, both: list[float], copy: float = 4e3, **more: Any) -> dict[str, Any]:
        seconds = dict.fromkeys(("forward", "backward", "both"), both)
        reference = [{"copy_bytes_per_second": copy, "product_flops": 1e12}] * 2
        about = {"title": CONTESTANTS[name].title, "outcome": "measured", "sources": "s"}
        return {**about, "seconds": seconds, "reference": reference, **more}

    moved = {"compulsory": {"forward": 300, "backward": 700}}
    there = {
        "huffman-4": measured("huffman-4", [1.0, 0.5, 2.0], traffic=moved, peak_bytes=40),
        "random-4": {"title": "balanced trees", "outcome": "crashed", "detail": "exit status -11"},
        "eager": measured("eager", [30.0, 50.0, 40.0], peak_bytes=1000),
        "compiled": measured("compiled", [20.0], 3e3),
    }
    results = {
        "device": {"name": "NVIDIA H200", "torch": "2.11.0", "cuda": "13.0"},
        "calls": [{"date": "2026-11-22 10:00"}],
        "entries": {f"benchmarks/4096x128k/{name}": entry for name, entry in there.items()},
    }
    text = gpu.page(results)
    assert "| balanced trees: crashed, exit status -11 |" in text
    assert "| 1,000.000 ± 375.000 | 0 | 40.00 | 20.00 |" in text
    assert "more than 5% off: compiled." in text
    assert "| forward | 1,000.000 | 0 | 0 | 13.33 |" in text


def test_page_is_that_of_the_record(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["--page", str(RECORD)]) == 0
    assert capsys.readouterr().out == RECORD.with_suffix(".md").read_text()
    assert RECORD.read_text() == gpu.lines(json.loads(RECORD.read_text()))
