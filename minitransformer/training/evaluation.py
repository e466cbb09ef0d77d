"""How well a model predicts held-out text: loss, perplexity, accuracy (section 6)."""

from __future__ import annotations

import itertools
import math
from functools import partial
from typing import NamedTuple

import numpy as np

from minitransformer.model.transformer import Transformer, token_log_probs
from minitransformer.settings.config import TrainingConfig
from minitransformer.system.announce import announce
from minitransformer.system.workers import parallel_map
from minitransformer.text.batches import Batch, BatchStream, ParallelCorpus
from minitransformer.text.bilingual import Pair
from minitransformer.text.pairs import TextPair
from minitransformer.text.tokenizer import Tokenizer
from minitransformer.training.parallel import ParallelModel


def samples(
    text: TextPair | None, tokenizer: Tokenizer, training: TrainingConfig
) -> list[Pair]:
    """Return the pairs of validation text to translate: the first that are short."""
    if text is None:
        return []
    lengths = ((max(map(len, tokenizer.encode(p))), p) for p in text.lines())
    short = (pair for length, pair in lengths if length < training.max_length)
    return list(itertools.islice(short, training.validate_bleu))


class TokenStatistics(NamedTuple):
    """Sums over target tokens: negative log-likelihood, and the tokens guessed right.

    Units: nll nats
    """

    nll: float
    correct: int
    tokens: int

    @property
    def loss(self) -> float:
        """Mean negative log-likelihood. Units: nats a token"""
        return self.nll / self.tokens

    @property
    def perplexity(self) -> float:
        """e to the loss, per word piece as in Table 3, at most e^700."""
        return math.exp(min(self.loss, 700.0))

    @property
    def accuracy(self) -> float:
        """The share of tokens to which the model gives the highest probability."""
        return self.correct / self.tokens


def token_statistics(model: Transformer, batch: Batch) -> TokenStatistics:
    """Return the statistics of a batch, without dropout or label smoothing."""
    xp = model.embedding.xp
    log_probs, best = token_log_probs(
        model, xp.asarray(batch.source), xp.asarray(batch.target)
    )
    return TokenStatistics(
        nll=-float(log_probs.sum(dtype="float64")),
        correct=int(best.sum()),
        tokens=batch.target_tokens,
    )


def exchanged_sides(model: Transformer, stream: BatchStream) -> list[str]:
    """Return a note if a trained model predicts sources better than targets."""
    corpus = stream.corpus
    exchanged = ParallelCorpus(corpus.target, corpus.source)

    # At most 32 of the pairs, from all parts of the text, in either direction.
    pairs = stream.pairs[:: len(stream.pairs) // 32 + 1]
    ahead, back = (
        token_statistics(model, x.batch(pairs)).loss for x in (corpus, exchanged)
    )
    if ahead <= back:
        return []
    return [
        "exchanged   the model predicts the sources from the targets (loss "
        f"{back:.2f}) better than the targets from the sources ({ahead:.2f}): are "
        "both sides exchanged?"
    ]


def validate(
    parallel: ParallelModel, corpus: ParallelCorpus, training: TrainingConfig
) -> TokenStatistics:
    """Return the statistics of a corpus. Ranks and processes divide its batches.

    A batch has about `max_tokens`, or as many tokens as a process takes at once in
    training, if these are fewer. As in training, longer pairs than `max_length` are
    left out.
    """
    # Each rank takes its batches in turn.
    ranks = parallel.communicator
    at_once = parallel.tokens_at_once // parallel.num_processes
    pairs = corpus.filter_by_length(training.max_length)
    batches = corpus.batch_by_length(pairs, min(training.max_tokens, at_once))
    mine = (corpus.batch(batch) for batch in batches[ranks.rank :: ranks.size])
    announce(f"validating on {len(pairs):,} pairs", len(pairs) > 99 and not ranks.rank)

    # Its processes divide them.
    work = partial(token_statistics, parallel.model)
    sums = np.zeros(3)
    with parallel_map(work, parallel.num_processes) as mapped:
        for statistics in mapped(mine):
            sums += statistics

    # The sums over all ranks.
    nll, correct, tokens = ranks.all_reduce_numbers(sums.tolist())
    return TokenStatistics(nll, int(correct), int(tokens))
