"""Strategies of Hypothesis for whole models, their batches, and what decodes them.

A case is made of numbers and short lists, so that it can be pasted into `@example`. It
shrinks to few sentences of few tokens, to the smallest model, and to one whose
parameters are ones, zeros and identities but for a kind or two.
"""

from dataclasses import dataclass, field

import numpy as np
from hypothesis import strategies as st

from minitransformer.model.parameters import ParameterBuffer
from minitransformer.model.transformer import Transformer
from minitransformer.settings.config import BOS_ID, EOS_ID, PAD_ID
from minitransformer.text.batches import Batch
from support.models import tiny_config

KINDS = (
    "table positions query key value output gain bias weight_1 bias_1 weight_2 bias_2"
).split()
SMALL_NUMBERS = [0, 0.5, -0.5, 1, -1, 3, -3]


def padded(rows):
    """Stack rows of ids, each padded to the longest. Shapes: -> [B, longest]"""
    ids = np.full((len(rows), max(map(len, rows))), PAD_ID)
    for line, row in zip(ids, rows, strict=True):
        line[: len(row)] = row
    return ids


def batch_of(pairs):
    """Return pairs of ids without BOS and EOS as a batch."""
    sources, targets = zip(*pairs, strict=True)
    target = padded([[BOS_ID, *ids, EOS_ID] for ids in targets])
    return Batch(padded([[*ids, EOS_ID] for ids in sources]), target)


@dataclass(frozen=True)
class Case:
    """A model, and pairs of sentences as ids without BOS and EOS.

    `drawn` names the kinds of parameters that are random; the others have values that
    change nothing. `scale` multiplies random numbers; at 0 they are SMALL_NUMBERS.
    """

    settings: dict = field(default_factory=dict)
    drawn: tuple = tuple(KINDS)
    scale: float = 1.0
    seed: int = 0
    pairs: tuple = (([5], [6]),)
    smoothing: float = 0.1

    @property
    def config(self):
        return tiny_config(**self.settings)

    @property
    def batch(self):
        return batch_of(self.pairs)

    @property
    def sources(self):
        return [source for source, _ in self.pairs]

    def model(self, dtype="float64"):
        model = Transformer(self.config, seed=None, dtype=dtype)
        rng = np.random.default_rng(self.seed)
        for name, parameter in model.named_parameters():
            kind = name.rpartition(".")[2]
            values, shape = parameter.data, parameter.shape
            if kind in self.drawn:
                near = kind == "gain" and self.scale
                values[...] = rng.normal(near, self.scale, shape)
                if not self.scale:
                    values[...] = rng.choice(SMALL_NUMBERS, shape)
                elif len(shape) == 2:
                    values /= np.sqrt(shape[0] if kind != "table" else shape[1])
            elif len(shape) == 2:  # each row and each column has a 1 somewhere
                place = np.arange(max(shape))
                values[place % shape[0], place % shape[1]] = 1
            else:
                values[...] = kind == "gain"
        return model

    def buffered(self, dtype="float64"):
        """The model, and the buffer of its parameters."""
        model = self.model(dtype)
        return model, ParameterBuffer(model)


RATES = st.sampled_from([0.0, 0.0, 0.25, 0.5])


VOCABULARIES = st.integers(8, 20)


@st.composite
def settings_of_models(draw, dropout=False, least_width=1, vocab_size=VOCABULARIES):
    """1 to 3 layers a side, heads of any widths, windows, both kinds of positions."""
    layers, width = st.integers(1, 3), st.integers(least_width, 5)
    found = {
        "vocab_size": draw(vocab_size),
        "encoder_layers": draw(layers),
        "decoder_layers": draw(layers),
        "d_model": 2 * draw(st.integers(least_width, 6 + least_width)),
        "d_ff": draw(st.integers(least_width, 12)),
        "num_heads": draw(st.integers(1, 4)),
        "d_k": draw(width),
        "d_v": draw(width),
        "attention_window": draw(st.none() | st.integers(1, 9)),
        "positions": draw(st.sampled_from(["sinusoidal", "learned"])),
        "max_positions": 60,
        "dropout": 0.0,
    }
    if dropout:
        kinds = "dropout", "attention_dropout", "relu_dropout"
        found |= {kind: draw(RATES) for kind in kinds}
    return found


def sentences(vocab_size, least=0, most=9):
    """Ids, often repeated, of a length that is seldom long."""
    ids = st.integers(4, 7) | st.integers(1, vocab_size - 1)  # also the unknown token
    return st.lists(ids, min_size=least, max_size=most) | st.lists(
        ids, min_size=least, max_size=least + most // 4
    )


@st.composite
def cases(draw, max_pairs=4, least=0, most=9, scales=(1.0, 0.0, 0.3, 3.0), **options):
    """Draw a model and a batch for it."""
    settings = draw(settings_of_models(**options))
    flags = [draw(st.sampled_from([False, True, True, True])) for _ in KINDS]
    sides = sentences(settings["vocab_size"], least, most)
    return Case(
        settings=settings,
        drawn=tuple(kind for kind, flag in zip(KINDS, flags, strict=True) if flag),
        scale=draw(st.sampled_from(scales)),
        seed=draw(st.integers(0, 10_000)),
        pairs=tuple(
            draw(st.lists(st.tuples(sides, sides), min_size=1, max_size=max_pairs))
        ),
        smoothing=draw(st.sampled_from([0.0, 0.1, 0.7])),
    )
