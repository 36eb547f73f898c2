"""Operations on ragged tensors: a readable reference and a fast path behind one function."""
