"""Between text and token ids: tokenizers, incremental detokenising, stop strings."""
