"""The cost of training: parameters, operations of matrix products, and memory."""

from __future__ import annotations

import math

from minitransformer.engine import ops
from minitransformer.model.transformer import Transformer
from minitransformer.settings.config import ModelConfig

# Memory of the interpreter and the libraries. Units: bytes
PROCESS_MEMORY = 70 << 20


def parameters_by_block(model: Transformer) -> dict[str, int]:
    """Count the parameters of the embedding, of learned positions and each stack."""
    counts: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        block = "positions" if name == "embedding.positions" else name.split(".")[0]
        counts[block] = counts.get(block, 0) + parameter.data.size
    return counts


def training_flops(config: ModelConfig, source_length: float, length: float) -> float:
    """Count the floating-point operations of training on one sentence pair.

    Only matrix products count. A multiply-add is two operations, and the backward pass
    takes twice as many as the forward pass. Lengths are mean tokens of a source and a
    target.
    """
    d, h = config.d_model, config.num_heads
    widths = h * (config.key_width + config.value_width)
    feed_forward = 2 * d * config.d_ff

    def attention(queries: float, memory: float) -> float:
        projections, scores_and_sums = d * (queries + memory), queries * memory
        return widths * (projections + scores_and_sums)

    encoder = attention(source_length, source_length) + source_length * feed_forward
    decoder = (
        attention(length, length)
        + attention(length, source_length)
        + length * feed_forward
    )
    layers = config.encoder_layers * encoder + config.decoder_layers * decoder
    return 3 * 2 * (layers + length * d * config.vocab_size)


def training_memory(config: ModelConfig, tokens: int, num_processes: int) -> int:
    """Estimate how much memory training takes, to about a fifth. Units: bytes

    All numbers are float32. Parameters, two moments and a gradient for each process are
    there all the time. Added to these are the activations of `tokens` tokens a side and
    each process's logits.
    """
    d, inner = config.d_model, config.d_ff
    encoder = config.encoder_layers * (8 * d + inner) + 2 * d
    decoder = config.decoder_layers * (13 * d + inner) + 2 * d
    rows = ops.rows_per_chunk(config.vocab_size)
    rows = min(rows, math.ceil(tokens / num_processes))
    logits = num_processes * (rows + 2 * d) * config.vocab_size
    vectors = (3 + num_processes) * config.num_parameters
    return 4 * (vectors + tokens * (encoder + decoder) + logits) + PROCESS_MEMORY
