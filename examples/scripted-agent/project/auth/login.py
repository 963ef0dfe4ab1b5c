"""Logging in."""

from auth.pool import Pool

USERS = {"ada": "lovelace", "alan": "turing"}


def login(pool: Pool, user: str, password: str) -> bool:
    connection = pool.acquire()
    try:
        return USERS.get(user) == password
    finally:
        pool.release(connection)
