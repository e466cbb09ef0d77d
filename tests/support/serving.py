"""A server in a thread of the test, and requests to it."""

import http.client
import json
import socket
import threading
from contextlib import closing, contextmanager
from pathlib import Path


@contextmanager
def running(server):
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.should_exit = True
    thread.join()


@contextmanager
def serving(*checkpoints, decoding=None, **options):
    """Serve models, which decode as they do by default or as is said."""
    from minitransformer import load
    from minitransformer.commands.libretranslate import Direction
    from minitransformer.commands.serve import Server

    directions = []
    for checkpoint in map(Path, checkpoints):
        translator = load(checkpoint)
        translator.decoding = decoding or translator.decoding
        directions.append(Direction.of(translator, checkpoint))
    with running(Server(directions, **options)) as server:
        yield server


def connected(server, timeout=30):
    """Open a connection to a server, over which nothing is sent yet."""
    return socket.create_connection(server.socket.getsockname(), timeout)


def answer_on(connection):
    """Read an answer in JSON."""
    answer = http.client.HTTPResponse(connection)
    answer.begin()
    return json.load(answer)


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
