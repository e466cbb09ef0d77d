"""The Transformer of "Attention Is All You Need" in one file, with NumPy alone.

    python examples/one_file.py

In a minute it learns to translate from 865 lines of the built-in corpus, and then
translates sentences that are not among them. Read it from top to bottom: text, tape,
operations with their gradients, model, training, beam search. The package computes the
same, faster and for any text. Numbers in brackets are sections of the paper.

Shapes: B sentences, S source words, T target words, H heads, V vocabulary, D width.
"""

import re

import numpy as np

from minitransformer.text.grammar.corpus import generate

# Short sentences of the built-in corpus: only this text comes from the package.
PAIRS = [pair for pair in generate(8000) if len(pair[0]) < 28]
TOKEN = re.compile(r"\w+|[.?]")
WORDS = ["<padding>", "<unknown>", "<begin>", "<end>"]
WORDS += sorted({*TOKEN.findall(str(PAIRS))})
V, PAD, UNKNOWN, BOS, EOS = len(WORDS), *range(4)
LAYERS, HEADS, D, D_FF = 2, 4, 64, 128  # the paper's base model: 6, 8, 512, 2048
RNG = np.random.default_rng(1)


def to_ids(texts, begin=()):
    """Return the places in WORDS of each text's words, then EOS and padding, [B, S]."""
    rows = [[*begin, *map(WORDS.index, TOKEN.findall(x)), EOS] for x in texts]
    longest = max(map(len, rows))
    return np.array([row + [PAD] * (longest - len(row)) for row in rows])


# Automatic differentiation: each operation is written on a tape. Played backwards, each
# turns the gradient of its result into the gradients of its inputs (the chain rule).
TAPE = []
BOTH = ((0, 1), (0, 1))  # sums over sentences and words


def backward(loss):
    """Add to `grad` of every tensor that the loss depends on, and clear the tape."""
    loss.grad = 1.0
    while TAPE:
        result, inputs, vjp = TAPE.pop()
        for tensor, gradient in zip(inputs, vjp(result.grad), strict=True):
            tensor.grad = tensor.grad + gradient  # a tensor may be used several times


class Tensor:
    """An array, and the gradient of the loss with respect to it; and all operations."""

    def __init__(self, data, inputs=(), vjp=None):
        # From the gradient g of this result, vjp computes those of the inputs.
        self.data, self.grad = data, 0.0
        if vjp is not None:
            TAPE.append((self, inputs, vjp))

    def __matmul__(self, weight):
        """x W. Shapes: x [B, T, n], weight [n, m] -> [B, T, m]"""
        x, w = self.data, weight.data

        def vjp(g):
            return g @ w.T, np.tensordot(x, g, BOTH)

        return Tensor(x @ w, (self, weight), vjp)

    def __add__(self, other):
        """The sum with a tensor of the same shape, or with one vector everywhere."""
        axes = (0, 1) if other.data.ndim == 1 else ()
        out = self.data + other.data
        return Tensor(out, (self, other), lambda g: (g, g.sum(axis=axes)))

    def relu(self):
        """max(0, x), whose slope is 1 where x is positive, and 0 elsewhere."""
        x = self.data
        return Tensor(np.maximum(x, 0), (self,), lambda g: (g * (x > 0),))

    def dropout(self, rate):
        """Zero a share of the elements, and scale the others to keep the mean (5.4)."""
        kept = (RNG.random(self.data.shape) >= rate) / (1 - rate)
        return Tensor(self.data * kept, (self,), lambda g: (g * kept,))

    def layer_norm(self, gain, bias):
        """Give each vector mean 0 and variance 1, then multiply and add (3.1)."""
        deviation = np.sqrt(self.data.var(axis=-1, keepdims=True) + 1e-6)
        normal = (self.data - self.data.mean(axis=-1, keepdims=True)) / deviation

        def vjp(g):
            # Each element moves mean and deviation, too: hence the two means.
            d = g * gain.data
            by_deviation = normal * (d * normal).mean(axis=-1, keepdims=True)
            dx = (d - d.mean(axis=-1, keepdims=True) - by_deviation) / deviation
            return dx, (g * normal).sum(axis=(0, 1)), g.sum(axis=(0, 1))

        return Tensor(normal * gain.data + bias.data, (self, gain, bias), vjp)

    def attend(self, keys, values, mask):
        """softmax(Q K^T / sqrt(d_k)) V in each head (equation 1); mask [B, H, T, S]"""
        inputs = (self, keys, values)
        q, k, v = (x.data.reshape(*x.data.shape[:2], HEADS, -1) for x in inputs)
        # How well does each query match each key? Hidden keys get a weight of 0.
        scale = q.shape[-1] ** -0.5
        scores = np.where(mask, np.einsum("bthd,bshd->bhts", q, k) * scale, -1e9)
        p = np.exp(log_softmax(scores))
        out = np.einsum("bhts,bshd->bthd", p, v).reshape(self.data.shape)

        def vjp(g):
            g = g.reshape(q.shape)
            # Of a softmax p: dscores = p * (dp - sum(dp * p)).
            dp = np.einsum("bthd,bshd->bhts", g, v)
            dscores = p * (dp - (dp * p).sum(axis=-1, keepdims=True)) * scale
            dq = np.einsum("bhts,bshd->bthd", dscores, k)
            dk = np.einsum("bhts,bthd->bshd", dscores, q)
            dv = np.einsum("bhts,bthd->bshd", p, g)
            return [x.reshape(*x.shape[:2], -1) for x in (dq, dk, dv)]

        return Tensor(out, inputs, vjp)

    def cross_entropy(self, table, targets, smoothing=0.1):
        """The loss of softmax(x E^T) with smoothed labels, summed over words (5.4)."""
        log_p = log_softmax(self.data @ table.data.T)  # [B, T, V]
        is_word = (targets != PAD)[..., None]
        labels = is_word * ((1 - smoothing) * np.eye(V)[targets] + smoothing / V)

        def vjp(g):
            dlogits = g * (is_word * np.exp(log_p) - labels)  # probability minus label
            return dlogits @ table.data, np.tensordot(dlogits, self.data, BOTH)

        return Tensor(-(labels * log_p).sum(), (self, table), vjp)


