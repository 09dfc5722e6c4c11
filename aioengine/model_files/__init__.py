"""Reads the files of model folders and adapter folders: config, weights and tokenizer. Torch-free."""
