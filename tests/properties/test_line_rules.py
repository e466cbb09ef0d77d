"""Lines, sentences, terms and prefixes, against rules in a line or two."""

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from minitransformer.model.transformer import Transformer
from minitransformer.settings.decoding_config import TranslationConfig
from minitransformer.text.clean import clean
from minitransformer.text.glossary import Glossary
from minitransformer.text.markup import html_lines
from minitransformer.text.masking import SYMBOLS, Mask, named
from minitransformer.text.tokenizer import Tokenizer
from minitransformer.translation.translator import Translator
from support.html_trees import elements, text_of
from support.models import tiny_config

# Of all scripts, with marks, signs, controls and what ends a line elsewhere.
ANY_TEXT = st.text(max_size=30) | st.text(
    "aB\u0301\u0600\u4e00😀.,!?47@<>&%\t\r\x85\u2028 "
)
SHORT = TranslationConfig(beam=1, max_len_a=0.0, max_len_b=3)


@given(st.lists(ANY_TEXT, max_size=4))
def test_as_many_lines_come_out_as_go_in(translator, lines):
    lines = [line.replace("\n", " ") for line in lines]
    found = translator.translate(lines, SHORT)
    assert len(found) == len(lines)
    for line, text in zip(lines, found, strict=True):
        assert len(text.splitlines()) <= 1
        assert clean(line).strip() or not text.strip()


WORDS = st.lists(st.sampled_from(["new", "york", "the"]), min_size=1, max_size=8)
SPANS = st.sets(st.tuples(st.integers(0, 7), st.integers(1, 3)), max_size=6)


@given(WORDS, SPANS)
def test_the_longest_term_at_a_place_counts(words, spans):
    terms = {" ".join(words[a : a + n]) for a, n in spans if a < len(words)}
    glossary = {term: str(n) for n, term in enumerate(sorted(terms))}
    mask = Mask(find_terms=Glossary(glossary).find)
    found = [(x.start, x.output) for x in mask.slots(" ".join(words))]
    expected, place = [], 0
    while place < len(words):
        ends = range(len(words), place, -1)
        matches = (end for end in ends if " ".join(words[place:end]) in terms)
        end = next(matches, None)
        if end is not None:
            start = len(" ".join([*words[:place], ""]))
            expected.append((start, glossary[" ".join(words[place:end])]))
        place = end or place + 1
    assert found == expected


PARTS = st.sampled_from([*SYMBOLS[:2], "me@here.org", "a.txt", "cat", "x"])


@given(st.lists(PARTS, max_size=7).map(" ".join))
def test_a_name_is_no_part_of_its_line(line):
    own = [x for x in named(line, Mask().slots(line), SYMBOLS) if x.name in SYMBOLS]
    assert len({x.name for x in own}) == len(own)
    assert not [x for x in own if x.name in line]


@pytest.fixture(scope="module", params=["symbols", "no symbols", "shipped"])
def any_translator(request):
    """An untrained model whose vocabulary has symbols or has none, or a trained one."""
    if request.param == "shipped":
        return request.getfixturevalue("loaded_model")
    symbols = SYMBOLS if request.param == "symbols" else ()
    lines = ["the cat sat on the mat", 'a dog, 12 men. Yes! (no) "so"', "bfg jk pvwz"]
    tokenizer = Tokenizer.train(lines * 9, 60, user_defined_symbols=list(symbols))
    model = Transformer(tiny_config(vocab_size=tokenizer.vocab_size))
    return Translator(model, tokenizer)


# What opens closes, since all that stands between the two is one slot.
SLOTS = st.sampled_from(
    ["{name}", "{{a.b}}", "{a b}", "${x}", "$(a b)", "f(x)", "<b x=1>", "<x@y.z>"]
) | st.text("ab9.,:@/>[])#$%&_*=+\\~^|'-é你→😀⟦1⟧\ue000", min_size=1, max_size=9)


