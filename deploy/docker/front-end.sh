#!/usr/bin/env bash
# A front end on a running Ray cluster: a Ray node without CPUs and GPUs, and `kvshelf serve` on it. When one of the two
# ends, this script ends too, so that its supervisor restarts both. Arguments go to `kvshelf serve`.
#
#   RAY_HEAD          host:6379 of the cluster's head
#   RAY_AUTH_MODE, RAY_AUTH_TOKEN, KVSHELF_...
set -euo pipefail
: "${RAY_HEAD:?set it to the address of the head of the Ray cluster, such as ray-head:6379}"

# Only a machine that is a Ray node itself can make Ray calls. The service waits until the node is up.
ray start --address="$RAY_HEAD" --num-cpus=0 --num-gpus=0 --disable-usage-stats --block &
node=$!
kvshelf serve --address "$RAY_HEAD" "$@" &
service=$!
trap 'kill -TERM "$service"' TERM INT
trap 'kill -HUP "$service"' HUP

# A signal also ends `wait`, so wait again while both processes run.
while kill -0 "$node" 2>/dev/null && kill -0 "$service" 2>/dev/null; do
  wait -n "$node" "$service" || true
done
kill -TERM "$service" 2>/dev/null || true
code=0
wait "$service" || code=$?
kill -TERM "$node" 2>/dev/null || true
wait "$node" || true
exit "$code"
