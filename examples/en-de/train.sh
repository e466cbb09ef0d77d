#!/usr/bin/env bash
# The models in the box: English to German and German to English.
#
#   bash examples/en-de/train.sh data/en-de runs/en-de
#
# The first folder is what `minitransformer split` made of Tatoeba's list and of Europarl
# (minitransformer/models/en-de/README.md has the command). What is there already is kept:
# after an interruption, the same command goes on. The last lines are BLEU on test text, and
# the files of the models. FLAGS go to every training, such as FLAGS="--steps 300" to try it.
set -euo pipefail
data=$1 runs=$2
here=$(dirname "$0")
. "$here/../train_run.sh"
mkdir -p "$runs/text"
train() { # train RUN FLAGS...
  train_run "$1" --max-tokens 4096 --precision bf16 --validate-every 1000 --save-every 250 \
    --validate-bleu 0 "${@:2}"
}

text() { # text LANG SEED PAIRS: more pairs with this source, in a folder of that name
  [ -e "$runs/$1-$2" ] ||
    python "$here/prepare.py" --source "$1" --seed "$2" "$3" "$runs/$1-$2"
}

echo "1. more text of the same pairs, and a vocabulary"
text en 1 "$data"
# Both directions learn from the pairs without addresses, markup, code and emoji.
things='https?:|www\.|@|[{}%`\\/<>]|\d{7,}|[\x{2190}-\x{2bff}\x{1f000}-\x{1ffff}\x{fe0f}]'
pairs() { # pairs LANG LANG: lines of two columns
  paste <(gzip -cd "$runs/en-1/train.$1.gz") <(gzip -cd "$runs/en-1/train.$2.gz") |
    LC_ALL=C.UTF-8 grep -vP "$things"
}
{ pairs en de && pairs de en; } | tee >(cut -f 2 >"$runs/text/train.de") |
  cut -f 1 >"$runs/text/train.en"
for side in en de; do gzip -cd "$runs/en-1/val.$side.gz" >"$runs/text/val.$side"; done
[ -e "$runs/en-de.model" ] ||
  python -m minitransformer vocabulary "$runs/en-de.model" "$runs/text/train.en" \
    --vocab-size 6000 --user-symbols ⟦{1..9}⟧ --option split_digits=true \
    character_coverage=0.99995 required_chars='%&é…+/*=@#_[]°èáçñ‘”»«'

echo "2. both directions at once"
train "$runs/both" --config small --decoder-layers 2 --d-model 320 --d-ff 1280 \
  --encoder-layers 4 --num-heads 5 --vocabulary "$runs/en-de.model" --data "$runs/text" \
  --source en --target de --learning-rate 1.5e-3 --warmup 1000 --steps 4000

leg() { # leg SEED PAIRS RATE WARMUP STEPS DECAY: the model goes on with text of pairs
  echo "$direction, leg $1: $5 updates"
  text "$source" "$1" "$2"
  train "$runs/$direction-$1" --from "$start" --data "$runs/$source-$1" --source "$source" \
    --target "$target" --learning-rate "$3" --warmup "$4" --steps "$5" --decay "$6" \
    --average 8 --keep-last 10 --patience 100 --alpha 1.6
  start=$runs/$direction-$1
}

distil() { # distil FOLDER: the pairs, and of the model's translations those nearest to them
  [ -e "$1/train.$target.gz" ] && return
  mkdir -p "$1"
  cp "$data"/{val,test}.{en,de}.gz "$1"
  cat "$data"/train.{"$source","$source"}.gz >"$1/train.$source.gz"
  [ -e "$1/nbest" ] || python translate.py --model "$start" --nbest 5 --beam 5 \
    --precision bf16 --input "$data/train.$source.gz" --output "$1/nbest"
  python "$here/nearest.py" "$1/nbest" "$data/train.$target.gz" | gzip >"$1/nearest.gz"
  cat "$data/train.$target.gz" "$1/nearest.gz" >"$1/train.$target.gz"
}

for direction in en-de de-en; do
  echo "3. $direction"
  source=${direction%-*} target=${direction#*-} start=$runs/both/best.safetensors
  leg 1 "$data" 1e-3 1500 9000 6000
  leg 2 "$data" 4e-4 500 3000 2500
  leg 3 "$data" 4e-4 500 2500 2000
  distil "$runs/$direction-distilled"
  leg 4 "$runs/$direction-distilled" 4e-4 500 4000 3500
  [ -e "$runs/$direction.safetensors" ] ||
    python -m minitransformer export int8 "$start" "$runs/$direction.safetensors" \
      --calibrate "$runs/$source-1/val.$source.gz"
  python translate.py --model "$runs/$direction.safetensors" \
    --input "$runs/$source-1/test.$source.gz" --reference "$runs/$source-1/test.$target.gz"
done
