"""A server in a thread of the test."""

import threading
from contextlib import contextmanager


@contextmanager
def running(server):
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.should_exit = True
    thread.join()
