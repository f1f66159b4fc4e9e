"""Training: from text to a checkpoint. Imports only the configuration, tokenizer and checkpoint of crucible."""
