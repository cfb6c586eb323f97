"""Reading and analysis of a run's files by the workers of a Dask cluster, where the files are.

On the client, `shards` has the GPUs that the analysis queries, `remote` the trace, `messages` and
`records` the wire format. On the workers, `worker` answers requests, and `placed` maps a file to
the numbering and clock of the run. `scheduler` connects to the cluster; Dask is imported on demand.
"""
