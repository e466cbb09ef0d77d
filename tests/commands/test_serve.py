"""The server: what it answers, whom it refuses, and its page in a real browser.

LibreTranslate's own tests and its client in Python say what it is to answer.
"""

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

from minitransformer import DecodingConfig
from minitransformer.commands import serve
from minitransformer.commands.serve import Server
from minitransformer.runs.models import shipped_models
from minitransformer.settings.decoding_config import TranslationConfig
from support.browser import expect, needs_browser, open_tab
from support.in_process import rows, run_translate
from support.models import MAT_LINES, save_run
from support.serving import answer_on, connected, request, serving, translated

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


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "captions"
    return save_run(folder, {"averaged": {}}, ("my.en", "my.de.gz")).averaged


@pytest.fixture(scope="module")
def server(checkpoint):
    with serving(checkpoint, decoding=SHORT) as server:
        yield server


@pytest.fixture(scope="module")
def shipped():
    """A server of the shipped models, with a key."""
    with serving(*shipped_models(), api_key="geheim & gut") as server:
        yield server


def translator_of(server):
    return server.interface.directions[0].translator


def post(server, fields, path="/translate", **headers):
    """Ask for a translation; return the status and the answer."""
    status, text, _ = request(server, "POST", path, {**PAIR, **fields}, **headers)
    return status, json.loads(text)


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
    """How to ask a server that translates nothing yet, when it may, and its batches."""
    began, go_on = threading.Event(), threading.Event()
    plain, batches = translator_of(server).hypotheses, []

    def slow(lines, config, **rest):
        began.set()
        assert go_on.wait(30)
        batches.append(len(lines))
        return plain(lines, config, **rest)

    monkeypatch.setattr(translator_of(server), "hypotheses", slow)
    with ThreadPoolExecutor(60) as threads:

        def ask(*requests):
            answers = [threads.submit(post, server, fields) for fields in requests]
            while len(server.interface.queue.waiting) < len(answers):
                time.sleep(0.01)
            return answers

        threads.submit(translated, server, LINE)
        assert began.wait(30)
        yield ask, go_on, batches
        go_on.set()


def test_what_waits_is_translated_together(server, held, monkeypatch):
    """Of the requests, one is for alternatives and one is wrong."""
    ask, go_on, batches = held
    texts = [f"{line}\non the mat" for line in MAT_LINES]
    others = {"q": LINE, "alternatives": 2}, {"q": "\n", "prefix": "the\ncat"}
    answers = ask(*({"q": text} for text in texts), *others)
    go_on.set()
    *alike, (_, more), (status, wrong) = (answer.result() for answer in answers)
    assert wrong["error"].startswith("prefix of line 1")
    assert (status, len(more["alternatives"])) == (400, 2)
    assert batches[0] == 1
    assert max(batches) == 2 * len(texts) + 2
    monkeypatch.undo()
    assert [found for _, found in alike] == [translated(server, x) for x in texts]


def test_too_much_that_waits_is_refused(server, held):
    ask, *_ = held
    long = {"q": "a" * 4000}
    ask(*[long] * 5)
    status, answer = post(server, long)
    assert (status, answer["error"][:9]) == (429, "Slowdown:")


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
    for place in ("GET /", "GET /none", "POST /translate", "OPTIONS /translate"):
        others = {"Origin": "https://x.example", **asked}
        status, _, headers = request(server, *place.split(), b"", **others)
        assert headers["Access-Control-Allow-Origin"] == "*"
        assert headers["Referrer-Policy"] == "no-referrer"
        assert headers["Cache-Control"] == "no-store"
        policy = headers["Content-Security-Policy"].split("; ")
        assert {"default-src 'none'", "frame-ancestors 'none'"} <= {*policy}
    allowed = headers["Access-Control-Allow-Headers"]  # of the last
    assert (status, allowed) == (200, asked["Access-Control-Request-Headers"])


def test_a_failure_does_not_end_the_server(server, monkeypatch, capfd):
    """Only those who run it learn more than the kind of the error."""

    def fails(*arguments):
        raise FileNotFoundError("/home/me/secret")

    with monkeypatch.context() as patches:
        # A GPU is lost.
        patches.setattr(translator_of(server), "use_device", fails)
        found = post(server, {"q": LINE})
    assert found == (500, {"error": "FileNotFoundError"})
    expected = "translate.py: error: FileNotFoundError: /home/me/secret\n"
    assert capfd.readouterr().err == expected
    translated(server, LINE)


