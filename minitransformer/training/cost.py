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

    A multiply-add is two operations. Lengths are mean tokens of a source and a target.

    Left out is all but matrix products: embeddings, softmax, normalisation, dropout and
    Adam, and the padding of batches.
    """
    d = config.d_model
    widths = config.num_heads * (config.key_width + config.value_width)
    feed_forward = 2 * d * config.d_ff

    # Multiply-adds of multi-head attention: four projections, scores and weighted sums.
    def attention(queries: float, memory: float) -> float:
        return widths * (d * (queries + memory) + queries * memory)

    # A layer of either stack, on all positions.
    encoder = attention(source_length, source_length) + source_length * feed_forward
    decoder = (
        attention(length, length)
        + attention(length, source_length)
        + length * feed_forward
    )

    # The backward pass takes twice as many as the forward pass.
    layers = config.encoder_layers * encoder + config.decoder_layers * decoder
    return 3 * 2 * (layers + length * d * config.vocab_size)


def training_memory(
    config: ModelConfig, tokens: int, num_processes: int, longest: int = 0
) -> int:
    """Estimate how much memory training takes, to about a fifth. Units: bytes

    All numbers are float32. Activations are kept for `tokens` tokens a side, which
    attend to a sentence of the `longest`.

    Left out are the text, which is mapped from disk, the translations of a validation,
    the mean of checkpoints, the buffers of MPI and NCCL, and all that a GPU's libraries
    and recorded graphs keep for themselves.
    """
    # The parameters, two moments, and a gradient for each process.
    vectors = (3 + num_processes) * config.num_parameters

    # The numbers that the layers keep of each token for the backward pass.
    d = config.d_model
    inner = config.d_ff
    weights = config.num_heads * longest
    encoder = config.encoder_layers * (8 * d + inner + weights) + 2 * d
    decoder = config.decoder_layers * (13 * d + inner + 2 * weights) + 2 * d
    tokens = max(tokens, longest * num_processes)
    activations = tokens * (encoder + decoder)

    # The logits of the rows that each process computes at a time.
    rows = ops.rows_per_chunk(config.vocab_size)
    rows = min(rows, math.ceil(tokens / num_processes))
    logits = num_processes * (rows + 2 * d) * config.vocab_size
    return 4 * (vectors + activations + logits) + PROCESS_MEMORY
