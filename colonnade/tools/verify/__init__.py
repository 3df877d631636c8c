"""The proof that a layout computes what one process computes: what `colonnade verify` does.

`prepare` checks what was asked for and writes a job, `verify_on_this_rank` runs it on every rank, `Certificate` is the
outcome. Where to begin reading: check.py.
"""
