"""Download public parallel corpora and verify them.

The files of Multi30k are verified by their sha256. WMT 2014 publishes no digests: its
files are verified by the size that the server announces and by their line counts. These
must be the same for both languages, and equal the published counts if there are any.
"""

from __future__ import annotations

import gzip
import hashlib
import html
import http.client
import shutil
import sys
import tarfile
import urllib.error
import urllib.request
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, NamedTuple, cast
from urllib.parse import urlsplit

from tqdm import tqdm

from minitransformer.commands import Command
from minitransformer.settings import VERSION
from minitransformer.system.files import atomic_write

TIMEOUT = 60.0  # seconds without an answer
NETWORK_ERRORS = (
    urllib.error.URLError,
    http.client.HTTPException,
    ConnectionError,
    TimeoutError,
)


class Part(NamedTuple):
    """Parallel text in an archive: a member for each language, and their line count."""

    archive: str
    members: dict[str, str]
    lines: int | None = None


MULTI30K = (
    "https://raw.githubusercontent.com/multi30k/dataset/"
    "a3d2e0d26b56f3846f66a952536ffed4e401d05a/data/task1/raw/"
)
# The files of Multi30k and their digests, as sha256sum writes them
MULTI30K_SHA256 = """\
d79cfa999dd4c51d2cb42499b6796d5a882c3a8a961923c25a898c90f8bbd56f train.en
726e39b2fa9eb9ffb6dc763fb35a179f80fae06ffc5d28b6ace5faa883de28a6 train.de
622e75069e9f4c577425c4f277116ce66e63a2401c0a2312d90073cb12379a3c train.fr
14f7d25ddd868909a9213e361768460edcacdd6ab9d1e77b92560dc10c10dc28 val.en
f0cba2f995189cf5770f29a8a9a537a3ad3f51657ad873405082ff6863a5e75a val.de
ca3106f1a72390591d25f6c45cb4cd39dec4cd3f123e099748a3ce5256c160e9 val.fr
611d361c6334bc7246101d48097c13cf5c4413c5befc793cc629934359d532d9 test_2016_flickr.en
9204244e408ccb38d2a55cfcd344df15005fc42a07a6e55ca6c52b6ababb8cc8 test_2016_flickr.de
6d326e188d259fb1d04ac19eae3af956559b3a0b93d7635e56c90987c40c8b90 test_2016_flickr.fr
"""
STATMT = "https://www.statmt.org/"
EUROPARL = STATMT + "wmt13/training-parallel-europarl-v7.tgz"
COMMON_CRAWL = STATMT + "wmt13/training-parallel-commoncrawl.tgz"
UN = STATMT + "wmt13/training-parallel-un.tgz"
NEWS = STATMT + "wmt14/training-parallel-nc-v9.tgz"
GIGA = STATMT + "wmt10/training-giga-fren.tar"
DEV = STATMT + "wmt14/dev.tgz"
TEST = STATMT + "wmt14/test-full.tgz"


def _part(
    archive: str, stem: str, language: str, lines: int | None = None, end: str = ""
) -> Part:
    members = {side: f"{stem}.{side}{end}" for side in ("en", language)}
    return Part(archive, members, lines)


def _wmt14(language: str, *train: Part) -> dict[str, Sequence[Part]]:
    stem = f"test-full/newstest2014-{language}en-"
    newstest = {"en": f"{stem}src.en.sgm", language: f"{stem}ref.{language}.sgm"}
    val = _part(DEV, "dev/newstest2013", language, 3000)
    return {"train": train, "val": [val], "test": [Part(TEST, newstest, 3003)]}


# The parts of archives that make up each split of WMT 2014
WMT14 = {
    "wmt14-en-de": _wmt14(
        "de",
        _part(EUROPARL, "training/europarl-v7.de-en", "de", 1_920_209),
        _part(COMMON_CRAWL, "commoncrawl.de-en", "de", 2_399_123),
        _part(NEWS, "training/news-commentary-v9.de-en", "de", 201_288),
    ),
    "wmt14-en-fr": _wmt14(
        "fr",
        _part(EUROPARL, "training/europarl-v7.fr-en", "fr"),
        _part(COMMON_CRAWL, "commoncrawl.fr-en", "fr"),
        _part(UN, "un/undoc.2000.fr-en", "fr"),
        _part(NEWS, "training/news-commentary-v9.fr-en", "fr"),
        _part(GIGA, "giga-fren.release2.fixed", "fr", end=".gz"),
    ),
}


class CorpusError(RuntimeError):
    """A download or an archive that is damaged, or another one than expected."""


