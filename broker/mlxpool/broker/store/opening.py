"""The choice between SQLite and PostgreSQL by the setting `state_dir`."""

from __future__ import annotations

from mlxpool.broker.store.records import StoreUnusable
from mlxpool.broker.store.sql.sql_store import KEY_LIFE, Opener
from mlxpool.broker.store.sqlite_store import SqliteOpener
from mlxpool.common.paths import expanded

POSTGRES = ("postgresql://", "postgres://")


def opener(place: str, max_bytes: int, key_life: float = KEY_LIFE) -> Opener:
    """Returns the opener of a SQLite folder, or of a PostgreSQL database if `place` is a URL.

    Raises StoreUnusable if the URL has another scheme, or if the folder or psycopg cannot be used.
    Raises StoreInUse if another broker has locked the folder.
    """
    scheme, marked, _ = place.partition("://")
    if marked and not place.startswith(POSTGRES):
        raise StoreUnusable(
            f"state_dir is a URL of {scheme!r:.40}; it may be a folder, or postgresql://…"
        )
    if not marked:
        return SqliteOpener(expanded(place), max_bytes, key_life)
    try:
        from mlxpool.broker.store.postgres_store import PostgresOpener
    except ImportError as error:
        raise StoreUnusable(
            f"a store in PostgreSQL needs psycopg ({error}): pip install 'mlxpool[postgres]'"
        ) from None
    return PostgresOpener(place, max_bytes, key_life)
