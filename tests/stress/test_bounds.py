"""Each input at its bound: memory and time beside what is announced before.

`pytest -m stress -s tests/stress/test_bounds.py` prints the table of docs/scaling.md.
Models are untrained, so that no translation ends before its longest output.
"""

import json
import os
import random
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import ExitStack

import numpy as np
import pytest

from minitransformer.commands.libretranslate import MAX_TOKENS
from minitransformer.commands.serve import MAX_BODY
from minitransformer.engine import ops
from minitransformer.model.kv_cache import FIRST_CAPACITY
from minitransformer.runs import checkpoint
from minitransformer.settings.decoding_config import DecodingConfig
from minitransformer.text.lines import MAX_LINE
from support.scripts import TRAIN, TRANSLATE, memory_of

pytestmark = [
    pytest.mark.stress,
    pytest.mark.skipif(sys.platform != "linux", reason="reads memory from /proc"),
]

SHAPE = (
    "--encoder-layers 2 --decoder-layers 2 --d-model 128 --d-ff 512 --num-heads 4 "
    "--vocab-size 1200 --threads 1 --steps 2 --save-every 1 --log-every 1"
).split()

# What cutting text into word pieces takes, as a multiple of its bytes.
CUTTING = 120

# The memory of the interpreter and the libraries. Units: bytes
PROCESS_MEMORY = 70 << 20

# The libraries of a server, above all the detector of languages.
SERVER_MEMORY = 130 << 20


def words(count, seed=0):
    rng = random.Random(seed)
    return [
        "".join(rng.choices("abcdefghijklmn", k=rng.randint(3, 7)))
        for _ in range(count)
    ]


def write(path, lines):
    path.write_text("".join(line + "\n" for line in lines))
    return path


