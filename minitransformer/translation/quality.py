"""BLEU and chrF: how close translations come to their references (section 6.1)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from minitransformer.settings.extras import import_extra
from minitransformer.settings.options import UsageError
from minitransformer.text.clean import clean

# Letters of scripts without spaces between words. Unicode may break a line within words
# of most of them (Chinese, Japanese, Thai, Khmer, ...); three more scripts are named.
UNSPACED = r"[\p{lb=ID}\p{lb=CJ}\p{lb=SA}\p{Tibetan}\p{Balinese}\p{Javanese}]"

# Lines times samples of the bootstrap: sacreBLEU keeps 72 bytes of each, 360 MB.
MOST_RESAMPLED = 5_000_000


@dataclass(frozen=True)
class TranslationQuality:
    """How close translations come to their references.

    `bleu` is sacreBLEU's corpus score from 0 to 100, with its signature, on
    detokenised, cased text that was cleaned (`clean`). `length` is the quotient of
    the words of translations and references, as BLEU counts them. `exact` is the share
    of translations that equal their reference.
    """

    bleu: float
    bleu_signature: str
    length: float
    exact: float


def choose_tokenizer(references: Iterable[str]) -> str:
    """Return sacreBLEU's tokeniser for the script of most letters of a text."""
    import regex

    text = "".join(references)
    patterns = r"\p{L}", r"\p{Han}", rf"(?V1)[\p{{L}}&&{UNSPACED}]"
    letters, han, unspaced = (len(regex.findall(x, text)) for x in patterns)
    if 2 * unspaced <= letters:
        return "13a"
    return "zh" if han > 0.9 * unspaced else "char"  # Japanese has others, too


def bleu_metric(references: Sequence[str], tokenizer: str | None) -> Any:
    """Return sacreBLEU's BLEU for these references, without its warnings.

    If none of them has four words, only shorter n-grams count (eff:yes).
    """
    from sacrebleu.metrics import BLEU  # slow to import, and not always needed

    name = tokenizer or choose_tokenizer(references)
    bleu = BLEU(tokenize=name, force=True)
    if all(len(bleu.tokenizer(line).split()) < 4 for line in references):
        bleu = BLEU(tokenize=name, force=True, effective_order=True)
    return bleu


def _stops_apart(lines: Sequence[str]) -> bool:
    """Whether most full stops at ends of lines come after a space."""
    stops = [line[-2:] for line in lines if line.endswith(".")]
    return 2 * stops.count(" .") > len(stops)


def looks_tokenised(
    references: Sequence[str], tokenizer: str | None, translations: Sequence[str]
) -> list[str]:
    """Return advice if the references look tokenised, and what helps.

    It depends on whether the translations look tokenised, too.
    """
    alike = _stops_apart(translations)
    if not _stops_apart(references) or (alike and tokenizer == "none"):
        return []
    helps = "--bleu-tokenizer none counts their words"
    if not alike:
        helps = "translations do not: detokenise them (sacremoses detokenize)"
    return [f"references look tokenised, {helps}"]


def translation_quality(
    translations: Sequence[str],
    references: Sequence[str],
    tokenizer: str | None = None,
) -> TranslationQuality:
    """Compare each translation with one reference.

    `tokenizer` is sacreBLEU's name of the tokeniser for BLEU, by default that of
    `choose_tokenizer`.

    Raises: ValueError if there are no references, or not as many as translations.
    """
    # One reference for each translation.
    if len(translations) != len(references) or not references:
        raise ValueError(
            f"expected as many references as translations and at least one, got "
            f"{len(references)} and {len(translations)}"
        )
    # Both sides in one form of text, with single spaces.
    translations, references = map(_counted, (translations, references))
    bleu = bleu_metric(references, tokenizer)
    counted = bleu.corpus_score(translations, [references])
    pairs = zip(translations, references, strict=True)
    return TranslationQuality(
        bleu=counted.score,
        bleu_signature=str(bleu.get_signature()),
        length=counted.sys_len / max(counted.ref_len, 1),
        exact=sum(t == r for t, r in pairs) / len(references),
    )


def _counted(lines: Sequence[str]) -> list[str]:
    """Return lines as BLEU and chrF count them."""
    return [" ".join(clean(line).split()) for line in lines]


