"""Messages about what a pool keeps on its disk: jobs, batches and files."""
