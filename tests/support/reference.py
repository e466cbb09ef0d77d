"""The Transformer in plain NumPy: to check the package against, and to learn from.

This file follows "Attention Is All You Need" line by line and shares no code with the
package. Parameters come in a dictionary of arrays; dropout masks come in another, so
that nothing here is random. Every step is an analytic function of the parameters, and
complex numbers therefore pass through: `derivative` relies on that. It may also move
the parameters in several directions at once: the dots in shapes are an axis for them.

Shapes: B batch, S source, T target, D d_model, H heads, V vocabulary. In `einsum`,
lower-case letters name the same axes; e is any width, and d that of a head, too.
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

    `config` has the numbers of layers and heads, and r of restricted self-attention
    (section 4). `dropout` has for each site what its elements are multiplied by, 0 or
    1 / (1 - P_drop); a site that is not named has no dropout. `rounded` replaces both
    factors of each product with a matrix of parameters, and `stored` each array that a
    GPU stores. `kink` is how near the input of a ReLU came to 0, where its derivative
    leaps, and `flat` how many times LayerNorm met equal numbers, where its derivative
    is up to 1,000.
    """

    def __init__(self, config, parameters, dropout=None, rounded=None, stored=None):
        self.config = config
        self.parameters = parameters
        self.dropout = dropout or {}
        self.rounded = rounded or (lambda x, matrix: (x, matrix))
        self.stored = stored or (lambda x: x)
        self.kink, self.flat = math.inf, 0

    def drop(self, x, site):
        """Dropout (5.4)"""
        return x * self.dropout.get(site, 1.0)

    def is_smooth(self):
        """Whether rounding is not amplified beyond what properties allow."""
        return self.kink > 1e-11 and self.flat < 2

    def embed(self, ids, side):
        """Embeddings times sqrt(D), plus positions (3.4, 3.5). -> [..., B, T, D]"""
        table, length = self.parameters["embedding.table"], ids.shape[1]
        width = table.shape[-1]
        positions = self.parameters.get("embedding.positions")
        if positions is None:
            positions = sinusoids(length, width)
        positions = positions[..., None, :length, :]  # the same for each sentence
        embedded = table[..., ids, :] * math.sqrt(width) + positions
        return self.stored(self.drop(embedded, f"{side}.embedding"))

    def linear(self, x, weight, bias=None):
        """x W + b. Shapes: x [..., B, T, D], weight [..., D, E], bias [..., E]"""
        out = self.product(x, self.parameters[weight])
        return self.stored(out if bias is None else out + self.vector(bias))

    def product(self, x, matrix):
        """Shapes: x [..., B, T, D], matrix [..., D, E] -> [..., B, T, E]"""
        return np.einsum("...btd,...de->...bte", *self.rounded(x, matrix))

    def vector(self, name):
        """The same vector for each position of each sentence: [..., 1, 1, D]"""
        return self.parameters[name][..., None, None, :]

    def attention(self, name, queries, memory, mask):
        """Multi-head attention (3.2). Shapes: mask [B, 1, T, S] -> [..., B, T, D]"""

        def project(x, matrix):
            heads = self.linear(x, f"{name}.{matrix}")  # side by side
            return heads.reshape(*heads.shape[:-1], self.config.num_heads, -1)

        q, k = project(queries, "query"), project(memory, "key")
        v = project(memory, "value")  # [..., B, S, H, d_v]
        scores = np.einsum("...bthd,...bshd->...bhts", q, k) / math.sqrt(q.shape[-1])
        highest = np.where(mask, scores.real, -np.inf).max(axis=-1, keepdims=True)
        weights = np.exp((scores - highest) * mask) * mask
        weights = weights / weights.sum(axis=-1, keepdims=True)  # a softmax
        weights = self.stored(self.drop(weights, f"{name}.weights"))
        heads = self.stored(np.einsum("...bhts,...bshd->...bthd", weights, v))
        side_by_side = heads.reshape(*heads.shape[:-2], -1)  # [..., B, T, H d_v]
        return self.linear(side_by_side, f"{name}.output")

    def feed_forward(self, name, x):
        """max(0, x W_1 + b_1) W_2 + b_2 (equation 2)"""
        hidden = self.linear(x, f"{name}.weight_1", f"{name}.bias_1")
        self.kink = min(self.kink, abs(hidden.real).min())
        hidden = self.drop(hidden * (hidden.real > 0), f"{name}.relu")
        return self.linear(hidden, f"{name}.weight_2", f"{name}.bias_2")

    def add_and_norm(self, name, x, output):
        """LayerNorm(x + Dropout(output)), around each sub-layer `name` (3.1, 5.4)"""
        total = self.stored(x + self.drop(output, name))
        centred = total - total.mean(axis=-1, keepdims=True)
        variance = (centred**2).mean(axis=-1, keepdims=True)
        self.flat += variance.real.min() < 1e-5
        gain, bias = (self.vector(f"{name}_norm.{part}") for part in ("gain", "bias"))
        return self.stored(centred / np.sqrt(variance + 1e-6) * gain + bias)

    def attention_sublayer(self, name, x, memory, mask):
        return self.add_and_norm(name, x, self.attention(name, x, memory, mask))

    def feed_forward_sublayer(self, name, x):
        return self.add_and_norm(name, x, self.feed_forward(name, x))

    def neighbours(self, length):
        """What restricted self-attention leaves: r / 2 positions on either side (4)."""
        window = self.config.attention_window
        reach = length if window is None else window // 2
        positions = np.arange(length)
        return abs(positions[:, None] - positions) <= reach

    def logits(self, source, target):
        """Shapes: source ids [B, S], target ids [B, T] -> [..., B, T, V]"""
        is_token = (source != PADDING)[:, None, None, :]
        see_source = is_token & self.neighbours(source.shape[1])
        # Nothing else looks at padding, which sees itself so that no row is empty.
        see_source = see_source | np.eye(source.shape[1], dtype=bool)
        see_target = np.tri(target.shape[1]) * self.neighbours(target.shape[1])

        memory = self.embed(source, "encoder")
        for i in range(self.config.encoder_layers):
            name = f"encoder.{i}"
            memory = self.attention_sublayer(
                f"{name}.self_attention", memory, memory, see_source
            )
            memory = self.feed_forward_sublayer(f"{name}.feed_forward", memory)
        x = self.embed(target, "decoder")
        for i in range(self.config.decoder_layers):
            name = f"decoder.{i}"
            x = self.attention_sublayer(f"{name}.self_attention", x, x, see_target)
            x = self.attention_sublayer(f"{name}.cross_attention", x, memory, is_token)
            x = self.feed_forward_sublayer(f"{name}.feed_forward", x)
        table = self.parameters["embedding.table"]  # the same matrix (3.4)
        return self.stored(self.product(x, table.swapaxes(-1, -2)))

    def loss(self, source, target, label_smoothing):
        """Cross-entropy with smoothed labels, summed over target tokens (5.4).

        Shapes: source ids [B, S], target ids [B, T + 1] from BOS to EOS -> [...]
        """
        logits, expected = self.logits(source, target[:, :-1]), target[:, 1:]
        logits = logits - logits.real.max(axis=-1, keepdims=True)
        log_probs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
        size = logits.shape[-1]
        labels = (1 - label_smoothing) * np.eye(size)[expected] + label_smoothing / size
        per_token = -(labels * log_probs).sum(axis=-1)  # [..., B, T]
        return (per_token * (expected != PADDING)).sum(axis=(-2, -1))


def derivative(function, parameters, direction, step=1e-20):
    """The derivative of `function(parameters)` in a direction, to the last digits.

    For an analytic function, f(x + ih) = f(x) + ih f'(x) - ..., so that f'(x) is the
    imaginary part over h. Nothing is subtracted: the step can be as small as one likes
    (Squire and Trapp, 1998). `direction` has an array for each parameter that moves, of
    its shape or, for several directions at once, with one more axis in front.
    """
    moved = {name: parameters[name] + 1j * step * direction[name] for name in direction}
    return function({**parameters, **moved}).imag / step
