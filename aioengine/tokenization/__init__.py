"""Text and chats to token ids: the tokenizer of a model folder, and its chat templates."""
