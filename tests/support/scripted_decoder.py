"""A decoder without a model: its log-probabilities follow a given function."""

import numpy as np

from minitransformer.translation.beam_search import BeamSearch
from minitransformer.translation.incremental_decoding import (
    IncrementalDecoder,
    weights_of,
)

VOCAB = 7  # padding, unknown, begin, end and three words


class ScriptedDecoder(IncrementalDecoder):
    """A decoder whose log-probabilities are `table(sentence, history)`.

    `counts` has the number of beams of each step.
    """

    def __init__(self, table, sentences):
        self.table = table
        self.rows = [(s, ()) for s in sentences]
        self.counts = []

    def step(self, tokens):
        yield weights_of(self.logits(tokens))

    def logits(self, tokens):
        self.counts.append(len(tokens))
        self.rows = [
            (s, (*history, int(t)))
            for (s, history), t in zip(self.rows, tokens, strict=True)
        ]
        return np.stack([self.table(s, history[1:]) for s, history in self.rows])

    def select(self, rows):
        self.rows = [self.rows[r] for r in rows]

    def join(self, other):
        assert {len(history) for _, history in self.rows + other.rows} == {self.length}
        self.rows += other.rows

    @property
    def length(self):
        """How many tokens were fed to each beam."""
        return len(self.rows[0][1])


def search_to_the_end(decoder, limits, beam_size, alpha, nbest):
    """Return what a `BeamSearch` finds for each sentence of a decoder."""
    search = BeamSearch(
        decoder,
        np.arange(len(limits)),
        np.array(limits),
        beam_size=beam_size,
        alpha=alpha,
        nbest=nbest,
    )
    found = {}
    while len(search.sentences):
        found.update(search.step())
    return [found[sentence] for sentence in range(len(limits))]


def random_log_probs(seed, sharpness=2.0, vocab_size=VOCAB):
    """Return a table of random but repeatable log-probabilities for every history."""

    def table(sentence, history):
        rng = np.random.default_rng([seed, sentence, *history])
        logits = rng.standard_normal(vocab_size) * sharpness
        return logits - np.log(np.exp(logits).sum())

    return table
