"""How sure a model is of its translations and of each word (beyond the paper).

The confidence of a translation is the share of validation sentences whose translations
have a lower mean log-probability of a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from minitransformer.text.tokenizer import Tokenizer
from minitransformer.translation.alignment import words_of_pieces
from minitransformer.translation.beam_search import Hypothesis, Words

# A translation is unsure if its confidence is lower: one in 20 of validation sentences.
UNSURE = 0.05

# What a translation that is `missing` something lacks.
LACKED = "a number, a term or text to copy"

# The shares of sentences below each of a state's quantiles: 0%, 5%, ..., 100%.
SHARES = np.linspace(0, 1, 21)


def quantiles(means: Sequence[float]) -> tuple[float, ...]:
    """Return the quantiles of mean log-probabilities that a run's state has."""
    return tuple(np.quantile(means, SHARES).tolist())


def sure_words(tokenizer: Tokenizer, h: Hypothesis, log_probs: np.ndarray) -> Words:
    """Return the `words` of a hypothesis from the log-probabilities of its tokens."""
    # The sum over the tokens of each word.
    words = h.text.split()
    owners = words_of_pieces(tokenizer, h.text, h.tokens)
    sums = np.bincount(owners, log_probs[: len(owners)], len(words))
    return tuple(zip(words, sums.tolist(), strict=False))


def with_copies(h: Hypothesis) -> Hypothesis:
    """Return a hypothesis with the words of its text. Those that were copied have None.

    Its words so far are those that the model wrote.
    """
    # Words that the model wrote keep their log-probabilities.
    left = list(h.words)
    words = list[tuple[str, float | None]]()
    for text in h.text.split():
        word = next((x for x in left if x[0] == text), None)
        if word:
            left.remove(word)
        words.append(word or (text, None))
    return replace(h, words=tuple(words))
