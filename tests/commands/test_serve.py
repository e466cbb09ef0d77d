"""The server: what it answers, whom it refuses, and its page in a real browser.

LibreTranslate's own tests and its client in Python say what it is to answer.
"""

import http.client
import json
import re
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

import pytest
from threadpoolctl import threadpool_info

from minitransformer import DecodingConfig, load
from minitransformer.commands import serve
from minitransformer.commands.libretranslate import Direction
from minitransformer.commands.serve import Server
from minitransformer.runs.models import shipped_model
from minitransformer.settings.decoding_config import TranslationConfig
from support.browser import needs_browser, open_tab
from support.in_process import run_translate
from support.models import save_run
from support.serving import request, running, translated

LINE = "the cat number 7 sat"
SHORT = DecodingConfig(max_len_a=0, max_len_b=5)
PAIR = {"source": "en", "target": "de"}
HEAD = b"POST /translate HTTP/1.1\r\nHost: localhost\r\nContent-Length: 999\r\n"


def lan_address():
    """Return an address of this machine that others may reach, or else any."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        try:
            asked.connect(("192.0.2.1", 9))  # nothing is sent
        except OSError:
            return "0.0.0.0"
        return asked.getsockname()[0]


@contextmanager
def serving(*checkpoints, host="127.0.0.1", decoding=SHORT, **options):
    directions = []
    for checkpoint in map(Path, checkpoints):
        translator = load(checkpoint)
        translator.decoding = decoding
        directions.append(Direction.of(translator, checkpoint))
    with running(Server(directions, host, **options)) as server:
        yield server


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "captions"
    return save_run(folder, {"averaged": {}}, ("my.en", "my.de.gz")).averaged


@pytest.fixture(scope="module")
def server(checkpoint):
    with serving(checkpoint) as server:
        yield server


def translator_of(server):
    return server.interface.directions[0].translator


@pytest.fixture(scope="module")
def best(server):
    """Translations of a text as Python finds them."""

    def find(text, n=0, **options):
        config = TranslationConfig(**vars(SHORT) | options)
        return translator_of(server).hypotheses([text], config)[0][n].text

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
    assert answer["detectedLanguage"]["language"] == "en"
    answers = translated(server, [LINE, "a"], alternatives="6", source="auto")
    assert answers["alternatives"][0] == answer["alternatives"]
    assert [x["language"] for x in answers["detectedLanguage"]] == ["en", "en"]


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
            sentences = mine.pop("sentences")
            assert mine == theirs
            assert "".join(x["space"] + x["text"] for x in sentences) == mine["text"]


def test_a_language_without_a_model_has_no_target(server):
    assert json.loads(request(server, "GET", "/languages")[1]) == [
        {"code": "en", "name": "English", "targets": ["de"]},
        {"code": "de", "name": "German", "targets": []},
    ]


@pytest.fixture
def held(server, monkeypatch):
    """When a server began to translate, when it may go on, and its batches' sizes."""
    began, go_on = threading.Event(), threading.Event()
    plain, batches = translator_of(server).hypotheses, []

    def slow(lines, config, **rest):
        began.set()
        assert go_on.wait(30)
        batches.append(len(lines))
        return plain(lines, config, **rest)

    monkeypatch.setattr(translator_of(server), "hypotheses", slow)
    return began, go_on, batches


def test_what_waits_is_translated_together(server, held, monkeypatch):
    """One request is being translated while others come, of which one is wrong."""
    began, go_on, batches = held
    texts = [f"the cat number {n}\non the mat" for n in range(40)]
    with ThreadPoolExecutor(60) as threads:
        first = threads.submit(translated, server, LINE)
        assert began.wait(30)
        others = [threads.submit(translated, server, text) for text in texts]
        more = threads.submit(translated, server, LINE, alternatives=2)
        wrong = {**PAIR, "q": "\n", "prefix": "the\ncat"}
        wrong = threads.submit(request, server, "POST", "/translate", wrong)
        while len(server.interface.queue.waiting) < 42:
            time.sleep(0.01)
        go_on.set()
        found = [other.result() for other in others]
        assert json.loads(wrong.result()[1])["error"].startswith("prefix of line 1")
        assert len(more.result()["alternatives"]) == 2
    first.result()
    assert batches[0] == 1
    assert max(batches) == 82
    monkeypatch.undo()
    assert found == [translated(server, text) for text in texts]


