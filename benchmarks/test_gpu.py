"""The counts, checks and measurements of benchmarks.gpu, at a tiny size on the CPU; and that
benchmarks.gpu_proof keeps its results, whatever its processes do."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import gpu, gpu_proof, gpu_report
from benchmarks.gpu import CONTESTANTS, SETTINGS, TINY, Entry
from hstree.heads.trees.layout import Layout
from hstree.trees import build_ensemble

SETTING = SETTINGS[TINY]


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


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


# ---- one contestant


@pytest.mark.slow
@pytest.mark.parametrize("name", CONTESTANTS)
def test_contestant_is_right_and_measured(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function: function)
    entry, steps = CONTESTANTS[name], []
    figures = gpu.measure(entry, SETTING, "cpu", lambda now: steps.append(now.get("doing")))
    if figures["outcome"] == "missing":
        assert entry.kind == "flat"
        assert figures["detail"]
        return
    assert figures["outcome"] == "measured", figures
    assert steps == ["building", "checking", "measuring memory", "timing", None]
    assert max(figures["errors"].values()) < 1e-5
    assert {len(seconds) for seconds in figures["seconds"].values()} == {SETTING.rounds}
    assert len(figures["reference"]) == 2
    assert ("traffic" in figures) == (entry.kind == "paths")
    json.dumps(figures)


@pytest.mark.parametrize(
    ("change", "outcome", "detail"),
    [
        (lambda x: 1.01 * x, "wrong", "error of loss: expected at most 0.0002, got 0.01"),
        (lambda x: x + (x.detach() - x) / 2, "wrong", "error of grad_input: expected at most"),
        (lambda x: x * torch.nan, "wrong", "error of loss: expected at most 0.0002, got nan"),
        (lambda x: x.reshape(7, 7), "failed", "checking: RuntimeError: shape '[7, 7]' is invalid"),
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
    assert gpu.kernel_name("void hstree::segment_reduce_kernel<float>()") == "segment_reduce_kernel"
    assert gpu.kernel_name("void at::native::reduce_kernel<512>()") == "sort and the rest"


def test_clocks_are_asked_for_while_the_device_works(monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import time; time.sleep(0.2); print('1980, 345.2')"
    monkeypatch.setattr(gpu, "_query_command", lambda *fields: python(code))
    steps: list[int] = []
    answer = gpu.query("clocks.sm", "power.draw", while_waiting=lambda: steps.append(1))
    assert answer == {"clocks.sm": "1980", "power.draw": "345.2"}
    assert len(steps) > 1
    monkeypatch.setattr(gpu, "_query_command", lambda *fields: python("raise SystemExit(2)"))
    assert gpu.query("clocks.sm") == {}
    monkeypatch.setattr(gpu, "_query_command", lambda *fields: ["no-such-program"])
    assert gpu.query("clocks.sm") == {}


def test_without_a_gpu_it_says_so_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main([TINY, "eager", "--out", str(tmp_path / "eager.json")]) == 2
    captured = capsys.readouterr()
    assert captured.err == "benchmarks.gpu needs a CUDA GPU, but torch finds none\n"
    assert not captured.out
    assert not list(tmp_path.iterdir())


# ---- the proof: processes


def test_run_limited_says_how_a_process_ended(tmp_path: Path) -> None:
    def run(code: str) -> gpu_proof.Ending:
        return gpu_proof.run_limited(python(code), 30, tmp_path / "log", {"WORD": "in"})

    ending = run("import os; print(os.environ['WORD'], flush=True); os.system('echo out')")
    assert (ending.status, ending.output) == (0, "in\nout\n")
    assert run("raise SystemExit(7)").status == 7
    assert str(run("import os; os.abort()")) == "SIGABRT"
    assert "in\nout" in (tmp_path / "log").read_text()


def test_run_limited_kills_the_whole_group(tmp_path: Path) -> None:
    """A child of a process that hangs is killed with it."""
    code = "import subprocess as s, sys; p = s.Popen(['sleep', '60']); print(p.pid); p.wait()"
    begin = time.monotonic()
    ending = gpu_proof.run_limited(python(code), 1.0, tmp_path / "log")
    assert ending.status is None
    assert time.monotonic() - begin < 20
    child = int(ending.output)
    for _ in range(100):  # until init has waited for it
        try:
            os.kill(child, 0)
        except ProcessLookupError:
            return
        state = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0]
        if state == "Z":
            return
        time.sleep(0.05)
    pytest.fail("the child lives")


# ---- the proof: parsing of output


def ending(output: str, status: int | None = 0) -> gpu_proof.Ending:
    return gpu_proof.Ending(status, 1.0, output)


def test_results_of_tests() -> None:
    done = "t/a.py::test_x[cuda-(2, 3) y] PASSED [ 50%]\nt/a.py::test_z FAILED [100%]\n"
    entry = gpu_proof.of_tests(ending(done, 1))
    assert entry == {
        "outcome": "failed",
        "counts": {"passed": 1, "failed": 1},
        "failures": ["t/a.py::test_z"],
    }
    assert gpu_proof.of_tests(ending("t/a.py::test_x PASSED"))["outcome"] == "passed"
    assert gpu_proof.of_tests(ending("t/a.py::test_x SKIPPED (no GPU)"))["outcome"] == "skipped"
    for status, word in ((None, "limit of 1 s"), (-signal.SIGSEGV, "SIGSEGV")):
        entry = gpu_proof.of_tests(ending("t/a.py::test_x PASSED [ 1%]\nt/a.py::test_z", status))
        assert entry["outcome"] == "failed"
        assert entry["detail"].startswith(f"{word}, in t/a.py::test_z\n")
        assert entry["counts"] == {"passed": 1}


def test_results_of_several_processes() -> None:
    """pytest -n."""
    done = """t/a.py::test_x[(2, 3) y]
