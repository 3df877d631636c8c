"""One short file per model family. A file here is found by itself; see docs/new_policy.md."""
