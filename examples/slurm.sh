#!/usr/bin/env bash
# Train on several machines through Slurm, and go on if a rank or a machine is lost, or
# if the time is over.
#
#   sbatch examples/slurm.sh --run runs/base --config base --data data/wmt14-en-de \
#     --source en --target de
#   sbatch --gpus-per-node=4 --ntasks-per-node=4 --cpus-per-task=8 examples/slurm.sh \
#     --run runs/base --config base --device cuda ...
#
# The arguments are those of train.py, with --run. Submit from the source tree with the
# environment activated; both, the text, runs/ and cache/ are on a file system that all
# machines share. After a failure, a job is queued again unless it has been RESTARTS (3)
# times already, for its time limit or otherwise.
#SBATCH --job-name=minitransformer
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=B:TERM@300
#SBATCH --requeue
#SBATCH --open-mode=append
set -u
case " $* " in
  *" --run"[\ =]* | *" --save-dir"[\ =]* | *" --resume"[\ =]*) ;;
  *)
    echo "usage: slurm.sh --run DIR ..., or --resume DIR; got: $*" >&2
    exit 2 ;;
esac
attempt=${SLURM_RESTART_COUNT:-0}
train=(python train.py "$@" --attempt "$attempt")
case " $* " in
  *" --device cuda"* | *" --device=cuda"*) # NCCL; the ranks find each other by what srun tells them
    start=(srun --kill-on-bad-exit=1) ;;
  *) # MPI, whose mpiexec asks Slurm for the machines of this job
    start=(mpiexec -n "$SLURM_NTASKS")
    train+=(--threads "${SLURM_CPUS_PER_TASK:-1}") ;;
esac

asked=
trap 'asked=1; kill -TERM "$job" 2>/dev/null' TERM # the ranks save and stop
"${start[@]}" "${train[@]}" &
job=$!
wait "$job"
code=$?
while kill -0 "$job" 2>/dev/null; do # a signal has ended `wait` alone
  wait "$job"
  code=$?
done

case $code in
  0 | 2) exit "$code" ;; # done, or wrong flags
  65) exit 1 ;; # what would happen again, such as damaged text
esac
state=$(squeue --noheader --jobs "$SLURM_JOB_ID" --format %T) # another after scancel
if [[ $state == RUNNING ]] && { [[ -n $asked ]] || ((attempt < ${RESTARTS:-3})); }; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
