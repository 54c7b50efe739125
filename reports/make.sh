#!/usr/bin/env bash
# Makes the rendered examples again.  NSYSK3 names the command when it is not on the path.
set -euo pipefail
cd "$(dirname "$0")/.."
nsysk3=${NSYSK3:-nsysk3}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

"$nsysk3" compare fixtures/sglang-h200/pp1 fixtures/sglang-h200/pp2 --window prefill --label PP1 --label PP2 \
  --format html --out reports/h200-pp1-vs-pp2.html
"$nsysk3" sweep report fixtures/sglang-h200/sweep --format html --out reports/h200-sglang-sweep.html

"$nsysk3" compare fixtures/torch-h200/pp1 fixtures/torch-h200/pp2 --label PP1 --label PP2 \
  --format html --out reports/h200-torch-pp1-vs-pp2.html
"$nsysk3" compare fixtures/torch-h200/sp-off fixtures/torch-h200/sp-sglang fixtures/torch-h200/sp-nsysk3 \
  --label 'SP off' --label 'SP by NCCL' --label 'SP by nsysk3' --format html --out reports/h200-torch-sp.html
"$nsysk3" sweep report fixtures/torch-h200/sweep --format html --out reports/h200-torch-sweep.html
"$nsysk3" sweep report fixtures/kimi-k3-6000d --format html --out reports/kimi-k3-sweep.html

for pp in 1 8; do
  "$nsysk3" simulate --preset "kimi-k3-6000d-pp$pp" --out "$work/pp$pp" -q
  "$nsysk3" analyze "$work/pp$pp" -q
done
"$nsysk3" compare "$work/pp1" "$work/pp8" --label PP1 --label PP8 --lang zh \
  --format html --out reports/kimi-k3-pp1-vs-pp8.html
