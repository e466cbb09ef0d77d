"""What is fuzzed: for each kind of input, a target that takes any bytes.

A target returns if the bytes are good or are refused as they should be, and raises
anything else. Where a way of input is chosen, the first byte chooses it.
"""

import argparse
import contextlib
import dataclasses
import functools
import gzip
import http.client
import io
import itertools
import json
import linecache
import math
import os
import random
import re
import typing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import sentencepiece

import train
import translate
from minitransformer.cli import printable
from minitransformer.model.parameters import ParameterBuffer
from minitransformer.model.transformer import Transformer
from minitransformer.parsing import trees
from minitransformer.runs import checkpoint
from minitransformer.runs.checkpoint import Checkpoint
from minitransformer.runs.run_directory import RunDirectory
from minitransformer.settings.config import (
    BOS_ID,
    EOS_ID,
    PAD_ID,
    UNK_ID,
    ModelConfig,
    RunConfig,
    TrainingConfig,
)
from minitransformer.settings.decoding_config import DecodingConfig
from minitransformer.settings.options import UsageError, build, given
from minitransformer.settings.presets import find_preset
from minitransformer.settings.text_config import TextConfig, VocabularyConfig
from minitransformer.text import cache
from minitransformer.text.batches import BatchStream
from minitransformer.text.find import text_of
from minitransformer.text.lines import (
    TextPair,
    read_available_lines,
    read_lines,
    text_pairs,
)
from minitransformer.text.own_vocabulary import read_own_vocabulary
from minitransformer.text.split import read_pairs
from minitransformer.text.tokenizer import Tokenizer
from minitransformer.training import plot
from minitransformer.training.loss_scale import LossScale
from minitransformer.training.progress import Progress, TrainingState
from minitransformer.translation import batch_translation, serve
from minitransformer.translation.incremental_decoding import IncrementalDecoder
from minitransformer.translation.lexicon import Lexicon
from minitransformer.translation.translator import Translator
from support.scripts import ROOT

LINES = [f"the cat number {i} sat on the mat" for i in range(60)]
VOCAB = 40
NUMBERS = [0, 1, -1, 7, 2**31, 2**63 - 1, 10**30, 1e308, None, True, "x", [], {}]
NUMBERS += [math.inf, -math.inf, math.nan, 0.5, 1e-320, "\ud800", "\n", 10**400]
REFUSALS = ValueError, UsageError, serve.RequestError, FileNotFoundError


def check_refusal(error: BaseException) -> None:
    """Raise an error again unless it is one of ours, whose message is clear.

    Ours are raised by a statement of this project, and not by a library that it calls.
    """
    innermost = error.__traceback__
    while innermost.tb_next:
        innermost = innermost.tb_next
    place = innermost.tb_frame.f_code.co_filename
    statement = linecache.getline(place, innermost.tb_lineno).split()
    if (
        type(error) not in REFUSALS
        or str(ROOT) not in place
        or statement[:1] != ["raise"]
    ):
        raise error
    message = printable(str(error))  # as commands show it
    if not message or len(message) > 1000:
        raise AssertionError(f"expected a clear message, got {message!r}") from error


@contextlib.contextmanager
def refusals():
    try:
        yield
    except Exception as error:
        check_refusal(error)


