"""The text of a compressor: one canonical form, and errors that say what and where."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinpipe.harness.compression import grammar
from thinpipe.harness.errors import UserError


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("none", "none"),
        ("none()", "none"),
        (" fp16 ", "fp16"),
        ("fixpoint:04", "fixpoint:4"),
        ("fixpoint : 4", "fixpoint:4"),
        ("fixpoint:4(rounding=nearest, scale=channel, clip=asymmetric, eps=0, preset=none)", "fixpoint:4"),
        ("fixpoint:4(scale=token,clip=symmetric)", "fixpoint:4(clip=symmetric, scale=token)"),
        ("fixpoint:2( rounding = stochastic )", "fixpoint:2(rounding=stochastic)"),
        ("fixpoint:8(eps=0.000001)", "fixpoint:8(eps=1e-06)"),
        ("fixpoint:3(preset=acsgd)", "fixpoint:3(preset=acsgd)"),
        ("fixpoint:3(scale=token,preset=acsgd)", "fixpoint:3(preset=acsgd, scale=token)"),
        ("delta( fixpoint:4 )", "delta(fixpoint:4)"),
        ("delta(fixpoint:4, cache=bf16, key=sample, first=none)", "delta(fixpoint:4)"),
        ("delta(cache=fixpoint:8,fixpoint:2)", "delta(fixpoint:2, cache=fixpoint:8)"),
        ("delta(fixpoint:4,cache=none)", "delta(fixpoint:4, cache=fp32)"),
        ("delta(bf16,first=fixpoint:8(scale=channel))", "delta(bf16, first=fixpoint:8)"),
        (
            "delta(fixpoint:2(clip=symmetric),cache=fixpoint:8( scale = token ))",
            "delta(fixpoint:2(clip=symmetric), cache=fixpoint:8(scale=token))",
        ),
    ],
)
def test_canonical(text: str, canonical: str) -> None:
    assert grammar.canonical(text) == canonical
    assert grammar.canonical(canonical) == canonical
    assert grammar.build(text).name == canonical


@pytest.mark.parametrize(
    ("text", "bits", "inner", "used"),
    [
        ("none", 32, "none", {"codecs/none"}),
        ("fp16", 16, "fp16", {"codecs/fp16"}),
        ("bf16", 16, "bf16", {"codecs/bf16"}),
        ("fixpoint:3(scale=token)", 3, "fixpoint:3(scale=token)", {"codecs/fixpoint"}),
        ("delta(fixpoint:4)", 4, "fixpoint:4", {"codecs/fixpoint", "memories/delta"}),
        ("delta(fixpoint:2, cache=fixpoint:8)", 2, "fixpoint:2", {"codecs/fixpoint", "memories/delta"}),
        ("delta(bf16, first=fp16)", 16, "bf16", {"codecs/bf16", "codecs/fp16", "memories/delta"}),
    ],
)
def test_what_is_derived(text: str, bits: float, inner: str, used: set[str]) -> None:
    assert grammar.bits(text) == bits
    assert grammar.inner(text) == inner
    assert grammar.plugins_used(text) == used


@pytest.mark.parametrize(
    ("text", "position", "words"),
    [
        ("", 1, ["expected a name", "the end"]),
        ("fixpint:4", 1, ["unknown compressor 'fixpint'", "Did you mean 'fixpoint'"]),
        ("delta(fixpint:4)", 7, ["unknown codec 'fixpint'", "Did you mean 'fixpoint'"]),
        ("None", 1, ["Did you mean 'none'"]),
        ("fixpoint", 1, ["needs bits", "1 to 8"]),
        ("fixpoint:", 10, ["expected an argument", "the end"]),
        ("fixpoint:0", 1, ["out of range", "1 to 8"]),
        ("fixpoint:9", 1, ["out of range", "1 to 8"]),
        ("fixpoint:-1", 1, ["out of range"]),
        ("fixpoint:4.5", 1, ["whole number"]),
        ("fixpoint:four", 1, ["whole number"]),
        ("none:3", 1, ["takes no argument"]),
        ("delta:4(fixpoint:4)", 1, ["takes no argument"]),
        ("fixpoint:4(scal=token)", 17, ["no option 'scal'", "Did you mean 'scale'"]),
        ("fixpoint:4(scale=tokn)", 18, ["cannot be 'tokn'", "Did you mean 'token'"]),
        ("fixpoint:4(scale=fixpoint:3)", 18, ["plain value"]),
        ("fixpoint:4(eps=big)", 16, ["must be a number"]),
        ("fixpoint:4(eps=-1)", 16, ["out of range"]),
        ("fixpoint:4(eps=nan)", 16, ["out of range"]),
        ("fixpoint:4(scale=token, scale=token)", 25, ["given twice"]),
        ("fixpoint:4(bits=3)", 17, ["no option 'bits'"]),
        ("fixpoint:1(clip=symmetric)", 1, ["clip=symmetric", "bits of at least 2"]),
        ("fixpoint:4(preset=acsgd, eps=1e-3)", 30, ["preset=acsgd", "settles eps"]),
        ("fixpoint:4(preset=acsgd, rounding=stochastic)", 35, ["settles rounding"]),
        ("fixpoint:4(fixpoint:2)", 12, ["is a codec and wraps nothing", "delta"]),
        ("fixpoint:4(token)", 12, ["scale=token"]),
        ("delta", 1, ["is a memory and needs a codec inside", "delta(fixpoint:4)"]),
        ("delta(cache=bf16)", 1, ["needs a codec inside"]),
        ("delta(fixpoint:4, fixpoint:2)", 19, ["one too many"]),
        ("delta(delta(fixpoint:4))", 7, ["is a memory, and a codec is needed here"]),
        ("delta(fixpoint:4, cache=delta(fixpoint:8))", 25, ["is a memory, and a codec is needed here"]),
        ("delta(fixpoint:4, cache=bf61)", 25, ["unknown codec 'bf61'", "fp32"]),
        ("delta(fixpoint:4, cache=fixpoint:9)", 25, ["out of range"]),
        ("delta(fixpoint:4, key=patch)", 23, ["cannot be 'patch'", "sample"]),
        ("delta(fixpoint:4, chache=bf16)", 26, ["no option 'chache'", "Did you mean 'cache'"]),
        ("fixpoint:4)", 11, ["unexpected ')'"]),
        ("fixpoint:4 x", 12, ["unexpected 'x'"]),
        ("fixpoint:4(", 12, ["expected a name", "the end"]),
        ("delta(fixpoint:4", 17, ["expected ','", "the end"]),
        ("delta(fixpoint:4 fixpoint:2)", 18, ["expected ','"]),
        ("delta(,fixpoint:4)", 7, ["expected a name"]),
        ("fixpoint:4(scale=)", 18, ["expected a name"]),
        ("fixpoint:4(a:1=2)", 12, ["plain word"]),
    ],
)
def test_errors_say_what_and_where(text: str, position: int, words: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        grammar.check(text)
    message = str(caught.value)
    assert message.startswith(f"compressor {text!r}, character {position}: ")
    for word in words:
        assert word in message


def test_parse_is_the_syntax_alone() -> None:
    node = grammar.parse("ef( topk:0.1(k=v), rate = 3 )")
    assert (node.name, node.argument) == ("ef", None)
    assert node.items == (grammar.Node("topk", "0.1", (), {"k": grammar.Node("v")}),)
    assert node.options["rate"] == grammar.Node("3")
    with pytest.raises(AttributeError):
        node.name = "other"  # type: ignore[misc]
    with pytest.raises(TypeError):
        node.options["rate"] = node  # type: ignore[index]


_codec = st.builds(
    "fixpoint:{}{}".format,
    st.integers(2, 8),
    st.lists(
        st.sampled_from(["rounding=stochastic", "rounding=nearest", "scale=token", "scale=channel", "clip=symmetric"]),
        unique_by=lambda option: option.split("=")[0],
    ).map(lambda options: f"({','.join(options)})" if options else ""),
) | st.sampled_from(["none", "fp16", "bf16"])
_text = _codec | st.builds("delta({},first={},cache={})".format, _codec, _codec, _codec)


@given(_text, st.data())
def test_canonical_is_one_fixed_point_whatever_the_spaces(text: str, data: st.DataObject) -> None:
    canonical = grammar.canonical(text)
    assert grammar.canonical(canonical) == canonical
    spaced = "".join(data.draw(st.sampled_from(["", " "])) + c if c in "(),=:" else c for c in text)
    assert grammar.canonical(spaced) == canonical
    assert grammar.plugins_used(canonical) == grammar.plugins_used(text)
    assert grammar.inner(canonical) == grammar.inner(grammar.inner(text))


@given(st.text(alphabet="fixpontdel(,)=:48 abc", max_size=30))
def test_any_text_is_accepted_or_a_user_error(text: str) -> None:
    try:
        canonical = grammar.canonical(text)
    except UserError:
        return
    assert grammar.canonical(canonical) == canonical


def test_planning_imports_no_torch() -> None:
    code = (
        "import sys; from thinpipe.harness.compression import grammar as g;"
        "g.check('delta(fixpoint:2, cache=fixpoint:8)'); g.plugins_used('none'); g.bits('fp16');"
        "sys.exit(sum(m in sys.modules for m in ('torch', 'numba', 'numpy')))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