def fetch(url: str, path: Path, sha256: str | None = None) -> None:
    """Download a file to `path` and verify it, unless a verified one is there.

    Raises: CorpusError, or OSError if the file cannot be written.
    """
    if path.exists():
        if sha256 not in (None, _sha256(path)):
            raise CorpusError(f"{path}: it exists with another content than {url}")
        return
    headers = {"User-Agent": f"minitransformer/{VERSION}"}
    request = urllib.request.Request(url, headers=headers)
    try:
        # Download it; the file appears only if the verification below succeeds.
        with (
            urllib.request.urlopen(request, timeout=TIMEOUT) as response,
            atomic_write(path) as file,
            tqdm.wrapattr(
                file,
                "write",
                desc=path.name,
                total=response.length,
                disable=not sys.stderr.isatty(),
            ) as counted,
        ):
            shutil.copyfileobj(response, counted)
            if response.length:  # bytes that were announced and are still missing
                raise http.client.IncompleteRead(b"", response.length)
            file.flush()
            if sha256 not in (None, got := _sha256(Path(file.name))):
                raise CorpusError(f"{url}: expected sha256 {sha256}, got {got}")
    except NETWORK_ERRORS as error:
        advice = f"try again, or put the file at {path} (wget -c)"
        raise CorpusError(f"{url}: {error}; {advice}") from error


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def assemble(parts: Sequence[Part], folder: Path, split: str, downloads: Path) -> None:
    """Write the lines of all parts in order to `folder`/`split`.LANGUAGE.gz.

    Raises: CorpusError if the sides of a part differ in length or a count is wrong.
    """
    counts: list[list[int]] = [[] for _ in parts]  # the lines of each language
    # The files of both languages appear together, at the end.
    with ExitStack() as stack:
        for side in parts[0].members:
            file = stack.enter_context(atomic_write(folder / f"{split}.{side}.gz"))
            with gzip.GzipFile("", "wb", 6, file, mtime=0) as out:
                for part, lines in zip(parts, counts, strict=True):
                    archive = downloads / _name(part.archive)
                    lines.append(_copy_member(archive, part.members[side], out))
        # Verify the line counts before that.
        for part, lines in zip(parts, counts, strict=True):
            expected = lines[0] if part.lines is None else part.lines
            if set(lines) != {expected}:
                raise CorpusError(
                    f"{' and '.join(part.members.values())}: expected {expected:,} "
                    f"lines each, got {' and '.join(f'{n:,}' for n in lines)}"
                )


def _copy_member(archive: Path, member: str, out: gzip.GzipFile) -> int:
    """Append the lines of a member of an archive to `out`, and return their number."""
    try:
        # Archives are read as streams: members are found in their order.
        with tarfile.open(archive, "r|*") as tar:
            for entry in tar:
                if entry.name.removeprefix("./") == member and entry.isfile():
                    count = 0
                    for line in _lines(cast(IO[bytes], tar.extractfile(entry)), member):
                        out.write(line + b"\n")
                        count += 1
                    return count
    except (tarfile.TarError, EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise CorpusError(f"{archive}: a damaged archive: {error}") from error
    raise CorpusError(f"{archive}: expected a member {member}, found none")


def _lines(file: IO[bytes], member: str) -> Iterator[bytes]:
    """Yield the lines of plain text or gzip, or the segments of SGML, without ends."""
    if member.endswith(".sgm"):
        text = file.read().decode("utf-8")
        for tagged in text.split("<seg")[1:]:
            segment = tagged.partition(">")[2].partition("</seg>")[0]
            yield " ".join(html.unescape(segment).split()).encode()
        return
    for line in gzip.GzipFile(fileobj=file) if member.endswith(".gz") else file:
        yield line.removesuffix(b"\n").removesuffix(b"\r")


def download_corpus(name: str, folder: Path, mirror: str | None = None) -> None:
    """Fetch a corpus into `folder`, from the server `mirror` if given.

    Raises: CorpusError, OSError.
    """

    def fetch_into(target: Path, url: str, sha256: str | None = None) -> None:
        target.mkdir(parents=True, exist_ok=True)
        place = mirror.rstrip("/") + urlsplit(url).path if mirror else url
        fetch(place, target / _name(url), sha256)

    # Multi30k: a file for each split and language.
    if name == "multi30k":
        for line in MULTI30K_SHA256.splitlines():
            digest, file = line.split()
            fetch_into(folder, f"{MULTI30K}{file}.gz", digest)
        return
    # WMT 2014: the archives of each split that is not there yet, and then its files.
    for split, parts in WMT14[name].items():
        if all((folder / f"{split}.{s}.gz").exists() for s in parts[0].members):
            continue
        for part in parts:
            fetch_into(folder / "downloads", part.archive)
        assemble(parts, folder, split, folder / "downloads")


def _name(url: str) -> str:
    return url.rsplit("/", 1)[1]


def main(arguments: Sequence[str]) -> int:
    parser = Command(
        "minitransformer corpora",
        "Download a public corpus, verify it, and write files for train.py --data.",
        ("minitransformer corpora multi30k data/multi30k",),
        "Files that are there already, archives in `downloads`, are not fetched again.",
    )
    parser.add_argument("corpus", choices=("multi30k", *WMT14))
    parser.add_argument("folder", type=Path, help="the folder for its files")
    parser.add_argument("--mirror", metavar="URL", help="another server with the files")
    return parser.run(
        arguments, lambda args: download_corpus(args.corpus, args.folder, args.mirror)
    )
