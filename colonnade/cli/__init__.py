"""The command `colonnade`: arguments and printing, nothing else."""
