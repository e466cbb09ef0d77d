"""How good a model is on held-out text: loss, accuracy and BLEU (section 6)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from minitransformer.data import Corpus
from minitransformer.loss import TokenStatistics, evaluate
from minitransformer.parallel import ThreadedModel


def validate(
    threaded: ThreadedModel, corpus: Corpus, max_tokens: int
) -> TokenStatistics:
    """Sum up the loss over a corpus, without dropout or label smoothing.

    Every rank takes some of the batches.
    """
    ranks = threaded.communicator

    def work(chosen: np.ndarray) -> TokenStatistics:
        batch = corpus.batch(chosen)
        xp = threaded.xp
        return evaluate(
            threaded.model, xp.asarray(batch.source), xp.asarray(batch.target)
        )

    total = TokenStatistics()
    batches = corpus.batches(np.arange(len(corpus)), max_tokens)
    for part in threaded.map(work, batches[ranks.rank :: ranks.size]):
        total += part
    nll, correct, tokens = ranks.total([total.nll, total.correct, total.tokens])
    return TokenStatistics(nll, int(correct), int(tokens))


@dataclass(frozen=True)
class Quality:
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


def quality(translations: Sequence[str], references: Sequence[str]) -> Quality:
    """Compare translations with one reference each.

    Raises: ValueError if there are not as many of both, or none.
    """
    from sacrebleu.metrics import BLEU, CHRF  # slow to import, and not always needed

    _check_pairs(translations, references)
    bleu, chrf = BLEU(), CHRF()
    pairs = zip(translations, references, strict=True)
    return Quality(
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

    Raises: RuntimeError if sacremoses is not installed, ValueError as `quality`.
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