[gw1] [ 25%] PASSED t/a.py::test_x[(2, 3) y]
[gw0] [ 50%] FAILED t/b.py::test_y
[gw1] [ 75%] SKIPPED t/c.py::test_z
"""
    entry = gpu_proof.of_tests(ending(done, None))
    assert entry["counts"] == {"passed": 1, "failed": 1, "skipped": 1}
    assert (entry["outcome"], entry["failures"]) == ("failed", ["t/b.py::test_y"])
    assert entry["detail"].startswith("limit of 1 s, in [gw1]")


def test_a_file_that_cannot_be_imported_has_failed() -> None:
    entry = gpu_proof.of_tests(ending("t/a.py::test_x PASSED\nERROR t/b.py - ImportError", 1))
    assert entry["outcome"] == "failed"
    assert entry["detail"].endswith("ERROR t/b.py - ImportError")


REPORT = """t/a.py::test_x ========= Invalid __global__ read of size 4 bytes
=========     at void hstree::<unnamed>::path_log_prob_kernel<float, (bool)1>(Tables)+0x150
=========     by thread (0,0,0) in block (0,0,0)
========= Invalid __global__ read of size 4 bytes
=========     at void at::native::vectorized_kernel<(int)4>(int)+0x10
PASSED [100%]
========= ERROR SUMMARY: 2 errors
"""


def test_results_of_the_sanitizer() -> None:
    clean = "t/a.py::test_x PASSED [100%]\n"
    for summary in (
        "========= ERROR SUMMARY: 0 errors",
        "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)",
    ):
        assert gpu_proof.of_sanitizer(ending(clean + summary))["outcome"] == "clean"
        assert gpu_proof.of_sanitizer(ending(clean + summary, 1))["outcome"] == "failed"
    entry = gpu_proof.of_sanitizer(ending(REPORT))
    assert entry["outcome"] == "errors"
    assert entry["kernels"] == {
        "hstree path_log_prob_kernel": 1,
        "void at::native::vectorized_kernel<(int)4>(int)": 1,
    }
    assert entry["detail"].startswith("2 errors, 1 reported places in kernels of hstree")
    entry = gpu_proof.of_sanitizer(ending(REPORT.replace("hstree::", "other::")))
    assert entry["outcome"] == "errors elsewhere"
    entry = gpu_proof.of_sanitizer(ending("========= ERROR SUMMARY: 3 errors"))
    assert entry["outcome"] == "errors"
    entry = gpu_proof.of_sanitizer(ending(clean, None))
    assert entry["outcome"] == "failed"
    assert entry["detail"].startswith("limit of 1 s, without a summary")


def test_figures_of_a_contestant_survive_its_end(tmp_path: Path) -> None:
    file = tmp_path / "one.json"
    assert gpu_proof.of_contestant(ending("Killed", -signal.SIGKILL), file) == {
        "outcome": "crashed",
        "detail": "SIGKILL\nKilled",
    }
    figures = {"outcome": "unfinished", "doing": "profiling", "seconds": {"both": [1.0]}}
    file.write_text(json.dumps(figures))
    entry = gpu_proof.of_contestant(ending("", None), file)
    assert entry["outcome"] == "timed out"
    assert entry["detail"].startswith("limit of 1 s, while profiling")
    assert entry["seconds"] == {"both": [1.0]}
    file.write_text(json.dumps(figures | {"outcome": "measured"}))
    assert gpu_proof.of_contestant(ending(""), file)["outcome"] == "measured"


# ---- the proof: calls


def proof(out: Path, *arguments: str) -> int:
    return gpu_proof.main(["--out", str(out), "--device", "cpu", *arguments])


def entries(out: Path) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((out / "results.json").read_text())["entries"]
    return read


@pytest.mark.slow
def test_a_second_call_has_nothing_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = "random-4,eager"
    assert proof(tmp_path, "--stage", "benchmarks,report", "--contestants", names) == 0
    first = entries(tmp_path)
    assert {entry["outcome"] for entry in first.values()} == {"measured"}
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "benchmarks.log",
        "report.md",
        "results.json",
    ]
    report = (tmp_path / "report.md").read_text()
    assert "| balanced trees, S = D/4 | backward |" in report
    assert "measured" in capsys.readouterr().out

    monkeypatch.setattr(gpu_proof, "run_limited", None)
    assert proof(tmp_path, "--stage", "benchmarks", "--contestants", names) == 0
    assert entries(tmp_path) == first


@pytest.mark.slow
def test_decoding(tmp_path: Path) -> None:
    """On a CPU, in seconds; a second call has nothing to do."""
    assert proof(tmp_path, "--stage", "decoding,report") == 0
    entry = entries(tmp_path)["decoding"]
    assert entry["outcome"] == "measured"
    assert entry["counts"]["passed"] >= 1
    report = (tmp_path / "report.md").read_text()
    assert "## Decoding" in report
    assert "default): a draw |" in report
    assert proof(tmp_path, "--stage", "decoding") == 0
    assert entries(tmp_path)["decoding"] == entry


MEASURED = """import json, os, sys, time
print("begun")
time.sleep({sleep})
if {crash}: os.abort()
open({file!r}, "w").write(json.dumps({{"outcome": "measured", "seconds": {{"both": [1.0]}}}}))
"""


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Contestants that measure nothing and whose names are recorded; `slow` takes a minute, `crash`
    ends with a signal."""
    started: list[str] = []
    run_limited = gpu_proof.run_limited

    def run(command: list[str], *arguments: Any) -> gpu_proof.Ending:
        name = command[command.index("benchmarks.gpu") + 2]
        started.append(name)
        sleep = 60 if name == "slow" else 0
        code = MEASURED.format(sleep=sleep, crash=name == "crash", file=command[-1])
        return run_limited(python(code), *arguments)

    kinds = {"peer": "flat", "one": "paths", "slow": "paths", "two": "paths", "crash": "paths"}
    monkeypatch.setattr(gpu_proof, "CONTESTANTS", {n: Entry(n, kind) for n, kind in kinds.items()})
    monkeypatch.setattr(gpu_proof, "run_limited", run)
    return started


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_what_was_measured(
    how: signal.Signals, tmp_path: Path, quick: list[str]
) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    begin = time.monotonic()

    def interrupt() -> None:
        log = tmp_path / "benchmarks.log"
        while "slow" not in quick or log.read_text().count("begun\n") < len(quick):
            time.sleep(0.02)
        time.sleep(0.2)
        os.kill(os.getpid(), how)

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        assert proof(tmp_path, "--stage", "benchmarks") == 130
    finally:
        thread.join()
        signal.signal(signal.SIGINT, before)
    assert time.monotonic() - begin < 30
    assert set(entries(tmp_path)) == {"benchmarks/tiny/one"}


