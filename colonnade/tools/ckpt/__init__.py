"""Looking at checkpoints, checking, comparing, exporting and rewriting them; without a process group."""