def test_too_much_that_waits_is_refused(server, held):
    began, go_on, _ = held
    long = {"q": "a" * 4000, **PAIR}
    with ThreadPoolExecutor(9) as threads:
        threads.submit(request, server, "POST", "/translate", long)
        assert began.wait(30)
        for _ in range(5):
            threads.submit(request, server, "POST", "/translate", long)
        while len(server.interface.queue.waiting) < 5:
            time.sleep(0.01)
        status, text, _ = request(server, "POST", "/translate", long)
        assert (status, text[:20]) == (429, '{"error": "Slowdown:')
        go_on.set()


def test_the_page_is_whole_and_loads_nothing(server, checkpoint):
    status, text, headers = request(server, "GET", "/?api_key=x")
    assert (status, headers.get_content_type()) == (200, "text/html")
    assert "/*" not in text.replace("*/", "")[:200]
    assert "showAttention" in text
    assert not {*checkpoint.parts[1:]} & {*re.findall(r"[\w.-]+", text)}


def test_other_sites_may_ask_but_nothing_is_passed_on(server):
    """The address may have the key: it goes to no other site and to no cache."""
    asked = {
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "content-type,x-requested-with",
    }
    places = ("GET", "/"), ("GET", "/none"), ("POST", "/translate")
    for method, path in (*places, ("OPTIONS", "/translate")):
        others = {"Origin": "https://x.example", **asked}
        status, _, headers = request(server, method, path, b"", **others)
        if method == "OPTIONS":
            allowed = asked["Access-Control-Request-Headers"]
            assert (status, headers["Access-Control-Allow-Headers"]) == (200, allowed)
        assert headers["Access-Control-Allow-Origin"] == "*"
        assert headers["Referrer-Policy"] == "no-referrer"
        assert headers["Cache-Control"] == "no-store"
        policy = headers["Content-Security-Policy"].split("; ")
        assert {"default-src 'none'", "frame-ancestors 'none'"} <= {*policy}


def test_a_failure_does_not_end_the_server(server, monkeypatch, capfd):
    """Only those who run it learn more than the kind of the error."""

    def fails(*arguments):
        raise FileNotFoundError("/home/me/secret")

    with monkeypatch.context() as patches:
        patches.setattr(
            translator_of(server), "use_device", fails
        )  # a GPU that is lost
        body = {"q": LINE, **PAIR}
        got, text, _ = request(server, "POST", "/translate", body)
    assert (got, json.loads(text)) == (500, {"error": "FileNotFoundError"})
    expected = "translate.py: error: FileNotFoundError: /home/me/secret\n"
    assert capfd.readouterr().err == expected
    translated(server, LINE)


def test_an_address_that_is_taken_is_named(server, checkpoint):
    host, port = server.socket.getsockname()
    with pytest.raises(OSError, match=f"at {host}, port {port}: Address already"):
        Server(server.interface.directions, host, port)


