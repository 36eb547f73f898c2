"""The line: which step runs when. Builds command lines and passes days, nothing else."""
