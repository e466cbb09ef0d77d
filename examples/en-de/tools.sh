# train.sh and trials.sh source this file, and set `here` before.

. "$here/../train_run.sh"
export PYTHON=${PYTHON:-python}
device=(--device "${DEVICE:-cpu}")
tool() { "$PYTHON" -m minitransformer "$@"; }
translate() { "$PYTHON" translate.py "${device[@]}" "$@"; }

vocabulary() { # vocabulary FILE PIECES TEXT...
  tool vocabulary "$1" "${@:3}" --vocab-size "$2" --user-symbols ⟦{1..9}⟧ \
    --option split_digits=true character_coverage=0.99995 \
    required_chars='%&é…+/*=@#_[]°èáçñ‘”»«'
}

# surest NAME MODEL DOCS RUNS: of the pairs in DOCS that machines translated, those of which
# a model of both directions is surer, in the folder RUNS/NAME. PAIRS of them are looked at
# (200,000), by JOBS processes at a time (1).
surest() {
  local model=$2 docs=$3 folder=$4/$1 scores=$4/$1-scores pairs=${PAIRS:-200000} side part
  [ -e "$folder" ] && return
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
    <(cat "$scores"/to-en.*) "$folder"
}
