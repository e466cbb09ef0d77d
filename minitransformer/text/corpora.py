"""Download public parallel corpora and verify them.

A download continues where it stopped. The files of Multi30k are verified by sha256.
For those of WMT 2014 no digests are published: they are verified by the size that the
server announces and by line counts, which must equal the published ones where these
are known and must always be the same for both languages. The folder then holds train,
val and test files for `train.py --data`.
"""

from __future__ import annotations

import gzip
import hashlib
import html
import http.client
import os
import re
import sys
import tarfile
import time
import urllib.error
import urllib.request
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast
from urllib.parse import urlsplit

from tqdm import tqdm

from minitransformer.settings.options import Parser, exit_code

ATTEMPTS = 5
FIRST_DELAY = 1.0  # seconds before the second attempt; doubled before each further one
TIMEOUT = 60.0  # seconds without an answer
BLOCK = 1 << 16


@dataclass(frozen=True)
class Download:
    """A file on a server, and what is known of it."""

    url: str
    sha256: str | None = None

    @property
    def name(self) -> str:
        return self.url.rsplit("/", 1)[1]


@dataclass(frozen=True)
class Part:
    """Parallel text inside an archive: one member a language, and its line count."""

    archive: Download
    members: dict[str, str]
    lines: int | None = None


@dataclass(frozen=True)
class PublicCorpus:
    """Files that are used as they come, and splits put together from archives."""

    files: tuple[Download, ...] = ()
    splits: dict[str, tuple[Part, ...]] | None = None


MULTI30K = (
    "https://raw.githubusercontent.com/multi30k/dataset/"
    "a3d2e0d26b56f3846f66a952536ffed4e401d05a/data/task1/raw/"
)
MULTI30K_SHA256 = {
    "train.en": "d79cfa999dd4c51d2cb42499b6796d5a882c3a8a961923c25a898c90f8bbd56f",
    "train.de": "726e39b2fa9eb9ffb6dc763fb35a179f80fae06ffc5d28b6ace5faa883de28a6",
    "train.fr": "622e75069e9f4c577425c4f277116ce66e63a2401c0a2312d90073cb12379a3c",
    "val.en": "14f7d25ddd868909a9213e361768460edcacdd6ab9d1e77b92560dc10c10dc28",
    "val.de": "f0cba2f995189cf5770f29a8a9a537a3ad3f51657ad873405082ff6863a5e75a",
    "val.fr": "ca3106f1a72390591d25f6c45cb4cd39dec4cd3f123e099748a3ce5256c160e9",
    "test_2016_flickr.en": (
        "611d361c6334bc7246101d48097c13cf5c4413c5befc793cc629934359d532d9"
    ),
    "test_2016_flickr.de": (
        "9204244e408ccb38d2a55cfcd344df15005fc42a07a6e55ca6c52b6ababb8cc8"
    ),
    "test_2016_flickr.fr": (
        "6d326e188d259fb1d04ac19eae3af956559b3a0b93d7635e56c90987c40c8b90"
    ),
}
STATMT = "https://www.statmt.org/"
EUROPARL = Download(STATMT + "wmt13/training-parallel-europarl-v7.tgz")
COMMON_CRAWL = Download(STATMT + "wmt13/training-parallel-commoncrawl.tgz")
UN = Download(STATMT + "wmt13/training-parallel-un.tgz")
NEWS = Download(STATMT + "wmt14/training-parallel-nc-v9.tgz")
GIGA = Download(STATMT + "wmt10/training-giga-fren.tar")
DEV = Download(STATMT + "wmt14/dev.tgz")
TEST = Download(STATMT + "wmt14/test-full.tgz")


def _part(
    archive: Download, stem: str, language: str, lines: int | None = None, end: str = ""
) -> Part:
    members = {side: f"{stem}.{side}{end}" for side in ("en", language)}
    return Part(archive, members, lines)


def _newstest2014(language: str) -> Part:
    stem = f"test-full/newstest2014-{language}en-"
    members = {"en": f"{stem}src.en.sgm", language: f"{stem}ref.{language}.sgm"}
    return Part(TEST, members, 3003)


