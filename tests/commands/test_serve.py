"""The server: what it answers, whom it refuses, and its page in a real browser.

LibreTranslate's own tests and its client in Python say what it is to answer.
"""

import http.client
import json
import re
import socket
import struct
import threading
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.parse import urlencode

import pytest
from threadpoolctl import threadpool_info

from minitransformer import DecodingConfig, load
from minitransformer.commands import serve
from minitransformer.commands.serve import Server
from minitransformer.runs.models import shipped_model
from support.browser import needs_browser, open_tab
from support.in_process import run_translate
from support.models import save_run

LINE = "the cat number 7 sat"
SHORT = DecodingConfig(max_len_a=0, max_len_b=5)
PAIR = {"source": "en", "target": "de"}


@contextmanager
def serving(checkpoint, host="127.0.0.1", **options):
    translator, checkpoint = load(checkpoint), Path(checkpoint)
    translator.decoding = SHORT
    with Server(host, 0, translator, checkpoint, **options) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "captions"
    return save_run(folder, {"averaged": {}}, ("my.en", "my.de.gz")).averaged


@pytest.fixture(scope="module")
def server(checkpoint):
    with serving(checkpoint) as server:
        yield server


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


def translated(server, q, **fields):
    status, text, _ = request(server, "POST", "/translate", {"q": q, **PAIR, **fields})
    assert status == 200, text
    return json.loads(text)


@pytest.fixture(scope="module")
def best(server):
    """Translations of a text as Python finds them."""

    def find(text, n=0, **options):
        config = serve.TranslationConfig(**vars(SHORT) | options)
        return server.interface.translator.hypotheses([text], config)[0][n].text

    return find


def test_lines_are_translated_and_line_feeds_stay(server, best):
    text = f"{LINE}\n\r\n{LINE} on\n"
    expected = f"{best(LINE)}\n\r\n{best(LINE + ' on')}\n"
    assert translated(server, text) == {"translatedText": expected}
    assert translated(server, [text, LINE]) == {
        "translatedText": [expected, best(LINE)],
    }


def test_alternatives_follow_the_best(server, best):
    given = {"nbest": 7, "beam": 7}
    answer = translated(server, LINE, alternatives=6, source="auto")
    found = [answer["translatedText"], *answer["alternatives"]]
    assert found == [*dict.fromkeys(best(LINE, n, **given) for n in range(7))]
    assert answer["detectedLanguage"] == {"confidence": 100.0, "language": "en"}
    answers = translated(server, [LINE, "a"], alternatives="6", source="auto")
    assert answers["alternatives"][0] == answer["alternatives"]
    assert answers["detectedLanguage"] == [answer["detectedLanguage"]] * 2


def test_html_keeps_its_markup_and_entities(server, best):
    word = best("the cat")
    source = "<!-- a > b --><P class='x'>\n the cat</P ><script>the cat<b></script>"
    expected = source.replace("\n the cat", f"\n {word}")
    assert translated(server, source, format="html")["translatedText"] == expected
    seen = []
    plain = server.interface.translator.hypotheses
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(
            server.interface.translator,
            "hypotheses",
            lambda lines, *rest: seen.extend(lines) or plain(lines, *rest),
        )
        answer = translated(server, "<p>&auml; &lt;b&#62; <i>&amp;</i>", format="html")
    assert "ä &lt;b&gt; <i>&amp;</i>" in seen
    assert re.findall("<.*?>", answer["translatedText"])[0] == "<p>"


def test_markup_within_a_sentence_is_part_of_it(shipped):
    source = "<ul><li>Where is the <b>old</b> station?<li>I am hungry.</ul>"
    expected = "<ul><li>Wo ist der <b>alte</b> Bahnhof?<li>Ich habe Hunger.</ul>"
    answer = translated(shipped, source, format="html", api_key="geheim & gut")
    assert answer["translatedText"] == expected


def test_what_the_page_needs(server, checkpoint, tmp_path):
    """`--json` writes the same of each line, with the same prefixes."""
    (tmp_path / "prefix").write_text("the c\n\non a mat\n")
    lines = [LINE, "", f"{LINE} on"]
    flags = ["--max-len-a", "0", "--max-len-b", "5", "--nbest", "2", "--alignment"]
    flags += ["--json", "--prefix", str(tmp_path / "prefix"), "--model"]
    code, out, err = run_translate(*flags, str(checkpoint), *lines)
    assert code == 0, err
    expected = [json.loads(line)["translations"] for line in out.splitlines()]
    fields = {"prefix": "the c\n\non a mat", "details": True, "alternatives": 1}
    for found, line in zip(
        translated(server, "\n".join(lines), **fields)["lines"], expected, strict=True
    ):
        for mine, theirs in zip(found, line, strict=True):
            for name in ("score", "log_prob"):
                assert mine.pop(name) == pytest.approx(theirs.pop(name), rel=1e-4)
            assert mine == theirs


