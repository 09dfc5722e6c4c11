"""From token ids to text: incremental decoding, the search for stops, and the pipeline of both for one request.

Pure: the standard library, msgspec and ``regex``; no clock, no process, no tokenizer library.
"""
