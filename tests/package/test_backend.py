"""The build backend and setup.py: which torch is used, CPU or CUDA, one message on failure."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from setuptools import build_meta

import hstree._extension

ROOT = Path(__file__).resolve().parents[2]
TORCH_FOLDER = Path(torch.__file__).parents[1]


def load(path: Path) -> ModuleType:
    """Imports a file that is on no package path; setup.py builds nothing unless it is run."""
    spec = importlib.util.spec_from_file_location(f"tested_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.delenv("HSTREE_TORCH_PATH", raising=False)
    return load(ROOT / "build_backend" / "hstree_backend.py")


@pytest.fixture
def setup(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    for variable in ("HSTREE_CUDA", "CUDA_HOME", "CUDA_PATH", "CXX", "TORCH_CUDA_ARCH_LIST"):
        monkeypatch.delenv(variable, raising=False)
    return load(ROOT / "setup.py")


def environment(folder: Path, version: str) -> Path:
    """Makes a site-packages folder with a torch of that version."""
    (folder / "torch").mkdir(parents=True)
    (folder / "torch" / "version.py").write_text(
        f"from typing import Optional\n__version__ = '{version}'\ncuda: Optional[str] = None\n"
    )
    return folder


# The backend


def test_torch_of_the_environment_is_no_requirement(
    backend: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = environment(tmp_path / "site", "2.13.0+cpu")
    monkeypatch.setattr(backend, "environment_folders", lambda: iter([tmp_path, site]))
    assert backend.find_torch() == site
    assert backend.get_requires_for_build_wheel() == []
    assert backend.get_requires_for_build_editable() == []


def test_without_torch_it_is_a_requirement_and_setup_is_not_run(
    backend: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "setup.py").write_text("raise AssertionError('setup.py was run')\n")
    monkeypatch.setattr(backend, "environment_folders", lambda: iter([tmp_path]))
    assert backend.get_requires_for_build_wheel() == ["torch>=2.11"]
    assert backend.get_requires_for_build_editable() == ["torch>=2.11"]
    assert backend.get_requires_for_build_sdist() == []


@pytest.mark.parametrize("version", ["2.10.0", "1.13.1+cu117", "2.9.0a0+git1234"])
def test_old_torch_is_refused(
    backend: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    site = environment(tmp_path, version)
    monkeypatch.setattr(backend, "environment_folders", lambda: iter([site]))
    with pytest.raises(SystemExit) as raised:
        backend.get_requires_for_build_wheel()
    message = str(raised.value)
    assert f"found:    torch {version} in {site}" in message
    assert "expected: torch>=2.11" in message
    assert "pip install --upgrade 'torch>=2.11'" in message


@pytest.mark.parametrize("version", ["2.11.0", "2.15.0a0+git1234", "3.0.0+cu140"])
def test_new_torch_is_accepted(
    backend: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    site = environment(tmp_path, version)
    monkeypatch.setattr(backend, "environment_folders", lambda: iter([site]))
    assert backend.find_torch() == site


def test_variable_names_the_torch(
    backend: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = environment(tmp_path / "named", "2.12.0")
    monkeypatch.setenv("HSTREE_TORCH_PATH", str(site))
    assert backend.find_torch() == site
    monkeypatch.setenv("HSTREE_TORCH_PATH", str(tmp_path))
    with pytest.raises(SystemExit, match="HSTREE_TORCH_PATH names a folder without torch"):
        backend.find_torch()


def test_torch_is_found_where_isolation_hides_it(tmp_path: Path) -> None:
    """Runs the backend as pip's isolated build does: site-packages removed by a sitecustomize."""
    folder = Path(build_meta.__file__).parents[1]
    for path in folder.iterdir():
        if path.name.startswith(("setuptools", "_distutils_hack", "pkg_resources")):
            (tmp_path / path.name).symlink_to(path)
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nsys.path[:] = [path for path in sys.path if not path.endswith('-packages')]\n"
    )
    code = (
        "import json, sys, hstree_backend as backend\n"
        "before = [path for path in sys.path if path.endswith('-packages')]\n"
        "requires = backend.get_requires_for_build_wheel()\n"
        "backend.reveal_torch()\n"
        "print(json.dumps([before, requires, sys.path[-1]]))\n"
    )
    variables = {key: value for key, value in os.environ.items() if key != "HSTREE_TORCH_PATH"}
    variables["PYTHONPATH"] = f"{tmp_path}{os.pathsep}{ROOT / 'build_backend'}"
    shown = subprocess.run(
        [sys.executable, "-c", code],
        env=variables,
        capture_output=True,
        text=True,
        check=True,
    )
    before, requires, last = json.loads(shown.stdout)
    assert before == []
    assert requires == []
    assert Path(last) == TORCH_FOLDER


