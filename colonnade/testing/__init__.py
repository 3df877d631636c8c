"""What the tests and `colonnade verify` share: ranks to run on, tiny models, and the comparison with one process.

Stands beside the house: it may import every room, and no room but `tools` imports it.
"""
