"""Number formats, master weights, the gradient norm and the optimizer that uses them."""
