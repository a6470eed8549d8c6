"""benchmarks.gpu: its checks, tiny measurements on the CPU, its record and its page."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import gpu, trainer
from benchmarks.gpu import CONTESTANTS, SETTINGS, TINY

SETTING = SETTINGS[TINY]
RECORD = gpu.ROOT / "benchmarks" / "results" / "gpu.json"


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
    json.dumps(figures)


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["tiny-layers", gpu.PENN])
def test_whole_models(setting: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function: function)
    np.save(tmp_path / "text.npy", np.arange(5000) % 300)
    call = ["--device", "cpu", "--out", str(tmp_path), "--settings", setting]
    assert gpu.main([*call, "--text", str(tmp_path / "text.npy")]) == 0
    entries = json.loads((tmp_path / "results.json").read_text())["entries"]
    for name, contestant in gpu.GROUPS[setting].items():
        entry = entries[f"benchmarks/{setting}/{name}"]
        assert entry["outcome"] == "measured" or name in ("liger", "quack"), entry
        assert not contestant.ours or entry["token"] > 0
    assert "s for 929,589 tokens" in (tmp_path / "report.md").read_text()


def test_whole_model_in_a_tiny_size() -> None:
    sizes = trainer.MODELS["tiny-layers"]
    figures = gpu.measure_steps(gpu.LAYERS["softmax"], sizes, "cpu", None)
    assert figures["outcome"] == "measured", figures
    assert len(figures["seconds"]["both"]) == 2


def test_made_up_text_has_the_counts_of_subwords() -> None:
    count = np.bincount(trainer.made_up_text(49_152, 10**6), minlength=49_152)
    assert not count[21_817:].any()
    assert 13_000 < (count > 0).sum() < 21_817
    assert 0.03 < count[0] / 10**6 < 0.06


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
    assert not list(tmp_path.iterdir())


def test_a_folder_keeps_what_was_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    call = ["--device", "cpu", "--settings", TINY, "--out", str(tmp_path)]
    call += ["--contestants", "huffman-4", "eager"]
    assert gpu.main([*call, "--minutes", "0.01"]) == 3  # no time for a contestant
    file, measure, keys = tmp_path / "results.json", gpu.measure, []

    def crash(contestant: gpu.Contestant, *of: Any) -> Any:
        keys.extend(json.loads(file.read_text())["entries"])
        raise KeyboardInterrupt

    monkeypatch.setattr(gpu, "measure", crash)
    with pytest.raises(KeyboardInterrupt):
        gpu.main(call)
    assert keys == ["benchmarks/tiny/huffman-4"]
    monkeypatch.setattr(gpu, "measure", measure)
    assert gpu.main(call) == 1  # huffman-4 is not tried again
    assert "benchmarks/tiny/eager: measured" in capsys.readouterr().out
    page = (tmp_path / "report.md").read_text()
    title, eager = CONTESTANTS["huffman-4"].title, CONTESTANTS["eager"].title
    assert f"| {title}: not finished |" in page
    assert re.search(rf"\n\| {re.escape(eager)} \| \d+\.\d{{3}} ± ", page)
    monkeypatch.setattr(gpu, "measure", crash)
    monkeypatch.setattr(gpu, "device_name", lambda device: "H100")
    with pytest.raises(SystemExit, match="is of cpu, this device is H100"):
        gpu.main(call)


def test_page_is_that_of_the_record(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["--page", str(RECORD)]) == 0
    page = capsys.readouterr().out
    assert page == RECORD.with_suffix(".md").read_text()
    steps = json.loads(RECORD.read_text())["entries"]["benchmarks/4096x128k/eager"]["seconds"]
    assert f"| F.linear + F.cross_entropy | {1000 * sorted(steps['forward'])[10]:.1f}"[:-2] in page
    assert RECORD.read_text() == gpu.lines(json.loads(RECORD.read_text()))
