"""Shortlists: the words that the translations of a batch of sentences may need.

With a lexicon of likely translations, logits are computed for a shortlist only: the
likely translations of the words in a batch, and the most frequent words. That saves
most of the output projection. Probabilities are then relative to the shortlist, and a
rare translation may be missed. `minitransformer lexicon` makes the lexicon.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from minitransformer.runs.checkpoint import write_tensors
from minitransformer.settings.config import BOS_ID, EOS_ID, PAD_ID, UNK_ID
from minitransformer.system.files import atomic_write
from minitransformer.text.ids import Ragged

FORMAT = "minitransformer lexicon 1"
SPECIAL = np.array(sorted((PAD_ID, UNK_ID, BOS_ID, EOS_ID)))


class Lexicon:
    """The likely translations of each token, and the most frequent target tokens.

    Shapes: translations, V lists of target tokens; frequent [any]
    """

    def __init__(self, translations: Ragged, frequent: np.ndarray) -> None:
        self.translations, self.frequent = translations, frequent

    def shortlist(self, source: np.ndarray) -> np.ndarray:
        """Return the tokens that translations of `source` may need, in order of id.

        The special tokens are among them and come first. Shapes: any -> [n]
        """
        likely = self.translations.concatenate(np.unique(source))
        return np.unique(np.concatenate([SPECIAL, self.frequent, likely]))

    def save(self, path: Path) -> None:
        tensors: dict[str, np.ndarray] = {
            "ids": np.asarray(self.translations.ids, np.int32),
            "starts": np.asarray(self.translations.starts, np.int64),
            "frequent": np.asarray(self.frequent, np.int32),
        }
        with atomic_write(path) as file:
            write_tensors(file, tensors, {"format": FORMAT})

    @classmethod
    def load(cls, path: Path, vocab_size: int) -> Lexicon:
        """Raises: ValueError if the file is no lexicon of a vocabulary of this size."""
        try:
            with safe_open(path, framework="np") as file:
                if (file.metadata() or {}).get("format") != FORMAT:
                    raise ValueError(f"expected format {FORMAT!r}")
                names = "ids", "starts", "frequent"
                ids, starts, frequent = map(file.get_tensor, names)
            if len(starts) != vocab_size + 1:
                expected = f"expected {vocab_size} word pieces"
                raise ValueError(f"{expected}, got {len(starts) - 1}")
        except (OSError, SafetensorError, ValueError) as error:
            raise ValueError(f"{path}: not a usable lexicon: {error}") from error
        return cls(Ragged(ids, starts), frequent)
