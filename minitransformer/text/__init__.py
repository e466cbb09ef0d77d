"""Text: lines, word pieces, encoded corpora and batches (section 5.1)."""
