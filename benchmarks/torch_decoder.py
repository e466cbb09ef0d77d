"""Beam search in PyTorch over the weights of a model of this engine.

This is the code that users of PyTorch write: fused attention, preallocated key/value
caches, keys and values of the memory projected once, candidates by `topk`. Most users
decode a batch until its last sentence ends. With `drop_finished`, sentences that have
ended leave the batch, as they do in this engine.
"""

from __future__ import annotations

import math

import torch
from torch.nn import functional

from minitransformer.engine.ops import LAYER_NORM_EPSILON
from minitransformer.model.transformer import Transformer
from minitransformer.settings.config import BOS_ID, EOS_ID, PAD_ID, UNK_ID


class TorchDecoder:
    def __init__(
        self,
        model: Transformer,
        drop_finished: bool,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.config = model.config
        self.drop_finished = drop_finished
        self.device = torch.device(device)
        self.dtype = dtype
        self.weights = {
            name: torch.from_numpy(
                p.data.T.copy() if p.data.ndim == 2 and "table" not in name else p.data
            ).to(device, dtype)
            for name, p in model.named_parameters()
        }
        self.table = self.weights["embedding.table"]
        positions = torch.from_numpy(model.embedding.reserve(512).data)
        self.positions = positions.to(device, dtype)

    def norm(self, name: str, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        gain, bias = self.weights[f"{name}.gain"], self.weights[f"{name}.bias"]
        width = (self.config.d_model,)
        return functional.layer_norm(
            x + residual, width, gain, bias, LAYER_NORM_EPSILON
        )

    def heads(self, name: str, x: torch.Tensor) -> torch.Tensor:
        projected = functional.linear(x, self.weights[name])
        return projected.unflatten(-1, (self.config.num_heads, -1)).transpose(1, 2)

    def attend(
        self,
        name: str,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        out = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return functional.linear(
            out.transpose(1, 2).flatten(2), self.weights[f"{name}.output"]
        )

    def feed_forward(self, name: str, x: torch.Tensor) -> torch.Tensor:
        w = self.weights
        hidden = functional.linear(
            x, w[f"{name}.weight_1"], w[f"{name}.bias_1"]
        ).relu_()
        return functional.linear(hidden, w[f"{name}.weight_2"], w[f"{name}.bias_2"])

    def embed(self, ids: torch.Tensor, first: int) -> torch.Tensor:
        positions = self.positions[first : first + ids.shape[1]]
        return self.table[ids] * math.sqrt(self.config.d_model) + positions

    def encode(self, source: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.embed(source, 0)
        for i in range(self.config.encoder_layers):
            name = f"encoder.{i}"
            q, k, v = (
                self.heads(f"{name}.self_attention.{part}", x)
                for part in ("query", "key", "value")
            )
            attended = self.attend(f"{name}.self_attention", q, k, v, mask)
            x = self.norm(f"{name}.self_attention_norm", attended, x)
            hidden = self.feed_forward(f"{name}.feed_forward", x)
            x = self.norm(f"{name}.feed_forward_norm", hidden, x)
        return x

    def step(
        self,
        tokens: torch.Tensor,
        position: int,
        caches: list[list[torch.Tensor]],
        memories: list[list[torch.Tensor]],
        mask: torch.Tensor,
    ) -> torch.Tensor:
        """Shapes: tokens [B K] -> logits [B K, V]"""
        x = self.embed(tokens[:, None], position)
        for i in range(self.config.decoder_layers):
            name = f"decoder.{i}"
            cache = caches[i]
            # Self-attention, to the keys and values of earlier positions too.
            for kind, part in enumerate(("key", "value")):
                new = self.heads(f"{name}.self_attention.{part}", x)
                cache[kind][:, :, position : position + 1] = new
            keys, values = (c[:, :, : position + 1] for c in cache)
            q = self.heads(f"{name}.self_attention.query", x)
            attended = self.attend(f"{name}.self_attention", q, keys, values)
            x = self.norm(f"{name}.self_attention_norm", attended, x)
            # Cross-attention: the beams of a sentence share its memory.
            beams = x.view(len(mask), -1, x.shape[-1])
            q = self.heads(f"{name}.cross_attention.query", beams)
            k, v = memories[i]
            attended = self.attend(f"{name}.cross_attention", q, k, v, mask)
            x = self.norm(f"{name}.cross_attention_norm", attended.view_as(x), x)
            hidden = self.feed_forward(f"{name}.feed_forward", x)
            x = self.norm(f"{name}.feed_forward_norm", hidden, x)
        return functional.linear(x.view(len(tokens), -1), self.table)

    @torch.inference_mode()
    def search(
        self, source: torch.Tensor, limits: list[int], beam: int, alpha: float
    ) -> list[list[int]]:
        """Translate source ids [B, S], EOS at their ends: the best tokens of each."""
        with self.device:
            return self._search(source.to(self.device), limits, beam, alpha)

    def _search(
        self, source: torch.Tensor, limits: list[int], beam: int, alpha: float
    ) -> list[list[int]]:
        # Encode the sentences; project keys and values of the memory once.
        config = self.config
        mask = (source != PAD_ID)[:, None, None, :]
        memory = self.encode(source, mask)
        memories = [
            [
                self.heads(f"decoder.{i}.cross_attention.{part}", memory)
                for part in ("key", "value")
            ]
            for i in range(config.decoder_layers)
        ]
        shape = (len(source) * beam, config.num_heads, max(limits), config.key_width)
        caches = [
            [torch.empty(shape, dtype=self.dtype) for _ in "kv"]
            for _ in range(config.decoder_layers)
        ]
        beams = Beams(limits, beam, alpha)
        length = 0
        while beams.sentences:
            # Extend all beams by a token.
            tokens = beams.tokens[:, :, -1].reshape(-1)
            logits = self.step(tokens, length, caches, memories, mask)
            length += 1
            origin = beams.extend(logits)
            # Drop finished sentences, if wanted or at the end.
            if self.drop_finished or bool(beams.over.all()):
                kept = (~beams.over).nonzero().flatten()
            else:
                kept = torch.arange(len(beams.over))
            # Each beam continues the one that it comes from.
            rows = (kept[:, None] * beam + origin[kept]).flatten()
            for cache in caches:
                cache[:] = [reordered(array, rows, length) for array in cache]
            if len(kept) < len(beams.sentences):
                memories = [[m[kept] for m in pair] for pair in memories]
                mask = mask[kept]
            beams.keep(kept)
        return [max(ranked, key=lambda pair: pair[0])[1] for ranked in beams.finished]


def reordered(cache: torch.Tensor, rows: torch.Tensor, length: int) -> torch.Tensor:
    """Return a cache with other beams in its rows, in the same memory."""
    used = cache[:, :, :length].index_select(0, rows)
    cache = cache[: len(rows)]
    cache[:, :, :length] = used
    return cache


class Beams:
    """The K beams of each sentence of a batch, and its finished translations.

    Shapes: tokens [B, K, t], scores [B, K], limit [B], over [B]
    """

    def __init__(self, limits: list[int], beam: int, alpha: float) -> None:
        count = len(limits)
        self.alpha = alpha
        self.sentences = list(range(count))  # on the host, as indices of `finished`
        self.finished: list[list[tuple[float, list[int]]]] = [[] for _ in limits]
        self.limit = torch.tensor(limits)
        self.tokens = torch.full((count, beam, 1), BOS_ID)
        self.scores = torch.full((count, beam), -math.inf)
        self.scores[:, 0] = 0
        self.over = torch.zeros(count, dtype=torch.bool)

    def extend(self, logits: torch.Tensor) -> torch.Tensor:
        """Take the best extensions of each sentence; return the beam of each.

        Shapes: logits [B K, V] -> [B, K]
        """
        log_probs = torch.log_softmax(logits.float(), -1)
        log_probs[:, [PAD_ID, UNK_ID, BOS_ID]] = -math.inf
        # The best 2 K candidates of each sentence: at least K of them do not end.
        count, beam, length = self.tokens.shape
        total = log_probs.view(count, beam, -1)
        total += self.scores[:, :, None]
        best, index = total.flatten(1).topk(2 * beam)
        vocab_size = total.shape[-1]
        origin, token = index // vocab_size, index % vocab_size
        # Those of the first K that end are finished.
        ends = token == EOS_ID
        ended = ends[:, :beam] & best[:, :beam].isfinite() & ~self.over[:, None]
        rows, places = ended.nonzero().unbind(1)
        texts = self.tokens[rows, origin[rows, places], 1:]
        self._finish(rows.tolist(), best[rows, places], texts, length)
        # The best K of the others are the new beams.
        self.scores, order = best.masked_fill(ends, -math.inf).topk(beam)
        origin, token = origin.gather(1, order), token.gather(1, order)
        history = self.tokens.gather(1, origin[:, :, None].expand(-1, -1, length))
        self.tokens = torch.cat([history, token[:, :, None]], 2)
        self._end(length)
        return origin

    def _end(self, length: int) -> None:
        """Mark sentences that are over: full, at their limit, or beyond improvement."""
        ranked = [self.finished[sentence] for sentence in self.sentences]
        full = torch.tensor([len(each) >= self.scores.shape[1] for each in ranked])
        to_beat = torch.tensor(
            [max((score for score, _ in each), default=-math.inf) for each in ranked]
        )
        reachable = self.scores[:, 0] / ((5 + self.limit) / 6) ** self.alpha
        # At the limit, the best beam is finished if nothing else is.
        at_limit = self.limit == length
        bare = [b for b in at_limit.nonzero().flatten().tolist() if not ranked[b]]
        self._finish(bare, self.scores[bare, 0], self.tokens[bare, 0, 1:], length)
        self.over = self.over | at_limit | full | (to_beat >= reachable)

    def _finish(
        self, rows: list[int], scores: torch.Tensor, texts: torch.Tensor, length: int
    ) -> None:
        """Add finished translations, whose scores are divided by the length penalty."""
        penalty = ((5 + length) / 6) ** self.alpha
        for row, score, text in zip(rows, scores.tolist(), texts.tolist(), strict=True):
            self.finished[self.sentences[row]].append((score / penalty, text))

    def keep(self, kept: torch.Tensor) -> None:
        """Keep the beams of some sentences."""
        self.sentences = [self.sentences[b] for b in kept.tolist()]
        self.limit = self.limit[kept]
        self.tokens = self.tokens[kept]
        self.scores = self.scores[kept]
        self.over = self.over[kept]
