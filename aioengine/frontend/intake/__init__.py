"""From a call to the messages of its rows: checks, tokens, limits."""
