"""What a run reads: texts in several formats, as tokens, in a cache on the disk, packed into rows and batches."""
