#!/usr/bin/env bash
# `make test` and `make test-slow`: the tests with the marks that the argument names, without faults and browsers. Tests
# without a service compute, and tests with a service often wait, so both run at once. Tests with a service measure times, so
# the others run at a lower priority.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# As in the Makefile: without bytecode every process compiles its sources anew, and pytest all tests, three times.
unset PYTHONDONTWRITEBYTECODE

tests="$1 and not faults and not real"
computing=$(mktemp)
OMP_NUM_THREADS=1 nice -n 5 .venv/bin/python -m pytest -n 2 --dist loadfile --durations=100 -m "$tests and not service" > "$computing" 2>&1 &
pid=$!
trap 'kill $pid 2> /dev/null; rm -f "$computing"' EXIT

echo "The tests without a service run at the same time. Their results are printed after these."
.venv/bin/python -m pytest --durations=60 --ignore=tests/page -m "$tests and service"
services=$?
wait $pid
units=$?
cat "$computing"
exit $((services || units))
