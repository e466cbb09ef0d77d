#!/usr/bin/env bash
# Which depth, which width, which text? Trainings from English to German, equally long.
#
#   bash examples/en-de/trials.sh data/en-de data/docs runs/en-de/en-de-4 runs/trials
#
# The folders of text are those of train.sh, and the model that of its fourth step. Each
# line that it prints has the updates that a training got to, and BLEU of validation text:
# everyday sentences, documentation by people and unmarked, and our own news. JOBS
# trainings run at a time (1), for MINUTES each (60). DEVICE, THREADS and FLAGS are as for
# train.sh, and PAIRS is how many of a machine's translations are looked at (200,000).
set -euo pipefail
data=$1 docs=$2 trained=$3 trials=$4 pairs=${PAIRS:-200000}
here=$(dirname "$0")
. "$here/tools.sh"
mkdir -p "$trials"
has() { [ -e "$trials/$1" ]; }
in_turn() { # in_turn COMMAND...: in the background, as soon as a job is free
  while [ "$(jobs -rp | wc -l)" -ge "${JOBS:-1}" ]; do wait -n || true; done
  "$@" &
}

trial() { # trial NAME TEXT FLAGS...: a training, and how good it is
  local name=$1 row="" text bleu
  train_run "$trials/$name" "${device[@]}" --precision bf16 --data "$trials/$2" \
    --source en --target de --max-tokens 4096 --steps 100000 --minutes "${MINUTES:-60}" \
    --validate-every 2000 --validate-bleu 0 --save-every 50 --average 4 \
    --average-by number "${@:3}" >"$trials/$name.log" 2>&1 ||
    { tail -n 1 "$trials/$name.log" && return 1; }
  for text in "$data/val.%.gz" "$docs"/val-{human,unmarked}.%.gz "$here/news.%"; do
    translate --model "$trials/$name" --input "${text/\%/en}" --reference "${text/\%/de}" \
      --output "$trials/$name.de" 2>"$trials/$name.bleu" || cat "$trials/$name.bleu"
    bleu=$(sed -n 's/^BLEU \([0-9.]*\) .*/\1/p' "$trials/$name.bleu")
    row+=" ${bleu:-none}"
  done
  echo "$name: $(sed -n 's/^ended  *after step \([0-9,]*\).*/\1/p' "$trials/$name.log")$row"
}

depth() { # depth ENCODER DECODER: the trained model with so many layers
  local start=$trials/$1+$2.safetensors
  [ -e "$start" ] || "$PYTHON" "$here/deepen.py" "$trained" "$start" \
    --encoder-layers "$1" --decoder-layers "$2"
  in_turn trial "$1+$2" people --from "$start" --learning-rate 7e-4 --warmup 100 --alpha 1.6
}

shape() { # shape NAME TEXT PIECES FLAGS...: a model from nothing
  in_turn trial "$1" "$2" --vocabulary "$trials/$3.model" --config small --d-model 320 \
    --d-ff 1280 --num-heads 5 --learning-rate 1e-3 --warmup 400 "${@:4}"
}

mixed() { # mixed NAME CORPUS...: without test text, which no trial needs
  has "$1" && return
  tool mix "$trials/$1" "${@:2}" --source en --target de
  rm "$trials/$1"/test.*
}

surest() { # of the pairs that machines translated, those of which our models are surer
  local scores=$trials/surest-scores name
  has surest && return
  mkdir -p "$scores"
  for name in en de; do
    head -n "$pairs" <(gzip -cd "$docs/machine.$name.gz") >"$scores/$name"
  done
  for name in en-de de-en; do
    translate --model $name --input "$scores/${name%-*}" --score "$scores/${name#*-}" \
      --output "$scores/$name" &
  done
  wait
  "$PYTHON" "$here/surest.py" "$scores"/{en,de,en-de,de-en} "$trials/surest"
}

mixed people "$data" "$docs"
echo "1. depth: encoder and decoder layers, from a trained model"
for layers in "4 2" "6 2" "8 2" "4 1" "6 1" "8 1"; do
  # shellcheck disable=SC2086 # two numbers
  depth $layers
done
wait

echo "2. width and word pieces, from nothing"
plain "$docs" "$trials/docs"
for pieces in 6000 8000; do
  has $pieces.model || vocabulary "$trials/$pieces.model" $pieces \
    "$data"/train.*.gz "$trials"/docs/train.*
done
six="--encoder-layers 6 --decoder-layers 2"
# shellcheck disable=SC2086 # words
{
  shape 320-6000 people 6000 $six
  shape 320-8000 people 8000 $six
  shape 352-6000 people 6000 $six --d-model 352 --d-ff 1408 --num-heads 8
  shape 384-6000 people 6000 $six --d-model 384 --num-heads 6
}
wait

echo "3. text: no documentation, and a machine's beside people's: any, or the surer half"
surest
if ! has any; then
  mkdir "$trials/any"
  for side in en de; do
    head -n $((pairs / 2)) <(gzip -cd "$docs/machine.$side.gz") >"$trials/any/train.$side"
  done
fi
mixed everyday "$data"
mixed any-machine "$data" "$docs" "$trials/any"
mixed surer-machine "$data" "$docs" "$trials/surest"
for text in everyday any-machine surer-machine; do
  # shellcheck disable=SC2086 # words
  shape "with-$text" $text 6000 $six
done
wait
