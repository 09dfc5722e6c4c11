"""Images before they are tensors: read, downloaded, decoded, resized, and placed into prompts."""
