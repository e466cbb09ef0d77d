"""The training of section 5 in PyTorch, as its users write it, from the same weights.

The model is `nn.Transformer`, post-norm and without a final norm, with dropout where
this engine has it, no biases of attention, one matrix for embeddings and logits, and
PyTorch's label-smoothed loss. It begins with the weights of a model of this engine, so
that both compute the same thing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch
from torch import nn

from minitransformer.engine.ops import LAYER_NORM_EPSILON
from minitransformer.model.layers import MultiHeadAttention
from minitransformer.model.transformer import DecoderLayer, EncoderLayer, Transformer
from minitransformer.settings.config import PAD_ID
from minitransformer.text.batches import Batch


class TorchTraining(nn.Module):
    """A model that computes what `ours` computes, with sinusoidal positions."""

    def __init__(self, ours: Transformer, label_smoothing: float = 0.1) -> None:
        super().__init__()
        config = ours.config
        # One matrix for both embeddings and the logits, and the stacks of section 3.1.
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.model = nn.Transformer(
            config.d_model,
            config.num_heads,
            config.encoder_layers,
            config.decoder_layers,
            config.d_ff,
            config.dropout,
            batch_first=True,
            layer_norm_eps=LAYER_NORM_EPSILON,
        )
        # No final norm, no dropout within the feed-forward layer or of attention
        # weights, and attention without biases, as in the paper.
        self.model.encoder.norm = self.model.decoder.norm = None
        for layer in (*self.model.encoder.layers, *self.model.decoder.layers):
            layer.dropout = nn.Identity()
            for attention in attentions(layer):
                attention.dropout = 0.0
                for bias in (attention.in_proj_bias, attention.out_proj.bias):
                    nn.init.zeros_(bias).requires_grad_(False)
        self.dropout = nn.Dropout(config.dropout)
        self.criterion = nn.CrossEntropyLoss(
            label_smoothing=label_smoothing, ignore_index=PAD_ID
        )
        # The same positions and weights as in `ours`.
        positions = ours.embedding.reserve(512).data
        self.register_buffer("positions", torch.from_numpy(positions.copy()))
        self.scale = math.sqrt(config.d_model)
        for array, weights in self.pairs(ours):
            weights.copy_(torch.from_numpy(array))

    def pairs(self, ours: Transformer) -> Iterator[tuple[np.ndarray, torch.Tensor]]:
        """Yield each parameter of `ours` with the same one here, in our layout."""
        yield ours.embedding.table.data, self.embedding.weight.detach()
        layers: list[EncoderLayer | DecoderLayer] = [*ours.encoder, *ours.decoder]
        theirs = [*self.model.encoder.layers, *self.model.decoder.layers]
        for layer, torch_layer in zip(layers, theirs, strict=True):
            yield from layer_pairs(layer, torch_layer)

    def copy_to(self, ours: Transformer) -> None:
        """Give the weights that were learned here to a model of this engine."""
        for array, weights in self.pairs(ours):
            array[...] = weights.numpy()

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        embedded = self.embedding(ids) * self.scale + self.positions[: ids.shape[1]]
        return self.dropout(embedded)

    def forward(
        self, source: torch.Tensor, target: torch.Tensor, padded: bool
    ) -> torch.Tensor:
        """Return the mean loss; if the source is `padded`, its padding is masked.

        Shapes: source [B, S], target [B, T + 1] -> scalar
        """
        # Masks of later positions, and of padding if there is any.
        inputs, expected = target[:, :-1], target[:, 1:]
        causal = nn.Transformer.generate_square_subsequent_mask(
            inputs.shape[1], device=source.device
        )
        masks = {}
        if padded:
            padding = torch.zeros(source.shape, device=source.device)
            padding.masked_fill_(source == PAD_ID, -math.inf)
            masks = {
                "src_key_padding_mask": padding,
                "memory_key_padding_mask": padding,
            }
        output = self.model(
            self.embed(source),
            self.embed(inputs),
            tgt_mask=causal,
            tgt_is_causal=True,
            **masks,
        )
        logits = output.flatten(0, 1) @ self.embedding.weight.T
        return self.criterion(logits, expected.flatten())

    def adam(self) -> torch.optim.Adam:
        trained = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.Adam(
            trained, lr=1e-4, betas=(0.9, 0.98), eps=1e-9, fused=True
        )


class TorchUpdates:
    """Updates of a model, begun from the weights of `ours`, in one of PyTorch's modes.

    A mode that contains "compiled" uses `torch.compile`, and one that ends with "bf16"
    the products of `torch.autocast`.
    """

    def __init__(
        self,
        ours: Transformer,
        threads: int,
        mode: str,
        seed: int = 1,
        label_smoothing: float = 0.1,
    ) -> None:
        torch.manual_seed(seed)
        torch.set_num_threads(threads)
        self.model = TorchTraining(ours, label_smoothing)
        compiled = "compiled" in mode
        self.loss_of = (
            torch.compile(self.model, dynamic=True) if compiled else self.model
        )
        self.optimizer = self.model.adam()
        low = mode.endswith("bf16")
        self.precision = torch.autocast("cpu", torch.bfloat16, enabled=low)

    def update(self, batch: Batch, rate: float = 1e-4) -> float:
        """Do one update, and return the loss before it."""
        self.optimizer.param_groups[0]["lr"] = rate
        self.optimizer.zero_grad()
        with self.precision:
            loss = self.loss_of(*tensors(batch))
        loss.backward()
        self.optimizer.step()
        return loss.item()


def attentions(layer: nn.Module) -> list[nn.MultiheadAttention]:
    return [
        part for part in layer.children() if isinstance(part, nn.MultiheadAttention)
    ]


def layer_pairs(
    ours: EncoderLayer | DecoderLayer, theirs: nn.Module
) -> Iterator[tuple[np.ndarray, torch.Tensor]]:
    """Yield the parameters of a layer as `TorchTraining.pairs` does."""
    blocks = [ours.self_attention]
    norms = [ours.self_attention_norm, ours.feed_forward_norm]
    if isinstance(ours, DecoderLayer):
        blocks.append(ours.cross_attention)
        norms.insert(1, ours.cross_attention_norm)
    for block, attention in zip(blocks, attentions(theirs), strict=True):
        yield from attention_pairs(block, attention)
    for number, norm in enumerate(norms, start=1):
        torch_norm = getattr(theirs, f"norm{number}")
        yield norm.gain.data, torch_norm.weight.detach()
        yield norm.bias.data, torch_norm.bias.detach()
    feed_forward = ours.feed_forward
    yield feed_forward.weight_1.data, theirs.linear1.weight.detach().T
    yield feed_forward.bias_1.data, theirs.linear1.bias.detach()
    yield feed_forward.weight_2.data, theirs.linear2.weight.detach().T
    yield feed_forward.bias_2.data, theirs.linear2.bias.detach()


def attention_pairs(
    ours: MultiHeadAttention, theirs: nn.MultiheadAttention
) -> Iterator[tuple[np.ndarray, torch.Tensor]]:
    joint = theirs.in_proj_weight.detach().chunk(3)
    for ours_part, part in zip((ours.query, ours.key, ours.value), joint, strict=True):
        yield ours_part.data, part.T
    yield ours.output.data, theirs.out_proj.weight.detach().T


def tensors(batch: Batch) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """Return a batch as `TorchTraining.forward` takes it."""
    source = torch.from_numpy(np.asarray(batch.source, np.int64))
    target = torch.from_numpy(np.asarray(batch.target, np.int64))
    return source, target, bool((source == PAD_ID).any())