def test_a_browser_that_goes_away_prints_nothing(server, monkeypatch, capfd):
    """It closes the connection by a reset before it has read the page, or sent all."""
    monkeypatch.setattr(serve, "page", lambda name, **values: "x" * 10_000_000)
    for sent in (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", HEAD + b"\r\n{"):
        with connected(server) as connection:
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
    with connected(server) as connection:
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
    monkeypatch.setattr(serve, "REQUEST_TIMEOUT", 1.2)
    whole = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with connected(server) as connection:
        for _ in range(2):
            time.sleep(0.7)
            connection.sendall(whole)
            assert answer_on(connection) == {"status": "ok"}
        began = time.monotonic()
        connection.sendall(whole[:-2])
        assert connection.recv(4096) == b""
        assert time.monotonic() - began < 10


def test_many_that_send_nothing_do_not_keep_others_out(server, monkeypatch):
    """The connections whose request has been incomplete for longest go first."""
    monkeypatch.setattr(serve, "MAX_INCOMPLETE", 20)
    with ExitStack() as stack:
        silent = [stack.enter_context(connected(server, 5)) for _ in range(50)]
        began = time.monotonic()
        assert request(server, "GET", "/health")[0] == 200
        assert time.monotonic() - began < 2
        for connection in silent[:20]:
            assert connection.recv(1) == b""
        silent[-1].setblocking(False)
        with pytest.raises(BlockingIOError):
            silent[-1].recv(1)


# Fields beside {"q": "a"}, and how the error begins.
WRONG_FIELDS = r"""
{"q": null} | Invalid request: missing q parameter
{"q": []} | Invalid request: missing q parameter
{"q": [1]} | Invalid request: q parameter is no text: [1]
{"q": "\ud800"} | expected Unicode text
{"source": ""} | Invalid request: missing source parameter
{"target": null} | Invalid request: missing target parameter
{"source": "zz"} | zz is not supported as source: expected auto, en, de
{"target": ["de"]} | ['de'] is not supported as target: expected auto, en, de
{"source": "de", "target": "en"} | de to en is not supported: expected en to de
{"format": "xml"} | xml format is not supported
{"format": ["text"]} | ['text'] format is not supported
{"alternatives": "abc"} | Invalid request: alternatives parameter must be 0 to 15, got
{"alternatives": 16} | Invalid request: alternatives parameter must be 0 to 15, got 16
{"prefix": "a\nb"} | expected prefixes for 1 lines, got 2
{"prefix": 1, "q": "a\nb"} | expected prefixes for 2 lines, got 1
"""


@pytest.mark.parametrize(("fields", "message"), rows(WRONG_FIELDS))
def test_wrong_fields_get_one_line(server, fields, message):
    status, answer = post(server, {"q": "a", **json.loads(fields)})
    assert (status, answer["error"][: len(message)]) == (400, message)
    assert "\n" not in answer["error"]


@pytest.mark.parametrize(
    ("fields", "tokens"),
    [
        ({"q": "a" * 9000}, "(9,002) exceeds text limit (4,096 tokens)"),
        ({"q": "\n" * 4096}, "(4,097) exceeds text limit (4,096 tokens)"),
        ({"q": "a" * 3000, "alternatives": 15}, "(3,002) exceeds text limit (1,024"),
        ({"prefix": "a" * 9000}, "(9,0"),
    ],
)
def test_too_many_tokens_are_refused(server, fields, tokens):
    status, answer = post(server, {"q": "a", **fields})
    assert status == 400
    assert answer["error"].startswith(f"Invalid request: request {tokens}")


# The address, the type and the text of a request, the status, and a part of the error.
BAD_REQUESTS = r"""
/nothing | json | {} | 404 | nothing here: expected one of GET /, GET /frontend/settin
/spec | json | {} | 404 | GET /languages, POST /attention, POST /detect
/health | json | {} | 405 | nothing here: expected one of GET /
/translate | json | [1] | 400 | Invalid JSON format
/translate | json | { | 400 | Expecting property name
/translate | text/plain | \xff | 400 | invalid start
/translate | a/b | q=Caf\xe9 | 400 | can't decode byte
/translate?q=%E9 | json | {} | 400 | can't decode byte
/detect | json | {} | 400 | missing q parameter
/attention | json | {"q": " ", "source": "en", "target": "de"} | 400 | expected a sen
"""


@pytest.mark.parametrize(
    ("path", "kind", "text", "status", "message"), rows(BAD_REQUESTS)
)
def test_bad_requests_get_one_line(server, path, kind, text, status, message):
    body = text.encode().decode("unicode_escape").encode("latin-1")
    found, answer, _ = request(server, "POST", path, body, **{"Content-Type": kind})
    assert found == int(status)
    assert message in json.loads(answer)["error"]


# Who may ask


@pytest.fixture
def made(server, monkeypatch):
    """Make servers at some address, which do not run."""
    monkeypatch.setattr(serve, "LibreTranslate", lambda *_, **__: server.interface)
    with ExitStack() as sockets:

        def make(*address, **options):
            other = Server(server.interface.directions, *address, **options)
            sockets.enter_context(other.socket)
            return other

        yield make


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "localhost"])
def test_this_computer_needs_no_key(made, host):
    assert made(host).api_key is None


