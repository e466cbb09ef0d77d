#!/usr/bin/env bash
# The models in the box: English to German and German to English.
#
#   bash examples/en-de/train.sh data/en-de data/docs runs/en-de
#   DEVICE=cuda bash examples/en-de/train.sh data/en-de data/docs runs/en-de
#
# The first folder is what `minitransformer split` made of Tatoeba's list and of Europarl,
# the second what documentation.py made (minitransformer/models/en-de/README.md has the
# commands). What is there already is kept: after an interruption, the same command goes
# on. The last lines are BLEU on test text. FLAGS go to every training, such as
# FLAGS="--steps 300" to try it. PAIRS is how many of the pairs that machines translated are
# looked at (200,000), of which half are read.
set -euo pipefail
data=$1 docs=$2 runs=$3
here=$(dirname "$0")
. "$here/tools.sh"
mkdir -p "$runs"
has() { [ -e "$runs/$1" ]; }

train() { # train RUN FLAGS...
  train_run "$runs/$1" "${device[@]}" --precision bf16 --max-tokens 4096 \
    --validate-every 1000 --save-every 250 --validate-bleu 0 "${@:2}"
}

mixed() { # mixed NAME SOURCE TARGET CORPUS...: one folder of text of several
  # shellcheck disable=SC2086 # languages are words
  has "$1" || tool mix "$runs/$1" "${@:4}" --source $2 --target $3
}

echo "1. more text of the same pairs, and a vocabulary"
for text in "en 1" "en 2" "de 1" "de 2"; do
  read -r language seed <<<"$text"
  has "$language-$seed" || "$PYTHON" "$here/prepare.py" --source "$language" --seed "$seed" \
    "$data" "$runs/$language-$seed" &
done
wait
things='https?:|www\.|@|[{}%`\\/<>]|\d{7,}|[\x{2190}-\x{2bff}\x{1f000}-\x{1ffff}\x{fe0f}]'
plain() { # plain NAME FOLDER: text without addresses, markup, code and emoji
  has "$1" && return
  mkdir "$runs/$1"
  paste <(gzip -cd "$2/train.en.gz") <(gzip -cd "$2/train.de.gz") |
    LC_ALL=C.UTF-8 grep -vP "$things" | tee >(cut -f 2 >"$runs/$1/train.de") |
    cut -f 1 >"$runs/$1/train.en"
  cp "$2"/val.* "$runs/$1"
}
plain everyday "$runs/en-1"
plain docs "$docs"
has en-de.model || vocabulary "$runs/en-de.model" 8000 "$runs"/{everyday,docs}/train.*

echo "2. both directions at once"
mixed both-text "en en de de" "de de en en" "$runs"/{everyday,docs,everyday,docs}
train both --config small --encoder-layers 6 --decoder-layers 2 --d-model 320 --d-ff 1280 \
  --num-heads 5 --vocabulary "$runs/en-de.model" --data "$runs/both-text" --source en-de \
  --target de-en --learning-rate 1.5e-3 --warmup 1000 --steps 12000

echo "3. of what machines translated, the half of which this model is surer"
surest machine "$runs/both" "$docs" "$runs"

train_on() { # train_on NAME MODEL STEPS DECAY: go on with the text of this name
  train "$1" --from "$2" --data "$runs/$1-text" --source "$source" --target "$target" \
    --learning-rate 1e-3 --warmup 500 --steps "$3" --decay "$4" --average 8 --keep-last 10 \
    --patience 100 --alpha 1.6
}

own() { # own NAME MODEL TEXT: its translations of a text that are nearest to the target
  has "$1" && return
  translate --model "$2" --nbest 5 --beam 5 --input "$3/train.$source.gz" \
    --output "$runs/$1.nbest"
  "$PYTHON" "$here/nearest.py" "$runs/$1.nbest" "$3/train.$target.gz" >"$runs/$1.nearest"
  mkdir "$runs/$1"
  cp "$3/train.$source.gz" "$runs/$1"
  mv "$runs/$1.nearest" "$runs/$1/train.$target"
}

direction() { # direction SOURCE TARGET
  local source=$1 target=$2 name=$1-$2
  echo "4. $name"
  mixed "$name-1-text" "$source" "$target" "$runs/$source-1" "$docs" "$runs/machine"
  train_on "$name-1" "$runs/both" 9000 6000

  echo "5. $name, with those of its own translations that are nearest to the text"
  mixed "$name-text" "$source" "$target" "$data" "$docs"
  own "$name-own" "$runs/$name-1" "$runs/$name-text"
  mixed "$name-2-text" "$source" "$target" \
    "$runs/$source-2" "$docs" "$runs/machine" "$runs/$name-own"
  train_on "$name-2" "$runs/$name-1" 6000 5000
  has "$name.safetensors" || tool export int8 "$runs/$name-2" "$runs/$name.safetensors" \
    --calibrate "$runs/$source-1/val.$source.gz"
}

# On a GPU, both directions share it; on a processor, each has half of the cores.
THREADS=$(((${THREADS:-$(nproc)} + 1) / 2))
direction en de &
direction de en
wait $!
for name in en-de de-en; do
  for text in "$runs/${name%-*}-1/test" "$docs/test-human" "$docs/test-unmarked"; do
    echo "$name, $text"
    translate --model "$runs/$name.safetensors" --input "$text.${name%-*}.gz" \
      --reference "$text.${name#*-}.gz" --output "$runs/$name.test"
  done
done
