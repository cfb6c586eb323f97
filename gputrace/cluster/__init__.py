"""Files of a run read by the workers of a Dask cluster, where the files are.

`remote` has the trace that the analysis sees, `messages` what travels, `worker` what reads on the
other side, `scheduler` the cluster. Dask is imported when one is asked for.
"""