@given(
    st.lists(
        st.tuples(SLOTS, st.sampled_from(["", "cat", "the dog", "12"])), max_size=5
    )
)
def test_slots_come_out_as_they_went_in(any_translator, parts):
    """Whatever their characters: each as often, and in the same order."""
    mask = Mask(any_translator.tokenizer)
    slots = [
        slot
        for slot, _ in parts
        if [x.output for x in mask.slots(f"the {slot} cat") if x.kind != "number"]
        == [slot]
    ]
    assume(len(slots) == len(parts))
    line = " ".join(["the cat", *(f"{slot} {words}" for slot, words in parts)])
    [text] = any_translator.translate([line], SHORT)
    assert "\ufffd" not in text
    rest = text
    for slot in slots:
        _, slot_or_none, rest = rest.partition(slot)
        assert slot_or_none, (line, text)


SENTENCES = st.lists(
    st.sampled_from(["The cat sat.", "It looked!", "THE CAT SAT!", "LOOK!"]),
    min_size=1,
    max_size=5,
)


@given(
    SENTENCES,
    st.integers(1, 4),
    st.sampled_from(["auto", "always", "never"]),
    st.sampled_from(["", "", "the"]),
)
def test_what_is_divided(translator, sentences, median, split, prefix):
    """More sentences than usual, and capitals among other text, without a prefix."""
    net = Translator(translator.model, translator.tokenizer, median_sentences=median)
    config = TranslationConfig(split=split)
    [parts] = net.divide([" ".join(sentences)], config, [prefix])
    mixed = len({x.isupper() for x in sentences}) == 2
    at_once = {"auto": median, "always": 1, "never": 9}[split]
    whole = len(sentences) <= at_once and not (mixed and split != "never")
    expected = [" ".join(sentences)] if whole or prefix else sentences
    assert [x.text for x in parts] == expected


@given(
    st.lists(st.sampled_from("cat sat looked mat".split()), min_size=12, max_size=30)
)
def test_a_prefix_stands_at_the_start_of_a_line_and_of_no_other_part(translator, words):
    line, prefix = "the " + " the ".join(words), "the mat"
    config = TranslationConfig(beam=1, max_len_a=0.0, max_len_b=2, max_input=25)
    [parts] = translator.divide([line], config, [prefix])
    assert len(parts) > 1
    first, *others = (x.text for x in parts)
    begun = translator.translate([first], config, prefixes=[prefix])
    expected = [*begun, *translator.translate(others, config)]
    [found] = translator.translate([line], config, prefixes=[prefix])
    assert found.split() == " ".join(expected).split()
    assert found.startswith(prefix)


HTML = """<p> </p> <b> </b> <br> <li> <i>a</i> <a~href='x?a=1&amp;b'> </a> <!--c~>-->
<pre>a~~b</pre> <code>&lt;x&gt;</code> <p~title="&quot;~on='1'"> &amp; &auml;
&lt;i&gt; &#228;
AT&T x~<~5 a~b ~ &nbsp; <script>1<2</script> &amp;lt; &copy &unknown; <b~translate=no>
<x~id="1"/> <sup>1</sup> <td> </td> <svg> </> <! < > ".""".split()
FRAGMENTS = st.sampled_from([x.replace("~", " ") for x in HTML])


@given(st.lists(FRAGMENTS).map("".join))
def test_html_whose_lines_stay_is_the_same_tree(page):
    lines = html_lines(page)
    assert "".join(x.source + x.behind for x in lines) == page
    again = "".join(x.with_text(x.text) for x in lines)
    assert elements(again) == elements(page)
    assert text_of(again).split() == text_of(page).split()


MARKUP_OF_MODELS = st.sampled_from(["<b>", "&lt;", "&", "<script>", '"', "x", " "])
CHANGES = st.sampled_from(["{0}", "{1}{0}{1}", "{2}", "{3}", "{4}", ""])


@given(
    st.lists(FRAGMENTS).map("".join), st.lists(MARKUP_OF_MODELS).map("".join), CHANGES
)
@example("<p><b title='&quot;'>a &amp; b</b>.</p>", "&lt;", "{2}")  # a tag is lost
@example("<i>a</i> <b>b</b>", "", "{3}")  # tags change places
def test_no_translation_changes_a_tag_or_lets_markup_in(page, written, change):
    """Whether the model adds text to that of the line, loses some or turns it round."""

    def translated(text):
        return change.format(text, written, text[1:], text[::-1], text[::2])

    again = "".join(x.with_text(translated(x.text)) for x in html_lines(page))
    assert elements(again) == elements(page)
