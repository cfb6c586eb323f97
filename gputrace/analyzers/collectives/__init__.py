"""Collectives: which kernels of which ranks are one, how long each rank waits, what they carry.

`matching` puts rows of all ranks together (by `pairing`), `matched` is what comes of it, `waiting`
tells the wait apart from the transfer, `totals` sums up by operation.
"""
