"""TODO."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from minitransformer.engine.backend import array_module, to_host
from minitransformer.model.loss import token_log_probs
from minitransformer.model.transformer import Transformer
from minitransformer.settings.config import BOS_ID
from minitransformer.text.ids import Ragged
from minitransformer.translation.decode import _batches, _map


def score_targets(
    model: Transformer,
    sources: Sequence[Sequence[int]],
    targets: Sequence[Sequence[int]],
    max_tokens: int = 4096,
    num_threads: int = 1,
) -> list[tuple[float, int]]:
    """Log-probability and number of tokens of each given target, EOS counted in both.

    Units: nats; perplexity is exp(-sum of log-probabilities / sum of tokens)
    """
    encoded, expected = Ragged.from_lists(sources), Ragged.from_lists(targets)
    xp = array_module(model.embedding.table.data)
    longer = Ragged(
        encoded.ids,
        np.concatenate([[0], np.cumsum(np.maximum(encoded.lengths, expected.lengths))]),
    )

    def work(chosen: np.ndarray) -> np.ndarray:
        log_probs, _ = token_log_probs(
            model,
            xp.asarray(encoded.padded(chosen)),
            xp.asarray(expected.padded(chosen, BOS_ID)),
        )
        return to_host(log_probs).sum(axis=1, dtype=np.float64)

    results = np.zeros(len(sources))
    batches = _batches(longer, max_tokens)
    for chosen, found in zip(batches, _map(work, batches, num_threads), strict=True):
        results[chosen] = found
    return [
        (float(x), len(target) + 1) for x, target in zip(results, targets, strict=True)
    ]
