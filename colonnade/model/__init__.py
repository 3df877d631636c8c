"""Facts about a model that every room reads: how its tensors lie over ranks, where it begins, repeats and ends."""
