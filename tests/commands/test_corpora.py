"""Downloads from a local server: resumed, verified and joined."""

import gzip

import pytest

from minitransformer.commands import corpora
from minitransformer.commands.corpora import (
    CORPORA,
    CorpusError,
    Download,
    Part,
    PublicCorpus,
    fetch,
)
from support.corpus_server import archive, running_server, sha256

CONTENT = bytes(range(256)) * 600


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(corpora, "FIRST_DELAY", 0.001)
    monkeypatch.setattr(corpora, "UNSYNCED", 0)
    with running_server() as server:
        server.files["/x"] = CONTENT
        yield server


def test_a_file_arrives_and_is_not_fetched_again(server, tmp_path):
    download = Download(server.url + "/x", sha256(CONTENT))
    for _ in range(2):
        fetch(download, tmp_path / "x")
        assert (tmp_path / "x").read_bytes() == CONTENT
    assert server.ranges == [None]
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


def test_an_interrupted_download_resumes_where_it_ended(server, tmp_path):
    server.cut = 1000
    fetch(Download(server.url + "/x", sha256(CONTENT)), tmp_path / "x")
    assert (tmp_path / "x").read_bytes() == CONTENT
    assert server.ranges == [None, "bytes=1000-"]


def test_the_end_of_an_earlier_part_is_fetched_again(server, tmp_path, monkeypatch):
    """After a power failure bytes that were not synced may be zeros."""
    monkeypatch.setattr(corpora, "UNSYNCED", 1000)
    (tmp_path / "x.part").write_bytes(CONTENT[:4500] + bytes(500))
    fetch(Download(server.url + "/x", sha256(CONTENT)), tmp_path / "x")
    assert (tmp_path / "x").read_bytes() == CONTENT
    assert server.ranges == ["bytes=4000-"]


def test_without_range_requests_a_download_starts_again(server, tmp_path):
    server.resumable = False
    (tmp_path / "x.part").write_bytes(b"something else")
    fetch(Download(server.url + "/x"), tmp_path / "x")
    assert (tmp_path / "x").read_bytes() == CONTENT


def test_a_busy_server_is_tried_again(server, tmp_path):
    server.statuses = [503, 429, 408, 500]
    fetch(Download(server.url + "/x"), tmp_path / "x")
    assert len(server.ranges) == 5


def test_a_file_with_a_wrong_digest_is_refused_and_deleted(server, tmp_path):
    wrong = "0" * 64
    with pytest.raises(CorpusError, match=f"expected sha256 {wrong}, got"):
        fetch(Download(server.url + "/x", wrong), tmp_path / "x")
    assert not list(tmp_path.iterdir())


def test_a_damaged_file_is_fetched_again(server, tmp_path):
    (tmp_path / "x").write_bytes(b"damaged")
    fetch(Download(server.url + "/x", sha256(CONTENT)), tmp_path / "x")
    assert (tmp_path / "x").read_bytes() == CONTENT


def test_a_missing_file_is_reported_at_the_first_attempt(server, tmp_path):
    with pytest.raises(CorpusError, match="/none: the server answered 404"):
        fetch(Download(server.url + "/none"), tmp_path / "none")
    assert len(server.ranges) == 1


def test_a_server_that_always_fails_is_given_up(server, tmp_path, monkeypatch):
    server.statuses, waited = [503] * 99, []
    monkeypatch.setattr(corpora.time, "sleep", waited.append)
    monkeypatch.setattr(corpora, "FIRST_DELAY", 1.0)
    with pytest.raises(CorpusError, match=r"answered 503.*after 5 attempts"):
        fetch(Download(server.url + "/x"), tmp_path / "x")
    assert waited == [1, 2, 4, 8]


def sgml(*segments):
    rows = "\n".join(f'<seg id="{i}"> {s} </seg>' for i, s in enumerate(segments))
    return f"<srcset>\n<doc>\n{rows}\n</doc>\n</srcset>\n".encode()


def parts_of(first, second=None):
    one = Part(Download("http://h/one.tgz"), {"en": "a/t.en", "de": "a/t.de"}, first)
    two = Part(Download("http://h/two.tar"), {"en": "u.en.gz", "de": "u.de.gz"}, second)
    return one, two


@pytest.fixture
def downloads(tmp_path):
    folder = tmp_path / "downloads"
    folder.mkdir()
    one = {
        "../evil": b"x",
        "a/t.en": b"one\ntw\xc2\x85o\r\n",
        "./a/t.de": b"eins\nzwei",
    }
    links = [("a/link", "/etc/passwd")]
    (folder / "one.tgz").write_bytes(archive(one, links))
    two = {"u.de.gz": gzip.compress(b"drei\n"), "u.en.gz": gzip.compress(b"three\n")}
    (folder / "two.tar").write_bytes(archive(two, mode="w"))
    return folder


