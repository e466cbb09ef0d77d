"""What LibreTranslate's clients send, and models of several languages in one server."""

import io
import json
import threading
import time
import zipfile
from collections import deque
from contextlib import closing
from pathlib import Path
from typing import ClassVar
from urllib.parse import urlencode
from urllib.request import urlopen

import pytest

from minitransformer import load
from minitransformer.commands import libretranslate
from minitransformer.commands.libretranslate import Direction, _answer
from minitransformer.commands.serve import Server
from minitransformer.commands.translation_queue import Job, Line, TranslationQueue
from minitransformer.runs.models import models_by_direction, shipped_models
from minitransformer.settings.decoding_config import TranslationConfig
from minitransformer.text.markup import PlainLine
from minitransformer.translation.beam_search import Hypothesis
from support.in_process import rows
from support.serving import (
    answer_on,
    connected,
    request,
    running,
    serving,
    translated,
)

HUNGRY = {"q": "I am hungry.", "source": "en", "target": "de"}
HUNGRIG = {"translatedText": "Ich habe Hunger."}


@pytest.fixture(scope="module")
def server():
    with serving(*shipped_models()) as server:
        yield server


def ask(server, path, body=None, method="POST", **headers):
    """Return the status, and the answer if there is one."""
    status, text, _ = request(server, method, path, body, **headers)
    return status, json.loads(text) if text else None


# What clients send


def multipart(fields):
    parts = [
        f'--limit\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'
        for name, value in fields
    ]
    return "".join([*parts, "--limit--\r\n"]).encode()


MULTIPART = {"Content-Type": "multipart/form-data; boundary=limit"}
FORM = {"Content-Type": "application/x-www-form-urlencoded"}
TWO = [("q", "I am hungry."), ("q", "Yes."), ("source", "en"), ("target", "de")]
FURTHER = {"format": "text", "alternatives": "0", "secret": ""}


@pytest.mark.parametrize(
    ("headers", "encode"), [(MULTIPART, multipart), (FORM, urlencode)]
)
def test_forms_have_one_text_or_several(server, headers, encode):
    """Blank texts keep their places."""
    several = {"translatedText": ["", "Ich habe Hunger.", "Ja.", ""]}
    for fields, answer in (
        ([*HUNGRY.items(), *FURTHER.items()], HUNGRIG),
        ([("q", ""), *TWO, ("q", "")], several),
    ):
        assert ask(server, "/translate", encode(fields), **headers) == (200, answer)


def test_a_list_of_texts_as_php_writes_it(server):
    body = urlencode(TWO).replace("q=", "q%5B%5D=")
    answer = {"translatedText": ["Ich habe Hunger.", "Ja."]}
    assert ask(server, "/translate", body, **FORM) == (200, answer)


# The type of a request, and the encoding of JSON.
TYPES = """
application/json | utf-8
application/x-www-form-urlencoded | utf-8
text/plain | utf-8
a/json | utf-16
json | utf-8-sig
"""


@pytest.mark.parametrize(("kind", "encoding"), rows(TYPES))
def test_json_has_many_names(server, kind, encoding):
    body = json.dumps(HUNGRY).encode(encoding)
    for path in ("/translate", "/translate/"):
        assert ask(server, path, body, **{"Content-Type": kind}) == (200, HUNGRIG)


def test_fields_come_in_the_address(server):
    assert ask(server, f"/translate?{urlencode(HUNGRY)}") == (200, HUNGRIG)
    rest = {**HUNGRY, "q": ""}
    body = {"q": HUNGRY["q"]}
    assert ask(server, f"/translate?{urlencode(rest)}", body) == (200, HUNGRIG)


def test_chunks_as_dotnet_sends_them(server):
    """Each comes alone, after the server has said that it will read the body."""
    head = (
        "POST /translate HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n"
        "Content-Type: application/json; charset=utf-8\r\nExpect: 100-continue\r\n\r\n"
    )
    text = json.dumps(HUNGRY).encode()
    with connected(server) as connection:
        connection.sendall(head.encode())
        assert connection.recv(1000).startswith(b"HTTP/1.1 100 ")
        for part in (text[:5], text[5:]):
            connection.sendall(b"%x\r\n%b\r\n" % (len(part), part))
            time.sleep(0.05)
        connection.sendall(b"0\r\n\r\n")
        assert answer_on(connection) == HUNGRIG


def test_too_much_is_refused_before_and_while_it_comes(server):
    head = b"POST /translate HTTP/1.1\r\nHost: localhost\r\n"
    chunk = b"10000\r\n" + b" " * 65_536 + b"\r\n"
    for sent in (
        b"Content-Length: 70000\r\nExpect: 100-continue\r\n\r\n",
        b"Transfer-Encoding: chunked\r\n\r\n" + chunk + b"1\r\n \r\n",
    ):
        with connected(server) as connection:
            connection.sendall(head + sent)
            assert connection.recv(1000).startswith(b"HTTP/1.1 413 ")


def test_head_has_no_body(server):
    for path in ("/", "/health", "/languages", "/frontend/settings"):
        assert ask(server, path, method="HEAD") == (200, None)


