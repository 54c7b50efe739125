#!/usr/bin/env bash
# The pipeline-depth ladder on the GPUs of this machine; README.md beside it says what each step costs.
#
# usage: MODEL=FOLDER ladder.sh STEP...        steps: plan profile nccl sweep sp compare pack, done in the order given
#
#   MODEL             folder with Kimi-K3's config.json; no weights are read
#   NSYSK3            the command (nsysk3); its own variables (NSYSK3_NSYS, NSYSK3_LOAD_REQUESTS ...) hold too
#   LADDER_OUT        where everything goes (build/ladder); steps may be spread over several calls
#   LADDER_SECONDS    of one call (540): no run is started that would not end in it, and one that has not is told to
#   LADDER_LAYERS     of the model (16)
#   LADDER_REPEATS    of each concurrency in the sweep (3)
#   LADDER_GPUS       how many (all that nvidia-smi -L lists)
#   LADDER_ENV        file of lines NAME = "value": environment that the server needs on this machine alone
set -um  # m: each command in a process group of its own, which can be told to end as one, once
[ $# -gt 0 ] || { sed -n '2,/^set/p' "$0" | sed '$d; s/^# \{0,1\}//'; exit 2; }
here=$(cd "$(dirname "$0")" && pwd)
nsysk3=${NSYSK3:-nsysk3}
out=${LADDER_OUT:-build/ladder}
seconds=${LADDER_SECONDS:-540}
gpus=${LADDER_GPUS:-$(nvidia-smi -L 2>/dev/null | grep -c '^GPU ')}
SECONDS=0
child='' watch='' asked='' failed=0
trap stop TERM INT HUP

# Told to end: what runs is told so once (a second time would make nsysk3 drop what it has), and no step follows.
stop() {
  [ -z "$asked" ] || return 0
  asked=yes failed=130
  [ -z "$child" ] || { kill -KILL -- "-$watch"; kill -TERM -- "-$child"; force; } 2>/dev/null
}

# End the child by force in 45 s, unless it has ended.
force() {
  (sleep 45 && kill -KILL -- "-$child") >/dev/null 2>&1 &
  watch=$!
}

say() { printf '== %3d s  %s\n' "$SECONDS" "$*"; }

# bounded NAME NEEDS MOST WORD...: run a command into logs/NAME.txt if NEEDS seconds are left; end it after MOST or
# what is left, by force 45 s later.
bounded() {
  local name=$1 needs=$2 most=$3 left=$((seconds - SECONDS)) code again
  shift 3
  [ -z "$asked" ] || return 130
  if [ "$left" -lt "$needs" ]; then
    say "$name: not started, it needs $needs s and $left are left"
    failed=75
    return 75
  fi
  [ "$left" -gt "$most" ] || most=$left
  "$@" >"$out/logs/$name.txt" 2>&1 </dev/null &
  child=$!
  (sleep "$most" && kill -TERM -- "-$child" && sleep 45 && kill -KILL -- "-$child") >/dev/null 2>&1 &
  watch=$!
  # A signal to this script ends the wait, not the child; a child that has ended meanwhile still has its code to tell.
  while wait "$child" 2>/dev/null; code=$?; kill -0 "$child" 2>/dev/null; do :; done
  wait "$child" 2>/dev/null
  again=$?
  [ "$again" = 127 ] || code=$again
  child=
  kill -KILL -- "-$watch" 2>/dev/null
  wait "$watch" 2>/dev/null
  say "$name: exit code $code"
  [ -n "$asked" ] || [ "$code" = 0 ] || failed=$code
  [ "$code" = 0 ] || tail -n 4 "$out/logs/$name.txt" | cut -c1-300
  return "$code"
}

# Depths: powers of two up to the GPUs.  Shallowest and deepest come first, in case time does not do for all.
depths=()
for ((pp = 1; pp <= gpus; pp *= 2)); do depths+=("$pp"); done
if [ "$gpus" -lt 2 ] || [ "${depths[-1]}" != "$gpus" ]; then
  echo "ladder.sh: $gpus GPUs: the ladder is for 2, 4 or 8 (LADDER_GPUS)" >&2
  exit 2
fi
order=("${depths[0]}" "${depths[-1]}" "${depths[@]:1:${#depths[@]}-2}")
comma() { local IFS=,; echo "$*"; }
matrix=(--pp "$(comma "${order[@]}")" --ep 1 --concurrency 8,16 --repeats "${LADDER_REPEATS:-3}")

mkdir -p "$out/logs" && out=$(cd "$out" && pwd) || exit 2
cat "$here/ladder.toml" ${LADDER_ENV:+"$LADDER_ENV"} >"$out/nsysk3.toml" || exit 2
export NSYSK3_CONFIG=$out/nsysk3.toml NSYSK3_MODEL_PATH=$out/model NSYSK3_CLUSTER_GPUS_PER_HOST=$gpus
finished() { grep -q '"status": *"done"' "$out/$1/run.json" 2>/dev/null; }

# What would run, without a GPU.
plan() {
  local pp
  for pp in "${depths[@]}"; do "$nsysk3" profile --pp "$pp" --ep 1 --dry-run || failed=$?; done
  # In a folder of its own: the sweep's may be there already.
  "$nsysk3" sweep "${matrix[@]}" --out "$out/planned" --dry-run || failed=$?
}

# One profiled window a layout.  EP is 1 everywhere, or it would change with TP.
profile() {
  local pp
  for pp in "${order[@]}"; do
    finished "pp$pp" && continue
    if [ -d "$out/pp$pp" ]; then rm -rf "$out/failed-pp$pp" && mv "$out/pp$pp" "$out/failed-pp$pp"; fi
    bounded "profile-pp$pp" 100 220 "$nsysk3" profile --pp "$pp" --ep 1 --out "$out/pp$pp"
  done
}

# AllReduce of the groups, Send/Recv of a pair.
nccl() {
  bounded nccl 30 150 "$nsysk3" nccl-bench "${matrix[@]:0:2}" --out "$out/nccl"
  share
}

# Throughput without the profiler; a repeat that is over is kept whatever ends the rest, and the next call goes on.
sweep() {
  local again=()
  [ ! -f "$out/sweep/metadata/sweep.json" ] || again=(--resume)
  bounded sweep 75 "$seconds" "$nsysk3" sweep "${again[@]}" "${matrix[@]}" --out "$out/sweep"
  share
}

# A sweep's report shows the links when their logs lie in its folder, which has to be new when a sweep begins.
share() { [ ! -d "$out/sweep" ] || cp "$out"/nccl/nccl* "$out/sweep/" 2>/dev/null; }

# The sequence-parallel kernels over all GPUs, and over half of them where that is a group of 4.
sp() {
  local size
  for size in "$gpus" $((gpus / 2 >= 4 ? gpus / 2 : 0)); do
    [ "$size" = 0 ] && continue
    mkdir -p "$out/sp$size"
    bounded "sp$size" 60 120 env OUT="$out/sp$size" CUDA_VISIBLE_DEVICES="$(seq -s, 0 $((size - 1)))" python3 \
      "$here/../ops_bench.py" --quick --limit-s 110 --sections correct,ceilings,k1_large,k1_small,k2,k3,soak
  done
}

# Needs no GPU, only nsysk3's analysis; the exports are enough.
compare() {
  local pp runs=() logs=() log
  for log in "$out"/nccl/nccl_tp*.log; do [ ! -f "$log" ] || logs+=(--nccl-tests "$log"); done
  for pp in "${depths[@]}"; do
    finished "pp$pp" || continue
    bounded "analyze-pp$pp" 10 120 "$nsysk3" analyze "$out/pp$pp" "${logs[@]}" && runs+=("$out/pp$pp")
  done
  if [ "${#runs[@]}" -ge 2 ]; then
    bounded compare 10 120 "$nsysk3" compare "${runs[@]}"
    bounded compare-html 10 120 "$nsysk3" compare "${runs[@]}" --format html --out "$out/compare.html"
  else
    say "compare: ${#runs[@]} analysed runs, two are needed"
  fi
  [ -f "$out/sweep/summary.csv" ] || return 0
  bounded sweep-report 10 60 "$nsysk3" sweep report "$out/sweep"
  bounded sweep-html 10 60 "$nsysk3" sweep report "$out/sweep" --format html --out "$out/sweep.html"
}

# Few files to carry away: a run each, and the rest; exports instead of reports, without what analyze makes again.
pack() {
  local run
  rm -rf "$out/packed" && mkdir "$out/packed" && cd "$out" || return
  for run in pp[0-9]*; do [ ! -d "$run" ] || archive "$run" "$run"; done
  for run in *; do case $run in pp[0-9]* | packed) ;; *) echo "$run" ;; esac; done >packed/.rest
  archive rest -T packed/.rest
  rm packed/.rest
  ls -l packed
}

# archive NAME WORD...: packed/NAME.tar.xz, in parts where it would be larger than 15 MiB.
archive() {
  tar --exclude='*.nsys-rep' --exclude=analysis -cf - "${@:2}" | xz -T0 | split -b 15m -a 1 - "packed/$1.tar.xz."
  [ -e "packed/$1.tar.xz.b" ] || mv "packed/$1.tar.xz.a" "packed/$1.tar.xz"
}

for step; do
  case $step in
    plan | profile | nccl | sweep | sp) python3 "$here/deepen.py" "${MODEL:?a folder with config.json}" \
      "${LADDER_LAYERS:-16}" "$out/model" || exit 2 ;;
    compare | pack) ;;
    *) echo "ladder.sh: no step $step" >&2; exit 2 ;;
  esac
  # What there is can be carried away even when told to end.
  [ -z "$asked" ] || [ "$step" = pack ] || continue
  [ "$step" = plan ] || say "$step"
  "$step"
done
exit "$failed"
