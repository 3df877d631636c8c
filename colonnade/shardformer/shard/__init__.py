"""The sharder: matches a policy with a model, checks it, applies it."""
