"""Scores of given translations, computed in one pass ("forced decoding")."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from minitransformer.engine.backend import array_module, to_host
from minitransformer.model.loss import token_log_probs
from minitransformer.model.transformer import Transformer
from minitransformer.settings.config import BOS_ID
from minitransformer.text.ids import Ragged
from minitransformer.translation.batch_translation import map_batches
from minitransformer.translation.candidates import NOT_FINITE


def score_targets(
    model: Transformer,
    sources: Sequence[Sequence[int]],
    targets: Sequence[Sequence[int]],
    max_tokens: int = 4096,
    num_threads: int = 1,
) -> list[tuple[float, int]]:
    """Return the log-probability and the length of each target, EOS counted in both.

    A pair whose sides are both empty has log-probability 0 and length 0, because the
    model predicts nothing there.

    Units: nats; perplexity is exp(-sum of log-probabilities / sum of lengths)
    Raises: ValueError if a log-probability is not finite.
    """
    source, target = Ragged.from_lists(sources), Ragged.from_lists(targets)
    xp = array_module(model.embedding.table.data)

    def score_batch(batch: np.ndarray) -> list[float]:
        ids = source.pad(batch), target.pad(batch, BOS_ID)
        with np.errstate(all="ignore"):
            log_probs, _ = token_log_probs(model, *map(xp.asarray, ids))
        totals = to_host(log_probs).sum(axis=1, dtype=np.float64)
        if not np.isfinite(totals).all():
            raise ValueError(NOT_FINITE)
        return totals.tolist()

    results = [(0.0, 0)] * len(sources)
    lengths = np.maximum(source.lengths, target.lengths)
    for pair, log_prob in map_batches(score_batch, lengths, max_tokens, num_threads):
        results[pair] = log_prob, len(targets[pair]) + 1
    return results
