"""A server in a thread of the test, and requests to it."""

import http.client
import json
import threading
from contextlib import closing, contextmanager


@contextmanager
def running(server):
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.should_exit = True
    thread.join()


def request(server, method, path, body=None, **headers):
    """Return the status, the text and the headers of an answer.

    Objects and lists are sent as JSON, text and bytes as they are.
    """
    if isinstance(body, dict | list):
        body = json.dumps(body)
        headers = {"Content-Type": "application/json", **headers}
    place = server.socket.getsockname()[:2]
    with closing(http.client.HTTPConnection(*place, timeout=60)) as connection:
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode(), answer.headers


def translated(server, q, source="en", target="de", **fields):
    body = {"q": q, "source": source, "target": target, **fields}
    status, text, _ = request(server, "POST", "/translate", body)
    assert status == 200, text
    return json.loads(text)
