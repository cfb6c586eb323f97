"""Studies: a matrix of training runs and their results."""
