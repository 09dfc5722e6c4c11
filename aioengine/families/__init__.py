"""What config.json means, one file for each ``model_type``; a file's ``PLUGIN`` reads it into a ``DecoderConfig``."""
