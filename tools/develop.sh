#!/usr/bin/env bash
# Sets up a checkout for work on the code: bash tools/develop.sh
# Makes the virtual environment .venv, unless one is active, with torch, hstree in editable mode, the packages of the
# tests and of the documentation, and the linters as a git hook.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [ -z "${VIRTUAL_ENV:-}" ]; then
  [ -d .venv ] || python3 -m venv .venv
  . .venv/bin/activate
fi
python -c 'import torch' 2> /dev/null || pip install torch==2.13.0
pip install -r tools/requirements.txt
pip install --no-build-isolation -e '.[dev,docs]'
pre-commit install
echo "Ready: . ${VIRTUAL_ENV}/bin/activate, then pytest"