def peak(command, folder):
    """Run a command; return its output, its peak memory in MB, and its seconds."""
    began = time.monotonic()
    process = subprocess.Popen(
        [str(x) for x in command],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    with process.stdout:
        out = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, out
    return out, usage.ru_maxrss * 1024 / 1e6, time.monotonic() - began


def row(name, announced, measured, seconds):
    """Print a line of the table; what was announced holds, to a tenth."""
    print(f"| {name} | {announced:,.0f} | {measured:,.0f} | {seconds:,.0f} |")
    assert measured < 1.1 * announced


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("bounds")


@pytest.fixture(scope="module")
def model(folder):
    """An untrained model, its path, and what having it in memory takes, in bytes."""
    for side in ("source", "target"):
        lines = [" ".join(words(12, i)) for i in range(2000)]
        write(folder / f"train.{side}", lines)
    text = "--data . --source source --target target --run model-run".split()
    peak([*TRAIN, *SHAPE, *text], folder)
    path = folder / "model-run" / "step-00000002.safetensors"
    loaded = checkpoint.load(path)
    fixed = PROCESS_MEMORY + 4 * loaded.model.config.num_parameters
    [ids] = loaded.tokenizer.encode([" ".join(words(900) * 2)])
    [text] = loaded.tokenizer.decode([ids[:1020]])
    write(folder / "long", [text])
    return path, loaded, fixed


def translation_memory(config, decoding, lengths):
    """The bytes that translating takes besides the model, if no translation ends."""
    # How many sentences are translated at a time, by their length with EOS.
    lengths = np.sort(np.minimum(lengths, decoding.max_input)) + 1
    at_once = np.maximum(decoding.decode_tokens // decoding.beam // lengths, 1)
    at_once = np.minimum(at_once, np.arange(1, len(lengths) + 1))

    # Keys and values of each beam, whose room doubles as a translation gets longer.
    longest = decoding.max_len_a * lengths + decoding.max_len_b
    capacity = 2 ** np.ceil(np.log2(np.maximum(longest, FIRST_CAPACITY)))
    positions = (at_once * (lengths + decoding.beam * capacity)).max(initial=0)
    width = config.num_heads * (config.key_width + config.value_width)
    numbers = positions * width * (config.decoder_layers + 1) + ops.LOGITS_PER_CHUNK
    return 4 * int(numbers)


CUT = {"beam": 1, "max_len_a": 0, "max_len_b": 1}  # no more than is needed


@pytest.mark.parametrize(
    ("name", "source", "cutting", "decoding", "flags"),
    [
        ("2,000 lines of a word", words(2000), 0, {}, ""),
        ("200 lines of a word, beam 50", words(200), 0, {"beam": 50}, ""),
        ("a line of 1,024 tokens (--max-input)", "long", 0, {}, ""),
        ("--score, 1,024 tokens a side", "long", 0, {}, "--score long"),
        ("--alignment, 1,024 tokens", "long", 0, {}, "--alignment"),
        ("a prefix of 1,024 tokens", ["a"], 0, {}, "--prefix long"),
        ("a line of 4 MiB", ["ab " * (MAX_LINE // 3)], CUTTING, CUT, ""),
        ("90 lines of 64 KiB", ["ab " * (1 << 14)] * 90, CUTTING, CUT, ""),
    ],
)
def test_translation(folder, model, name, source, cutting, decoding, flags):
    path, loaded, fixed = model
    source = folder / source if source == "long" else write(folder / "in", source)
    ids = loaded.tokenizer.encode(source.read_text().split("\n")[:-1])
    lengths = np.fromiter(map(len, ids), int)
    command = [*TRANSLATE, "--model", path, "--threads", "1", "--input", source]
    for field, value in decoding.items():
        command += [f"--{field.replace('_', '-')}", value]
    command += ["--output", folder / "out", *flags.split()]
    if "--prefix" in flags:
        lengths = lengths + 1024
    config = DecodingConfig(**decoding)
    announced = translation_memory(loaded.model.config, config, lengths)
    announced += fixed + cutting * MAX_LINE
    row(f"translation: {name}", announced / 1e6, *peak(command, folder)[1:])


def test_the_page(folder, model):
    """A request at its bounds, and 1,500 connections at once."""
    path, loaded, fixed = model
    fixed += SERVER_MEMORY
    command = [*TRANSLATE, "--model", path, "--serve", "18765", "--threads", "1"]
    with subprocess.Popen(
        [str(x) for x in command], stderr=subprocess.PIPE, text=True
    ) as server:
        try:
            assert "open http" in server.stderr.readline()
            text = "\n".join([" ".join(words(60, i)) for i in range(50)])
            for beam in (4, 16):
                tokens = loaded.tokenizer.encode([text])[0][: MAX_TOKENS // beam - 60]
                [asked] = loaded.tokenizer.decode([tokens])
                pair = {"source": "auto", "target": "auto"}
                asked = {"q": asked, **pair, "alternatives": beam - 1}
                body = json.dumps(asked).encode()
                assert len(body) <= MAX_BODY
                url = "http://127.0.0.1:18765/translate"
                json_type = {"Content-Type": "application/json"}
                request = urllib.request.Request(url, body, json_type)
                began = time.monotonic()
                urllib.request.urlopen(request, timeout=600).read()
                seconds = time.monotonic() - began
                decoding = DecodingConfig(beam=beam)
                each = np.full(4, 1024)
                most = translation_memory(loaded.model.config, decoding, each)
                name = f"page: {MAX_TOKENS // beam:,} tokens, beam {beam}"
                measured = memory_of(server.pid, "VmHWM") / 1e6
                row(name, (fixed + most) / 1e6, measured, seconds)
            began = time.monotonic()
            with ExitStack() as stack:
                for _ in range(1500):
                    address = "127.0.0.1", 18765
                    stack.enter_context(socket.create_connection(address, timeout=30))
                seconds = time.monotonic() - began
                measured = memory_of(server.pid, "VmHWM") / 1e6
            row("page: 1,500 connections", (fixed + most) / 1e6, measured, seconds)
        finally:
            server.kill()
