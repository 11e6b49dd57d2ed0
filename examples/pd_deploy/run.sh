#!/bin/sh
# Start prefill, decode and proxy on this machine, send one request, show the log lines that matter, end everything.
#
# Usage: run.sh MODEL_DIR      PYTHON names the interpreter (default python3), LOG_DIR keeps the logs.
set -eu

here=$(cd "$(dirname "$0")" && pwd)
model=${1:?usage: run.sh MODEL_DIR}
python=${PYTHON:-python3}
if [ -n "${LOG_DIR:-}" ]; then logs=$LOG_DIR; mkdir -p "$logs"; else logs=$(mktemp -d); fi

"$python" -m pdkv.launch --config "$here/pd.toml" --model "$model" --log-dir "$logs" >"$logs/urls" &
launcher=$!

# The launcher ends its engines on SIGTERM, and even when it is killed; `wait` lets it finish.
finish() {
    kill "$launcher" 2>/dev/null || true
    wait "$launcher" || true
    [ -n "${LOG_DIR:-}" ] || rm -rf "$logs"
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# The launcher prints the addresses once all three are ready, and ends by itself at its deadline.
until grep -q '^proxy ' "$logs/urls"; do
    kill -0 "$launcher" 2>/dev/null || { echo "the launcher has ended; its message is above" >&2; exit 1; }
    sleep 1
done
url=$(sed -n 's/^proxy //p' "$logs/urls")

echo "== answer, through $url"
"$python" "$here/ask.py" "$url" "Which city is the capital of France?"

echo "== the caches grew after warmup, each segment in one chunk, and the connectors were created afterwards"
grep -h -o 'pdkv: .*' "$logs/prefill.log" | sed 's/^/prefill  /'
grep -h -o 'pdkv: .*' "$logs/decode.log" | sed 's/^/decode   /'
echo "== the request went through prefill, then decode"
grep -h 'example-1' "$logs/proxy.log"
echo "== decode read the prompt's KV from prefill and computed none of it again"
cat "$logs/status/decode/scheduler.json"
