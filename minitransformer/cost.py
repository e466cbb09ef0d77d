"""What a model costs: parameters by block, and operations of a training step."""

from __future__ import annotations

import math

from minitransformer import ops
from minitransformer.config import ModelConfig
from minitransformer.data import BatchStream
from minitransformer.parallel import ThreadedModel
from minitransformer.transformer import Transformer

# What the interpreter and the libraries take. Units: bytes
PROCESS = 70 << 20


def parameters_by_block(model: Transformer) -> dict[str, int]:
    """Count parameters: the shared embedding, positions if learned, each stack."""
    counts: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        block = "positions" if name == "embedding.positions" else name.split(".")[0]
        counts[block] = counts.get(block, 0) + parameter.data.size
    return counts


def training_flops(config: ModelConfig, source_length: float, length: float) -> float:
    """Floating-point operations of one sentence pair, forward and backward.

    Counts matrix products only, a multiply-add as two; backward costs twice forward.

    Shapes: source_length S and length T are (mean) tokens of the two sides
    """
    d, h = config.d_model, config.num_heads
    keys, values = h * config.key_width, h * config.value_width
    feed_forward = 2 * d * config.d_ff

    def attention(queries: float, memory: float) -> float:
        projections = queries * d * (keys + values) + memory * d * (keys + values)
        return projections + queries * memory * (keys + values)

    encoder = attention(source_length, source_length) + source_length * feed_forward
    decoder = (
        attention(length, length)
        + attention(length, source_length)
        + length * feed_forward
    )
    products = (
        config.encoder_layers * encoder
        + config.decoder_layers * decoder
        + length * d * config.vocab_size
    )
    return 3 * 2 * products


def training_memory(config: ModelConfig, tokens: int, num_threads: int) -> int:
    """About how much memory training takes, to a fifth or so. Units: bytes

    Parameters, gradients and two moments; and either the activations of `tokens` tokens
    a side, in work at once, with each thread's logits, or, as they go, the gradients of
    the other threads' replicas. All float32.
    """
    d, inner = config.d_model, config.d_ff
    encoder = config.encoder_layers * (8 * d + inner) + 2 * d
    decoder = config.decoder_layers * (13 * d + inner) + 2 * d
    rows = max(ops.LOGITS_PER_CHUNK // config.vocab_size, ops.MIN_ROWS_PER_CHUNK)
    rows = min(rows, math.ceil(tokens / num_threads))
    logits = num_threads * (rows + 2 * d) * config.vocab_size
    replicas = (num_threads - 1) * config.num_parameters
    in_work = max(tokens * (encoder + decoder) + logits, replicas)
    return 4 * (4 * config.num_parameters + in_work) + PROCESS


def summary(
    model: Transformer, stream: BatchStream, accumulate: int, threads: ThreadedModel
) -> list[str]:
    """Lines that say what training this model on these batches takes.

    Tokens and operations are means of an update, padding not counted.
    """
    corpus, pairs, blocks = stream.corpus, stream.pairs, parameters_by_block(model)
    source = float(corpus.source.lengths[pairs].mean() + 1)
    target = float(corpus.target.lengths[pairs].mean() + 1)
    sentences = len(pairs) / len(stream) * accumulate
    flops = training_flops(model.config, source, target) * sentences
    parts = ", ".join(f"{name} {count:,}" for name, count in blocks.items())
    at_once = min(stream.training.max_tokens, threads.tokens_at_once)
    memory = training_memory(model.config, at_once, threads.num_threads)
    return [
        f"parameters  {sum(blocks.values()):,}: {parts}",
        f"text        {len(pairs):,} pairs, {len(stream):,} batches an epoch, "
        f"{stream.padding_share():.1%} padding; left out: {corpus.dropped_blank:,} "
        f"blank, {len(corpus) - len(pairs):,} longer than "
        f"{stream.training.max_length} tokens",
        f"update      {source * sentences:,.0f} source + {target * sentences:,.0f} "
        f"target tokens, {flops / 1e9:,.1f} GFLOP",
        f"memory      about {memory / 1e6:,.0f} MB",
    ]
