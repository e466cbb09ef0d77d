# The recipes of this folder source this file.

# train_run RUN FLAGS...: train a run to its end. One that has ended is left as it is, and
# one that was interrupted goes on. The variable FLAGS adds flags to each new run, and
# THREADS says how many cores each run takes (default all).
train_run() {
  local run=$1 cores=${THREADS:+--threads $THREADS}
  shift
  grep -qs '"ended"' "$run/metrics.jsonl" && return
  if compgen -G "$run/step-*.safetensors" >/dev/null; then
    # shellcheck disable=SC2086
    "${PYTHON:-python}" train.py --resume "$run" $cores
  else
    # shellcheck disable=SC2086
    "${PYTHON:-python}" train.py --run "$run" "$@" $cores ${FLAGS:-}
  fi
}
