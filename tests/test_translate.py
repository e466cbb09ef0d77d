"""translate.py as a user runs it: lines in, lines out, and what it refuses."""

import contextlib
import json
import os
import re
import struct
import subprocess
from pathlib import Path

import numpy as np
import pytest
from sacrebleu.metrics import BLEU, CHRF

import translate
from minitransformer.runs import checkpoint
from support.in_process import rows, run_translate
from support.models import CAT_LINES, save_small_model, save_small_run
from support.scripts import ROOT, SHORT, TRANSLATE

SISTER = "Meine Schwester arbeitet in einem Krankenhaus."

# Pages whose first example people see first.
EXAMPLES = ROOT / "README.md", ROOT / "docs" / "pictures.py"


def test_arguments_standard_input_and_files_agree(model_path, place, monkeypatch):
    lines = ["the cat sat", "on the mat", "number 7"]
    Path("in").write_text("\n".join(lines))

    def printed(*flags):
        with open("in") as stdin:
            monkeypatch.setattr("sys.stdin", stdin)
            return run_translate("--model", model_path, *SHORT, *flags)

    code, out, error = expected = printed(*lines)
    assert (code, out.count("\n"), error) == (0, 3, "")
    assert printed() == printed("-i", "-", "-o", "-") == expected
    assert printed("-i", "in", "-o", "out", "--buffer", 2) == (0, "", "")
    assert Path("out").read_text() == out


def run_on_a_terminal(*flags, output_too=False):
    """Return what a terminal shows of the process's standard error, line by line."""
    pty = pytest.importorskip("pty")
    import fcntl
    import termios

    own, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("4H", 24, 80, 0, 0))
    output = terminal if output_too else subprocess.DEVNULL
    command = [*TRANSLATE, *flags]
    with subprocess.Popen(command, stdout=output, stderr=terminal) as process:
        os.close(terminal)
        shown = b""
        with contextlib.suppress(OSError):  # which Linux raises when all has been read
            while part := os.read(own, 1 << 16):
                shown += part
        os.close(own)
    return process.returncode, shown.decode().replace("\r\n", "\n").split("\n")


def test_a_terminal_shows_how_many_lines_are_done(model_path, tmp_path):
    source, output = tmp_path / "in", tmp_path / "out"
    source.write_text("the cat\n\n" * 3)
    flags = ("--model", model_path, "--buffer", "2", "-i", str(source))
    for more in ((*SHORT, "-o", str(output)), ("--score", str(output))):
        code, (bar, *rest) = run_on_a_terminal(*flags, *more)
        assert (code, len(rest)) == (0, 2 if "--score" in more else 1)
        assert re.match(r"\r *0%.* 0/6 ", bar)
        assert re.search(r"\r100%.* 6/6 .* lines/s\]$", bar)
    # The translations are on the same terminal: a bar would be between them.
    code, shown = run_on_a_terminal(*flags, *SHORT, output_too=True)
    assert (code, len(shown)) == (0, 7)
    assert "lines/s" not in "".join(shown)
    # An error has a line of its own, with the bar that was left above it.
    source.write_text("the cat\n\n" + "the cat sat on the mat " * 9)
    limit = ("--max-input", "9", "--split", "never")
    code, shown = run_on_a_terminal(*flags, *SHORT, *limit)
    assert (code, len(shown), "2/3" in shown[0]) == (1, 3, True)
    assert shown[1].startswith("translate.py: error: line 3: expected at most 9 ")


def test_blank_lines_do_not_change_the_perplexity(model_path, place):
    """The model has nothing to predict there: EOS of nothing is no token."""

    def scored(targets, *lines):
        Path("targets").write_text(targets)
        return run_translate("--model", model_path, "--score", "targets", *lines)

    code, out, perplexity = scored("the dog\n", "the cat")
    assert code == 0
    blank = "0.0000\t0\n"
    expected = 0, f"{blank}{out}{blank}{blank}", perplexity
    assert scored("\nthe dog\n\n\n", "", "the cat", "", "") == expected
    assert scored("\n", " ") == (0, blank, "perplexity 1.0000  0 tokens\n")


