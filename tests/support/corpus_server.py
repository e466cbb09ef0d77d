"""A server of corpora on this machine, and archives for it."""

import hashlib
import http.server
import io
import tarfile
import threading
from contextlib import contextmanager


class Server(http.server.ThreadingHTTPServer):
    """Serves `files`; `cut` bytes end the next answer early, `paths` were asked."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files, self.paths, self.cut = {}, [], None
        self.url = f"http://127.0.0.1:{self.server_port}"


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        server = self.server
        server.paths.append(self.path)
        if self.path not in server.files:
            return self.send_error(404)
        content = server.files[self.path]
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        end, server.cut = server.cut, None
        self.wfile.write(content[:end])
        return None

    def log_message(self, *args):
        pass


@contextmanager
def running_server():
    """Yield a server that answers from another thread."""
    server = Server()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def sha256(content):
    return hashlib.sha256(content).hexdigest()


def archive(members, links=(), mode="w:gz"):
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode=mode) as tar:
        for name, content in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
        for name, target in links:
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname = tarfile.SYMTYPE, target
            tar.addfile(entry)
    return data.getvalue()
