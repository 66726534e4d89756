"""The page for a browser: what it holds, and what a reader does with it, in headless chromium."""

import html
import json
import re
import shutil
import subprocess

import pytest
import torch
from test_seq2seq_beam import model_of, sources
from threads import one_thread  # noqa: F401

from bahdanau_fast.seq2seq import Beam, Translation, attention_page, beam_search, translate
from bahdanau_fast.seq2seq.data.pairs import PAD, Vocab

HOSTILE = ["</script><script>document.title='gone'</script>", "<!--", "&lt;", "{DATA}", " ", "أين"]


def own(source, tokens):
    torch.manual_seed(3)
    return Translation(source, tokens, torch.randn(len(tokens), len(source)).mul(3).softmax(1))


def held(translations):
    """The sentences that a page of these holds."""
    page = attention_page(translations)
    return json.loads(re.search(r'<script type="application/json".*?>(.*?)</script>', page)[1])


def traced(steps, rank):
    """Tokens and weights of a hypothesis of the last of these steps."""
    rows = []
    for step in reversed(steps):
        token, parent, _, looked = step[rank]
        rows += [(token, looked)] if token is not None else []
        rank = parent
    return [token for token, _ in rows[::-1]], [looked for _, looked in rows[::-1]]


@pytest.fixture(scope="module")
def found():
    """A recorded search whose best hypothesis ended before the others."""
    vocab = Vocab(["abcd"])
    args = (model_of(hidden=12), ["ddd"], vocab, vocab, 6, 7)
    (plain,), (translation,) = (translate(*args, beam=Beam(3, record=r)) for r in (False, True))
    assert (plain.tokens, plain.score, plain.steps) == (translation.tokens, translation.score, None)
    return translation


def test_the_steps_are_what_shorter_searches_end_with():
    model, (source, lens) = model_of(), sources(4)
    beam = Beam(3, length_penalty=0.7, record=True)
    steps = beam_search(model, source, lens, 6, beam).steps
    for n, step in enumerate(steps, 1):
        shorter = beam_search(model, source, lens, n, beam)
        torch.testing.assert_close(step.scores, shorter.scores)
        assert torch.equal(step.tokens, shorter.tokens[:, :, -1])
        going = step.tokens != PAD
        torch.testing.assert_close(step.weights[going], shorter.weights[:, :, -1][going])


def test_the_page_holds_the_translation_and_its_search(found):
    (data,) = held([found])
    assert (data["source"], data["target"]) == (["d", "d", "d", "<eos>"], found.tokens)
    looked = torch.cat((found.weights, found.end_weights.unsqueeze(1)), 1)
    torch.testing.assert_close(torch.tensor(data["weights"]), looked, atol=5.1e-5, rtol=0)
    tokens, rows = traced(data["steps"], 0)
    assert tokens == [*data["target"], "<eos>"]
    assert rows[:-1] == data["weights"]
    assert len(tokens) < len(data["steps"])


def test_tokens_are_harmless_and_nothing_is_fetched():
    (data,) = held([own(HOSTILE, HOSTILE[::-1])])
    assert data["source"] == data["target"][::-1] == HOSTILE
    page, empty = attention_page([own(HOSTILE, HOSTILE[::-1])]), attention_page([own(["a"], ["b"])])
    assert page.count("<script") == empty.count("<script") == page.count("</script") == 2
    assert not re.search(r"https?:|src=|href=|@import|url\(", empty)
    assert len(empty) < 15_000


@pytest.mark.parametrize(
    ("translations", "said"),
    [
        ([], "translations must hold at least one"),
        ([Translation(["a"], ["b"], None)], "must have attention weights and at least one token"),
        ([Translation(["a"], ["b"], torch.ones(1, 2))], r"\(1, 1\), got \(1, 2\)"),
        ([Translation(["a"], ["b"], torch.ones(1, 1) / 0)], r"weights must be finite, got \[inf\]"),
    ],
)
def test_what_cannot_be_shown(translations, said):
    with pytest.raises(ValueError, match=said):
        attention_page(translations)


