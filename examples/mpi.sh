#!/usr/bin/env bash
# Train on several machines through MPI, and go on if a rank or a machine is lost.
#
#   examples/mpi.sh "mpiexec -n 16 -hosts node1,node2" --run runs/base \
#     --config base --data data/wmt14-en-de --source en --target de
#
# The first argument is the command that starts the ranks (Open MPI: mpirun -n 16
# --host node1:8,node2:8 --bind-to none); the others are those of train.py, with --run. All machines
# need the same paths: this source tree, the environment, the text, runs/ and cache/.
#
# RESTARTS (3) is how often the ranks are started again, PAUSE (30) how many seconds
# after they have ended. SIGTERM and Ctrl-C save the run and end it.
set -u
case " $* " in
  *" --run"[\ =]* | *" --save-dir"[\ =]* | *" --resume"[\ =]*) ;;
  *)
    echo "usage: mpi.sh MPIEXEC --run DIR ..., or --resume DIR; got: $*" >&2
    exit 2 ;;
esac
read -ra start <<<"$1"
shift
train=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)/train.py
asked= job=
trap 'asked=1; [[ -n $job ]] && kill -TERM "$job" 2>/dev/null' TERM INT

for ((attempt = 0; attempt <= ${RESTARTS:-3}; attempt++)); do
  if ((attempt)); then
    echo "restart $attempt of ${RESTARTS:-3}" >&2
    sleep "${PAUSE:-30}"
    if [[ -n $asked ]]; then
      exit 143
    fi
  fi
  # --attempt: from the second on, the run in --run is continued
  "${start[@]}" python "$train" "$@" --attempt "$attempt" &
  job=$!
  wait "$job"
  code=$?
  while kill -0 "$job" 2>/dev/null; do # a signal has ended `wait` alone
    wait "$job"
    code=$?
  done
  job=
  case $code in
    0 | 2) exit "$code" ;; # done, or wrong flags
    65) exit 1 ;; # what would happen again, such as damaged text
  esac
  if [[ -n $asked ]]; then
    exit "$code"
  fi
done
exit 1
