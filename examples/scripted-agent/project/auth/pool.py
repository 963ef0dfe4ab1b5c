"""A pool of connections to the user database."""

import os
import time


class PoolExhausted(Exception):
    """No connection came back in time."""


class Pool:
    def __init__(self, size):
        self.free = [f"connection-{n}" for n in range(size)]
        self.timeout = float(os.environ.get("AUTH_POOL_TIMEOUT", "3"))

    def acquire(self):
        deadline = time.monotonic() + self.timeout
        while not self.free:
            if time.monotonic() >= deadline:
                raise PoolExhausted(f"no connection within {self.timeout} s")
            time.sleep(0.01)
        return self.free.pop()

    def release(self, connection):
        return connection
