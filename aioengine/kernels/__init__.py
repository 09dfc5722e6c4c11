"""Operations, one a file: the reference, the fast implementations and the condition of each."""
