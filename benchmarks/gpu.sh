#!/usr/bin/env bash
# Is this engine right on this GPU, and how fast? Made for a GPU that is rented by the
# minute: what matters most comes first, and nothing is installed.
#
#     bash benchmarks/gpu.sh prepare [FOLDER | FILE.tsv.gz]...  before, on any machine
#     bash benchmarks/gpu.sh [STAGE]...                         on the GPU
#
# "prepare" puts text, its vocabulary and its ids into .gpu/, which goes along with the
# checkout. FOLDER holds train.en and train.de, plain or .gz, and the first one val and
# test*, too; FILE has pairs of lines with a tab between. Without either it is the
# built-in corpus.
#
# Each stage has its own limit, all have one deadline, and one that fails or hangs does
# not stop the next. $OUT gets log.txt with all output, and the files that stages write:
# at most eight. $OUT/kernel_cache.tgz holds the compiled kernels; as
# .gpu/kernel_cache.tgz it saves the next run their compilation.
#
#   DEADLINE  seconds for everything (450)
#   STAGES    stages, if none is an argument (env tests train speed translate profile
#             compiled; also decoding multi30k nccl sanitize)
#   LIMIT     the most seconds that a stage may have (its own limit, as in `plan`)
#   GRACE     seconds from the signal to end until the one that kills (8)
#   OUT       where results go (.gpu/out)
#   WORK      where runs and compiled kernels are kept (a folder in /tmp)
#   PYTHON    the interpreter (python3)
#   SOURCE, TARGET  languages of the text (en, de)
set -uo pipefail
cd "$(dirname "$0")/.." || exit
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 TQDM_DISABLE=1
export OUT=${OUT:-$PWD/.gpu/out} WORK=${WORK:-/tmp/minitransformer-gpu-$UID}
export CUPY_CACHE_DIR=$WORK/kernel_cache
python=${PYTHON:-python3} run=$WORK/run log=$OUT/log.txt
source=${SOURCE:-en} target=${TARGET:-de}
languages=(--source "$source" --target "$target" --cache .gpu/cache)
timing=(--shapes base-25000 --rounds 1 --repeats 3 --steps 15)

# plan STAGE: its limit in seconds, and how many of its last lines are shown
plan() {
  case $1 in
    env) echo 60 12 ;;
    tests) echo 150 25 ;;
    train) echo 140 26 ;;
    speed) echo 90 14 ;;
    translate) echo 60 16 ;;
    profile) echo 75 75 ;;
    compiled) echo 240 12 ;;
    decoding) echo 60 16 ;;
    multi30k) echo 200 20 ;;
    nccl) echo 40 6 ;;
    sanitize) echo 150 16 ;;
    *) return 1 ;;
  esac
}

# --- before, without a GPU

