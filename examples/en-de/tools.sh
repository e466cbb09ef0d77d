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

without() { # without PATTERN FOLDER OUTPUT: its pairs in which nothing matches
  [ -e "$3" ] && return
  mkdir "$3"
  paste <(gzip -cd "$2/train.en.gz") <(gzip -cd "$2/train.de.gz") |
    LC_ALL=C.UTF-8 grep -vP "$1" | tee >(cut -f 2 >"$3/train.de") |
    cut -f 1 >"$3/train.en"
  cp "$2"/val.* "$3"
}

plain() { # plain FOLDER OUTPUT: its text without addresses, markup, code and emoji
  local things='https?:|www\.|@|[{}%`\\/<>]|\d{7,}|[\x{2190}-\x{2bff}\x{1f000}-\x{1ffff}\x{fe0f}]'
  without "$things" "$@"
}
