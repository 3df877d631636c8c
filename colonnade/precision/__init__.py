"""Number formats, master weights, the loss scale, the gradient norm, clipping, and the optimizer that uses them."""
