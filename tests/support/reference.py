"""The Transformer in plain NumPy: to check the package against, and to learn from.

This file follows "Attention Is All You Need" line by line and shares no code with the
package. Parameters come in a dictionary of arrays; dropout masks come in another, so
that nothing here is random. Every step is an analytic function of the parameters, and
complex numbers therefore pass through: `derivative` relies on that.

Shapes: B batch, S source, T target, D d_model, H heads, V vocabulary.
"""

import math

import numpy as np

PADDING = 0  # the id that fills short sentences up


def sinusoids(length, width):
    """PE(pos, 2i) = sin(pos / 10000^(2i / D)), PE(pos, 2i + 1) = cos(the same) (3.5)"""
    table = np.zeros((length, width))
    for pos in range(length):
        for i in range(width // 2):
            angle = pos / 10000 ** (2 * i / width)
            table[pos, 2 * i : 2 * i + 2] = math.sin(angle), math.cos(angle)
    return table


class ReferenceTransformer:
    """Both stacks for given parameters and given dropout masks.

    `layers` counts those of the encoder and of the decoder. `dropout` has for each site
    what its elements are multiplied by, 0 or 1 / (1 - P_drop); a site that is not named
    has no dropout. `window` is r of restricted self-attention (section 4).
    """

    def __init__(self, parameters, layers, num_heads, dropout=None, window=None):
        self.parameters, self.layers, self.num_heads = parameters, layers, num_heads
        self.dropout, self.window = dropout or {}, window

    def drop(self, x, site):
        return x * self.dropout.get(site, 1.0)  # 5.4

    def embed(self, ids, side):
        """Embeddings times sqrt(D), plus positions (3.4, 3.5). Shapes: -> [B, T, D]"""
        table, length = self.parameters["embedding.table"], ids.shape[1]
        width = table.shape[1]
        positions = self.parameters.get("embedding.positions")
        if positions is None:
            positions = sinusoids(length, width)
        embedded = table[ids] * math.sqrt(width) + positions[:length]
        return self.drop(embedded, f"{side}.embedding")

    def attention(self, name, queries, memory, mask):
        """Multi-head attention (3.2). Shapes: mask to [B, H, T, S] -> [B, T, D]"""

        def heads(x, matrix):
            projected = x @ self.parameters[f"{name}.{matrix}"]  # [B, S, H d]
            split = projected.reshape(*x.shape[:2], self.num_heads, -1)
            return split.transpose(0, 2, 1, 3)  # [B, H, S, d]

        q, k, v = heads(queries, "query"), heads(memory, "key"), heads(memory, "value")
        scores = q @ k.transpose(0, 1, 3, 2) / math.sqrt(q.shape[-1])  # [B, H, T, S]
        weights = np.exp(scores) * mask
        weights = weights / weights.sum(axis=-1, keepdims=True)  # a softmax
        attended = self.drop(weights, f"{name}.weights") @ v  # [B, H, T, d_v]
        side_by_side = attended.transpose(0, 2, 1, 3).reshape(*queries.shape[:2], -1)
        return side_by_side @ self.parameters[f"{name}.output"]

    def feed_forward(self, name, x):
        """max(0, x W_1 + b_1) W_2 + b_2 (equation 2)"""
        w1, b1, w2, b2 = (
            self.parameters[f"{name}.{part}"]
            for part in ("weight_1", "bias_1", "weight_2", "bias_2")
        )
        hidden = x @ w1 + b1
        hidden = self.drop(hidden * (hidden.real > 0), f"{name}.relu")
        return hidden @ w2 + b2

    def add_and_norm(self, name, x, output):
        """LayerNorm(x + Dropout(output)), around each sub-layer `name` (3.1, 5.4)"""
        total = x + self.drop(output, name)
        centred = total - total.mean(axis=-1, keepdims=True)
        variance = (centred**2).mean(axis=-1, keepdims=True)
        gain, bias = (self.parameters[f"{name}_norm.{p}"] for p in ("gain", "bias"))
        return centred / np.sqrt(variance + 1e-6) * gain + bias

    def attention_sublayer(self, name, x, memory, mask):
        return self.add_and_norm(name, x, self.attention(name, x, memory, mask))

    def feed_forward_sublayer(self, name, x):
        return self.add_and_norm(name, x, self.feed_forward(name, x))

    def neighbours(self, length):
        """What restricted self-attention leaves: r / 2 positions on either side (4)."""
        reach = length if self.window is None else self.window // 2
        positions = np.arange(length)
        return abs(positions[:, None] - positions) <= reach

    def logits(self, source, target):
        """Shapes: source ids [B, S], target ids [B, T] -> [B, T, V]"""
        is_token = (source != PADDING)[:, None, None, :]
        see_source = is_token & self.neighbours(source.shape[1])
        # Nobody looks at padding but itself, so that its weights, too, have a sum.
        see_source = see_source | np.eye(source.shape[1], dtype=bool)
        see_target = np.tri(target.shape[1]) * self.neighbours(target.shape[1])

        memory = self.embed(source, "encoder")
        for i in range(self.layers[0]):
            name = f"encoder.{i}"
            memory = self.attention_sublayer(
                f"{name}.self_attention", memory, memory, see_source
            )
            memory = self.feed_forward_sublayer(f"{name}.feed_forward", memory)
        x = self.embed(target, "decoder")
        for i in range(self.layers[1]):
            name = f"decoder.{i}"
            x = self.attention_sublayer(f"{name}.self_attention", x, x, see_target)
            x = self.attention_sublayer(f"{name}.cross_attention", x, memory, is_token)
            x = self.feed_forward_sublayer(f"{name}.feed_forward", x)
        return x @ self.parameters["embedding.table"].T  # the same matrix (3.4)

    def loss(self, source, target, label_smoothing):
        """Cross-entropy with smoothed labels, summed over target tokens (5.4).

        Shapes: source ids [B, S], target ids [B, T + 1] from BOS to EOS
        """
        logits, expected = self.logits(source, target[:, :-1]), target[:, 1:]
        log_probs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
        size = logits.shape[-1]
        labels = (1 - label_smoothing) * np.eye(size)[expected] + label_smoothing / size
        per_token = -(labels * log_probs).sum(axis=-1)  # [B, T]
        return per_token[expected != PADDING].sum()


def derivative(function, parameters, direction, step=1e-20):
    """The derivative of `function(parameters)` in a direction, to the last digits.

    For an analytic function, f(x + ih) = f(x) + ih f'(x) - ..., so that f'(x) is the
    imaginary part over h. Nothing is subtracted: the step can be as small as one likes
    (Squire and Trapp, 1998). `direction` has an array for each parameter that moves.
    """
    moved = {name: parameters[name] + 1j * step * direction[name] for name in direction}
    return function({**parameters, **moved}).imag / step