def test_a_client_of_libretranslate_gets_its_answers(server, best):
    client = pytest.importorskip("libretranslatepy")
    api = client.LibreTranslateAPI(server.address)
    assert api.translate(f"{LINE} & ü", "en", "de") == best(f"{LINE} & ü")
    assert [x["code"] for x in api.languages()] == ["en", "de"]
    assert api.detect(LINE)[0]["language"] == "en"


def test_a_form_is_answered_as_json_is(server, best):
    fields = {"q": LINE, **PAIR, "format": "text", "alternatives": "0", "secret": ""}
    address = f"{server.address}translate"
    with urllib.request.urlopen(address, urlencode(fields).encode()) as answer:
        assert json.load(answer) == {"translatedText": best(LINE)}
    with urllib.request.urlopen(f"{server.address}languages") as answer:
        assert json.load(answer) == [
            {"code": "en", "name": "en", "targets": ["de"]},
            {"code": "de", "name": "de", "targets": []},
        ]
    with urllib.request.urlopen(f"{server.address}health") as answer:
        assert json.load(answer) == {"status": "ok"}


def test_what_waits_is_translated_together(server, monkeypatch):
    """One request is being translated while others come, of which one is wrong."""
    began, go_on = threading.Event(), threading.Event()
    plain, batches = server.interface.translator.hypotheses, []

    def slow(lines, config, *rest):
        began.set()
        assert go_on.wait(30)
        batches.append(len(lines))
        return plain(lines, config, *rest)

    monkeypatch.setattr(server.interface.translator, "hypotheses", slow)
    texts = [f"the cat number {n}\non the mat" for n in range(40)]
    with ThreadPoolExecutor(60) as threads:
        first = threads.submit(translated, server, LINE)
        assert began.wait(30)
        others = [threads.submit(translated, server, text) for text in texts]
        more = threads.submit(translated, server, LINE, alternatives=2)
        wrong = {**PAIR, "q": "\n", "prefix": "the\ncat"}
        wrong = threads.submit(request, server, "POST", "/translate", wrong)
        while len(server.interface.queue.waiting) < 42:
            pass
        go_on.set()
        found = [other.result() for other in others]
        assert json.loads(wrong.result()[1])["error"].startswith("prefix of line 1")
        assert len(more.result()["alternatives"]) == 2
    first.result()
    assert batches[0] == 1
    assert max(batches) == 82
    monkeypatch.undo()
    assert found == [translated(server, text) for text in texts]


def test_too_much_that_waits_is_refused(server, monkeypatch):
    began, go_on = threading.Event(), threading.Event()

    def slow(lines, *rest):
        began.set()
        assert go_on.wait(30)
        return [[]] * len(lines)

    monkeypatch.setattr(server.interface.translator, "hypotheses", slow)
    long = {"q": "a" * 4000, **PAIR}
    with ThreadPoolExecutor(9) as threads:
        threads.submit(request, server, "POST", "/translate", long)
        assert began.wait(30)
        for _ in range(5):
            threads.submit(request, server, "POST", "/translate", long)
        while len(server.interface.queue.waiting) < 5:
            pass
        status, text, _ = request(server, "POST", "/translate", long)
        assert (status, text[:20]) == (429, '{"error": "Slowdown:')
        go_on.set()


def test_the_page_is_whole_and_loads_nothing(server, checkpoint):
    status, text, headers = request(server, "GET", "/?api_key=x")
    assert (status, headers.get_content_type()) == (200, "text/html")
    assert "/*" not in text.replace("*/", "")[:200]
    assert "showAttention" in text
    assert str(checkpoint) in text


def test_other_sites_may_ask_but_nothing_is_passed_on(server):
    """The address may have the key: it goes to no other site and to no cache."""
    places = ("GET", "/"), ("GET", "/none"), ("POST", "/translate")
    for method, path in (*places, ("OPTIONS", "/translate")):
        *_, headers = request(server, method, path, b"")
        assert headers["Access-Control-Allow-Origin"] == "*"
        assert "Content-Type" in headers["Access-Control-Allow-Headers"]
        assert headers["Referrer-Policy"] == "no-referrer"
        assert headers["Cache-Control"] == "no-store"
        policy = headers["Content-Security-Policy"].split("; ")
        assert {"default-src 'none'", "frame-ancestors 'none'"} <= {*policy}


def test_a_failure_does_not_end_the_server(server, monkeypatch):
    def fails(*arguments):
        raise IndexError

    with monkeypatch.context() as patches:
        patches.setattr(
            server.interface.translator, "use_device", fails
        )  # a GPU that is lost
        body = {"q": LINE, **PAIR}
        got, text, _ = request(server, "POST", "/translate", body)
    assert (got, json.loads(text)) == (500, {"error": "IndexError"})
    translated(server, LINE)


