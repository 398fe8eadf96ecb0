#!/usr/bin/env bash
# Measures what docs/results/h200x2 holds, on the first two GPUs; OUT gets the files.
#   scripts/measure_gpus.sh OUT [PART...]     parts: exact, shape, small, appends, kv, offloading (default: all)
# Runs that are in a file already are not run again, so a part that was stopped is gone on with. On H200s `shape` takes
# 20 minutes, 5 of them the engines' start, and the others two to nine. With one GPU: DEVICES=cuda:0 and `shape`,
# and CUDA_VISIBLE_DEVICES=0,0 and `shape` for two engines on it.
set -euo pipefail
out=${1:?usage: measure_gpus.sh OUT [PART...]}
shift
parts=${*:-exact shape small appends kv offloading}
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
shape=${SHAPE:-/tmp/qwen3-14b-shape}
devices=${DEVICES:-cuda:0,cuda:1}
mkdir -p "$out"
[ -f "$shape/config.json" ] || python3 "$here/scripts/model_shape.py" "$shape"

bench() { # FILE MODES ENGINE_ARGS [OPTION...]
  local file=$1 modes=$2 args=$3
  shift 3
  python3 -c "from langgraph_pingpong.cli import app; app()" bench --profile long-prefill --set static=4096 \
    --modes "$modes" --devices "$devices" --dtype bfloat16 --engine-args "$args" --runs "${RUNS:-5}" \
    --stop-after "${STOP_AFTER:-510}" --output "$out/$file.jsonl" "$@"
}

for part in $parts; do
  case $part in
    shape) # every mode and profile, with one start of the engines
      python3 "$here/scripts/measure_shape.py" "$out" --shape "$shape" --devices "$devices" \
        ${STOP_AFTER:+--stop-after "$STOP_AFTER"} ;;
    small) bench long-prefill-smollm2 serial,pingpong,pingpong-plain,overlap-1 '{}' ;; # 9 heads: no TP=2
    appends)
      python3 -m langgraph_pingpong.bench.appends --device cuda:0 --model "$shape" \
        --engine-args '{"load_format": "dummy", "max_model_len": 36864}' \
        --lengths 1024,2048,4096,8192,16384,32768 --output "$out/appends-14b"
      python3 -m langgraph_pingpong.bench.appends --device cuda:0 --lengths 512,1024,2048,4096,7168 \
        --output "$out/appends-smollm2" ;;
    exact)
      python3 -m langgraph_pingpong.bench.exact --devices "$devices" --runs 50 --minutes 4 --modes bits,ids --more \
        --output "$out/exact" ;;
    kv) # KV read from the other engine, and the agents with tools of `shape` with it; needs NIXL
      python3 "$here/scripts/measure_kv.py" "$out" --shape "$shape" --devices "$devices" ;;
    offloading) python3 "$here/scripts/check_offloading.py" "$out/offloading" ;;
    *) echo "no such part: $part" >&2; exit 2 ;;
  esac
done
