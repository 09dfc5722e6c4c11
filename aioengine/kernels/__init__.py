"""Operations, one a file: the reference, its fast forms and the condition of each."""
