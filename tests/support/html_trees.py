"""What libxml2 sees of a page, whose parser is not the one that is tested."""

import pytest


def elements(page):
    """The elements and comments of a page in their order, with their attributes."""
    html = pytest.importorskip("lxml.html")
    tree = html.document_fromstring(f"<div>{page}</div>")
    return [(str(x.tag), dict(x.attrib)) for x in tree.iter()]


def text_of(page):
    """The text of a page, without tags and entities."""
    html = pytest.importorskip("lxml.html")
    return html.document_fromstring(f"<div>{page}</div>").text_content()