CORPORA = {
    "multi30k": PublicCorpus(
        files=tuple(
            Download(f"{MULTI30K}{name}.gz", digest)
            for name, digest in MULTI30K_SHA256.items()
        )
    ),
    "wmt14-en-de": PublicCorpus(
        splits={
            "train": (
                _part(EUROPARL, "training/europarl-v7.de-en", "de", 1_920_209),
                _part(COMMON_CRAWL, "commoncrawl.de-en", "de", 2_399_123),
                _part(NEWS, "training/news-commentary-v9.de-en", "de", 201_288),
            ),
            "val": (_part(DEV, "dev/newstest2013", "de", 3000),),
            "test": (_newstest2014("de"),),
        }
    ),
    "wmt14-en-fr": PublicCorpus(
        splits={
            "train": (
                _part(EUROPARL, "training/europarl-v7.fr-en", "fr"),
                _part(COMMON_CRAWL, "commoncrawl.fr-en", "fr"),
                _part(UN, "un/undoc.2000.fr-en", "fr"),
                _part(NEWS, "training/news-commentary-v9.fr-en", "fr"),
                _part(GIGA, "giga-fren.release2.fixed", "fr", end=".gz"),
            ),
            "val": (_part(DEV, "dev/newstest2013", "fr", 3000),),
            "test": (_newstest2014("fr"),),
        }
    ),
}


class CorpusError(RuntimeError):
    """What went wrong, in one line."""


def fetch(download: Download, path: Path) -> None:
    """Download to `path`, going on with `path`.part, and verify.

    A file that is already there is kept if it verifies. Temporary failures are tried
    again a few times.

    Raises: CorpusError.
    """
    if path.exists():
        if download.sha256 is None or _sha256(path) == download.sha256:
            return
        path.unlink()
    part = path.with_name(path.name + ".part")
    for attempt in range(ATTEMPTS):
        if attempt:
            time.sleep(FIRST_DELAY * 2 ** (attempt - 1))
        try:
            _receive(download.url, part)
            break
        except urllib.error.HTTPError as error:
            error.close()
            reason = f"the server answered {error.code} {error.reason}"
            if error.code not in (408, 416, 429) and error.code < 500:
                raise CorpusError(f"{download.url}: {reason}") from error
            if error.code == 416:  # what we have does not fit the file any more
                part.unlink(missing_ok=True)
        except (urllib.error.URLError, http.client.HTTPException, OSError) as error:
            if isinstance(error, OSError) and error.filename is not None:
                raise CorpusError(str(error)) from error
            reason = str(getattr(error, "reason", "") or error or type(error).__name__)
    else:
        raise CorpusError(f"{download.url}: {reason}, after {ATTEMPTS} attempts")
    if download.sha256 is not None and (found := _sha256(part)) != download.sha256:
        part.unlink()
        raise CorpusError(
            f"{download.url}: expected sha256 {download.sha256}, got {found}"
        )
    part.replace(path)


def _receive(url: str, part: Path) -> None:
    """Append to `part` what is still missing of the file at `url`."""
    have = part.stat().st_size if part.exists() else 0
    headers = {"User-Agent": "minitransformer"}
    if have:
        headers["Range"] = f"bytes={have}-"
    request = urllib.request.Request(url, headers=headers)
    with urllib.request.urlopen(request, timeout=TIMEOUT) as response:
        if response.status != 206:
            have = 0  # the server sends everything, so start again
        length = response.headers.get("Content-Length")
        total = have + int(length) if length is not None else None
        with (
            open(part, "ab" if have else "wb") as file,
            tqdm(
                desc=part.name.removesuffix(".part"),
                total=total,
                initial=have,
                unit="B",
                unit_scale=True,
                disable=not sys.stderr.isatty(),
            ) as progress,
        ):
            while block := response.read(BLOCK):
                file.write(block)
                have += len(block)
                progress.update(len(block))
            file.flush()
            os.fsync(file.fileno())
    if total is not None and have != total:
        raise http.client.IncompleteRead(b"", total - have)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()