def log_softmax(scores):
    scores = scores - scores.max(axis=-1, keepdims=True)
    return scores - np.log(np.exp(scores).sum(axis=-1, keepdims=True))


class Transformer(dict):
    """The model of section 3: a dictionary of parameters, by name and shape."""

    def __missing__(self, key):
        """Make a parameter when it is used for the first time: a matrix is random."""
        name, *shape = key
        values = np.full(shape, float(name.endswith("gain")))  # gains are 1, biases 0
        if len(shape) == 2:  # as Glorot and Bengio do
            values = RNG.uniform(-1, 1, shape) * (6 / sum(shape)) ** 0.5
        self[key] = Tensor(values)
        return self[key]

    def embed(self, ids, rate):
        """One-hot vectors times the matrix and sqrt(D), plus positions (3.4, 3.5)."""
        # PE(pos, 2i) = sin(pos / 10000^(2i / D)), PE(pos, 2i + 1) = cos(the same).
        angle = np.arange(ids.shape[1])[:, None] / 10000 ** (np.arange(0, D, 2) / D)
        positions = np.stack([np.sin(angle), np.cos(angle)], axis=-1).reshape(-1, D)
        x = Tensor(np.eye(V)[ids] * D**0.5) @ self["embedding.table", V, D]
        return (x + Tensor(positions)).dropout(rate)

    def add_and_norm(self, name, x, out, rate):
        """LayerNorm(x + Dropout(out)) (3.1, 5.4)"""
        gain, bias = self[f"{name}_norm.gain", D], self[f"{name}_norm.bias", D]
        return (x + out.dropout(rate)).layer_norm(gain, bias)

    def attention(self, name, x, memory, mask, rate):
        """Multi-head attention from x to memory (3.2.2), then Add & Norm."""
        q, k = x @ self[f"{name}.query", D, D], memory @ self[f"{name}.key", D, D]
        out = q.attend(k, memory @ self[f"{name}.value", D, D], mask)
        return self.add_and_norm(name, x, out @ self[f"{name}.output", D, D], rate)

    def feed_forward(self, name, x, rate):
        """max(0, x W_1 + b_1) W_2 + b_2 (equation 2), then Add & Norm."""
        hidden = x @ self[f"{name}.weight_1", D, D_FF] + self[f"{name}.bias_1", D_FF]
        out = hidden.relu() @ self[f"{name}.weight_2", D_FF, D]
        return self.add_and_norm(name, x, out + self[f"{name}.bias_2", D], rate)

    def __call__(self, source, target, rate=0.0):
        """Run both stacks. Shapes: source [B, S], target [B, T] -> [B, T, D]"""
        is_word = (source != PAD)[:, None, None]  # the encoder sees all words
        not_later = np.tri(target.shape[1]) > 0  # word t sees words up to t
        memory, x = self.embed(source, rate), self.embed(target, rate)
        for name in (f"encoder.{i}" for i in range(LAYERS)):
            attention = f"{name}.self_attention"
            memory = self.attention(attention, memory, memory, is_word, rate)
            memory = self.feed_forward(f"{name}.feed_forward", memory, rate)
        for name in (f"decoder.{i}" for i in range(LAYERS)):
            x = self.attention(f"{name}.self_attention", x, x, not_later, rate)
            x = self.attention(f"{name}.cross_attention", x, memory, is_word, rate)
            x = self.feed_forward(f"{name}.feed_forward", x, rate)
        return x


