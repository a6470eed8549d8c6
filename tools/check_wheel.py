"""Checks that hstree works on a machine without a compiler, from the import to a trained model.

    python tools/check_wheel.py WHEEL [--torch torch==2.13.0]
    python tools/check_wheel.py

With a WHEEL: installs it and torch into a new virtual environment and checks it there. Without:
checks the hstree that this Python imports. PATH holds only the programs of the environment.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from importlib import metadata
from pathlib import Path

COMPILERS = ("cc", "c++", "gcc", "g++", "clang", "clang++", "nvcc")
STEPS = 20
"""Steps of training by the library."""


def check_wheel(wheel: Path, torch: str) -> None:
    """Installs `wheel` and `torch` into a new virtual environment and runs this script there."""
    with tempfile.TemporaryDirectory(prefix="hstree-wheel-") as name:
        folder = Path(name)
        venv.create(folder / "venv", with_pip=True)
        python = str(folder / "venv" / "bin" / "python")
        environment = {key: os.environ[key] for key in os.environ if key != "PYTHONPATH"}
        environment["PATH"] = str(Path(python).parent)
        install = [python, "-m", "pip", "install", "--quiet", "--only-binary", ":all:"]
        subprocess.run([*install, torch, str(wheel.resolve())], env=environment, check=True)
        subprocess.run([python, __file__], cwd=folder, env=environment, check=True)


def check_installed() -> None:
    """Checks the hstree that this Python imports; raises AssertionError where it does not work."""
    programs = Path(sys.executable).parent
    os.environ["PATH"] = str(programs)
    found = [name for name in COMPILERS if shutil.which(name)]
    assert not found, f"expected no compiler on PATH, got {found}"

    import torch

    import hstree

    assert hstree.__version__ == metadata.version("hstree"), hstree.__version__
    assert isinstance(torch.ops.hstree.forward, torch._ops.OpOverloadPacket)

    torch.manual_seed(0)
    head = hstree.TreeEnsemble.from_counts(16, torch.arange(100, 0, -1))
    optimizer = hstree.optim.AdamW(head.parameters(), lr=0.1)
    hidden, target = torch.randn(32, 16), torch.randint(100, (32,))
    losses = []
    for _ in range(STEPS):
        loss = head(hidden, target).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0], losses
    print(f"hstree from {Path(hstree.__file__).parent}: loss {losses[0]:.2f} -> {losses[-1]:.2f}")

    with tempfile.TemporaryDirectory(prefix="hstree-run-") as name:
        text = Path(name, "text.txt")
        text.write_text("\n".join(f"the {i % 7} cats saw {i % 5} dogs" for i in range(3000)))
        run = Path(name, "run")
        for arguments in (
            ["--version"],
            ["train", "--data", text, "--run", run, "--epochs", "1", "--head", "trees"],
            ["generate", run, "--prompt", "the", "--words", "5"],
        ):
            subprocess.run([programs / "hstree", *arguments], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("wheel", nargs="?", type=Path, metavar="WHEEL")
    parser.add_argument("--torch", default="torch", metavar="REQUIREMENT")
    arguments = parser.parse_args()
    if arguments.wheel is None:
        check_installed()
    else:
        check_wheel(arguments.wheel, arguments.torch)


if __name__ == "__main__":
    main()
