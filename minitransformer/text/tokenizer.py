"""The vocabulary of word pieces that both languages share (section 5.1)."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Sequence
from zlib import crc32

import sentencepiece

from minitransformer.settings.config import BOS_ID, EOS_ID, PAD_ID, UNK_ID
from minitransformer.settings.text_config import VocabularyConfig

# SentencePiece's mark for a space; a piece that starts with this mark begins a word.
SPACE = "\u2581"

# How a vocabulary is learned unless settings say otherwise.
LEARNED = VocabularyConfig()

# Vocabularies of at least this size include the 256 bytes as pieces, which would take
# too large a share of a smaller one.
BYTES_FROM_SIZE = 1024

# The threads that learn a unigram vocabulary, whatever the machine has: their number
# decides in which order probabilities are summed, and so how they are rounded.
UNIGRAM_THREADS = 8

# From longer text, a vocabulary is learned on a random sample of this many lines.
MAX_SENTENCES = 1_000_000

# Lines of more bytes take no part in it: from a word of 300,000 characters,
# SentencePiece cannot learn a unigram vocabulary.
MAX_SENTENCE = 1 << 15


class Tokenizer:
    """Byte-pair encoding, or a unigram model, by SentencePiece: text to ids and back.

    `model` is the serialised SentencePiece model, which is part of every checkpoint.
    A character that the training text lacks becomes the pieces of its UTF-8 bytes, such
    as <0xE2>; in vocabularies of fewer than BYTES_FROM_SIZE pieces, it is unknown.

    Differs: the paper's English-French vocabulary is one of word pieces (Wu et al.,
    2016). SentencePiece normalises text by NFKC unless settings say otherwise, so that
    a ligature becomes its letters, and it joins spaces that follow one another.

    Raises: ValueError if `model` is damaged or has other ids for the special symbols.
    """

    def __init__(self, model: bytes) -> None:
        self.model = model
        try:
            if not model:  # which SentencePiece would complain about only later
                raise RuntimeError("no bytes")
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
            # All pieces are read once, because those of a damaged model may be no text.
            self._processor.id_to_piece(list(range(len(self._processor))))
        except (RuntimeError, UnicodeDecodeError) as error:
            raise ValueError(
                "expected a SentencePiece model, got other bytes"
            ) from error
        self.vocab_size = len(self._processor)
        p = self._processor
        found = p.pad_id(), p.unk_id(), p.bos_id(), p.eos_id()
        if found != (PAD_ID, UNK_ID, BOS_ID, EOS_ID):
            raise ValueError(
                "tokenizer: expected padding, unknown, begin and end to have the ids "
                f"{PAD_ID}, {UNK_ID}, {BOS_ID}, {EOS_ID}, got {found}"
            )

    @property
    def checksum(self) -> int:
        """The CRC-32 of the model, by which ranks compare their vocabularies."""
        return crc32(self.model)

    @classmethod
    def train(
        cls,
        lines: Iterable[str],
        vocab_size: int,
        num_threads: int = 1,
        config: VocabularyConfig = LEARNED,
    ) -> Tokenizer:
        """Learn a vocabulary of exactly `vocab_size` pieces, bytes (if any) among them.

        The symbols of `config` follow the special ones.

        Raises: ValueError saying which size is possible if this one is not.
        """
        model, unigram = io.BytesIO(), config.vocab_type == "unigram"
        try:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=iter(lines),
                model_writer=model,
                model_type=config.vocab_type,
                vocab_size=vocab_size,
                character_coverage=config.character_coverage,
                normalization_rule_name=config.normalization,
                user_defined_symbols=list(config.user_symbols),
                byte_fallback=vocab_size >= BYTES_FROM_SIZE,
                input_sentence_size=MAX_SENTENCES,
                max_sentence_length=MAX_SENTENCE,
                shuffle_input_sentence=True,
                pad_id=PAD_ID,
                unk_id=UNK_ID,
                bos_id=BOS_ID,
                eos_id=EOS_ID,
                num_threads=UNIGRAM_THREADS if unigram else num_threads,
                minloglevel=2,
            )
        except (RuntimeError, OSError) as error:
            raise ValueError(_explain(str(error), vocab_size)) from error
        return cls(model.getvalue())

    def encode(self, lines: Sequence[str], num_threads: int = 1) -> list[list[int]]:
        """Return the ids of each line, without BOS and EOS.

        Raises: ValueError if a line has a lone surrogate, which is no character.
        """
        try:
            return self._processor.encode(list(lines), num_threads=num_threads)
        except TypeError as error:
            raise _surrogate_error(lines) from error

    def decode(self, ids: Sequence[Sequence[int]]) -> list[str]:
        """Return the detokenised text of each list of ids.

        Pieces of bytes that are no UTF-8 become U+FFFD.
        """
        # One by one: for a list of lists, SentencePiece starts threads at every call.
        return [self._processor.decode([int(i) for i in line]) for line in ids]

    def split(self, ids: Sequence[int], limit: int) -> list[list[int]]:
        """Cut ids into parts of at most `limit`, between words if possible.

        An empty list makes one empty part.
        """
        parts, start = [], 0
        while len(ids) - start > limit:
            pieces = self.pieces(ids[start + 1 : start + limit + 1])
            boundaries = [
                i for i, p in enumerate(pieces, start=1) if p.startswith(SPACE)
            ]
            end = start + (boundaries[-1] if boundaries else limit)
            parts.append(list(ids[start:end]))
            start = end
        return [*parts, list(ids[start:])]

    def normalise(self, text: str) -> str:
        """Return text as it is before it is cut, with SPACE in place of each space.

        Raises: ValueError if it has a lone surrogate.
        """
        try:
            return self._processor.normalize(text)
        except (TypeError, RuntimeError) as error:
            raise _surrogate_error([text]) from error

    def keeps_whole(self, symbol: str) -> bool:
        """Whether a text is one piece wherever it stands, as a user symbol is."""
        [ids] = self.encode([symbol])
        return self.pieces(ids[-1:]) == [symbol]

    def written(self) -> list[str]:
        """Return the text of each piece; special symbols and bytes have none."""
        p, pieces = self._processor, self.all_pieces()
        silent = p.is_control, p.is_unknown, p.is_unused, p.is_byte
        return [
            "" if any(kind(i) for kind in silent) else piece
            for i, piece in enumerate(pieces)
        ]

    def all_pieces(self) -> list[str]:
        """Return the vocabulary, in order of id."""
        return self.pieces(range(self.vocab_size))

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Return the word piece of each id."""
        return [self._processor.id_to_piece(int(i)) for i in ids]


def _surrogate_error(lines: Sequence[str]) -> ValueError:
    wrong = next((x for x in lines if re.search("[\ud800-\udfff]", x)), "")
    return ValueError(f"expected Unicode text, got a lone surrogate in {wrong[:40]!r}")


def _explain(message: str, vocab_size: int) -> str:
    """Put SentencePiece's error in terms of our settings."""
    if found := re.search(r"value <= (\d+)", message):
        limit = int(found[1])
        if vocab_size >= BYTES_FROM_SIZE > limit:  # fewer pieces come without bytes
            limit -= 256
        return (
            f"vocab_size: expected at most {limit} word pieces, which is what this "
            f"text supports, got {vocab_size}"
        )
    if found := re.search(r"smaller than required_chars\. \d+ vs (\d+)", message):
        least = int(found[1])
        if vocab_size < BYTES_FROM_SIZE <= least:
            least += 256
        return (
            f"vocab_size: expected at least {least} word pieces, one for each "
            f"character of this text and each special symbol, got {vocab_size}"
        )
    if "sentences_.empty()" in message or "all_chars_count) > (0)" in message:
        return f"expected text to learn {vocab_size} word pieces from, found none"
    return f"could not learn {vocab_size} word pieces: {message.strip()}"