@pytest.mark.slow
def test_the_limit_of_a_call_ends_it_and_the_next_goes_on(
    tmp_path: Path, quick: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_proof, "LEAST_SECONDS", 0.1)
    assert proof(tmp_path, "--stage", "benchmarks", "--minutes", "0.05") == 3
    assert set(entries(tmp_path)) == {"benchmarks/tiny/one"}
    assert quick == ["one", "slow"]  # ours first
    quick.clear()
    assert proof(tmp_path, "--stage", "benchmarks", "--limit", "2") == 1  # `slow` is ours
    assert quick == ["slow", "two", "crash", "peer"]
    found = {name.rpartition("/")[2]: entry for name, entry in entries(tmp_path).items()}
    assert {name: entry["outcome"] for name, entry in found.items()} == {
        "one": "measured", "slow": "timed out", "two": "measured", "crash": "crashed",
        "peer": "measured",
    }  # fmt: skip
    assert found["slow"]["detail"].startswith("limit of 2 s")
    assert found["crash"]["detail"].startswith("SIGABRT")


def test_other_sources_and_wishes_are_measured_again(
    tmp_path: Path, quick: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("--stage", "benchmarks", "--contestants", "one,peer")
    assert proof(tmp_path, *names) == 0
    quick.clear()
    assert proof(tmp_path, *names, "--again", "benchmarks/*/peer") == 0
    assert quick == ["peer"]
    quick.clear()
    monkeypatch.setattr(gpu_proof, "digest", lambda *patterns: "other")
    assert proof(tmp_path, *names) == 0
    assert quick == ["one"]  # the baselines have not changed


def test_a_folder_belongs_to_one_device(tmp_path: Path, quick: list[str]) -> None:
    assert proof(tmp_path, "--stage", "report") == 0
    results = json.loads((tmp_path / "results.json").read_text())
    results["device"]["name"] = "NVIDIA H100"
    (tmp_path / "results.json").write_text(json.dumps(results))
    with pytest.raises(SystemExit, match="has results of NVIDIA H100, but this device is cpu"):
        proof(tmp_path, "--stage", "report")


def test_sanitized_tests_are_spread_over_all() -> None:
    dtypes = ("float32", "float64", "bfloat16", "float16")
    items = [f"{case}-{dtype}" for case in range(33) for dtype in dtypes]
    chosen = gpu_proof.spread_over(items, 8)
    assert (len(chosen), chosen[0], chosen[-1]) == (8, items[0], items[-1])
    assert len({name.partition("-")[2] for name in chosen}) > 2
    assert gpu_proof.spread_over(items[:3], 8) == items[:3]


TESTS = """import pytest
@pytest.mark.cuda
@pytest.mark.parametrize("case", ["a b", "c"])
def test_equals_reference(case):
    pytest.skip("no GPU")
@pytest.mark.cuda
def test_other():
    pass
def test_without_cuda():
    raise AssertionError
"""
STUB = """#!/bin/sh
while [ "$1" != -- ]; do case "$1" in --*) shift 2;; *) break;; esac; done
"$@"
status=$?
echo "$PYTORCH_NO_CUDA_MEMORY_CACHING ========= ERROR SUMMARY: 0 errors"
exit $status
"""


def test_tests_and_sanitizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test file without torch, and a program in place of compute-sanitizer."""
    folder, out = tmp_path / "checkout", tmp_path / "out"
    folder.mkdir()
    (folder / "test_it.py").write_text(TESTS)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n    cuda: needs a GPU\n")
    stub = tmp_path / "stub"
    stub.write_text(STUB)
    stub.chmod(0o755)
    monkeypatch.setattr(gpu_proof, "ROOT", folder)
    monkeypatch.setattr(gpu_proof, "TOOLS", ("memcheck",))
    arguments = ("--stage", "tests,sanitizer", "--tests", "test_it.py", "--sanitizer", str(stub))
    assert proof(out, *arguments) == 0
    found = entries(out)
    assert found["tests"]["counts"] == {"skipped": 2, "passed": 1}
    assert found["tests"]["outcome"] == "passed"
    assert found["sanitizer/memcheck"]["outcome"] == "skipped"
    assert found["sanitizer/memcheck"]["counts"] == {"skipped": 2}
    assert "1 ========= ERROR SUMMARY" in (out / "memcheck.log").read_text()
    assert proof(out, "--stage", "sanitizer", "--sanitizer", "no-such-program") == 0
    assert entries(out)["sanitizer"]["detail"].startswith("no-such-program not found")


def test_build_is_for_the_device_and_left_out_where_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, Any]] = []
    answers: list[gpu_proof.Ending] = []

    def run(
        command: list[str], seconds: float, log: Path, environment: Any, *_: Any
    ) -> gpu_proof.Ending:
        calls.append(("pip" if "pip" in command else "probe", environment))
        return answers.pop(0)

    device = {"name": "H100", "capability": "9.0", "torch": "2.11.0", "cuda": "13.0"}
    monkeypatch.setattr(gpu_proof, "probe", lambda device_type: device)
    monkeypatch.setattr(gpu_proof, "run_limited", run)
    cuda = ("--device", "cuda", "--stage", "build")
    wish = {"HSTREE_CUDA": "1", "TORCH_CUDA_ARCH_LIST": "9.0"}

    answers[:] = [ending("x.cu(3): error: no\nhint: above", 1)]
    assert proof(tmp_path, *cuda) == 1
    assert calls == [("pip", wish)]
    said = entries(tmp_path)["build"]["detail"]
    assert said.startswith("exit status 1\nx.cu(3): error: no\n")

    for answer, expected in (("one", ["pip", "probe"]), ("one", ["probe"])):
        calls.clear()
        answers[:] = [ending(f"log\n{answer}") for _ in expected]
        assert proof(tmp_path, *cuda) == 0
        assert [name for name, _ in calls] == expected
    calls.clear()
    answers[:] = [ending("no module", 1), ending("log"), ending("two")]  # another machine
    assert proof(tmp_path, *cuda) == 0
    assert entries(tmp_path)["build"]["detail"] == "two"

    results = json.loads((tmp_path / "results.json").read_text())
    skipped = {"outcome": "skipped", "sources": "", "seconds_taken": 1.0}
    results["entries"]["tests"] = skipped
    (tmp_path / "results.json").write_text(json.dumps(results))
    assert proof(tmp_path, "--device", "cuda", "--stage", "report") == 1  # not on a GPU


def test_it_starts_before_hstree_is_built(tmp_path: Path) -> None:
    code = "import sys; sys.modules['hstree'] = None; import benchmarks.gpu_proof"
    ended = gpu_proof.run_limited(python(code), 60, tmp_path / "log")
    assert (ended.status, ended.output) == (0, "")


def test_requirements_name_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    versions = {"torch": "2.11.0+cu130", "setuptools": "70.1"}
    monkeypatch.setattr(gpu_proof, "version_of", versions.get)
    assert proof(tmp_path / "none", "--check") == 0
    assert not (tmp_path / "none").exists()
    lines = capsys.readouterr().out.splitlines()
    assert "found    torch 2.11.0+cu130" in lines
    assert "too old  setuptools 70.1: setuptools 77.0.3 or newer (build)" in lines
    assert "missing  quack-kernels (benchmarks)" in lines


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--stage", "build,bench"], "--stage: expected some of build,tests,"),
        (["--settings", "huge"], "--settings: expected some of 4096x128k,"),
        (["--minutes", "0"], "--minutes: expected a number greater than 0, got '0'"),
    ],
)
def test_bad_options_are_named(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pytest.raises(SystemExit):
        proof(tmp_path, *arguments)
    assert message in capsys.readouterr().err


# ---- the report


def figures(name: str, both: list[float], **more: Any) -> dict[str, Any]:
    return {
        "title": CONTESTANTS[name].title,
        "outcome": "measured",
        "sources": "s",
        "seconds_taken": 1.0,
        "seconds": {"forward": both, "backward": both, "both": both},
        "reference": [{"copy_bytes_per_second": 4000.0, "product_flops": 1e12}] * 2,
        **more,
    }


def test_tables_from_figures() -> None:
    moved = {"compulsory": {"forward": 300, "backward": 700}}
    there = {
        "huffman-4": figures("huffman-4", [1.0, 0.5, 2.0], traffic=moved, peak_bytes=40),
        "random-4": {"title": "balanced trees", "outcome": "crashed", "detail": "SIGSEGV",
                     "sources": "s", "seconds_taken": 1.0},
        "eager": figures("eager", [30.0, 50.0, 40.0], peak_bytes=1000),
        "compiled": figures("compiled", [20.0]),
    }  # fmt: skip
    slow = {"copy_bytes_per_second": 3000.0, "product_flops": 1e12}
    there["compiled"]["reference"] = [slow, slow]
    results = {
        "device": {"name": "NVIDIA H200", "torch": "2.11.0", "cuda": "13.0"},
        "calls": [{"date": "2026-11-22 10:00"}],
        "entries": {f"benchmarks/4096x128k/{name}": entry for name, entry in there.items()},
    }
    text = gpu_report.page(results)
    assert "| balanced trees: crashed, SIGSEGV |" in text
    assert "| 1,000.000 ± 375.000 | 0 | 40.00 | 20.00 |" in text
    assert "more than 5% off: compiled." in text
    assert "| forward | 1,000.000 | 0 | 0 | 13.33 |" in text


RECORD = gpu_proof.ROOT / "benchmarks" / "results" / "gpu.json"


def test_page_is_the_report_of_the_record() -> None:
    assert RECORD.with_suffix(".md").read_text() == gpu_report.page(json.loads(RECORD.read_text()))


def test_documentation_quotes_the_record() -> None:
    """The table of docs/gpu.md: times relative to the first row, and extra memory in GiB."""
    results = json.loads(RECORD.read_text())
    page = (gpu_proof.ROOT / "docs" / "gpu.md").read_text()
    rows = re.findall(
        r"^\| ([^|]*[^-| ][^|]*) \|(.*)\|$", page.partition("## One command")[0], re.M
    )
    names = ("eager", "compiled", "liger", "cut", "softmax", "forest", "plif", "sampled")
    names += ("forest-sampled", "adaptive", "leaves", "leaves-dense", "wide-binary", "huffman-4")
    settings = ("4096x128k", "2304x256k", "768x50k")
    heads, *rows = [row for row in rows if row[0] != "---"]
    assert [cell.strip() for cell in heads[1].split("|")] == [
        f"N = {s.rows:,}, D = {s.features:,}, V = {s.classes:,}"
        for s in map(SETTINGS.get, settings)
    ]
    assert len(rows) == len(names)
    for name, (_, cells) in zip(names, rows, strict=True):
        for setting, cell in zip(settings, cells.split("|"), strict=True):
            there = gpu_report.of_setting(results, setting)
            if name not in there:
                assert cell.strip() == "not measured"
                continue
            time, memory = re.findall(r"[\d.]+", cell)
            both, eager = gpu_report.middle(there[name]), gpu_report.middle(there["eager"])
            unit = 10.0 ** -len(time.partition(".")[2])
            assert float(time) == pytest.approx(both / eager, abs=unit * 0.51)
            assert float(memory) == pytest.approx(there[name]["peak_bytes"] / 2**30, abs=0.051)
