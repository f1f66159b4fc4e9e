"""Package data: the GPT-2 vocabulary and its licence."""