def test_an_address_that_is_taken_is_named(server, checkpoint):
    host, port = server.server_address[:2]
    with pytest.raises(OSError, match=f"at {host}, port {port}: Address already"):
        serve.serve(server.interface.translator, checkpoint, host, port, None)


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
    ("fields", "message"),
    [
        ({"q": None}, "Invalid request: missing q parameter"),
        ({"q": []}, "Invalid request: missing q parameter"),
        ({"q": [1]}, "Invalid request: q parameter is no text: [1]"),
        ({"source": ""}, "Invalid request: missing source parameter"),
        ({"target": None}, "Invalid request: missing target parameter"),
        ({"source": "zz"}, "zz is not supported"),
        ({"target": "en"}, "en is not supported"),
        ({"target": ["de"]}, "['de'] is not supported"),
        ({"format": "xml"}, "xml format is not supported"),
        ({"format": ["text"]}, "['text'] format is not supported"),
        ({"alternatives": "abc"}, "Invalid request: alternatives parameter must be 0"),
        ({"alternatives": 16}, "Invalid request: alternatives parameter must be 0 to"),
        ({"q": "a" * 9000}, "Invalid request: request (9,002) exceeds text limit (4,"),
        ({"q": "\n" * 4096}, "Invalid request: request (4,097) exceeds text limit (4,"),
        ({"q": "a" * 3000, "alternatives": 15}, "Invalid request: request (3,002) e"),
        ({"prefix": "a" * 9000}, "Invalid request: request (9,0"),
        ({"prefix": "a\nb"}, "expected prefixes for 1 lines, got 2"),
        ({"prefix": 1, "q": "a\nb"}, "expected prefixes for 2 lines, got 1"),
        ({"q": "\ud800"}, "expected Unicode text"),
    ],
)
def test_wrong_fields_get_one_line(server, fields, message):
    body = {"q": "a", **PAIR, **fields}
    status, text, _ = request(server, "POST", "/translate", body)
    error = json.loads(text)["error"]
    assert (status, error[: len(message)]) == (400, message)
    assert "\n" not in error


@pytest.mark.parametrize(
    ("path", "body", "headers", "status", "message"),
    [
        ("/nothing", {}, {}, 404, "nothing here"),
        ("/translate", [1], {}, 400, "Invalid JSON format"),
        ("/translate", b"{", {}, 400, "Expecting property name"),
        ("/translate", b"\xff", {"Content-Type": "text/plain"}, 400, "invalid start"),
        ("/translate", b"x" * 70_000, {}, 413, "at most 65,536 bytes"),
        ("/translate", {}, {"Content-Length": "x"}, 411, "expected a Content-Length"),
        ("/detect", {}, {}, 400, "missing q parameter"),
        ("/attention", {"q": " "}, {}, 400, "expected a sentence, got a blank line"),
    ],
)
def test_bad_requests_get_one_line(server, path, body, headers, status, message):
    found, text, _ = request(server, "POST", path, body, **headers)
    assert found == status
    assert message in json.loads(text)["error"]


@pytest.mark.parametrize(
    ("host", "given", "source"),
    [("0.0.0.0", None, "source"), ("127.0.0.1", "geheim & gut", "source")],
)
def test_others_need_the_key(model_path, host, given, source):
    with serving(model_path, host, api_key=given) as server:
        assert server.api_key == given or len(server.api_key) > 20
        body = {"q": LINE, "source": source, "target": "target"}
        for path in ("/translate", "/attention", "/detect"):
            for key, status in ((None, 400), ("x", 403), (server.api_key, 200)):
                asked = {**body, "api_key": key}
                assert request(server, "POST", path, asked)[0] == status
        assert request(server, "GET", "/languages")[0] == 200


def test_many_connections_wait_for_their_turn(model_path):
    """Nobody accepts them yet: the system keeps them."""
    server = Server("127.0.0.1", 0, load(model_path), Path(model_path))
    with server, ExitStack() as open:
        for _ in range(300):
            waiting = socket.create_connection(server.server_address[:2], timeout=1)
            open.enter_context(waiting)


@pytest.fixture(scope="module")
def shipped():
    """A server of the shipped model, which decodes by default, with a key."""
    with serving(shipped_model("en-de"), api_key="geheim & gut") as server:
        server.interface.config = serve.TranslationConfig()
        yield server


@contextmanager
def page_of(server, **options):
    """The page in a browser, and its translation's lines and words."""
    with open_tab(**options) as tab:
        tab.goto(server.address)
        tab.wait_for_function("document.activeElement.id === 'text'")
        words = tab.locator("#translation [role=button]")
        yield tab, tab.locator("#translation p"), words