@pytest.mark.parametrize("host", ["0.0.0.0", "", lan_address()])
def test_others_need_a_new_key_unless_they_are_let_in(made, host):
    keys = {made(host).api_key for _ in range(2)}
    assert len(keys) == 2
    assert min(map(len, keys)) > 20
    assert made(host, is_open=True).api_key is None


def test_an_address_that_is_taken_is_named(server, made):
    host, port = server.socket.getsockname()
    with pytest.raises(OSError, match=f"at {host}, port {port}: Address already"):
        made(host, port)


def test_many_connections_wait_for_their_turn(made):
    """Nobody accepts them yet: the system keeps them."""
    server = made()
    with ExitStack() as open:
        for _ in range(300):
            open.enter_context(connected(server, 1))


@pytest.mark.parametrize("path", ["/translate", "/attention", "/detect"])
def test_the_whole_key_is_needed(shipped, path):
    """In the body, in the address or in a header."""
    own = shipped.api_key
    wrong = own + "x", own[:-1], own.upper(), [own]
    for key, status in ((None, 400), (own, 200), *((x, 403) for x in wrong)):
        assert post(shipped, {"q": "Yes.", "api_key": key}, path)[0] == status
    assert post(shipped, {"q": "Yes."}, f"{path}?api_key={quote(own)}")[0] == 200
    assert post(shipped, {"q": "Yes."}, path, Authorization=f"Bearer {own}")[0] == 200


def test_what_everybody_may_ask(shipped):
    for path in ("/", "/health", "/languages"):
        assert request(shipped, "GET", path)[0] == 200
    _, text, _ = request(shipped, "GET", "/frontend/settings")
    assert json.loads(text)["keyRequired"]


def test_a_wrong_key_is_refused_before_the_body_comes(shipped):
    head = HEAD.replace(b"translate", b"translate?api_key=x") + b"\r\n"
    with connected(shipped, 5) as connection:
        connection.sendall(head)
        assert connection.recv(1000).startswith(b"HTTP/1.1 403 ")


# The page


class Page:
    """The page in a browser, and what a person sees on it."""

    def __init__(self, tab):
        self.tab = tab
        self.text = tab.get_by_role("textbox")
        self.lines = tab.locator("#translation p")
        self.words = tab.locator("#translation [role=button]")
        self.sentence = tab.locator("#translation .current")
        self.source_sentence = tab.locator("#marks .current")
        self.linked = tab.locator("#marks .linked")
        self.status = tab.get_by_role("status")

    def button(self, name):
        return self.tab.get_by_role("button", name=name)

    def press(self, *keys):
        for key in keys:
            self.tab.keyboard.press(key)

    def shows(self, **texts):
        """Wait until these parts have these texts."""
        for name, text in texts.items():
            expect(getattr(self, name)).to_have_text(text)


@contextmanager
def page_of(server, text="", **options):
    """Open the page, and type a text into the box that has the focus."""
    with open_tab(**options) as tab:
        tab.goto(server.address)
        tab.wait_for_function("document.activeElement.id === 'text'")
        tab.keyboard.type(text)
        yield Page(tab)


TWO_LINES = "Where is the station?\n\nI am hungry."
TRANSLATED = ["Wo ist der Bahnhof?", "", "Ich habe Hunger."]


