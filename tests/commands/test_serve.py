"""The translation page: what it answers, whom it refuses, and in a real browser."""

import http.client
import json
import socket
import struct
import threading
from contextlib import ExitStack

import pytest

from minitransformer import DecodingConfig, load
from minitransformer.commands import serve
from minitransformer.commands.serve import Server
from support.browser import needs_browser, open_tab
from support.in_process import run_translate

LINE = "the cat number 7 sat"
SHORT = DecodingConfig(max_len_a=0, max_len_b=5)


@pytest.fixture(scope="module")
def server(model_path):
    with Server("127.0.0.1", 0, load(model_path), SHORT) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def request(server, method, path, body=None, **headers):
    connection = http.client.HTTPConnection(*server.server_address[:2], timeout=30)
    if body is not None and not isinstance(body, bytes):
        body = json.dumps(body)
    if method == "POST":
        headers = {"Content-Type": "application/json", **headers}
    connection.request(method, path, body, headers)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text, answer.headers


@pytest.mark.parametrize(
    "asked",
    [
        {"beam": 3, "nbest": 2},
        {"alpha": 2, "no_repeat_ngram": 1, "min_len": 4, "alignment": True},
        {"prefix": "the c\r\n\non a mat"},
        {"sample": True, "seed": 7, "nbest": 9},
        {"sample": True, "temperature": 2, "top_k": 20, "prefix": "a\n\n"},
    ],
)
def test_translations_are_those_of_the_command(
    server, model_path, tmp_path, capfd, asked
):
    lines = [LINE, "", f"{LINE} on"]
    flags = ["--model", model_path, "--json", "--max-len-a", "0", "--max-len-b", "5"]
    for name, value in asked.items():
        if name == "prefix":
            (tmp_path / "prefix").write_text(f"{value}\n", newline="\n")
            value = tmp_path / "prefix"
        flags += [f"--{name.replace('_', '-')}", *[str(value)] * (value is not True)]
    code, out, err = run_translate(capfd, *flags, *lines)
    assert code == 0, err
    expected = [json.loads(line)["translations"] for line in out.splitlines()]
    body = {"text": "\n".join(lines)} | asked
    status, text, _ = request(server, "POST", "/translate", body)
    assert status == 200, text
    for found, line in zip(json.loads(text)["lines"], expected, strict=True):
        assert len(found) == len(line)
        for mine, theirs in zip(found, line, strict=True):
            for name in ("score", "log_prob"):
                assert mine.pop(name) == pytest.approx(theirs.pop(name), rel=1e-4)
            assert mine == theirs


def test_the_page_is_whole_and_loads_nothing(server):
    status, text, _ = request(server, "GET", "/?token=x")
    assert status == 200
    assert "/*" not in text.replace("*/", "")[:200]
    assert "showAttention" in text


def test_every_answer_tells_the_browser_to_pass_nothing_on(server):
    """The address may have the token: it goes to no other site and to no cache."""
    for method, path in (("GET", "/"), ("GET", "/none"), ("POST", "/translate")):
        *_, headers = request(server, method, path, b"")
        assert headers["Referrer-Policy"] == "no-referrer"
        assert headers["Cache-Control"] == "no-store"
        policy = headers["Content-Security-Policy"].split("; ")
        assert {"default-src 'none'", "frame-ancestors 'none'"} <= {*policy}


def test_a_failure_does_not_end_the_server(server, monkeypatch):
    def fails(*arguments):
        raise IndexError

    with monkeypatch.context() as patches:
        patches.setattr(server.translator, "use_device", fails)  # a GPU that is lost
        got, text, _ = request(server, "POST", "/translate", {"text": LINE})
    assert (got, json.loads(text)) == (500, {"error": "IndexError"})
    assert request(server, "POST", "/translate", {"text": LINE})[0] == 200


def test_an_address_that_is_taken_is_named(server):
    host, port = server.server_address[:2]
    with pytest.raises(OSError, match=f"at {host}, port {port}: Address already"):
        serve.serve(server.translator, host, port)


def test_a_browser_that_goes_away_prints_nothing(server, monkeypatch, capfd):
    """It closes the connection by a reset before it has read the page."""
    handled = threading.Event()
    plain = server.shutdown_request
    monkeypatch.setattr(server, "shutdown_request", lambda r: (plain(r), handled.set()))
    monkeypatch.setattr(serve, "page", lambda name, **values: "x" * 10_000_000)
    with socket.create_connection(server.server_address[:2]) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\n\r\n")
        linger = struct.pack("ii", 1, 0)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    assert handled.wait(30)
    assert capfd.readouterr().err == ""


