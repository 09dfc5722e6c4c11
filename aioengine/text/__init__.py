"""How ids become words: incremental decoding, stop strings, and what they do together for one request.

Pure: the standard library and the ``regex`` package, no clock, no process, no tokenizer library.
"""
