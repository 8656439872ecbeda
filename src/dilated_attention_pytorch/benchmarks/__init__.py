"""Benchmarks: compared implementations, the correctness gate before every timing, machine limits, and the report."""
