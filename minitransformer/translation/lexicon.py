"""Which target tokens a source token may become, learned from the training text.

A translation with a shortlist computes logits only for the likely translations of the
words in a batch and for the most frequent words. That saves most of the output
projection. The probabilities are then relative to the list, and a rare translation may
be missed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from minitransformer.files import replacing
from minitransformer.runs.run_directory import RunDirectory
from minitransformer.settings.config import BOS_ID, EOS_ID, PAD_ID, UNK_ID
from minitransformer.settings.options import Parser, exit_code, positive
from minitransformer.text.batches import ParallelCorpus
from minitransformer.text.cache import encoded_corpus
from minitransformer.text.ids import Ragged
from minitransformer.text.lines import text_pairs
from minitransformer.text.tokenizer import Tokenizer

FORMAT = "minitransformer lexicon 1"
SPECIAL = np.array(sorted((PAD_ID, UNK_ID, BOS_ID, EOS_ID)))

# Pairs of a source and a target token looked at: enough for any vocabulary.
MAX_LINKS = 1 << 24


class Lexicon:
    """The likely translations of each token, and the most frequent target tokens.

    Shapes: translations, V lists of token ids; frequent [any]
    """

    def __init__(self, translations: Ragged, frequent: np.ndarray) -> None:
        self.translations, self.frequent = translations, frequent

    def shortlist(self, source: np.ndarray) -> np.ndarray:
        """All tokens that a translation of `source` may need, in order of id.

        Padding, unknown, begin and end come first. Shapes: any -> [n]
        """
        likely = self.translations.end_to_end(np.unique(source))
        return np.unique(np.concatenate([SPECIAL, self.frequent, likely]))

    def save(self, path: Path) -> None:
        tensors: dict[str, np.ndarray] = {
            "ids": np.asarray(self.translations.ids, np.int32),
            "starts": np.asarray(self.translations.starts, np.int64),
            "frequent": np.asarray(self.frequent, np.int32),
        }
        with replacing(path) as partial:
            save_file(tensors, partial, {"format": FORMAT})

    @classmethod
    def load(cls, path: Path, vocab_size: int) -> Lexicon:
        """Raises: ValueError if the file is not a lexicon of that vocabulary."""
        if not path.is_file():
            raise FileNotFoundError(f"expected a lexicon, found no file {path}")
        try:
            with safe_open(path, framework="np") as file:
                if (file.metadata() or {}).get("format") != FORMAT:
                    raise ValueError(f"expected format {FORMAT!r}")
                ids, starts, frequent = map(
                    file.get_tensor, ("ids", "starts", "frequent")
                )
            if len(starts) != vocab_size + 1:
                raise ValueError(
                    f"expected {vocab_size} word pieces, got {len(starts) - 1}"
                )
            ordered = starts[0] == 0 and starts[-1] == len(ids)
            if not ordered or (np.diff(starts) < 0).any():
                raise ValueError("expected lists one after the other")
            for tokens in (ids, frequent):
                if ((tokens < 0) | (tokens >= vocab_size)).any():
                    raise ValueError(f"expected token ids below {vocab_size}")
        except (SafetensorError, ValueError) as error:
            raise ValueError(f"{path}: not a usable lexicon: {error}") from error
        return cls(Ragged(ids, starts), frequent)


def train_lexicon(
    corpus: ParallelCorpus,
    vocab_size: int,
    translations: int = 32,
    frequent: int = 256,
    iterations: int = 5,
) -> Lexicon:
    """Estimate translation probabilities by expectation maximisation.

    IBM's Model 1 (Brown et al., 1993): every target token of a pair comes from one of
    its source tokens, whatever their order. A random part of the corpus is used where
    it has more than MAX_LINKS pairs of tokens.
    """
    order = np.random.default_rng(1).permutation(len(corpus))
    links = corpus.source.lengths[order] * corpus.target.lengths[order]
    order, links = order[links > 0], links[links > 0]
    order = order[: max(1, int(np.searchsorted(np.cumsum(links), MAX_LINKS)))]
    source, first = _gathered(corpus.source, order)
    target, _ = _gathered(corpus.target, order)
    # Each target token is linked to all source tokens of its sentence, in a row.
    sentence = np.repeat(np.arange(len(order)), corpus.target.lengths[order])
    count = corpus.source.lengths[order][sentence]
    starts = np.cumsum(count) - count
    position = np.arange(count.sum()) - np.repeat(starts, count)
    linked = source[np.repeat(first[sentence], count) + position].astype(np.int64)
    keys, link = np.unique(
        linked * vocab_size + np.repeat(target, count), return_inverse=True
    )
    from_token, to_token = np.divmod(keys, vocab_size)
    probability = np.ones(len(keys))
    for _ in range(iterations):
        share = probability[link]
        share /= np.repeat(np.add.reduceat(share, starts), count)
        expected = np.bincount(link, share, len(keys))
        probability = expected / np.bincount(from_token, expected)[from_token]
    ranked = np.lexsort((-probability, from_token))
    bounds = np.searchsorted(from_token, np.arange(vocab_size + 1))
    rank = np.arange(len(keys)) - bounds[from_token[ranked]]
    kept = ranked[rank < translations]
    kept_bounds = np.searchsorted(from_token[kept], np.arange(vocab_size + 1))
    counts = np.bincount(target, minlength=vocab_size)
    most = np.argsort(-counts, kind="stable")[:frequent]
    return Lexicon(Ragged(to_token[kept], kept_bounds), most[counts[most] > 0])


def _gathered(lines: Ragged, order: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The tokens of the chosen lines end to end, and where each line starts."""
    lengths = lines.lengths[order]
    return lines.end_to_end(order), np.cumsum(lengths) - lengths


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(
        "minitransformer lexicon",
        "Learn from a run's training text which words a source word may become.",
        (
            "minitransformer lexicon runs/NAME lexicon.safetensors",
            "python translate.py --model runs/NAME --shortlist lexicon.safetensors",
        ),
        "Translating with a shortlist is faster and may miss a rare translation.",
    )
    add = parser.add_argument
    add("run", type=Path, help="the run directory whose training text teaches it")
    add("file", type=Path, help="the lexicon to write")
    add("--translations", type=positive, default=32, help="of a token (default 32)")
    add("--frequent", type=positive, default=256, help="tokens always in (default 256)")
    add("--cache", type=Path, default=Path("cache"), help="as in train.py")
    args = parser.parse_args(arguments)

    def work() -> None:
        run = RunDirectory(args.run)
        train = text_pairs(run.read_config().text)["train"]
        tokenizer = Tokenizer(run.tokenizer.read_bytes())
        corpus = encoded_corpus(train, tokenizer, args.cache)
        size, count = tokenizer.vocab_size, args.translations
        train_lexicon(corpus, size, count, args.frequent).save(args.file)
        print(f"wrote {args.file} from {len(corpus):,} pairs")

    return exit_code("lexicon", work)
