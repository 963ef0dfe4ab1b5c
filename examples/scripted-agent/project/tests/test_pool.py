"""Tests of the pool and of logging in; each is a function that raises when it fails."""

import time

from auth.login import login
from auth.pool import Pool, PoolExhausted


def test_login():
    assert login(Pool(1), "ada", "lovelace")
    assert not login(Pool(1), "alan", "wrong")


def test_release():
    pool = Pool(1)
    pool.timeout = 0.01
    assert login(pool, "ada", "lovelace")
    assert login(pool, "alan", "turing"), "the connection did not come back"


def test_exhausted():
    """A caller must hear within a second that there is no connection."""
    pool = Pool(0)
    start = time.monotonic()
    try:
        pool.acquire()
    except PoolExhausted:
        pass
    assert time.monotonic() - start < 1, "waited for more than a second"
