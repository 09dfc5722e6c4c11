"""For tests of aioengine and of programs that use it: the real engine with a fake model, and faults on demand."""