def diverge(change):
    """Save a small model whose parameters are changed, and a target to score."""
    path = Path(save_small_model(Path("diverged")))
    model = checkpoint.load(path)
    model.parameters.data[...] = change(model.parameters.data)
    checkpoint.save(path, model, replace=True)
    Path("target").write_text("the dog sat on the cat\n")


def test_the_perplexity_of_a_diverged_model_is_short(place):
    diverge(lambda parameters: parameters * 1000)
    scored = run_translate("--model", "diverged", "--score", "target", "the cat")
    log_prob, tokens = scored[1].split()
    assert float(log_prob) < -3000
    assert scored[::2] == (0, f"perplexity 1.0e+304  {tokens} tokens\n")


@pytest.mark.parametrize("largest", [3.4e38, 1e30])
def test_a_diverged_model_gets_one_line(place, largest):
    diverge(lambda parameters: np.where(parameters > 0, largest, -largest))
    for flags in ((), ("--beam", "1"), ("--score", "target")):
        code, out, err = run_translate("--model", "diverged", "the cat sat", *flags)
        assert (code, out) == (1, "")
        expected = "expected a model whose outputs are finite: this one's training"
        assert err.startswith(f"translate.py: error: {expected}")
        assert err.count("\n") == 1


def test_quality_is_sacrebleus(model_path, place):
    lines = CAT_LINES[:4]
    Path("reference").write_text("\n".join(lines))
    quiet = ("--model", model_path, *SHORT, "--reference", "reference")
    flags = (*quiet, "--output", "-")
    code, out, err = run_translate(*flags, *lines)
    assert run_translate(*quiet, *lines) == (0, err, "")
    assert code == 0
    for name, metric in (("BLEU", BLEU()), ("chrF", CHRF())):
        score = metric.corpus_score(out.splitlines(), [lines])
        assert f"{name} {score.score:.2f} (" in err
        assert str(metric.get_signature()) in err
    pytest.importorskip("sacremoses")
    split = run_translate(*flags, "--compound-split", "en", *lines)
    assert split[:2] == (0, out)
    assert split[2].endswith("  tokenised, compounds split\n")


def test_the_attention_of_a_sentence_is_that_of_one_line(model_path, tmp_path):
    page = tmp_path / "x.html"
    flags = ("--model", model_path, *SHORT, "--attention", str(page))
    assert run_translate(*flags, "the\ncat") == (0, "", "")
    [source] = re.findall(r'"source": (\[.*?\]),', page.read_text())
    assert "".join(json.loads(source)) == "\u2581the\u2581catend"


