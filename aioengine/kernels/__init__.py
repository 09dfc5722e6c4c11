"""Operations in torch. On a GPU they call the kernels in ``kernels.triton``; the torch code is their reference."""
