"""The store's operations in SQL for both databases: tables, rows, and a function per operation."""
