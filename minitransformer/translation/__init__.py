"""Translation (section 6.1): incremental decoding, beam search, pages, export."""