def test_a_browser_that_goes_away_prints_nothing(server, monkeypatch, capfd):
    """It closes the connection by a reset before it has read the page, or sent all."""
    monkeypatch.setattr(serve, "page", lambda name, **values: "x" * 10_000_000)
    for sent in (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", HEAD + b"\r\n{"):
        with socket.create_connection(server.socket.getsockname()) as connection:
            connection.sendall(sent)
            time.sleep(0.1)
            linger = struct.pack("ii", 1, 0)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        deadline = time.monotonic() + 30
        while server.server_state.connections:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    "sent", [b"", b"POST /tr", HEAD, HEAD + b"\r\n{", b"GET /health HTTP/1.1\r\n"]
)
def test_a_request_is_complete_in_time_or_its_connection_ends(
    server, monkeypatch, capfd, sent
):
    """A byte that drips in does not begin the time anew."""
    monkeypatch.setattr(serve, "REQUEST_TIMEOUT", 0.5)
    with socket.create_connection(server.socket.getsockname(), 30) as connection:
        began = time.monotonic()
        connection.sendall(sent)
        with suppress(ConnectionError):
            while time.monotonic() < began + 10:
                connection.sendall(b"X")
                time.sleep(0.05)
        assert 0.4 < time.monotonic() - began < 5
    assert capfd.readouterr().err == ""


def test_each_request_of_a_connection_has_its_time(server, monkeypatch):
    """It begins with the connection, and again with each answer."""
    monkeypatch.setattr(serve, "REQUEST_TIMEOUT", 1.5)
    whole = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with socket.create_connection(server.socket.getsockname(), 30) as connection:
        for _ in range(3):
            time.sleep(0.8)
            connection.sendall(whole)
            answer = http.client.HTTPResponse(connection)
            answer.begin()
            assert json.load(answer) == {"status": "ok"}
        began = time.monotonic()
        connection.sendall(whole[:-2])
        assert connection.recv(4096) == b""
        assert time.monotonic() - began < 10


def test_many_that_send_nothing_do_not_keep_others_out(server, monkeypatch):
    """The connections whose request has been incomplete for longest go first."""
    monkeypatch.setattr(serve, "MAX_INCOMPLETE", 20)
    with ExitStack() as stack:
        silent = [
            stack.enter_context(socket.create_connection(server.socket.getsockname()))
            for _ in range(50)
        ]
        began = time.monotonic()
        assert request(server, "GET", "/health")[0] == 200
        assert time.monotonic() - began < 2
        for connection in silent[:20]:
            connection.settimeout(5)
            assert connection.recv(1) == b""
        silent[-1].setblocking(False)
        with pytest.raises(BlockingIOError):
            silent[-1].recv(1)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"q": None}, "Invalid request: missing q parameter"),
        ({"q": []}, "Invalid request: missing q parameter"),
        ({"q": [1]}, "Invalid request: q parameter is no text: [1]"),
        ({"source": ""}, "Invalid request: missing source parameter"),
        ({"target": None}, "Invalid request: missing target parameter"),
        ({"source": "zz"}, "zz is not supported as source: expected auto, en, de"),
        ({"target": "zz"}, "zz is not supported as target: expected auto, en, de"),
        ({"source": "de", "target": "en"}, "de to en is not supported: expected en to"),
        ({"target": ["de"]}, "['de'] is not supported as target: expected auto, en"),
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
        ("/nothing", {}, {}, 404, "nothing here: expected one of GET /"),
        ("/spec", {}, {}, 404, "GET /languages, POST /attention, POST /detect"),
        ("/health", {}, {}, 405, "nothing here: expected one of GET /, GET /fro"),
        ("/translate", [1], {}, 400, "Invalid JSON format"),
        ("/translate", b"{", {"Content-Type": "json"}, 400, "Expecting property name"),
        ("/translate", b"\xff", {"Content-Type": "text/plain"}, 400, "invalid start"),
        ("/translate", b"x" * 70_000, {}, 413, "at most 65,536 bytes"),
        ("/translate", b"q=Caf%E9", {"Content-Type": "a/b"}, 400, "can't decode byte"),
        ("/translate?q=%E9", {}, {}, 400, "can't decode byte"),
        ("/detect", {}, {}, 400, "missing q parameter"),
        ("/attention", {"q": " ", **PAIR}, {}, 400, "expected a sentence, got a"),
    ],
)
def test_bad_requests_get_one_line(server, path, body, headers, status, message):
    found, text, _ = request(server, "POST", path, body, **headers)
    assert found == status
    assert message in json.loads(text)["error"]


@pytest.mark.parametrize(
    ("host", "given"),
    [("0.0.0.0", None), (lan_address(), None), ("127.0.0.1", "geheim & gut")],
)
def test_others_need_the_key(model_path, host, given):
    """The whole key, in the body, in the address or in a header."""
    with serving(model_path, host=host, api_key=given) as server:
        own = server.api_key
        assert own == given or len(own) > 20
        body = {"q": LINE, "source": "source", "target": "target"}
        wrong = ("x", own + "x", own[:-1], own.upper(), [own])
        keys = [(None, 400), (own, 200), *((x, 403) for x in wrong)]
        for path in ("/translate", "/attention", "/detect"):
            for key, status in keys:
                asked = {**body, "api_key": key}
                assert request(server, "POST", path, asked)[0] == status
            for place, given_there in (
                (f"{path}?api_key={quote(own)}", {}),
                (path, {"Authorization": f"Bearer {own}"}),
            ):
                assert request(server, "POST", place, body, **given_there)[0] == 200
        settings = json.loads(request(server, "GET", "/frontend/settings")[1])
        assert settings["keyRequired"]
        for path in ("/", "/health", "/languages"):
            assert request(server, "GET", path)[0] == 200


