#!/usr/bin/env bash
# Test the C forms for ARM under qemu, on x86 with Debian's packages: each operation's own tests, with a Python and a torch for ARM,
# which are unpacked into `.arm` (1 GB) and not installed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD/.arm
export CC=aarch64-linux-gnu-gcc

# The newest torch whose wheel for ARM has no CUDA in it. What these need is named, because pip reads "on x86_64" in a
# requirement as of the machine it runs on, and would ask for CUDA.
WHEELS=(torch==2.10.0 filelock fsspec jinja2 markupsafe mpmath networkx sympy typing-extensions numpy
  pytest pytest-timeout iniconfig packaging pluggy pygments hypothesis sortedcontainers)
DEBIAN=(python3.11-minimal libpython3.11-stdlib libgomp1 libstdc++6)
OPERATIONS=(choose column_sums mean_cosines prefix_attention rotate row_norms rowwise select window_scores)
# constriction, which writes the streams of other tests, has no build for ARM under Linux.
STREAMS=tests/kernels/test_ans.py::test_streams_of_an_earlier_day_and_another_machine_are_read

if ! command -v qemu-aarch64 "$CC" > /dev/null; then
  echo "qemu and a compiler for ARM are needed: apt-get install qemu-user gcc-aarch64-linux-gnu libc6-dev-arm64-cross" >&2
  exit 1
fi

if [ ! -f "$root/.complete" ]; then
  mkdir -p "$root"/{state/lists/partial,cache/archives/partial,debian}
  touch "$root/status" # of no package: apt's own lists and those of this machine stay as they are
  apt=(apt-get -qq -o APT::Architecture=arm64 -o APT::Architectures::=arm64 -o Dir::State="$root/state"
    -o Dir::State::status="$root/status" -o Dir::Cache="$root/cache")
  "${apt[@]}" update
  "${apt[@]}" install --download-only --yes --no-install-recommends "${DEBIAN[@]}"
  for package in "$root"/cache/archives/*.deb; do dpkg -x "$package" "$root/debian"; done
  .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --target "$root/packages" --only-binary :all: \
    --python-version 3.11 --platform manylinux_2_28_aarch64 --platform manylinux_2_17_aarch64 \
    --platform manylinux2014_aarch64 "${WHEELS[@]}"
  touch "$root/.complete"
fi

# A copy: the library for ARM takes the place of those for x86.
rm -rf "$root/tree"
mkdir "$root/tree"
cp -r kvshelf kvshelf_bench tests pyproject.toml "$root/tree"
rm -f "$root"/tree/kvshelf/kernels/compiled-*
cd "$root/tree"
arm_python() {
  PYTHONPATH=$PWD:$root/packages qemu-aarch64 -L "$root/debian" "$root/debian/usr/bin/python3.11" "$@"
}
arm_python -m kvshelf.kernels.compiling
# One test compares seconds, which say nothing under an emulator and take hundreds: it is left out.
OMP_NUM_THREADS=1 arm_python -m pytest -q -p no:cacheprovider --confcutdir=tests/kernels -k "${1:-native and not triton and not ans.eager and not an_eighth_of_the_work}" \
  --hypothesis-profile=ci "$STREAMS" $(printf "tests/kernels/test_%s.py " "${OPERATIONS[@]}")
