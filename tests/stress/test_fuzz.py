"""Randomly changed input of each kind is used, or refused by one clear line.

A kind has seeds, which are good, and a function that uses such bytes. Seeds are
changed at random. Other errors than ours, slow inputs and long messages are failures.
"""

import contextlib
import gzip
import io
import json
import linecache
import os
import random
import socket
import time

import numpy as np
import pytest

import train
import translate
from minitransformer import api
from minitransformer.cli import printable
from minitransformer.commands import plot, serve, trees
from minitransformer.runs import checkpoint
from minitransformer.runs.run_directory import RunDirectory
from minitransformer.settings.config import ModelConfig, RunConfig, TrainingConfig
from minitransformer.settings.decoding_config import DecodingConfig
from minitransformer.settings.options import UsageError, make_config
from minitransformer.settings.presets import find_preset
from minitransformer.text.lines import read_lines
from minitransformer.text.tokenizer import Tokenizer
from support.models import save_small_run
from support.scripts import ROOT

MAX_SECONDS = 2  # of the processor, for one input
REFUSALS = ValueError, UsageError, serve.RequestError, FileNotFoundError
METRICS = b'{"step": 1, "loss": 3.5, "learning_rate": 1e-3, "seconds": 1.5}\n'
NUMBERS = [0, -1, 2**63, 10**30, 10**400, 1e-320, float("inf"), float("nan"), None]


def check_refusal(error):
    """Raise an error again unless a statement of this project raised it."""
    innermost = error.__traceback__
    while innermost.tb_next:
        innermost = innermost.tb_next
    place = innermost.tb_frame.f_code.co_filename
    statement = linecache.getline(place, innermost.tb_lineno).split()
    ours = str(ROOT) in place and statement[:1] == ["raise"]
    if not (isinstance(error, REFUSALS) and ours):
        raise error
    assert 0 < len(printable(str(error))) <= 1000, "expected a clear message"


