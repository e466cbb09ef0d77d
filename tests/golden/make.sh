#!/usr/bin/env bash
# How the files beside this script were made, at version 0.1.0, commit fdf4fd8:
#
#     mkdir /tmp/golden; cd /tmp/golden; PYTHONPATH=CHECKOUT bash make.sh CHECKOUT
#
# Later versions lack some of these flags: it is kept to be read, not to be run again.
set -euo pipefail
checkout=$1

# Short lines of the built-in corpus.
python - <<'END'
from pathlib import Path

from minitransformer.text.grammar.corpus import generate

Path("text").mkdir()
for split, count, drawn in (("train", 500, 6000), ("val", 24, 1000)):
    pairs = [
        pair
        for pair in generate(drawn, split)
        if len(pair[0].split()) <= 6 and not any(c.isdigit() for c in "".join(pair))
    ]
    for side, lines in zip(("en", "de"), zip(*pairs[:count])):
        text = "".join(line + "\n" for line in lines)
        Path(f"text/{split}.{side}").write_text(text, encoding="utf-8")
END

# What the runs have in common. The other normalisations would put 240 kB of
# tables into every vocabulary.
common="--threads 1 --seed 3 --precision fp32 --d-model 8 --num-heads 2
    --vocab-size 120 --normalization identity --warmup 200
    --minutes 1000 --validate-every 500 --validate-bleu 24 --save-every 100
    --keep-last 4 --average 4"
files="--train-source text/train.en --train-target text/train.de
    --val-source text/val.en --val-target text/val.de"

python "$checkout/train.py" --run plain $common $files --encoder-layers 2 \
    --decoder-layers 2 --d-ff 24 --dropout 0.1 --max-tokens 512 --learning-rate 1e-2 \
    --steps 2000 --log-every 100

python "$checkout/train.py" --run early $common $files --encoder-layers 1 \
    --decoder-layers 1 --d-ff 24 --dropout 0.1 --max-tokens 256 --accumulate 2 \
    --clip-norm 1 --steps 60 --log-every 20 --seed 5

python "$checkout/train.py" --run mixture $common --data text --source en de \
    --target de en --tag '<2de>' '<2en>' --weights 2 1 --encoder-layers 1 \
    --decoder-layers 1 --d-ff 24 --dropout 0.1 --max-tokens 512 --learning-rate 1e-2 \
    --steps 2500 --log-every 250

python "$checkout/train.py" --run features $common $files --encoder-layers 1 \
    --decoder-layers 1 --d-ff 16 --d-k 6 --d-v 10 --positions learned \
    --max-positions 56 --attention-window 8 --vocab-type unigram \
    --user-symbols '<num>' --character-coverage 0.999 --dropout 0.05 \
    --attention-dropout 0.05 --relu-dropout 0.05 --max-tokens 256 --accumulate 2 \
    --clip-norm 1.5 --label-smoothing 0.05 --beta2 0.99 --learning-rate 1e-2 \
    --steps 2000 --log-every 250 --best-by bleu --patience 50 --on-nonfinite skip --average-by number --beam 3 \
    --alpha 1.0 --max-len-b 20

# Two checkpoints have Adam's moments, to be resumed from.
rm -f */.training.lock */.processes */best.safetensors
find . -name 'step-*' ! -path ./plain/step-00002000.safetensors \
    ! -path ./early/step-00000060.safetensors -delete
tar --sort=name --mtime=@0 --owner=0 --group=0 --numeric-owner --mode=u=rwX,go=rX \
    --format=ustar -cf - early features mixture plain text | xz -9e > runs.tar.xz

# What they are expected to give: translations, and twenty more updates.
mkdir input
(head -n 5 text/train.en; head -n 5 text/val.en) > input/plain
cp input/plain input/features
(head -n 5 text/train.en | sed 's/^/<2de> /'; head -n 5 text/val.de | sed 's/^/<2en> /') \
    > input/mixture
cat > input/en-de <<'END'
Where is the station?
The old man gives the small child a red apple.
I have never seen such a beautiful garden.
My sister wants to learn German.
It's raining again.
Could you tell me what time it is?
He said that he would come tomorrow, but he didn't.
We need three tickets to Berlin.
The debate is closed.
Who broke the window?
END
for model in plain mixture features en-de; do
    python "$checkout/translate.py" --model $model --input input/$model \
        --output input/$model.json --json --threads 1
done
mkdir resumed
cp -r plain early resumed
for run in "plain 2020" "early 80"; do
    read -r name steps <<< "$run"
    python "$checkout/train.py" --resume resumed/$name --steps $steps --log-every 1 \
        --threads 1
done

python - <<'END'
import hashlib
import json
from pathlib import Path

import numpy as np
import threadpoolctl
from safetensors.numpy import load_file


def lines(path):
    return Path(path).read_text(encoding="utf-8").splitlines()


def translations(model):
    best = [json.loads(x)["translations"][0] for x in lines(f"input/{model}.json")]
    return [[s, t["text"], t["score"]] for s, t in zip(lines(f"input/{model}"), best)]


def updates(name, first):
    """What the updates from `first` on recorded, and the parameters after them."""
    recorded = [json.loads(x) for x in lines(f"resumed/{name}/metrics.jsonl")]
    recorded = [x for x in recorded if x["step"] >= first]
    names = "step", "loss", "gradient_norm", "target_tokens"
    measures = "validation_loss", "validation_accuracy", "validation_bleu"
    tensors = load_file(f"resumed/{name}/step-{first + 19:08}.safetensors")
    tensors = {n: x for n, x in sorted(tensors.items())
               if n != "tokenizer" and not n.startswith("adam.")}
    return {
        "updates": [{n: x[n] for n in names} for x in recorded if "loss" in x],
        "validation": [{n: x[n] for n in measures} for x in recorded if "loss" not in x][-1],
        "checksums": {n: hashlib.sha256(x.tobytes()).hexdigest()[:16]
                      for n, x in tensors.items()},
        "norms": {n: float(np.linalg.norm(x.astype(np.float64)))
                  for n, x in tensors.items()},
    }


[blas] = (x for x in threadpoolctl.threadpool_info() if x["user_api"] == "blas")
simd = np.show_config(mode="dicts")["SIMD Extensions"]
models = "plain", "mixture", "features", "en-de"
expected = {
    "made by": "0.1.0 at fdf4fd8",
    "fingerprint": {
        "numpy": np.__version__,
        "blas": f"{blas['internal_api']} {blas['version']} {blas['architecture']}",
        "simd": " ".join([*simd["baseline"], *simd["found"]]),
    },
    "resumed": {"plain": updates("plain", 2001), "early": updates("early", 61)},
    "translations": {model: translations(model) for model in models},
    "archive": hashlib.sha256(Path("runs.tar.xz").read_bytes()).hexdigest(),
}
text = json.dumps(expected, ensure_ascii=False, separators=(",", ":")) + "\n"
Path("expected.json").write_text(text, encoding="utf-8")
END
