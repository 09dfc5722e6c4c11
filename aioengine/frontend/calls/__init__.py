"""Open calls: their rows, the delivery of chunks, and the limits of the queue."""
