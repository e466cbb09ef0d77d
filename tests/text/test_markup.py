"""Pages of HTML as lines, and translations put back into them."""

import pytest

from minitransformer.text.markup import PRIVATE, HtmlLine, html_lines
from support.html_trees import elements
from support.in_process import rows

# A page, and its lines that have text, with an underscore for each tag or element.
LINES = """
<p>I am <b>very</b> ill.</p><p>Me, too.</p> | I am _very_ ill. / Me, too.
<li>One</li><li>Two &lt; three</li> | One / Two < three
<p>x < 5, y > 3, a&amp;b, AT&T</p> | x < 5, y > 3, a&b, AT&T
<a title='a > b' href=x>the door</a> | _the door_
Use <code>the door</code> or <kbd>Enter</kbd>. | Use _ or _.
My <i translate=no>Good <b>day</b></i> dog | My _ dog
A <b class='x notranslate'>Green House</b> | A _
<div translate=no><p>No.</p></div><p>Yes.</p> | Yes.
<div translate=no><div>No</div>No</div>Yes | Yes
<pre>a  b</pre><textarea>c</textarea>d | d
<script>if (a<b) {}</script>d<style>p {}</style> | d
one<br>two | one_ two
old.<sup><a href=#1>[1]</a></sup> It is | old._ It is
a <!-- > b --> c | a _ c
a <!-- b | a
a <b | a
I <3 you | I <3 you
"""


@pytest.mark.parametrize(
    ("page", "lines"),
    [
        *rows(LINES),
        ("<p>\n\tone\n\ttwo\n</p><pre>a\n  b</pre>", "one two"),
        ("<p>\U000f0000</p>d", "d"),  # as a tag is written
        ("", ""),
    ],
)
def test_lines_have_the_text_of_a_page(page, lines):
    found = html_lines(page)
    shown = (PRIVATE.sub("_", line.text).strip() for line in found)
    assert " / ".join(filter(None, shown)) == lines
    assert "".join(x.source + x.behind for x in found) == page


PAGES = {
    '<i title="&quot; on=&quot;f()">The door is open.</i>': (
        '<i title="&quot; on=&quot;f()">Die Tür ist offen.</i>'
    ),
    "<p>I am <big>very</big> hungry.</p>": "<p>Ich bin <big>sehr</big> hungrig.</p>",
    "<b>I am hungry.</b> I am tired.": "<b>Ich habe Hunger.</b> Ich bin müde.",
    "<p>I love you &lt;3</p>": "<p>Ich liebe dich &lt;3</p>",
    "Read <a href=x><span>https://www.</span><span>a.de/b</span></a>": (
        "Lesen Sie <a href=x><span>https://www.</span><span>a.de/b</span></a>"
    ),
}


def test_the_shipped_model_translates_pages(shipped):
    lines = [html_lines(page) for page in PAGES]
    texts = [line.text for page in lines for line in page]
    written = iter(shipped.translate(texts, shipped.decoding))
    pages = ["".join(x.with_text(next(written)) for x in page) for page in lines]
    assert pages == [*PAGES.values()]


# Elements within a sentence in HTML's standard, with an end and without.
PHRASING = """a abbr b bdi bdo cite code data del dfn em i ins kbd label map mark meter
output q ruby s samp slot small span strong sub sup time u var""".split()
ALONE = ["<br>", "<wbr>", "<img src=x alt='a < b'>", "<input disabled>", "<!-- x -->"]


def test_a_page_of_inline_elements_keeps_its_tree(shipped):
    """As another parser sees it, and the sentences around the elements are whole."""
    sentences = [
        f"I am <{x} title='a > b &amp; c'>very</{x}> hungry." for x in PHRASING
    ]
    sentences += [f"I am very {x} hungry." for x in ALONE]
    page = "".join(f"<p class=x>{sentence}</p>\n" for sentence in sentences)
    lines = html_lines(page)
    written = shipped.translate([line.text for line in lines], shipped.decoding)
    again = "".join(map(HtmlLine.with_text, lines, written))
    assert elements(again) == elements(page)
    assert again.count("Ich bin") >= len(sentences) - 6
