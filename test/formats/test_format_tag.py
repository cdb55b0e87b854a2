"""Format tags: every name of the oneAPI specification and of oneDNN, and what is no name."""

import re

import pytest
from helpers import onednn_oracle as oracle
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_blocked import _C
from torch_blocked.descriptor import canonical_tag, physical_shape

pytestmark = pytest.mark.any_isa
SETTINGS = settings(derandomize=True, database=None, deadline=None, max_examples=150)

# All plain tags of the oneAPI specification with their aliases. With undef and any: 70 names.
SPEC_TAGS = {
    "a": ["x"],
    "ab": ["nc", "tn", "oi"],
    "ba": ["cn", "nt", "io"],
    "abc": ["ncw", "oiw", "tnc"],
    "acb": ["nwc", "owi"],
    "bac": ["ntc"],
    "bca": ["iwo"],
    "cba": ["wio"],
    "abcd": ["nchw", "oihw", "goiw", "ldnc", "ldio", "ldgo"],
    "abdc": ["ldoi"],
    "acdb": ["nhwc", "ohwi"],
    "bacd": ["iohw"],
    "bcda": ["chwn", "ihwo"],
    "cdba": ["hwio"],
    "dcab": ["wigo"],
    "abcde": ["ncdhw", "oidhw", "goihw", "ldigo"],
    "abdec": ["ldgoi"],
    "acbde": ["giohw"],
    "acdeb": ["ndhwc", "odhwi"],
    "bcdea": ["idhwo"],
    "cdeba": ["dhwio"],
    "decab": ["hwigo"],
    "abcdef": ["goidhw"],
    "acbdef": ["giodhw"],  # the specification's prose says abcdef, its enumerator acbdef
    "defcab": ["dhwigo"],
}

DOMAINS = (
    "x nc ncw nchw ncdhw oi oiw oihw oidhw goiw goihw goidhw tn tnc ldnc ldigo ldio ldgo".split()
)


def test_the_specification_has_70_tags():
    names = ["undef", "any", *SPEC_TAGS, *(n for names in SPEC_TAGS.values() for n in names)]
    assert len(names) == len(set(names)) == 70


@pytest.mark.parametrize("agnostic", SPEC_TAGS)
def test_tags_of_the_specification(agnostic):
    assert {canonical_tag(name) for name in [agnostic, *SPEC_TAGS[agnostic]]} == {agnostic}


@pytest.mark.parametrize("name", ["undef", "any"])
def test_tags_without_letters(name):
    assert canonical_tag(name) == name


def test_every_onednn_tag_is_parsed_as_onednn_does():
    aliases = oracle.aliases()
    assert len(oracle.tags()) >= 1400 and len(aliases) >= 700
    wrong = {
        name: canonical_tag(name)
        for name in oracle.tags()
        if canonical_tag(name) != aliases.get(name, name)
    }
    assert wrong == {}


@pytest.mark.parametrize("block", [4, 8, 16, 32])
@pytest.mark.parametrize("spatial, agnostic", [("w", "c"), ("hw", "cd"), ("dhw", "cde")])
def test_blocked_activations(spatial, agnostic, block):
    name, canonical = f"nC{spatial}{block}c", f"aB{agnostic}{block}b"
    assert canonical_tag(name) == canonical
    ndims = len(spatial) + 2
    assert _C.Format.blocked(block).name(ndims) == name
    for tag in (name, canonical):
        assert _C.Format.of(tag, ndims).block == block


@pytest.mark.parametrize(
    "name, canonical",
    [
        ("OIhw8i8o", "ABcd8b8a"),
        ("OIhw4i16o4i", "ABcd4b16a4b"),  # one dim blocked twice
        ("Goidhw16g", "Abcdef16a"),
        ("gOIdhw4o8i8o4i", "aBCdef4b8c8b4c"),
        ("Ohwi8o", "Acdb8a"),
        ("ldgOI32o4i", "abdEC32e4c"),  # d directions, g gates
        ("hwioG16g", "decbA16a"),
        ("OhwI24o", "Acdb24a"),  # four oneDNN names have an upper-case letter too many,
        ("gIOhw2i8o16i2o", "aBCde2c8b16c2b"),  # and two have I and O the wrong way round
    ],
)
def test_blocked_weights(name, canonical):
    assert canonical_tag(name) == canonical


