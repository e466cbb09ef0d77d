"""The cost of training: parameters, and operations of matrix products."""

from __future__ import annotations

from minitransformer.model.transformer import Transformer
from minitransformer.settings.config import ModelConfig


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
