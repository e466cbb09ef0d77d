#!/usr/bin/env bash
# Which shape, and which text? Short trainings of both directions, all of equal length.
#
#   bash examples/en-de/trials.sh data/docs runs/en-de
#
# It takes what train.sh made in its first step. Each line that it prints has BLEU of
# validation text: everyday sentences, documentation by people and unmarked, and our own
# news. JOBS trainings run at a time (1), of STEPS updates (2,500); DEVICE and FLAGS are
# as for train.sh, and PAIRS is how many of a machine's translations are looked at.
set -euo pipefail
docs=$1 runs=$2 trials=$2/trials steps=${STEPS:-2500}
here=$(dirname "$0")
. "$here/tools.sh"
mkdir -p "$trials"
has() { [ -e "$trials/$1" ]; }
in_turn() { # in_turn COMMAND...: in the background, as soon as a job is free
  while [ "$(jobs -rp | wc -l)" -ge "${JOBS:-1}" ]; do wait -n || true; done
  "$@" &
}

trial() { # trial NAME TEXT PIECES FLAGS...: a training, and how good it is
  local name=$1 row="" text source target bleu
  train_run "$trials/$name" "${device[@]}" --precision bf16 --config small \
    --data "$trials/$2" --source en-de --target de-en --vocabulary "$trials/$3.model" \
    --max-tokens 8192 --learning-rate 1.5e-3 --warmup 800 --steps "$steps" \
    --decay $((steps / 2)) --validate-every "$steps" --validate-bleu 0 --average 1 \
    --d-model 320 --d-ff 1280 --num-heads 5 "${@:4}" >"$trials/$name.log" 2>&1 ||
    { tail -n 1 "$trials/$name.log" && return 1; }
  for text in "$runs/en-1/val." "$docs/val-human." "$docs/val-unmarked." "$here/news."; do
    for direction in en-de de-en; do
      source=$(ls "$text${direction%-*}"*) target=$(ls "$text${direction#*-}"*)
      translate --model "$trials/$name" --input "$source" --reference "$target" \
        --output "$trials/$name.$direction" 2>"$trials/$name.bleu" || cat "$trials/$name.bleu"
      bleu=$(sed -n 's/^BLEU \([0-9.]*\) .*/\1/p' "$trials/$name.bleu")
      row+=" ${bleu:-none}"
    done
  done
  echo "$name$row"
}

both() { # both NAME CORPUS...: text of both directions
  has "$1" || tool mix "$trials/$1" "${@:2}" "${@:2}" \
    --source $(printf 'en %.0s' "${@:2}") $(printf 'de %.0s' "${@:2}") \
    --target $(printf 'de %.0s' "${@:2}") $(printf 'en %.0s' "${@:2}")
}

surest() { # of the pairs that machines translated, those of which a model is surer
  local model=$trials/6+2-320-8000 scores=$trials/surest-scores pairs=${PAIRS:-200000}
  local side part
  has surest && return
  rm -rf "$scores"
  mkdir "$scores"
  for side in en de; do
    head -n "$pairs" <(gzip -cd "$docs/machine.$side.gz") >"$scores/$side"
    split -a 3 -d -l $(((pairs + ${JOBS:-1} - 1) / ${JOBS:-1})) "$scores/$side" "$scores/$side."
  done
  for part in "$scores"/en.*; do
    part=${part##*.}
    { # both directions, one after the other
      translate --model "$model" --input "$scores/en.$part" --score "$scores/de.$part" \
        --output "$scores/to-de.$part"
      translate --model "$model" --input "$scores/de.$part" --score "$scores/en.$part" \
        --output "$scores/to-en.$part"
    } &
  done
  wait
  "$PYTHON" "$here/surest.py" "$scores"/{en,de} <(cat "$scores"/to-de.*) \
    <(cat "$scores"/to-en.*) "$trials/surest"
}

plain "$docs" "$trials/docs"
for pieces in 6000 8000; do
  has "$pieces.model" ||
    vocabulary "$trials/$pieces.model" "$pieces" {"$runs/everyday","$trials/docs"}/train.* &
done
wait
both everyday "$runs/everyday"
both people "$runs/everyday" "$docs"

echo "1. shapes: encoder and decoder layers, width, word pieces"
in_turn trial 6+2-320-8000 people 8000 --encoder-layers 6 --decoder-layers 2
in_turn trial 4+2-320-6000 people 6000 --encoder-layers 4 --decoder-layers 2
in_turn trial 8+1-320-6000 people 6000 --encoder-layers 8 --decoder-layers 1
in_turn trial 4+2-352-8000 people 8000 --encoder-layers 4 --decoder-layers 2 \
  --d-model 352 --d-ff 1408 --num-heads 8
in_turn trial 6+1-384-6000 people 6000 --encoder-layers 6 --decoder-layers 1 \
  --d-model 384 --num-heads 6
wait

echo "2. text: no documentation, and a machine's beside people's: any, or the surer half"
surest
if ! has any; then
  mkdir "$trials/any"
  for side in en de; do
    head -n $((${PAIRS:-200000} / 2)) <(gzip -cd "$docs/machine.$side.gz") \
      >"$trials/any/train.$side"
  done
fi
both any-machine "$runs/everyday" "$docs" "$trials/any"
both surer-machine "$runs/everyday" "$docs" "$trials/surest"
layers="--encoder-layers 6 --decoder-layers 2"
for text in everyday any-machine surer-machine; do
  # shellcheck disable=SC2086 # layers are words
  in_turn trial "with-$text" "$text" 8000 $layers
done
wait
