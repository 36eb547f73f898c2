"""Operations on ragged tensors, each with a readable reference and fast implementations."""
