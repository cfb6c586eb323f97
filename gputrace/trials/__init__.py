"""`gputrace try`: cures applied to a program from outside, measured, and kept in a ledger."""