def test_a_wrong_key_is_refused_before_the_body_comes(shipped):
    head = HEAD.replace(b"translate", b"translate?api_key=x") + b"\r\n"
    with socket.create_connection(shipped.socket.getsockname(), 5) as connection:
        connection.sendall(head)
        assert connection.recv(1000).startswith(b"HTTP/1.1 403 ")


@pytest.mark.parametrize(
    ("host", "is_open"),
    [("127.0.0.1", False), ("127.0.0.2", False), ("localhost", False), ("", True)],
)
def test_this_computer_needs_no_key_nor_others_if_they_are_let_in(
    model_path, host, is_open
):
    with serving(model_path, host=host, is_open=is_open) as server:
        assert server.api_key is None
        body = {"q": LINE, "source": "auto", "target": "auto"}
        assert request(server, "POST", "/translate", body)[0] == 200


def test_many_connections_wait_for_their_turn(model_path):
    """Nobody accepts them yet: the system keeps them."""
    server = Server([Direction.of(load(model_path), Path(model_path))])
    with server.socket, ExitStack() as open:
        for _ in range(300):
            waiting = socket.create_connection(server.socket.getsockname(), timeout=1)
            open.enter_context(waiting)


@pytest.fixture(scope="module")
def shipped():
    """A server of the shipped models, which decode by default, with a key."""
    models = map(shipped_model, ("en-de", "de-en"))
    with serving(*models, decoding=DecodingConfig(), api_key="geheim & gut") as server:
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
        expect(tab.get_by_label("From", exact=True)).to_have_value("en")
        tab.keyboard.type("Where is the station?\n\nI am hungry.")  # it has the focus
        expect(lines).to_have_text(["Wo ist der Bahnhof?", "", "Ich habe Hunger."])
        expect(tab.locator("#translation .current")).to_have_text("Ich habe Hunger.")
        expect(tab.get_by_role("status")).to_have_text("35 of 4,096 characters")
        assert tab.evaluate("document.documentElement.scrollWidth") <= 390
        # The text is kept for a page that is loaded anew.
        tab.reload()
        box = tab.get_by_label("Text in English")
        expect(box).to_have_value("Where is the station?\n\nI am hungry.")
        expect(lines).to_have_text(["Wo ist der Bahnhof?", "", "Ich habe Hunger."])
        # Of text that is too long, nothing is cut. The translation is dimmed until
        # it belongs to the text again, and the message is seen beside the text.
        box.fill("a " * 2100)
        message = "4,200 of 4,096 characters: 104 too many to translate at once"
        expect(tab.get_by_role("status")).to_have_text(message)
        expect(tab.get_by_role("status")).to_be_in_viewport()
        assert len(box.input_value()) == 4200
        expect(tab.locator("#translation")).to_have_css("opacity", "0.5")
        expect(tab.get_by_role("button", name="Copy")).to_be_disabled()
        tab.get_by_role("button", name="Clear").click()
        expect(lines).to_have_text([""])
        expect(tab.locator("#translation")).to_have_css("opacity", "1")
        expect(box).to_be_focused()