def test_a_browser_that_stops_sending_is_disconnected(server, monkeypatch, capfd):
    monkeypatch.setattr(serve.Handler, "timeout", serve.Handler.timeout / 100)
    head = "POST /translate HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n"
    body = f"{head}Content-Type: application/json\r\n\r\n{{"
    for sent in ("", head, body):
        with socket.create_connection(server.server_address[:2], 30) as connection:
            connection.sendall(sent.encode())
            assert connection.recv(1) == b""
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("path", "body", "headers", "status", "message"),
    [
        ("/nothing", {}, {}, 404, "nothing here"),
        ("/translate", [1], {}, 400, "expected a JSON object"),
        ("/translate", {}, {}, 400, "text: expected str, got None"),
        ("/translate", {"text": "a", "beam": 17}, {}, 400, "beam: expected at most 16"),
        ("/translate", {"text": "\n" * 60}, {}, 400, "at most 50 lines, got 61"),
        ("/translate", {"text": "a" * 20_000}, {}, 413, "at most 16,384 bytes"),
        ("/translate", {"text": "a" * 9000}, {}, 400, "most 4,096 tokens of text,"),
        ("/translate", {"text": "\n" * 30, "min_len": 150}, {}, 400, "got 4,650"),
        ("/translate", {"text": "a", "prefix": "a" * 9000}, {}, 400, "most 4,096 tok"),
        ("/translate", {"text": "a" * 3000, "beam": 16}, {}, 400, "for 16 beams or s"),
        ("/translate", {"text": "a" * 3000, "sample": True, "nbest": 16}, {}, 400, "t"),
        ("/translate", {}, {"Content-Length": "x"}, 411, "expected a Content-Length"),
        ("/translate", {"text": "\ud800"}, {}, 400, "surrogate"),
        ("/attention", {"text": "a", "prefix": "b"}, {}, 400, "unknown field 'prefix'"),
        ("/translate", {"text": "a"}, {"Host": "evil.example"}, 403, "got 'evil.exa"),
        ("/translate", {}, {"Content-Type": "text/plain"}, 415, "/json, got"),
    ],
)
def test_bad_requests_get_one_line(server, path, body, headers, status, message):
    found, text, _ = request(server, "POST", path, body, **headers)
    assert found == status
    assert message in json.loads(text)["error"]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"temprature": 2}, "unknown field 'temprature'; did you mean temperature?"),
        ({"seed": 3}, "seed: does nothing without sample"),
        ({"sample": "x" * 9999}, f"sample: expected bool, got '{'x' * 39}"),
        ({"beam": 3, "nbest": 4}, "nbest: expected at most the beam (3), got 4"),
        ({"prefix": "a\nb"}, "expected prefixes for 1 lines, got 2"),
    ],
)
def test_settings_are_checked_as_flags_are(server, asked, message):
    found, text, _ = request(server, "POST", "/translate", {"text": "a"} | asked)
    error = json.loads(text)["error"]
    assert (found, error[: len(message)]) == (400, message)
    assert "\n" not in error


def test_other_hosts_need_the_token(model_path):
    with Server("0.0.0.0", 0, load(model_path), SHORT) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        assert f"?token={server.token}" in server.address
        body = {"text": LINE}
        for given in ("", "Bearer x"):
            for path in ("/translate", "/attention"):
                headers = {"Authorization": given, "Host": "localhost"}
                assert request(server, "POST", path, body, **headers)[0] == 401
        headers = {"Authorization": f"Bearer {server.token}"}
        status, _, _ = request(server, "POST", "/translate", body, **headers)
        assert status == 200
        server.shutdown()


def test_many_connections_wait_for_their_turn(model_path):
    """Nobody accepts them yet: the system keeps them."""
    with Server("127.0.0.1", 0, load(model_path), SHORT) as server, ExitStack() as open:
        for _ in range(300):
            waiting = socket.create_connection(server.server_address[:2], timeout=1)
            open.enter_context(waiting)


@needs_browser
def test_the_page_translates_what_a_person_types(server, tmp_path):
    from playwright.sync_api import expect

    with open_tab(viewport={"width": 390, "height": 800}) as tab:
        tab.goto(server.address)
        tab.keyboard.type(LINE)  # the text has the focus
        expect(tab.locator(".translations li")).to_have_count(1)
        expect(tab.locator(".links ol").first.locator("button")).not_to_have_count(0)
        tab.get_by_label("translations", exact=True).first.fill("3")
        expect(tab.locator(".translations li")).to_have_count(3)
        width = tab.evaluate("document.documentElement.scrollWidth")
        assert width <= 390  # nothing sticks out of a phone's screen
        tab.get_by_label("beam").fill("99")
        expect(tab.get_by_role("status")).to_have_text(
            "beam: expected at most 16, got 99"
        )


def test_ctrl_c_is_how_it_ends(model_path, monkeypatch, capfd):
    def interrupted(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(Server, "serve_forever", interrupted)
    code, _, err = run_translate(capfd, "--model", model_path, "--serve", "54321")
    assert (code, err.count("\n")) == (0, 1)
    assert err.endswith("(Ctrl-C ends)\n")