def assemble(parts: Sequence[Part], folder: Path, split: str, downloads: Path) -> None:
    """Write the lines of all parts to `folder`/`split`.LANGUAGE.gz, in order.

    Raises: CorpusError if the sides of a part differ in length or a count is wrong.
    """
    languages = list(parts[0].members)
    partial = {side: folder / f".{split}.{side}.gz.partial" for side in languages}
    counts: dict[str, list[int]] = {}
    try:
        for side in languages:
            with gzip.open(partial[side], "wb", compresslevel=6) as out:
                counts[side] = [
                    _copy_member(
                        downloads / p.archive.name,
                        p.members[side],
                        cast(IO[bytes], out),
                    )
                    for p in parts
                ]
        for i, part in enumerate(parts):
            found = [counts[side][i] for side in languages]
            expected = part.lines if part.lines is not None else found[0]
            if any(count != expected for count in found):
                members = " and ".join(part.members.values())
                raise CorpusError(
                    f"{members}: expected {expected:,} lines each, got "
                    + " and ".join(f"{count:,}" for count in found)
                )
        for side in languages:
            partial[side].replace(folder / f"{split}.{side}.gz")
    finally:
        for path in partial.values():
            path.unlink(missing_ok=True)


def _copy_member(archive: Path, member: str, out: IO[bytes]) -> int:
    """Append the lines of an archive's member, and only that, to `out`; count them."""
    try:
        with tarfile.open(archive, "r|*") as tar:
            for entry in tar:
                if entry.name.removeprefix("./") == member and entry.isfile():
                    lines = 0
                    for line in _lines(cast(IO[bytes], tar.extractfile(entry)), member):
                        out.write(line + b"\n")
                        lines += 1
                    return lines
    except (tarfile.TarError, EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise CorpusError(f"{archive}: a damaged archive: {error}") from error
    raise CorpusError(f"{archive}: expected a member {member}, found none")


def _lines(file: IO[bytes], member: str) -> Iterator[bytes]:
    """Yield lines without their ends: of plain text, gzip, or the segments of SGML."""
    if member.endswith(".gz"):
        file = cast(IO[bytes], gzip.GzipFile(fileobj=file))
    if not member.endswith(".sgm"):
        for line in file:
            yield line.removesuffix(b"\n").removesuffix(b"\r")
        return
    text = file.read().decode("utf-8")
    for segment in re.findall(r"<seg[^>]*>(.*?)</seg>", text, re.DOTALL):
        yield " ".join(html.unescape(segment).split()).encode()


def download_corpus(name: str, folder: Path, mirror: str | None = None) -> None:
    """Fetch a corpus of CORPORA into `folder`, from `mirror` if given.

    Raises: CorpusError, OSError.
    """
    corpus = CORPORA[name]
    folder.mkdir(parents=True, exist_ok=True)
    for download in corpus.files:
        fetch(_mirrored(download, mirror), folder / download.name)
    if corpus.splits is None:
        return
    downloads = folder / "downloads"
    downloads.mkdir(exist_ok=True)
    for split, parts in corpus.splits.items():
        if all((folder / f"{split}.{s}.gz").exists() for s in parts[0].members):
            continue
        for part in parts:
            fetch(_mirrored(part.archive, mirror), downloads / part.archive.name)
        assemble(parts, folder, split, downloads)


def _mirrored(download: Download, mirror: str | None) -> Download:
    if mirror is None:
        return download
    url = mirror.rstrip("/") + urlsplit(download.url).path
    return Download(url, download.sha256)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(
        "minitransformer corpora",
        "Download a public corpus, verify it, and write files for train.py --data.",
        ("minitransformer corpora multi30k data/multi30k",),
        "An interrupted download continues where it stopped.",
    )
    parser.add_argument("corpus", choices=CORPORA)
    parser.add_argument("folder", type=Path, help="where its files go")
    parser.add_argument("--mirror", metavar="URL", help="server to use instead")
    args = parser.parse_args(arguments)

    def work() -> None:
        download_corpus(args.corpus, args.folder, args.mirror)

    return exit_code("corpora", work)