@needs_browser
def test_the_page_has_a_menu_of_languages_and_swaps_them(shipped):
    from playwright.sync_api import expect

    with page_of(shipped) as (tab, lines, words):
        source = tab.get_by_label("From", exact=True)
        target = tab.get_by_label("To", exact=True)
        swap = tab.get_by_role("button", name="Swap the languages and their text")
        options = source.get_by_role("option")
        expect(options).to_have_text(["English", "German", "Detect language"])
        tab.keyboard.type("I am hungry.\nYes.")
        expect(lines).to_have_text(["Ich habe Hunger.", "Ja."])
        # The text changes sides with its language, and is translated back.
        swap.click()
        expect(tab.get_by_label("Text in German")).to_have_value(
            "Ich habe Hunger.\nJa."
        )
        expect(lines).to_have_text(["I'm hungry.", "Yes."])
        assert (source.input_value(), target.input_value()) == ("de", "en")
        words.get_by_text("hungry.").hover()
        expect(tab.locator("#marks .linked")).to_have_text(["Hunger."])
        # A source is chosen: the target is one that it has.
        source.select_option("en")
        expect(target.get_by_role("option")).to_have_text(["German"])
        # The language is detected, and text in the target language comes back.
        source.select_option("auto")
        expect(target.get_by_role("option")).to_have_count(2)
        target.select_option("en")
        tab.get_by_role("textbox").fill("Die Kinder spielen im Garten.")
        expect(tab.get_by_role("status")).to_have_text(
            "29 of 4,096 characters, in German (100% sure)"
        )
        expect(lines).to_have_text(["The children are playing in the garden."])
        words.nth(1).click()
        expect(tab.locator(".alternatives button").first).to_be_focused()
        target.select_option("de")
        expect(tab.get_by_role("status")).to_have_text(
            "This text is in German already (100% sure)."
        )
        expect(lines).to_have_text(["Die Kinder spielen im Garten."])
        expect(swap).to_be_disabled()
        words.first.hover()
        words.first.click()
        # Nobody asked for the language: a text that seems to be in the target is named.
        source.select_option("en")
        expect(tab.get_by_role("status")).to_contain_text("in German already?")


@needs_browser
def test_the_text_fills_its_frame(shipped):
    with page_of(shipped) as (tab, *_):
        frame, box = (tab.locator(x).first.bounding_box() for x in (".pane", "#text"))
        assert box["height"] > 0.95 * frame["height"]


@needs_browser
def test_the_page_shows_alignment_and_attention(shipped):
    from playwright.sync_api import expect

    with page_of(shipped) as (tab, _, words):
        tab.keyboard.type("I am hungry.\nWhere is the station?")
        words.get_by_text("Bahnhof?").hover()
        expect(tab.locator("#marks .linked")).to_have_text(["station?"])
        expect(tab.locator("#marks .current")).to_have_text("Where is the station?")
        words.get_by_text("Hunger.").hover()
        expect(tab.locator("#marks .linked")).to_have_text(["hungry."])
        expect(tab.locator("#translation .current")).to_have_text("Ich habe Hunger.")
        tab.get_by_text("Attention and numbers").click()
        keys = tab.locator(".links ol").nth(1).get_by_role("button")
        expect(keys.first).to_have_text("I")
        tab.get_by_label("Text in English").focus()
        tab.keyboard.press("Control+End")  # the cursor is in the last line
        expect(keys.first).to_have_text("Where")
        expect(tab.locator("#numbers")).to_contain_text("The marked sentence: score -")


@needs_browser
def test_a_word_is_replaced_by_the_keyboard_alone(shipped):
    """In its sentence: what is known of the others stays, and no offer is unlikely."""
    from playwright.sync_api import expect

    with page_of(shipped) as (tab, lines, words):
        tab.keyboard.type("I am hungry. Could you help me?\nYes.")
        expect(lines).to_have_text(["Ich habe Hunger. Könntest du mir helfen?", "Ja."])
        words.nth(0).focus()
        for _ in range(3):
            tab.keyboard.press("ArrowRight")
        tab.keyboard.press("Enter")
        choices = tab.locator(".alternatives").get_by_role("button")
        rest = "mir helfen?"
        firsts = [f"Könnten Sie {rest}", f"Könntet ihr {rest}"]
        expect(choices.nth(0)).to_have_text(firsts[0])
        offers = choices.all_inner_texts()
        assert offers[:2] == firsts  # the likeliest first
        assert len({"Könntest", *(x.split()[0] for x in offers)}) == len(offers) + 1
        expect(choices.nth(0)).to_be_focused()
        tab.keyboard.press("ArrowDown")
        expect(choices.nth(1)).to_be_focused()
        tab.keyboard.press("ArrowUp")
        tab.keyboard.press("ArrowUp")
        expect(choices.nth(0)).to_be_focused()
        tab.keyboard.press("Escape")
        expect(words.nth(3)).to_be_focused()
        tab.keyboard.press("Enter")
        expect(choices.nth(0)).to_be_focused()
        tab.keyboard.press("Enter")
        expect(lines.nth(0)).to_have_text(f"Ich habe Hunger. {firsts[0]}")
        expect(words.nth(3)).to_be_focused()
        # The words of both sentences have their links, and the details are new.
        expect(tab.locator("#marks .linked")).to_have_text(["Could"])
        words.get_by_text("Hunger.").hover()
        expect(tab.locator("#marks .linked")).to_have_text(["hungry."])
        expect(tab.locator("#marks .current")).to_have_text("I am hungry.")
        assert tab.locator("#translation .unsure").count() == 0
        # Where nothing else is likely, nothing is offered.
        words.get_by_text("Hunger.").click()
        expect(tab.get_by_role("status")).to_have_text("No other word fits here.")