def test_parts_of_archives_are_joined_in_order(tmp_path, downloads):
    corpora.assemble(parts_of(2), tmp_path, "train", downloads)
    english = gzip.decompress((tmp_path / "train.en.gz").read_bytes())
    german = gzip.decompress((tmp_path / "train.de.gz").read_bytes())
    assert english == b"one\ntw\xc2\x85o\nthree\n"
    assert german == b"eins\nzwei\ndrei\n"
    assert (tmp_path / "train.en.gz").read_bytes()[4:8] == bytes(4)  # no time
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"downloads", "train.en.gz", "train.de.gz"}
    assert not (tmp_path.parent / "evil").exists()


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (parts_of(3), r"a/t.en and a/t.de: expected 3 lines each, got 2 and 2"),
        (parts_of(2, 9), "expected 9 lines each, got 1 and 1"),
        (
            (Part(Download("h/one.tgz"), {"en": "a/t.en", "de": "../gone"}),),
            "expected a member ../gone, found none",
        ),
        (
            (Part(Download("h/one.tgz"), {"en": "a/link", "de": "a/t.de"}),),
            "expected a member a/link, found none",
        ),
        (
            (Part(Download("h/one.tgz"), {"en": "../evil", "de": "a/t.de"}),),
            "expected 1 lines each, got 1 and 2",
        ),
    ],
)
def test_wrong_archives_are_refused(tmp_path, downloads, parts, message):
    with pytest.raises(CorpusError, match=message):
        corpora.assemble(parts, tmp_path, "train", downloads)
    assert [path.name for path in tmp_path.iterdir()] == ["downloads"]


@pytest.mark.parametrize("damage", [lambda b: b[:60], lambda b: b"no archive"])
def test_a_damaged_archive_is_named(tmp_path, downloads, damage):
    path = downloads / "one.tgz"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(CorpusError, match=r"one\.tgz: (a damaged archive|expected)"):
        corpora.assemble(parts_of(2), tmp_path, "train", downloads)


def test_multi30k_end_to_end(server, tmp_path, monkeypatch, capsys):
    files = []
    for download in CORPORA["multi30k"].files:
        content = gzip.compress(download.name.encode())
        path = "/" + download.url.split("/", 3)[3]
        server.files[f"/mirror{path}"] = content
        files.append(Download(download.url, sha256(content)))
    monkeypatch.setitem(CORPORA, "multi30k", PublicCorpus(tuple(files)))
    flags = ["multi30k", str(tmp_path / "data"), "--mirror", f"{server.url}/mirror/"]
    assert corpora.main(flags) == 0
    names = sorted(path.name for path in (tmp_path / "data").glob("[!.]*"))
    assert len(names) == 9
    assert {"train.en.gz", "val.fr.gz", "test_2016_flickr.de.gz"} <= set(names)
    server.files.clear()
    assert corpora.main(flags) == 0  # nothing is fetched again
    (tmp_path / "data" / "train.en.gz").unlink()
    assert corpora.main(flags) == 1
    error = capsys.readouterr().err
    assert error.startswith("minitransformer corpora: error: ")
    assert error.count("\n") == 1


@pytest.mark.parametrize("language", ["de", "fr"])
def test_wmt14_end_to_end(server, tmp_path, monkeypatch, language):
    """Tiny archives with the members that the table names."""
    name = f"wmt14-en-{language}"
    contents, splits = {}, {}
    for split, parts in CORPORA[name].splits.items():
        splits[split] = tuple(Part(p.archive, p.members, 2) for p in parts)
        for part in parts:
            members = contents.setdefault(part.archive.url, {})
            for side, member in part.members.items():
                lines = [f"{split} {side} &amp; {i}" for i in range(2)]
                plain = "".join(x + "\n" for x in lines).encode()
                if member.endswith(".sgm"):
                    plain = sgml(*lines)
                if member.endswith(".gz"):
                    plain = gzip.compress(plain)
                members[member] = plain
    for url, members in contents.items():
        mode = "w" if url.endswith(".tar") else "w:gz"
        server.files["/" + url.split("/", 3)[3]] = archive(members, mode=mode)
    monkeypatch.setitem(CORPORA, name, PublicCorpus(splits=splits))
    assert corpora.main([name, str(tmp_path), "--mirror", server.url]) == 0
    train = gzip.decompress((tmp_path / f"train.{language}.gz").read_bytes()).decode()
    assert train.count("\n") == 2 * len(splits["train"])
    test = gzip.decompress((tmp_path / "test.en.gz").read_bytes()).decode()
    assert test == "test en & 0\ntest en & 1\n"
    asked = len(server.paths)
    assert corpora.main([name, str(tmp_path), "--mirror", server.url]) == 0
    assert len(server.paths) == asked


@pytest.mark.parametrize("language", ["de", "fr"])
def test_the_parts_are_those_of_wmt_2014(language):
    """About 4.5 million pairs for German; newstest2013 and newstest2014 (5.1, 6)."""
    splits = CORPORA[f"wmt14-en-{language}"].splits
    names = [p.members[language].split("/")[-1] for p in splits["train"]]
    pair = f"{language}-en.{language}"
    expected = [f"europarl-v7.{pair}", f"commoncrawl.{pair}"]
    expected += [f"undoc.2000.{pair}"] if language == "fr" else []
    expected += [f"news-commentary-v9.{pair}"]
    expected += ["giga-fren.release2.fixed.fr.gz"] if language == "fr" else []
    assert names == expected
    if language == "de":
        lines = [part.lines for part in splits["train"]]
        assert sum(lines) == pytest.approx(4.5e6, rel=0.01)
    [[val], [test]] = splits["val"], splits["test"]
    assert val.members[language] == f"dev/newstest2013.{language}"
    assert (val.lines, test.lines) == (3000, 3003)
    for side, kind in (("en", "src"), (language, "ref")):
        name = f"test-full/newstest2014-{language}en-{kind}.{side}.sgm"
        assert test.members[side] == name
