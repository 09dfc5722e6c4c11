"""What the files of a model folder or an adapter folder say: its config, weights and tokenizer. No torch."""