@needs_browser
def test_each_sentence_says_how_sure_it_is_and_what_it_lacks(shipped, monkeypatch):
    from playwright.sync_api import expect

    plain = translator_of(shipped).hypotheses

    def loses_a_number(lines, *arguments, **options):
        [[best]] = plain(lines, *arguments, **options)
        sure, (source, space, last) = best.parts
        last = replace(last, text="Sie hat Katzen.", missing=("47",))
        return [[replace(best, parts=(sure, (source, space, last)))]]

    with page_of(shipped) as (tab, _, words):
        tab.keyboard.type("I am hungry. Colourless grue blickets zorp furiously.")
        words.nth(3).wait_for()
        unsure = tab.locator("#translation .unsure")
        expect(unsure).to_have_count(1)
        expect(unsure).not_to_contain_text("Hunger")
        expect(unsure).to_have_attribute("title", "The model is unsure of this.")
        monkeypatch.setattr(translator_of(shipped), "hypotheses", loses_a_number)
        tab.get_by_role("textbox").fill("I am hungry. She has 47 cats.")
        lacking = tab.locator("#translation .lacking")
        expect(lacking).to_have_attribute("data-missing", "47")
        expect(lacking).not_to_contain_text("Hunger")


@needs_browser
def test_lines_of_a_paragraph_are_joined_and_taken_apart_again(shipped):
    from playwright.sync_api import expect

    wrapped = "Could you help me? Where is the\nstation?\n\nI am hungry."
    with page_of(shipped) as (tab, lines, _):
        box = tab.get_by_role("textbox")
        tab.keyboard.type(wrapped)
        tab.get_by_role("button", name="Join the lines of each paragraph").click()
        expect(box).to_have_value(wrapped.replace("the\n", "the "))
        translated = "Könntest du mir helfen? Wo ist der Bahnhof?"
        expect(lines).to_have_text([translated, "", "Ich habe Hunger."])
        tab.keyboard.press("Control+z")
        expect(box).to_have_value(wrapped)


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
        # No text, or none in UTF-8, leaves the text as it is.
        for name, content in (("a.exe", b"a\0b"), ("latin1.txt", b"Caf\xe9")):
            (tmp_path / name).write_bytes(content)
            tab.locator("#file").set_input_files(tmp_path / name)
            message = f"{name} is no text in UTF-8: save it as plain text with"
            expect(tab.get_by_role("status")).to_contain_text(message)
            assert tab.get_by_role("textbox").input_value() == "I am hungry.\n\nYes.\n"


def test_ctrl_c_is_how_it_ends(model_path, monkeypatch):
    """Until then, products have one thread, as those of the command line have."""
    libraries = []

    def interrupted(self, sockets):
        libraries.extend(threadpool_info())
        raise KeyboardInterrupt

    monkeypatch.setattr(Server, "run", interrupted)
    code, _, err = run_translate("--model", model_path, "--serve", "54321")
    assert (code, err.count("\n")) == (0, 1)
    assert err.endswith("(Ctrl-C ends)\n")
    assert {x["num_threads"] for x in libraries if x["user_api"] == "blas"} == {1}
