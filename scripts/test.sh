#!/usr/bin/env bash
# `make test`: all tests that need no fault and no browser. Those without a service compute, those with one often wait,
# so both run at once. The first yield to the second, which measure times, and print their results at the end.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

computing=$(mktemp)
OMP_NUM_THREADS=1 nice -n 5 .venv/bin/python -m pytest -n 2 --dist loadfile -m "not service and not faults" > "$computing" 2>&1 &
pid=$!
trap 'kill $pid 2> /dev/null; rm -f "$computing"' EXIT

echo "The tests without a service run beside these; their results follow."
.venv/bin/python -m pytest --ignore=tests/page -m "service and not faults"
services=$?
wait $pid
units=$?
cat "$computing"
exit $((services || units))