def mutated(data, rng):
    """Flip, cut, repeat, overwrite or insert some bytes, at the beginning above all."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 5, 20))):
        at = rng.randrange(len(out) + 1)
        at = rng.choice((at, at % 64, at % 2048))
        end = min(len(out), at + rng.choice((1, 2, 8, 100)))
        part = bytes(out[at:end])
        new = b"", part * 3, rng.randbytes(end - at), b"\xff" * (end - at), b"\n", b"9"
        out[at:end] = rng.choice(new)
    return bytes(out)


def mutated_json(value, rng):
    """Change one value somewhere in a document."""
    if isinstance(value, (dict, list)) and value and rng.random() < 0.9:
        value = value.copy()
        key = rng.choice(list(value) if isinstance(value, dict) else range(len(value)))
        value[key] = mutated_json(value[key], rng)
        return value
    return rng.choice([*NUMBERS, True, "x", "\ud800", [], {}])


def mutated_document(data, rng):
    """Change a value of the JSON in `data`, which may be the header of safetensors."""
    start = data.find(b"{", 0, 9)
    size = int.from_bytes(data[:8], "little") if start == 8 else len(data)
    first, newline, rest = data[start : start + size].partition(b"\n")
    document = json.loads(first)
    document.get("__metadata__", {}).pop("checksum", None)  # to reach other checks
    first = json.dumps(mutated_json(document, rng)).encode()
    text = first + newline + rest
    head = len(text).to_bytes(8, "little") if start == 8 else b""
    return head + text + data[start + size :]


@pytest.fixture
def place(tmp_path):
    """A folder with a run, whose model translates in no time."""
    save_small_run(tmp_path / "run", beam=1, max_len_a=0.0, max_len_b=2)
    return tmp_path


def checkpoints(place):
    run, victim = RunDirectory(place / "run"), place / "victim"

    def use(data):
        victim.write_bytes(data)
        with np.errstate(all="ignore"):
            checkpoint.load(victim)

    return [run.best.read_bytes()], use


def tokenizers(place):
    def use(data):
        tokenizer = Tokenizer(data)
        assert len(tokenizer.decode(tokenizer.encode(["the cat", "\u2028 \x00"]))) == 2

    return [checkpoint.load(RunDirectory(place / "run").best).tokenizer.model], use


def settings(place):
    """The config.json of a run."""
    run = RunDirectory(place / "run")

    def use(data):
        run.config.write_bytes(data)
        found = run.read_config()
        assert RunConfig.from_json(found.to_json()) == found

    config = json.loads(run.config.read_bytes())
    return [json.dumps(config).encode()], use


def presets(place):
    """Files of settings, in JSON and in TOML."""

    def use(data):
        path = place / ("x.json" if data[:1] in b"{[" else "x.toml")
        path.write_bytes(data)
        _, preset = find_preset(str(path))
        for cls in (ModelConfig, TrainingConfig, DecodingConfig):
            make_config(cls, preset, {})

    toml = b'config = "tiny"\n[training]\nsteps = 3\nminutes = 1e3\n'
    return [b'{"config": "base", "d_model": 64, "minutes": 1.5}', toml], use


def metrics(place):
    run = RunDirectory(place / "run")

    def use(data):
        run.metrics.write_bytes(data)
        plot.screen([run], list(plot.QUANTITIES), 80)
        run.truncate_metrics(1)

    return [METRICS, METRICS * 3], use


def requests(place):
    """Whole connections to the translation page."""
    translator = api.load(str(place / "run"))
    server = serve.Server("127.0.0.1", 0, translator, DecodingConfig(max_len_b=2))
    server.server_close()  # nobody connects to it

    def use(data):
        client, other = socket.socketpair()
        with client, other:
            client.sendall(data)
            client.shutdown(socket.SHUT_WR)
            serve.Handler(other, ("127.0.0.1", 9), server)
            other.close()
            answer = b"".join(iter(lambda: client.recv(65536), b""))
        if answer.startswith(b"HTTP/"):  # else one to HTTP/0.9, which has no headers
            status = int(answer.split()[1])
            assert status < 500 or status in (501, 503, 505), answer

    body = b'{"text": "the cat\\nsat", "beam": 1}'
    head = b" HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    length = b"Content-Length: %d\r\n\r\n" % len(body)
    return [b"POST /translate" + head + length + body, b"GET /" + head + b"\r\n"], use


def text(place):
    """Files of text, plain and compressed: a translation for each line."""
    config = DecodingConfig(beam=1, max_len_a=0.0, max_len_b=2, max_input=9)
    translator = api.load(str(place / "run"))

    def use(data):
        path = place / ("x.gz" if data[:2] == b"\x1f\x8b" else "x")
        path.write_bytes(data)
        lines = list(read_lines(path))
        assert len(translator.translate(lines, config)) == len(lines)
        if path.name == "x":
            assert len(lines) == data.count(b"\n") + (data[-1:] not in (b"\n", b""))

    odd = "\ufeffthe\u2028cat\r\n\n \t\x00\x85mat \U0001f600\u0301".encode()
    return [b"the cat\nsat on the mat", odd, gzip.compress(odd)], use


def bracketed(place):
    def use(data):
        (place / "x").write_bytes(data)
        for tree in map(trees.normalise_tree, trees.read_trees(place / "x")):
            words = trees.words(tree)
            sequence = trees.linearise_tree(tree)
            assert trees.words(trees.restore_tree(sequence, words)) == words

    tree = b"(TOP (S (NP-SBJ-1 (DT the) (NN cat)) (VP (VBZ sits)) (. .)))"
    return [tree, tree * 3], use


def arguments(place):
    """The command lines of both scripts, a line for each argument."""
    parsers = translate.parse_arguments, train.parse_arguments

    def use(data):
        flags = os.fsdecode(data.replace(b"\0", b"")).split("\n")
        for parse in parsers:
            said = io.StringIO()
            try:
                with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
                    parse(flags)
            except SystemExit as ended:
                code, last = ended.code, said.getvalue().rstrip("\n").split("\n")[-1]
            else:
                continue
            assert code == 0 or (code == 2 and ": error: " in last), (code, last)
            assert last.isprintable(), last

    return [b"--beam\n5\n--json\na sentence", b"--config\nbase\n--steps\n3"], use


KINDS = [checkpoints, tokenizers, settings, presets, metrics, requests, text]
KINDS += [bracketed, arguments]


def judge(use, data):
    """Use an input, which may be refused, and may not take long."""
    started = time.process_time()
    try:
        use(data)
    except Exception as error:
        check_refusal(error)
    assert time.process_time() - started < MAX_SECONDS


@pytest.mark.parametrize(
    "count", [40, pytest.param(1000, marks=pytest.mark.stress)], ids=["few", "many"]
)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_randomly_changed_input_is_used_or_refused(place, kind, count):
    seeds, use = kind(place)
    for data in seeds:
        use(data)
    rng = random.Random(count)
    for _ in range(count):
        data = rng.choice(seeds)
        if b'{"' in data[:10] and rng.random() < 0.5:
            data = mutated_document(data, rng)
        else:
            data = mutated(data, rng)
        judge(use, data)


# What was not refused once, as short as it could be made.
@pytest.mark.parametrize(
    ("kind", "data"),
    [
        (metrics, b"\xff\x88"),
        (metrics, b"[" * 100_000),
        (metrics, b'{"step": 1, "loss": 1}\n{"step": 2, "loss": 3.5}\n'),
        (metrics, METRICS.replace(b"1e-3", b"NaN")),
        (metrics, METRICS.replace(b"1.5}", b"{}}")),
        (metrics, METRICS.replace(b"1,", b"1" + b"0" * 400 + b",")),
        (presets, b'{"minutes": 1%s}' % (b"0" * 400)),
        (presets, b"[" * 100_000),
        (arguments, b"-\x0c"),
        (bracketed, b"\0" * 256),
    ],
)
def test_what_failed_once_is_refused(place, kind, data):
    judge(kind(place)[1], data)


def test_only_errors_of_this_project_are_refusals():
    for wrong in (int, json.loads):
        with pytest.raises(ValueError, match=r"'x'|Expecting") as error:
            wrong("x")
        with pytest.raises(type(error.value)):
            check_refusal(error.value)
