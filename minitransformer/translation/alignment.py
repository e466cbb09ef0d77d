"""Word alignments, from the decoder's attention to the source (beyond the paper).

When the decoder writes a word piece, its attention weights say from which pieces of the
source. Their mean over all heads of the upper half of the decoder's layers, and over
the models of an ensemble, is the alignment of pieces. Summed over the pieces of words,
it says how much each word was made from each source word. A word is linked to the
source word with the largest share.

Lower layers, and the weights of the step that reads a piece instead of writing it, were
worse on the hand-aligned sentences of the tests (docs/translating.md).

Shapes: B sentences, S source, T target, H heads, D d_model.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from minitransformer.engine import ops
from minitransformer.engine.autograd import no_grad, wrap_primitives
from minitransformer.engine.backend import Array, as_float32, to_host
from minitransformer.model.transformer import Transformer
from minitransformer.settings.config import BOS_ID
from minitransformer.text.ids import Ragged
from minitransformer.text.tokenizer import SPACE, Tokenizer
from minitransformer.translation.batch_translation import map_batches
from minitransformer.translation.beam_search import Links
from minitransformer.translation.incremental_decoding import Ensemble


def align_words(
    model: Transformer | Ensemble,
    tokenizer: Tokenizer,
    sources: Sequence[str],
    targets: Sequence[str],
    *,
    tag: Sequence[int] = (),
    max_tokens: int = 4096,
    num_threads: int = 1,
) -> list[Links]:
    """Align the words of texts and translations. The model reads a tag before each."""
    # From the attention between pieces, take how much each word is made from each.
    source_ids = tokenizer.encode(sources)
    target_ids = tokenizer.encode(targets)
    read = [[*tag, *ids] for ids in source_ids]
    of_pieces = piece_weights(model, read, target_ids, max_tokens, num_threads)
    alignments: list[Links] = []
    for n, weights in enumerate(of_pieces):
        source_words = words_of_pieces(tokenizer, sources[n], source_ids[n])
        target_words = words_of_pieces(tokenizer, targets[n], target_ids[n])
        of_words = word_weights(weights[:, len(tag) :], source_words, target_words)
        # Link each target word to the source word with the largest weight.
        linked = np.flatnonzero(of_words.any(axis=1)).tolist()
        links = sorted((int(of_words[j].argmax()), j) for j in linked)
        has_words = sources[n].strip() and targets[n].strip()
        alignments.append(tuple(links) if has_words else ())
    return alignments


def piece_weights(
    model: Transformer | Ensemble,
    sources: Sequence[Sequence[int]],
    targets: Sequence[Sequence[int]],
    max_tokens: int = 4096,
    num_threads: int = 1,
) -> list[np.ndarray]:
    """Return how much each target piece is made from each source piece.

    A row sums to 1, less the weight of the source's end. Where the source is empty, so
    are the rows.

    Shapes: -> each [any, any]
    """
    members = model.members if isinstance(model, Ensemble) else [model]
    xp = model.embedding.xp
    source = Ragged.from_lists(sources)
    target = Ragged.from_lists(targets)

    def align_batch(batch: np.ndarray) -> list[np.ndarray]:
        # BOS and all pieces but the last: the end may have no position left.
        fed = max(int(target.lengths[batch].max()), 1)
        ids = source.pad(batch), target.pad(batch, BOS_ID)[:, :fed]
        arrays = [xp.asarray(side) for side in ids]
        total = sum(mean_cross_attention(member, *arrays) for member in members)
        weights = to_host(total) / len(members)
        sizes = zip(weights, target.lengths[batch], source.lengths[batch], strict=True)
        return [rows[:to, :of] for rows, to, of in sizes]

    results = [np.zeros((len(t), 0)) for t in targets]
    lengths = np.maximum(source.lengths, target.lengths)
    for pair, weights in map_batches(align_batch, lengths, max_tokens, num_threads):
        results[pair] = weights
    return results


def mean_cross_attention(model: Transformer, source: Array, target: Array) -> Array:
    """Return the mean attention to the source of all heads in the upper layers.

    Both sides are ids; the target begins with BOS. Shapes: source [B, S], target [B, T]
    -> [B, T, S]
    """
    layers = len(model.decoder)
    upper = range(layers // 2, layers)
    cross = [len(model.encoder) + 2 * layer + 1 for layer in upper]
    layers_weights = attention_weights(model, source, target, cross)
    return sum(weights.mean(axis=1) for weights in layers_weights) / len(layers_weights)


def attention_weights(
    model: Transformer, source: Array, target: Array, chosen: Sequence[int]
) -> list[Array]:
    """Return the weights of the `chosen` attention sub-layers in a forward pass.

    Sub-layers are counted from 0: one in each layer of the encoder, then two in each
    layer of the decoder, self-attention and cross-attention. Targets begin with BOS.

    Shapes: source [B, S], target [B, T] -> each [B, H, any, any]
    """
    recorded = list[Array]()
    counted = itertools.count()

    # The model calls the attention primitive once for each sub-layer, in their order.
    def observer(name: str, body: Callable[..., Any]) -> Callable[..., Any]:
        if name != "attention" or next(counted) not in chosen:
            return body

        def recording(
            q: Array, k: Array, v: Array, mask: Array, *, num_heads: int, **options: Any
        ) -> Any:
            query, key = (ops.split_heads(as_float32(x), num_heads) for x in (q, k))
            recorded.append(ops.attention_weights(query, key, mask))
            return body(q, k, v, mask, num_heads=num_heads, **options)

        return recording

    with no_grad(), wrap_primitives(observer):
        model(source, target)
    return recorded


def words_of_pieces(tokenizer: Tokenizer, text: str, ids: Sequence[int]) -> np.ndarray:
    """Return the number of the word of `text` that each of its pieces belongs to.

    White space divides words.
    """
    # Each piece is in the word that its beginning of the text ends with. A space alone
    # is in the word that follows.
    texts = tokenizer.decode([ids[: n + 1] for n in range(len(ids))])
    words = [max(len(beginning.split()) - 1, 0) for beginning in texts]
    pieces = tokenizer.pieces(ids)
    for n in reversed(range(len(ids) - 1)):
        if pieces[n] == SPACE:
            words[n] = words[n + 1]
    count = len(texts[-1].split()) if texts else 0
    # Normalisation may have made two words or none of one: count the original ones.
    originals = text.split()
    if originals and count != len(originals):
        normal = [tokenizer.normalise(w).replace(SPACE, " ").split() for w in originals]
        owners = np.repeat(np.arange(len(originals)), [len(parts) for parts in normal])
        if not len(owners):  # nothing is printed: all belongs to the first word
            return np.zeros(len(words), int)
        words = [int(owners[min(word, len(owners) - 1)]) for word in words]
    return np.array(words, int)


def pharaoh(links: Iterable[tuple[int, int]]) -> str:
    """Return links as text, such as `0-0 1-2`: the format of the decoder Pharaoh."""
    return " ".join(f"{source}-{target}" for source, target in links)


def word_weights(
    weights: np.ndarray, source_words: np.ndarray, target_words: np.ndarray
) -> np.ndarray:
    """Return how much each target word is made from each source word.

    It is the sum over the source word's pieces and the mean over the target word's.

    Shapes: weights [T, S], source_words [S], target_words [T] -> [any, any]
    """
    # Add up the pieces of each pair of words, then divide by the target word's pieces.
    size = [int(words.max(initial=-1)) + 1 for words in (target_words, source_words)]
    sums = np.zeros(size)
    np.add.at(sums, (target_words[:, None], source_words), weights)
    return sums / np.maximum(np.bincount(target_words, minlength=size[0]), 1)[:, None]
