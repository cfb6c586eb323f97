"""Nsight Systems: SQLite exports of every schema since 2.9.1, and reports by way of them."""
