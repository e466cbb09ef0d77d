"""The training loss of section 5 in PyTorch, as its users write it.

The model is `nn.Transformer`, post-norm and without a final norm, with dropout where
this engine has it, one matrix for embeddings and logits, and PyTorch's label-smoothed
loss.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from minitransformer.settings.config import PAD_ID, ModelConfig


class TorchTraining(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        d, rate = config.d_model, config.dropout
        self.embedding = nn.Embedding(config.vocab_size, d)
        nn.init.normal_(self.embedding.weight, 0, d**-0.5)
        self.model = nn.Transformer(
            d,
            config.num_heads,
            config.encoder_layers,
            config.decoder_layers,
            config.d_ff,
            rate,
            batch_first=True,
        )
        self.model.encoder.norm = self.model.decoder.norm = None
        for layer in (*self.model.encoder.layers, *self.model.decoder.layers):
            layer.dropout = nn.Identity()  # inside the feed-forward layer
            layer.self_attn.dropout = 0.0
            if hasattr(layer, "multihead_attn"):
                layer.multihead_attn.dropout = 0.0
        self.dropout = nn.Dropout(rate)
        self.criterion = nn.CrossEntropyLoss(label_smoothing=0.1, ignore_index=PAD_ID)
        self.register_buffer("positions", torch.randn(512, d))
        self.scale = math.sqrt(d)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        embedded = self.embedding(ids) * self.scale + self.positions[: ids.shape[1]]
        return self.dropout(embedded)

    def forward(
        self, source: torch.Tensor, target: torch.Tensor, padded: bool
    ) -> torch.Tensor:
        """The mean loss. Shapes: source [B, S], target [B, T + 1] -> scalar

        `padded` says whether the source has padding, which then is masked.
        """
        inputs, expected = target[:, :-1], target[:, 1:]
        causal = nn.Transformer.generate_square_subsequent_mask(
            inputs.shape[1], device=source.device
        )
        masks = {}
        if padded:
            padding = source == PAD_ID
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
        return torch.optim.Adam(
            self.parameters(), lr=1e-4, betas=(0.9, 0.98), eps=1e-9, fused=True
        )
