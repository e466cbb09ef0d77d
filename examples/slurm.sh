#!/usr/bin/env bash
# Train on several machines through Slurm, and go on if the time is over.
#
#   sbatch examples/slurm.sh runs/base --config base --data data/wmt14-en-de \
#     --source en --target de
#   sbatch --gpus-per-node=4 --ntasks-per-node=4 --cpus-per-task=8 examples/slurm.sh \
#     runs/base --config base --device cuda ...
#
# The first argument is the directory of the run, the others are the flags of train.py.
# Submit from the source tree with the environment activated; both, the text, runs/ and
# cache/ are on a file system that all machines share.
#SBATCH --job-name=minitransformer
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@300
#SBATCH --requeue
#SBATCH --open-mode=append
set -u
run=${1:?usage: slurm.sh RUN FLAGS ...}
shift
if [[ -e $run/config.json ]]; then # this job, or another, has begun it
  set -- --resume "$run"
else
  set -- --run "$run" "$@"
fi
# --mpi=pmi2 is for MPICH, --mpi=pmix for Open MPI.
srun --mpi="${MPI:-pmi2}" --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" python train.py "$@"
code=$?
state=$(squeue --noheader --jobs "$SLURM_JOB_ID" --format %T) # another after scancel
if [[ $code -eq 143 && $state == RUNNING ]]; then # saved and stopped by SIGTERM
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
