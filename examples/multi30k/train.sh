#!/usr/bin/env bash
# The best recipe for Multi30k, English to German: both directions, the wanted one, then
# distillation from two models (docs/small-corpora.md explains the steps).
#
#   bash examples/multi30k/train.sh data/multi30k runs/multi30k
#
# The first folder has train, val and test_2016_flickr as .en.gz and .de.gz; `minitransformer
# corpora multi30k data/multi30k` downloads them. Each of two seeds trains on one core, at
# the same time, so that two cores take about two hours. What is there already is kept:
# after an interruption, the same command goes on. The last lines are BLEU on test text, and
# the run with the model. FLAGS go to every training, such as FLAGS="--steps 20" to try it.
set -euo pipefail
data=$1 runs=$2 THREADS=1
. "$(dirname "$0")/../train_run.sh"
mkdir -p "$runs/both" "$runs/distilled"
lines() { gzip -cdf "$@"; }
train() { # train RUN FLAGS...
  train_run "$1" --config multi30k --source en --target de --accumulate 2 --beam 5 \
    --alpha 1.4 --validate-every 58 --save-every 58 --validate-bleu 0 --keep-last 60 \
    --patience 10 --precision bf16 "${@:2}"
}
each_seed() { # each_seed FUNCTION: for both seeds at the same time
  "$1" 1 >"$runs/$1-1.log" 2>&1 &
  first=$!
  "$1" 2 >"$runs/$1-2.log" 2>&1
  wait "$first"
}

echo "1. both directions: the log is $runs/both-1.log"
lines "$data"/train.{en,de}.gz >"$runs/both/train.en"
lines "$data"/train.{de,en}.gz >"$runs/both/train.de"
for side in en de; do
  lines "$data/val.$side.gz" | tee "$runs/both/val.$side" >"$runs/distilled/val.$side"
done
both() {
  train "$runs/both-$1" --data "$runs/both" --seed "$1" --steps 2600 \
    --validate-every 116 --save-every 116
}
each_seed both

echo "2. English to German: $runs/german-1.log"
german() {
  train "$runs/german-$1" --data "$data" --from "$runs/both-$1" --seed "$1" \
    --learning-rate 0.004 --warmup 400 --patience 20
}
each_seed german

echo "3. both models together translate the training text, and each learns from it"
ensemble=$runs/distilled/ensemble.de
[ -e "$ensemble" ] || python translate.py --model "$runs/german-1" --model "$runs/german-2" \
  --beam 5 --alpha 1.4 --precision bf16 --input "$data/train.en.gz" --output "$ensemble"
lines "$data"/train.{en,en}.gz >"$runs/distilled/train.en"
lines "$data/train.de.gz" "$ensemble" >"$runs/distilled/train.de"
distilled() {
  train "$runs/distilled-$1" --data "$runs/distilled" --from "$runs/german-$1" --seed "$1" \
    --learning-rate 0.002 --warmup 400 --steps 1160 --patience 100 --average-by number
}
each_seed distilled

for seed in 1 2; do
  python translate.py --model "$runs/distilled-$seed" --beam 5 --alpha 1.4 \
    --input "$data/test_2016_flickr.en.gz" --reference "$data/test_2016_flickr.de.gz"
  echo "$runs/distilled-$seed"
done
