"""For tests of aioengine and of programs that use it: an engine without a model, and faults on demand."""