@needs_browser
def test_the_page_translates_what_a_person_types(shipped):
    from playwright.sync_api import expect

    phone = {"width": 390, "height": 800}
    with page_of(shipped, viewport=phone) as (tab, lines, _):
        expect(tab.get_by_role("heading")).to_have_text("English to German")
        tab.keyboard.type("Where is the station?\n\nI am hungry.")  # it has the focus
        expect(lines).to_have_text(["Wo ist der Bahnhof?", "", "Ich habe Hunger."])
        expect(lines.nth(2)).to_have_class("current")
        expect(tab.get_by_role("status")).to_have_text("35 of 4,096 characters")
        assert tab.evaluate("document.documentElement.scrollWidth") <= 390
        box = tab.get_by_label("Text in English")
        box.fill("a " * 2100)
        message = "4,200 of 4,096 characters: 104 too many to translate at once"
        expect(tab.get_by_role("status")).to_have_text(message)
        assert len(box.input_value()) == 4200  # nothing is cut
        tab.get_by_role("button", name="Clear").click()
        expect(lines).to_have_count(0)
        expect(box).to_be_focused()


@needs_browser
def test_the_page_shows_alignment_and_attention(shipped):
    from playwright.sync_api import expect

    with page_of(shipped) as (tab, lines, words):
        tab.keyboard.type("I am hungry.\nWhere is the station?")
        words.get_by_text("Bahnhof?").hover()
        expect(tab.locator("#marks .linked")).to_have_text(["station?"])
        expect(tab.locator("#marks .current")).to_have_text("Where is the station?")
        words.get_by_text("Hunger.").hover()
        expect(tab.locator("#marks .linked")).to_have_text(["hungry."])
        expect(lines.nth(0)).to_have_class("current")
        tab.get_by_text("Attention and numbers").click()
        keys = tab.locator(".links ol").nth(1).get_by_role("button")
        expect(keys.first).to_have_text("I")
        tab.get_by_label("Text in English").focus()
        tab.keyboard.press("Control+End")  # the cursor is in the last line
        expect(keys.first).to_have_text("Where")
        expect(tab.locator("#numbers")).to_contain_text("Line 2: score -")


@needs_browser
def test_a_word_is_replaced_by_the_keyboard_alone(shipped):
    """In its sentence: the other one and the line feed stay."""
    from playwright.sync_api import expect

    with page_of(shipped) as (tab, lines, words):
        tab.keyboard.type("I am hungry. He gives the child an apple.\nYes.")
        expect(lines.nth(1)).to_have_text("Ja.")
        before = lines.nth(0).inner_text().split()
        assert before[:3] == ["Ich", "habe", "Hunger."]
        words.nth(0).focus()
        for _ in range(4):
            tab.keyboard.press("ArrowRight")
        tab.keyboard.press("Enter")
        choices = tab.locator(".alternatives").get_by_role("button")
        expect(choices.first).to_be_focused()
        firsts = [text.split()[0] for text in choices.all_inner_texts()]
        assert len({before[4], *firsts}) == len(firsts) + 1
        tab.keyboard.press("Escape")
        expect(words.nth(4)).to_be_focused()
        tab.keyboard.press("Enter")
        rest = choices.first.inner_text()
        tab.keyboard.press("Enter")
        expect(lines.nth(0)).to_have_text(" ".join([*before[:4], rest]))
        expect(words.nth(4)).to_be_focused()


@needs_browser
def test_text_comes_from_files_and_goes_to_files_and_the_clipboard(shipped, tmp_path):
    from playwright.sync_api import expect

    (tmp_path / "mine.txt").write_text("I am hungry.\n\nYes.\n")
    expected = "Ich habe Hunger.\n\nJa.\n"
    allowed = ["clipboard-read", "clipboard-write"]
    with page_of(shipped, permissions=allowed) as (tab, lines, _):
        tab.locator("#file").set_input_files(tmp_path / "mine.txt")
        expect(lines).to_have_count(4)
        tab.get_by_role("button", name="Copy").click()
        expect(tab.get_by_role("status")).to_have_text("copied")
        assert tab.evaluate("navigator.clipboard.readText()") == expected
        with tab.expect_download() as download:
            tab.get_by_role("button", name="Save").click()
        assert download.value.suggested_filename == "translation.de.txt"
        assert Path(download.value.path()).read_text() == expected


def test_ctrl_c_is_how_it_ends(model_path, monkeypatch):
    """Until then, products have one thread, as those of the command line have."""
    libraries = []

    def interrupted(self):
        libraries.extend(threadpool_info())
        raise KeyboardInterrupt

    monkeypatch.setattr(Server, "serve_forever", interrupted)
    code, _, err = run_translate("--model", model_path, "--serve", "54321")
    assert (code, err.count("\n")) == (0, 1)
    assert err.endswith("(Ctrl-C ends)\n")
    assert {x["num_threads"] for x in libraries if x["user_api"] == "blas"} == {1}
