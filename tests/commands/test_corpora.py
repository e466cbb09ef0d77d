"""Downloads from a local server, verified and joined."""

import gzip
from urllib.parse import urlsplit

import pytest

from minitransformer.commands import corpora
from minitransformer.commands.corpora import WMT14, CorpusError, Part, fetch
from support.corpus_server import archive, running_server, sha256

CONTENT = bytes(range(256)) * 600


@pytest.fixture
def server():
    with running_server() as server:
        server.files["/x"] = CONTENT
        yield server


def test_a_file_is_fetched_once_and_replaces_nothing(server, tmp_path):
    path = tmp_path / "x"
    for _ in range(2):
        fetch(server.url + "/x", path, sha256(CONTENT))
        assert path.read_bytes() == CONTENT
    path.write_bytes(b"of the user")
    with pytest.raises(CorpusError, match="x: it exists with another content than"):
        fetch(server.url + "/x", path, sha256(CONTENT))
    assert path.read_bytes() == b"of the user"
    assert len(server.paths) == 1
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


@pytest.mark.parametrize(
    ("name", "cut", "message"),
    [
        ("x", None, "expected sha256 0000"),
        ("x", 1000, r"IncompleteRead.*152600 more.*; try again, or put the file at"),
        ("gone", None, "HTTP Error 404: Not Found; try again"),
    ],
)
def test_what_does_not_arrive_whole_is_refused(server, tmp_path, name, cut, message):
    server.cut = cut
    with pytest.raises(CorpusError, match=f"http.*/{name}: {message}"):
        fetch(f"{server.url}/{name}", tmp_path / "x", "0" * 64)
    assert not list(tmp_path.iterdir())


def text_of(member, lines):
    """What a member of an archive is, by its name."""
    if member.endswith(".sgm"):
        lines = [f'<seg id="{i}"> {line} </seg>' for i, line in enumerate(lines)]
        lines = ["<srcset>", "<doc>", *lines, "</doc>", "</srcset>"]
    data = "".join(f"{line}\n" for line in lines).encode()
    return gzip.compress(data) if member.endswith(".gz") else data


def parts_of(first, second=None, en="a/t.en"):
    one = Part("http://h/one.tgz", {"en": en, "de": "a/t.de"}, first)
    two = Part("http://h/two.tar", {"en": "u.en.gz", "de": "u.de.gz"}, second)
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
        (parts_of(None, en="../gone"), "expected a member ../gone, found none"),
        (parts_of(None, en="a/link"), "expected a member a/link, found none"),
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
    digests, path = "", urlsplit(corpora.MULTI30K).path
    for line in corpora.MULTI30K_SHA256.splitlines():
        name = line.split()[1]
        server.files[f"/mirror{path}{name}.gz"] = content = gzip.compress(name.encode())
        digests += f"{sha256(content)} {name}\n"
    monkeypatch.setattr(corpora, "MULTI30K_SHA256", digests)
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
    for split, parts in WMT14[name].items():
        splits[split] = tuple(part._replace(lines=2) for part in parts)
        for part in parts:
            members = contents.setdefault(part.archive, {})
            for side, member in part.members.items():
                lines = [f"{split} {side} &amp; {i}" for i in range(2)]
                members[member] = text_of(member, lines)
    for url, members in contents.items():
        mode = "w" if url.endswith(".tar") else "w:gz"
        server.files["/" + url.split("/", 3)[3]] = archive(members, mode=mode)
    monkeypatch.setitem(WMT14, name, splits)
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
    splits = WMT14[f"wmt14-en-{language}"]
    if language == "de":
        lines = [part.lines for part in splits["train"]]
        assert sum(lines) == pytest.approx(4.5e6, rel=0.01)
    [[val], [test]] = splits["val"], splits["test"]
    assert val.members[language] == f"dev/newstest2013.{language}"
    assert (val.lines, test.lines) == (3000, 3003)
    for side, kind in (("en", "src"), (language, "ref")):
        name = f"test-full/newstest2014-{language}en-{kind}.{side}.sgm"
        assert test.members[side] == name