@pytest.mark.parametrize("version", ["65.5.0", "77.0.2", "70"])
def test_old_setuptools_is_refused(
    backend: ModuleType, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    backend.check_setuptools()
    monkeypatch.setattr(backend.setuptools, "__version__", version)
    with pytest.raises(SystemExit, match=f"found:    setuptools {version} in"):
        backend.prepare_metadata_for_build_wheel("nowhere")


def test_last_build_is_removed(
    backend: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "build" / "lib.linux" / "hstree").mkdir(parents=True)
    (tmp_path / "build" / "temp.linux").mkdir()
    monkeypatch.chdir(tmp_path)
    backend.remove_last_build()
    assert [path.name for path in (tmp_path / "build").iterdir()] == ["temp.linux"]


def test_one_minimum_setuptools_everywhere(backend: ModuleType) -> None:
    requirement = "setuptools>=" + ".".join(map(str, backend.MINIMUM_SETUPTOOLS))
    for name in ("pyproject.toml", "setup.py", "tests/requirements.txt"):
        assert requirement in (ROOT / name).read_text(), name


def test_one_minimum_torch_everywhere(backend: ModuleType, setup: ModuleType) -> None:
    major, minor = setup.MINIMUM_TORCH
    assert {backend.MINIMUM_TORCH, hstree._extension.MINIMUM_TORCH} == {(major, minor)}
    assert int(setup.TORCH_TARGET_VERSION, 16) == (major << 56) | (minor << 48)
    project = (ROOT / "pyproject.toml").read_text()
    assert re.search(rf'^dependencies = \["torch>={major}\.{minor}"', project, re.MULTILINE)


# setup.py


def fake_torch(version: str = "2.13.0+cpu", cuda: str | None = None) -> SimpleNamespace:
    return SimpleNamespace(__version__=version, version=SimpleNamespace(cuda=cuda))


def fake_nvcc(home: Path, release: str) -> Path:
    """Makes a CUDA toolkit whose nvcc answers --version and --dryrun."""
    nvcc = home / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text(
        "#!/bin/sh\n"
        'case "$1" in\n'
        f"  --dryrun) echo '#$ _SPACE_= ' >&2; echo '#$ TOP={home}/bin/..' >&2;;\n"
        f"  *) echo 'Cuda compilation tools, release {release}, V{release}.88';;\n"
        "esac\n"
    )
    nvcc.chmod(0o755)
    return nvcc


@pytest.fixture
def no_nvcc(setup: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    monkeypatch.setattr(setup, "DEFAULT_CUDA_HOME", tmp_path / "none")


@pytest.fixture
def nvcc_13(no_nvcc: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An nvcc 13.0 that is on PATH only as a wrapper script in another folder."""
    home = tmp_path / "cuda-13.0"
    nvcc = fake_nvcc(home, "13.0")
    wrapper = tmp_path / "usr" / "bin" / "nvcc"
    wrapper.parent.mkdir(parents=True)
    wrapper.write_text(f'#!/bin/sh\nexec {nvcc} "$@"\n')
    wrapper.chmod(0o755)
    monkeypatch.setenv("PATH", f"{wrapper.parent}:/usr/bin:/bin")
    return home


@pytest.mark.usefixtures("nvcc_13")
@pytest.mark.parametrize("cuda", [None, "13.0"])
def test_cpu_on_request(
    setup: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    cuda: str | None,
) -> None:
    monkeypatch.setenv("HSTREE_CUDA", "0")
    assert setup.choose_cuda(fake_torch(cuda=cuda)) == "HSTREE_CUDA was 0"
    assert capsys.readouterr().out == "hstree: building for the CPU only: HSTREE_CUDA=0\n"


def test_cuda_follows_torch_and_compiler_through_a_wrapper(
    setup: ModuleType,
    nvcc_13: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: pytest.fail("asked for a GPU"))
    assert setup.choose_cuda(fake_torch("2.11.0+cu130", "13.0")) is None
    assert os.environ["CUDA_HOME"] == str(nvcc_13)
    architectures = "8.0;9.0;10.0;12.0+PTX"
    assert os.environ["TORCH_CUDA_ARCH_LIST"] == architectures
    assert capsys.readouterr().out == f"hstree: building with CUDA 13.0 for {architectures}\n"


def test_cuda_minor_versions_may_differ_and_architectures_be_set(
    setup: ModuleType, nvcc_13: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CUDA_HOME", str(nvcc_13))
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0")
    monkeypatch.setenv("HSTREE_CUDA", "1")
    assert setup.choose_cuda(fake_torch("2.15.0+cu132", "13.2")) is None
    assert os.environ["TORCH_CUDA_ARCH_LIST"] == "9.0"


@pytest.mark.usefixtures("nvcc_13")
def test_torch_without_cuda(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reason = "torch 2.13.0+cpu has no CUDA"
    assert setup.choose_cuda(fake_torch()) == reason
    assert capsys.readouterr().out == f"hstree: building for the CPU only: {reason}\n"

    monkeypatch.setenv("HSTREE_CUDA", "1")
    with pytest.raises(SystemExit) as raised:
        setup.choose_cuda(fake_torch())
    message = str(raised.value)
    assert f"found:    {reason}" in message
    assert "expected: a torch with CUDA" in message
    assert "fix:      install a CUDA build of torch, or build for the CPU: HSTREE_CUDA=0" in message


@pytest.mark.usefixtures("no_nvcc")
def test_no_nvcc(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reason = setup.choose_cuda(fake_torch("2.13.0+cu130", "13.0"))
    assert reason.startswith(
        "torch 2.13.0+cu130 has CUDA 13.0, but there was no nvcc on PATH or in "
    )
    assert capsys.readouterr().out == (
        f"hstree: building for the CPU only: {reason}\n"
        "hstree: for CUDA, install the CUDA 13.0 toolkit and set CUDA_HOME, then build again\n"
    )

    monkeypatch.setenv("HSTREE_CUDA", "1")
    with pytest.raises(SystemExit, match="no nvcc on PATH") as raised:
        setup.choose_cuda(fake_torch("2.13.0+cu130", "13.0"))
    assert "expected: nvcc of CUDA 13.0" in str(raised.value)


def test_cuda_home_without_nvcc(
    setup: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setenv("HSTREE_CUDA", "1")
    with pytest.raises(SystemExit, match=f"no nvcc in {tmp_path}"):
        setup.choose_cuda(fake_torch("2.13.0+cu130", "13.0"))


def test_nvcc_of_another_major_version(
    setup: ModuleType,
    nvcc_13: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    reason = setup.choose_cuda(fake_torch("2.11.0+cu126", "12.6"))
    assert reason == (f"torch 2.11.0+cu126 has CUDA 12.6, but nvcc in {nvcc_13} was of 13.0")
    assert reason in capsys.readouterr().out
    monkeypatch.setenv("HSTREE_CUDA", "1")
    with pytest.raises(SystemExit, match=r"expected: nvcc of CUDA 12\.x"):
        setup.choose_cuda(fake_torch("2.11.0+cu126", "12.6"))


def test_wrong_value_of_the_switch(setup: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HSTREE_CUDA", "yes")
    with pytest.raises(SystemExit, match="found:    HSTREE_CUDA=yes"):
        setup.choose_cuda(fake_torch())


def test_no_compiler(setup: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit) as raised:
        setup.check_compiler()
    message = str(raised.value)
    assert "there is no C++ compiler" in message
    assert "found:    no program 'c++' on PATH" in message
    assert "apt-get install g++" in message

    compiler = tmp_path / "broken"
    compiler.write_text("#!/bin/sh\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", "broken")
    with pytest.raises(SystemExit, match="the C\\+\\+ compiler does not run"):
        setup.check_compiler()


def test_old_torch_without_isolation(
    setup: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = ModuleType("torch")
    old.__version__ = "2.9.1"  # type: ignore[attr-defined]
    old.__file__ = str(tmp_path / "torch" / "__init__.py")
    monkeypatch.setitem(sys.modules, "torch", old)
    with pytest.raises(SystemExit, match=r"found:    torch 2\.9\.1 in"):
        setup.check_torch()


def test_metadata_and_sdist_need_no_torch(tmp_path: Path) -> None:
    """setup.py dist_info and sdist run where torch cannot be imported."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('no torch')\n")
    subprocess.run(
        [sys.executable, "setup.py", "-q", "dist_info", "--output-dir", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        check=True,
        capture_output=True,
    )
    (metadata,) = tmp_path.glob("hstree-*.dist-info/METADATA")
    text = metadata.read_text()
    assert "Requires-Dist: torch>=2.11\n" in text
    assert "Requires-Python: >=3.10\n" in text
    assert "Provides-Extra: test\n" in text
    assert (metadata.parent / "entry_points.txt").read_text() == (
        "[console_scripts]\nhstree = _hstree_command:main\n"
    )


def test_build_shows_files_with_the_time_left(
    setup: ModuleType, capfd: pytest.CaptureFixture[str]
) -> None:
    compile_ = "c++ -MMD -O3 -c -c /x/csrc/cpu/{0}.cpp -o /x/build/{0}.o -std=c++17"
    error = "/x/csrc/cpu/b.cpp:3:1: error: expected ';'"
    with setup.BuildProgress():
        subprocess.run(["echo", f"[1/3] {compile_.format('a')}"], check=True)
        subprocess.run(["echo", f"FAILED: /x/build/b.o\n{error}"], check=True)
        subprocess.run(["echo", f"[3/3] {compile_.format('c')}"], check=True)
    lines = capfd.readouterr().out.splitlines()
    assert re.fullmatch(r"\[1/3\] cpu/a\.cpp, about \d+ s left", lines[0])
    assert lines[1:] == ["FAILED: /x/build/b.o", error, "[3/3] cpu/c.cpp"]
    print("after")
    assert capfd.readouterr().out == "after\n"
