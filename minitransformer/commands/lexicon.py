"""The command `lexicon`: likely translations of each token, from the training text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from minitransformer.cli import Parser, exit_code, positive
from minitransformer.runs.run_directory import RunDirectory
from minitransformer.text.batches import ParallelCorpus
from minitransformer.text.cache import encoded_corpus
from minitransformer.text.find import text_of
from minitransformer.text.ids import Ragged
from minitransformer.text.lines import refuse_overwriting_inputs
from minitransformer.text.tokenizer import Tokenizer
from minitransformer.translation.shortlist import Lexicon

# The most links, of a target token to a source token, that training looks at.
MAX_LINKS = 1 << 24


def train_lexicon(
    corpus: ParallelCorpus,
    vocab_size: int,
    translations: int = 32,
    frequent: int = 256,
    iterations: int = 5,
) -> Lexicon:
    """Estimate translation probabilities by expectation maximisation.

    In IBM's Model 1 (Brown et al., 1993), every target token of a pair comes from one
    of its source tokens, whatever their order. A random part of the corpus is used if
    it has more than MAX_LINKS possible links. A token that this source text lacks, such
    as a byte of a rare character, is its own translation, so that it can be copied.
    """
    pairs = np.random.default_rng(1).permutation(len(corpus))
    links = corpus.source.lengths[pairs].astype(np.int64) * corpus.target.lengths[pairs]
    pairs, links = pairs[links > 0], links[links > 0]
    pairs = pairs[: max(1, int(np.searchsorted(np.cumsum(links), MAX_LINKS)))]
    lengths, repeats = corpus.source.lengths[pairs], corpus.target.lengths[pairs]
    source = Ragged(corpus.source.concatenate(pairs), np.cumsum([0, *lengths]))
    target = corpus.target.concatenate(pairs)
    # All possible links: for each target token, the source tokens of its pair in a row.
    from_tokens = source.concatenate(np.repeat(np.arange(len(pairs)), repeats))
    count = np.repeat(lengths, repeats)  # of the links of each target token
    first = np.cumsum(count) - count
    keys, key_of_link = np.unique(
        from_tokens.astype(np.int64) * vocab_size + np.repeat(target, count),
        return_inverse=True,
    )
    from_token, to_token = np.divmod(keys, vocab_size)
    probability = np.ones(len(keys))
    for _ in range(iterations):
        share = probability[key_of_link]
        share /= np.repeat(np.add.reduceat(share, first), count)
        expected = np.bincount(key_of_link, share, len(keys))
        probability = expected / np.bincount(from_token, expected)[from_token]
    by_probability = np.lexsort((-probability, from_token))
    rank = np.arange(len(keys)) - np.searchsorted(from_token, from_token)
    best = by_probability[rank < translations]
    absent = np.setdiff1d(np.arange(vocab_size), from_token)
    from_token = np.concatenate([from_token[best], absent])
    order = np.argsort(from_token, kind="stable")
    to_token = np.concatenate([to_token[best], absent])[order]
    starts = np.searchsorted(from_token[order], np.arange(vocab_size + 1))
    counts = np.bincount(target, minlength=vocab_size)
    most = np.argsort(-counts, kind="stable")[:frequent]
    return Lexicon(Ragged(to_token, starts), most[counts[most] > 0])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(
        "minitransformer lexicon",
        "Learn the likely translations of each word from a run's training text.",
        (
            "minitransformer lexicon runs/NAME lexicon.safetensors",
            "python translate.py --model runs/NAME --shortlist lexicon.safetensors",
        ),
        "Translation with the lexicon is faster and may miss a rare translation.",
    )
    add = parser.add_argument
    add("run", type=Path, help="the run directory whose training text is read")
    add("file", type=Path, help="the lexicon to write")
    kept = "likely translations of each token (default 32)"
    add("--translations", type=positive, default=32, metavar="N", help=kept)
    always = "frequent tokens in every shortlist (default 256)"
    add("--frequent", type=positive, default=256, metavar="N", help=always)
    cache = "folder of encoded text (default cache)"
    add("--cache", type=Path, default=Path("cache"), metavar="DIR", help=cache)
    args = parser.parse_args(arguments)

    def work() -> None:
        run = RunDirectory(args.run)
        settings = run.read_config()
        text = (Path(file) for pair in settings.text.values() for file in pair)
        refuse_overwriting_inputs("file", args.file, *run.own_files(), *text)
        train = text_of(settings, args.cache)["train"]
        tokenizer = Tokenizer(run.tokenizer.read_bytes())
        corpus = encoded_corpus(train, tokenizer, args.cache)
        size, count = tokenizer.vocab_size, args.translations
        train_lexicon(corpus, size, count, args.frequent).save(args.file)
        print(f"wrote {args.file} from {len(corpus):,} pairs")

    return exit_code(parser.prog, work)