def mutated_json(value: object, rng: random.Random) -> object:
    """Change one value somewhere in a JSON document."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(list(value))
        if rng.random() < 0.05:
            return {k: v for k, v in value.items() if k != key}
        return {**value, key: mutated_json(value[key], rng)}
    if isinstance(value, list) and value and rng.random() < 0.7:
        at = rng.randrange(len(value))
        return [*value[:at], mutated_json(value[at], rng), *value[at + 1 :]]
    return rng.choice(NUMBERS)


def mutated_header(data: bytes, rng: random.Random) -> bytes:
    """Change a value in the header of a safetensors file, or in the JSON inside it."""
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    metadata = header.get("__metadata__", {})
    metadata.pop("checksum", None)  # so that the other checks are reached
    if metadata and rng.random() < 0.6:
        inner = rng.choice(list(metadata))
        with contextlib.suppress(ValueError):
            document = json.loads(metadata[inner])
            metadata[inner] = json.dumps(mutated_json(document, rng))
    else:
        header = mutated_json(header, rng)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data[8 + size :]


def small_vocabulary(folder: Path, lines: list[str], size: int) -> Tokenizer:
    """A vocabulary of one or two kilobytes, with three rules of normalisation.

    Those of `Tokenizer.train` take 240 kB, which a fuzzer would have to read each time.
    """
    rules, model = folder / "rules.tsv", io.BytesIO()
    rules.write_text("FB01\t66 69\n41\t61\n3000\t20\n")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=model,
        model_type="bpe",
        vocab_size=size,
        normalization_rule_tsv=str(rules),
        minloglevel=2,
        pad_id=PAD_ID,
        unk_id=UNK_ID,
        bos_id=BOS_ID,
        eos_id=EOS_ID,
    )
    return Tokenizer(model.getvalue())


def small_checkpoint(folder: Path) -> Checkpoint:
    """A model that soon ends its translations, with a vocabulary and moments."""
    tokenizer = small_vocabulary(folder, LINES, VOCAB)
    config = ModelConfig(
        vocab_size=VOCAB,
        encoder_layers=1,
        decoder_layers=1,
        d_model=8,
        d_ff=8,
        num_heads=2,
    )
    model = Transformer(config, seed=1)
    parameters = ParameterBuffer(model)
    norm, table = model.decoder[0].feed_forward_norm, model.embedding.table.data
    norm.bias.data[...] = 20 * table[EOS_ID]
    moments = parameters.data * 0, parameters.data * 0
    state = TrainingState({"train": "digest"}).to_json()
    return Checkpoint(model, tokenizer, parameters, state, moments)


class MarkovDecoder(IncrementalDecoder):
    """A decoder whose logits depend on the last token alone: faster than a model."""

    table = np.random.default_rng(3).normal(0, 3, (VOCAB, VOCAB)).astype(np.float32)
    table[:, EOS_ID] += 2

    def __init__(self, model, source, beam_size, shortlist=None):
        self.shortlist = slice(None) if shortlist is None else shortlist

    def step(self, tokens):
        yield self.table[self.shortlist][:, self.shortlist][tokens]

    def select(self, rows):
        pass


@contextlib.contextmanager
def markov_decoder():
    """Let beam search ask `MarkovDecoder` instead of the model."""
    own = batch_translation.incremental_decoder
    batch_translation.incremental_decoder = MarkovDecoder
    try:
        yield
    finally:
        batch_translation.incremental_decoder = own


class Target:
    """`run` takes an input. `seeds` and `words` help a fuzzer to begin."""

    max_length = 1500

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.seeds: list[bytes] = []
        self.words: list[str] = []

    def run(self, data: bytes) -> None:
        raise NotImplementedError

    def mutate(self, data: bytes, rng: random.Random) -> bytes | None:
        """Return changed bytes that keep the format, or None where that cannot be."""
        return None

    def mutate_json(self, data: bytes, rng: random.Random) -> bytes | None:
        try:
            value = json.loads(data[1:])
        except (ValueError, RecursionError):
            return None
        for _ in range(rng.choice((1, 1, 2, 4))):
            value = mutated_json(value, rng)
        return data[:1] + json.dumps(value).encode()


class Checkpoints(Target):
    """Checkpoints: any bytes, hostile settings and weights under seal; lexicons."""

    max_length = 20_000

    def __init__(self, folder):
        super().__init__(folder)
        self.whole = small_checkpoint(folder)
        self.path = folder / "victim.safetensors"
        checkpoint.save(self.path, self.whole)
        whole = self.path.read_bytes()
        config = dataclasses.asdict(self.whole.model.config)
        Lexicon(
            cache.Ragged.from_lists([[i] for i in range(VOCAB)]), np.arange(4, 9)
        ).save(self.path)
        self.seeds = [b"\x00" + whole, b"\x01" + whole]
        self.seeds.append(b"\x02" + self.path.read_bytes())
        self.seeds.append(b"\x03" + json.dumps(config).encode())
        weights = self.whole.parameters.data
        self.seeds.append(b"\x04" + weights.tobytes())
        self.seeds.append(b"\x04" + np.float32([3e38, -3e38]).tobytes())
        self.weights = weights.copy()
        self.words = [*config, "F32", "U8", "dtype", "data_offsets", "__metadata__"]

    def run(self, data):
        kind, data = data[0] % 5, data[1:]
        if kind < 2:
            self.path.write_bytes(data)
            with refusals():
                checkpoint.load(self.path, with_moments=kind == 1)
        elif kind == 2:
            self.path.write_bytes(data)
            with refusals():
                Lexicon.load(self.path, VOCAB).shortlist(np.array([[4, 5], [3, 0]]))
        elif kind == 3:
            self.load_settings(data)
        else:
            self.load_weights(data)

    def load_settings(self, data):
        """Load and use a file that is in order but for the settings in it."""
        try:
            values = json.loads(data)
            config = ModelConfig(**dataclasses.asdict(self.whole.model.config))
            for name, value in values.items():
                if name in vars(config):
                    object.__setattr__(config, name, value)
            stored = dataclasses.replace(self.whole, moments=None)
            stored.model = argparse.Namespace(config=config)
            checkpoint.save(self.path, stored)
        except (ValueError, RecursionError, AttributeError, TypeError):
            return  # no settings that can be written
        self.translate()

    def load_weights(self, data):
        """Load and use a file that is in order, with these bytes as its numbers."""
        whole = self.whole
        values = np.frombuffer(data[: len(data) // 4 * 4], np.float32)
        if len(values):
            whole.parameters.data[...] = np.resize(values, len(self.weights))
            checkpoint.save(self.path, dataclasses.replace(whole, moments=None))
            whole.parameters.data[...] = self.weights
            self.translate()

    def translate(self):
        with refusals(), np.errstate(all="ignore"):
            loaded = checkpoint.load(self.path)
            translator = Translator(loaded.model, loaded.tokenizer)
            config = DecodingConfig(max_len_a=0, max_len_b=3, beam=2)
            lines = ["the cat", "a \u2028 dog sat on the mat"]
            texts = translator.translate(lines, config)
            assert len(texts) == 2, texts

    def mutate(self, data, rng):
        if data[0] % 5 == 3:
            return self.mutate_json(data, rng)
        try:
            return data[:1] + mutated_header(data[1:], rng)
        except (ValueError, RecursionError, AttributeError, TypeError):
            return None


class Tokenizers(Target):
    """SentencePiece models."""

    max_length = 3000

    def __init__(self, folder):
        super().__init__(folder)
        self.seeds = [
            small_vocabulary(folder, LINES[:9], 32).model,
            small_vocabulary(folder, ["ab ba"] * 5, 12).model,
        ]
        self.words = ["<unk>", "<s>", "</s>", "<pad>", "<0x41>", "\u2581"]

    def run(self, data):
        own = self.folder / "own.model"
        own.write_bytes(data)
        for read in (Tokenizer, lambda data: read_own_vocabulary(own, ["<x>", "a"])):
            self.use(read, data)

    def use(self, read, data):
        with refusals():
            tokenizer = read(data)
            encoded = tokenizer.encode(["the cat", "\u2028 \U0001f600 \x00"])
            assert len(tokenizer.decode(encoded)) == 2
            for ids in encoded:
                parts = tokenizer.split(ids, 3)
                assert [i for part in parts for i in part] == ids, parts
                assert all(0 <= i < tokenizer.vocab_size for i in ids), ids


class Caches(Target):
    """The files of encoded text, with their checksums in order or not; vocabularies."""

    def __init__(self, folder):
        super().__init__(folder)
        tokenizer = small_vocabulary(folder, LINES, VOCAB)
        self.pair = TextPair(folder / "a", folder / "b")
        for side in (self.pair.source, self.pair.target):
            side.write_text("".join(line + "\n" for line in LINES[:9]))
        cache.encoded_corpus(self.pair, tokenizer, folder / "ids")
        [self.corpus] = [p for p in (folder / "ids").iterdir() if p.is_dir()]
        self.names = sorted(path.name for path in self.corpus.iterdir())
        self.parts = {n: (self.corpus / n).read_bytes() for n in self.names}
        cache.cached_tokenizer(self.pair, 32, folder / "vocabulary", 1)
        [self.vocabulary] = (folder / "vocabulary").glob("*.model")
        files = enumerate(self.parts.values())
        self.seeds = [bytes([i + at]) + part for i, part in files for at in (0, 8)]
        self.seeds.append(b"\x07" + tokenizer.model)
        self.seeds.append(b"\x0f" + tokenizer.model)
        self.words = ["dtype", "uint16", "int32", "dropped_blank", "checksums"]

    def run(self, data):
        kind, data = data[0] % 16, data[1:]
        if kind % 8 >= len(self.names):
            checksum = cache.crc32(data).to_bytes(4, "little")
            self.vocabulary.write_bytes(data + checksum * (kind >= 8))
            with refusals():
                cache.cached_tokenizer(self.pair, 32, self.vocabulary.parent, 1)
            return
        name = self.names[kind % 8]
        (self.corpus / name).write_bytes(data)
        if kind >= 8 and name != "corpus.json":
            header = json.loads(self.parts["corpus.json"])
            header["checksums"][name] = cache.crc32(data)
            (self.corpus / "corpus.json").write_text(json.dumps(header))
        try:
            with refusals():
                self.use(cache.read_corpus(self.corpus))
        finally:
            for changed in {name, "corpus.json"}:
                (self.corpus / changed).write_bytes(self.parts[changed])

    def use(self, corpus):
        stream = BatchStream(corpus, TrainingConfig(max_tokens=64))
        for _ in range(3):
            next(stream)

    def mutate(self, data, rng):
        return self.mutate_json(data, rng) if data[0] % 8 == 0 else None


class Settings(Target):
    """config.json of a run, and settings files in JSON and TOML."""

    def __init__(self, folder):
        super().__init__(folder)
        self.run_directory = RunDirectory(folder)
        for name in "ab":
            (folder / name).write_text("x\n")
        text = {"train": (str(folder / "a"), str(folder / "b"))}
        tiny = build(ModelConfig, find_preset("tiny")[1], {})
        parts = TrainingConfig(), DecodingConfig()
        whole = RunConfig("tiny", tiny, *parts, text)
        config = json.loads(whole.to_json())
        self.seeds = [
            b"\x00" + json.dumps(config).encode(),
            b"\x01" + json.dumps(config | {"text": {}}).encode(),
            b'\x01{"config": "base", "d_model": 64, "minutes": 1.5}',
            b'\x02config = "tiny"\n[training]\nsteps = 3\nminutes = 1e3\n',
        ]
        two = {**text, "train 2": text["train"]}
        mixed = RunConfig(
            "tiny", tiny, *parts, two, VocabularyConfig(), (1, 2), ("<a>", "")
        )
        self.seeds.append(b"\x00" + mixed.to_json().encode())
        named = "model", "training", "decoding", "vocabulary"
        fields = [x for part in named for x in config[part]]
        self.words = [*config, *fields, "null", "NaN", "Infinity", "-Infinity", "true"]

    def run(self, data):
        kind, data = data[0] % 3, data[1:]
        if kind == 0:
            self.run_directory.config.write_bytes(data)
            with refusals():
                settings = self.run_directory.read_config()
                pairs = text_pairs(settings.text)
                assert pairs.keys() == settings.text.keys()
                assert "train" in text_of(settings, self.folder)
                again = RunConfig.from_json(settings.to_json())
                assert again == settings, (again, settings)
            return
        path = self.folder / ("x.json" if kind == 1 else "x.toml")
        path.write_bytes(data)
        with refusals():
            _, preset = find_preset(str(path))
            for cls in (ModelConfig, TrainingConfig, DecodingConfig, VocabularyConfig):
                build(cls, preset, {})

    def mutate(self, data, rng):
        return self.mutate_json(data, rng)


class Progresses(Target):
    """metrics.jsonl, the ids of a run's processes, and the state of a run."""

    def __init__(self, folder):
        super().__init__(folder)
        self.run_directory = run = RunDirectory(folder)
        values = {"epoch": 0, "loss": 3.5, "learning_rate": 1e-3, "gradient_norm": 1.5}
        values |= {"source_tokens_per_second": 9, "target_tokens_per_second": 8}
        for step in (1, 2):
            run.record(step, **values, seconds=1.5 * step)
        run.record(2, validation_loss=3.0, validation_bleu=5.5, seconds=3.0)
        state = json.dumps(TrainingState({"train": "digest"}).to_json()).encode()
        whole = run.metrics.read_bytes()
        self.seeds = [b"\x00" + whole, b"\x00" + whole.split(b"\n")[0]]
        self.seeds += [b"\x01[1, 2]", b"\x02" + state]
        self.seeds.append(b"\x02" + state.replace(b"null", b"[2.0, 3]"))
        self.words = [*values, *json.loads(state), "validation_loss", "test_bleu"]
        pair = TextPair(folder / "a", folder / "b")
        for side in (pair.source, pair.target):
            side.write_text("".join(line + "\n" for line in LINES[:9]))
        tokenizer = small_vocabulary(folder, LINES, VOCAB)
        self.corpus = cache.encoded_corpus(pair, tokenizer, folder / "ids")

    def run(self, data):
        kind, data = data[0] % 3, data[1:]
        run = self.run_directory
        if kind == 0:
            run.metrics.write_bytes(data)
            plot.screen([run], list(plot.QUANTITIES), 80)
            run.truncate_metrics(1)
            assert all(record["step"] <= 1 for record in run.read_metrics())
        elif kind == 1:
            (self.folder / ".processes").write_bytes(data)
            assert all(type(x) is int for x in run.processes())
        else:
            try:
                stored = json.loads(data)
            except (ValueError, RecursionError):
                return
            with refusals():
                self.resume(stored)

    def resume(self, stored):
        """Go on with a run as train.py does, for one batch and one report."""
        state = TrainingState.from_json(stored)
        training = TrainingConfig(max_tokens=64)
        stream = BatchStream(self.corpus, training, state.epoch, state.position)
        progress = Progress(state, LossScale(np, "fp16", state.loss_scale))
        before = state.step
        one = np.float32(1)
        progress.add([next(stream)], stream, 1e-3, one, one, np.True_)
        assert state.step == before + 1
        progress.synchronize()
        state.window.seconds += 0.01
        progress.report()
        json.dumps(state.to_json())
        assert state.validations_since_best >= 0
        assert not state.best_loss < -math.inf

    def mutate(self, data, rng):
        if data[0] % 3:
            return self.mutate_json(data, rng)
        lines = data[1:].split(b"\n")
        at = rng.randrange(len(lines))
        changed = self.mutate_json(b"\x00" + lines[at], rng)
        if changed is None:
            return None
        return data[:1] + b"\n".join([*lines[:at], changed[1:], *lines[at + 1 :]])


