"""Every architecture of the installed transformers under a pattern: what works, what is refused, and why.

python -m benchmarks.architectures
"""
