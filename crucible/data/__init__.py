"""Package data: the GPT-2 vocabulary, the text that quickstart trains on, and what may be done with each."""
