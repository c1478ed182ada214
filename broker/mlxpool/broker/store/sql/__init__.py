"""The operations as SQL for both databases: tables, rows, and a function for each operation."""