class Connection:
    """A socket that has received some bytes, and keeps what is sent."""

    def __init__(self, data: bytes) -> None:
        self.data, self.sent = data, bytearray()

    def makefile(self, mode="rb", buffering=-1):
        return io.BufferedReader(io.BytesIO(self.data))

    def sendall(self, data):
        self.sent += bytes(data)

    send = sendall

    def settimeout(self, seconds):
        pass

    def setsockopt(self, *option):
        pass

    def shutdown(self, how):
        pass

    def close(self):
        pass


class Answer:
    """A socket for http.client, from which an answer is read."""

    def __init__(self, file: io.BytesIO) -> None:
        self.file = file

    def makefile(self, *mode):
        return self.file


class Unclosed(io.BytesIO):
    def close(self):
        pass


def post(path: str, body: bytes, *headers: str) -> bytes:
    lines = f"POST {path} HTTP/1.1", "Host: localhost:8000", *headers
    lines = *lines, "Content-Type: application/json", f"Content-Length: {len(body)}"
    return "\r\n".join((*lines, "", "")).encode() + body


class Requests(Target):
    """Whole connections to the translation page, with and without a token."""

    # Statuses that say what is wrong with a request, or that all is well.
    statuses = (200, 400, 401, 403, 404, 405, 411, 413, 414, 415, 431, 501, 503, 505)

    def __init__(self, folder):
        super().__init__(folder)
        whole = small_checkpoint(folder)
        translator = Translator(whole.model, whole.tokenizer)
        short = DecodingConfig(max_len_a=0, max_len_b=3)
        self.servers = [
            serve.Server("127.0.0.1", 0, translator, short) for _ in range(2)
        ]
        self.servers[1].token = "secret"
        for server in self.servers:
            server.server_close()  # nobody connects to it
        text = b'{"text": "the cat\\nsat", "beam": 2, "nbest": 2}'
        token = "Authorization: Bearer secret"
        requests = [
            b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
            b"GET /?token=secret HTTP/1.0\r\n\r\n",
            b"GET /nothing\r\n\r\n",
            b"HEAD / HTTP/1.1\r\nHost: x\r\n\r\n",
            post("/translate", text),
            post("/attention", b'{"text": "the mat"}'),
            post("/translate", text, "Connection: keep-alive"),
            post("/translate", text, "Expect: 100-continue"),
            post("/translate", text, "Transfer-Encoding: chunked"),
        ]
        requests.append(requests[0] + requests[4] + requests[5])
        self.seeds = [b"\x00" + request for request in requests]
        self.seeds.append(b"\x01" + post("/translate", text, token))
        self.seeds.append(b"\x01" + post("/attention", text, token))
        self.words = "Host: |Content-Length: |Connection: keep-alive|HTTP/1.1".split(
            "|"
        )
        self.words += [
            "/translate",
            "/attention",
            '"text"',
            '"beam"',
            '"nbest"',
            "POST",
        ]
        self.words += ["\\ud800", "\r\n\r\n", "application/json", "charset=", "OPTIONS"]

    def run(self, data):
        server, data = self.servers[data[0] % 2], data[1:]
        connection = Connection(data)
        with markov_decoder():
            serve.Handler(connection, ("127.0.0.1", 9), server)
        assert server._admitted._value == 1 + serve.MAX_WAITING
        self.check(data, Unclosed(connection.sent))

    def check(self, data, sent):
        """Every answer is whole, and of a kind that a client can rely on."""
        while head := sent.read(5):
            if head != b"HTTP/":  # an answer to HTTP/0.9, which has no headers
                first = data.split(b"\n")[0]
                later = re.fullmatch(rb"\S+ \S+ HTTP/1\.\d{1,10}\r?", first)
                assert not later, (head, data[:50])
                return
            sent.seek(-5, 1)
            method = "HEAD" if data.startswith(b"HEAD ") else None
            answer = http.client.HTTPResponse(Answer(sent), method=method)
            answer.begin()
            assert answer.status in self.statuses, answer.status
            body = answer.read()
            if answer.status == 200 and answer.headers["Content-Type"] != (
                "text/html; charset=utf-8"
            ):
                assert "lines" in (found := json.loads(body)) or "source" in found
            if length := answer.headers["Content-Length"]:
                assert method or int(length) == len(body)

    def mutate(self, data, rng):
        head, gap, body = data.partition(b"\r\n\r\n")
        changed = self.mutate_json(b"\x00" + body, rng) if gap else None
        if changed is None:
            return None
        length = b"Content-Length: %d" % (len(changed) - 1)
        head = re.sub(rb"Content-Length: \d+", length, head)
        return head + gap + changed[1:]