def report(
    translations: Sequence[str],
    references: Sequence[str],
    language: str | None = None,
    tokenizer: str | None = None,
    other: Sequence[str] | None = None,
) -> str:
    """Return all measures as text; for a language, with `compound_split_bleu`.

    The 95% intervals of BLEU and chrF are percentiles of a bootstrap of the lines
    (Koehn, 2004). With `other` translations of the same lines, so does p: the
    probability that a difference as large as theirs is due to chance.

    Raises: as `translation_quality`.
    """
    from sacrebleu.metrics import CHRF

    quality = translation_quality(translations, references, tokenizer)
    if other is not None and len(other) != len(references):
        raise ValueError(
            f"expected as many lines to compare as references, got {len(other)} for "
            f"{len(references)} references"
        )
    samples = min(1000, MOST_RESAMPLED // len(references))
    ours, targets = map(_counted, (translations, references))
    lines = []
    compared = []
    for name, metric in (("BLEU", bleu_metric(targets, tokenizer)), ("chrF", CHRF())):
        score = metric.corpus_score(ours, [targets]).score
        interval = ""
        if samples >= 100:  # there are not too many lines
            scores = _resampled_scores(metric, ours, targets, samples)
            low, high = np.percentile(scores, [2.5, 97.5])
            interval = f" ({low:.2f} to {high:.2f})"
            if other is not None:
                # How often a resampled difference is as far from their mean.
                theirs = _counted(other)
                their_score = metric.corpus_score(theirs, [targets]).score
                gain = score - their_score
                gains = scores - _resampled_scores(metric, theirs, targets, samples)
                beyond = np.abs(gains) - np.abs(gains).mean() > abs(gain)
                p = (beyond.sum() + 1) / (samples + 1)
                than = f"{name} of --compare {their_score:.2f}"
                compared.append(f"{than}: {gain:+.2f}, p = {p:.3f}")
        lines.append(f"{name} {score:.2f}{interval}  {metric.get_signature()}")
    lines.append(
        f"length {quality.length:.1%} of the references, "
        f"exact matches {quality.exact:.1%}"
    )
    lines += compared
    if language is not None:
        split = compound_split_bleu(translations, references, language)
        lines.append(f"BLEU {split:.2f}  tokenised, compounds split")
    lines += looks_tokenised(references, tokenizer, translations)
    return "\n".join(lines)


def _resampled_scores(
    metric: Any, translations: Sequence[str], references: Sequence[str], samples: int
) -> np.ndarray:
    """Return the scores of sacreBLEU's bootstrap, of the same lines in each call."""
    from sacrebleu.significance import _bootstrap_resample

    statistics = metric._extract_corpus_statistics(translations, [references])
    _, resampled = _bootstrap_resample(statistics, metric, samples)
    return np.array([x.score for x in resampled])


def compound_split_bleu(
    translations: Sequence[str], references: Sequence[str], language: str
) -> float:
    """Return BLEU, counted as the paper's 27.3 and 28.4 (section 6.1, Table 2).

    Unicode punctuation is replaced, Moses tokenises both sides as text in `language`,
    and the hyphen of a compound becomes a separate word. BLEU is counted over these
    words, cased and without smoothing. On newstest2014 this BLEU is 0.7 to 1 above
    sacreBLEU's; compare it only with BLEU that was counted in the same way.

    Raises: as `import_moses`.
    """
    from sacrebleu.metrics import BLEU

    # Moses: normalise, tokenise, and divide compounds.
    moses = import_moses(language)
    normalizer = moses.MosesPunctNormalizer(language)
    tokenizer = moses.MosesTokenizer(language)

    def words(line: str) -> str:
        line = normalizer.replace_unicode_punct(clean(line))
        tokenised = tokenizer.tokenize(line, return_str=True)
        return re.sub(r"(\S)-(\S)", r"\1 ##AT##-##AT## \2", tokenised)

    bleu = BLEU(tokenize="none", smooth_method="none", force=True)
    ours, theirs = (list(map(words, side)) for side in (translations, references))
    return bleu.corpus_score(ours, [theirs]).score


def import_moses(language: str) -> ModuleType:
    """Return sacremoses, if it can tokenise text in this language.

    Raises: RuntimeError if it is not installed, UsageError if it does not know the
    language.
    """
    need = "compound-split BLEU needs sacremoses"
    moses = import_extra("sacremoses", "moses", need)
    known = sorted({*moses.corpus.NonbreakingPrefixes().available_langs.values()})
    if language not in known:  # it would be tokenised as English
        expected = f"expected one of {', '.join(known)}"
        raise UsageError(f"--compound-split: {expected}, got {language}")
    return moses
