"""Messages about the stored data of a pool: jobs, batches and files."""
