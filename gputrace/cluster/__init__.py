"""Files of a run read and analyzed by the workers of a Dask cluster, where the files are.

`shards` has the GPUs that the analysis asks, `remote` the trace, `messages` and `records` what
travels. On the other side, `worker` answers, and `placed` gives a file its place in the run.
`scheduler` has the cluster; Dask is imported when one is asked for.
"""
