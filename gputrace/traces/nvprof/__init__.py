"""Files of nvprof (.nvvp, .nvprof): what its recorder and a reader of them both need.

calls   names of CUDA's calls, of which the files hold the numbers alone
file    what a file holds, whichever version wrote it
rows    its rows as those of nsys's tables, in SQL
"""