def test_what_other_pages_ask_first(server):
    status, settings = ask(server, "/frontend/settings", method="GET")
    assert status == 200
    assert settings["charLimit"] == 4096
    assert settings["keyRequired"] is not settings["filesTranslation"] is True
    assert {".srt", ".html", ".odt", ".po"} < {*settings["supportedFilesFormat"]}
    assert settings["language"]["source"] == {"code": "en", "name": "English"}


def upload(server, name, content, source="en"):
    """Send a file as LibreTranslate's clients do; return the status and the answer."""
    head = f'--limit\r\nContent-Disposition: form-data; name="file"; filename="{name}"'
    part = head.encode() + b"\r\n\r\n" + content + b"\r\n"
    body = part + multipart([("source", source), ("target", "de")])
    return ask(server, "/translate_file", body, **MULTIPART)


def fetched(server, *file):
    """Send a file, and return what comes back: its headers and its content."""
    status, answer = upload(server, *file)
    assert status == 200
    with urlopen(answer["translatedFileUrl"]) as found:
        return found.headers, found.read()


def test_a_file_is_translated_and_fetched(server, monkeypatch):
    """In parts: no request has so much text. A binary file comes back as one."""
    monkeypatch.setattr(libretranslate, "MAX_TOKENS", 160)
    cue = b"00:00:01,000 --> 00:00:02,000\nI am\nhungry.\n\n"
    german = cue.replace(b"I am\nhungry", b"Ich habe\nHunger")
    for source in ("en", "auto"):
        headers, content = fetched(server, "film.srt", cue * 9, source)
        assert content == german * 9
        assert headers["Content-Disposition"].startswith("attachment; filename=")
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("content.xml", "<text:p>I am hungry.</text:p>")
    _, content = fetched(server, "a.odt", out.getvalue())
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        assert b">Ich habe Hunger.<" in archive.read("content.xml")


@pytest.mark.parametrize(
    ("name", "content", "status", "message"),
    [
        ("a.docx", b"PK", 400, "a.docx: expected .srt, .vtt"),
        ("a.srt", b"\xe9", 400, "a.srt: expected .srt, in UTF-8: 'utf-8' codec"),
        ("a.txt", b"a" * 2**20, 413, "expected at most 1,048,576 bytes, got more"),
        ("a.txt", b"I am hungry. " * 4096, 400, "exceeds text limit (4,096 tokens)"),
    ],
)
def test_a_file_that_cannot_be_translated_is_refused(
    server, name, content, status, message
):
    got, answer = upload(server, name, content)
    assert (got, message in answer["error"]) == (status, True), answer
    assert ask(server, "/download_file/a.txt", method="GET")[0] == 404
    _, answer = ask(server, "/translate_file", {"file": "a", **HUNGRY})
    assert answer == {"error": "Invalid request: file parameter is no file"}


def libretranslatepy(module, url):
    api = module.LibreTranslateAPI(url)
    assert [x["name"] for x in api.languages()] == ["English", "German"]
    assert api.detect("Ich habe Hunger.")[0]["language"] == "de"
    assert api.translate("Cats & ü", "en", "en") == "Cats & ü"
    return api.translate(HUNGRY["q"], "en", "de")


def httpx(module, url):
    """Send multipart."""
    fields = {name: (None, value) for name, value in HUNGRY.items()}
    return module.post(f"{url}translate", files=fields).json()["translatedText"]


def deep_translator(module, url):
    """Send the fields in the address."""
    names = {"source": "en", "target": "de"}
    translator = module.LibreTranslator(**names, custom_url=url, api_key="x")
    return translator.translate(HUNGRY["q"])


def libretranslate_aio(module, url):
    with module.LibreTranslate(url) as client:
        assert client.health()
        assert [x.targets for x in client.languages()] == [["de"], ["en"]]
        assert client.frontend_settings().char_limit == 4096
        return client.translate(**HUNGRY).translated_text


@pytest.mark.parametrize(
    "client", [libretranslatepy, httpx, deep_translator, libretranslate_aio]
)
def test_other_programs_get_their_answers(server, client):
    module = pytest.importorskip(client.__name__)
    assert client(module, server.address) == HUNGRIG["translatedText"]


# Several languages


def test_each_direction_has_its_model(server):
    assert ask(server, "/languages", method="GET")[1] == [
        {"code": "en", "name": "English", "targets": ["de"]},
        {"code": "de", "name": "German", "targets": ["en"]},
    ]
    german = "Ich habe Hunger."
    english = {"translatedText": "I'm hungry."}
    assert translated(server, german, "de", "en") == english
    assert translated(server, german, "DE", "en-GB") == english
    assert translated(server, german, "de", "auto") == english


def test_the_language_of_a_text_is_detected(server):
    german = "Ich habe heute keine Zeit."
    answer = translated(server, german, "auto", "en")
    assert (
        answer["translatedText"]
        == translated(server, german, "de", "en")["translatedText"]
    )
    detected = answer["detectedLanguage"]
    assert detected["language"] == "de"
    assert type(detected["confidence"]) is int
    assert detected["confidence"] > 95
    assert ask(server, "/detect", {"q": german}) == (200, [detected])
    # Text in the target language is said to be that.
    answer = translated(server, german, "auto", "de")
    assert answer["translatedText"] == german
    assert answer["detectedLanguage"] == detected
    # What no language is like more than others leads to no claim.
    assert ask(server, "/detect", {"q": "123"})[1][0]["confidence"] == 50


