"""Operations as SQL, once for both databases: tables, rows, and a function for each operation."""
