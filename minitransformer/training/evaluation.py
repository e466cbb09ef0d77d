"""How good a model is on held-out text: loss, accuracy and BLEU (section 6)."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from minitransformer.engine.backend import Array, array_module
from minitransformer.model.loss import token_log_probs
from minitransformer.model.transformer import Transformer
from minitransformer.settings.config import PAD_ID
from minitransformer.text.batches import ParallelCorpus
from minitransformer.training.parallel import ParallelModel


def validate(
    parallel: ParallelModel, corpus: ParallelCorpus, max_tokens: int
) -> TokenStatistics:
    """Sum up the loss over a corpus, without dropout or label smoothing.

    Every rank takes some of the batches.
    """
    ranks = parallel.communicator

    xp = array_module(parallel.parameters.data)

    def work(chosen: np.ndarray) -> TokenStatistics:
        batch = corpus.batch(chosen)
        return evaluate(
            parallel.model, xp.asarray(batch.source), xp.asarray(batch.target)
        )

    total = TokenStatistics()
    batches = corpus.batches(np.arange(len(corpus)), max_tokens)
    for part in parallel.map(work, batches[ranks.rank :: ranks.size]):
        total += part
    nll, correct, tokens = ranks.all_reduce_numbers(
        [total.nll, total.correct, total.tokens]
    )
    return TokenStatistics(nll, int(correct), int(tokens))


@dataclass(frozen=True)
class TranslationQuality:
    """How translations compare with references.

    `bleu` and `chrf` are sacreBLEU's corpus scores from 0 to 100 on detokenised, cased
    text, with its signatures; `exact` is the share of translations that are equal.
    """

    bleu: float
    bleu_signature: str
    chrf: float
    chrf_signature: str
    exact: float

    def __str__(self) -> str:
        return (
            f"BLEU {self.bleu:.2f}  {self.bleu_signature}\n"
            f"chrF {self.chrf:.2f}  {self.chrf_signature}\n"
            f"exact matches {self.exact:.1%}"
        )


def _check_pairs(translations: Sequence[str], references: Sequence[str]) -> None:
    """Raises: ValueError if there are not as many of both, or none."""
    if len(translations) != len(references) or not references:
        raise ValueError(
            f"expected as many references as translations and at least one, got "
            f"{len(references)} and {len(translations)}"
        )


def translation_quality(
    translations: Sequence[str], references: Sequence[str]
) -> TranslationQuality:
    """Compare translations with one reference each.

    Raises: ValueError if there are not as many of both, or none.
    """
    from sacrebleu.metrics import BLEU, CHRF  # slow to import, and not always needed

    _check_pairs(translations, references)
    bleu, chrf = BLEU(), CHRF()
    pairs = zip(translations, references, strict=True)
    return TranslationQuality(
        bleu.corpus_score(translations, [references]).score,
        str(bleu.get_signature()),
        chrf.corpus_score(translations, [references]).score,
        str(chrf.get_signature()),
        sum(t == r for t, r in pairs) / len(references),
    )


def compound_split_bleu(
    translations: Sequence[str], references: Sequence[str], language: str
) -> float:
    """BLEU as the paper's 27.3 and 28.4 were counted (section 6.1, Table 2).

    Unicode punctuation is replaced, Moses tokenises both sides as text in `language`,
    each hyphen within a word becomes a word of its own, and BLEU counts what is then
    between blanks, cased, without smoothing. It came out 0.7 to 1 above sacreBLEU's on
    newstest2014, and compares with nothing else.

    Raises: RuntimeError if sacremoses is not installed, ValueError as `translation_quality`.
    """
    from sacrebleu.metrics import BLEU

    try:
        from sacremoses import MosesPunctNormalizer, MosesTokenizer
    except ImportError as error:
        raise RuntimeError(
            "compound-split BLEU needs sacremoses: pip install 'minitransformer[moses]'"
        ) from error
    _check_pairs(translations, references)
    tokenizer, normalizer = MosesTokenizer(language), MosesPunctNormalizer(language)

    def words(line: str) -> str:
        line = normalizer.replace_unicode_punct(line)
        tokenised = tokenizer.tokenize(line, return_str=True)
        return re.sub(r"(\S)-(\S)", r"\1 ##AT##-##AT## \2", tokenised)

    bleu = BLEU(tokenize="none", smooth_method="none", force=True)
    sides = [[words(line) for line in side] for side in (translations, references)]
    return bleu.corpus_score(sides[0], [sides[1]]).score


@dataclass
class TokenStatistics:
    """Sums over target tokens: negative log-likelihood in nats, and right guesses."""

    nll: float = 0.0
    correct: int = 0
    tokens: int = 0

    @property
    def loss(self) -> float:
        """Mean negative log-likelihood. Units: nats a token"""
        return self.nll / self.tokens

    @property
    def perplexity(self) -> float:
        """e to the loss, a word piece as in Table 3, at most e^700."""
        return math.exp(min(self.loss, 700.0))

    @property
    def accuracy(self) -> float:
        return self.correct / self.tokens

    def __iadd__(self, other: TokenStatistics) -> TokenStatistics:
        self.nll += other.nll
        self.correct += other.correct
        self.tokens += other.tokens
        return self


def evaluate(model: Transformer, source: Array, target: Array) -> TokenStatistics:
    """Sum up a batch without dropout or smoothing. Shapes: as `token_log_probs`."""
    log_probs, best = token_log_probs(model, source, target)
    return TokenStatistics(
        nll=-float(log_probs.sum(dtype="float64")),
        correct=int(best.sum()),
        tokens=int((target[:, 1:] != PAD_ID).sum()),
    )
