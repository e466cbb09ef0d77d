"""Mutated files for the loaders, and what loading many of them costs."""

import json
import random
import resource
import time
from pathlib import Path

from minitransformer.model.parameters import ParameterBuffer
from minitransformer.model.transformer import Transformer
from minitransformer.runs import checkpoint
from minitransformer.runs.checkpoint import Checkpoint
from minitransformer.settings.config import ModelConfig
from minitransformer.text.cache import encoded_corpus, read_corpus
from minitransformer.text.lines import TextPair
from minitransformer.text.tokenizer import Tokenizer

LINES = [f"the cat number {i} sat on the mat" for i in range(60)]
NUMBERS = [0, 1, -1, 7, 2**31, 2**63 - 1, 10**30, 1e308, None, True, "x", [], {}]


def mutated(data: bytes, rng: random.Random) -> bytes:
    """Flip, cut, repeat, overwrite or insert some bytes."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 5, 20))):
        at = rng.randrange(len(out)) if out else 0
        # Headers and lengths stand at the beginning: look there as often as elsewhere.
        at = rng.choice((at, at % 64, at % 2048)) if out else 0
        end = min(len(out), at + rng.choice((1, 2, 8, 100)))
        kind = rng.randrange(6)
        if kind == 0 and out:
            out[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del out[at:end]
        elif kind == 2:
            out[at:at] = out[at:end] * rng.choice((1, 3))
        elif kind == 3:
            out[at:end] = rng.randbytes(end - at)
        elif kind == 4:
            out[at:end] = rng.choice((b"\xff", b"\x00", b"\x7f")) * (end - at)
        else:
            del out[rng.randrange(len(out) + 1) :]
    return bytes(out)


def mutated_json(value: object, rng: random.Random) -> object:
    """Change one value somewhere in a JSON document."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(list(value))
        return {**value, key: mutated_json(value[key], rng)}
    if isinstance(value, list) and value and rng.random() < 0.7:
        at = rng.randrange(len(value))
        return [*value[:at], mutated_json(value[at], rng), *value[at + 1 :]]
    return rng.choice(NUMBERS)


def mutated_header(data: bytes, rng: random.Random) -> bytes:
    """Change a value in the header of a safetensors file, or in the JSON inside it."""
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    del header["__metadata__"]["checksum"]  # so that the other checks are reached
    if rng.random() < 0.6:
        inner = rng.choice(("config", "state", "checksums"))
        document = json.loads(header["__metadata__"][inner])
        header["__metadata__"][inner] = json.dumps(mutated_json(document, rng))
    else:
        header = mutated_json(header, rng)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data[8 + size :]


def checkpoint_with_moments() -> Checkpoint:
    tokenizer = Tokenizer.train(LINES, 40)
    config = ModelConfig(
        vocab_size=40,
        encoder_layers=1,
        decoder_layers=1,
        d_model=8,
        d_ff=8,
        num_heads=2,
    )
    model = Transformer(config)
    parameters = ParameterBuffer(model)
    moments = parameters.data * 0, parameters.data * 0
    return Checkpoint(model, tokenizer, parameters, {}, moments)


def load_mutated_files(folder: Path, count: int, seed: int) -> dict[str, float]:
    """Load `count` mutated files; return how many were refused, the worst figures."""
    rng, folder = random.Random(seed), Path(folder)
    whole_checkpoint = checkpoint_with_moments()
    tokenizer = whole_checkpoint.tokenizer
    path = folder / "whole.safetensors"
    checkpoint.save(path, whole_checkpoint)
    whole = path.read_bytes()
    pair = TextPair(folder / "a", folder / "b")
    for side in (pair.source, pair.target):
        side.write_text("".join(line + "\n" for line in LINES))
    encoded_corpus(pair, tokenizer, folder / "cache")
    [cache] = [p for p in (folder / "cache").iterdir() if p.is_dir()]
    names = sorted(p.name for p in cache.iterdir())
    parts = {name: (cache / name).read_bytes() for name in names}
    victim, slowest, refused = folder / "victim.safetensors", 0.0, 0
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in range(count):
        kind = number % 4
        name = rng.choice(names)
        if kind == 0:
            victim.write_bytes(mutated(whole, rng))
        elif kind == 1:
            victim.write_bytes(mutated_header(whole, rng))
        elif kind == 2:
            piece = mutated(tokenizer.model, rng)
        else:
            (cache / name).write_bytes(mutated(parts[name], rng))
        started = time.perf_counter()
        try:
            if kind < 2:
                checkpoint.load(victim, with_moments=True)
            elif kind == 2:
                Tokenizer(piece).encode(LINES[:2])
            else:
                read_corpus(cache)
        except ValueError as error:
            refused += 1
            if len(str(error).split("\n")) > 1:
                raise AssertionError("expected one line") from error
        slowest = max(slowest, time.perf_counter() - started)
        (cache / name).write_bytes(parts[name])
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "inputs": count,
        "refused": refused,
        "slowest_seconds": slowest,
        "memory_growth_bytes": (after - before) * 1024,
        "file_bytes": len(whole),
    }