# What a reader does, one thing after another; after each, what the page shows is noted.
ACTIONS = """<script>
const all = (name, of = document) => [...of.querySelectorAll(name)], notes = [];
const note = (s, act) => {
  const at = all("section")[s];
  act(at);
  notes.push({hash: location.hash, said: at.querySelector(".said").textContent,
    picked: all(".words [aria-pressed=true]", at).map(word => word.firstChild.data),
    numbers: all(".words small", at).map(small => small.textContent),
    shades: all(".words button", at).map(word => +word.style.getPropertyValue("--w")),
    on: all("td.on", at).map(td => td.textContent), place: at.querySelector("output")?.value,
    list: all("ol button", at).map(b => b.textContent)});
};
const right = () => document.activeElement.dispatchEvent(
  new KeyboardEvent("keydown", {key: "ArrowRight", bubbles: true}));
note(0, () => {});
note(0, at => all("[data-k='1']", at)[0].dispatchEvent(new Event("pointerover", {bubbles: true})));
note(0, at => { all("[data-t='0']", at)[0].focus(); right(); });
note(0, at => all("[data-by='-1']", at)[0].click());
note(0, at => all("[data-h='1']", at)[0].click());
note(1, at => { all("[data-k='1']", at)[0].focus(); right(); });
document.body.replaceChildren(JSON.stringify(notes));
</script>"""


def test_what_a_reader_does_shows_what_the_data_says(found, tmp_path):
    names = ("chromium", "chromium-browser", "google-chrome")
    browser = next(filter(None, map(shutil.which, names)), None)
    if browser is None:
        pytest.skip(f"no browser on the PATH, none of {', '.join(names)}")
    page = tmp_path / "page.html"
    sentences = [found, own(["أين", "القطار", "؟"], HOSTILE)]
    page.write_text(attention_page(sentences) + ACTIONS, encoding="utf-8")
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    command += ["--virtual-time-budget=1000", f"--user-data-dir={tmp_path / 'profile'}"]
    done = subprocess.run(
        [*command, f"{page.as_uri()}#s=0&t=2"], capture_output=True, timeout=120, check=True
    )
    body = re.search(r"<body>(.*)</body>", done.stdout.decode(), re.DOTALL)[1]
    linked, hovered, moved, earlier, second, arabic = json.loads(html.unescape(body))

    (data,) = held([found])
    source, steps, last = data["source"], data["steps"], len(data["steps"]) - 1
    tokens, rows = traced(steps, 0)

    def seen(row):
        return [f"{weight:.2f}" for weight in row]

    assert linked["picked"] == [tokens[2]]
    assert linked["numbers"] == seen(rows[2]) + [""] * len(tokens)
    assert linked["shades"] == rows[2] + [0] * len(tokens)
    assert linked["on"] == seen(rows[2])
    best = max(range(4), key=rows[2].__getitem__)
    assert linked["said"].startswith(f"{tokens[2]} looked at {source[best]} {rows[2][best]:.2f} · ")
    column = [row[1] for row in rows]
    assert hovered["numbers"] == [""] * len(source) + seen(column)
    assert (hovered["picked"], hovered["on"]) == ([source[1]], seen(column))
    assert hovered["said"].startswith(f"{source[1]} was looked at by ")
    assert (moved["numbers"], moved["hash"]) == (
        seen(rows[1]) + [""] * len(tokens),
        f"#s=0&b={last}&h=0&t=1",
    )
    assert arabic["hash"] == "#s=1&k=0"  # right is backwards there
    assert (linked["place"], earlier["place"]) == (f"step {last + 1} of 7", f"step {last} of 7")
    for h, shown in enumerate((earlier, second)):
        tokens, rows = traced(steps[:last], h)
        assert shown["picked"] == tokens[-1:]
        assert shown["numbers"] == seen(rows[-1]) + [""] * len(tokens)
        assert shown["list"][h] == "".join(tokens) + f"{steps[last - 1][h][2]:.2f}"