@needs_browser
def test_the_page_translates_what_a_person_types(shipped):
    phone = {"width": 390, "height": 800}
    with page_of(shipped, TWO_LINES, viewport=phone) as page:
        expect(page.tab.get_by_label("From", exact=True)).to_have_value("en")
        page.shows(lines=TRANSLATED, sentence=TRANSLATED[-1])
        page.shows(status="35 of 4,096 characters")
        assert page.tab.evaluate("document.documentElement.scrollWidth") <= 390
        # The text is kept for a page that is loaded anew.
        page.tab.reload()
        expect(page.text).to_have_value(TWO_LINES)
        page.shows(lines=TRANSLATED)
        # Of text that is too long, nothing is cut. The translation is dimmed until
        # it belongs to the text again, and the message is seen beside the text.
        page.text.fill("a " * 2100)
        page.shows(
            status="4,200 of 4,096 characters: 104 too many to translate at once"
        )
        expect(page.status).to_be_in_viewport()
        assert len(page.text.input_value()) == 4200
        translation = page.tab.locator("#translation")
        expect(translation).to_have_css("opacity", "0.5")
        expect(page.button("Copy")).to_be_disabled()
        page.button("Clear").click()
        page.shows(lines=[""])
        expect(translation).to_have_css("opacity", "1")
        expect(page.text).to_be_focused()


@needs_browser
def test_the_page_has_a_menu_of_languages_and_swaps_them(shipped):
    with page_of(shipped, "I am hungry.\nYes.") as page:
        source = page.tab.get_by_label("From", exact=True)
        target = page.tab.get_by_label("To", exact=True)
        swap = page.button("Swap the languages and their text")
        options = source.get_by_role("option")
        expect(options).to_have_text(["English", "German", "Detect language"])
        page.shows(lines=["Ich habe Hunger.", "Ja."])
        # The text changes sides with its language, and is translated back.
        swap.click()
        text = page.tab.get_by_label("Text in German")
        expect(text).to_have_value("Ich habe Hunger.\nJa.")
        page.shows(lines=["I'm hungry.", "Yes."])
        assert (source.input_value(), target.input_value()) == ("de", "en")
        page.words.get_by_text("hungry.").hover()
        page.shows(linked=["Hunger."])
        # A source is chosen: the target is one that it has.
        source.select_option("en")
        expect(target.get_by_role("option")).to_have_text(["German"])
        # The language is detected, and text in the target language comes back.
        source.select_option("auto")
        expect(target.get_by_role("option")).to_have_count(2)
        target.select_option("en")
        page.text.fill("Die Kinder spielen im Garten.")
        page.shows(status="29 of 4,096 characters, in German (100% sure)")
        page.shows(lines=["The children are playing in the garden."])
        page.words.nth(1).click()
        expect(page.tab.locator(".alternatives button").first).to_be_focused()
        target.select_option("de")
        page.shows(status="This text is in German already (100% sure).")
        page.shows(lines=["Die Kinder spielen im Garten."])
        expect(swap).to_be_disabled()
        page.words.first.hover()
        page.words.first.click()
        # Nobody asked for the language: a text that seems to be in the target is named.
        source.select_option("en")
        expect(page.status).to_contain_text("in German already?")


@needs_browser
def test_the_text_fills_its_frame(shipped):
    with page_of(shipped) as page:
        frame = page.tab.locator(".pane").first.bounding_box()
        assert page.text.bounding_box()["height"] > 0.95 * frame["height"]


@needs_browser
def test_the_page_shows_alignment_and_attention(shipped):
    with page_of(shipped, "I am hungry.\nWhere is the station?") as page:
        page.words.get_by_text("Bahnhof?").hover()
        page.shows(linked=["station?"], source_sentence="Where is the station?")
        page.words.get_by_text("Hunger.").hover()
        page.shows(linked=["hungry."], sentence="Ich habe Hunger.")
        page.tab.get_by_text("Attention and numbers").click()
        keys = page.tab.locator(".links ol").nth(1).get_by_role("button")
        expect(keys.first).to_have_text("I")
        page.text.focus()
        page.press("Control+End")  # the cursor is in the last line
        expect(keys.first).to_have_text("Where")
        numbers = page.tab.locator("#numbers")
        expect(numbers).to_contain_text("The marked sentence: score -")