prepare() {
  set -euo pipefail
  local flags="" from
  if [ $# = 0 ]; then
    "$python" -c '
import pathlib
from minitransformer.text.grammar.corpus import built_in_corpus
built_in_corpus(pathlib.Path(".gpu/built-in"))
'
    set -- .gpu/built-in/*/
    flags="--vocab-size 2500" # it has not enough words for the 37,000 of base
  fi
  collect .gpu/text "$@"
  rm -rf .gpu/built-in
  echo "$flags" >.gpu/flags
  # shellcheck disable=SC2086 # flags are words
  "$python" train.py --config base --data .gpu/text "${languages[@]}" --dry-run $flags
  for from in "$@"; do
    if [ "$(basename "$from")" = multi30k ]; then
      collect .gpu/multi30k "$from"
      "$python" train.py --config multi30k --data .gpu/multi30k "${languages[@]}" \
        --dry-run
    fi
  done
  du -sh .gpu
}

# collect TO FROM...: the training text of all, with the first val and test*
collect() {
  local to=$1 column=0 language split from
  shift
  rm -rf "$to"
  mkdir -p "$to"
  for language in "$source" "$target"; do
    column=$((column + 1))
    for from in "$@"; do
      case $from in
        *.tsv | *.tsv.gz) gzip -cdf "$from" | cut -f "$column" ;;
        *) one_file "$from" train "$language" ;;
      esac
    done | gzip -n >"$to/train.$language.gz"
    for split in val test; do
      one_file "$1" "$split" "$language" | gzip -n >"$to/$split.$language.gz"
    done
  done
}

# one_file FOLDER SPLIT LANGUAGE: the lines of the first file with such a name
one_file() {
  local file
  for file in "$1/$2"*".$3" "$1/$2"*".$3.gz"; do
    if [ -f "$file" ]; then
      gzip -cdf "$file"
      return
    fi
  done
  echo "gpu.sh: error: expected $2*.$3 or $2*.$3.gz in $1" >&2
  return 1
}

# --- the stages, each in a process of its own

env() { # the card, the versions, and all kernels compiled at once
  local asked=name,driver_version,memory.total,clocks.sm,power.limit
  nvidia-smi --query-gpu=$asked --format=csv,noheader
  "$python" -c '
import importlib.metadata as metadata, platform, re
wanted = "numpy|cupy|torch$|triton|nvidia-(cublas|cuda|nccl)|ml.dtypes|sentencepiece"
found = sorted((str(d.name), d.version) for d in metadata.distributions())
found = [name for name in found if re.match(wanted, name[0])]
print("python", platform.python_version(), *(word for pair in found for word in pair))
'
  echo "float32 bfloat16 float16" |
    xargs -n 1 -P 3 "$python" -c '
import sys, time
began = time.monotonic()
from minitransformer.backends.cuda import device
device.select_gpu("cuda")
device.current()._function("dropout", sys.argv[1])
print("kernels", sys.argv[1], f"compiled in {time.monotonic() - began:.1f} s")
'
}

tests() { # against float64, those on the GPU alone, also those that are slow elsewhere
  "$python" -m pytest -q -p no:cacheprovider -W default --tb=short -rf -m "not stress" \
    -k "([gpu or base_on_a_gpu) and not another_machine" tests/backends/cuda
}

need_gpu() { # else every stage would fail by itself, or leave out what it is for
  "$python" -c '
import sys
from minitransformer.backends.devices import check_device
from minitransformer.cli import exit_code
sys.exit(exit_code("gpu.sh", lambda: check_device("cuda")))
'
}

train() {
  local flags=()
  [ -f .gpu/flags ] || bash benchmarks/gpu.sh prepare
  read -ra flags <.gpu/flags
  rm -rf "$run"
  # Post-norm may diverge at the rate that so short a warm-up would reach by itself.
  "$python" train.py --device cuda --config base --data .gpu/text "${languages[@]}" \
    ${flags[@]+"${flags[@]}"} --run "$run" --minutes 1.25 --warmup 1500 \
    --learning-rate 7e-4 --log-every 25 --validate-every 500 --validate-bleu 100 \
    --average 1
}

speed() {
  "$python" benchmarks/gpu.py "${timing[@]}" --sides ours ours-eager pytorch \
    >"$OUT/speed.json"
}

compiled() { # torch.compile takes a minute or two to start, for each shape
  "$python" benchmarks/gpu.py "${timing[@]}" --shapes base-25000 base-4096 \
    --sides compiled pytorch ours >"$OUT/compiled.json"
}

decoding() {
  local beam
  for beam in 4 1; do
    "$python" benchmarks/gpu.py --shapes --sides ours-decoding pytorch-decoding \
      --rounds 1 --repeats 3 --beam "$beam"
  done
}

translate() { # the test set, and its first lines on the processor, too
  local precision began code=0 few=(head -n 40)
  gzip -cd ".gpu/text/test.$source.gz" >"$WORK/test.source"
  gzip -cd ".gpu/text/test.$target.gz" >"$WORK/test.target"
  "${few[@]}" "$WORK/test.source" >"$WORK/few.source"
  for precision in bf16 fp32; do
    began=$SECONDS
    "$python" translate.py --device cuda --precision $precision --model "$run" \
      --input "$WORK/test.source" --reference "$WORK/test.target" \
      --output "$WORK/$precision" || code=$?
    echo "$precision: $(wc -l <"$WORK/$precision") lines in $((SECONDS - began)) s"
  done
  "$python" translate.py --model "$run" --input "$WORK/few.source" \
    --output "$WORK/cpu" || code=$?
  for precision in bf16 fp32; do
    echo "$precision:" "$("${few[@]}" "$WORK/$precision" | diff - "$WORK/cpu" |
      grep -c '^<') of 40 lines are not the processor's"
  done
  paste -d '\n' "$WORK/few.source" "$WORK/bf16" | head -n 6
  return "$code"
}

profile() {
  "$python" benchmarks/profile_step.py
}

multi30k() { # the preset, trained to its end; with BLEU as in docs/results.md
  local code=0 flags=(--device cuda --beam 5)
  rm -rf "$WORK/multi30k"
  "$python" train.py --config multi30k --data .gpu/multi30k "${languages[@]}" \
    --keep-last 45 --run "$WORK/multi30k" --log-every 500 "${flags[@]}" || code=$?
  cp "$WORK/multi30k/metrics.jsonl" "$OUT/multi30k.jsonl"
  "$python" translate.py --model "$WORK/multi30k" "${flags[@]}" \
    --input ".gpu/multi30k/test.$source.gz" \
    --reference ".gpu/multi30k/test.$target.gz" --output "$WORK/multi30k.target" ||
    code=$?
  return "$code"
}

nccl() { # a group of one: does NCCL load, and does CuPy take what it is given?
  "$python" -c '
from types import SimpleNamespace
import cupy
from minitransformer.backends.cuda.nccl import NcclCommunicator

# What a rank uses of MPI, of which there is only one.
alone = SimpleNamespace(Get_rank=lambda: 0, Get_size=lambda: 1, Barrier=lambda: None)
alone.Split_type, alone.bcast = lambda kind: alone, lambda value, root: value
ranks = NcclCommunicator(SimpleNamespace(COMM_WORLD=alone, COMM_TYPE_SHARED=0))
numbers = cupy.arange(1003, dtype="f4") / 7
expected = float(numbers.sum())
ranks.start_all_reduce(numbers)()
ranks.broadcast(numbers)
print("NCCL: sum", float(numbers.sum()) / expected, "of about 1")
'
}

sanitize() {
  local code=0 tool test=("$python" -m pytest -q -x -p no:cacheprovider -W default
    tests/backends/cuda/test_attention.py -k "[gpu")
  for tool in memcheck racecheck; do
    compute-sanitizer --tool $tool "${test[@]}" || code=$?
  done
  return "$code"
}

# --- the order of things

say() { echo "$*" | tee -a "$log"; }

# Run a stage, all of whose output goes to the log, and show the last lines.
stage() {
  local limit lines left began=$SECONDS before code=0
  read -r limit lines <<<"$(plan "$1")"
  left=$((${DEADLINE:-450} - SECONDS - ${GRACE:-8}))
  if [ "$left" -lt "${GRACE:-8}" ]; then
    say "== $1: no time is left"
    failed+=" $1"
    return
  fi
  if [ "$limit" -gt "${LIMIT:-$limit}" ]; then limit=$LIMIT; fi
  if [ "$limit" -gt "$left" ]; then limit=$left; fi
  say "== $1: at $began s, $limit s at most"
  before=$(wc -c <"$log")
  timeout -s INT -k "${GRACE:-8}" "$limit" bash benchmarks/gpu.sh --stage "$1" \
    >>"$log" 2>&1 </dev/null &
  group=$!
  wait "$group" || code=$?
  kill -KILL -- "-$group" 2>/dev/null # what the stage may have left behind
  tail -c "+$((before + 1))" "$log" | tail -n "$lines" | cut -c 1-200
  say "== $1: code $code after $((SECONDS - began)) s"
  if [ "$code" != 0 ]; then failed+=" $1"; fi
}

# Keep what is worth keeping, after each stage, since the next may be the last.
keep() {
  local name
  for name in metrics.jsonl train.log config.json; do
    if [ -f "$run/$name" ]; then cp -f "$run/$name" "$OUT/"; fi
  done
  tar -czf "$OUT/kernel_cache.tgz" -C "$WORK" kernel_cache
}

main() {
  local names=("$@") name failed="" group=""
  if [ $# = 0 ]; then
    read -ra names <<<"${STAGES:-env tests train speed translate profile compiled}"
  fi
  for name in "${names[@]}"; do
    if ! plan "$name" >/dev/null; then
      echo "gpu.sh: error: expected a stage, got $name" >&2
      exit 2
    fi
  done
  need_gpu || exit
  mkdir -p "$OUT" "$CUPY_CACHE_DIR"
  : >"$log"
  if [ -f .gpu/kernel_cache.tgz ]; then tar -xzf .gpu/kernel_cache.tgz -C "$WORK"; fi
  set -m # a group of processes for each stage, which ends as a whole
  trap '[ -z "$group" ] || kill -KILL -- "-$group" 2>/dev/null; exit 130' INT TERM
  for name in "${names[@]}"; do
    stage "$name"
    keep
  done
  if [ -n "$failed" ]; then
    say "== failed:$failed"
    exit 1
  fi
  say "== all is well after $SECONDS s"
}

case ${1:-} in
  --stage) "$2" ;;
  prepare) "$@" ;;
  *) main "$@" ;;
esac
