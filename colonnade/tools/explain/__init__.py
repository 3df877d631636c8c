"""What becomes of each module of a model in a layout, why, what it costs: what `colonnade explain` prints.

`explain_model` really shards the model, on the meta device and without a process group, and reads off the result; so it
says what the sharder does, not what somebody thought it does. What the stages of a pipeline hold is in stages.py, read off
the cut that the plugin makes. Where to begin reading: explanation.py.
"""
