"""The figures that the README quotes, one command each."""
