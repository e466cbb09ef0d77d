"""The translation page: what it answers, whom it refuses, and in a real browser."""

import http.client
import json
import re
import socket
import struct
import threading
from dataclasses import replace

import pytest

from minitransformer import DecodingConfig, load
from minitransformer.translation import serve
from minitransformer.translation.serve import Server
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


def test_translations_are_those_of_the_command(server, model_path, capfd):
    body = {"text": f"{LINE}\n\n{LINE} on", "beam": 3, "nbest": 2}
    status, text, _ = request(server, "POST", "/translate", body)
    assert status == 200
    flags = "--beam 3 --nbest 2 --max-len-a 0 --max-len-b 5 --json".split()
    _, out, _ = run_translate(
        capfd, "--model", model_path, *flags, LINE, "", f"{LINE} on"
    )
    expected = [json.loads(line)["translations"] for line in out.splitlines()]
    for found, line in zip(json.loads(text)["lines"], expected, strict=True):
        assert [x["text"] for x in found] == [x["text"] for x in line]
        assert [x["score"] for x in found] == pytest.approx(
            [x["score"] for x in line], rel=1e-4
        )


def test_the_page_is_whole_and_loads_nothing(server):
    status, text, headers = request(server, "GET", "/?token=x")
    assert status == 200
    assert "/*" not in text.replace("*/", "")[:200]
    assert "showAttention" in text
    assert "default-src 'none'" in headers["Content-Security-Policy"]


def test_the_page_begins_with_the_defaults(model_path):
    """They are those of the run; a larger beam than usual may then be asked for."""
    parsing = DecodingConfig(beam=21, nbest=2, max_len_a=0, max_len_b=1)
    with Server("127.0.0.1", 0, load(model_path), parsing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        _, text, _ = request(server, "GET", "/")
        fields = re.findall(r'id="(beam|nbest)" .* max="(\d+)" value="(\d+)"', text)
        assert fields == [("beam", "21", "21"), ("nbest", "21", "2")]
        for beam, status in ((21, 200), (22, 400)):
            body = {"text": "a", "beam": beam}
            assert request(server, "POST", "/translate", body)[0] == status
        server.shutdown()


def test_attention_is_that_of_the_beam_asked_for(server, model_path, monkeypatch):
    used = []
    plain = serve.attention_maps

    def attention_maps(translator, line, config):
        used.append(config)
        return plain(translator, line, config)

    monkeypatch.setattr(serve, "attention_maps", attention_maps)
    assert request(server, "POST", "/attention", {"text": LINE, "beam": 2})[0] == 200
    assert used == [replace(SHORT, beam=2)]


def test_the_address_may_be_of_ipv6(model_path):
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        pytest.skip("no IPv6 on this machine")
    with Server("::1", 0, load(model_path), SHORT) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        assert re.fullmatch(r"http://\[::1\]:\d+/", server.address)
        for host in ("[::1]:80", "[::1]", "localhost"):
            headers = {"Host": host}
            body = {"text": LINE}
            assert request(server, "POST", "/translate", body, **headers)[0] == 200
        server.shutdown()


def test_an_address_that_is_taken_is_named(server):
    host, port = server.server_address[:2]
    with pytest.raises(OSError, match=f"at {host}, port {port}: Address already"):
        serve.serve(server.translator, host, port)


@pytest.mark.parametrize("sent", [b"POST /translate HTTP/1.1\r\nHost: x", b"", None])
def test_a_browser_that_goes_away_prints_nothing(server, monkeypatch, capfd, sent):
    """It closes the connection by a reset while it asks, before, or before reading."""
    handled = threading.Event()
    plain = server.shutdown_request
    monkeypatch.setattr(server, "shutdown_request", lambda r: (plain(r), handled.set()))
    monkeypatch.setattr(serve, "page", lambda name, **values: "x" * 10_000_000)
    with socket.create_connection(server.server_address[:2]) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\n\r\n" if sent is None else sent)
        linger = struct.pack("ii", 1, 0)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    assert handled.wait(30)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("path", "body", "headers", "status", "message"),
    [
        ("/nothing", {}, {}, 404, "nothing here"),
        ("/translate", b"{", {}, 400, "Expecting"),
        ("/translate", [1], {}, 400, "expected a JSON object"),
        ("/translate", {}, {}, 400, "text: expected str, got None"),
        ("/translate", {"text": "a", "beam": "2"}, {}, 400, "beam: expected int"),
        ("/translate", {"text": "a", "beam": 0}, {}, 400, "beam: expected at least 1"),
        ("/translate", {"text": "a", "beam": 17}, {}, 400, "a beam of at most 16"),
        ("/translate", {"text": "\n" * 60}, {}, 400, "at most 50 lines, got 61"),
        ("/translate", {"text": "a" * 20_000}, {}, 413, "at most 16,384 bytes"),
        ("/translate", {"text": "\ud800"}, {}, 400, "surrogate"),
        ("/attention", {"text": " "}, {}, 400, "got a blank line"),
        ("/attention", {"text": "a", "beam": 17}, {}, 400, "a beam of at most 16"),
        ("/translate", {"text": "a"}, {"Host": "[::1"}, 400, "Invalid IPv6 URL"),
        ("/translate", {"text": "a"}, {"Host": "evil.example"}, 403, "unknown host"),
        ("/translate", {"text": "a"}, {"Content-Type": "text/plain"}, 415, "JSON"),
    ],
)
def test_bad_requests_get_one_line(server, path, body, headers, status, message):
    found, text, _ = request(server, "POST", path, body, **headers)
    assert found == status
    assert message in json.loads(text)["error"]


def test_other_hosts_need_the_token(model_path):
    with Server("0.0.0.0", 0, load(model_path), SHORT) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        assert f"?token={server.token}" in server.address
        body = {"text": LINE}
        for given, status in (("", 401), ("Bearer x", 401)):
            headers = {"Authorization": given}
            found, _, _ = request(server, "POST", "/translate", body, **headers)
            assert found == status
        headers = {"Authorization": f"Bearer {server.token}"}
        status, _, _ = request(server, "POST", "/translate", body, **headers)
        assert status == 200
        server.shutdown()


def test_too_many_requests_at_once_are_refused(server, monkeypatch):
    refused = threading.Event()
    monkeypatch.setattr(
        server, "_translate", lambda request: json.dumps(refused.wait(30))
    )
    found = []

    def ask():
        status, _, _ = request(server, "POST", "/translate", {"text": "a"})
        found.append(status)
        if found.count(503) == 3:
            refused.set()

    threads = [threading.Thread(target=ask) for _ in range(serve.MAX_WAITING + 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found.count(503) == 3
    assert found.count(200) == serve.MAX_WAITING + 1


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
        expect(tab.get_by_role("status")).to_have_text("expected a beam of at most 16")
