"""nvprof as the recorder of GPU activity, for GPUs before compute capability 8.0.

``backend`` chooses its options, ``run`` runs the program below it, ``convert`` makes the trace of
the files it left, of which ``rows`` writes each process and ``cards`` the GPUs, ``log`` puts what
it said into words that help.
"""
