"""Communication: collectives counted in the ledger, their conjugate autograd pairs, the gradient reducer."""