def test_a_pipe_is_answered_line_by_line(model_path):
    process = subprocess.Popen(
        [*TRANSLATE, "--model", model_path, *SHORT],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    first = run_translate("--model", model_path, *SHORT, "the cat")[1].encode()
    for _ in range(2):
        process.stdin.write(b"the cat\n")
        process.stdin.flush()
        assert process.stdout.readline() == first
    process.stdin.close()
    assert process.wait(timeout=30) == 0
    process.stdout.close()


# The exit code, the flags, and what the last line of the error says.
WRONG = """\
1 | --model none x | none: expected a run, a checkpoint or a shipped model
1 | --model en_de x | found nothing; did you mean en-de?
1 | --model de-em x | found nothing; did you mean de-en?
1 | --model en-de --model de-en Yes. | its direction differs from that of
2 | --serve --tag <x> | --tag expects models of one direction
2 | --model en-de --model de-en --serve --glossary x | --glossary expects models of
2 | --to de x | argument --to; did you mean --model?
2 | --model MODEL --nbest 5 x | nbest: expected at most the beam (4), got 5
2 | --model MODEL --threads 0 x | --threads: expected a whole number of at
2 | --model MODEL --compound-split de x | nothing without --reference
2 | --model MODEL --reference one --compound-split xx x | --compound-split: expected
2 | --model MODEL --reference one --compound-split= x | --compound-split: expected
2 | --attention x.html | --attention expects one sentence, got 0
2 | --reference one --json x | --json and --alignment expect --output
1 | --model MODEL --reference one --compare two x | many lines to compare
2 | --model MODEL --compare one x | --compare does nothing without --ref
2 | --model MODEL --attention x.txt x | --attention: expected .html, got
1 | --model none --input two --prefix one | in one as in two, got 1 and 2
2 | x --serve | --serve gets its text from the page
2 | --serve --nbest 2 | --nbest does nothing with --serve
2 | --api-key x | --api-key does nothing without --serve
2 | --serve --api-key= | --api-key: expected a key, got an empty one
2 | --serve --api-key x --no-api-key | --api-key does nothing with --no-a
2 | --serve 70000 | --serve: expected a port of at most 65535, got 70000
1 | --model MODEL --serve 8 --host no.host. | cannot serve at no.host., por
2 | --model MODEL --output . x | .: expected a file, or a new or an empty
2 | --reference one --nbest 2 x | --reference compares one translation a
2 | --model MODEL --input bad x | expected sentences or --input, got both
2 | --sample --temperature 0 x | expected at least 0.01, got 0.0
1 | --model MODEL --input bad | bad, line 2: expected UTF-8
1 | --model none --input bad --output out | bad, line 2: expected UTF-8
1 | --model MODEL --reference two x | as many references as translations
1 | --model MODEL --score two x | each source line, got more than 1
1 | --model MODEL --output no/where x | no/where: No such file
1 | --model bad x | bad: not a usable checkpoint
2 | --model MODEL --device cuda:x x | expected cpu, cuda or cuda:N
2 | --model MODEL --precision fp16 x | fp32 or bf16 with
1 | --model learned --split never --input long | at most 5 word pieces
"""


@pytest.mark.parametrize(("code", "flags", "message"), rows(WRONG))
def test_bad_input_gets_one_line(model_path, place, flags, code, message):
    """Wrong usage is found before anything is translated."""
    Path("bad").write_bytes(b"fine\n\xff\n")
    Path("one").write_bytes(b"a\n")
    Path("two").write_bytes(b"a\nb\n")
    Path("long").write_bytes(b"cat\nthe cat number 7 sat on the mat and looked\n")
    if "learned" in flags:
        save_small_model(Path("learned"), positions="learned", max_positions=6)
    found, out, error = run_translate(*flags.replace("MODEL", model_path).split())
    assert (found, message in error) == (int(code), True), error
    assert found == 1 or not out
    last = error.rstrip("\n").split("\n")[-1]
    assert last.startswith("translate.py: error: ")


def test_the_first_example_of_each_place_is_translated_right():
    places = ["\n".join(translate.EXAMPLES), *map(Path.read_text, EXAMPLES)]
    first = [re.search(r'(?:translate.py|TEXT =) "(.*?)"', text)[1] for text in places]
    lines = " ".join(first).replace("\\n", " ")
    code, out, _ = run_translate("--model", "en-de", lines)
    homework = "Könntest du mir bei meinen Hausaufgaben helfen?"
    station = "Wo ist der Bahnhof?"
    assert (code, out.strip()) == (
        0,
        " ".join([homework, station, station, "Ich habe Hunger.", homework]),
    )


def test_lines_of_a_paragraph_are_translated_as_one(tmp_path):
    (tmp_path / "mail").write_text(
        "> My sister works in a hospital. Where\n> is the station?\n"
    )
    flags = ("--model", "en-de", "--input", str(tmp_path / "mail"))
    code, out, _ = run_translate(*flags, "--paragraphs")
    assert (code, out) == (0, f"> {SISTER} Wo ist der Bahnhof?\n")


@pytest.mark.parametrize(
    ("model", "line", "is_asked"),
    [
        ("en-de", SISTER, True),
        ("de-en", "My sister works in a hospital.", True),
        ("en-de", "My sister works in a hospital.", False),
        ("en-de", "Tom Jackson, Boston", False),
    ],
)
def test_text_in_the_target_language_is_asked_about(model, line, is_asked):
    code, _, error = run_translate("--model", model, line)
    asks = "1 of 1 translations are mostly the same words: is the text in the target"
    assert (code, asks in error) == (0, is_asked)


@pytest.mark.parametrize(
    ("mode", "useless"),
    [
        ("--serve", "--input f,--json,--prefix f,--top-p 0.5,--alignment"),
        ("--serve", "--attention x.html"),
        ("--paragraphs", "--prefix f,--reference f,--score f"),
        ("--attention x.html", "--output f,--score f,--nbest 2,--split never"),
        ("--attention x.html", "--alignment"),
        ("--score f", "--reference f,--json,--beam 2,--sample"),
    ],
)
def test_flags_that_a_mode_leaves_without_effect_are_refused(mode, useless):
    for flag in useless.split(","):
        code, out, error = run_translate(*mode.split(), *flag.split())
        expected = f"{flag.split()[0]} does nothing with {mode.split()[0]}\n"
        assert (code, out, error) == (2, "", f"translate.py: error: {expected}")


def test_defaults_of_beam_search_are_those_of_the_run(tmp_path, model_path):
    """Of several runs, those of the first; flags win; checkpoints keep their run's."""
    parsing = {"beam": 7, "alpha": 0.3, "max_len_b": 3, "nbest": 2}
    run = save_small_run(tmp_path / "runs" / "a", **parsing)
    other = save_small_run(tmp_path / "runs" / "b", beam=5, max_len_b=4)
    alone = tmp_path / "best.safetensors"
    alone.write_bytes(Path(run, "best.safetensors").read_bytes())
    for flags, expected in [
        ([run], (7, 0.3, 3, 1)),
        ([f"{run}/best.safetensors"], (7, 0.3, 3, 1)),
        ([run, "--beam", "1", "--alpha", "0"], (1, 0, 3, 1)),
        ([run, other], (7, 0.3, 3, 1)),
        ([other, run, "--nbest", "2"], (5, 0.6, 4, 2)),
        ([run, "--attention", "x.html", "--beam", "2"], (2, 0.3, 3, 1)),
        ([str(alone)], (7, 0.3, 3, 1)),
        ([model_path], (4, 0.6, 50, 1)),  # no run has made it
    ]:
        args = translate.parse_arguments(["the cat", "--model", *flags])
        found = translate.load_model(args).decoding
        assert (found.beam, found.alpha, found.max_len_b, found.nbest) == expected
    args = translate.parse_arguments(["the cat", "--model", run, "--threads", "3"])
    assert translate.load_model(args).num_threads == 3


def test_the_name_of_a_file_is_translated_with_a_hint(model_path, tmp_path):
    (tmp_path / "new.en").write_text("the cat\n")
    flags = ("--model", model_path, *SHORT, str(tmp_path / "new.en"))
    code, out, err = run_translate(*flags)
    assert (code, out.count("\n"), err.count("\n")) == (0, 1, 1)
    assert "new.en is a path, too: --input translates the lines of a file" in err


def test_what_follows_two_dashes_is_a_sentence(model_path):
    flags = ("--model", model_path, *SHORT)
    code, out, _ = run_translate(*flags, "cat", "--", "- the cat", "--nbest")
    assert code == 0
    both = run_translate(*flags, "cat", " - the cat", " --nbest")[1]
    assert (out, out.count("\n")) == (both.replace("\n ", "\n"), 3)


@pytest.mark.parametrize(
    ("flags", "streams", "code", "error"),
    [
        ("", "<&-", 0, ""),
        ("", "0> x", 1, "translate.py: error: standard input: Bad file descriptor"),
        ("x", ">&-", 0, ""),
        ("x", "2>&-", 0, ""),
        ("x", "> /dev/full", 1, "translate.py: error: No space left on device"),
        ("--input many --buffer 10", "| head -n 1", 141, ""),
    ],
)
def test_closed_and_full_streams(model_path, place, flags, streams, code, error):
    Path("many").write_text("the cat\n" * 3000)
    command = " ".join([*TRANSLATE, "--model", model_path, *SHORT, flags, streams])
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True
    )
    assert done.returncode == code, done.stderr
    assert error in done.stderr
    assert done.stderr.count("\n") == bool(error)
    assert done.stdout.count("\n") == (streams in ("2>&-", "| head -n 1"))


def test_optimised_python_translates(model_path):
    flags = "--model", model_path, *SHORT, "the cat"
    python, script = TRANSLATE
    command = [python, "-OO", script, *flags]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == run_translate(*flags)
