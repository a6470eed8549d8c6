"""Devices, CUDA skips with a summary of their own, benchmarks only where they are asked for."""

from __future__ import annotations

import math
import os
import shutil
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # read when the Hub's package is imported: no test asks it
# Compiled steps of earlier runs: their key leaves out how an operator of ours is differentiated.
os.environ["TORCHINDUCTOR_AUTOGRAD_CACHE"] = "0"

import hypothesis
import pytest
import torch
from cuda_emu.library import EmulatedLibrary, compile_operators
from filelock import FileLock

import hstree
from hstree.lm import report

# The same examples in every run; no deadline, since machines are shared.
hypothesis.settings.register_profile("hstree", derandomize=True, deadline=None, max_examples=50)
hypothesis.settings.load_profile("hstree")

WORKER = "PYTEST_XDIST_WORKER" in os.environ  # one of the processes of pytest -n


def cuda_obstacle() -> str | None:
    """Returns why CUDA tests cannot run here, or None where they can."""
    if not torch.cuda.is_available():
        return "no GPU"
    if hstree.build_info().cuda is None:
        return "hstree was built for the CPU only"
    return None


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Each device that the operators run on."""
    return torch.device(request.param)


@pytest.fixture(scope="session")
def compiler() -> str:
    path = shutil.which("g++")
    if path is None:
        pytest.skip("g++ not found: the CUDA kernels cannot be emulated")
    return path


@pytest.fixture(scope="session")
def emulated(compiler: str, tmp_path_factory: pytest.TempPathFactory) -> EmulatedLibrary:
    """The operators of a CUDA build, compiled for the CPU once for all processes of pytest -n."""
    if hstree.build_info().cuda is not None:
        pytest.skip("hstree has its CUDA operators, which run on a GPU: pytest -m cuda")
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if WORKER else base) / "emulated"
    library = folder / "emulated.so"
    with FileLock(f"{folder}.lock"):
        if not library.exists():
            folder.mkdir(exist_ok=True)
            assert compile_operators(folder) == library
    return EmulatedLibrary(library)


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder: an empty one, and the user's cache is left alone."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("HSTREE_DEBUG", raising=False)
    return folder


@pytest.fixture(autouse=True, scope="session")
def tokens_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tokenised texts go to a folder of this run of the tests, not to the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HSTREE_CACHE", str(tmp_path_factory.mktemp("hstree-cache")))
        yield


@pytest.fixture(autouse=True, scope="session")
def no_lines_of_progress() -> Iterator[None]:
    """They appear after ten seconds, in the output of whatever takes so long on a busy machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "LINE_EVERY", math.inf)
        yield


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--ptb", metavar="FOLDER", help="train.txt, valid.txt, test.txt of Penn Treebank"
    )


def pytest_configure(config: pytest.Config) -> None:
    # A shell starts background jobs with SIGINT ignored; tests and their processes must receive it.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # pytest-xdist sets it, and readline does, unseen by os.environ; what is printed depends on it.
    os.environ.pop("COLUMNS", None)
    os.unsetenv("COLUMNS")
    if WORKER:
        torch.set_num_threads(1)  # threads of several processes would wait for each other
        os.environ["OMP_NUM_THREADS"] = "1"
    # Plain `pytest` collects benchmarks too but measures nothing; `pytest --benchmark-only` does.
    if hasattr(config.option, "benchmark_skip") and not config.option.benchmark_only:
        config.option.benchmark_skip = True


def pytest_report_header(config: pytest.Config) -> list[str]:
    built = hstree.build_info()
    cuda = f"CUDA {built.cuda} ({built.cuda_arch_list})" if built.cuda else "CPU only"
    header = [f"hstree: {built.version}, {cuda}, built with torch {built.torch}"]
    if config.args_source is pytest.Config.ArgsSource.TESTPATHS:
        header += [
            "time: on two cores about 5 minutes with -n 2",
            'everything: -n 2 -m "slow or not slow", about 25 minutes',
        ]
    return header


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    obstacle = cuda_obstacle()
    if obstacle is not None:
        for item in items:
            if item.get_closest_marker("cuda"):
                item.add_marker(pytest.mark.skip(reason=f"CUDA: {obstacle}"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = [
        report.nodeid
        for report in terminalreporter.stats.get("skipped", [])
        if "cuda" in report.keywords and "CUDA: " in str(report.longrepr)
    ]
    if not skipped:
        return
    terminalreporter.section(f"CUDA tests skipped: {len(skipped)} ({cuda_obstacle()})")
    for name, count in Counter(node.partition("[")[0] for node in skipped).items():
        terminalreporter.line(f"{name} x{count}" if count > 1 else name)