def test_the_same_language_gives_the_text_back(server):
    text = "One\n\r\n two <b>"
    answer = {"translatedText": text, "alternatives": []}
    assert translated(server, text, "en", "en") == answer
    wrapped = "A house near the vil-\nlage.\n\nYes."
    joined = "A house near the village.\n\nYes."
    answer = translated(server, wrapped, "en", "en", paragraphs=True)
    assert answer["translatedText"] == joined
    answer = translated(server, [text, ""], "en", "en", alternatives=2)
    assert answer == {"translatedText": [text, ""], "alternatives": [[], []]}


def test_a_language_that_nobody_knows_is_not_claimed(model_path):
    """Its codes are `source` and `target`."""
    with serving(model_path, *shipped_models()) as server:
        unsure = {"confidence": 0, "language": "source"}
        assert ask(server, "/detect", {"q": "Hello there."}) == (200, [unsure])
        answer = translated(server, "a", "auto", "target")
        assert answer["detectedLanguage"] == unsure
        expected = "source to target, en to de, de to en"
        message = f"en to target is not supported: expected {expected}"
        found = ask(server, "/translate", {**HUNGRY, "target": "target"})
        assert found == (400, {"error": message})
        assert translated(server, HUNGRY["q"]) == HUNGRIG


def test_several_models_of_one_direction_are_an_ensemble():
    ende, deen = shipped_models()
    names = [Path("en-de"), deen, ende]
    assert models_by_direction(names) == [[Path("en-de"), ende], [deen]]
    with running(Server([Direction.of(load(ende, ende), ende)])) as server:
        assert translated(server, HUNGRY["q"], "en", "de") == HUNGRIG
        status, answer = ask(server, "/attention", HUNGRY)
        assert (status, answer["error"]) == (400, "expected one --model, got 2")


# The queue


class FakeTranslator:
    """Writes down the batches that it gets, and holds the first until it may go on."""

    batches: ClassVar = []
    began = threading.Event()
    go_on = threading.Event()

    def use_device(self):
        pass

    def hypotheses(self, lines, config, first_line, prefixes):
        self.began.set()
        assert self.go_on.wait(30)
        self.batches.append((self, [*lines]))
        for number, line in enumerate(lines, first_line):
            if line == "wrong":
                raise ValueError(f"line {number}: wrong")
        return [
            prefix + line.upper() for prefix, line in zip(prefixes, lines, strict=True)
        ]


def test_models_take_turns_batch_by_batch():
    config = TranslationConfig(decode_tokens=20)

    def job(translator, *lines):
        return Job(translator, config, deque(Line(x, ">", 10) for x in lines))

    one, other = FakeTranslator(), FakeTranslator()
    with closing(TranslationQueue()) as queue:
        first = queue.submit(job(one, "held"))
        assert FakeTranslator.began.wait(30)
        long = queue.submit(job(one, *"abcde"))
        wrong = queue.submit(job(one, "f", "g", "wrong", *"hijk"))
        short = queue.submit(job(other, "x"))
        assert queue.size() == 130
        FakeTranslator.go_on.set()
        assert first.result(30) == [">HELD"]
        assert long.result(30) == [f">{x}" for x in "ABCDE"]
        assert short.result(30) == [">X"]
        with pytest.raises(ValueError, match="line 3: wrong"):
            wrong.result(30)
        assert queue.size() == 0
    # The other model waits for no second batch; jobs of the same model share theirs.
    assert FakeTranslator.batches[1] == (other, ["x"])
    assert [lines for _, lines in FakeTranslator.batches[2:4]] == [
        ["a", "b"],
        ["f", "g"],
    ]
    assert max(len(lines) for _, lines in FakeTranslator.batches) == 2


@pytest.mark.slow
def test_no_other_answer_waits_for_a_translation(server):
    """While the longest text is translated, the rest takes at most 0.2 seconds."""
    line = "The little house was sold because nobody wanted to live there. "
    texts = ["\n".join([line] * 280), line * 280, "\n" * 4090]
    for text in texts:
        job = threading.Thread(target=translated, args=(server, text, "en", "de"))
        job.start()
        time.sleep(0.1)
        for path in ("/health", "/languages", "/") * 10:
            began = time.monotonic()
            assert request(server, "GET", path)[0] == 200
            assert time.monotonic() - began < 0.2
        job.join()


def test_ranks_do_not_mix_where_a_line_has_fewer():
    """Each alternative has the hypothesis of its rank, or the last, of every line."""
    lists = [[Hypothesis((), 0, 0, text=x) for x in texts] for texts in ("ab", "xyz")]
    config = TranslationConfig(beam=4, nbest=4)
    answer = _answer([PlainLine("1", " "), PlainLine("2", "")], lists, config)
    assert answer == {"translatedText": "a x", "alternatives": ["b y", "b z"]}
