"""ZeRO stages 1 and 2: gradients and optimizer states dealt out over data-parallel ranks.

From the bottom: plan (who owns what: arithmetic), storage (the flat parameters), bucket (the gradients of a range of it),
reducer (when they travel), shards (what the optimizer steps on).
"""
