"""Translation and scores of token ids, in batches and by several workers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import TypeVar

import numpy as np

from minitransformer.engine.autograd import no_grad
from minitransformer.engine.backend import backend_of, to_host
from minitransformer.model.transformer import Transformer, token_log_probs
from minitransformer.settings.config import BOS_ID
from minitransformer.settings.decoding_config import DecodingConfig
from minitransformer.system.workers import parallel_map
from minitransformer.text.ids import Ragged
from minitransformer.translation.beam_search import NOT_FINITE, BeamSearch, Hypothesis
from minitransformer.translation.constraints import Constraints
from minitransformer.translation.incremental_decoding import (
    Ensemble,
    incremental_decoder,
)

R = TypeVar("R")

# New sentences are started when at most this share of a batch is left.
SHARE_LEFT = 0.25


def translate_ids(
    model: Transformer | Ensemble,
    sources: Sequence[Sequence[int]],
    config: DecodingConfig,
    num_threads: int = 1,
    constraints: Constraints | None = None,
) -> list[list[Hypothesis]]:
    """Return the `config.nbest` best translations of each sentence, best first.

    An empty sentence has one translation, which is empty and scores 0. The longest
    output has max_len_a * (source tokens) + max_len_b tokens and EOS, or another token
    in its place. A sentence has none if all break the `constraints`.
    """
    encoded = Ragged.from_lists(sources)
    lengths = encoded.lengths
    positions = model.position_limit or np.iinfo(int).max
    xp = model.embedding.xp
    search = backend_of(model.embedding.table.data).beam_search or BeamSearch

    def start(batch: np.ndarray) -> BeamSearch:
        """Encode a batch of sentences, and prepare to search for their translations."""
        longest = np.floor(config.max_len_a * lengths[batch] + config.max_len_b)
        limits = longest.astype(int) + 1  # EOS counts here
        source = xp.asarray(encoded.pad(batch))
        decoder = incremental_decoder(model, source, config.beam)
        if constraints:
            limits = constraints.limits(limits, batch)
            decoder = constraints.decoder(decoder, batch)
        started: BeamSearch = search(
            decoder,
            batch,
            np.minimum(limits, positions),
            beam_size=config.beam,
            alpha=config.alpha,
            nbest=config.nbest,
        )
        return started

    def translate_share(share: np.ndarray) -> list[tuple[int, list[Hypothesis]]]:
        max_tokens = config.decode_tokens // config.beam
        with no_grad(), np.errstate(all="ignore"):  # the search refuses what overflows
            return list(search_together(start, share, lengths, max_tokens))

    # Each worker has sentences of all lengths, shortest first.
    order = np.argsort(lengths, kind="stable")
    order = order[lengths[order] > 0]
    count = max(min(num_threads, len(order)), 1)
    shares = [order[n::count] for n in range(count)]
    results = [[Hypothesis((), 0.0, 0.0)] for _ in sources]
    with parallel_map(translate_share, count) as mapped:
        for sentence, hypotheses in chain.from_iterable(mapped(shares)):
            results[sentence] = hypotheses
    return results


def search_together(
    start: Callable[[np.ndarray], BeamSearch],
    sentences: np.ndarray,
    lengths: np.ndarray,
    max_tokens: int,
) -> Iterator[tuple[int, list[Hypothesis]]]:
    """Search for the translations of sentences in batches that are filled up.

    A step takes almost as long for few sentences as for many, and the last sentences of
    a batch may go on for long. They wait while others are started and catch up: the
    search with the shortest beams does the next step, and searches with beams of the
    same length join. At most `max_tokens` source tokens are in work at a time, with
    padding and EOS, or one sentence. Sentences come shortest first: those that join are
    of similar length. `lengths` has the lengths of all sentences.

    Elsewhere: in the continuous batching of servers, a text joins others at any time,
    at a position that differs from theirs.

    Shapes: sentences, lengths [any]
    Yields: numbers of sentences and their results
    """
    searches = list[BeamSearch]()
    while len(sentences) or searches:
        # Start more sentences if few are left.
        if len(sentences):
            in_work = sum(len(search.sentences) for search in searches)
            count = _batch_size(lengths[sentences], max_tokens, in_work)
            if count and in_work <= SHARE_LEFT * (in_work + count):
                searches.append(start(sentences[:count]))
                sentences = sentences[count:]
        # The search with the shortest beams goes on, and joins those that are as long.
        shortest = min(searches, key=lambda search: search.length)
        yield from shortest.step()
        searches.remove(shortest)
        if len(shortest.sentences):
            for search in [s for s in searches if s.length == shortest.length]:
                shortest.join(search)
                searches.remove(search)
            searches.append(shortest)


def _batch_size(lengths: np.ndarray, max_tokens: int, in_work: int) -> int:
    """Return how many sentences fit beside those in work, or one if there are none.

    The sentences that wait become as few batches as possible, about equally large.
    `lengths` has theirs, ascending. Shapes: lengths [any]
    """
    tokens = (in_work + np.arange(1, len(lengths) + 1)) * (lengths + 1)
    fitting = int(np.searchsorted(tokens, max_tokens, "right"))
    if not fitting:
        return 0 if in_work else min(len(lengths), 1)
    sums = np.cumsum(lengths + 1)
    equal_part = sums[-1] / math.ceil(sums[-1] / sums[fitting - 1])
    return max(int(np.searchsorted(sums, equal_part, "right")), 1)


def score_targets(
    model: Transformer | Ensemble,
    sources: Sequence[Sequence[int]],
    targets: Sequence[Sequence[int]],
    max_tokens: int = 4096,
    num_threads: int = 1,
) -> list[np.ndarray]:
    """Return the log-probability of each token of given translations and of EOS.

    A pair whose sides are both empty has none, because the model predicts nothing
    there. The probabilities of an ensemble are the means of its models'.

    Units: nats; perplexity is exp(-mean of the log-probabilities)
    Raises: ValueError if a log-probability is not finite.
    """
    source = Ragged.from_lists(sources)
    target = Ragged.from_lists(targets)
    members = model.members if isinstance(model, Ensemble) else [model]
    xp = model.embedding.xp

    def score_batch(batch: np.ndarray) -> Iterator[np.ndarray]:
        ids = [xp.asarray(x) for x in (source.pad(batch), target.pad(batch, BOS_ID))]
        # The logarithm of the mean probability of the models.
        with np.errstate(all="ignore"):
            each = [to_host(token_log_probs(member, *ids)[0]) for member in members]
            means = np.logaddexp.reduce(each, dtype=np.float64) - math.log(len(each))
        if not np.isfinite(means).all():
            raise ValueError(NOT_FINITE)
        for row, length in zip(means, target.lengths[batch], strict=True):
            yield row[: length + 1]

    results = [np.zeros(0)] * len(sources)
    lengths = np.maximum(source.lengths, target.lengths)
    for pair, log_probs in map_batches(score_batch, lengths, max_tokens, num_threads):
        results[pair] = log_probs
    return results


def map_batches(
    function: Callable[[np.ndarray], Iterable[R]],
    lengths: np.ndarray,
    max_tokens: int,
    num_threads: int,
) -> Iterator[tuple[int, R]]:
    """Apply `function` to batches of sentences of similar length, on several workers.

    `function` takes the indices of a batch and returns a result for each of them. A
    batch holds one sentence, or at most `max_tokens` tokens with padding and EOS.
    Sentences of length 0 are left out.

    Yields: indices of sentences and their results, longest sentences first
    """
    # Divide the sentences into batches, longest first.
    order = np.argsort(-lengths, kind="stable")
    order = order[lengths[order] > 0]
    batches = list[np.ndarray]()
    first = 0
    while first < len(order):
        size = max(1, max_tokens // (int(lengths[order[first]]) + 1))
        batches.append(order[first : first + size])
        first += size
    if not batches:
        return

    # Apply the function to each, and say which result belongs to which sentence.
    def results_of(batch: np.ndarray) -> list[R]:
        return list(function(batch))

    count = min(num_threads, len(batches))
    with parallel_map(results_of, count) as mapped:
        for batch, results in zip(batches, mapped(batches), strict=True):
            yield from zip(batch.tolist(), results, strict=True)
