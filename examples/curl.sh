#!/usr/bin/env bash
# The whole API with nothing but curl: put, list, ask, stream, upload a file, delete.
# The service is the one at KVSHELF_URL, or http://127.0.0.1:8765; KVSHELF_API_KEY is sent if it is set.
set -euo pipefail

url=${KVSHELF_URL:-http://127.0.0.1:8765}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

call() { # method, path, further options of curl; an error of the service ends this script
  curl --fail-with-body --silent --show-error --request "$1" "$url$2" \
    --header "authorization: Bearer ${KVSHELF_API_KEY:-none}" "${@:3}"
}
json() { call "$1" "$2" --header 'content-type: application/json' --data "$3"; }
field() { python3 -c 'import json, sys; print(json.load(sys.stdin)[sys.argv[1]])' "$1"; }

echo "== put"
document='The harbour opens at six. The access code of the amber falcon is 482913. Boats wait at the lock.'
id=$(json POST /v1/caches "{\"document\": \"$document\", \"policy\": \"full\", \"labels\": {\"from\": \"curl\"}}" | field id)
echo "$id"

echo "== list"
call GET '/v1/caches?label.from=curl&limit=1' | field data

echo "== ask"
json POST "/v1/caches/$id/query" '{"prompt": "What is the access code of the amber falcon?", "max_tokens": 16}' | field text

echo "== stream"
json POST "/v1/caches/$id/query" \
  '{"prompt": "What is the access code of the amber falcon?", "max_tokens": 16, "stream": true}' --no-buffer

echo "== a file, in the background"
echo "$document" > "$folder/notice.txt"
request=$(call POST /v1/caches --header 'prefer: respond-async' \
  --form "file=@$folder/notice.txt;type=text/plain" --form policy=full | field id)
call GET "/v1/requests/$request?wait_s=60" | field state

echo "== delete"
call DELETE "/v1/caches/$id" | field deleted
