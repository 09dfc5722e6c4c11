"""Operations, one per file: a reference, faster implementations, and the condition for each of them."""
