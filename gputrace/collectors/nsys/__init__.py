"""NVIDIA Nsight Systems as the recorder of GPU activity.

``backend`` chooses its options, ``run`` runs the program below it, ``reports`` finds what it left,
``convert`` makes the trace of that, ``log`` puts what it said into words that help.
"""