@pytest.mark.parametrize(
    "name",
    [
        "", " ", "nchw ", "16c", "nChw", "nChw16", "nChw16C", "nChw16cc", "nchw16c", "nChw16w",
        "nChw1c", "nChw0c", "nChw08c", "nChw-8c", "nChw8c8", "nChw9999999c", "nchww", "aab", "bc",
        "abd", "nhw", "nchwz", "NCHW", "Nchw", "abcdefghijklm", "n\u00e7hw", "nchw\0", "oihwn",
        "A" + "1000000a" * 4, "A" + "2a" * 13, "ABc999999a999999b999999a999999b",
    ],
)  # fmt: skip
def test_what_is_no_tag(name):
    with pytest.raises(ValueError, match="^torch_blocked::format_tag: expected "):
        canonical_tag(name)


def test_error_sentence():
    message = (
        "torch_blocked::format_tag: expected upper case for exactly the dims that have an inner "
        'block, got "nchw16c"; use a oneDNN name such as nchw, nChw16c, OIhw16i16o or acdb'
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        canonical_tag("nchw16c")


def test_a_tag_is_a_string():
    with pytest.raises(TypeError, match="expected a string such as 'nChw16c', got 16"):
        canonical_tag(16)


@st.composite
def spelt_tags(draw):
    """(name in the letters of a domain, the same in agnostic letters)."""
    domain = draw(st.sampled_from([*DOMAINS, *("abcdefghijkl"[:n] for n in range(1, 13))]))
    order = draw(st.permutations(range(len(domain))))
    dims = st.integers(0, len(domain) - 1)
    inner = draw(st.lists(st.tuples(st.integers(2, 64), dims), max_size=4))
    blocked = {dim for _, dim in inner}

    def spell(letters):
        outer = "".join(letters[d].upper() if d in blocked else letters[d] for d in order)
        return outer + "".join(f"{size}{letters[dim]}" for size, dim in inner)

    return spell(domain), spell("abcdefghijkl")


@SETTINGS
@given(spelt_tags())
def test_domain_names_are_translated_by_rule(names):
    name, canonical = names
    assert canonical_tag(name) == canonical
    assert canonical_tag(canonical) == canonical


@SETTINGS
@given(st.one_of(st.text(max_size=12), st.text("abcdnchwoiABCDNCHWOI0123456789", max_size=9)))
def test_any_string_is_a_tag_or_a_value_error(name):
    try:
        canonical = canonical_tag(name)
    except ValueError:
        return
    assert canonical_tag(canonical) == canonical


@pytest.mark.parametrize(
    "dims, tag, physical",
    [
        ((2, 16, 5, 4), "nChw8c", (2, 2, 5, 4, 8)),
        ((2, 17, 5, 4), "nChw8c", (2, 3, 5, 4, 8)),
        ((2, 17, 5, 4), "nchw", (2, 17, 5, 4)),
        ((2, 17, 5, 4), "nhwc", (2, 5, 4, 17)),
        ((2, 17, 5, 4), "chwn", (17, 5, 4, 2)),
        ((2, 1, 4), "nCw16c", (2, 1, 4, 16)),
        ((0, 3, 4), "nCw16c", (0, 1, 4, 16)),
        ((2, 0, 4), "nCw16c", (2, 0, 4, 16)),
        ((20, 40, 3, 3), "OIhw4i16o4i", (2, 3, 3, 3, 4, 16, 4)),
        ((2, 3, 1, 5, 4), "nCdhw32c", (2, 1, 1, 5, 4, 32)),
    ],
)
def test_physical_shape(dims, tag, physical):
    assert physical_shape(dims, tag) == physical


@pytest.mark.parametrize(
    "dims, tag", [((2, 3), "nchw"), ((2, 3), "any"), ((2, 3), "undef"), ((2, -3), "nc")]
)
def test_physical_shape_refuses(dims, tag):
    with pytest.raises(ValueError, match="^torch_blocked::physical_shape: expected "):
        physical_shape(dims, tag)