@needs_browser
def test_a_word_is_replaced_by_the_keyboard_alone(shipped):
    """In its sentence: what is known of the others stays, and no offer is unlikely."""
    with page_of(shipped, "I am hungry. Could you help me?\nYes.") as page:
        page.shows(lines=["Ich habe Hunger. Könntest du mir helfen?", "Ja."])
        page.words.nth(0).focus()
        page.press(*["ArrowRight"] * 3, "Enter")
        choices = page.tab.locator(".alternatives").get_by_role("button")
        rest = "mir helfen?"
        firsts = [f"Könnten Sie {rest}", f"Könntet ihr {rest}"]
        expect(choices.nth(0)).to_have_text(firsts[0])
        offers = choices.all_inner_texts()
        assert offers[:2] == firsts  # the likeliest first
        assert len({"Könntest", *(x.split()[0] for x in offers)}) == len(offers) + 1
        for keys, focused in (
            ([], choices.nth(0)),
            (["ArrowDown"], choices.nth(1)),
            (["ArrowUp", "ArrowUp"], choices.nth(0)),
            (["Escape"], page.words.nth(3)),
            (["Enter"], choices.nth(0)),
            (["Enter"], page.words.nth(3)),
        ):
            page.press(*keys)
            expect(focused).to_be_focused()
        expect(page.lines.nth(0)).to_have_text(f"Ich habe Hunger. {firsts[0]}")
        # The words of both sentences have their links, and the details are new.
        page.shows(linked=["Could"])
        page.words.get_by_text("Hunger.").hover()
        page.shows(linked=["hungry."], source_sentence="I am hungry.")
        assert page.tab.locator("#translation .unsure").count() == 0
        # Where nothing else is likely, nothing is offered.
        page.words.get_by_text("Hunger.").click()
        page.shows(status="No other word fits here.")


@needs_browser
def test_each_sentence_says_how_sure_it_is_and_what_it_lacks(shipped, monkeypatch):
    plain = translator_of(shipped).hypotheses

    def loses_a_number(lines, *arguments, **options):
        [[best]] = plain(lines, *arguments, **options)
        sure, (source, space, last) = best.parts
        last = replace(last, text="Sie hat Katzen.", missing=("47",))
        return [[replace(best, parts=(sure, (source, space, last)))]]

    text = "I am hungry. Colourless grue blickets zorp furiously."
    with page_of(shipped, text) as page:
        page.words.nth(3).wait_for()
        unsure = page.tab.locator("#translation .unsure")
        expect(unsure).to_have_count(1)
        expect(unsure).not_to_contain_text("Hunger")
        expect(unsure).to_have_attribute("title", "The model is unsure of this.")
        monkeypatch.setattr(translator_of(shipped), "hypotheses", loses_a_number)
        page.text.fill("I am hungry. She has 47 cats.")
        lacking = page.tab.locator("#translation .lacking")
        expect(lacking).to_have_attribute("data-missing", "47")
        expect(lacking).not_to_contain_text("Hunger")


@needs_browser
def test_lines_of_a_paragraph_are_joined_and_taken_apart_again(shipped):
    wrapped = "Could you help me? Where is the\nstation?\n\nI am hungry."
    with page_of(shipped, wrapped) as page:
        page.button("Join the lines of each paragraph").click()
        expect(page.text).to_have_value(wrapped.replace("the\n", "the "))
        first = "Könntest du mir helfen? Wo ist der Bahnhof?"
        page.shows(lines=[first, "", "Ich habe Hunger."])
        page.press("Control+z")
        expect(page.text).to_have_value(wrapped)


@needs_browser
def test_text_comes_from_files_and_goes_to_files_and_the_clipboard(shipped, tmp_path):
    files = {"mine.txt": b"I am hungry.\n\nYes.\n", "a.exe": b"a\0b", "b": b"Caf\xe9"}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    expected = "Ich habe Hunger.\n\nJa.\n"
    allowed = ["clipboard-read", "clipboard-write"]
    with page_of(shipped, permissions=allowed) as page:
        file = page.tab.locator("#file")
        file.set_input_files(tmp_path / "mine.txt")
        expect(page.lines).to_have_count(4)
        page.button("Copy").click()
        page.shows(status="copied")
        assert page.tab.evaluate("navigator.clipboard.readText()") == expected
        with page.tab.expect_download() as download:
            page.button("Save").click()
        assert download.value.suggested_filename == "translation.de.txt"
        assert Path(download.value.path()).read_text() == expected
        # No text, or none in UTF-8, leaves the text as it is.
        for name in ("a.exe", "b"):
            file.set_input_files(tmp_path / name)
            message = f"{name} is no text in UTF-8: save it as plain text with"
            expect(page.status).to_contain_text(message)
            assert page.text.input_value() == files["mine.txt"].decode()


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
