"""OpenAI's Files and Batches: uploads, their lines as requests of the pool, and result files."""