class Lines(Target):
    """Text to translate: from files, plain and .gz, and pipes, to every output."""

    max_length = 300

    def __init__(self, folder):
        super().__init__(folder)
        whole = small_checkpoint(folder)
        model, tokenizer = whole.model, whole.tokenizer
        self.translator = Translator(model, tokenizer)
        lexicon = Lexicon(
            cache.Ragged.from_lists([[i] for i in range(VOCAB)]), np.arange(4, VOCAB)
        )
        self.shortlisted = Translator(model, tokenizer, lexicon=lexicon)
        text = "\n".join(LINES[:3]).encode()
        odd = "\ufeffthe\u2028cat\r\n\n \t\x00\x85mat \U0001f600\u0301".encode()
        packed = gzip.compress(text, mtime=0)
        self.seeds = [bytes([way, 5]) + text for way in range(0, 256, 5)]
        self.seeds += [bytes([way, 200]) + odd for way in range(8)]
        self.seeds.append(b"\x02\x05" + packed)
        self.words = ["\u2028", "\r\n", "\ufeff", "\u2581", "the cat", "\x85", "\xff"]

    def run(self, data):
        if len(data) < 2:
            return
        way, size, data = data[0], data[1], data[2:]
        with refusals():
            chunks = list(self.read(way % 4, 1 + size % 8, data))
            lines = list(itertools.chain.from_iterable(chunks))
            if way % 4 in (0, 3):
                assert len(lines) == data.count(b"\n") + (data[-1:] not in (b"\n", b""))
            config = DecodingConfig(
                beam=1 + size % 4,
                nbest=1 + (size % 4) // 2,
                max_len_a=0,
                max_len_b=2,
                max_input=1 + size // 4,
                long_input=("split", "truncate", "error")[way // 4 % 3],
                decode_tokens=256,
            )
            translator = self.shortlisted if way & 128 else self.translator
            if way // 16 % 4 == 3:
                found = translator.score(lines, lines[::-1], config)
                assert len(found) == len(lines)
            else:
                self.translate(translator, lines, config, way // 16 % 4)

    def read(self, way, limit, data):
        if way == 3:
            reader, writer = os.pipe()
            with open(writer, "wb") as file:
                file.write(data)
            try:
                yield from read_available_lines(reader, limit)
            finally:
                os.close(reader)
            return
        path = self.folder / ("x.gz" if way else "x")
        path.write_bytes(gzip.compress(data, 1) if way == 1 else data)
        lines = read_lines(path)
        while part := list(itertools.islice(lines, limit)):
            yield part

    def translate(self, translator, lines, config, output):
        """Translate, write every line in one of three forms and read them again."""
        encoded = translator.encode(lines, config)
        if config.long_input == "split":
            for line, parts in zip(lines, encoded, strict=True):
                whole = [i for part in parts for i in part]
                assert whole == translator.tokenizer.encode([line])[0]
                assert all(len(part) <= config.max_input for part in parts)
        with markov_decoder():
            found = translator.hypotheses(lines, config)
        args = argparse.Namespace(
            json=output == 1, nbest=1 if output == 0 else 2, alignment=False
        )
        for number, (line, best) in enumerate(zip(lines, found, strict=True)):
            texts = translator.text(best)
            written = "".join(translate.output_lines(args, number, texts, best))
            written.encode()
            answers = written.removesuffix("\n").split("\n")
            assert written.endswith("\n")
            assert len(answers) == (len(texts) if output == 2 else 1), written
            if output == 1:
                answer = json.loads(written)
                assert [x["text"] for x in answer["translations"]] == texts
                assert answer["line"] == number
            if not line.strip():
                assert texts[0] == "" or translator.tokenizer.encode([line])[0]


class Trees(Target):
    """Bracketed trees, sequences that a parser may write, and lists of pairs."""

    max_length = 300

    def __init__(self, folder):
        super().__init__(folder)
        tree = b"(TOP (S (NP-SBJ-1 (DT the) (NN cat)) (VP (VBZ sits)) (. .)))"
        self.seeds = [
            b"\x00" + tree,
            b"\x01bS bNP DT NN eNP bVP VBZ eVP . eS\nthe cat sits .",
            b"\x02a\tb\nc\td\te",
        ]
        self.words = ["-NONE-", "-LRB-", "TOP", "bNP", "eNP", "``", "12"]

    def run(self, data):
        kind, data = data[0] % 3, data[1:]
        path = self.folder / "x"
        if kind == 1:
            text = data.decode("utf-8", "replace")
            sequence, _, sentence = text.partition("\n")
            words = sentence.split()
            tree = trees.restore_tree(sequence, words)
            assert trees.words(tree) == words, tree
            return
        path.write_bytes(data)
        with refusals():
            if kind == 2:
                read_pairs(path)
                return
            for tree in map(trees.normalise_tree, trees.read_trees(path)):
                assert len(list(trees.spans(tree))) * 2 <= len(tree)
                trees.bracket_tree(tree)
                words = trees.words(tree)
                sequence = trees.linearise_tree(tree)
                assert trees.words(trees.restore_tree(sequence, words)) == words


@dataclass
class Program:
    """A script's own parser of arguments, and what it builds of them."""

    parse: object
    configs: tuple[type, ...]


class Arguments(Target):
    """The command lines of train.py and translate.py, a line for each argument."""

    max_length = 200
    programs = (
        Program(translate.parse_arguments, (DecodingConfig,)),
        Program(
            train.parse_arguments,
            (TextConfig, ModelConfig, TrainingConfig, DecodingConfig),
        ),
    )

    def __init__(self, folder):
        super().__init__(folder)
        self.seeds = [
            b"\x00--beam\n5\n--nbest\n3\n--json\na sentence",
            b"\x00--model\nx\ny\n--max-len-a\n1.5\n--serve",
            b"\x00-i\nx\n--reference\ny\n--alpha\n0.6",
            b"\x01--config\nbase\n--d-model\n64\n--steps\n3\n--lr\n1e-3",
            b"\x01--resume\nx\n--minutes\n2",
            b"\x01--train-source\nx\n--train-target\ny\n--ranks\n2",
        ]
        names = "beam nbest alpha max-len-a max-len-b long-input json score serve host"
        self.words = [f"--{name}" for name in names.split()]
        self.words += [
            "--d-model",
            "--num-heads",
            "--gpus",
            "inf",
            "nan",
            "1e999",
            "--",
        ]

    def run(self, data):
        program = self.programs[data[0] % 2]
        arguments = os.fsdecode(data[1:].replace(b"\x00", b"")).split("\n")
        said = io.StringIO()
        try:
            with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
                args = program.parse(arguments)
        except SystemExit as ended:
            code, last = ended.code, said.getvalue().rstrip("\n").split("\n")[-1]
        else:
            with refusals():
                for cls in program.configs:
                    build(cls, {}, given(args, cls))
            return
        assert code == 0 or (code == 2 and ": error: " in last), (code, last)
        assert last.isprintable(), last


def hasten() -> None:
    """Spare what costs more than the code under test: threads, types of settings.

    Text is encoded line by line instead of by a thread that each call starts.
    """
    typing.get_type_hints = functools.cache(typing.get_type_hints)
    processor = sentencepiece.SentencePieceProcessor
    encode = processor.encode

    def encode_lines(self, lines, **options):
        try:
            return [encode(self, line) for line in lines]
        except RuntimeError as error:  # a lone surrogate, which a list calls so:
            raise TypeError("List elements must be str or bytes") from error

    processor.encode = encode_lines


TARGETS: dict[str, type[Target]] = {
    "checkpoints": Checkpoints,
    "tokenizers": Tokenizers,
    "caches": Caches,
    "settings": Settings,
    "metrics": Progresses,
    "requests": Requests,
    "lines": Lines,
    "trees": Trees,
    "arguments": Arguments,
}
