"""Between text and tokens, in the front end: tokenizer, chat template, incremental detokenizer, stop strings."""
