"""From text to batches: corpora, tokens, vocabularies, padding."""
