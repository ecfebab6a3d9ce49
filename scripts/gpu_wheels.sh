#!/usr/bin/env bash
# Download into FOLDER the wheels that `scripts/gpu.py` needs beside torch, Triton, transformers and pytest, for Python 3.12 on
# Linux x86_64: gpu.py unpacks them by itself, on a machine without a network. FOLDER is `.gpu-wheels` unless given.
set -euo pipefail
folder=$(realpath -m "${1:-$(dirname "${BASH_SOURCE[0]}")/../.gpu-wheels}")
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=$(command -v .venv/bin/python || command -v python3)

MOST_MB=45
ALONE=(blake3 constriction msgpack zstandard)  # numpy, which constriction needs, comes with transformers
WITH_NEEDS=(cryptography pydantic)              # pydantic's core has to be of the very version that it asks for

rm -f "$folder"/*.whl
mkdir -p "$folder"
download() {
  "$python" -m pip download --quiet --disable-pip-version-check --dest "$folder" --constraint constraints.txt \
    --only-binary=:all: --implementation cp --python-version 3.12 \
    --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 "$@"
}
download --no-deps "${ALONE[@]}"
download "${WITH_NEEDS[@]}"

du --bytes "$folder"/*.whl | awk -v most="$MOST_MB" '
  { name = $2; sub(/.*\//, "", name); printf "%7.2f MB  %s\n", $1 / 1e6, name; total += $1 }
  END { printf "%7.2f MB  together, of at most %d\n", total / 1e6, most; exit total > most * 1e6 }'
