"""The student: the small model that ranks the candidates of a surface."""
