"""PEP 517 build backend: setuptools, with extensions compiled against the installed torch.

Build isolation hides the environment that the package is installed into, and torch as a build
requirement would be downloaded again, possibly for another CUDA version. Therefore this backend
searches the site-packages of the interpreter that runs it, which an isolated build by pip shares
with the environment, and appends the folder of torch to sys.path. Torch is a build requirement only
if the environment has none.

Build front ends that create their own virtual environment (``python -m build``, uv) hide these
site-packages too. Name the site-packages folder with the torch to use in HSTREE_TORCH_PATH.
"""

from __future__ import annotations

import os
import re
import shutil
import site
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import setuptools
from setuptools import build_meta

MINIMUM_SETUPTOOLS = (77, 0, 3)  # the first that accepts the license in pyproject.toml
MINIMUM_TORCH = (2, 11)
TORCH_REQUIREMENT = "torch>=" + ".".join(map(str, MINIMUM_TORCH))
PATH_VARIABLE = "HSTREE_TORCH_PATH"

ConfigSettings = Mapping[str, Any] | None


def environment_folders() -> Iterator[Path]:
    """Yields the package folders of the interpreter, whether or not they are on sys.path."""
    yield from (Path(folder or ".") for folder in sys.path)
    paths = sysconfig.get_paths()
    yield Path(paths["platlib"])
    yield Path(paths["purelib"])
    yield from map(Path, site.getsitepackages())
    if sys.prefix == sys.base_prefix:  # virtual environments ignore the packages of the user
        yield Path(site.getusersitepackages())


def torch_version(folder: Path) -> str | None:
    """Returns the version of the torch in `folder`, without importing it, or None."""
    try:
        text = (folder / "torch" / "version.py").read_text(encoding="utf-8")
    except OSError:
        return None
    match = re.search(r"""^__version__\s*=\s*['"]([^'"]+)['"]""", text, re.MULTILINE)
    return match.group(1) if match else None


def find_torch() -> Path | None:
    """Returns the folder of the torch in the environment, or None if there is none.

    Raises:
        SystemExit: torch is too old, or HSTREE_TORCH_PATH names a folder without torch.
    """
    named = os.environ.get(PATH_VARIABLE)
    for folder in [Path(named)] if named else environment_folders():
        version = torch_version(folder)
        if version is None:
            continue
        match = re.match(r"(\d+)\.(\d+)", version)
        if match is None or (int(match[1]), int(match[2])) < MINIMUM_TORCH:
            raise SystemExit(
                "\nhstree cannot be built: torch is too old.\n"
                f"  found:    torch {version} in {folder}\n"
                f"  expected: {TORCH_REQUIREMENT}\n"
                f"  fix:      pip install --upgrade '{TORCH_REQUIREMENT}', then build again\n"
            )
        return folder
    if named:
        raise SystemExit(
            f"\nhstree cannot be built: {PATH_VARIABLE} names a folder without torch.\n"
            f"  found:    no file {Path(named, 'torch', 'version.py')}\n"
            "  expected: the site-packages folder of an environment with torch\n"
            f"  fix:      export {PATH_VARIABLE}=$(python -c "
            "'import pathlib, torch; print(pathlib.Path(torch.__file__).parents[1])')\n"
        )
    return None


def check_setuptools() -> None:
    """Raises SystemExit if a build without isolation finds a setuptools that is too old."""
    version = setuptools.__version__
    match = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", version)
    if match is None or tuple(int(part or 0) for part in match.groups()) < MINIMUM_SETUPTOOLS:
        minimum = ".".join(map(str, MINIMUM_SETUPTOOLS))
        raise SystemExit(
            "\nhstree cannot be built: setuptools is too old.\n"
            f"  found:    setuptools {version} in {Path(setuptools.__file__).parent}\n"
            f"  expected: setuptools>={minimum}\n"
            f"  fix:      pip install 'setuptools>={minimum}' ninja 'pybind11>=3', "
            "or leave out --no-build-isolation\n"
        )


def reveal_torch() -> None:
    """Makes the torch of the environment importable; last on the path, so it shadows nothing."""
    folder = find_torch()
    if folder is not None and str(folder) not in sys.path:
        sys.path.append(str(folder))


def remove_last_build() -> None:
    """Removes the files of earlier builds: setuptools would package modules deleted since then."""
    for folder in Path("build").glob("lib*"):
        shutil.rmtree(folder)


def get_requires_for_build_wheel(config_settings: ConfigSettings = None) -> list[str]:
    return [] if find_torch() else [TORCH_REQUIREMENT]


def get_requires_for_build_editable(config_settings: ConfigSettings = None) -> list[str]:
    return get_requires_for_build_wheel(config_settings)


def get_requires_for_build_sdist(config_settings: ConfigSettings = None) -> list[str]:
    return []


def prepare_metadata_for_build_wheel(
    metadata_directory: str, config_settings: ConfigSettings = None
) -> str:
    check_setuptools()
    return build_meta.prepare_metadata_for_build_wheel(metadata_directory, config_settings)


def prepare_metadata_for_build_editable(
    metadata_directory: str, config_settings: ConfigSettings = None
) -> str:
    check_setuptools()
    return build_meta.prepare_metadata_for_build_editable(metadata_directory, config_settings)


def build_sdist(sdist_directory: str, config_settings: ConfigSettings = None) -> str:
    check_setuptools()
    return build_meta.build_sdist(sdist_directory, config_settings)


def build_wheel(
    wheel_directory: str,
    config_settings: ConfigSettings = None,
    metadata_directory: str | None = None,
) -> str:
    check_setuptools()
    reveal_torch()
    remove_last_build()
    return build_meta.build_wheel(wheel_directory, config_settings, metadata_directory)


def build_editable(
    wheel_directory: str,
    config_settings: ConfigSettings = None,
    metadata_directory: str | None = None,
) -> str:
    check_setuptools()
    reveal_torch()
    return build_meta.build_editable(wheel_directory, config_settings, metadata_directory)
