#!/usr/bin/env bash
# Is this engine right on this GPU, and how fast?
#
#     bash benchmarks/gpu.sh             all of it, in some 20 minutes
#     bash benchmarks/gpu.sh tests       kernels and whole steps against float64
#     bash benchmarks/gpu.sh train       the built-in corpus, trained and translated
#     bash benchmarks/gpu.sh limits ...  what each part of a step must take, and takes:
#                                        roofline.py, which takes the rest as arguments
#     bash benchmarks/gpu.sh speed ...   gpu.py, which takes the rest as arguments
#
# It needs a checkout, CuPy, PyTorch and what the tests need, but no installed package.
set -euo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
python=${PYTHON:-python3}

"$python" -c '
import sys
from minitransformer.devices import check_device
from minitransformer.settings.options import exit_code
sys.exit(exit_code("gpu.sh", lambda: check_device("cuda")))
'

tests() {
  echo "== kernels, and steps of training, against float64"
  "$python" -m pytest -q -p no:cacheprovider -W default -k "gpu" \
    tests/cuda
}

train() {
  echo "== the built-in corpus"
  work=$(mktemp -d)
  trap 'rm -rf "$work"' EXIT
  flags=(--run "$work/run" --cache "$work/cache")
  "$python" train.py --device cuda "${flags[@]}" | grep -v '^step .* lr '
  sentence="The old man gives the small child a red apple."
  for device in cuda cpu; do
    "$python" translate.py --device "$device" --model "$work/run" "$sentence"
  done
  # The run goes on on the processor.
  "$python" train.py --device cpu --resume "$work/run" --cache "$work/cache" \
    --steps 2510 --minutes 60 --precision fp32 | tail -n 2
}

limits() {
  echo "== what a step must at least take, and takes"
  "$python" benchmarks/roofline.py --measure "$@"
}

speed() {
  echo "== speed"
  "$python" benchmarks/gpu.py "$@"
}

if [ $# -gt 0 ]; then
  "$@"
else
  code=0
  for part in tests train limits speed; do # what fails does not hide the rest
    bash benchmarks/gpu.sh "$part" || code=$?
  done
  exit "$code"
fi