def train(model, steps, batch_size=64, warmup=400):
    """Update the parameters (section 5), each time with other pairs."""
    sources = to_ids([english for english, _ in PAIRS])
    targets = to_ids([german for _, german in PAIRS], [BOS])
    mean, square = {}, {}
    for step in range(1, steps + 1):
        batch = RNG.choice(len(PAIRS), batch_size)
        source, target = sources[batch], targets[batch]
        # After BOS and each word of the reference, the model predicts the next one.
        outputs = model(source, target[:, :-1], rate=0.1)
        loss = outputs.cross_entropy(model["embedding.table", V, D], target[:, 1:])
        backward(loss)
        num_words = (target[:, 1:] != PAD).sum()
        # The learning rate grows for `warmup` steps and then falls (equation 3).
        rate = D**-0.5 * min(step**-0.5, step * warmup**-1.5)
        # Adam divides a running mean of gradients by the root of that of their squares.
        for key, tensor in model.items():
            g = tensor.grad / num_words
            mean[key] = 0.9 * mean.get(key, 0) + 0.1 * g
            square[key] = 0.98 * square.get(key, 0) + 0.02 * g * g
            root = np.sqrt(square[key] / (1 - 0.98**step)) + 1e-9  # both begin at 0
            tensor.data = tensor.data - rate * mean[key] / (1 - 0.9**step) / root
            tensor.grad = 0.0
        if step % 100 == 0:
            print(f"step {step}  loss {loss.data / num_words:.3f} a word", flush=True)


def translate(model, text, beam_size=4, alpha=0.6):
    """Return the translation that beam search (6.1) finds best, and its score."""
    beams, finished = [(0.0, [BOS])], []
    while len(finished) < beam_size and len(beams[0][1]) < 50:
        # The log-probability of each beam with each word after it.
        source, ids = to_ids([text] * len(beams)), np.array([ids for _, ids in beams])
        logits = model(source, ids).data[:, -1] @ model["embedding.table", V, D].data.T
        log_p = log_softmax(logits) + [[x] for x, _ in beams]
        log_p[:, :EOS] = -np.inf  # padding, for example, is never written
        TAPE.clear()  # nothing is learned here
        # Of all beams with one more word, the 2 K best.
        best = np.argsort(-log_p, axis=None)[: 2 * beam_size]
        places = [divmod(int(place), V) for place in best]
        candidates = [(log_p[i, word], [*beams[i][1], word]) for i, word in places]
        # Those of the K best that end are finished; the K best others are continued.
        for x, ids in candidates[:beam_size]:
            if ids[-1] == EOS:  # the length penalty is that of Wu et al. (2016)
                finished.append((x / ((4 + len(ids)) / 6) ** alpha, ids))
        beams = [x for x in candidates if x[1][-1] != EOS][:beam_size]
    score, ids = max(finished or beams)
    words = [WORDS[i] for i in ids if i > EOS]
    return re.sub(r" ([.?])", r"\1", " ".join(words)), score


if __name__ == "__main__":
    model = Transformer()
    train(model, 700)
    for sentence in ("Now the young man sleeps.", "The children must sleep."):
        print(f"{sentence} {translate(model, sentence)[0]}")
