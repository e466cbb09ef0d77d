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
# FLAGS="--steps 300" to try it.
set -euo pipefail
data=$1 docs=$2 runs=$3
here=$(dirname "$0")
. "$here/tools.sh"
mkdir -p "$runs"
has() { [ -e "$runs/$1" ]; }

train() { # train RUN FLAGS...
  train_run "$runs/$1" "${device[@]}" --precision bf16 --max-tokens 4096 \
    --validate-every 500 --save-every 100 --validate-bleu 0 "${@:2}"
}

echo "1. more text of the same pairs, and a vocabulary"
for text in {en,de}\ {1,2,3}; do
  read -r language seed <<<"$text"
  has "$language-$seed" || "$PYTHON" "$here/prepare.py" --source "$language" --seed "$seed" \
    "$data" "$runs/$language-$seed" &
done
wait
plain "$runs/en-1" "$runs/everyday"
without _ "$docs" "$runs/docs"
has en-de.model || vocabulary "$runs/en-de.model" 6000 "$runs"/everyday/train.*

echo "2. both directions at once"
has both-text || tool mix "$runs/both-text" "$runs"/everyday{,} --source en de --target de en
train both --config small --encoder-layers 4 --decoder-layers 2 --d-model 320 --d-ff 1280 \
  --num-heads 5 --vocabulary "$runs/en-de.model" --data "$runs/both-text" --source en-de \
  --target de-en --learning-rate 1.5e-3 --warmup 1000 --steps 4000

go_on() { # go_on NAME MODEL TEXT RATE WARMUP STEPS DECAY FLAGS...
  train "$1" --from "$2" --data "$3" --source "$source" --target "$target" \
    --learning-rate "$4" --warmup "$5" --steps "$6" --decay "$7" --average 8 \
    --keep-last 10 --patience 100 --alpha 1.6 "${@:8}"
}

mixed() { # mixed NAME CORPUS...
  has "$1" || tool mix "$runs/$1" "${@:2}" --source "$source" --target "$target"
}

own() { # own NAME MODEL: its translations of the text that are nearest to the reference
  has "$1" && return
  translate --model "$2" --nbest 5 --beam 5 --input "$data/train.$source.gz" \
    --output "$runs/$1.nbest"
  "$PYTHON" "$here/nearest.py" "$runs/$1.nbest" "$data/train.$target.gz" >"$runs/$1.nearest"
  mkdir "$runs/$1"
  cp "$data/train.$source.gz" "$runs/$1"
  mv "$runs/$1.nearest" "$runs/$1/train.$target"
}

direction() { # direction SOURCE TARGET
  local source=$1 target=$2 name=$1-$2 run=$runs/$1-$2
  echo "3. $name: everyday text, made anew for each training"
  go_on "$name-1" "$runs/both" "$runs/$source-1" 1e-3 1500 9000 6000
  go_on "$name-2" "$run-1" "$runs/$source-2" 4e-4 500 3000 2500
  go_on "$name-3" "$run-2" "$runs/$source-3" 4e-4 500 2500 2000

  echo "4. $name: with those of its own translations that are nearest to the text"
  own "$name-own" "$run-3"
  mixed "$name-4-text" "$data" "$run-own"
  go_on "$name-4" "$run-3" "$run-4-text" 4e-4 500 4000 3500 --average-by number

  echo "5. $name: two more layers, documentation, and its own translations of before"
  has "$name-deeper.safetensors" || "$PYTHON" "$here/deepen.py" "$run-4" \
    "$run-deeper.safetensors" --encoder-layers 6
  own "$name-own-again" "$run-4"
  mixed "$name-5-text" "$data" "$run-own-again" "$runs/docs" --repeat 1 1 3
  go_on "$name-5" "$run-deeper.safetensors" "$run-5-text" 7e-4 200 3200 0 \
    --average 4 --average-by number

  echo "6. $name: everyday text again, with less documentation"
  mixed "$name-6-text" "$runs/$source-3" "$run-own-again" "$runs/docs" --repeat 1 3 2
  go_on "$name-6" "$run-5" "$run-6-text" 6e-4 500 4500 2300 --average 4 --average-by number

  has "$name.safetensors" || tool export int8 "$run-6" "$run.safetensors" \
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
