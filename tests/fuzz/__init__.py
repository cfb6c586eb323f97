"""Fuzzers: broken and odd inputs for every reader, and what must be true of each (docs/fuzzing.md).

values, mutators   what an input is turned into
seeds              the inputs of the corpus, which all others come from
targets            what is fuzzed, and how an input is given to it
guard              what no input may do
worker             gives inputs to one target, in a process of its own
runner             starts workers, sees what became of them, and adds up
shrink             makes an input that failed small
page               the table of docs/fuzzing.md
"""
